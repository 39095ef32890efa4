"""The embedding store: opens what a build published, says where each record lies, reads records and checks them.

What stays in memory is 2.125 bytes a document (token counts, and one offset per 64 records); docs/store-format.md is the written format.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cached_property
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch

from .. import errors
from ..ops.maxsim import Codebook, token_format
from ..storage import Engine, NativeEngine
from ..storage.engine import FileHandle, paths_of, reasons_of
from ..storage.manifest import NAME as MANIFEST_NAME
from ..storage.stream import crc32c, read_file
from .contents import MAGIC as MAGIC
from .contents import Contents, read_contents
from .lists import CENTROIDS, PARAMETERS, Filling, empty_index, parameter_values
from .part import GROUP_RECORDS as GROUP_RECORDS
from .part import Part, Segment
from .part_file import REBUILD
from .part_file import VERSION as VERSION
from .places import check_paths, shared_homes
from .pooling import Pooling, make_pooling
from .projection import Projection
from .record import RecordSchema
from .texts import DocumentId
from .tier import Placement, Tier

T = TypeVar("T")
_ATTEMPTS = 100  # to open a store that is being replaced all the time


def store_salt(store_id: str, generation: int) -> int:
    """What seeds the records' checksums: different for every store and every base generation of one."""
    return crc32c(bytes.fromhex(store_id) + generation.to_bytes(8, "little"))


class StoreTexts:
    """Ids and texts of all parts. What was deleted is not found by id."""

    def __init__(self, parts: Sequence[Part], is_alive: Callable[[int], bool]):
        self._parts, self._is_alive = list(parts), is_alive
        self._begins = np.array([part.first_number for part in self._parts], dtype=np.int64)

    def get(self, numbers: Sequence[int]) -> list[tuple[DocumentId, str]]:
        """(id, text) of each record number, in the order asked. Raises ChecksumError, FormatError: no wrong text is handed out."""
        if len(self._parts) == 1:
            return self._parts[0].texts(numbers)
        of_part = np.searchsorted(self._begins, np.asarray(numbers, dtype=np.int64), side="right") - 1
        result: list[Any] = [None] * len(of_part)
        for which in np.unique(of_part).tolist():
            places = np.flatnonzero(of_part == which).tolist()
            for place, found in zip(places, self._parts[which].texts([numbers[place] for place in places]), strict=True):
                result[place] = found
        return result

    def numbers(self, ids: Sequence[DocumentId]) -> np.ndarray:
        """int64 [m]: the record number of each id, -1 where there is none alive."""
        result = np.full(len(ids), -1, dtype=np.int64)
        for part in self._parts:
            missing = np.flatnonzero(result < 0)
            if not len(missing):
                break
            result[missing] = part.numbers([ids[place] for place in missing.tolist()], self._is_alive)
        return result

    def any_id(self) -> DocumentId | None:
        """The id of some document, for messages; None where there is none."""
        return self._parts[0].texts([self._parts[0].first_number])[0][0] if self._parts else None

    def count(self) -> int:
        """Of all parts, what was deleted included."""
        return sum(part.count for part in self._parts)


