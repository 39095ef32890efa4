"""What a search returns: hits, and where the time and the bytes went."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...storage.documents.ids import DocumentId
from ...tables import printable

if TYPE_CHECKING:
    from ...device.emulation.use import DeviceUse

_INDENT = " " * 15
_MATCHES_SHOWN = 8


@dataclass(frozen=True)
class TokenMatch:
    """Why a document scores what it scores: MaxSim is the sum of these.

    Attributes:
        query_token, document_token: positions; the document's token that is most similar to the
            query's.
        score: their product.
    """

    query_token: int
    document_token: int
    score: float


@dataclass(frozen=True)
class StageRank:
    """What a first stage said of a document.

    Attributes:
        rank: among its candidates, from 1. score: its own similarity.
    """

    rank: int
    score: float


@dataclass(frozen=True)
class Hit:
    """One document of a ranking.

    Attributes:
        id: the document's own id.
        score: ``cls_weight * CLS + MaxSim`` (of a document without tokens 0); for a document that
            was not re-ranked, the first stage's similarity alone (in a cascade the score of its
            coarse record). With ``fuse="rrf+maxsim"`` the fused one.
        text: as it was indexed.
        number: the record's number in the store. It changes when the store is compacted; `id` does
            not.
        reranked: whether MaxSim has scored it exactly. All re-ranked hits come before all others,
            but with ``fuse="rrf+maxsim"``.
        found_by: by first stage: the rank that it gave the document, from 1, the same for equal
            scores, and its score; without those that did not find it. With ``fuse="rrf+maxsim"``
            also ``maxsim``.
        matches: one per query token, where the search was asked to explain; empty for a document or
            a query without tokens.
    """

    id: DocumentId
    score: float
    text: str
    number: int
    reranked: bool
    matches: tuple[TokenMatch, ...] | None = None
    found_by: Mapping[str, StageRank] = field(default_factory=dict, compare=False)


@dataclass
class Timings:
    """Seconds, wall clock. Stages overlap, so they do not add up to `total_s`. Queries searched
    together share theirs.

    Attributes:
        encode_s: query encoding.
        delta_s: first stage over the first lists, until the candidates to prefetch are known.
        prefetch_budget_s: first stage over the remaining lists: what prefetching can hide in (ESPN,
            eq. 2).
        prefetch_s: from the start of the prefetch to its last record scored.
        critical_io_s: waiting for records after the first stage was complete.
        maxsim_s: checking and scoring, in all threads together.
        coarse_s: of that, scoring coarse records in RAM.
        merge_s: ordering, looking up ids and texts, explaining.
        total_s: the whole search.
        predicted_s: what was predicted for `total_s` without encoding and merging, where the search
            chose its steps by that; else 0.
    """

    encode_s: float = 0.0
    delta_s: float = 0.0
    prefetch_budget_s: float = 0.0
    prefetch_s: float = 0.0
    critical_io_s: float = 0.0
    maxsim_s: float = 0.0
    coarse_s: float = 0.0
    merge_s: float = 0.0
    total_s: float = 0.0
    predicted_s: float = 0.0

    @property
    def first_stage_s(self) -> float:
        return self.delta_s + self.prefetch_budget_s

    def __str__(self) -> str:
        return (
            f"{self.total_s * 1e3:.1f} ms: encode {self.encode_s * 1e3:.1f}, first stage "
            f"{self.first_stage_s * 1e3:.1f}, critical I/O {self.critical_io_s * 1e3:.1f}, MaxSim "
            f"{self.maxsim_s * 1e3:.1f}, merge {self.merge_s * 1e3:.1f}"
        )


@dataclass(frozen=True, repr=False)
class SearchResult:
    """A ranking and its cost. A sequence of its hits. Prints as `summary`.

    Queries searched together share their reads: costs are then those of all of them, divided
    evenly.

    Attributes:
        hits: at most k, best first.
        candidates: how many the first stage found.
        reranked: how many of them were scored exactly.
        hit_rate: share of the re-ranked documents whose read had been started by the prefetch; 0
            without one.
        bytes_asked: sizes of the records read (prefetched and not used, too); ids and texts of the
            hits, a few KiB, are not counted.
        bytes_moved: what the engine moved for them, alignment and gaps included.
        requests: after merging.
        hot: records that needed no read, being kept in RAM.
        effective_path: the path that records take, of all data files: ``mixed: uring 3, uring
            (buffered) 1`` where they differ.
        fallback_reason: why it is not what was tried first; empty if it is.
        prefetch_steps: shares of the lists after which reads began; empty without a prefetch.
        queries_together: how many were searched together, this one included.
        stages: the first stages that found the candidates.
        stage_requests, stage_bytes: what they read from storage for it, whole blocks; 0 of stages
            in memory. Not in the numbers above.
        stage_device_bytes: of these, what devices have read that somebody has named.
        device: of records on emulated devices: what all queries of the call took them together,
            from vectors to hits; else None.
    """

    hits: list[Hit]
    candidates: int = 0
    reranked: int = 0
    hit_rate: float = 0.0
    bytes_asked: int = 0
    bytes_moved: int = 0
    requests: int = 0
    hot: int = 0
    effective_path: str = ""
    fallback_reason: str = ""
    prefetch_steps: tuple[float, ...] = ()
    queries_together: int = 1
    stages: tuple[str, ...] = ()
    stage_requests: int = 0
    stage_bytes: int = 0
    stage_device_bytes: int = 0
    timings: Timings = field(default_factory=Timings)
    device: DeviceUse | None = None

    def __iter__(self) -> Iterator[Hit]:
        return iter(self.hits)

    def __len__(self) -> int:
        return len(self.hits)

    def __getitem__(self, rank: int) -> Hit:
        """The hit of that rank, from 0."""
        return self.hits[rank]

    def __repr__(self) -> str:
        best = f", best {self.hits[0].id!r} {self.hits[0].score:.3f}" if self.hits else ""
        return f"<SearchResult: {len(self.hits)} hits{best}, {self.timings.total_s * 1e3:.1f} ms>"

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """The ranking, two lines a hit, and where the time and the bytes went."""
        lines = []
        for rank, hit in enumerate(self.hits, start=1):
            lines.append(
                f"{rank:3}. {hit.score:8.3f}  {hit.id}{'' if hit.reranked else '  (not re-ranked)'}"
            )
            lines.append(_INDENT + textwrap.shorten(hit.text, width=100, placeholder=" ..."))
            if len(self.stages) > 1:
                said = (
                    f"{kind} {hit.found_by[kind].rank}" if kind in hit.found_by else f"{kind} -"
                    for kind in self.stages
                )
                lines.append(_INDENT + "ranks: " + ", ".join(said))
            if hit.matches:
                best = sorted(hit.matches, key=lambda match: -match.score)[:_MATCHES_SHOWN]
                lines.append(
                    _INDENT
                    + ", ".join(f"q{m.query_token}~d{m.document_token} {m.score:.2f}" for m in best)
                )
        device = [] if self.device is None else [f"  {self.device.summary()}"]
        return printable("\n".join([*lines, f"  {self.timings} | {self._cost()}", *device]))

    def _cost(self) -> str:
        prefetch = (
            f"prefetch hit rate {self.hit_rate:.0%}" if self.prefetch_steps else "no prefetch"
        )
        records = (
            f"{self.reranked} of {self.candidates} candidates re-ranked, {prefetch} | "
            f"{self.bytes_asked / 1e6:.2f} MB asked, {self.bytes_moved / 1e6:.2f} MB moved "
            f"in {self.requests} requests by {self.effective_path}"
        ) + (f" ({self.fallback_reason})" if self.fallback_reason else "")
        if not self.stage_requests:
            return records
        return (
            f"{records} | {', '.join(self.stages)}: {self.stage_bytes / 1e6:.2f} MB in "
            f"{self.stage_requests} requests"
        )
