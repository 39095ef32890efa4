"""Everything that `espnx device verify` asks of a device, verb by verb, with a generation and a
search through it."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from ..device.conformance import cluster_checks, graph_checks, record_checks, row_checks
from ..device.conformance.requirement import Found, require
from ..device.conformance.soak import soak
from ..device.conformance.verify import Check
from ..device.kinds import CLUSTERS, GRAPHS, KINDS, POSTINGS, RECORDS, ROWS, PartKind
from ..device.near_storage import NearStorageDevice
from ..graph.devices.walks import WALKS
from . import posting_checks, walk_checks

#: The tokens of the generation are each ahead of the second by so much, in logits; what a device
#: rounds moves them by thousandths.
_MARGIN = 0.1
_AS_ASKED: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
_LIVES_EVERY_S = 1.0

_Plain = Callable[[NearStorageDevice], Found | None]


def checks_of(device: NearStorageDevice, soak_s: float) -> Iterator[tuple[str, Check]]:
    """(name, check) of everything; of a kind of parts that a device does not offer, a check that
    says so."""
    for kind in dict.fromkeys((*KINDS, WALKS, *device.kinds)):
        if not device.offers(kind):
            yield kind.name, _told_nothing(_keeps_none(f"it keeps no {kind.keeps}"))
            continue
        if why := device.refuses(kind):
            yield kind.name, _told_nothing(_keeps_none(why))
            continue
        for what, check in (kind.checks or _CHECKS[kind]).items():
            yield f"{kind.name}: {what}", _told_nothing(check)
        if through := _THROUGH.get(kind):
            yield through[0], _told_nothing(through[1])
        if kind is ROWS and soak_s:
            yield "rows: a soak", partial(_soaks, soak_s)


def _told_nothing(check: _Plain) -> Check:
    return lambda device, lives: check(device)


def _keeps_none(why: str) -> _Plain:
    return lambda device: Found("not offered", why)


def _on_rows(check: Callable[[Callable[..., Any]], None]) -> _Plain:
    def run(device: NearStorageDevice) -> None:
        check(device.open_rows)

    run.__name__ = check.__name__
    return run


def _soaks(seconds: float, device: NearStorageDevice, lives: Callable[[], None]) -> Found:
    last = time.monotonic()

    def count(made: Counter[str]) -> None:
        nonlocal last
        if time.monotonic() - last > _LIVES_EVERY_S:
            last = time.monotonic()
            lives()

    made = soak(device.open_rows, seconds=seconds, said=count)
    return Found(
        "ok",
        f"{made.total():,} calls: "
        + ", ".join(f"{count:,} {name}" for name, count in made.most_common()),
    )


def generates_the_same(device: NearStorageDevice) -> None:
    """A small random model writes the tokens with K and V on the device that it writes with them in
    memory."""
    from .transformers.cache import KVCache
    from .transformers.enable import enable_kv_cache

    head_dim = (device.capabilities.attends_widths or (64,))[0]
    model, prompt, expected = next(
        found for found in map(partial(_sure_model, head_dim), range(1000)) if found is not None
    )
    with KVCache(
        model.config,
        device=device,
        format=(device.capabilities.attends_formats or (None,))[0],
        spill_interval=8,
        x_rows=0,
    ) as cache:
        found = enable_kv_cache(model).generate(
            prompt, past_key_values=cache, **_AS_ASKED, attention_mask=torch.ones_like(prompt)
        )
        on_host = cache.stats()["layers_attended_on_host"]
    require(
        found.tolist() == expected.tolist(),
        "tokens",
        got=found.tolist(),
        expected=expected.tolist(),
    )
    if device.capabilities.attends_widths != ():
        require(
            on_host == 0,
            "layers that the device says it attends to",
            got=f"{on_host} attended to on the host",
            expected=0,
        )


def _sure_model(head_dim: int, seed: int) -> tuple[Any, torch.Tensor, torch.Tensor] | None:
    """(a model, a prompt, what it writes) where each token is far ahead of the second; None where
    one is not."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=512,
        initializer_range=0.25,
        pad_token_id=0,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    prompt = torch.randint(1, 97, (1, 90))
    asked = {
        **_AS_ASKED,
        "attention_mask": torch.ones_like(prompt),
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    written = model.generate(prompt, **asked)
    ahead = min(float(logits.topk(2).values.diff().abs()) for logits in written.logits)
    return (model, prompt, written.sequences) if ahead > _MARGIN else None


def searches_the_same(device: NearStorageDevice) -> None:
    """An index in the device's directory gives the hits that the plain SSD gives."""
    from ..retrieval.build.api import build
    from ..retrieval.build.documents import Document
    from ..retrieval.encoder import Encoded
    from ..retrieval.search.index import Index

    rng = np.random.default_rng(4)

    def some(count: int, name: str) -> list[Document]:
        return [
            Document(
                f"{name}{i}",
                f"text {i}",
                Encoded(_normal(rng, 16), _normal(rng, int(rng.integers(0, 20)), 8)),
            )
            for i in range(count)
        ]

    path = os.path.join(device.path, "verify.index")
    build(
        path,
        some(300, "d"),
        dims=(16, 8),
        first_stage_code="flat",
        nlist=4,
        coarse="int8",
        replace=True,
    )
    queries = [each.vectors for each in some(5, "q") if each.vectors is not None]
    with Index(path, None) as plain, Index(path, None, device=device) as index:
        every: list[dict[str, Any]] = [{}, {"rerank": 20}, {"cascade": 20}]
        for options in every:
            wanted, found = (
                [result.hits for result in each.search(queries, k=30, candidates=80, **options)]
                for each in (plain, index)
            )
            require(
                found == wanted,
                f"hits of a search with {options or 'no options'}",
                got=found,
                expected=wanted,
            )


def _normal(rng: np.random.Generator, *size: int) -> torch.Tensor:
    return torch.from_numpy(rng.normal(size=size).astype(np.float32))


def _named(*checks: _Plain) -> dict[str, _Plain]:
    """The checks by their names in words."""
    return {check.__name__.replace("_", " "): check for check in checks}


#: Of the kinds that every device may have; others bring their own (`PartKind.checks`).
_CHECKS: dict[PartKind, dict[str, _Plain]] = {
    ROWS: _named(*map(_on_rows, row_checks.CHECKS)) | row_checks.FAULT_CHECKS,
    RECORDS: _named(*record_checks.CHECKS) | record_checks.FAULT_CHECKS,
    CLUSTERS: _named(*cluster_checks.CHECKS) | cluster_checks.FAULT_CHECKS,
    GRAPHS: _named(*graph_checks.CHECKS) | graph_checks.FAULT_CHECKS,
    POSTINGS: _named(*posting_checks.CHECKS) | posting_checks.FAULT_CHECKS,
    WALKS: _named(*walk_checks.CHECKS),
}
#: Through what uses such parts.
_THROUGH: dict[PartKind, tuple[str, _Plain]] = {
    ROWS: ("a generation", generates_the_same),
    RECORDS: ("a search", searches_the_same),
}
