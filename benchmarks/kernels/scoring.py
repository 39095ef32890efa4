"""MaxSim in every format, beside torch.compile, flash-maxsim and late-interaction-kernels."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from espnx.ops import maxsim, token_format
from espnx.ops.maxsim.cuda import launch_scores

from .documents import QUERY_TOKENS, TOKENS, Documents, Shape
from .point import KernelSystem, Point, Setting, Systems, fastest
from .timing import Call

COMPILED = "torch-compile"
FLASH, LATE = "flash-maxsim", "late-interaction-kernels"
_MODE = "max-autotune-no-cudagraphs"
_LONG = ("fp16", "bf16", "int8")  # formats of rows of more than 128 values


def points() -> list[Point]:
    shapes = [
        *(Shape(fmt, 128, False) for fmt in ("fp16", "bf16", "int8", "bit1", "residual2", "fp32")),
        *(Shape(fmt, 128, True) for fmt in ("fp16", "bf16", "int8", "bit1", "residual2", "fp32")),
        *(Shape(fmt, 384, is_ragged) for is_ragged in (False, True) for fmt in _LONG),
        *(Shape(fmt, 768, False) for fmt in ("bf16", "int8")),
        Shape("int8", 48, False),
    ]
    return [_point(shape) for shape in shapes]


def _point(shape: Shape) -> Point:
    lengths = f"1 to {2 * TOKENS - 1}" if shape.is_ragged else str(TOKENS)
    return Point(
        "maxsim",
        f"MaxSim {shape.fmt} d {shape.d}, {lengths} tokens",
        {
            "format": shape.fmt,
            "d": shape.d,
            "ragged": shape.is_ragged,
            "tokens": TOKENS,
            "query_tokens": QUERY_TOKENS,
        },
        shape.flops,
        "bf16" if shape.fmt == "bf16" else "fp16",  # fp32 rows go in parts of fp16
        lambda setting, peers: make(shape, setting, peers),
        _peers(shape),
    )


def _peers(shape: Shape) -> tuple[str, ...]:
    if shape.fmt not in ("fp16", "bf16"):
        return ()  # none has these rows, or multiplies fp32 as such
    if shape.d != 128 or shape.fmt == "bf16":
        return (FLASH, LATE) if shape.fmt == "fp16" else (LATE,)
    return (COMPILED, FLASH, LATE)


def make(shape: Shape, setting: Setting, peers: frozenset[str]) -> Systems:
    documents = Documents(shape, setting)
    size = documents.token_bytes

    def whole(i: int) -> torch.Tensor:
        return maxsim(
            documents.query,
            documents.buffers[i],
            documents.offsets,
            documents.counts,
            shape.fmt,
            codebook=documents.codebook,
        )

    ours = KernelSystem(
        *("espnx", "espnx", whole, documents.check, setting.clock, size, size),
        work=_work(documents) if setting.device.type == "cuda" else None,
        is_ours=True,
    )
    systems = Systems([ours])
    for name in _peers(shape):
        if name in peers:
            _add_peer(name, documents, setting, systems)
    return systems


def _work(documents: Documents) -> Call:
    """What the op does on the device, tables there: launches, and zeros for what they count in."""
    device, book = documents.device, documents.codebook
    offsets, counts = documents.offsets.to(device), documents.counts.to(device)
    tokens_max = int(documents.counts.max())
    unused = documents.query.new_empty(1)
    tables = (unused, unused) if book is None else (book.centroids, book.bucket_weights)
    token = token_format(documents.shape.fmt)

    def work(i: int) -> torch.Tensor:
        scores = torch.empty(len(counts), dtype=torch.float32, device=device)
        launch_scores(
            *(documents.query, documents.buffers[i], offsets, counts, scores, token, tables),
            tokens_max=tokens_max,
            is_aligned=True,
            takes_compiled=True,
        )
        return scores

    return work


def _add_peer(name: str, documents: Documents, setting: Setting, systems: Systems) -> None:
    package = "torch" if name == COMPILED else name
    try:
        version(package)
    except PackageNotFoundError:
        systems.missing[name] = "not installed"
        return
    calls: Callable[[Documents, int], list[tuple[str, Call, int]]] = {
        COMPILED: _compiled_calls,
        FLASH: _flash_calls,
        LATE: _late_calls,
    }[name]
    candidates = [
        KernelSystem(
            *(f"{name}{suffix}", name, call, documents.check_peer, setting.clock),
            bytes_asked=documents.token_bytes,
            bytes_moved=moved,
        )
        for suffix, call, moved in calls(documents, setting.clock.sets)
    ]
    if setting.only_ours:  # to be compiled, every one
        systems.peers += candidates
    else:
        systems.peers += fastest(candidates, systems.missing, name)


def _packed(documents: Documents, sets: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Tokens of each set, document after document, and the bounds of documents in them, int32."""
    ends = documents.counts.cumsum(0)
    bounds = torch.cat([ends.new_zeros(1), ends]).to(documents.device, torch.int32)
    return [documents.stored(i) for i in range(sets)], bounds


