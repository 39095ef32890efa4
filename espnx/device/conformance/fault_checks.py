"""What holds when the storage fails under a device that reads by an engine it is given: a typed error in the caller's thread, and the same
rows right at the next try."""

from __future__ import annotations

from ... import errors
from ...storage import FaultRule, FaultyEngine
from ..near_storage import NearStorageDevice
from .known_rows import attend, put, queries
from .requirement import raises, require
from .row_checks import plain_of, right, rng

#: Rows enough that they are no single block.
_ROWS = 900


def reads_that_fail(device: NearStorageDevice) -> str | None:
    return _fails(device, FaultRule("error", operation="read", nth=1, count=1, value=5), errors.ReadError)


def rows_that_are_damaged(device: NearStorageDevice) -> str | None:
    return _fails(device, FaultRule("flip", operation="read", nth=1, count=1, value=24_005), errors.ChecksumError)


def reads_that_never_end(device: NearStorageDevice) -> str | None:
    return _fails(device, FaultRule("never", operation="read", nth=1, count=1), errors.DeadlineExceededError, deadline_s=0.5)


def writes_that_fail(device: NearStorageDevice) -> str | None:
    """An error of a write comes from the next call that needs it, or from `flush`."""
    with FaultyEngine([FaultRule("error", operation="write", nth=1, count=1, value=28)]) as engine:
        rows = device.open_rows(engine=engine)
        try:
            layout = plain_of(rows)
            with raises(errors.WriteError):
                put(rows, layout, 1, range(2), _ROWS, rng())
                rows.flush()
        except errors.NotConformingError:
            if not engine.stats().fault_hits:
                return "it does not write by an engine"
            raise
        finally:
            rows.close()
    return None


def _fails(device: NearStorageDevice, rule: FaultRule, expected: type[Exception], deadline_s: float = 30.0) -> str | None:
    engine = FaultyEngine([rule])
    rows = device.open_rows(engine=engine, deadline_s=deadline_s)
    try:
        layout = plain_of(rows)
        seen = [put(rows, layout, 1, range(2), _ROWS, rng())[0].use(0)]
        rows.flush()
        look = queries(layout, 1, 2, 1, rng())
        try:
            with raises(expected):
                attend(rows, layout, seen, look)
        except errors.NotConformingError:
            if not engine.stats().fault_hits:
                return "it does not read by an engine"
            raise
        require(rows.front() == -1, "tickets after an error", got=rows.front(), expected=-1)
        right(rows)(attend(rows, layout, seen, look), seen, look)
    finally:
        rows.close()
        engine.close(grace_s=0.05)
    return None


#: Each returns why a device does not take part, or None. Raises NotConformingError.
FAULT_CHECKS = (reads_that_fail, rows_that_are_damaged, reads_that_never_end, writes_that_fail)
