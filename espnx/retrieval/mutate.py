"""Changes of a published store: add documents, delete them, and compact what many changes left. Each publishes a new version, atomically;
who has an older one open keeps it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import errors
from ..storage import NativeEngine
from ..storage.lock import DirectoryLock
from ..storage.manifest import read_manifest
from ..storage.stream import make_directory
from . import generations
from .adding import Base, contents_of
from .build import Builder, BuildReport, Progress
from .build_state import read_state
from .compacting import write_compacted
from .deleting import Deletion
from .documents import Document, check_documents, to_document
from .encoder import Encoder
from .options import BuildOptions
from .places import claim
from .publish import finish_part, publish
from .store import MAGIC, VERSION, EmbeddingStore
from .texts import DocumentId, document_ids

_IDS_AT_ONCE = 256


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


def _ignore(phase: str, done: int, total: int | None) -> None:
    """Progress that nobody wants."""


@contextmanager
def _writing(path: str | os.PathLike[str], engine: NativeEngine | None) -> Iterator[tuple[str, NativeEngine, EmbeddingStore]]:
    """The store, locked for writing. What a change leaves that fails, or that was killed before, is removed."""
    where = os.fspath(path)
    owned = NativeEngine(pool_bytes=64 << 20) if engine is None else engine
    try:
        read_manifest(owned, where, MAGIC, VERSION)  # before a lock would be made in a directory that is no store
        with DirectoryLock(where), EmbeddingStore(where, owned) as store:
            _refuse_interrupted_build(where, owned, store.manifest["generation"])
            claim(where, store.manifest)
            owned.sync_directory(where)  # the change before may have failed at just this
            generations.clean(where, store.manifest)
            live = generations.manifest_file(where)
            try:
                yield where, owned, store
            except BaseException:
                if generations.manifest_file(where) == live:
                    with suppress(OSError):  # the first error is the one to tell
                        generations.clean(where, store.manifest)
                raise
    finally:
        if engine is None:
            owned.close()


def _refuse_interrupted_build(path: str, engine: NativeEngine, live_generation: int) -> None:
    """A build that was interrupted here waits to be resumed; a change would throw its work away."""
    state = read_state(engine, os.path.join(path, generations.BUILDING))
    if state is not None and state.settings.later.get("kind") == repr("build") and state.generation > live_generation:
        raise errors.InvalidInputError(
            f"an interrupted build waits in {path}", got=f"{state.documents} documents spooled",
            fix="finish it by the same call of build, or discard it (restart=True, --restart)",
        )  # fmt: skip


def add(
    path: str | os.PathLike[str],
    documents: Iterable[Any],
    encoder: Encoder | None = None,
    *,
    replace: bool = False,
    memory: int | str | None = None,
    engine: NativeEngine | None = None,
    progress: Progress = _ignore,
) -> BuildReport:
    """Adds documents to a store. Nothing is trained again: they go into the lists that are there, with the store's own settings.

    Args:
        documents: as of `build`; with none, no version is published. Their ids must be new, unless `replace` is set; the id of a deleted
            document may be used again.
        encoder: the one the store was built with; needed unless every document brings its vectors.
        replace: a document whose id the store holds takes the other's place, in one step: no version has both, or neither.
        memory: what the process may use, as in `build`.

    Raises:
        InvalidInputError: an id that comes twice, or that the store holds (without `replace`), vectors that do not fit, another encoder.
            The store stays as it is.
        StoreNotFoundError: there is no store. StoreBusyError: another process writes to it.
        DiskFullError, WriteError, ReadError, ...: the store stays as it is, unless a WriteError says "published": then the documents are
            in it, and only the last flush failed.
    """
    check_documents(documents)
    with _writing(path, engine) as (where, owned, store):
        manifest = store.manifest
        built, stage = manifest["encoder"], manifest["first_stage"]
        if encoder is not None and built["name"] is not None and encoder.name != built["name"]:
            raise errors.InvalidInputError("the store was built with another encoder", got=encoder.name, expected=built["name"])
        if not store.parts:
            raise errors.InvalidInputError(
                "an empty store has no lists to add to", fix="build it again, with documents (replace=True, --replace)"
            )
        options = BuildOptions(**settings_of(manifest), nlist=stage["nlist"], memory=memory)
        replaced = Deletion(store)
        builder = Builder(where, encoder, options, owned, (built["d_cls"], built["dim"]), progress, base=Base.of(store, replaced))
        new = _new_documents(store, documents, replaced if replace else None)
        first = next(new, None)
        if first is None:
            return BuildReport(where, 0, 0, manifest["generation"], 0, 0, 0.0, stage["nlist"], 0, 0.0, 0.0, 0.0)
        return builder.run(itertools.chain([first], new), restart=True, replace=True)


def settings_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `build` that a store was built with, as far as they do not depend on its documents."""
    records, stage, encoder = manifest["records"], manifest["first_stage"], manifest["encoder"]
    return {
        "format": records["format"],
        "first_stage": stage["code"],
        "pca": records["dim"] if records["dim"] != encoder["dim"] else None,
        "cls_weight": manifest["cls_weight"],
        "directories": manifest["directories"],
        "compact": manifest["compact"]["format"] if manifest["compact"] else None,
        "pooling": stage["vector"],
    }