class Version:
    """One version of a store, as its manifest says. Opens a part's file when something of it is asked for, and closes it again.

    Attributes:
        contents: of the manifest. manifest: its fields.
        parts: ascending by record number.
        count: documents.
        deleted: bitmap of deleted records, or None.
        shared_homes: directories that hold its data and are another store's: it can be read then, and not changed.
        pooling: makes the first-stage vector of a query from its tokens; None: it is the CLS vector.
    """

    def __init__(self, path: str | os.PathLike[str], engine: NativeEngine):
        self.path, self.engine = os.fspath(path), engine
        self.contents: Contents = read_contents(engine, path)
        self.manifest = self.contents.fields
        check_paths(self.manifest, self.path)
        self.shared_homes = shared_homes(self.path, self.manifest)
        self.count: int = self.manifest["records"]["count"]
        self.salt = store_salt(self.contents.store_id, self.contents.base_generation)
        self.parts = [self.part(entry) for entry in self.contents.parts]
        self.deleted = self._load_deleted()
        self.texts = StoreTexts(self.parts, self.is_alive)
        stage, dim = self.manifest["first_stage"], self.manifest["encoder"]["dim"]
        self.pooling = None if stage["vector"] == "cls" else self._pooling(stage, dim)

    def part(self, entry: Any) -> Part:
        """A part of this store that `entry` describes."""
        contents = self.contents
        return Part(self.path, self.engine, entry, store_id=contents.store_id, salt=self.salt, lists=contents.nlist)

    def _pooling(self, stage: dict[str, Any], dim: int) -> Pooling:
        try:
            pooling = make_pooling(stage["vector"], dim, **stage["parameters"])
            if pooling.dim != stage["dim"]:
                raise errors.InvalidInputError("dimensions of the first stage", got=stage["dim"], expected=pooling.dim)
        except errors.InvalidInputError as error:
            raise self._misfit(error.what, error) from error
        return pooling

    def _misfit(self, what: str, error: errors.EspnxError) -> errors.FormatError:
        path = os.path.join(self.path, MANIFEST_NAME)
        return errors.FormatError(what, path=path, got=error.got, expected=error.expected, fix="open it with the espnx that wrote it")

    @property
    def end_number(self) -> int:
        """Record numbers lie below it. Each part begins at a multiple of 64; numbers left out between parts are nobody's."""
        return self.contents.end_number

    def is_alive(self, number: int) -> bool:
        return self.deleted is None or not int(self.deleted[number >> 3]) >> (number & 7) & 1

    def _load_deleted(self) -> np.ndarray | None:
        entry = self.contents.deleted
        if entry is None:
            return None
        path = os.path.join(self.path, entry.path)
        try:
            data = read_file(self.engine, path)
        except errors.FileMissingError as error:
            raise errors.FormatError("file of the store missing", path=path, fix=REBUILD) from error
        if crc32c(data) != entry.crc32c or len(data) != entry.size_bytes:
            raise errors.ChecksumError("damaged file of the store", path=path, expected=f"CRC32C {entry.crc32c:08x}", fix=REBUILD)
        gone = np.unpackbits(np.frombuffer(data, dtype=np.uint8), bitorder="little", count=entry.records)
        bitmap = np.zeros(-(-self.end_number // 8), dtype=np.uint8)  # what was added since is alive
        packed = np.packbits(gone, bitorder="little")
        bitmap[: len(packed)] = packed
        return bitmap

    @cached_property
    def model(self) -> dict[str, np.ndarray]:
        """What was trained: centroids, parameters of the first stage's codes, projection, codebooks. Empty for a store without records."""
        if not self.parts:
            return {}
        model, stage = self.parts[0].model, self.manifest["first_stage"]
        code, dim = stage["code"], stage["dim"]
        for name, shape in ((CENTROIDS, (self.contents.nlist, dim)), (PARAMETERS, (parameter_values(code, dim),))):
            found = model.get(name)
            if found is None or found.dtype != np.float32 or found.shape != shape:
                raise errors.FormatError(
                    f"{name} do not fit the store", path=self.parts[0].path, got=None if found is None else f"{found.dtype} {found.shape}",
                    expected=f"float32 {shape}", fix=REBUILD,
                )  # fmt: skip
        return model

    @cached_property
    def projection(self) -> Projection | None:
        """From the encoder's dimensions to the records'."""
        found, shape = self.model.get("projection"), (self.manifest["encoder"]["dim"], self.manifest["records"]["dim"])
        if found is None:
            return None
        if found.dtype != np.float32 or found.shape != shape:
            raise errors.FormatError(
                "projection does not fit the store", path=self.parts[0].path, got=f"{found.dtype} {found.shape}",
                expected=f"float32 {shape}", fix=REBUILD,
            )  # fmt: skip
        return Projection(torch.from_numpy(found), (self.manifest.get("projection") or {}).get("is_normalised") is True)

    def codebook(self, tier: str) -> Codebook | None:
        return codebook_of(self.model, tier, self.schema_of(tier), self.parts[0].path) if self.parts else None

    def schema_of(self, tier: str) -> RecordSchema:
        described = self.manifest["records" if tier == "full" else "compact"]
        try:
            return RecordSchema(described["format"], described.get("d_cls", 0), described["dim"])
        except errors.InvalidInputError as error:
            raise self._misfit(f"{tier} records: {error.what}", error) from error

    @property
    def tiers(self) -> list[str]:
        return ["full", "compact"] if self.manifest["compact"] else ["full"]

    def empty_index(self) -> Any:
        """The trained IVF index without entries; None for a store without records."""
        stage = self.manifest["first_stage"]
        return empty_index(self.model, stage["code"], stage["dim"]) if self.parts else None

    def load_index(self) -> Any:
        """The IVF index of all parts, its ids record numbers; None for an empty store. Raises what reading raises."""
        index = self.empty_index()
        if index is not None:
            sizes = np.zeros(self.contents.nlist, dtype=np.int64)
            for part in self.parts:
                sizes[part.meta["lists"]] += part.meta["list_sizes"]
            filling = Filling(index, sizes)
            for part in self.parts:
                codes = part.codes(index.code_size)
                try:
                    filling.add(part.meta["lists"], part.meta["list_sizes"], codes, part.first_number)
                finally:  # now, not whenever it is collected: the engine may be closed by then
                    codes.close()
        return index

    @property
    def data_bytes(self) -> int:
        """Of all data files on disk."""
        return sum(part.entry.data_bytes for part in self.parts)

    @property
    def first_stage_bytes(self) -> int:
        """What the first stage's index takes in memory: codes and numbers of the records, and what was trained."""
        trained = sum(self.model[name].nbytes for name in (CENTROIDS, PARAMETERS)) if self.parts else 0
        return trained + sum(part.count for part in self.parts) * (self.contents.code_bytes + 8)


class EmbeddingStore(Version):
    """A published store, open for reading. One consistent version, whatever is published meanwhile. A context manager.

    Args:
        path: the store's directory.
        engine: a native engine, for everything but records; stays the caller's.
        record_engine: the engine of the record reads, where it is another (into GPU memory); stays the caller's too.

    Attributes:
        schema: of the records.
        n_tokens: uint16 [n], tokens of each document.
        full: the records. compact: smaller ones of the same documents, or None.
        effective_path, fallback_reason: of the record reads, of all data files (`paths_of`), and why it is not what was tried first.

    Raises:
        StoreNotFoundError, FormatError, ForeignFileError, TruncatedFileError, ChecksumError: nothing damaged is opened.
    """

    def __init__(self, path: str | os.PathLike[str], engine: NativeEngine, record_engine: Engine | None = None):
        super().__init__(path, engine)
        self.record_engine: Engine = engine if record_engine is None else record_engine
        self._files: list[FileHandle] = []
        try:
            for part in self.parts:
                part.keep_open()
            self.n_tokens = self._token_counts()
            self.full = self._open_tier("full")
            self.compact = self._open_tier("compact") if "compact" in self.tiers else None
            _ = self.projection
            self.effective_path, self.fallback_reason = self._paths()
        except BaseException:
            self.close()
            raise

    @property
    def schema(self) -> RecordSchema:
        """Of the full records."""
        return self.full.schema

    @property
    def segments(self) -> list[Segment]:
        """The data files of the full records."""
        return [segment for part in self.parts for segment in part.segments("full")]

    @property
    def resident_bytes(self) -> int:
        """Memory that the store itself holds (the first stage's index is not part of it)."""
        fixed = 0 if self.projection is None else self.projection.components.nbytes
        fixed += 0 if self.deleted is None else self.deleted.nbytes
        books = [tier.codebook for tier in (self.full, self.compact) if tier is not None and tier.codebook is not None]
        fixed += sum(book.centroids.nbytes for book in books)
        return self.n_tokens.nbytes + sum(tier.resident_bytes for tier in (self.full, self.compact) if tier is not None) + fixed

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
        placement = Placement(groups, begins, files)
        return Tier(self.record_engine, self.schema_of(name), self.n_tokens, placement, self.salt, self.codebook(name))

    def _paths(self) -> tuple[str, str]:
        """(the path that record reads take, why it is not what was tried first), of all data files and tiers."""
        buffered = sorted({os.path.dirname(file.path) for file in self._files if file.effective.endswith("(buffered)")})
        reasons = [self.record_engine.fallback_reason, *(f"no direct I/O in {directory}" for directory in buffered)]
        return paths_of(file.effective for file in self._files) or self.record_engine.effective, reasons_of(reasons)

    def _open_segment(self, part: Part, tier: str, number: int) -> FileHandle:
        file = part.open_segment(tier, number)
        if self.record_engine is self.engine:
            return file
        if part.segments(tier)[number].path != part.entry.path:
            self.engine.close_file(file)
        known = next((each for each in self._files if each.path == file.path), None)
        return known or self.record_engine.open(file.path)

    def verify(self, progress: Callable[[int, int], None] = lambda done, total: None) -> int:
        """Reads and checks every byte that means anything. Returns the number of live records. Raises what it finds."""
        for part in self.parts:
            part.verify()
        total = sum(part.count for part in self.parts)
        gone = 0 if self.deleted is None else int(np.unpackbits(self.deleted).sum())
        if total - gone != self.count:
            raise errors.FormatError("records do not add up", path=self.path, got=total - gone, expected=self.count, fix=REBUILD)
        done = 0
        for part in self.parts:
            for first in range(part.first_number, part.end_number, 1024):
                numbers = np.arange(first, min(first + 1024, part.end_number))
                for tier in (self.full, self.compact):
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
        right = np.array([number if self.is_alive(number) else -1 for number in range(first, first + len(ids))])
        if (found != right).any():
            wrong = int(np.flatnonzero(found != right)[0])
            raise errors.FormatError(
                f"id of record {first + wrong} is not found", path=part.path, got=int(found[wrong]), expected=int(right[wrong]), fix=REBUILD
            )

    def close(self) -> None:
        """Closes the data files. Reads under way finish."""
        kept = {part.path for part in self.parts} if self.record_engine is self.engine else set()
        for file in self._files:
            if file.path not in kept:  # theirs is closed with them
                self.record_engine.close_file(file)
        self._files = []
        for part in self.parts:
            part.close()

    def __enter__(self) -> EmbeddingStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_current(path: str | os.PathLike[str], open_it: Callable[[], T]) -> T:
    """What `open_it` opens of a store; again whenever a new version was published (and the old one's files removed) meanwhile."""
    for _ in range(_ATTEMPTS):
        before = _manifest_identity(path)
        try:
            return open_it()
        except errors.StorageError:
            if _manifest_identity(path) == before:
                raise
    return open_it()


def _manifest_identity(path: str | os.PathLike[str]) -> tuple[int, int, int] | None:
    """Another one after every publication."""
    try:
        found = os.stat(os.path.join(path, MANIFEST_NAME))
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def placement_of(parts: Sequence[Part], tier: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets of records 0, 64, 128, ..., and the first record of each data file: int64, as `locate_records` takes them.

    Parts begin at multiples of 64, and so do groups; a part's numbers that are left out before the next have entries of their own.
    """
    groups: list[np.ndarray] = []
    at = 0
    for part in parts:
        begin = part.first_number // GROUP_RECORDS
        groups += [np.zeros(begin - at, dtype=np.int64), part.meta[f"{tier}_group_offset_bytes"]]
        at = begin + len(groups[-1])
    begins = [segment.first_record for part in parts for segment in part.segments(tier)]
    return torch.from_numpy(np.concatenate(groups) if groups else np.empty(0, np.int64)), torch.tensor(begins, dtype=torch.int64)


def codebook_of(model: dict[str, np.ndarray], tier: str, schema: RecordSchema, path: str) -> Codebook | None:
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
        raise errors.FormatError(f"{what}: {error.what}", path=path, got=error.got, expected=error.expected, fix=REBUILD) from error
    return book
