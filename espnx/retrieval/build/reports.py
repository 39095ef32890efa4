"""What building and changing a store report: numbers for programs, and `summary()` for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...sizes import format_size
from ...tables import render_table
from ..first_stage.registry import in_words


@dataclass(frozen=True)
class BuildReport:
    """What a build did. Sizes in bytes, times in seconds.

    Attributes:
        without_tokens: documents without a token vector: no MaxSim tells them apart.
        resident_bytes_per_document: of all that an open store holds beside the first stage.
            trained_bytes: of that, projection and codebooks, which do not grow with the number of
            documents.
        resumed_documents: taken from an interrupted build. restarted_because: why not all that it
            had was taken; None where all was.
        first_stage: its kind and `describe()`, as the manifest has them.
    """

    path: str
    documents: int
    tokens: int
    without_tokens: int
    generation: int
    resumed_documents: int
    record_bytes: int
    resident_bytes_per_document: float
    trained_bytes: int
    first_stage: Mapping[str, Any]
    spool_s: float
    arrange_s: float
    write_s: float
    restarted_because: str | None = None

    def summary(self) -> str:
        """A table of several lines."""
        resumed = (
            f" ({self.resumed_documents:,} from the interrupted build)"
            if self.resumed_documents
            else ""
        )
        each = self.resident_bytes_per_document - self.trained_bytes / max(self.documents, 1)
        trained = (
            f", and {format_size(self.trained_bytes)} that was trained"
            if self.trained_bytes
            else ""
        )
        rows = [
            ("documents", f"{self.documents:,}{resumed}"),
            *(
                [
                    (
                        "without tokens",
                        f"{self.without_tokens:,} of them (no text?): MaxSim scores them 0",
                    )
                ]
                if self.without_tokens
                else []
            ),
            ("token vectors", f"{self.tokens:,}"),
            ("records on disk", format_size(self.record_bytes)),
            ("resident metadata", f"{each:.3f} bytes a document{trained}"),
            ("first stage", in_words(self.first_stage)),
            *([("began anew", self.restarted_because)] if self.restarted_because else []),
            (
                "time",
                (
                    f"{self.spool_s:.1f} s encode and spool, {self.arrange_s:.1f} s arrange, "
                    f"{self.write_s:.1f} s write"
                ),
            ),
        ]
        text = render_table(("", ""), rows)
        return (
            text
            if self.documents
            else f"{text}\nno document: {self.path} is empty; the first addition trains its lists"
        )


@dataclass(frozen=True)
class AddReport:
    """What an addition did.

    Attributes:
        documents: added. replaced: of them, those that took another's place.
        generation: the store's version; with no document, the one that it had.
        record_bytes: of the new parts' files, merged ones included.
        parts: of the store now. merged: that became one in this call.
        dead_share, added_share: of the records; see `compacting_pays`.
        compacting_pays: whether `compact` is advised.
    """

    path: str
    documents: int
    replaced: int
    tokens: int
    generation: int
    record_bytes: int
    parts: int
    merged: int
    dead_share: float
    added_share: float
    compacting_pays: bool

    def summary(self) -> str:
        """One line."""
        pays = "; `espnx index compact` pays now" if self.compacting_pays else ""
        return (
            f"{self.path}: {self.documents:,} documents added, generation {self.generation}, "
            f"{self.parts} parts{pays}"
        )


@dataclass(frozen=True)
class CompactReport:
    """What compacting did. Sizes in bytes."""

    path: str
    documents: int
    dropped: int
    parts: int
    generation: int
    size_bytes_before: int
    size_bytes: int

    def summary(self) -> str:
        """One line."""
        sizes = f"{format_size(self.size_bytes_before)} to {format_size(self.size_bytes)}"
        return (
            f"{self.path}: {self.documents:,} documents in one part ({self.parts} before), "
            f"{self.dropped:,} dropped, {sizes}"
        )


@dataclass(frozen=True)
class DetachReport:
    """What detaching did. `directories`: where data segments lie now, beside the store's own.
    `adopted`: nothing was copied. Sizes in bytes."""

    path: str
    directories: list[str]
    files: int
    size_bytes: int
    adopted: bool

    def summary(self) -> str:
        """One line."""
        done = f"{self.files} data files copied, {format_size(self.size_bytes)}"
        return f"{self.path}: {'the data directories are its own' if self.adopted else done}"
