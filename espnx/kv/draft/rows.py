"""Which rows each kind of draft attends to.

A file of its own: `tally` is imported where tensors are not.
"""

from __future__ import annotations

from functools import partial

from .packed import PackedTier
from .pages import PageTier
from .tally import Tally
from .tier import MakeTier


def tier_of(tally: Tally | None) -> MakeTier | None:
    """Makes the rows for drafts of a layer; None: the draft needs none."""
    if tally is None:
        return None
    if tally.kind == "pages" and tally.share is not None:
        return partial(PageTier, tally.share)
    return PackedTier if tally.kind == "4bit" else None
