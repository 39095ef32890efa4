"""What a search returns: hits, and where the time and the bytes went."""

from __future__ import annotations

from dataclasses import dataclass, field

from .texts import DocumentId


@dataclass(frozen=True)
class Hit:
    """One document of a ranking.

    Attributes:
        id: the document's own id.
        score: ``cls_weight * CLS + MaxSim``; for a document that was not re-ranked, the first stage's similarity alone.
        text: as it was indexed.
        number: the record's number in the store.
        reranked: whether `score` is exact. All re-ranked hits come before all others.
    """

    id: DocumentId
    score: float
    text: str
    number: int
    reranked: bool


@dataclass
class Timings:
    """Seconds, wall clock. Stages overlap, so they do not add up to `total_s`.

    Attributes:
        encode_s: query encoding.
        delta_s: first stage over the first lists, until the candidates to prefetch are known.
        prefetch_budget_s: first stage over the remaining lists: what prefetching can hide in (ESPN, eq. 2).
        prefetch_s: from the start of the prefetch to its last record scored.
        critical_io_s: waiting for records after the first stage was complete.
        maxsim_s: checking and scoring, in both threads together.
        merge_s: ordering, and looking up ids and texts.
        total_s: the whole search.
    """

    encode_s: float = 0.0
    delta_s: float = 0.0
    prefetch_budget_s: float = 0.0
    prefetch_s: float = 0.0
    critical_io_s: float = 0.0
    maxsim_s: float = 0.0
    merge_s: float = 0.0
    total_s: float = 0.0

    @property
    def first_stage_s(self) -> float:
        return self.delta_s + self.prefetch_budget_s


@dataclass(frozen=True)
class SearchResult:
    """A ranking and its cost.

    Attributes:
        hits: at most k, best first.
        candidates: how many the first stage found.
        reranked: how many of them were scored exactly.
        hit_rate: share of the re-ranked documents whose read had been started by the prefetch; 0 without one.
        bytes_asked: sizes of the records read (prefetched in vain included).
        bytes_moved: what the engine moved for them, alignment and gaps included.
        requests: after merging.
        effective_path: the path the records took.
    """

    hits: list[Hit]
    candidates: int = 0
    reranked: int = 0
    hit_rate: float = 0.0
    bytes_asked: int = 0
    bytes_moved: int = 0
    requests: int = 0
    effective_path: str = ""
    timings: Timings = field(default_factory=Timings)
