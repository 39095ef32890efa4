"""What `espnx bench device --record` has recorded on emulated devices, predicted by the queues of
`espnx simulate`, which have nothing in common with what paces emulation but the spec."""

from __future__ import annotations

import statistics
import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from espnx.device.model.spec import DeviceSpec, load_spec
from espnx.device.trace.reader import read_trace
from espnx.simulate.programs.answer import step_times

from ..device import postings, search, topology
from ..device.case import run as run_devices
from ..device.emulated import trace_file
from ..harness.registry import Say
from ..harness.result import Row
from ..harness.traces import read_steps
from .compared import predicted_row
from .machines import machine_of

#: How far a prediction may be off where the host's share of the row is not more.
WITHIN = 0.10


@dataclass(frozen=True)
class _Show:
    """Attributes: device: the spec. machine: (the spec, whether drives compute) of a system."""

    device: str
    machine: Callable[[DeviceSpec, str], tuple[DeviceSpec, bool]]


SHOWS: Mapping[str, _Show] = {
    "topology": _Show("smartssd", lambda spec, name: (spec, topology.SYSTEMS[name].near_storage)),
    "search": _Show(
        "smartssd", lambda spec, name: (search.with_maxsim(spec, search.SYSTEMS[name]), True)
    ),
    "postings": _Show("ragx", lambda spec, name: (spec, postings.SYSTEMS[name][1])),
}


def measure(
    path: Path, shows: Sequence[str], devices: str, stretch: float, args: Namespace, say: Say
) -> list[Row]:
    """Two rows of each row of `espnx bench device`, whose defaults hold: emulated, predicted.
    Raises what it raises."""
    found = []
    with tempfile.TemporaryDirectory(prefix="espnx-bench-simulate-", dir=path) as folder:
        for show in shows:
            (traces := Path(folder, show)).mkdir()
            say(f"bench device --show {show}")
            wanted = _device_args(args, path, show, devices, stretch, traces)
            for each in run_devices(wanted, say):
                found += _beside(show, each, traces, say)
    return found


def _device_args(
    args: Namespace, path: Path, show: str, devices: str, stretch: float, traces: Path
) -> Namespace:
    """The options of ``espnx bench device``, by its own parser."""
    from argparse import ArgumentParser

    from ..device.case import configure

    parser = ArgumentParser()
    configure(parser)
    found = parser.parse_args([])
    found.__dict__.update(
        path=str(path), show=show, devices=devices, stretch=stretch, record=str(traces),
        quick=args.quick, seed=args.seed, pairs=args.pairs,
    )  # fmt: skip
    return found


def _beside(show: str, emulated: Row, traces: Path, say: Say) -> list[Row]:
    n, name = emulated.params["devices"], emulated.system
    what = SHOWS[show]
    spec, inside = what.machine(load_spec(what.device), name)
    file = trace_file(traces, n, name)
    if file is None:
        return []
    trace = read_trace(file)
    machine = machine_of(spec, n, computes_inside=inside)
    times = step_times(machine, trace, read_steps(file))
    params = {"show": "device", "what": f"{show}, {n} devices", "under": name}
    ours = replace(emulated, case="simulate", params=params, ratio={})
    share = emulated.metrics["host_share"]
    predicted = predicted_row(params, times, ours, max(WITHIN, share))
    say(
        f"    {show}, {n} devices, {name}: predicted {1e3 * statistics.median(times):.3f} virtual "
        f"ms, {predicted.metrics.get('of_measured', 0):.3f} of the emulated time, the host's share "
        f"{share:.0%}"
    )
    return [ours, predicted]
