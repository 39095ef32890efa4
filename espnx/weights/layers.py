"""The weights of a layer as pieces of files, how they lie in a buffer of I/O, and how many layers a
budget keeps in memory.

Pages of the file go to the buffer as they are (direct I/O copies nothing), and a weight that is
stored whole in its own dtype is a view of them. Only what must be put together from several tensors
(experts) or converted is copied, when its layer's turn comes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from .. import errors
from ..sizes import format_size
from .safetensors_files import StoredTensor

PAGE_BYTES = 4096
_GAP_BYTES = 16 * 1024  # between two tensors of a layer that one read may bridge


@dataclass(frozen=True)
class Piece:
    """A stored tensor and the element of the weight where it begins; it lies there without a
    gap."""

    source: StoredTensor
    begin: int


@dataclass(frozen=True)
class Weight:
    """A parameter and the stored tensors it consists of."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stored_bytes(self) -> int:
        return sum(piece.source.size_bytes for piece in self.pieces)

    @property
    def is_view(self) -> bool:
        """Whether the pages of the file hold it as it is."""
        only = self.pieces[0].source
        return (
            len(self.pieces) == 1
            and only.dtype == self.dtype
            and only.offset_bytes % self.dtype.itemsize == 0
        )

    @property
    def memory_bytes(self) -> int:
        """Bytes of a buffer of its own."""
        return _pages(self.pieces[0].source) + PAGE_BYTES if self.is_view else self.size_bytes


