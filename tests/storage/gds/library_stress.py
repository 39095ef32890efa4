"""Random programs of the `gds` engine on the real bindings and a libcufile of ours
(cufile_library.py): threads of C complete reads late, in any order, short, wrong, never, while
transfers are cancelled, run into their deadlines, and their memory goes.

    python -m tests.storage.gds.library_stress FOLDER SEEDS

runs it where the address sanitizer watches the library: with LD_PRELOAD of libasan and
ESPNX_CUFILE_SANITIZER=address. A read into memory that the engine has given back ends the process,
as the last one, made for that, has to.
"""

from __future__ import annotations

import errno
import gc
import random
import sys
from pathlib import Path

from espnx import errors
from espnx.storage import Plan
from espnx.storage.gds.engine import GdsEngine
from tests.storage.gds.common import KIB, items_of, random_plan, until, write_file
from tests.storage.gds.cufile_library import CuFileLibrary
from tests.storage.gds.cufile_stub import HostMemory, Rule

FAULTS = ("error", "short", "late", "twice", "hold", "never", "none", "none")


def stress(folder: Path, seed: int, *, steps: int = 25) -> int:
    """One program; how many of its reads ended well. Right bytes or a typed error, whatever the
    library does."""
    rng = random.Random(seed)
    path, data = write_file(folder, 200_000, seed, f"data{seed}")
    library = CuFileLibrary(order=rng.choice(["fifo", "lifo", "random"]), seed=seed)
    library.delay_us = rng.choice([0, 100, 2000])
    engine = GdsEngine(
        "gds-compat",
        bindings=library,
        memory=HostMemory(),
        batch_size=rng.choice([1, 3, 16]),
        batches=2,
        threads=2,
        batch_bytes=16 * KIB,
        large_bytes=16 * KIB,
        arena_bytes=64 * KIB,
    )
    ended, held = 0, []
    try:
        file = engine.open(path)
        for step in range(steps):
            fault = rng.choice(FAULTS)
            value = rng.choice([errno.EIO, errno.EAGAIN, 3])
            library.rules[:] = [Rule(fault, value, nth=rng.randrange(1, 4), count=1)]
            offsets, sizes = random_plan(100 * seed + step, len(data), rng.randrange(1, 12), 30_000)
            try:
                future = engine.read(
                    Plan.of(file, offsets, sizes),
                    gap_bytes=rng.choice([0, 8192]),
                    deadline_s=0.02 if fault in ("hold", "never") else 30.0,
                )
                if rng.random() < 0.2:
                    future.cancel()
                found = items_of(future.wait(), future.position_bytes, sizes)
            except errors.EspnxError:
                continue
            finally:
                if rng.random() < 0.4:
                    library.release()
            assert found == [data[o : o + s] for o, s in zip(offsets, sizes, strict=True)]
            held.append((future.memory, bytes(future.memory.numpy())))
            del future, held[: rng.randrange(2)]
            ended += 1
        for memory, before in held:  # nothing was read into what somebody still looks at
            assert bytes(memory.numpy()) == before
    finally:
        library.release()
        until(lambda: engine.stats().in_flight == 0)
        engine.close()
    assert (library.violations, library.open_count, library.threads) == ([], 0, 0)
    assert (library.handles, library.regions) == ({}, {})
    return ended


def read_into_what_is_gone(folder: Path) -> None:
    """What the sanitizer has to notice: the engine's memory is freed under a read."""
    path, _ = write_file(folder, 100_000)
    library = CuFileLibrary(rules=[Rule("hold", match=lambda offset, size: offset == 8192)])
    memory = HostMemory()
    engine = GdsEngine("gds-compat", bindings=library, memory=memory, arena_bytes=64 * KIB)
    future = engine.read(Plan.of(engine.open(path), [8192], [4096]))
    until(lambda: library.busy() == 1)
    memory.allocated[0].untyped_storage().resize_(0)
    library.release()
    future.wait()


if __name__ == "__main__":
    place = Path(sys.argv[1])
    print("ended well:", sum(stress(place, seed) for seed in range(int(sys.argv[2]))), flush=True)
    gc.collect()
    print("into what is gone:", flush=True)
    read_into_what_is_gone(place)
    print("nobody saw it")
