"""Changes of a published store: add documents, delete them, and compact what many changes left.
Each publishes a new version, atomically; who has an older one open keeps it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from .... import errors
from ....checks import check_callable, check_path
from ....storage import NativeEngine
from ....storage.documents.ids import DocumentId, document_ids, require_known
from ....storage.lock import DirectoryLock
from ....storage.native import given_engine
from ....suggestions import suggests_keywords
from ...encoder import (
    AUTO,
    Encoder,
    EncoderLike,
    check_same_encoder,
    encoder_of,
    remembered_encoder,
)
from ...first_stage.interface import FirstStage
from ...first_stage.registry import kinds_of, new_stage, with_sparse_encoder
from ...sparse_encoder import SparseEncoderLike, sparse_encoder_of
from ...store.manifest import Manifest, read_store_manifest
from ...store.places import BUILDING, claim
from ...store.store import Version
from ...versions import generations
from ...versions.draft import Draft
from ..budget import MemoryBudget
from ..builder import Builder, Progress
from ..documents import check_documents, to_document
from ..options import BuildOptions
from ..reports import AddReport, CompactReport
from ..state import read_state
from ..training import Recipe
from .adding import Addition
from .compact import write_compacted


def _ignore(phase: str, done: int, total: int | None) -> None:
    """Progress that nobody wants."""


@contextmanager
def _writing(path: str | os.PathLike[str], engine: NativeEngine | None) -> Iterator[Version]:
    """The store, locked for writing. What a change leaves that fails, or that was killed before, is
    removed."""
    where = check_path("path of a store", path)
    with given_engine(engine) as owned:
        # before a lock would be made in a directory that is no store
        read_store_manifest(owned, where)
        with DirectoryLock(where):
            version = Version(where, owned)
            _refuse_interrupted_build(where, owned, version.manifest.generation)
            claim(where, version.manifest)
            owned.sync_directory(where)  # the change before may have failed at just this
            generations.clean(where, version.manifest)
            live = generations.manifest_file(where)
            try:
                yield version
            except BaseException:
                if generations.manifest_file(where) == live:
                    with suppress(OSError):  # the first error is the one to tell
                        generations.clean(where, version.manifest)
                raise


def _refuse_interrupted_build(path: str, engine: NativeEngine, live_generation: int) -> None:
    """A build that was interrupted here waits to be resumed; a change would throw its work away."""
    state = read_state(engine, os.path.join(path, BUILDING))
    if (
        state is not None
        and state.settings.later.get("kind") == repr("build")
        and state.generation > live_generation
    ):
        raise errors.InvalidInputError(
            f"an interrupted build waits in {path}",
            got=f"{state.documents} documents spooled",
            fix="finish it by the same call of build, or discard it (restart=True, --restart)",
        )


@suggests_keywords
def add(
    path: str | os.PathLike[str],
    documents: Iterable[Any],
    encoder: EncoderLike | None = AUTO,
    *,
    sparse_encoder: SparseEncoderLike | None = None,
    replace: bool = False,
    memory: int | str | None = None,
    engine: NativeEngine | None = None,
    progress: Progress = _ignore,
) -> AddReport:
    """Adds documents to a store. Nothing is trained again: they go into the lists that are there,
    with the store's own settings.

    Args:
        documents: as of `build`; with none, no version is published. Their ids must be new, unless
            `replace` is set; the id of a deleted document may be used again.
        encoder: the one the store was built with, or a description of it as `espnx.load_encoder`
            takes it (loaded in the dtype of that one); ``auto``: the one that the store remembers,
            loaded when a document brings no vectors (one from a folder has to be named).
        sparse_encoder: the one that a first stage of ``splade`` was built with; None: as the store
            remembers, which a folder's is not.
        replace: a document whose id the store holds takes the other's place, in one step: no
            version has both, or neither.
        memory: what the process may use, as in `build`.

    Raises:
        InvalidInputError: an id that comes twice, or that the store holds (without `replace`),
            vectors that do not fit, another encoder. The store stays as it is.
        StoreNotFoundError: there is no store. StoreBusyError: another process writes to it.
        DiskFullError, WriteError, ReadError, ...: the store stays as it is, unless a WriteError
            says "published": then the documents are in it, and only the last flush failed.
    """
    check_documents(documents)
    check_callable("progress", progress)
    remembers = isinstance(encoder, str) and encoder == AUTO
    sparse = sparse_encoder_of(sparse_encoder)
    with _writing(path, engine) as version:
        name = version.manifest.encoder.name
        given = None if remembers else encoder_of(encoder, built_with=name)
        if given is not None:
            check_same_encoder(given, name)
        if sparse is not None:
            version.first_stage = with_sparse_encoder(version.first_stage, sparse)
        if not version.parts:
            return _add_to_empty(version, documents, given, memory, progress, remembers=remembers)
        draft = Draft(version)
        addition = Addition(
            version, draft, given, replace, MemoryBudget(memory), progress, remembers=remembers
        )
        addition.run(documents)
        if not draft.added:
            return _report(version, version.manifest, 0)
        manifest = draft.publish()
        return _report(version, manifest, draft.added, addition.tokens, draft)


def _report(
    version: Version,
    manifest: Manifest,
    documents: int,
    tokens: int = 0,
    draft: Draft | None = None,
) -> AddReport:
    return AddReport(
        path=version.path,
        documents=documents,
        replaced=draft.replaced if draft else 0,
        tokens=tokens,
        generation=manifest.generation,
        record_bytes=draft.written_bytes if draft else 0,
        parts=len(manifest.parts),
        merged=draft.merged if draft else 0,
        dead_share=manifest.dead_share,
        added_share=manifest.added_share,
        compacting_pays=manifest.compacting_pays,
    )


def _add_to_empty(
    version: Version,
    documents: Iterable[Any],
    encoder: Encoder | None,
    memory: int | str | None,
    progress: Progress,
    *,
    remembers: bool,
) -> AddReport:
    """An empty store has no lists: they are trained with what is added, as a build does, with the
    store's own settings."""
    items = iter(documents)
    first = next(items, None)
    if first is None:
        return _report(version, version.manifest, 0)
    built = version.manifest.encoder
    if remembers and to_document(first, 0).vectors is None:
        encoder = remembered_encoder(built.name)
    options = BuildOptions.given(**settings_of(version.manifest), memory=memory)
    stage, dims = version.first_stage.fresh(), (built.d_cls, built.dim)
    recipe = Recipe.of(options, dims, encoder.name if encoder else None, codebook=None, stage=stage)
    builder = Builder(version.path, encoder, options, version.engine, recipe, progress, kind="add")
    report = builder.run(itertools.chain([first], items), restart=True, replace=True)
    manifest = read_store_manifest(version.engine, version.path)
    return AddReport(
        path=version.path,
        documents=report.documents,
        replaced=0,
        tokens=report.tokens,
        generation=report.generation,
        record_bytes=report.record_bytes,
        parts=len(manifest.parts),
        merged=0,
        dead_share=0.0,
        added_share=0.0,
        compacting_pays=False,
    )


