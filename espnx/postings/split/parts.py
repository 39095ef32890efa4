"""One part of a collection, as a device that scans it needs to know it, and what all parts are
together."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from ... import errors
from ...storage import NativeEngine
from ..devices.lists import SegmentLists
from ..files import open_segment
from ..format import Facts, SplitFacts
from ..queries import directories_of
from ..search.plan import Collection
from ..stored.layout import LISTS
from .publishing import read_current


class PartLists(SegmentLists):
    """The lists of a directory.

    Args:
        directory: that `build_split` has made. facts: of it.
    """

    def __init__(self, directory: str, facts: Facts):
        (stored,) = facts.segments
        self.directory = directory
        super().__init__(
            stored.regions(directory)[LISTS],
            stored.n_records,
            lambda engine: open_segment(engine, directory, facts, stored),
        )


def read_parts(
    paths: Iterable[str | os.PathLike[str]],
) -> tuple[list[PartLists], Facts, SplitFacts]:
    """The parts of a collection in the order of their numbers, what they have in common, and how
    they are split.

    Raises InvalidInputError for directories that are not all parts of one collection; as
    `read_facts`.
    """
    directories = directories_of(paths)
    with NativeEngine("auto") as engine:
        found = read_current(engine, directories)
    splits = list[SplitFacts]()
    for directory, facts in zip(directories, found, strict=True):
        if facts.split is None or len(facts.segments) != 1:
            raise errors.InvalidInputError(
                f"postings in {directory}",
                got="an index of their own",
                expected="a part of a collection",
                fix="open it by espnx.Postings",
            )
        splits.append(facts.split)
    wanted = splits[0]
    if len({each.collection for each in splits}) > 1:
        raise errors.InvalidInputError(
            "parts of a collection", got=f"those of several, in {directories}", expected="of one"
        )
    if sorted(each.part for each in splits) != list(range(wanted.n_parts)):
        got = f"{sorted(each.part for each in splits)} of {wanted.n_parts}"
        raise errors.InvalidInputError(
            "parts of a collection",
            got=got,
            expected="each once",
            fix="name the directories of all of them",
        )
    order = sorted(range(len(splits)), key=lambda i: splits[i].part)
    return [PartLists(directories[i], found[i]) for i in order], found[0], wanted


def collection_of(parts: Sequence[PartLists], split: SplitFacts) -> Collection:
    """The totals of all parts: how many records there are, how long they are, and how many have a
    term.

    Raises FormatError where they are not those of the whole.
    """
    segments = [each.segment for each in parts]
    found = Collection(segments)
    if split.placement == "terms":  # every part has all records: they count once
        held = segments[0]
        n_others = len(segments) - 1
        found = Collection(segments, (n_others * len(held), n_others * held.dictionary.sum_lengths))
    if found.n_records != split.n_records:
        raise errors.FormatError(
            "parts of a collection",
            path=parts[0].directory,
            got=f"{found.n_records} records",
            expected=split.n_records,
            fix="restore them from a copy, or build them again",
        )
    return found
