"""Devices of a spec, emulated: real work on this machine, done when the hardware of the spec would
have done it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ... import errors
from ..kinds import KINDS, ROWS, PartKind
from ..model.spec import DeviceSpec, load_spec
from ..near_storage import NearStorageDevice
from ..rows.data_file import check_place
from ..vectors.encoding import Encoding, encode_on_host
from ..workers import Clock
from .costs import check_latency, figures_of
from .faults import DeviceFault, Faults, Guard
from .paced import PacedPart
from .report import Report, report
from .rows import HAND_OVERS, EmulatedRowDevice, HandedOver, capabilities_of
from .topology import DEFAULT_STRETCH, Topology

T = TypeVar("T")


class EmulatedDevice(NearStorageDevice):
    """One of the devices of a topology. `Emulation.together` makes them. See `NearStorageDevice`.

    Attributes:
        topology: that it shares with those that were opened with it.
        number: which of them it is.
        hand_over: how rows that wait on the host reach the result (`HandedOver`).
        near_storage: whether it computes. If not, it is the same disk without its accelerator.
    """

    kind = "emulated"
    kinds = KINDS

    def __init__(
        self,
        path: str,
        topology: Topology,
        number: int,
        users: list[EmulatedDevice],
        *,
        hand_over: HandedOver,
        near_storage: bool,
        faults: Faults,
    ):
        super().__init__(path)
        self.topology, self.number, self.hand_over, self.near_storage = (
            topology,
            number,
            hand_over,
            near_storage,
        )
        self.capabilities = capabilities_of(topology.spec, near_storage=near_storage)
        self._users, self._faults = users, faults
        users.append(self)

    def check(
        self, directory: str | None = None, *, engine: Any = "auto", name: str | None = None
    ) -> None:
        """See `NearStorageDevice`."""
        check_place(directory or self.path, engine=engine, name=name)

    def open_part(self, kind: PartKind, *what: Any, **options: Any) -> Any:
        """See `NearStorageDevice`. Of rows, `compute` may be anything: results go where the queries
        are; `deadline_s` is of a transfer of this machine's, and in virtual seconds of one of the
        device's. Raises InvalidInputError also where walks over a graph are asked for
        (`PartKind.reads_wait`) and the spec has no latency of reads."""
        if kind is ROWS:
            return EmulatedRowDevice(
                what[0] or self.path,
                topology=self.topology,
                number=self.number,
                hand_over=self.hand_over,
                near_storage=self.near_storage,
                faults=self._faults,
                **options,
            )
        if kind.reads_wait:
            check_latency(self.topology.spec)

        return kind.front(kind.open(self.path, *what, **options), _Pacing(self, kind, self._faults))

    def offers(self, kind: PartKind) -> bool:
        """See `NearStorageDevice`. Of kinds that others bring, whatever this machine can open."""
        return kind in self.kinds or kind not in KINDS

    def refuses(self, kind: PartKind) -> str:
        """See `NearStorageDevice`."""
        try:
            check_latency(self.topology.spec)
        except errors.InvalidInputError as error:
            return f"{error.what}: {error.got}" if kind.reads_wait else ""
        return ""

    def encode(
        self,
        encode: Callable[[Sequence[str]], T],
        texts: Sequence[str],
        *,
        flop: float | None = None,
    ) -> Encoding[T]:
        """See `NearStorageDevice`. On a device that encodes, the seconds are virtual: of `flop` at
        the spec's rate.

        Raises InvalidInputError: no `flop`, without which the spec says nothing of the time.
        """
        if not self._computes("encode"):
            return super().encode(encode, texts, flop=flop)
        if flop is None:
            raise errors.InvalidInputError(
                f"encoding on device {self.name!r}",
                got="no flop",
                expected="how much arithmetic it takes",
                fix="flop=forward_flop(...)",
            )
        done = encode_on_host(encode, texts, flop=flop)
        asked_s = self.topology.now()
        ended_s = self.topology.wait(self.topology.compute(self.number, flop, 0), asked_s=asked_s)
        return Encoding(done.value, self.topology.spec.name, "emulated", ended_s - asked_s, flop)

    @property
    def clock(self) -> Clock | None:
        """See `Topology.clock`."""
        return self.topology.clock

    def _computes(self, verb: str) -> bool:
        accelerator = self.topology.spec.accelerator
        return self.near_storage and accelerator is not None and verb in accelerator.verbs

    def describe(self) -> dict[str, Any]:
        """See `NearStorageDevice`."""
        spec, memory = self.topology.spec, self.topology.spec.memory.size
        return super().describe() | {
            "spec": spec.name,
            "title": spec.title,
            "devices": self.topology.n_devices,
            "stretch": self.topology.stretch,
            "near_storage": self.near_storage,
            "hand_over": self.hand_over,
            "memory_bytes": None if memory is None else int(memory.value),
            "links": self.topology.links,
            "figures": figures_of(spec),
        }

    def report(self) -> Report:
        """Whose time it was since the topology was opened: whether times of it may be quoted.
        Raises StateError for a stretch of 0."""
        return report(self.topology)

    def close(self) -> None:
        """See `NearStorageDevice`: with the last device the topology ends."""
        if self in self._users:
            self._users.remove(self)
            if not self._users:
                self.topology.close()


@dataclass(frozen=True)
class _Pacing:
    """Puts a paced part in front of one that was opened."""

    device: EmulatedDevice
    kind: PartKind
    faults: Faults

    def __call__(self, part: Any, stored: Any) -> Any:
        device = self.device
        guard = Guard(device.topology, device.number, device.path, self.faults)
        facts = stored, device.topology, device.number, self.kind.verbs
        return self.kind.wrap(
            PacedPart, part, *facts, near_storage=device.near_storage, guard=guard
        )

    @property
    def topology(self) -> Topology:
        return self.device.topology

    @property
    def clock(self) -> Clock | None:
        return self.device.clock


class Emulation:
    """What a name of a spec opens.

    Args:
        source: a preset, or a YAML file (docs/device-specs.md), or what `load_spec` made of one.
            Raises as `load_spec`.
    """

    def __init__(self, source: str | os.PathLike[str] | DeviceSpec):
        self.spec = source if isinstance(source, DeviceSpec) else load_spec(source)
        self.__doc__ = f"{self.spec.title}, emulated"

    def together(
        self,
        paths: Sequence[str | os.PathLike[str]],
        *,
        stretch: float = DEFAULT_STRETCH,
        hand_over: HandedOver = "scores",
        near_storage: bool = True,
        faults: Sequence[DeviceFault] = (),
        seed: int = 0,
    ) -> list[EmulatedDevice]:
        """A topology with one device for each directory.

        Args:
            paths: directories.
            stretch: wall seconds that a virtual second takes; 0: the wall clock has no part in it
                (`Topology`).
            hand_over: of rows that wait on the host: ``scores``, which go to the device with their
                V (HILOS, section 4.3), or ``lse``: attended to on the host and merged.
            near_storage: False: the same disks without what computes beside them.
            faults: what goes wrong on them, for tests of what stands on devices.
            seed: of faults that are likely, not certain.

        Raises:
            InvalidInputError: an option out of range; an accelerator that attends, but not as
                HILOS's does.
        """
        if hand_over not in HAND_OVERS:
            raise errors.InvalidInputError(
                "hand_over", got=repr(hand_over), expected=" or ".join(map(repr, HAND_OVERS))
            )
        if not isinstance(near_storage, bool):
            raise errors.InvalidInputError(
                "near_storage", got=repr(near_storage), expected="True or False"
            )
        capabilities_of(self.spec, near_storage=near_storage)
        struck = Faults(faults, seed)
        topology, users = Topology(self.spec, len(paths), stretch=stretch), list[EmulatedDevice]()
        return [
            EmulatedDevice(
                os.fspath(path),
                topology,
                number,
                users,
                hand_over=hand_over,
                near_storage=near_storage,
                faults=struck,
            )
            for number, path in enumerate(paths)
        ]
