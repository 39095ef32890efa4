"""`GpuRowDevice` on CPU memory for tests: straight from an engine, through host memory, and through
the `gds` engine on stub bindings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from espnx.device.gpu.readers import BounceReader, DirectReader, Reader
from espnx.device.gpu.rows import GpuRowDevice
from espnx.storage import FileHandle, NativeEngine
from espnx.storage.gds.engine import GdsEngine
from tests.storage.gds.cufile_stub import CuFileStub, HostMemory

WAYS = ("direct", "bounce", "gds")


@contextmanager
def opened_gpu(
    folder: Path, way: str = "direct", *, stub: CuFileStub | None = None, **options: Any
) -> Iterator[GpuRowDevice]:
    bindings = stub or CuFileStub()
    deadline_s = options.get("deadline_s", 30.0)

    def make(engine: NativeEngine, file: FileHandle) -> Reader:
        if way == "bounce":
            return BounceReader(
                engine, file, torch.device("cpu"), deadline_s, slot_bytes=1 << 20, why="no gds here"
            )
        gds = GdsEngine(
            "gds-compat", bindings=bindings, memory=HostMemory(), poison=True, arena_bytes=1 << 20
        )
        return DirectReader(gds, gds.open(file.path), deadline_s, owns_engine=True)

    device = GpuRowDevice(
        folder, compute="cpu", make_reader=None if way == "direct" else make, **options
    )
    try:
        yield device
    finally:
        bindings.release()
        device.close()
        assert bindings.violations == []
