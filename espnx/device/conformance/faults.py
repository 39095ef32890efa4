"""What holds when the storage fails under a device that reads by an engine it is given, whatever it
is asked: a typed error in the caller's thread, and the right answer at the next try."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from ... import errors
from ...storage import FaultRule, FaultyEngine
from ..near_storage import NearStorageDevice
from .requirement import Found, raises


class Asked(Protocol):
    """Opens a part of a device. While it is open, each call of what that gives asks the device for
    something and raises NotConformingError unless the answer is right."""

    def __call__(
        self, device: NearStorageDevice, *, engine: FaultyEngine, deadline_s: float
    ) -> AbstractContextManager[Callable[[], None]]: ...


@dataclass(frozen=True)
class _Fault:
    rule: FaultRule
    expected: tuple[type[Exception], ...]
    deadline_s: float = 30.0


_FAULTS = {
    "reads that fail": _Fault(
        FaultRule("error", operation="read", count=1, value=5), (errors.ReadError,)
    ),
    "bytes that are damaged": _Fault(
        FaultRule("flip", operation="read", count=1, value=1_605),
        (errors.ChecksumError, errors.StaleDataError),
    ),
    "reads that never end": _Fault(
        FaultRule("never", operation="read", count=1),
        (errors.DeadlineExceededError,),
        deadline_s=0.5,
    ),
}


def fault_checks(asked: Asked) -> dict[str, Callable[[NearStorageDevice], Found | None]]:
    """A check for each thing that can go wrong, by its name."""
    return {name: partial(_fails, asked, fault) for name, fault in _FAULTS.items()}


def _fails(asked: Asked, fault: _Fault, device: NearStorageDevice) -> Found | None:
    # The first read after those of opening.
    engine = FaultyEngine([replace(fault.rule, nth=1 + _reads_of_opening(asked, device))])
    try:
        with asked(device, engine=engine, deadline_s=fault.deadline_s) as ask:
            try:
                with raises(*fault.expected):
                    ask()
            except errors.NotConformingError:
                if not engine.stats().fault_hits:
                    return Found(
                        "not made",
                        "it reads past the engine that it is given: nobody knows what it does when "
                        "this happens",
                    )
                raise
            ask()
    finally:
        engine.close(grace_s=0.05)
    return None


def _reads_of_opening(asked: Asked, device: NearStorageDevice) -> int:
    with (
        FaultyEngine([FaultRule("delay", operation="read", value=0)]) as engine,
        asked(device, engine=engine, deadline_s=30.0),
    ):
        return engine.stats().fault_hits
