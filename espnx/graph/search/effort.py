"""How long a list a walk needs, by what was measured when the graph was built: with a filter, too,
and whether measuring all that it allows is less work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ... import errors
from ...checks import check_whole
from ..filters import NodeFilter
from ..format import GraphFacts, RecallPoint
from .probing import Probing

_RECALL = 0.95
_UNMEASURED = 320  # candidates of a walk where the build measured no list
# And clusters that it goes through: a margin, as a share of the centroids' spread.
_UNMEASURED_SHARE = 1.5
# That cost about as much as reading a page, summing it, and estimating how far its neighbours are.
_DISTANCES_PER_PAGE = 256
# A filter of so much of a share is taken for one of it.
_ALIKE = 0.8
_NEAR_OF_FAR = 4
#: Of the pages that measuring all reads, as many as one of a walk is worth: walks need room to go
#: astray, up to as many pages. Where they seek a region, hundreds of reads wait for one another;
#: all its pages, which are asked for together, come sooner, and nothing is missed.
WALK_PAGES, REGION_PAGES = 2, 8


@dataclass(frozen=True)
class Effort:
    """What walks with a filter take.

    Attributes:
        list_size: candidates that they keep. far_list_size: those of one around which others are
            allowed than elsewhere.
        pages, far_pages: that a query reads near what is allowed, and far from it.
        worth_pages: of those that measuring all would read, as many as a walk's are worth.
    """

    list_size: int
    far_list_size: int
    pages: float
    far_pages: float
    worth_pages: int = WALK_PAGES

    def is_dearer_than_all(self, n_queries: int, all_pages: int, count: int) -> bool:
        """Whether walks cost more than measuring all allowed rows for all queries at a time."""
        measuring = n_queries * count / _DISTANCES_PER_PAGE
        return (
            all_pages <= self.worth_pages * self.far_pages
            or all_pages + measuring <= n_queries * self.pages
        )


def lists_of_region(near: int, far: int) -> tuple[int, int]:
    """Candidates that walks keep near what a region allows, and far from it, where random filters
    want `near`. At its edge a walk may take itself for one among allowed rows: both lists grow."""
    return max(near, far // _NEAR_OF_FAR), max(near, far)


def list_size_for(facts: GraphFacts, recall: float) -> RecallPoint:
    """See `GraphIndex.list_size_for`."""
    if not isinstance(recall, int | float) or not 0 < recall <= 1:
        raise errors.InvalidInputError("recall", got=recall, expected="above 0, at most 1")
    if not facts.recall and facts.layout.n > _UNMEASURED:
        raise errors.InvalidInputError(
            "recall",
            got=recall,
            expected=(
                "a list_size: no list was measured, as the build was interrupted right after "
                "the graph was whole"
            ),
        )
    if facts.is_stale:
        raise errors.InvalidInputError(
            "recall",
            got=recall,
            expected=(
                f"a list_size: {facts.unmeasured:,} vectors were added or deleted since lists were "
                f"measured, and there are {facts.layout.n:,}"
            ),
            fix="measure again: espnx graph merge --measure always, merge(measure='always')",
        )
    if not facts.recall:  # too few vectors to measure anything
        return RecallPoint(max(10, facts.layout.n), 1.0, float(facts.layout.n_pages))
    found = next((each for each in facts.recall if each.recall >= recall), None)
    if found is None:
        last = facts.recall[-1]
        raise errors.InvalidInputError(
            "recall",
            got=recall,
            expected=(
                f"at most {last.recall:.4f}, what a list of {last.list_size} was measured to find"
            ),
            fix=(
                f"list_size above {last.list_size}; or build with more pq_bytes, or "
                "vector_dtype float32"
            ),
        )
    return found


def usual_point(facts: GraphFacts) -> RecallPoint:
    """What a search does that names neither a list nor a recall."""
    reached = [each for each in facts.recall if each.recall >= _RECALL]
    found = [*reached, *facts.recall[-1:]]
    if found:
        return found[0]
    list_size = max(10, min(facts.layout.n, _UNMEASURED))
    return RecallPoint(list_size, 0.0, 0.0)


def probing_of(
    facts: GraphFacts, nprobe: Any, point: RecallPoint, list_size: int | None
) -> Probing | None:
    """The clusters of a search that does what `point` says, or keeps a list of another size; None:
    there are none. Raises InvalidInputError."""
    if facts.clusters is None:
        if nprobe is None:
            return None
        raise errors.InvalidInputError(
            "nprobe, clusters to search",
            got=repr(nprobe),
            expected="none: this is one graph",
            fix="build it with clusters=",
        )
    if nprobe not in (None, "auto"):
        check_whole("nprobe, clusters to search", nprobe, 1, 1 << 31)
        return Probing(count=nprobe)
    if list_size is not None and facts.recall:
        longer = (each for each in facts.recall if each.list_size >= list_size)
        point = next(longer, facts.recall[-1])
    return Probing(margin=_margin_of(facts, point))


def _margin_of(facts: GraphFacts, point: RecallPoint) -> float:
    """See `Probing`; one that lets some clusters through where nothing was measured."""
    if point.probe_margin is not None:
        return point.probe_margin
    spread = 0.0 if facts.clusters is None else facts.clusters.spread
    return _UNMEASURED_SHARE * (spread**0.5 if facts.metric == "ip" else spread)


def filtered_probing(facts: GraphFacts, probing: Probing | None) -> Probing | None:
    """The clusters of a search with a filter: no fewer than those through which such were
    measured."""
    if probing is None:
        return None
    return replace(probing, margin=max(probing.margin, _margin_of(facts, usual_point(facts))))


def effort_of(facts: GraphFacts, nodes: NodeFilter, recall: float | None) -> Effort | None:
    """What walks take that were measured to find that share where so many rows are allowed; None:
    there are none."""
    wanted, share = _RECALL if recall is None else recall, nodes.rows.count / max(1, facts.layout.n)
    at = next((i for i, each in enumerate(facts.filtered) if _ALIKE * each.share <= share), None)
    if at is None:
        return None
    measured = facts.filtered[at]
    near = next((each for each in measured.near if each.recall >= wanted), None)
    if near is None:
        return None
    if nodes.is_scattered:  # few queries, if any, seem far from what is allowed
        return Effort(
            near.list_size,
            max([near.list_size, *(each.list_size for each in measured.far)]),
            near.pages,
            near.pages,
        )
    # Regions of more rows may be harder than those of fewer: a part of one cluster is found
    # more easily than pieces of several.
    around = facts.filtered[max(0, at - 1) : at + 1]
    far = [next((point for point in each.far if point.recall >= wanted), None) for each in around]
    reached = [each for each in far if each is not None]
    if len(reached) < len(far):
        return None
    length = max(each.list_size for each in reached)
    return Effort(
        *lists_of_region(near.list_size, length),
        near.pages,
        max(each.pages for each in reached),
        REGION_PAGES,
    )
