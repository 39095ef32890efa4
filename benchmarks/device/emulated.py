"""Runs on emulated devices whose times may be quoted, and the traffic of their links."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from espnx.device.emulation.device import Emulation
from espnx.device.emulation.report import Report
from espnx.device.emulation.topology import LinkUse, Topology
from espnx.device.model.spec import DeviceSpec
from espnx.device.near_storage import NearStorageDevice

from ..harness.registry import Say
from ..harness.result import Row
from ..harness.traces import Steps, recording

#: The system that others are compared with: the same disks, and all computing on the host.
WITHOUT = "without"
_RUNS_MAX = 6
#: Of a run's time: what the next run aims at, half of what is refused: it stands in the times.
_HOST_SHARE_AIM = 0.1
#: A stretch at which nobody waited for the devices says only that it was far too small.
_FAR = 16.0


@dataclass(frozen=True)
class Timed:
    """What a run on emulated devices took.

    Attributes:
        report: whose time it was.
        times: virtual seconds of each step, or search, ascending.
        bound_s, bound_by: of the busiest link in a step, and its name.
        traffic: bytes of a step by kind of link, all devices together.
    """

    report: Report
    times: tuple[float, ...]
    bound_s: float
    bound_by: str
    traffic: Mapping[str, float]

    @property
    def median_s(self) -> float:
        return self.times[len(self.times) // 2]


class HasTimes(Protocol):
    @property
    def timed(self) -> Timed: ...


R = TypeVar("R", bound=HasTimes)


def timed(
    report: Report,
    times: Sequence[float],
    before: Mapping[str, LinkUse],
    after: Mapping[str, LinkUse],
) -> Timed:
    """Times of a run of so many steps, and of what had passed the links before and after."""
    busy_s = {link: (use.busy_s - before[link].busy_s) / len(times) for link, use in after.items()}
    by = max(busy_s, key=lambda link: busy_s[link])
    traffic = defaultdict[str, float](float)
    for link, use in after.items():
        kind = "_".join(word for word in link.split() if not word.isdigit())
        if "accelerator" not in kind:
            traffic[f"{kind}_bytes"] += (use.amount - before[link].amount) / len(times)
    return Timed(report, tuple(sorted(times)), busy_s[by], by, dict(traffic))


@contextmanager
def opened(
    spec: DeviceSpec,
    directories: Sequence[str],
    *,
    record: Path | None = None,
    steps: Steps | None = None,
    **options: Any,
) -> Iterator[tuple[list[NearStorageDevice], Topology]]:
    """Emulated devices of a spec, one for each directory, and the topology that they share.
    `record`: the file of a trace; `steps`: what is timed, for the file beside it."""
    with ExitStack() as stack:
        devices = Emulation(spec).together(directories, **options)
        for each in devices:
            stack.callback(each.close)
        topology, asked = devices[0].topology, list[NearStorageDevice](devices)
        if record is not None:
            asked = recording(str(record), "espnx bench device", asked, stack, steps)
        yield asked, topology


def trace_file(folder: Path | None, n_devices: int, system: str) -> Path | None:
    """The trace of the last run of one system with so many devices, whose times are in the rows."""
    return None if folder is None else folder / f"{n_devices}-{system}.trace"


class Stretches:
    """Finds stretches at which the host's share is small enough, and begins the next run of a
    system where the last one ended.

    Args:
        first: for a system that has not run.
        is_checked: whether a run in which the host took too much is repeated, and refused in the
            end.
    """

    def __init__(self, first: float, say: Say, *, is_checked: bool):
        self._first, self._say, self._is_checked = first, say, is_checked
        # of each system the stretch that fits, with so many devices
        self._found = dict[str, tuple[float, int]]()

    def settled(self, system: str, n_devices: int, run: Callable[[float], R]) -> R:
        """The first run of a system whose times are the devices'. `run` takes a stretch.

        Raises TimesNotValidError where no stretch makes them so.
        """
        stretch = self._first
        if known := self._found.get(system):
            # more devices take less time beside the same host
            stretch = max(known[0] * n_devices / known[1], 1.0)
        found = run(stretch)
        for _ in range(_RUNS_MAX - 1):
            report = found.timed.report
            if report.is_valid or not self._is_checked:
                break
            stretch = fitting(report)
            took = f"the host took {report.host_share:.0%} at a stretch of {report.stretch:g}"
            self._say(f"{n_devices} devices, {system}: {took}; {stretch:.3g} is next")
            found = run(stretch)
        if self._is_checked:
            found.timed.report.check()
            self._found[system] = fitting(found.timed.report), n_devices
        return found


def fitting(report: Report) -> float:
    """The stretch at which the host's share is as small as is aimed at, if the host takes as long
    as it did."""
    if not report.waited_s:
        return report.stretch * _FAR
    wanted = report.host_s * (1 - _HOST_SHARE_AIM) / _HOST_SHARE_AIM / report.waited_s
    return report.stretch * (wanted if math.isfinite(wanted) else _FAR)


def row(
    show: str,
    params: Mapping[str, Any],
    system: str,
    run: Timed,
    baseline: Timed | None,
    *,
    path: str,
    is_correct: bool,
    metrics: Mapping[str, float],
) -> Row:
    """The row of one system at one number of devices. Wrong results have no times and no ratio."""
    ordered, moved = run.times, round(run.traffic.get("device_flash_read_bytes", 0.0))
    made = Row(
        "device",
        {"show": show, **params},
        system,
        "emulated",
        "auto",
        path,
        "cold",
        len(ordered) if is_correct else 0,
        run.median_s if is_correct else None,
        ordered[-1] if is_correct else None,
        ordered[len(ordered) * 3 // 4] - ordered[len(ordered) // 4] if is_correct else None,
        moved,
        moved,
        is_correct,
        {
            "bound_s": run.bound_s,
            "stretch": run.report.stretch,
            "host_share": run.report.host_share,
            **metrics,
            **run.traffic,
        },
    )
    if baseline is None or not is_correct or system == WITHOUT:
        return made
    return replace(made, ratio={WITHOUT: baseline.median_s / run.median_s})


#: Columns of traffic: bytes of a step by kind of link, all devices together.
TRAFFIC = {
    "flash read MB": "device_flash_read_bytes",
    "written MB": "device_flash_write_bytes",
    "uplink in MB": "uplink_in_bytes",
    "out MB": "uplink_out_bytes",
}


def cells(row: Row, *own: str) -> list[str]:
    """The cells of a row: its time beside its bound and its baseline, `own` columns, traffic, how
    it was emulated."""
    found, is_timed = row.metrics, row.median_s is not None
    took_s = row.median_s or 0.0
    return [
        str(row.params["devices"]),
        row.system,
        f"{1e3 * took_s:.3f}" if is_timed else "-",
        f"{took_s / found['bound_s']:.2f}x" if is_timed and found["bound_s"] else "-",
        f"{row.ratio[WITHOUT]:.2f}x" if WITHOUT in row.ratio else "-",
        *own,
        *(f"{found.get(name, 0.0) / 1e6:.3f}" for name in TRAFFIC.values()),
        f"{found['stretch']:.3g}",
        f"{found['host_share']:.0%}",
        "yes" if row.correct else "NO",
    ]


def headers(unit: str, *own: str) -> list[str]:
    """The headers of `cells`; `unit`: what was timed."""
    return [
        "devices",
        "system",
        f"virtual ms a {unit}",
        "of its bound",
        "vs without",
        *own,
        *TRAFFIC,
        "stretch",
        "host",
        "right",
    ]
