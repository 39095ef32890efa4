"""Runs systems side by side: results verified first, then alternating in shuffled order, compared
by the median of paired ratios.

Disks and shared machines drift by a factor of two within minutes. Whatever is compared therefore
runs in the same pair, seconds apart, and only ratios within a pair are compared.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from espnx.errors import ChecksumError, InvalidInputError

from .registry import Say
from .result import Row

REPORTED_PAIRS = 15


@dataclass(frozen=True)
class Sample:
    """One run: its time, its bytes, and numbers about it."""

    seconds: float
    bytes_asked: int
    bytes_moved: int
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds_per_byte(self) -> float:
        return self.seconds / self.bytes_asked


class System(Protocol):
    """Something that can be run again and again.

    Attributes:
        name: in the rows.
        group: variants of one baseline share it; the variant with the least median time stands for
            the group.
        requested_path, effective_path: of the bytes.
    """

    name: str
    group: str
    requested_path: str
    effective_path: str

    def verify(self) -> str | None:
        """Does a piece of the work, compares the result with what is known, and says what is wrong;
        None when all is right."""

    def prepare(self, turn: int) -> str:
        """Gets ready for the run of that number, outside the measured time; returns the state of
        the page cache, ``cold`` or ``warm``."""

    def run(self) -> Sample: ...

    def close(self) -> None: ...


@dataclass
class Record:
    """What is known of one system so far."""

    system: System
    problem: str | None = None
    samples: list[Sample] = field(default_factory=list)
    caches: set[str] = field(default_factory=set)


def paired_ratios(baseline: Sequence[Sample], ours: Sequence[Sample]) -> list[float]:
    """Per pair, the baseline's time per byte over ours: above 1, ours is faster. A baseline may
    move fewer bytes in a run."""
    return [b.seconds_per_byte / o.seconds_per_byte for b, o in zip(baseline, ours, strict=True)]


def interquartile_range(values: Sequence[float]) -> float:
    low, high = np.percentile(values, [25, 75])
    return float(high - low)


def compare(
    case: str,
    params: Mapping[str, Any],
    ours: Sequence[System],
    baselines: Sequence[System],
    *,
    pairs: int,
    seed: int,
    say: Say,
    settle_s: float = 0,
) -> list[Row]:
    """Verifies, runs and compares systems at one point; rows of ours come first.

    Args:
        ours: each is compared with every baseline.
        baselines: of their groups (`System.group`), the fastest member by median stands for the
            group in the ratios.
        pairs: how often each system runs.
        seed: of the order within the pairs.
        settle_s: idle time before each run.
    """
    if pairs < 1:
        raise InvalidInputError("the number of pairs", got=pairs, expected="at least 1")
    records = [Record(system) for system in [*ours, *baselines]]
    for record in records:
        record.problem = record.system.verify()
        if record.problem:
            say(f"WRONG RESULT of {record.system.name}: {record.problem}. It is not measured.")
    order = random.Random(seed)
    for turn in range(pairs):
        active = [record for record in records if record.problem is None]
        order.shuffle(active)
        for record in active:
            _run_once(record, turn, settle_s, say)
    our_records, others = records[: len(ours)], _name_groups(records[len(ours) :])
    rows = [_row(case, params, record.system.name, record, others) for record in our_records]
    return rows + [_row(case, params, name, record, {}) for name, record in others.items()]


def _run_once(record: Record, turn: int, settle_s: float, say: Say) -> None:
    record.caches.add(record.system.prepare(turn))
    time.sleep(settle_s)
    try:
        record.samples.append(record.system.run())
    except ChecksumError as error:
        record.problem = str(error)
        say(
            f"WRONG RESULT of {record.system.name} in run {turn + 1}: {error}. Its times are "
            "dropped."
        )


def _name_groups(baselines: Sequence[Record]) -> dict[str, Record]:
    """Baselines by the name they get in the rows: the best variant of a group has the group's name,
    the others their own."""
    best: dict[str, Record] = {}
    for record in baselines:
        rival = best.get(record.system.group)
        if rival is None or _speed_key(record) < _speed_key(rival):
            best[record.system.group] = record
    return {
        record.system.group if best[record.system.group] is record else record.system.name: record
        for record in baselines
    }


def _speed_key(record: Record) -> float:
    return (
        float("inf")
        if record.problem or not record.samples
        else statistics.median(sample.seconds_per_byte for sample in record.samples)
    )


def _row(
    case: str, params: Mapping[str, Any], name: str, record: Record, baselines: Mapping[str, Record]
) -> Row:
    samples = [] if record.problem else record.samples
    seconds = [sample.seconds for sample in samples]
    metrics = {
        key: statistics.median(sample.metrics[key] for sample in samples)
        for key in (samples[0].metrics if samples else {})
    }
    ratio = {}
    for baseline, other in baselines.items():
        if samples and other.samples and not other.problem:
            ratios = paired_ratios(other.samples, samples)
            ratio[baseline] = statistics.median(ratios)
            metrics[f"ratio_iqr_{baseline}"] = interquartile_range(ratios)
    return Row(
        case=case,
        params=params,
        system=name,
        kind="measured",
        requested_path=record.system.requested_path,
        effective_path=record.system.effective_path,
        # One warm run among cold ones makes the row a warm one.
        cache="cold" if record.caches == {"cold"} else "warm",
        n=len(samples),
        median_s=statistics.median(seconds) if samples else None,
        p99_s=float(np.percentile(seconds, 99)) if samples else None,
        iqr_s=interquartile_range(seconds) if samples else None,
        bytes_asked=samples[0].bytes_asked if samples else 0,
        bytes_moved=round(statistics.median(sample.bytes_moved for sample in samples))
        if samples
        else 0,
        correct=record.problem is None,
        metrics=metrics,
        ratio=ratio,
    )
