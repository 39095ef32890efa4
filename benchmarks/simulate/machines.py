"""Drives of a spec behind a host that adds nothing: what recorded programs are predicted on."""

from __future__ import annotations

from espnx.device.model.reader import Figure
from espnx.device.model.spec import DeviceSpec
from espnx.simulate.decoding.machine import Machine, Specs
from espnx.simulate.figures import middles
from espnx.simulate.specs.kinds import Drives, GpuSpec, HostSpec, ProgramSpec, SystemSpec
from espnx.simulate.specs.load import load

_HOST, _GPU = "xeon-6342", "a100-40gb"  # no command of a trace passes them


def _count(n: int) -> Figure:
    return Figure(float(n), float(n), "1", "what is measured", "measured")


def machine_of(spec: DeviceSpec, n_drives: int, *, computes_inside: bool) -> Machine:
    """A machine of so many. `computes_inside`: rows and records are computed on in the drives, as
    far as the spec has an accelerator."""
    attention = "drives" if computes_inside else "cpu"
    drives = Drives(spec.name, _count(n_drives))
    system = SystemSpec(
        "measured", f"{n_drives} {spec.title}", _HOST, _GPU, "as-it-is", drives, "drives"
    )
    specs = Specs(
        system,
        load(HostSpec, _HOST),
        load(GpuSpec, _GPU),
        ProgramSpec("as-it-is", "a program that costs what its trace says", attention, _count(1)),
        spec,
        None,
    )
    return specs.machine(middles(specs.ranges))
