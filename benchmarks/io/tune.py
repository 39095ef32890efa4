"""``espnx bench io --tune``: short runs over engines, queue depths and request sizes; the best, as
settings that the engine reads."""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from espnx.errors import EspnxError
from espnx.sizes import format_size
from espnx.storage import EngineSettings

from ..harness.registry import Say
from .content import DataFile
from .engine import EngineSystem
from .work import KIB, Point, Work

DEPTHS = (16, 32, 64, 128, 256)
REQUESTS = (256 * KIB, 512 * KIB, 960 * KIB, 2048 * KIB)
# Of settings about as fast as the fastest, the smallest is taken: it costs less memory and waits
# less.
AS_FAST_AS_BEST = 0.97


@dataclass(frozen=True)
class Setting:
    """Engine options, and bytes in flight."""

    engine: str
    queue_depth: int
    request_bytes: int

    @property
    def in_flight_bytes(self) -> int:
        return self.queue_depth * self.request_bytes


def smallest_of_the_best(rates: dict[Setting, float]) -> Setting:
    """The setting with the fewest bytes in flight among those within 3 % of the highest rate (bytes
    per second)."""
    best = max(rates.values())
    return min(
        (setting for setting, rate in rates.items() if rate >= AS_FAST_AS_BEST * best),
        key=lambda setting: setting.in_flight_bytes,
    )


def tune(data: DataFile, engines: Sequence[str], *, quick: bool, seed: int, say: Say) -> str:
    """The text of a file of settings: path and queue depth by random 4 KiB reads, request size by
    sequential ones."""
    rounds, seconds = (1, 0.02) if quick else (5, 0.25)
    depths = [
        Setting(engine, depth, 4 * KIB) for engine, depth in itertools.product(engines, DEPTHS)
    ]
    small = measure(data, "random", depths, rounds, seconds, seed, say)
    chosen = smallest_of_the_best(small)
    # 32 MiB in flight whatever the request size: what the disk is given differs in its cut alone.
    requests = [Setting(chosen.engine, max(4, (32 << 20) // size), size) for size in REQUESTS]
    large = measure(data, "sequential", requests, rounds, 2 * seconds, seed, say)
    request = smallest_of_the_best(large)
    comment = (
        f"{data.path.parent}: random 4 KiB {small[chosen] / 4096 / 1e3:.1f}k/s, sequential "
        f"{large[request] / 1e6:.0f} MB/s (medians of {rounds} rounds of {seconds:g} s and more)"
    )
    settings = EngineSettings(
        path=chosen.engine, queue_depth=chosen.queue_depth, request_bytes=request.request_bytes
    )
    return settings.text(comment)


def measure(
    data: DataFile,
    pattern: str,
    settings: Sequence[Setting],
    rounds: int,
    seconds: float,
    seed: int,
    say: Say,
) -> dict[Setting, float]:
    """Median bytes per second of each setting, in shuffled rounds. Raises EspnxError on a wrong
    result."""
    rates: dict[Setting, list[float]] = {setting: [] for setting in settings}
    order = random.Random(seed)
    with contextlib.ExitStack() as stack:
        systems = {
            setting: _system(setting, pattern, data, seconds, seed, stack) for setting in settings
        }
        for turn in range(rounds):
            for setting in order.sample(list(systems), len(systems)):
                systems[setting].prepare(turn)
                rates[setting].append(1 / systems[setting].run().seconds_per_byte)
    medians = {setting: statistics.median(values) for setting, values in rates.items()}
    for setting, rate in medians.items():
        request = format_size(setting.request_bytes)
        say(
            f"    {pattern} {setting.engine}, depth {setting.queue_depth}, requests of {request}: "
            f"{rate / 1e6:.0f} MB/s"
        )
    return medians


def _system(
    setting: Setting,
    pattern: str,
    data: DataFile,
    seconds: float,
    seed: int,
    stack: contextlib.ExitStack,
) -> EngineSystem:
    """A system of the right size, found by a short run that is verified first."""
    point = Point("read", pattern, min(setting.request_bytes, 960 * KIB), setting.queue_depth)
    pilot_items = max(4 * setting.queue_depth, (8 << 20) // point.block_bytes)
    pilot = Work(point, data, items=1, seed=seed).with_items(pilot_items)
    with contextlib.closing(
        EngineSystem(setting.engine, pilot, request_bytes=setting.request_bytes)
    ) as trial:
        if problem := trial.verify():
            raise EspnxError(
                "reads come back wrong; nothing is tuned",
                got=problem,
                fix="espnx doctor --path DIR",
            )
        trial.prepare(0)
        work = pilot.for_seconds(seconds, 1 / trial.run().seconds_per_byte)
    return stack.enter_context(
        contextlib.closing(EngineSystem(setting.engine, work, request_bytes=setting.request_bytes))
    )