def _new_documents(store: EmbeddingStore, documents: Iterable[Any], replaced: Deletion | None) -> Iterator[Document]:
    """The documents, in the order given. One whose id is taken adds to what is replaced; without that, raises InvalidInputError."""
    batch: list[Document] = []
    for number, item in enumerate(documents):
        batch.append(to_document(item, number))
        if len(batch) == _IDS_AT_ONCE:
            yield from _checked_new(store, batch, replaced)
            batch = []
    yield from _checked_new(store, batch, replaced)


def _checked_new(store: EmbeddingStore, batch: list[Document], replaced: Deletion | None) -> list[Document]:
    known = store.texts.numbers([document.id for document in batch])
    if replaced is not None:
        replaced.add(np.unique(known[known >= 0]))  # an id that comes twice is refused where the documents are spooled
    elif (known >= 0).any():
        taken = batch[int(np.flatnonzero(known >= 0)[0])].id
        raise errors.InvalidInputError(
            f"document id {taken!r} is in the store",
            expected="new ids",
            fix="replace it (replace=True, --replace), or drop it from the addition",
        )
    return batch


def delete(path: str | os.PathLike[str], ids: Iterable[DocumentId], *, missing_ok: bool = False, engine: NativeEngine | None = None) -> int:
    """Deletes documents by id; their bytes stay until `compact`. Returns how many there were.

    Args:
        missing_ok: ids that the store does not hold have no effect.

    Raises:
        InvalidInputError: without `missing_ok`, an id that the store does not hold (then nothing is deleted); one that none can have, or
            no collection.
        StoreNotFoundError, StoreBusyError, DiskFullError, WriteError, ReadError, ...: the store stays as it is, unless a WriteError says
            "published": then they are deleted, and only the last flush failed.
    """
    wanted = list(dict.fromkeys(document_ids(ids)))
    with _writing(path, engine) as (where, owned, store):
        numbers = store.texts.numbers(wanted)
        if (numbers < 0).any() and not missing_ok:
            missing = wanted[int(np.flatnonzero(numbers < 0)[0])]
            is_digits = isinstance(missing, str) and missing.removeprefix("-").isdecimal()
            raise errors.InvalidInputError(
                "no such document", got=repr(missing), expected="ids that the store holds",
                fix=f"if its id is a number, give it as one: {missing} (--int)" if is_digits else None,
            )  # fmt: skip
        found = numbers[numbers >= 0]
        if not len(found):
            return 0
        deletion = Deletion(store)
        deletion.add(found)
        contents = contents_of(store.manifest)
        contents["generation"] = generations.following(where, contents["generation"])
        make_directory(os.path.join(where, generations.name(contents["generation"])))
        deletion.write(owned, where, contents)
        publish(owned, where, contents, store.manifest)
        return len(found)


def compact(
    path: str | os.PathLike[str], *, memory: int | str | None = None, engine: NativeEngine | None = None, progress: Progress = _ignore
) -> CompactReport:
    """Writes a store anew: without what was deleted, as one part, records in list order. Vectors stay what they are, bit for bit, and so do
    lists, but for those that are empty; nothing is trained or encoded again. Needs the new store's size on disk beside the old one.

    Raises:
        StoreNotFoundError, StoreBusyError, DiskFullError, WriteError, ReadError, ...: the store stays as it is, unless a WriteError says
            "published": then it is compacted, and only the last flush failed.
    """
    with _writing(path, engine) as (where, owned, store):
        manifest = store.manifest
        before = sum(tier.size_bytes for tier in (store.full, store.compact) if tier is not None)
        total = sum(part.count for part in store.parts)
        contents = contents_of(manifest)
        contents["generation"] = contents["base_generation"] = generations.following(where, manifest["generation"])
        contents["deleted"], contents["parts"] = None, []
        if store.count:
            directories = manifest["directories"]
            written, lists = write_compacted(owned, store, contents["generation"], directories, memory, progress)
            contents["first_stage"] |= lists
            contents["records"]["tokens"] = written.tokens
            contents["parts"] = [finish_part(owned, where, written, directories)]
        publish(owned, where, contents, manifest)
        segments = [segment for part in contents["parts"] for tier in part["segments"].values() for segment in tier]
        return CompactReport(
            path=where,
            documents=store.count,
            dropped=total - store.count,
            parts=len(store.parts),
            generation=contents["generation"],
            size_bytes_before=before,
            size_bytes=sum(segment["size_bytes"] for segment in segments),
        )
