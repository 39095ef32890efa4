"""Everything that `espnx device verify` asks of a device: rows, faults, a generation and a search through it. Each check returns why the
device does not take part, or None where it holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from ..device.conformance.fault_checks import FAULT_CHECKS
from ..device.conformance.requirement import require
from ..device.conformance.row_checks import CHECKS, Open
from ..device.near_storage import NearStorageDevice

Check = Callable[[NearStorageDevice], str | None]

#: The tokens of the generation are each ahead of the second by so much, in logits; what a device rounds moves them by thousandths.
_MARGIN = 0.1
_AS_ASKED: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


def checks_of(device: NearStorageDevice) -> Iterator[tuple[str, Check]]:
    """(name, check) of everything."""
    has_rows = type(device).open_rows is not NearStorageDevice.open_rows
    has_records = type(device).open_records is not NearStorageDevice.open_records
    for check in CHECKS:
        yield f"rows: {_words(check)}", _of_rows(check) if has_rows else _keeps_none("rows of KV caches")
    for fault in FAULT_CHECKS:
        yield f"faults: {_words(fault)}", fault if has_rows else _keeps_none("rows of KV caches")
    yield "a generation", generates_the_same if has_rows else _keeps_none("rows of KV caches")
    yield "a search", searches_the_same if has_records else _keeps_none("embedding records")


def _words(check: Callable[..., Any]) -> str:
    return check.__name__.replace("_", " ")


def _of_rows(check: Callable[[Open], None]) -> Check:
    return lambda device: check(device.open_rows)


def _keeps_none(what: str) -> Check:
    return lambda device: f"it keeps no {what}"


def generates_the_same(device: NearStorageDevice) -> str | None:
    """A small random model writes the tokens with K and V on the device that it writes with them in memory."""
    from .transformers.cache import KVCache
    from .transformers.enable import enable_kv_cache

    head_dim = (device.capabilities.attends_widths or (64,))[0]
    model, prompt, expected = next(found for found in map(partial(_sure_model, head_dim), range(1000)) if found is not None)
    with KVCache(
        model.config, device=device, format=(device.capabilities.attends_formats or (None,))[0], spill_interval=8, x_rows=0
    ) as cache:
        found = enable_kv_cache(model).generate(prompt, past_key_values=cache, **_AS_ASKED, attention_mask=torch.ones_like(prompt))
        on_host = cache.stats()["layers_attended_on_host"]
    require(found.tolist() == expected.tolist(), "tokens", got=found.tolist(), expected=expected.tolist())
    require(on_host == 0, "layers that the device says it attends to", got=f"{on_host} attended to on the host", expected=0)
    return None


def _sure_model(head_dim: int, seed: int) -> tuple[Any, torch.Tensor, torch.Tensor] | None:
    """(a model, a prompt, what it writes) where each token is far ahead of the second; None where one is not."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=head_dim, max_position_embeddings=512, initializer_range=0.25, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    prompt = torch.randint(1, 97, (1, 90))
    asked = {**_AS_ASKED, "attention_mask": torch.ones_like(prompt), "output_logits": True, "return_dict_in_generate": True}
    written = model.generate(prompt, **asked)
    ahead = min(float(logits.topk(2).values.diff().abs()) for logits in written.logits)
    return (model, prompt, written.sequences) if ahead > _MARGIN else None


def searches_the_same(device: NearStorageDevice) -> str | None:
    """An index in the device's directory gives the hits that the plain SSD gives."""
    from ..retrieval.build.builder import build
    from ..retrieval.build.documents import Document
    from ..retrieval.encoder import Encoded
    from ..retrieval.search.index import Index

    rng = np.random.default_rng(4)

    def some(count: int, name: str) -> list[Document]:
        return [
            Document(f"{name}{i}", f"text {i}", Encoded(_normal(rng, 16), _normal(rng, int(rng.integers(0, 20)), 8))) for i in range(count)
        ]

    path = os.path.join(device.path, "verify.index")
    build(path, some(300, "d"), dims=(16, 8), first_stage_code="flat", nlist=4, coarse="int8", replace=True)
    queries = [each.vectors for each in some(5, "q") if each.vectors is not None]
    with Index(path, None) as plain, Index(path, None, device=device) as index:
        every: list[dict[str, Any]] = [{}, {"rerank": 20}, {"cascade": 20}]
        for options in every:
            wanted, found = ([result.hits for result in each.search(queries, k=30, candidates=80, **options)] for each in (plain, index))
            require(found == wanted, f"hits of a search with {options or 'no options'}", got=found, expected=wanted)
    return None


def _normal(rng: np.random.Generator, *size: int) -> torch.Tensor:
    return torch.from_numpy(rng.normal(size=size).astype(np.float32))