def _padded(documents: Documents, sets: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Tokens of each set [documents, longest, d] with zeros behind a document's end, and which of
    them are tokens."""
    longest = int(documents.counts.max())
    counts = documents.counts.to(documents.device)
    is_token = torch.arange(longest, device=documents.device) < counts[:, None]
    found = []
    for i in range(sets):
        rows = documents.stored(i)
        if documents.shape.is_ragged:
            whole = rows.new_zeros(*is_token.shape, rows.shape[-1])
            whole[is_token] = rows
            found.append(whole)
        else:
            found.append(rows.view(*is_token.shape, -1))
    return found, is_token


def _compiled_calls(documents: Documents, sets: int) -> list[tuple[str, Call, int]]:
    """Padded documents: similarities, masked, the largest of each query token, their sum."""
    padded, is_token = _padded(documents, sets)
    query = documents.query.to(padded[0].dtype).T.contiguous()
    hidden = None if not documents.shape.is_ragged else ~is_token[:, :, None]

    def score(tokens: torch.Tensor) -> torch.Tensor:
        similarities = tokens @ query
        if hidden is not None:
            similarities = similarities.masked_fill(hidden, -torch.inf)
        return similarities.amax(1).float().sum(-1)

    plain: Any = torch.compile(score, dynamic=False)
    tuned: Any = torch.compile(score, dynamic=False, mode=_MODE)
    moved = padded[0].numel() * padded[0].itemsize
    return [("", lambda i: plain(padded[i]), moved), ("-tuned", lambda i: tuned(padded[i]), moved)]


def _flash_calls(documents: Documents, sets: int) -> list[tuple[str, Call, int]]:
    """Packed documents; those of one length as padded ones, without padding."""
    from flash_maxsim import flash_maxsim, flash_maxsim_packed

    packed, bounds = _packed(documents, sets)
    query, moved = documents.query.to(packed[0].dtype), documents.token_bytes
    if documents.shape.is_ragged:
        return [("-packed", lambda i: flash_maxsim_packed(query, packed[i], bounds), moved)]
    shape = (len(documents.counts), TOKENS, documents.shape.d)
    return [("-padded", lambda i: flash_maxsim(query, packed[i].view(shape)), moved)]


def _late_calls(documents: Documents, sets: int) -> list[tuple[str, Call, int]]:
    from late_interaction_kernels import maxsim as late_maxsim
    from late_interaction_kernels import maxsim_varlen

    packed, bounds = _packed(documents, sets)
    query, moved = documents.query.to(packed[0].dtype), documents.token_bytes
    whole = torch.tensor([0, len(query)], dtype=torch.int32, device=query.device)
    longest = int(documents.counts.max())

    def ragged(i: int) -> Any:
        return maxsim_varlen(query, packed[i], whole, bounds, len(query), longest)

    if documents.shape.is_ragged:
        return [("-varlen", ragged, moved)]
    shape = (len(documents.counts), TOKENS, documents.shape.d)
    return [("-dense", lambda i: late_maxsim(query[None], packed[i].view(shape)), moved)]
