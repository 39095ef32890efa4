"""The tables of numbers that ops are told: on the host, where every entry is looked at once, and on
the device, whose kernels read them. Those that lie on the other side go there together, by one
copy."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch

from ..errors import InvalidInputError
from ..streams import streams_of
from ._native import load_extension

ALIGNMENT_BYTES = 16  # of what is copied together; csrc/bindings/ops.cpp has the same one


def on_host(*tables: torch.Tensor) -> list[torch.Tensor]:
    """Tables of one dtype as contiguous ones of the host. For those of a device it waits, once;
    those of the host are not copied unless they are strided."""
    found = [_plain(each) for each in tables]
    far = [i for i, each in enumerate(found) if each.device.type != "cpu"]
    if far:
        flat = [found[i].view(-1) for i in far]
        device, sizes = flat[0].device, [len(each) for each in flat]
        there = flat[0] if len(flat) == 1 else torch.cat(flat)
        here = _host_memory(there.nbytes, device).view(there.dtype)
        here.copy_(there)
        for i, each in zip(far, here.split(sizes), strict=True):
            found[i] = each.view(found[i].shape)
    return found


def on_device(tables: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Contiguous tables on a device: those that lie there as they are, those of the host by one
    copy, for which nobody waits."""
    far = [i for i, each in enumerate(tables) if each.device != device]
    if not far:
        return [each.contiguous() for each in tables]
    found = list(tables)
    near = [i for i in far if tables[i].device.type == "cpu"]
    for i, each in zip(near, copied([tables[i] for i in near], device), strict=True):
        found[i] = each
    return [each.to(device, non_blocking=True).contiguous() for each in found]


def copied(tables: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Tables of the host on a device, by one copy. Each begins at a multiple of 16 bytes, as if it
    were a tensor of its own.

    Raises:
        InvalidInputError: a graph is captured, which would copy whatever lies at the same place of
            the host's memory when it is replayed.
    """
    streams = streams_of(device)
    if streams is not None and streams.is_capturing(streams.current(device)):
        raise InvalidInputError(
            "tables of an op in a captured graph",
            got="on the host",
            expected=f"on {device}, where a replay finds them",
            fix="move them there before",
        )
    plain = [_plain(each) for each in tables]
    sizes = (-(-each.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for each in plain)
    begins = list(itertools.accumulate(sizes, initial=0))
    # a copy from memory that the system may move waits until it has been copied once more
    packed = _host_memory(begins[-1], device)
    load_extension().pack(plain, packed)
    there = packed.to(device, non_blocking=True)
    views = {each.dtype: there.view(each.dtype) for each in plain}
    return [
        views[each.dtype].as_strided(each.shape, each.stride(), begin // each.itemsize)
        for each, begin in zip(plain, begins, strict=False)
    ]


@functools.cache
def unused(device: torch.device) -> dict[torch.dtype, torch.Tensor]:
    """A few bytes of a device by dtype, for a kernel's pointers that it does not look at: the same
    for each launch, never read or written."""
    some = torch.empty(1, dtype=torch.int64, device=device)
    return {dtype: some.view(dtype) for dtype in (torch.int64, torch.uint8, torch.float32)}


def _plain(table: torch.Tensor) -> torch.Tensor:
    """Contiguous; of the host also at a multiple of its elements' size, which memory that others
    have made (torch.frombuffer) need not be."""
    table = table.contiguous()
    if table.device.type == "cpu" and table.data_ptr() % table.itemsize:
        return table.clone()
    return table


def _host_memory(size_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [bytes], uninitialised: pinned where a device copies from or to it."""
    streams = streams_of(device)
    if streams is None:
        return torch.empty(size_bytes, dtype=torch.uint8)
    return streams.pinned(size_bytes)
