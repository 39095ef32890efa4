"""What the tests of the `gds` engine share: an engine factory on the stub, files with known bytes,
plans with every kind of item."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from espnx.storage.gds.engine import GdsEngine
from tests.storage.gds.cufile_library import CuFileLibrary, load
from tests.storage.gds.cufile_stub import Controls, CuFileStub, HostMemory

KIB = 1024
MakeEngine = Callable[..., GdsEngine]


@pytest.fixture(params=["stub", "library"])
def make(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeEngine]:
    """Builds engines on a stub; afterwards nothing forbidden may have been done and nothing may be
    left behind. ``library``: where a test says `CuFileStub`, it gets the real bindings on a library
    of ours."""
    built: list[GdsEngine] = []
    kind: type[Controls] = CuFileStub
    if request.param == "library":
        load()
        kind = CuFileLibrary
        monkeypatch.setattr(request.module, "CuFileStub", CuFileLibrary, raising=False)

    def build(stub: Controls | None = None, path: str = "gds-compat", **options: Any) -> GdsEngine:
        options.setdefault("arena_bytes", 1024 * KIB)
        engine = GdsEngine(
            path,
            bindings=stub or kind(),
            memory=options.pop("memory", None) or HostMemory(),
            poison=True,
            **options,
        )
        built.append(engine)
        return engine

    yield build
    for engine in built:
        stub = engine._cufile._bindings
        stub.release()
        engine.close()
        assert not stub.violations, stub.violations


def write_file(
    folder: Path, size_bytes: int, seed: int = 0, name: str = "data"
) -> tuple[Path, bytes]:
    data = random.Random(seed).randbytes(size_bytes)
    path = folder / name
    path.write_bytes(data)
    return path, data


def stub_of(engine: GdsEngine) -> CuFileStub:
    return engine._cufile._bindings


def items_of(memory: torch.Tensor, position: torch.Tensor, sizes: list[int]) -> list[bytes]:
    return [
        bytes(memory[p : p + s].cpu().numpy()) if s else b""
        for p, s in zip(position.tolist(), sizes, strict=True)
    ]


def random_plan(
    seed: int, file_bytes: int, count: int, largest: int
) -> tuple[list[int], list[int]]:
    rng = random.Random(seed)
    sizes = [
        rng.choice([0, 1, 7, 512, 4096, 4097, rng.randrange(largest + 1)]) for _ in range(count)
    ]
    offsets = [rng.randrange(file_bytes - size + 1) for size in sizes]
    if count > 3:
        offsets[0], sizes[0] = file_bytes - 13, 13  # the end of the file
        offsets[1], sizes[1] = 0, 4096
    return offsets, sizes


def until(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.001)
