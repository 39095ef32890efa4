"""Perplexity and recall of a trained model through caches: every system is fed the same tokens,
piece by piece."""

from __future__ import annotations

import contextlib
import math
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from espnx.errors import InvalidInputError
from espnx.models import model_folder

from ..harness.arguments import words
from ..harness.registry import Say
from ..harness.result import Row
from ..kv.systems.models import DTYPES, ROUNDOFF, load_model
from .recall import DISTANCES, HeldOut, question

SYSTEMS = ("dynamic", "espnx", "espnx-int8")
_LAST_PIECE = 64  # of a question: longer than an answer, shorter than the least distance
_SCORE = 16  # of a token that is found among a million: e^16 is nine
_ROOM = 64  # tokens that the lines of a question take, at most


@dataclass(frozen=True)
class Options:
    """The options of a run, read and checked."""

    model: Path
    path: Path
    dtypes: list[str]
    windows: int
    questions: int
    batch: int
    piece: int
    seed: int


def read_options(args: Namespace) -> Options:
    """Raises InvalidInputError."""
    dtypes = words(args.dtype)
    if not dtypes or any(word not in DTYPES for word in dtypes):
        raise InvalidInputError("--dtype", got=repr(args.dtype), expected=", ".join(DTYPES))
    for name in ("windows", "questions", "batch", "piece"):
        if getattr(args, name) < 1:
            raise InvalidInputError(f"--{name}", got=getattr(args, name), expected="at least 1")
    model = Path(model_folder(args.model))
    if not (model / "config.json").is_file():
        raise InvalidInputError(
            "--model",
            got=f"no config.json in {model}",
            expected="a model's folder",
            fix=f"python scripts/train_demo_model.py --out {model}",
        )
    windows, questions = (2, 4) if args.quick else (args.windows, args.questions)
    return Options(
        model, Path(args.path), dtypes, windows, questions, args.batch, args.piece, args.seed
    )


@dataclass(frozen=True)
class Work:
    """Sequences that are fed together.

    Attributes:
        ids: int64 [sequences, n + 1].
        ends: of the pieces; the last is n.
        counted: tokens at the end of each sequence that are judged.
        distance: of a question's answer; None: text.
    """

    ids: torch.Tensor
    ends: list[int]
    counted: list[int]
    distance: int | None = None


@dataclass
class Found:
    """What a system made of all the work; a number for each judged token, in order."""

    losses: list[torch.Tensor] = field(default_factory=list)
    tokens: list[torch.Tensor] = field(default_factory=list)  # the likeliest
    margins: list[torch.Tensor] = field(default_factory=list)  # by which it is the likeliest
    deviations: list[float] = field(default_factory=list)  # of the logits
    right: dict[int, list[bool]] = field(default_factory=dict)  # questions, by distance
    bytes_per_token: float = 0.0
    stored: list[float] = field(default_factory=list)
    bytes_asked: int = 0
    bytes_moved: int = 0
    seconds: float = 0.0
    path: str = "memory"