def _pages(tensor: StoredTensor) -> int:
    begin, end = tensor.offset_bytes, tensor.offset_bytes + tensor.size_bytes
    return -(-end // PAGE_BYTES) * PAGE_BYTES - begin // PAGE_BYTES * PAGE_BYTES


@dataclass(frozen=True)
class Extent:
    """Whole pages of a file and where they go in a buffer."""

    path: str
    offset_bytes: int
    size_bytes: int
    place_bytes: int


class LayerWeights:
    """What one layer consists of.

    Args:
        weights: of the layer.
    """

    def __init__(self, weights: Sequence[Weight]):
        self.weights = tuple(weights)

    @property
    def size_bytes(self) -> int:
        return sum(weight.size_bytes for weight in self.weights)

    @property
    def stored_bytes(self) -> int:
        """Bytes in the files, which are read each time."""
        return sum(weight.stored_bytes for weight in self.weights)

    @property
    def resident_bytes(self) -> int:
        """Bytes of memory that the layer takes where it stays there."""
        return sum(weight.memory_bytes for weight in self.weights)

    @cached_property
    def extents(self) -> tuple[Extent, ...]:
        """The pages to read, in order of files and offsets."""
        merged: list[tuple[str, int, int]] = []
        sources = [
            piece.source
            for weight in self.weights
            for piece in weight.pieces
            if piece.source.size_bytes
        ]
        for source in sorted(sources, key=lambda item: (item.path, item.offset_bytes)):
            begin = source.offset_bytes // PAGE_BYTES * PAGE_BYTES
            end = begin + _pages(source)
            if merged and merged[-1][0] == source.path and begin - merged[-1][2] <= _GAP_BYTES:
                merged[-1] = (source.path, merged[-1][1], max(end, merged[-1][2]))
            else:
                merged.append((source.path, begin, end))
        found, place = [], 0
        for path, begin, end in merged:
            found.append(Extent(path, begin, end - begin, place))
            place += end - begin
        return tuple(found)

    @property
    def buffer_bytes(self) -> int:
        """Size of the buffer that its pages are read into."""
        return sum(extent.size_bytes for extent in self.extents)

    @property
    def converted_bytes(self) -> int:
        """Bytes of the weights that are not views of that buffer."""
        return sum(weight.size_bytes for weight in self.weights if not weight.is_view)

    def place(self, source: StoredTensor) -> int:
        """The byte of the buffer at which a tensor begins."""
        for extent in self.extents:
            if (
                extent.path == source.path
                and 0 <= source.offset_bytes - extent.offset_bytes < extent.size_bytes
            ):
                return extent.place_bytes + source.offset_bytes - extent.offset_bytes
        return 0  # of an empty tensor

    def tensors(self, buffer: torch.Tensor, converted: torch.Tensor) -> dict[str, torch.Tensor]:
        """The weights by name: views of the buffer, and of `converted`, which is filled here."""
        found, at = {}, 0
        for weight in self.weights:
            if weight.is_view:
                begin = self.place(weight.pieces[0].source)
                found[weight.name] = (
                    buffer[begin : begin + weight.size_bytes].view(weight.dtype).view(weight.shape)
                )
                continue
            flat = converted[at : at + weight.size_bytes].view(weight.dtype)
            at += -(-weight.size_bytes // 64) * 64
            for piece in weight.pieces:
                begin = self.place(piece.source)
                put(
                    flat,
                    piece.begin,
                    buffer[begin : begin + piece.source.size_bytes],
                    piece.source.dtype,
                )
            found[weight.name] = flat.view(weight.shape)
        return found


def put(flat: torch.Tensor, begin: int, data: torch.Tensor, dtype: torch.dtype) -> None:
    """Copies bytes that hold numbers of a dtype into a weight, from element `begin` on, converting
    them."""
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    values = data.view(dtype)
    flat[begin : begin + values.numel()].copy_(values)


@dataclass(frozen=True)
class Share:
    """What a budget buys.

    Attributes:
        resident: numbers of the layers that stay in memory.
        streamed: the others, in order.
        slots: buffers that streamed layers are read into.
        slot_bytes: of each.
        converted_bytes: of the weights of one layer that are put together or converted.
        total_bytes: of everything: other weights, resident layers, buffers.
        least_bytes: the smallest budget that works.
    """

    resident: tuple[int, ...]
    streamed: tuple[int, ...]
    slots: int
    slot_bytes: int
    converted_bytes: int
    total_bytes: int
    least_bytes: int


def share(
    other_bytes: int, layers: Sequence[LayerWeights], budget_bytes: int | None, read_ahead: int = 1
) -> Share:
    """Keeps as many layers in memory as a budget allows, evenly among the others, so that reads go
    on while they compute.

    Args:
        other_bytes: of what stays in memory anyway: embeddings, norms, head.
        budget_bytes: None for no limit.
        read_ahead: layers to be read while one computes.

    Raises:
        InvalidInputError: the budget is too small; says the least that works.
    """
    count = len(layers)
    sizes = [layer.resident_bytes for layer in layers]
    every = Share(tuple(range(count)), (), 0, 0, 0, other_bytes + sum(sizes), 0)
    slots = read_ahead + 1

    def cost(kept: int) -> Share:
        resident = _spread(kept, count)
        streamed = [number for number in range(count) if number not in resident]
        slot = max(layers[number].buffer_bytes for number in streamed) + PAGE_BYTES
        converted = max(_padded(layers[number]) for number in streamed)
        total = other_bytes + sum(sizes[number] for number in resident) + slots * slot + converted
        return Share(tuple(sorted(resident)), tuple(streamed), slots, slot, converted, total, 0)

    plans = [every, *(cost(kept) for kept in range(count - slots - 1, -1, -1))]
    least = min(plan.total_bytes for plan in plans)
    for plan in plans:  # the most resident layers first
        if budget_bytes is None or plan.total_bytes <= budget_bytes:
            return replace(plan, least_bytes=least)
    raise errors.InvalidInputError(
        "memory budget too small for this model",
        got=format_size(budget_bytes or 0),
        expected=(
            f"at least {least} bytes ({format_size(least)}): {format_size(other_bytes)} beside "
            f"layers, {slots} layers' buffers"
        ),
        fix=f'memory="{-(-least // 2**20)}MiB" or more',
    )


def _padded(layer: LayerWeights) -> int:
    return sum(-(-weight.size_bytes // 64) * 64 for weight in layer.weights if not weight.is_view)


def _spread(kept: int, count: int) -> set[int]:
    """`kept` of `count` numbers at even distances."""
    return {(2 * i + 1) * count // (2 * kept) for i in range(kept)}
