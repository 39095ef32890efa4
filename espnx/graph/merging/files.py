"""Which files of pages the next version of a graph of clusters keeps: what clusters that were
written anew have left behind is bounded, and so are the files."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..parts import PageFile

#: Files of pages in a directory, at most.
FILES_MOST = 8
#: Of a file less of which is needed, all that is needed goes into the new one.
_NEEDED_LEAST = 0.5


def chosen_files(page_files: Sequence[PageFile], pages: np.ndarray, files: np.ndarray) -> list[int]:
    """Numbers of files that stay; clusters in others are copied into new ones.

    Args:
        page_files: that there are.
        pages: int64 [m]: of clusters. files: int64 [m]: which of the files each is in; -1: it is
            written anew.
    """
    stays = files >= 0
    needed = np.bincount(files[stays], pages[stays], len(page_files))
    kept = [
        number
        for number, each in enumerate(page_files)
        if needed[number] > 0 and needed[number] >= _NEEDED_LEAST * each.pages
    ]
    for directory in {each.directory for each in page_files}:
        there = [each for each in kept if page_files[each].directory == directory]
        there.sort(key=lambda each: (needed[each], each))
        for each in there[: max(0, len(there) - (FILES_MOST - 1))]:
            kept.remove(each)
    return kept
