"""A machine in words: groups of equal parts, what each is plugged behind, and which way the command
of a verb takes. Everything that can be wrong with one is said before anything is walked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import InvalidInputError
from ..suggestions import nearest
from .queues import Part, Step

#: What all others are plugged behind, in the end.
ROOT = "host"


@dataclass(frozen=True)
class PartGroup:
    """Parts that are equal.

    Attributes:
        name: of the group.
        behind: the group on the way to the host; None: it is the host's end of all ways.
        count: of them.
        places, latency_s, bytes_per_s: of each, see `Part`.
    """

    name: str
    behind: str | None
    count: int = 1
    places: int = 1
    latency_s: float = 0.0
    bytes_per_s: float | None = None


@dataclass(frozen=True)
class Leg:
    """A group that a command passes.

    Attributes:
        group: its name.
        carries: of a command's sizes, by name, which passes there; None: no bytes.
        until: the later leg whose end frees the place, by its group's name; None: this one's.
    """

    group: str
    carries: str | None = None
    until: str | None = None


@dataclass(frozen=True)
class System:
    """A machine. Made, it is sound: all rates are above 0, all parts hang together, without a
    circle, and every leg leads to one.

    Attributes:
        name: of it.
        groups: of parts.
        verbs: the legs of each verb's command, in their order.
    """

    name: str
    groups: tuple[PartGroup, ...]
    verbs: Mapping[str, tuple[Leg, ...]]

    def __post_init__(self) -> None:
        known = {group.name: group for group in self.groups}
        if len(known) != len(self.groups):
            raise InvalidInputError(f"parts of {self.name}", got="a name twice")
        for group in self.groups:
            _check_figures(self.name, group)
            _check_way(self.name, group, known)
        for verb, legs in self.verbs.items():
            _check_legs(f"{verb} on {self.name}", legs, known)

    def legs(self, verb: str) -> tuple[Leg, ...]:
        """Raises InvalidInputError: no part serves that verb."""
        if verb not in self.verbs:
            raise InvalidInputError(
                f"a verb that no part of {self.name} serves",
                got=verb,
                expected=", ".join(self.verbs),
                fix=meant(verb, self.verbs),
            )
        return self.verbs[verb]

    def group(self, name: str) -> PartGroup:
        return next(group for group in self.groups if group.name == name)

    def parts(self) -> list[Part]:
        """All parts, group by group."""
        return [
            Part(group.places, group.latency_s, group.bytes_per_s)
            for group in self.groups
            for _ in range(group.count)
        ]

    def names(self) -> list[str]:
        """The group of each of `parts`."""
        return [group.name for group in self.groups for _ in range(group.count)]

    def route(
        self, verb: str, sizes: Mapping[str, float], members: Mapping[str, int]
    ) -> tuple[Step, ...]:
        """The way of a command.

        Args:
            sizes: bytes by what `Leg.carries` names.
            members: which of its parts, by group; of others the first.

        Raises:
            InvalidInputError: an unknown verb.
        """
        first, place = {}, 0
        for group in self.groups:
            first[group.name] = place
            place += group.count
        legs = self.legs(verb)
        numbers = {leg.group: number for number, leg in enumerate(legs)}
        return tuple(
            Step(
                first[leg.group] + members.get(leg.group, 0),
                0.0 if leg.carries is None else sizes[leg.carries],
                None if leg.until is None else numbers[leg.until],
            )
            for leg in legs
        )


def meant(word: str, known: Iterable[str]) -> str | None:
    """The fix of a word that is none of those."""
    near = nearest(word, known)
    return None if near is None else f"did you mean {near}?"


def _check_figures(system: str, group: PartGroup) -> None:
    what = f"{group.name} of {system}"
    rate = group.bytes_per_s
    if rate is not None and not 0 < rate < math.inf:
        raise InvalidInputError(f"the rate of {what}", got=rate, expected="bytes/s above 0")
    if not 0 <= group.latency_s < math.inf:
        raise InvalidInputError(f"the latency of {what}", got=group.latency_s, expected="0 or more")
    if group.count < 1 or group.places < 1:
        raise InvalidInputError(
            f"how many {what} there are, and their places",
            got=f"{group.count} x {group.places}",
            expected="1 or more of each",
        )


def _check_way(system: str, group: PartGroup, known: Mapping[str, PartGroup]) -> None:
    """Whether it hangs on the host, by way of others and not of itself."""
    seen, at = [group.name], group
    while at.behind is not None:
        if at.behind in seen:
            raise InvalidInputError(
                f"the parts of {system}",
                got=f"a circle: {' behind '.join([*seen, at.behind])}",
                expected=f"each behind others, up to {ROOT}",
            )
        if at.behind not in known:
            raise _unconnected(system, at.name, f"behind {at.behind}, which is no part")
        seen.append(at.behind)
        at = known[at.behind]
    if at.name != ROOT:
        raise _unconnected(system, group.name, f"on no way to {ROOT}")


def _unconnected(system: str, name: str, got: str) -> InvalidInputError:
    return InvalidInputError(
        f"{name} of {system} is not connected", got=got, expected=f"behind others, up to {ROOT}"
    )


def _check_legs(what: str, legs: Sequence[Leg], known: Mapping[str, PartGroup]) -> None:
    numbers = {leg.group: number for number, leg in enumerate(legs)}
    if not legs or len(numbers) != len(legs):
        raise InvalidInputError(what, got="no leg, or a part twice", expected="parts, each once")
    for number, leg in enumerate(legs):
        if leg.group not in known:
            raise InvalidInputError(
                what, got=leg.group, expected=", ".join(known), fix=meant(leg.group, known)
            )
        if leg.until is not None and numbers.get(leg.until, -1) <= number:
            raise InvalidInputError(
                f"until when {what} keeps {leg.group}", got=leg.until, expected="a later leg"
            )