def settings_of(manifest: Manifest) -> dict[str, Any]:
    """The options of `build` that a store was built with, as far as they do not depend on its
    documents and are not the first stage's."""
    return {
        "format": manifest.schema.format,
        "first_stages": kinds_of(manifest.first_stage),
        "pca": None if manifest.schema.dim == manifest.encoder.dim else manifest.schema.dim,
        "cls_weight": manifest.cls_weight,
        "directories": manifest.directories,
        "coarse": None if manifest.coarse is None else manifest.coarse.format,
    }


@suggests_keywords
def delete(
    path: str | os.PathLike[str],
    ids: Iterable[DocumentId],
    *,
    missing_ok: bool = False,
    engine: NativeEngine | None = None,
) -> int:
    """Deletes documents by id; their bytes stay until `compact`. Returns how many there were.

    Args:
        missing_ok: ids that the store does not hold have no effect.

    Raises:
        InvalidInputError: without `missing_ok`, an id that the store does not hold (then nothing is
            deleted); one that none can have, or no collection.
        StoreNotFoundError, StoreBusyError, DiskFullError, WriteError, ReadError, ...: the store
            stays as it is, unless a WriteError says "published": then they are deleted, and only
            the last flush failed.
    """
    wanted = list(dict.fromkeys(document_ids(ids)))
    with _writing(path, engine) as version:
        numbers = version.texts.numbers(wanted)
        if not missing_ok:
            require_known(wanted, numbers, "document", "store holds")
        found = numbers[numbers >= 0]
        if len(found):
            draft = Draft(version)
            draft.delete(found)
            draft.publish()
        return len(found)


@suggests_keywords
def compact(
    path: str | os.PathLike[str],
    *,
    memory: int | str | None = None,
    engine: NativeEngine | None = None,
    progress: Progress = _ignore,
) -> CompactReport:
    """Writes a store anew: without what was deleted, as one part, records in list order. Vectors
    stay what they are, bit for bit, and so do lists, but for those that are empty; nothing is
    trained or encoded again. Needs the new store's size on disk beside the old one.

    Raises:
        StoreNotFoundError, StoreBusyError, DiskFullError, WriteError, ReadError, ...: the store
            stays as it is, unless a WriteError says "published": then it is compacted, and only the
            last flush failed.
    """
    check_callable("progress", progress)
    with errors.while_compacting(), _writing(path, engine) as version:
        return _compacted(version, MemoryBudget(memory), progress)


@suggests_keywords
def add_first_stage(
    path: str | os.PathLike[str],
    kind: str,
    *,
    language: str | None = None,
    sparse_encoder: SparseEncoderLike | None = None,
    memory: int | str | None = None,
    engine: NativeEngine | None = None,
    progress: Progress = _ignore,
) -> CompactReport:
    """Gives a store one more first stage of texts, beside those that it has: ``bm25`` or
    ``splade``. Compacts the store on the way.

    Args:
        kind: of the stage. language, sparse_encoder: of it, see `BuildOptions`.
        memory, engine, progress: as of `compact`.

    Raises:
        InvalidInputError: a kind that the store has, or that needs more than texts.
        What `compact` raises: the store stays as it is.
    """
    check_callable("progress", progress)
    options = BuildOptions.given(
        first_stages=kind, language=language, sparse_encoder=sparse_encoder
    )
    with errors.while_compacting(), _writing(path, engine) as version:
        built, held = version.manifest.encoder, kinds_of(version.manifest.first_stage)
        stage = (
            None
            if kind in held
            else new_stage(options.stages, options.pooling, built.d_cls, built.dim)
        )
        if stage is None or stage.vector_dim:
            raise errors.InvalidInputError(
                "first stage to add",
                got=f"{kind!r} beside {', '.join(held)}",
                expected="bm25 or splade, that the store does not have",
                fix="build the store anew for another kind (first_stages=...)",
            )
        return _compacted(version, MemoryBudget(memory), progress, stage)


def _compacted(
    version: Version, budget: MemoryBudget, progress: Progress, also: FirstStage | None = None
) -> CompactReport:
    total = sum(part.count for part in version.parts)
    manifest = write_compacted(version, budget, progress, also)
    return CompactReport(
        path=version.path,
        documents=version.count,
        dropped=total - version.count,
        parts=len(version.parts),
        generation=manifest.generation,
        size_bytes_before=version.data_bytes,
        size_bytes=sum(part.data_bytes for part in manifest.parts),
    )
