"""What is measured at one point, and the rows it gives: systems verified on every input set, then
alternating, and the bounds that bytes and arithmetic set."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..harness.registry import Say
from ..harness.result import Row, untimed
from ..harness.runner import Sample, compare
from .timing import (
    LAUNCHES,
    Call,
    Clock,
    Launches,
    bare_launches,
    copy_bytes_per_s,
    matmul_flops_per_s,
    spoil,
)

_SAMPLE_S = 5e-3  # slow peers are timed over fewer launches in a row
RATES = ("fp16", "bf16", "fp32")  # of products of matrices

#: (number of the input set, what a call returned) -> what is wrong with it, or None.
Check = Callable[[int, Any], str | None]


@dataclass(frozen=True)
class Setting:
    """The device and the data that points are made on.

    Attributes:
        clock: knows the device and the number of input sets.
        data_bytes: of an input set, about.
        seed: of its content.
        flashinfer: a library that `flashinfer.begin_build` has made, or None.
        why_no_flashinfer: where there is none.
        only_ours: peers that need no compiling are left out, and nothing is compared: of those that
            do, all variants are made.
    """

    clock: Clock
    data_bytes: int
    seed: int
    flashinfer: Path | None = None
    why_no_flashinfer: str = "not installed"
    only_ours: bool = False

    @property
    def device(self) -> torch.device:
        return self.clock.device

    def generator(self, number: int = 0) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(self.seed + number)


@dataclass
class KernelSystem:
    """One way to compute what a point is about.

    Attributes:
        name, group: of the rows; of a group the fastest stands for it.
        whole: a call as users make it, tables on the CPU, by the number of an input set.
        check: of what `whole` returns.
        work: the device's part of a call, or None: the launches of kernels that `whole` makes, or
            where it makes none `whole` itself.
        is_ours: whose bare kernel is timed, too.
        bytes_asked, bytes_moved: of a call.
    """

    name: str
    group: str
    whole: Call
    check: Check
    clock: Clock
    bytes_asked: int
    bytes_moved: int
    work: Call | None = None
    is_ours: bool = False
    requested_path: str = field(default="memory", init=False)
    effective_path: str = field(default="memory", init=False)
    bare: Launches | None = field(default=None, init=False)
    turn: int = field(default=0, init=False)
    launches: int = field(default=LAUNCHES, init=False)

    def verify(self) -> str | None:
        """Checks everything that is timed: whole calls, the device's part, and the launches alone,
        into results from which what they had is gone."""
        ways = [("", self.whole)] + ([(" of work", self.work)] if self.work else [])
        for i in range(self.clock.sets):
            for name, call in ways:
                if problem := self.check(i, call(i)):
                    return f"input set {i}{name}: {problem}"
        if self.is_ours:
            self.bare = bare_launches(self.work or self.whole, self.clock.sets)
        if self.bare is not None:
            for i, found in enumerate(self.bare.results):
                if not self.bare.fills(i):
                    continue
                spoil(found)
                self.bare(i)
                if problem := self.check(i, found):
                    return f"input set {i} of launches: {problem}"
        trial_s = self.clock.work_s(self._work, self.clock.sets)
        self.launches = max(min(round(_SAMPLE_S / trial_s), LAUNCHES), 2)
        return None

    @property
    def _work(self) -> Call:
        return self.work or self.bare or self.whole

    def prepare(self, turn: int) -> str:
        self.turn = turn
        return "warm"

    def run(self) -> Sample:
        seconds = self.clock.work_s(self._work, self.launches)
        metrics = {"call_s": self.clock.whole_s(self.whole, self.turn)}
        if self.bare is not None:
            metrics["kernel_s"] = (
                self.clock.work_s(self.bare, self.launches)
                if self._work is not self.bare
                else seconds
            )
        return Sample(seconds, self.bytes_asked, self.bytes_moved, metrics)

    def close(self) -> None:
        pass


@dataclass
class Systems:
    """Attributes: ours, peers: to be measured. missing: name -> why a peer is not."""

    ours: list[KernelSystem]
    peers: list[KernelSystem] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Point:
    """What systems are compared at.

    Attributes:
        part: of the benchmark, as `--show` names it.
        name: what the work is, as `--only` finds it.
        params: of the rows.
        flops: of a call, a multiply-add as two.
        rate: which product of matrices bounds them (`timing.matmul_flops_per_s`).
        make: allocates, and gives the systems: ours alone, or also the peers that are named.
        compiled_peers: names of those that take seconds to compile; nobody else's names.
    """

    part: str
    name: str
    params: Mapping[str, Any]
    flops: Callable[[Setting], float]
    rate: str
    make: Callable[[Setting, frozenset[str]], Systems]
    compiled_peers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rates:
    """What the device can do, as measured before anything else.

    Attributes:
        copy: bytes per second, read plus written.
        matmul: kind -> operations per second.
    """

    copy: float
    matmul: Mapping[str, float]

    def least_s(self, data_bytes: float, flops: float, kind: str) -> float:
        """No call can take less."""
        return max(data_bytes / self.copy, flops / self.matmul[kind])


def measure_rates(clock: Clock, *, small: bool = False) -> Rates:
    """What the device can do; `small`: of matrices that a CPU multiplies at once."""
    copy = copy_bytes_per_s(clock, 1 << 24) if small else copy_bytes_per_s(clock)
    side = 256 if small else 0
    return Rates(copy, {kind: matmul_flops_per_s(clock, kind, side) for kind in RATES})


def rates_row(rates: Rates) -> Row:
    """The same for a result file."""
    metrics = {f"{kind}_flops_per_s": flops for kind, flops in rates.matmul.items()}
    metrics["copy_bytes_per_s"] = rates.copy
    params = {"part": "rates", "what": "copy, products of matrices"}
    return untimed("kernels", params, "torch", path="memory", metrics=metrics)


def fastest(candidates: Sequence[KernelSystem], missing: dict[str, str], name: str) -> list[Any]:
    """The one of these variants of a peer that is fastest in a short trial, of those that are right
    (a wrong one where none is, which is found wrong once more); none, and `missing` says why, where
    none runs here."""
    times: dict[int, tuple[bool, float]] = {}
    why = "has no variant for this"
    for number, system in enumerate(candidates):
        try:
            call, sets = system.work or system.whole, system.clock.sets
            is_wrong = any(system.check(i, system.whole(i)) is not None for i in range(sets))
            system.clock.wait()
            times[number] = is_wrong, min(system.clock.work_s(call, sets) for _ in range(2))
        except Exception as error:  # a peer may fail in any way, which is its result
            why = _first_line(error)
    if not times:
        missing[name] = why
        return []
    best = candidates[min(times, key=lambda number: times[number])]
    return [best]


def _first_line(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"[:300]


def measure(
    point: Point,
    setting: Setting,
    peers: frozenset[str],
    unprepared: Mapping[str, str],
    rates: Rates,
    pairs: int,
    say: Say,
) -> list[Row]:
    """The rows of a point. What fails here is a row that says so.

    Args:
        peers: of the compiled ones, those that may be called.
        unprepared: the others, and why not.
    """
    params = {"part": point.part, "what": point.name, **point.params}
    try:
        systems = point.make(setting, peers)
        rows = compare(
            "kernels", params, systems.ours, systems.peers, pairs=pairs, seed=setting.seed, say=say
        )
        flops = point.flops(setting)
        missing = {**unprepared, **systems.missing}
    except Exception as error:
        say(f"FAILED: {_first_line(error)}")
        failed = {**params, "why": _first_line(error)}
        return [untimed("kernels", failed, "espnx", path="memory", correct=False)]
    variants = {system.group: system.name for system in systems.peers}
    rows = [
        dataclasses.replace(row, params={**row.params, "variant": variants[row.system]})
        if row.system in variants
        else row
        for row in rows
    ]
    rows = [with_bounds(row, flops, point.rate, rates) for row in rows]
    absent = [
        untimed("kernels", {**params, "why": why}, name, path="memory")
        for name, why in missing.items()
    ]
    return [*rows, *absent]


def with_bounds(row: Row, flops: float, kind: str, rates: Rates) -> Row:
    """The row with rates, and the shares of what the device can do, among its metrics."""
    if not row.median_s:
        return row
    least_s = rates.least_s(row.bytes_asked, flops, kind)
    kernel_s = row.metrics.get("kernel_s", row.median_s)
    found = {
        "flops": flops,
        "bytes_per_s": row.bytes_asked / kernel_s,
        "flops_per_s": flops / kernel_s,
        "copy_bytes_per_s": rates.copy,
        "matmul_flops_per_s": rates.matmul[kind],
        "roofline_s": least_s,
        "share_of_roofline": least_s / kernel_s,
        "share_of_roofline_work": least_s / row.median_s,
    }
    return dataclasses.replace(row, metrics={**row.metrics, **found})
