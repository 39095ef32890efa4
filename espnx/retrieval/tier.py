"""A tier: one kind of record of every document of a store. Says where each lies, reads records and checks them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from .. import errors
from ..device.readers import host_memory
from ..ops.maxsim import Codebook
from ..storage import Engine, NativeEngine, Plan
from ..storage.engine import DEFAULT_DEADLINE_S, FileHandle, Future
from ..storage.native import RecordPlace, load_native
from .record import RecordSchema, damage, unknown_centroid

_REBUILD = "restore the store from a copy, or build it again"


@dataclass(frozen=True)
class Placement:
    """Where a tier's records lie.

    Attributes:
        group_offset_bytes: int64, offset of records 0, 64, 128, ... in their data files.
        segment_begin: int64, first record of each data file.
        files: the open data files.
    """

    group_offset_bytes: torch.Tensor
    segment_begin: torch.Tensor
    files: Sequence[FileHandle]


class Tier:
    """See the module.

    Args:
        engine: of the reads; stays the caller's.
        n_tokens: uint16 [n], tokens of each document.
        salt: seeds the records' checksums.
        codebook: of residual formats.
    """

    def __init__(
        self, engine: Engine, schema: RecordSchema, n_tokens: np.ndarray, placement: Placement, salt: int, codebook: Codebook | None = None
    ):
        self._engine, self._placement = engine, placement
        self.schema, self.n_tokens, self.salt, self.codebook = schema, n_tokens, salt, codebook
        self._counts = torch.from_numpy(n_tokens)
        self._handles = torch.tensor([file.number for file in placement.files], dtype=torch.int64)
        self._record_place = RecordPlace(
            self._counts, placement.group_offset_bytes, placement.segment_begin, self._handles, schema.fixed_bytes, schema.row_bytes
        )

    @property
    def size_bytes(self) -> int:
        """On disk."""
        return sum(file.size_bytes for file in self._placement.files)

    @property
    def resident_bytes(self) -> int:
        """Offsets and file numbers, beside the token counts that all tiers share."""
        place = self._placement
        return place.group_offset_bytes.nbytes + place.segment_begin.nbytes + self._handles.nbytes

    def locate(self, numbers: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(data file, offset_bytes, size_bytes) of record numbers, int64 [m] each. Raises InvalidInputError outside the store."""
        wanted = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64))
        place, schema = self._placement, self.schema
        return load_native().locate_records(
            wanted, self._counts, place.group_offset_bytes, place.segment_begin, schema.fixed_bytes, schema.row_bytes
        )

    def plan(self, numbers: np.ndarray) -> Plan:
        """A read of whole records."""
        segment, offset_bytes, size_bytes = self.locate(numbers)
        file = self._handles[segment] if len(self._handles) else segment
        return Plan(file=file, offset_bytes=offset_bytes, size_bytes=size_bytes)

    def read(
        self,
        numbers: np.ndarray,
        *,
        gap_bytes: int,
        priority: int = 0,
        deadline_s: float = DEFAULT_DEADLINE_S,
        device: torch.device | None = None,
    ) -> Future:
        """Starts reading records; item i of the future is record `numbers[i]`. What arrives must pass `check` before it is used.

        `device`: where they go next. On their way to a GPU, records that the engine brings to host memory lie packed in pinned memory,
        from which they cross as fast as the link allows.
        """
        if not isinstance(self._engine, NativeEngine):
            return self._engine.read(self.plan(numbers), gap_bytes=gap_bytes, priority=priority, deadline_s=deadline_s)
        if device is not None and device.type == "cuda":
            plan = self.plan(numbers)
            packed = replace(plan, out_offset_bytes=plan.size_bytes.cumsum(0) - plan.size_bytes)
            out = host_memory(int(plan.size_bytes.sum()), device)
            return self._engine.read(packed, out, gap_bytes=gap_bytes, priority=priority, deadline_s=deadline_s)
        wanted = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64))
        return self._engine.read_records(wanted, self._record_place, gap_bytes=gap_bytes, priority=priority, deadline_s=deadline_s)

    def check(self, memory: torch.Tensor, positions: torch.Tensor, numbers: np.ndarray) -> None:
        """Raises ChecksumError or StaleDataError, naming file, offset and length, unless every record is whole and the right one;
        FormatError likewise where one names a centroid that the codebook has not."""
        n_tokens = self.n_tokens[numbers]
        found = damage(memory, self.schema, positions, numbers, n_tokens, self.salt)
        if found:
            index, what = found[0]
            expected = f"record {numbers[index]} with {n_tokens[index]} tokens"
            raise (errors.ChecksumError if what.startswith("CRC32C") else errors.StaleDataError)(
                f"record {numbers[index]} is not what was written" + (f" (and {len(found) - 1} more)" if len(found) > 1 else ""),
                **self._place(numbers[index : index + 1]),
                got=what,
                expected=f"{expected} in format {self.schema.format_number} ({self.schema.format})",
                fix="run `espnx index verify`; " + _REBUILD,
            )
        if self.codebook is None:
            return
        unknown = unknown_centroid(memory, self.schema, positions, n_tokens, self.codebook.n_centroids)
        if unknown is not None:
            raise errors.FormatError(
                f"record {numbers[unknown[0]]} names a centroid that is not in the codebook",
                **self._place(numbers[unknown[0] : unknown[0] + 1]),
                got=unknown[1],
                expected=f"0 to {self.codebook.n_centroids - 1}",
                fix=_REBUILD,
            )

    def _place(self, number: np.ndarray) -> dict[str, Any]:
        """Of one record, as errors name it."""
        segment, offset_bytes, size_bytes = self.locate(number)
        path = self._placement.files[int(segment[0])].path
        return {"path": path, "offset_bytes": int(offset_bytes[0]), "size_bytes": int(size_bytes[0])}