def plan(held_out: HeldOut, context: int, options: Options) -> list[Work]:
    """The same for every system."""
    count = min(options.windows, (len(held_out.tokens) - 1) // context)
    if count < 1:
        raise InvalidInputError(
            "held-out text",
            got=f"{len(held_out.tokens)} tokens",
            expected=f"more than {context}, the context",
        )
    text = torch.from_numpy(
        np.stack(
            [held_out.tokens[i * context : (i + 1) * context + 1] for i in range(count)]
        ).astype(np.int64)
    )
    ends = [*range(options.piece, context, options.piece), context]
    work = [
        Work(part, ends, [context - context // 2] * len(part)) for part in text.split(options.batch)
    ]
    for distance in (d for d in DISTANCES if _LAST_PIECE < d <= context - _ROOM):
        # What is asked for ends where the first half of the context does: int8 rows are stored in
        # long blocks, and only whole ones.
        length = min(context, context // 2 - 1 + distance)
        rng = np.random.default_rng([options.seed, distance])
        asked = [question(held_out, rng, length, distance) for _ in range(options.questions)]
        ends = [
            *range(4 * _LAST_PIECE, length - _LAST_PIECE, 4 * _LAST_PIECE),
            length - _LAST_PIECE,
            length,
        ]
        for begin in range(0, len(asked), options.batch):
            ids, counts = zip(*asked[begin : begin + options.batch], strict=True)
            work.append(Work(torch.tensor(ids), ends, list(counts), distance))
    return work


@torch.inference_mode()
def feed(model: Any, cache: Any, work: Work, found: Found) -> None:
    """One batch through an empty cache. All rows that can be on SSD are there before the next piece
    comes."""
    store = getattr(cache, "store", None)
    first, width = work.ids.shape[1] - 1 - max(work.counted), max(work.counted)
    kept: list[torch.Tensor] = []
    begin = 0
    for end in work.ends:
        logits = model(
            input_ids=work.ids[:, begin:end], past_key_values=cache, use_cache=True
        ).logits
        if end > first:
            kept.append(logits[:, max(0, first - begin) :].float())
            if begin and store is not None:
                found.stored.append(
                    sum(rows.stored / rows.count for rows in store.rows.every)
                    / len(store.rows.every)
                )
        if store is not None:
            store.striped.flush()
        begin = end
    logits, targets = torch.cat(kept, dim=1), work.ids[:, -width:]
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(
        targets
    )
    top = logits.topk(2)
    found.deviations.append(float(logits.std(-1).max()))
    for i, count in enumerate(work.counted):
        found.losses.append(losses[i, -count:])
        found.tokens.append(top.indices[i, -count:, 0])
        found.margins.append(top.values[i, -count:, 0] - top.values[i, -count:, 1])
        if work.distance is not None:
            found.right.setdefault(work.distance, []).append(
                bool((found.tokens[-1] == targets[i, -count:]).all())
            )


@contextlib.contextmanager
def opened(system: str, config: Any, path: Path, found: Found) -> Iterator[Any]:
    """An empty cache; what it did is added to `found`."""
    from transformers import DynamicCache

    from espnx.integrations.transformers.cache import KVCache

    if system == "dynamic":
        memory = DynamicCache(config=config)
        yield memory
        layers: list[Any] = list(memory.layers)
        found.bytes_per_token = sum(
            part.nbytes / (part.shape[0] * part.shape[2])
            for one in layers
            for part in (one.keys, one.values)
        )
        return
    with KVCache(
        config, path, x_rows=0, format="int8" if system == "espnx-int8" else None
    ) as cache:
        yield cache
        stats, every = cache.stats(), cache.store.rows.every
        found.bytes_per_token = sum(
            rows.n_heads * rows.layout.block_bytes / rows.layout.block_rows for rows in every
        )
        found.bytes_asked += stats["bytes_asked"]
        found.bytes_moved += stats["bytes_moved"]
        found.path = stats["effective_path"]


def tolerance(dtype: str, config: Any, deviation: float) -> float:
    """How far two right logits may lie apart, five deviations of independent errors.

    A layer rounds about twelve times to its dtype (as in `kv.models.logit_tolerance`). Its
    attention computes in single precision, whatever the dtype: it adds up the context in another
    order, in sixteen or more sums side by side, and rounds scores, q's and k's share of them; the
    exponential makes that an error of a weight as many times larger as the score is.
    """
    attention = config.max_position_embeddings / 16 + 2 * _SCORE**2
    return (
        5
        * deviation
        * math.sqrt(
            config.num_hidden_layers
            * (12 * ROUNDOFF[dtype] ** 2 + attention * ROUNDOFF["fp32"] ** 2)
        )
    )


def same(found: Found, reference: Found, allowed: float) -> bool:
    """Whether all losses are, and all likeliest tokens but those whose lead is within rounding. A
    loss moves by at most twice as much as the logits: once for the token's own, once for the
    normalizer."""
    ours, theirs = torch.cat(found.losses), torch.cat(reference.losses)
    differ = torch.cat(found.tokens) != torch.cat(reference.tokens)
    is_close = bool(((ours - theirs).abs() <= 2 * allowed).all())
    return is_close and not bool((differ & (torch.cat(reference.margins) > 2 * allowed)).any())


def measure(options: Options, say: Say) -> list[Row]:
    """The rows of every dtype. Raises InvalidInputError, FormatError."""
    from espnx.integrations.transformers.enable import enable_kv_cache

    held_out = HeldOut.load(options.model)
    rows: list[Row] = []
    for dtype in options.dtypes:
        model = load_model(options.model, dtype)
        work = plan(held_out, model.config.max_position_embeddings, options)
        results: dict[str, Found] = {}
        for system in SYSTEMS:
            if system != "dynamic":  # which is transformers alone
                enable_kv_cache(model)
            found = results[system] = Found()
            begun = time.perf_counter()
            for part in work:
                with opened(system, model.config, options.path, found) as cache:
                    feed(model, cache, part, found)
            found.seconds = time.perf_counter() - begun
            rows.append(_row(options, dtype, system, work, results, model.config))
            metrics = rows[-1].metrics
            recalls = ", ".join(
                f"{metrics[f'recall_{distance}']:.0%} at {distance}" for distance in found.right
            )
            say(
                f"{dtype} {system}: perplexity {metrics['perplexity']:.4f}, recall {recalls} "
                f"({found.seconds:.0f} s)"
            )
            if not rows[-1].correct:
                say(
                    f"WRONG RESULT of {system}: losses differ by up to "
                    f"{metrics['loss_difference_max']:.3g}"
                )
    return rows


def _row(
    options: Options,
    dtype: str,
    system: str,
    work: list[Work],
    results: dict[str, Found],
    config: Any,
) -> Row:
    found, reference = results[system], results["dynamic"]
    losses = torch.cat(found.losses)
    windows = sum(len(part.ids) for part in work if part.distance is None)
    allowed = tolerance(dtype, config, max(reference.deviations))
    is_lossy = system == "espnx-int8"
    metrics = {
        "perplexity": math.exp(float(torch.cat(found.losses[:windows]).double().mean())),
        **{
            f"recall_{distance}": sum(right) / len(right) for distance, right in found.right.items()
        },
        "bytes_per_token": found.bytes_per_token,
        "stored_share": sum(found.stored) / len(found.stored) if found.stored else 0.0,
        "loss_difference_max": float((losses - torch.cat(reference.losses)).abs().max()),
        "other_tokens_share": float(
            (torch.cat(found.tokens) != torch.cat(reference.tokens)).double().mean()
        ),
        "loss_difference_allowed": 2 * allowed,
    }
    params = {
        "model": options.model.resolve().name,
        "dtype": dtype,
        "context": config.max_position_embeddings,
        "windows": windows,
        "questions": options.questions,
        "piece": options.piece,
        "lossy": is_lossy,
    }
    return Row(
        case="kv-quality",
        params=params,
        system=system,
        kind="measured",
        requested_path="auto" if system != "dynamic" else "memory",
        effective_path=found.path,
        cache="warm" if found.path == "memory" or "buffered" in found.path else "cold",
        n=1,
        median_s=found.seconds,
        p99_s=found.seconds,
        iqr_s=0.0,
        bytes_asked=found.bytes_asked,
        bytes_moved=found.bytes_moved,
        correct=bool(losses.isfinite().all()) and (is_lossy or same(found, reference, allowed)),
        metrics=metrics,
    )
