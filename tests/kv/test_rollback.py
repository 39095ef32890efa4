"""One fault in any layer's reads or writes: the pass is forgotten everywhere, the same pass again
gives what it would have given, and no space is lost."""

from __future__ import annotations

import errno
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from espnx import errors
from espnx.kv.attention import Step
from espnx.kv.cache import SsdCache
from espnx.kv.options import CacheOptions
from espnx.storage import FaultRule, FaultyEngine
from tests.kv.naive import Naive, Shape, assert_right, forward
from tests.storage.common import until
from tests.sweeps import in_steps

#: Tokens of the passes: a chunk, single ones past several spills, some more, a chunk on top of
#: stored rows, singles again.
PASSES = [20, *[1] * 9, 5, 30, *[1] * 4]
SHAPES = {
    "kv": Shape(n_layers=2, d=128, dv=128),
    "x absorbed": Shape(n_layers=2, d=16, dv=16, hidden=64),
    "x recomputed": Shape(n_layers=2, d=16, dv=16, hidden=64, rotates=True),
}


@functools.cache
def passes(name: str) -> list[tuple[int, list[tuple[Step, torch.Tensor, torch.Tensor]]]]:
    """Tokens before each pass, and what `Naive.step` says of it: the same for every fault. Read
    only."""
    naive, found = Naive(SHAPES[name], torch.Generator().manual_seed(1)), []
    for n in PASSES:
        before = naive.count
        found.append((before, naive.step(n)))
    return found


def attempt(
    cache: SsdCache, steps: list[Any], before: int
) -> tuple[list[torch.Tensor], errors.StorageError | None]:
    """The pass's outputs, or how it failed."""
    try:
        return forward(cache, steps, before), None
    except errors.StorageError as error:
        return [], error


def run(
    folder: Path, name: str, rule: FaultRule, *, devices: int = 1, deadline_s: float = 30.0
) -> tuple[int, int]:
    """All passes, each again after it has failed. How many failed, and how many faults there
    were."""
    engines: list[FaultyEngine] = []

    def engine() -> FaultyEngine:
        engines.append(FaultyEngine([rule] if not engines else [], poison=True, pool_bytes=1 << 20))
        return engines[-1]

    shape = SHAPES[name]
    options = CacheOptions(engine=engine, deadline_s=deadline_s)
    cache = SsdCache([folder / str(i) for i in range(devices)], shape.n_layers, options)
    cache.rows.x_rows = 1 if shape.hidden else 0
    failed = 0
    try:
        for number, (before, steps) in enumerate(passes(name)):
            for _ in range(4):
                outputs, error = attempt(cache, steps, before)
                if error is None:
                    break
                assert str(folder) in str(error.path)
                assert [cache.rows.length(layer) for layer in range(shape.n_layers)] == [
                    before
                ] * shape.n_layers
                failed += 1
            assert error is None, (
                f"pass {number}, {before} tokens: {rule} fails it forever: {error}"
            )
            assert_right(outputs, steps, f"pass {number}, {before} tokens, {rule}")
        cache.clear()
        assert [device.stats().stored_bytes for device in cache.striped.devices] == [0] * devices
        hits = sum(each.stats().fault_hits for each in engines)
        if rule.fault != "never":
            assert until(
                lambda: all(
                    (each.stats().in_flight, each.stats().quarantined_buffers) == (0, 0)
                    for each in engines
                )
            )
    finally:
        cache.close()
        for each in engines:
            each.close(grace_s=0.01)
    return failed, hits


FAULTS = [
    pytest.param("error", "read", errno.EIO, id="EIO in reads"),
    pytest.param("flip", "read", 8 * 3000 + 5, id="flipped bit"),
    pytest.param("stale", "read", 0, id="stale read"),
    pytest.param("error", "write", errno.EIO, id="EIO in writes"),
    pytest.param("error", "write", errno.ENOSPC, id="ENOSPC in writes"),
    pytest.param("error", "allocate", errno.ENOSPC, id="ENOSPC in reservations"),
]


@pytest.mark.sampled(1)
@in_steps(2)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("fault", "operation", "value"), FAULTS)
def test_every_request_fails_once(
    folder: Path, shape: str, fault: str, operation: str, value: int, step: int
) -> None:
    failures = faults = 0
    for nth in range(1, 400, step * 5 if operation == "read" else 1):
        failed, hits = run(
            folder, shape, FaultRule(fault, operation=operation, nth=nth, count=1, value=value)
        )
        assert failed <= hits, "one fault failed two passes"
        failures, faults = failures + failed, faults + hits
        if not hits:
            break
    assert not hits, "the sweep never came to a run without a fault"
    assert failures * step > 3 or operation == "allocate", (
        "the sweep saw too few faults to mean anything"
    )
    assert failures >= faults - 2 or operation == "allocate", (
        "what nobody asked for any more may fail unseen, and nothing else"
    )
