"""``--show quality``: what each way to reuse passages loses against full attention, on planted
facts and on text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from espnx.integrations.transformers.passages.passage_kv import PassageKV

from ..harness.registry import Say
from ..harness.result import Row, untimed
from ..kv.fleet import folder_in
from .compared import at_random, composite, partly_anew
from .intervals import mean_interval, share_interval
from .items import PASSAGE_TOKENS, PASSAGES, Item, Items
from .memory import computed
from .options import Opened, Options

FULL = "full"
#: System -> how a prompt is composed.
WAYS: Mapping[str, Mapping[str, Any]] = {
    FULL: {},
    "prefix": {"mode": "prefix"},
    "blocks": {},
    "repair-1": {"repair": 1},
    "repair-4": {"repair": 4},
    "repair-16": {"repair": 16},
    "blend-0.15": {"blend": 0.15},
    "blend-0.3": {"blend": 0.3},
}
#: What `blend` and rotation are held against, in memory: as many tokens as those of blend-0.15,
#: drawn at random; and no rotation.
RANDOM, COMPOSITE, _RANDOM_SHARE = "random-0.15", "composite", 0.15
SYSTEMS = (*WAYS, RANDOM, COMPOSITE)
#: Tokens to draw from, where a model has no held-out text.
_TEXT, _QUICK_TEXT = 120_000, 4_000
#: Rows that are kept at most: no item asks for those of another.
_LIBRARY = "1GiB"
#: After so many items it is said how far it has come.
_SAID = 10
#: Lossless: nothing but the order of sums may differ from full attention.
_LOSSLESS, _NLL_ROUNDING = ("prefix",), 1e-3


@dataclass
class Judged:
    """What a way made of the items, a number for each.

    Attributes:
        exact: greedy decoding gives the answer.
        nll: mean negative log-likelihood of a judged token. kl: mean divergence of its distribution
            from that of full attention.
        anew: the share of the passages' tokens that were computed anew at their place.
    """

    exact: list[bool] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    anew: list[float] = field(default_factory=list)


def show_quality(options: Options, opened: Opened, say: Say) -> list[Row]:
    """Rows of facts and of text, behind the prefix and without one."""
    items = Items(opened, options.seed, _QUICK_TEXT if options.quick else _TEXT)
    rows = list[Row]()
    for task, made in (("facts", items.facts), ("text", items.texts)):
        for has_prefix in (True, False):
            asked = list(made(options.quality))
            found = _judge(options, opened, asked, has_prefix, say)
            params = {
                "show": "quality",
                "model": opened.name,
                "dtype": "fp32",
                "task": task,
                "text": items.source,
                "prefix_tokens": 0 if not has_prefix else len(items.prefix),
                "passages": PASSAGES,
                "passage_tokens": PASSAGE_TOKENS,
                "questions": len(asked),
            }
            rows += [_row(params, name, found) for name in found]
            for row in rows[-len(found) :]:
                exact = f"exact {row.metrics['exact']:.3f}, " if task == "facts" else ""
                say(
                    f"    {task}, prefix of {params['prefix_tokens']}: {row.system}: {exact}nll "
                    f"{row.metrics['nll']:.3f}, KL {row.metrics['kl']:.4f}"
                )
    return rows


def _judge(
    options: Options, opened: Opened, items: list[Item], has_prefix: bool, say: Say
) -> dict[str, Judged]:
    prefix = items[0].prefix if has_prefix else items[0].prefix[:0]
    with (
        folder_in(options.path) as folder,
        PassageKV(opened.model, Path(folder), prefix=prefix, library_bytes=_LIBRARY) as kv,
    ):
        # the same behind a prefix and without one
        ways = {name: words for name, words in WAYS.items() if has_prefix or name not in _LOSSLESS}
        found = {name: Judged() for name in (*ways, RANDOM, COMPOSITE)}
        for number, item in enumerate(items, 1):
            rng = np.random.default_rng([options.seed, 3, number])
            whole, _ = _logits(opened.model, kv, prefix, item, None)
            _note(found[FULL], whole, whole, item.answer)
            for name, words in ways.items():
                if name != FULL:
                    logits, found_anew = _logits(opened.model, kv, prefix, item, words)
                    found[name].anew.append(found_anew)
                    _note(found[name], logits, whole, item.answer)
            for name, logits, found_anew in _compared(opened.model, prefix, item, rng):
                found[name].anew.append(found_anew)
                _note(found[name], logits, whole, item.answer)
            if number % _SAID == 0:
                say(f"    {number} of {len(items)}")
    return found


@torch.inference_mode()
def _logits(
    model: Any, kv: PassageKV, prefix: torch.Tensor, item: Item, words: Mapping[str, Any] | None
) -> tuple[torch.Tensor, float]:
    """(float64 [answer, vocabulary]: log-probabilities of each token of the answer, the ones before
    it being there; the share of the passages' tokens that were computed anew, of what is composed).
    `words`: of `compose`; None: full attention."""
    tail = torch.cat([item.asked, item.answer[:-1]])
    n = len(item.answer)
    with _opened(model, kv, prefix, item, words) as (before, cache):
        logits = model(
            input_ids=torch.cat([before, tail])[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=n,
        ).logits[0]
        anew = 0.0 if words is None else cache.reused["repaired"] / sum(cache.passages)
    return torch.as_tensor(logits.double().log_softmax(dim=-1)), anew


@torch.inference_mode()
def _compared(
    model: Any, prefix: torch.Tensor, item: Item, rng: np.random.Generator
) -> Iterator[tuple[str, torch.Tensor, float]]:
    """(way, and the same of it) of those that are computed in memory."""
    tail, n = torch.cat([item.asked, item.answer[:-1]]), len(item.answer)
    texts, parts = [prefix, *item.passages], computed(model, prefix, item.passages)
    chosen = at_random([len(each) for each in texts], _RANDOM_SHARE, rng)
    logits = partly_anew(model, texts, parts, chosen, tail, n)
    anew = float(chosen.sum()) / sum(map(len, item.passages))
    yield RANDOM, logits.double().log_softmax(dim=-1), anew
    logits = composite(model, prefix, parts, tail, n)
    yield COMPOSITE, logits.double().log_softmax(dim=-1), 0.0


@contextlib.contextmanager
def _opened(
    model: Any, kv: PassageKV, prefix: torch.Tensor, item: Item, words: Mapping[str, Any] | None
) -> Iterator[tuple[torch.Tensor, Any]]:
    """(tokens that the cache does not hold, the cache)."""
    if words is None:
        yield torch.cat([prefix, *item.passages]), DynamicCache(config=model.config)
        return
    with kv.compose(item.passages, **words) as cache:
        yield prefix[:0], cache


def _note(to: Judged, found: torch.Tensor, whole: torch.Tensor, answer: torch.Tensor) -> None:
    to.exact.append(bool((found.argmax(dim=-1) == answer).all()))
    to.nll.append(float(-found.gather(1, answer[:, None]).mean()))
    to.kl.append(float((whole.exp() * (whole - found)).sum(dim=-1).mean()))


def _row(params: Mapping[str, Any], name: str, all_found: Mapping[str, Judged]) -> Row:
    found, full = all_found[name], all_found[FULL]
    n = len(found.nll)
    more = np.array(found.nll) - np.array(full.nll)
    metrics = {"exact": float(np.mean(found.exact))}
    metrics["exact_low"], metrics["exact_high"] = share_interval(sum(found.exact), n)
    metrics["nll"] = float(np.mean(found.nll))
    for key, values in (("nll_more", more), ("kl", np.array(found.kl))):
        metrics[key] = float(values.mean())
        metrics[f"{key}_low"], metrics[f"{key}_high"] = mean_interval(values)
    if found.anew:
        metrics["anew"] = float(np.mean(found.anew))
    if params["task"] == "text":
        for key in ("exact", "exact_low", "exact_high"):
            del metrics[key]
    correct = all(np.isfinite(list(metrics.values())))
    if name in _LOSSLESS:
        correct = correct and float(np.abs(more).max()) <= _NLL_ROUNDING
    path = "memory" if name in (FULL, RANDOM, COMPOSITE) else "auto"
    return untimed("rag", params, name, path=path, correct=correct, metrics=metrics)
