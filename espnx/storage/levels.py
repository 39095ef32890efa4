"""When parts of a store become one: small ones into larger ones, so that there are few however many
additions there were.

A part of n records is of level log8(n). Levels descend from the oldest addition to the newest, and
there are at most eight parts of one: the ninth makes them all one of the next. So every record is
copied once a level, and a million additions leave some fifty parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

PARTS_PER_LEVEL = 8


def level(count: int) -> int:
    """The level of a part of so many records: 0 for 1 to 7, 1 for 8 to 63, ..."""
    return (max(1, count).bit_length() - 1) // 3


def groups_to_merge(counts: Sequence[int]) -> list[range]:
    """Which parts are to become one: runs of at least two of them, ascending.

    Args:
        counts: records of each part that was added, oldest first.
    """
    groups: list[tuple[range, int]] = []
    for place, count in enumerate(counts):
        group, total, taken = range(place, place + 1), count, True
        while taken:
            smaller = _trailing(groups, lambda other, total=total: other < level(total))  # type: ignore[misc]
            rest = groups[: len(groups) - smaller]
            same = _trailing(rest, lambda other, total=total: other == level(total))  # type: ignore[misc]
            # a newer part is never the larger one
            taken_parts = smaller + same if same >= PARTS_PER_LEVEL else smaller
            taken = taken_parts > 0
            if taken:
                group = range(groups[-taken_parts][0].start, group.stop)
                total += sum(size for _, size in groups[-taken_parts:])
                del groups[-taken_parts:]
        groups.append((group, total))
    return [group for group, _ in groups if len(group) > 1]


def _trailing(groups: Sequence[tuple[range, int]], holds: Callable[[int], bool]) -> int:
    """How many of the last groups have a level for which this holds."""
    count = 0
    while count < len(groups) and holds(level(groups[-1 - count][1])):
        count += 1
    return count
