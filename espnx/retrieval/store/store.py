"""The embedding store: opens what a build published, says where each record lies, reads records and
checks them.

What stays in memory is 2.125 bytes a document (token counts, and one offset per 64 records);
docs/store-format.md is the written format.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from types import TracebackType
from typing import Any

import numpy as np
import torch

from ... import errors
from ...device.interface import RecordDevice
from ...device.record_layout import RecordSchema
from ...device.registry import open_records
from ...ops.maxsim import Codebook, token_format
from ...sizes import format_size
from ...storage import NativeEngine
from ...storage.documents.ids import DocumentId, id_order
from ...storage.engine import FileHandle, paths_of, reasons_of
from ...storage.files import crc32c, read_file
from ...storage.manifest import NAME as MANIFEST_NAME
from ..first_stage.devices import StageDevices
from ..first_stage.interface import FirstStage, LoadedStage
from ..first_stage.registry import described, in_words
from .manifest import MAGIC as MAGIC
from .manifest import Manifest, read_store_manifest
from .part import GROUP_RECORDS as GROUP_RECORDS
from .part import Part, Segment
from .part_file import REBUILD
from .part_file import VERSION as VERSION
from .places import check_paths, shared_homes
from .projection import Projection
from .tier import Tier

#: Of the names under which a base keeps what the first stage was trained to.
STAGE_PREFIX = "first_stage."


def store_salt(store_id: str, generation: int) -> int:
    """What seeds the records' checksums: different for every store and every base generation of
    one."""
    return crc32c(bytes.fromhex(store_id) + generation.to_bytes(8, "little"))


def stage_model(stage: FirstStage) -> dict[str, np.ndarray]:
    """What the first stage was trained to, as a base keeps it."""
    return {f"{STAGE_PREFIX}{name}": array for name, array in stage.arrays().items()}


_BY_ID_MAX = 4096


class StoreTexts:
    """Ids and texts of all parts. What was deleted is not found by id."""

    def __init__(self, parts: Sequence[Part], is_alive: Callable[[int], bool]):
        self._parts, self._is_alive = list(parts), is_alive
        self._begins = np.array([part.first_number for part in self._parts], dtype=np.int64)

    def get(self, numbers: Sequence[int]) -> list[tuple[DocumentId, str]]:
        """(id, text) of each record number, in the order asked. Raises ChecksumError, FormatError:
        no wrong text is handed out."""
        if len(self._parts) == 1:
            return self._parts[0].texts(numbers)
        of_part = (
            np.searchsorted(self._begins, np.asarray(numbers, dtype=np.int64), side="right") - 1
        )
        result: list[Any] = [None] * len(of_part)
        for which in np.unique(of_part).tolist():
            places = np.flatnonzero(of_part == which).tolist()
            for place, found in zip(
                places, self._parts[which].texts([numbers[place] for place in places]), strict=True
            ):
                result[place] = found
        return result

    def numbers(self, ids: Sequence[DocumentId]) -> np.ndarray:
        """int64 [m]: the record number of each id, -1 where there is none alive."""
        result = np.full(len(ids), -1, dtype=np.int64)
        for part in self._parts:
            missing = np.flatnonzero(result < 0)
            if not len(missing):
                break
            result[missing] = part.numbers(
                [ids[place] for place in missing.tolist()], self._is_alive
            )
        return result

    def first_of(self, numbers: np.ndarray, count: int) -> np.ndarray:
        """The `count` record numbers that come first of some, int64 [m], each once: by id, and
        where they are more than `_BY_ID_MAX`, whose ids would take long to read, by the ids'
        hashes. So neither depends on how records lie."""
        if len(numbers) <= _BY_ID_MAX:
            ids = [identifier for identifier, _ in self.get(numbers.tolist())]
            order = sorted(range(len(ids)), key=lambda place: id_order(ids[place]))
            return numbers[order[:count]]
        hashes, found = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
        for part in self._parts:
            here = numbers[
                (numbers >= part.first_number) & (numbers < part.first_number + part.count)
            ]
            if len(here):
                of_part = part.first_by_hash(here, count)
                hashes.append(of_part[0])
                found.append(of_part[1])
        together = np.concatenate(found)
        return together[np.lexsort((together, np.concatenate(hashes)))[:count]]

    def any_id(self) -> DocumentId | None:
        """The id of some document, for messages; None where there is none."""
        return self._parts[0].texts([self._parts[0].first_number])[0][0] if self._parts else None

    def count(self) -> int:
        """Records of all parts, what was deleted included."""
        return sum(part.count for part in self._parts)


class Version:
    """One version of a store, as its manifest says. Opens a part's file when something of it is
    asked for, and closes it again.

    Attributes:
        manifest: what MANIFEST.json says.
        parts: ascending by record number.
        count: documents.
        deleted: bitmap of deleted records, or None.
        shared_homes: directories that hold its data and are another store's: it can be read then,
            and not changed.
    """

    def __init__(self, path: str | os.PathLike[str], engine: NativeEngine):
        self.path, self.engine = os.fspath(path), engine
        self.manifest: Manifest = read_store_manifest(engine, path)
        check_paths(self.manifest, self.path)
        self.shared_homes = shared_homes(self.path, self.manifest)
        self.count = self.manifest.count
        self.salt = store_salt(self.manifest.store_id, self.manifest.base_generation)
        self.parts = [self.part(entry) for entry in self.manifest.parts]
        self.deleted = self._load_deleted()
        self._check_count()
        self.texts = StoreTexts(self.parts, self.is_alive)

    def part(self, entry: Any) -> Part:
        """A part of this store that `entry` describes."""
        manifest = self.manifest
        return Part(self.path, self.engine, entry, store_id=manifest.store_id, salt=self.salt)

    def is_alive(self, number: int) -> bool:
        return self.deleted is None or not int(self.deleted[number >> 3]) >> (number & 7) & 1

    def _load_deleted(self) -> np.ndarray | None:
        entry = self.manifest.deleted
        if entry is None:
            return None
        path = os.path.join(self.path, entry.path)
        try:
            data = read_file(self.engine, path)
        except errors.FileMissingError as error:
            raise errors.FormatError("file of the store missing", path=path, fix=REBUILD) from error
        if crc32c(data) != entry.crc32c or len(data) != entry.size_bytes:
            raise errors.ChecksumError(
                "damaged file of the store",
                path=path,
                expected=f"CRC32C {entry.crc32c:08x}",
                fix=REBUILD,
            )
        deleted = np.unpackbits(
            np.frombuffer(data, dtype=np.uint8), bitorder="little", count=entry.records
        )
        # what was added since is alive
        bitmap = np.zeros(-(-self.manifest.end_number // 8), dtype=np.uint8)
        packed = np.packbits(deleted, bitorder="little")
        bitmap[: len(packed)] = packed
        return bitmap

    def _check_count(self) -> None:
        alive = sum(part.count for part in self.parts) - (
            0 if self.deleted is None else int(np.unpackbits(self.deleted).sum())
        )
        if self.count != alive:
            raise errors.FormatError(
                "documents of the store",
                path=os.path.join(self.path, MANIFEST_NAME),
                got=self.count,
                expected=f"{alive}, what is left of its parts",
                fix=REBUILD,
            )

    @cached_property
    def model(self) -> dict[str, np.ndarray]:
        """What was trained: of the first stage (``first_stage.``), projection, codebooks. Empty for
        a store without records."""
        return self.parts[0].model if self.parts else {}

    @cached_property
    def first_stage(self) -> FirstStage:
        """The first stage with what was trained; of a store without records, its settings alone.
        Raises FormatError."""
        if not self.parts:
            return self.manifest.first_stage
        arrays = {
            name.removeprefix(STAGE_PREFIX): array
            for name, array in self.model.items()
            if name.startswith(STAGE_PREFIX)
        }
        return self.manifest.first_stage.with_arrays(arrays, self.parts[0].path)

    def load_first_stage(
        self, *, threads: int = 1, gpu: int | None = None, device: StageDevices | None = None
    ) -> LoadedStage:
        """Ready to be searched. `device`: None: the store's engine names the path of its reads.
        Raises what `FirstStage.load` does."""
        device = device or StageDevices(self.engine.requested)
        return self.first_stage.load(
            self.parts, threads=threads, gpu=gpu, deleted=self.deleted, device=device
        )

    @cached_property
    def projection(self) -> Projection | None:
        """The projection from the encoder's dimensions to the records'."""
        shape, is_normalised = (
            (self.manifest.encoder.dim, self.manifest.schema.dim),
            self.manifest.is_normalised is True,
        )
        return (
            projection_of(self.model, shape, is_normalised, self.parts[0].path)
            if self.parts
            else None
        )

    def codebook(self, tier: str) -> Codebook | None:
        return (
            codebook_of(self.model, tier, self.schema_of(tier), self.parts[0].path)
            if self.parts
            else None
        )

    def schema_of(self, tier: str) -> RecordSchema:
        return self.manifest.tiers[tier]

    @property
    def tiers(self) -> list[str]:
        return list(self.manifest.tiers)

    @property
    def data_bytes(self) -> int:
        """Bytes of all data files on disk."""
        return sum(part.entry.data_bytes for part in self.parts)

    @property
    def first_stage_bytes(self) -> int:
        """What the first stage takes in memory, once it is loaded."""
        return self.first_stage.resident_bytes(sum(part.count for part in self.parts))


class EmbeddingStore(Version):
    """A published store, open for reading. One consistent version, whatever is published meanwhile.
    A context manager.

    Args:
        path: the store's directory.
        engine: a native engine, for everything but records; stays the caller's.
        device: keeps and scores the records; stays the caller's too. None: `engine` reads them, and
            they are scored on the CPU.

    Attributes:
        schema: of the records.
        n_tokens: uint16 [n], tokens of each document.
        full: the records. coarse: smaller ones of the same documents, or None.
        effective_path, fallback_reason: of the record reads, of all data files (`paths_of`), and
            why it is not what was tried first.

    Raises:
        StoreNotFoundError, FormatError, ForeignFileError, TruncatedFileError, ChecksumError:
            nothing damaged is opened.
    """

    def __init__(
        self, path: str | os.PathLike[str], engine: NativeEngine, device: RecordDevice | None = None
    ):
        super().__init__(path, engine)
        self.device: RecordDevice = (
            open_records(engine, torch.device("cpu")) if device is None else device
        )
        self._files: list[FileHandle] = []
        self._tiers: list[Tier] = []
        try:
            for part in self.parts:
                part.keep_open()
            self.n_tokens = self._token_counts()
            self.full = self._open_tier("full")
            self.coarse = self._open_tier("coarse") if "coarse" in self.tiers else None
            _ = self.projection, self.first_stage
            mine = {file.path for file in self._files}
            report = [file for file in self.device.path_report() if file.path in mine]
            self.effective_path = paths_of(file.effective_path for file in report)
            self.fallback_reason = reasons_of(file.fallback_reason for file in report)
        except BaseException:
            self.close()
            raise

    @property
    def segments(self) -> list[Segment]:
        """The data files of the full records."""
        return [segment for part in self.parts for segment in part.segments("full")]

    @property
    def resident_bytes(self) -> int:
        """Memory that the store itself holds (the first stage's index is not part of it)."""
        fixed = 0 if self.projection is None else self.projection.components.nbytes
        fixed += 0 if self.deleted is None else self.deleted.nbytes
        books = [
            tier.codebook
            for tier in (self.full, self.coarse)
            if tier is not None and tier.codebook is not None
        ]
        fixed += sum(book.centroids.nbytes for book in books) + sum(
            part.texts_resident_bytes for part in self.parts
        )
        return (
            self.n_tokens.nbytes
            + sum(tier.resident_bytes for tier in (self.full, self.coarse) if tier is not None)
            + fixed
        )

    def facts(self) -> list[tuple[str, str]]:
        """What it holds, and its sizes on disk and in memory, in words: what each is of, and what
        it is."""
        manifest, schema, encoder = self.manifest, self.full.schema, self.manifest.encoder
        deleted = sum(part.count for part in self.parts) - self.count
        data_bytes = sum(segment.size_bytes for segment in self.segments)
        changes = (
            f"{manifest.added_share:.1%} of the records added since the base, "
            f"{manifest.dead_share:.1%} deleted"
        )
        pays = "; `espnx index compact` pays" if manifest.compacting_pays else ""
        each = f"{self.resident_bytes / max(1, self.count):.3f} bytes a document"
        return [
            (
                "documents",
                f"{manifest.count:,}"
                + (f" ({deleted:,} deleted ones wait for compact)" if deleted else ""),
            ),
            ("token vectors", f"{manifest.tokens:,} x {schema.dim} {schema.format}"),
            (
                "CLS vectors",
                f"{schema.d_cls} dimensions, weight {manifest.cls_weight}"
                if schema.d_cls
                else "none",
            ),
            ("encoder", encoder.name or "none: documents brought their vectors"),
            (
                "projection",
                f"{encoder.dim} to {schema.dim} dimensions" if self.projection else "none",
            ),
            ("first stage", in_words(described(manifest.first_stage))),
            (
                "on disk",
                (
                    f"{format_size(data_bytes)} in {len(self.segments)} data files, path "
                    f"{self.effective_path}"
                ),
            ),
            ("in memory: metadata", f"{format_size(self.resident_bytes)}, {each}"),
            ("in memory: first stage", format_size(self.first_stage_bytes)),
            (
                "coarse tier",
                "none"
                if self.coarse is None
                else f"{self.coarse.schema.format}, {format_size(self.coarse.size_bytes)}",
            ),
            ("generation", str(manifest.generation)),
            ("parts", f"{len(manifest.parts)}; {changes}{pays}"),
            *(
                ("shares data", f"{home}: `espnx index detach` before it can be changed")
                for home in self.shared_homes
            ),
        ]

    def _token_counts(self) -> np.ndarray:
        counts: list[np.ndarray] = []
        at = 0
        for part in self.parts:
            counts += [np.zeros(part.first_number - at, dtype=np.uint16), part.meta["n_tokens"]]
            at = part.end_number
        return np.concatenate(counts) if counts else np.empty(0, np.uint16)

    def _open_tier(self, name: str) -> Tier:
        files: list[FileHandle] = []
        for part in self.parts:
            for number in range(len(part.segments(name))):
                files.append(self._open_segment(part, name, number))
                if files[-1] not in self._files:
                    self._files.append(files[-1])
        groups, begins = placement_of(self.parts, name)
        schema, book = self.schema_of(name), self.codebook(name)
        self._tiers.append(
            Tier(
                self.device,
                schema,
                self.n_tokens,
                groups,
                begins,
                files,
                salt=self.salt,
                codebook=book,
            )
        )
        return self._tiers[-1]

    def _open_segment(self, part: Part, tier: str, number: int) -> FileHandle:
        file = part.open_segment(tier, number)
        if self.device.engine is self.engine:
            return file
        if part.segments(tier)[number].path != part.entry.path:
            self.engine.close_file(file)
        known = next((each for each in self._files if each.path == file.path), None)
        return known or self.device.open(file.path)

    def verify(self, progress: Callable[[int, int], None] = lambda done, total: None) -> int:
        """Reads and checks every byte that means anything. Returns the number of live records.
        Raises what it finds."""
        for part in self.parts:
            part.verify()
        self.first_stage.check(self.parts)
        total = sum(part.count for part in self.parts)
        n_deleted = 0 if self.deleted is None else int(np.unpackbits(self.deleted).sum())
        if total - n_deleted != self.count:
            raise errors.FormatError(
                "records do not add up",
                path=self.path,
                got=total - n_deleted,
                expected=self.count,
                fix=REBUILD,
            )
        done = 0
        for part in self.parts:
            for first in range(part.first_number, part.end_number, 1024):
                numbers = np.arange(first, min(first + 1024, part.end_number))
                for tier in (self.full, self.coarse):
                    if tier is not None:
                        future = tier.read(numbers, gap_bytes=1 << 20)
                        tier.check(future.wait(), future.position_bytes, numbers)
                ids = [identifier for identifier, _ in self.texts.get(numbers.tolist())]
                self._check_ids(part, ids, first)
                done += len(numbers)
                progress(done, total)
        return self.count

    def _check_ids(self, part: Part, ids: Sequence[DocumentId], first: int) -> None:
        """Each is found by its id, unless it was deleted."""
        found = part.numbers(ids, self.is_alive)
        right = np.array(
            [number if self.is_alive(number) else -1 for number in range(first, first + len(ids))]
        )
        if (found != right).any():
            wrong = int(np.flatnonzero(found != right)[0])
            raise errors.FormatError(
                f"id of record {first + wrong} is not found",
                path=part.path,
                got=int(found[wrong]),
                expected=int(right[wrong]),
                fix=REBUILD,
            )

    def close(self) -> None:
        """Closes the data files. Reads under way finish."""
        for tier in self._tiers:
            tier.release()
        self._tiers = []
        kept = {part.path for part in self.parts} if self.device.engine is self.engine else set()
        for file in self._files:
            if file.path not in kept:  # theirs is closed with them
                self.device.close_file(file)
        self._files = []
        for part in self.parts:
            part.close()

    def __enter__(self) -> EmbeddingStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def placement_of(parts: Sequence[Part], tier: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets of records 0, 64, 128, ..., and the first record of each data file: int64, as
    `locate_records` takes them.

    Parts begin at multiples of 64, and so do groups; a part's numbers that are left out before the
    next have entries of their own.
    """
    groups: list[np.ndarray] = []
    at = 0
    for part in parts:
        begin = part.first_number // GROUP_RECORDS
        groups += [np.zeros(begin - at, dtype=np.int64), part.meta[f"{tier}_group_offset_bytes"]]
        at = begin + len(groups[-1])
    begins = [segment.first_record for part in parts for segment in part.segments(tier)]
    return torch.from_numpy(
        np.concatenate(groups) if groups else np.empty(0, np.int64)
    ), torch.tensor(begins, dtype=torch.int64)


def projection_of(
    model: Mapping[str, np.ndarray], shape: tuple[int, int], is_normalised: bool, path: str
) -> Projection | None:
    """The projection among the tensors of a base, or None. Raises FormatError, naming `path`, for
    one of another shape."""
    found = model.get("projection")
    if found is None:
        return None
    if found.dtype != np.float32 or found.shape != shape:
        raise errors.FormatError(
            "projection does not fit the store",
            path=path,
            got=f"{found.dtype} {found.shape}",
            expected=f"float32 {shape}",
            fix=REBUILD,
        )
    return Projection(torch.from_numpy(found), is_normalised)


def codebook_of(
    model: Mapping[str, np.ndarray], tier: str, schema: RecordSchema, path: str
) -> Codebook | None:
    """The codebook of a tier among the tensors of a base; None where its format has none.

    Raises FormatError, naming `path`, where it is missing, malformed or of other records.
    """
    if not token_format(schema.format).needs_codebook or not model:
        return None
    what = f"codebook of the {tier} records"
    tensors = {field.name: model.get(f"{tier}.{field.name}") for field in fields(Codebook)}
    if any(tensor is None for tensor in tensors.values()):
        raise errors.FormatError(f"{what} missing", path=path, fix=REBUILD)
    try:
        book = Codebook(**{name: torch.from_numpy(tensor) for name, tensor in tensors.items()})
        token_format(schema.format).check_codebook(schema.stored_dim, book)
    except errors.InvalidInputError as error:
        raise errors.FormatError(
            f"{what}: {error.what}", path=path, got=error.got, expected=error.expected, fix=REBUILD
        ) from error
    return book
