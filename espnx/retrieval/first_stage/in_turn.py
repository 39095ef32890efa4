"""Sections of a first stage that are made one after the other, as they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from ... import errors


def in_turn(
    made: Iterator[tuple[str, Iterable[np.ndarray]]], names: Iterable[str]
) -> dict[str, Iterator[np.ndarray]]:
    """The contents of sections by name, each of which is made when it is read. All are to be read
    in their order, each once; else reading raises StateError.

    Args:
        made: (name, content) of each, in that order; a content is used up before the next is asked
            for.
    """
    listed = list(names)
    return {name: _next_of(made, name, is_last=name == listed[-1]) for name in listed}


def _next_of(
    made: Iterator[tuple[str, Iterable[np.ndarray]]], name: str, *, is_last: bool
) -> Iterator[np.ndarray]:
    for found, content in made:
        if found != name:
            raise errors.StateError(
                "sections of a first stage",
                got=found,
                expected=f"{name}: each once, in their order",
            )
        yield from content
        if is_last:
            next(made, None)  # what was opened for them is closed
        return
