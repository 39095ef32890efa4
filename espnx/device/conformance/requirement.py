"""How a check says that a device does not do what it must."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ... import errors


def require(holds: bool, what: str, *, got: object = None, expected: object = None) -> None:
    """Raises NotConformingError unless something holds."""
    if not holds:
        raise errors.NotConformingError(what, got=got, expected=expected)


@contextmanager
def raises(*kinds: type[Exception]) -> Iterator[None]:
    """Raises NotConformingError unless one of these is raised inside."""
    names = " or ".join(kind.__name__ for kind in kinds)
    try:
        yield
    except kinds:
        return
    except errors.EspnxError as error:
        raise errors.NotConformingError("the wrong error", got=f"{type(error).__name__}: {error}", expected=names) from error
    raise errors.NotConformingError("no error", got="a result", expected=names)
