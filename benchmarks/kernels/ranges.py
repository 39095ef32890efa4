"""Checksums of ranges, by both kernels, and ragged records made compact."""

from __future__ import annotations

import torch

from espnx.ops import crc32c_ranges
from espnx.ops.crc32c.cuda import crc32c_triton
from espnx.ops.gather import gather

from .point import KernelSystem, Point, Setting, Systems
from .timing import Call

_MEAN_BYTES = 180 * 256  # of a record: 180 tokens in fp16, d 128


def points() -> list[Point]:
    found = [
        Point(
            "crc32c",
            f"CRC32C of {size >> 10} KiB",
            {"bytes": size},
            lambda setting: 0.0,
            "fp16",
            lambda setting, peers, size=size: _checksums(size, setting),  # type: ignore[misc]
        )
        for size in (4096, 16_384)
    ]
    return found + [
        Point(
            "gather",
            f"gather of records, multiples of {unit} bytes",
            {"unit": unit},
            lambda setting: 0.0,
            "fp16",
            lambda setting, peers, unit=unit: _records(unit, setting),  # type: ignore[misc]
        )
        for unit in (16, 4, 1)
    ]


def _buffers(size_bytes: int, setting: Setting) -> list[torch.Tensor]:
    draw = {"generator": setting.generator(), "device": setting.device, "dtype": torch.uint8}
    return [torch.randint(0, 256, (size_bytes,), **draw) for _ in range(setting.clock.sets)]


def _checksums(size: int, setting: Setting) -> Systems:
    """What the op does, and the kernel of Triton's, which it takes where the other is not
    compiled."""
    n = max(setting.data_bytes // size, 1)
    buffers = _buffers(n * size, setting)
    offsets, sizes = torch.arange(n) * size, torch.full((n,), size)
    right = [crc32c_ranges(each.cpu(), offsets, sizes) for each in buffers]

    def check(i: int, found: torch.Tensor) -> str | None:
        wrong = int((found.cpu() != right[i]).sum())
        return f"{wrong} of {n} ranges differ" if wrong else None

    def system(name: str, call: Call) -> KernelSystem:
        return KernelSystem(
            *(name, name, call, check, setting.clock, n * size, n * size), is_ours=True
        )

    ours = [system("espnx", lambda i: crc32c_ranges(buffers[i], offsets, sizes))]
    if setting.device.type == "cuda":
        ours.append(system("espnx-triton", lambda i: crc32c_triton(buffers[i], offsets, sizes)))
    return Systems(ours)


def _records(unit: int, setting: Setting) -> Systems:
    """Records in random order, with gaps between them; bytes count twice, read and written."""
    generator = torch.Generator().manual_seed(setting.seed)
    n = max(setting.data_bytes // _MEAN_BYTES, 3)
    sizes = torch.randint(1, 2 * _MEAN_BYTES // unit, (n,), generator=generator) * unit
    gaps = torch.randint(1, 64, (n,), generator=generator) * unit
    order = torch.randperm(n, generator=generator)
    offsets = torch.empty_like(sizes)
    offsets[order] = (sizes + gaps)[order].cumsum(0) - sizes[order]
    buffers = _buffers(int((sizes + gaps).sum()), setting)
    ends = sizes.cumsum(0).tolist()

    def check(i: int, found: torch.Tensor) -> str | None:
        expected = torch.cat(
            [
                buffers[i][begin : begin + size]
                for begin, size in zip(offsets.tolist(), sizes.tolist(), strict=True)
            ]
        )
        if found.shape != expected.shape:
            return f"{found.numel()} bytes, {ends[-1]} expected"
        wrong = int((found != expected).sum())
        return f"{wrong} of {ends[-1]} bytes differ" if wrong else None

    moved = 2 * ends[-1]
    ours = KernelSystem(
        "espnx",
        "espnx",
        lambda i: gather(buffers[i], offsets, sizes),
        check,
        setting.clock,
        moved,
        moved,
        is_ours=True,
    )
    return Systems([ours])
