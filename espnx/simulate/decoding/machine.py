"""A system's specs together, and the values that their figures have in one run."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from ...device.model.reader import SUFFIXES
from ...device.model.spec import DeviceSpec, load_spec
from ...errors import InvalidInputError
from ..figures import Range
from ..specs.kinds import GpuSpec, HostSpec, NetworkSpec, ProgramSpec, SystemSpec
from ..specs.load import as_range, figures, load

#: Each has parts and commands of its own in a walk.
DRIVES_MAX = 1024
#: What can be switched off, for the question what it makes, and of which programs, by where they
#: attend.
MECHANISMS = {
    "copy threads": ("cpu",),  # drives are read as fast as they are
    "cpu attention": ("cpu",),  # it takes no time
    "in turn": ("cpu",),  # drives are read while the CPU attends
    "repeated heads": ("cpu",),  # query heads that share K and V take them in once
    "lone writes": ("drives",),  # they take no time
    "regeneration": ("drives",),  # K and V come from X in no time
    "gpu reads": ("drives",),  # as fast as links are
    "weights": ("cpu", "drives"),  # they take no time
    "x-cache": ("drives",),  # no X is kept
}


@dataclass(frozen=True)
class Machine:
    """Attributes:
    system, host, gpu, program, device, network: specs.
    values: of their figures, by names that `ranges` has.
    techniques: of the program, in place of the system's.
    without: of `MECHANISMS`, what it does not have.
    """

    system: SystemSpec
    host: HostSpec
    gpu: GpuSpec
    program: ProgramSpec
    device: DeviceSpec
    network: NetworkSpec | None
    values: Mapping[str, float]
    techniques: tuple[str, ...]
    without: str | None = None

    @property
    def n_drives(self) -> int:
        return int(self.system.drives.count.value)

    @property
    def is_near_storage(self) -> bool:
        return self.program.attention == "drives"

    def keeps_on_drives(self, parameters: float) -> bool:
        """Whether weights of so many lie there."""
        return parameters > self.program.resident_parameters.value

    def get(self, name: str) -> float | None:
        """The value of a figure, such as ``program.entry_time``; None: not known."""
        kind, _, path = name.partition(".")
        return self.values.get(f"{getattr(self, kind).name}.{path}")

    def need(self, name: str) -> float:
        """Raises InvalidInputError for a figure that is not known."""
        found = self.get(name)
        if found is None:
            raise InvalidInputError(
                f"what {self.system.name} is computed with", got=f"no {name}", expected="given"
            )
        return found


@dataclass(frozen=True)
class Specs:
    """Those of one system, without values."""

    system: SystemSpec
    host: HostSpec
    gpu: GpuSpec
    program: ProgramSpec
    device: DeviceSpec
    network: NetworkSpec | None

    @functools.cached_property
    def ranges(self) -> dict[str, Range]:
        """The ranges of all figures, by the name of their spec and the fields that lead to them."""
        found: dict[str, Range] = {}
        for spec in (self.system, self.host, self.gpu, self.program, self.device, self.network):
            if spec is not None:
                found |= {name: as_range(each) for name, each in figures(spec, spec.name).items()}
        return found

    def machine(
        self,
        values: Mapping[str, float],
        *,
        techniques: tuple[str, ...] | None = None,
        without: str | None = None,
    ) -> Machine:
        if without is not None and without not in MECHANISMS:
            raise InvalidInputError("a mechanism", got=without, expected=", ".join(MECHANISMS))
        if without is not None and self.program.attention not in MECHANISMS[without]:
            without = None
        return Machine(
            self.system,
            self.host,
            self.gpu,
            self.program,
            self.device,
            self.network,
            values,
            self.system.techniques if techniques is None else techniques,
            without,
        )


def load_system(source: str) -> Specs:
    """A system by name or path, with all that it is made of.

    Raises:
        InvalidInputError: a name that is none; parts that do not go together.
        FileMissingError, ReadError, FormatError: as they say.
    """
    system = load(SystemSpec, source)
    beside = source if source.endswith(SUFFIXES) else None
    device = system.drives.device
    if beside is not None and device.endswith(SUFFIXES):
        device = _beside(beside, device)
    specs = Specs(
        system,
        load(HostSpec, system.host, beside),
        load(GpuSpec, system.gpu, beside),
        load(ProgramSpec, system.program, beside),
        load_spec(device),
        None if system.network is None else load(NetworkSpec, system.network, beside),
    )
    _check(specs)
    return specs


def _beside(file: str, named: str) -> str:
    from pathlib import Path

    return str(Path(file).parent / named)


def _check(specs: Specs) -> None:
    system, program = specs.system, specs.program
    if system.drives.count.value > DRIVES_MAX:
        raise InvalidInputError(
            f"drives of {system.name}", got=str(system.drives.count), expected=f"1 to {DRIVES_MAX}"
        )
    if program.attention == "drives":
        if system.kv != "drives":
            raise InvalidInputError(
                f"{system.name} has a program that attends in drives",
                got=f"K and V in {system.kv}",
                expected="kv: drives",
            )
        if not specs.device.has("attend"):
            raise InvalidInputError(
                f"a verb that no part of {system.name} serves",
                got=f"attend, on {specs.device.name}",
                expected="drives whose accelerator names it",
            )
    elif system.techniques:
        raise InvalidInputError(
            f"techniques of {system.name}",
            got=", ".join(system.techniques),
            expected="none, as its program attends on the CPU",
        )
    named = [each.name for each in vars(specs).values() if hasattr(each, "name")]
    if len(set(named)) != len(named):
        raise InvalidInputError(
            f"specs of {system.name}",
            got=f"a name twice: {', '.join(named)}",
            expected="each its own, since figures are known by it",
        )
