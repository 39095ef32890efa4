"""What users call of builds: their arguments, checked before anything is written, become options
and a recipe of a `Builder`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from ... import errors
from ...checks import check_callable
from ...ops.maxsim import Codebook
from ...storage import NativeEngine
from ...suggestions import suggests_keywords
from ..encoder import Encoder, EncoderLike, encoder_of
from ..sparse_encoder import SparseEncoderLike
from .builder import Builder, Progress
from .documents import check_documents
from .options import BuildOptions, FirstStages, checked_dims, given_options
from .place import check_place, locked
from .reports import BuildReport
from .trained import Trained
from .training import Recipe, check_trained, options_of


@suggests_keywords
def build(
    path: str | os.PathLike[str],
    documents: Iterable[Any],
    encoder: EncoderLike | None = None,
    *,
    format: str | None = None,  # noqa: A002 - what it is called wherever records are stored
    coarse: str | None = None,
    pca: int | None = None,
    pooling: str | None = None,
    first_stages: FirstStages | None = None,
    language: str | None = None,
    sparse_encoder: SparseEncoderLike | None = None,
    first_stage_code: str | None = None,
    nlist: int | None = None,
    centroids: int | None = None,
    cls_weight: float | None = None,
    memory: int | str | None = None,
    directories: Sequence[str | os.PathLike[str]] | None = None,
    dims: tuple[int, int] | None = None,
    engine: NativeEngine | None = None,
    codebook: Codebook | None = None,
    trained: Trained | None = None,
    restart: bool = False,
    replace: bool = False,
    progress: Progress = lambda phase, done, total: None,
) -> BuildReport:
    """Builds and publishes a store of the documents' vectors and texts.

    Args:
        path: the store's directory; made if need be.
        documents: an iterable, read once, a batch at a time: ``(id, text)`` pairs, mappings with
            ``id`` and ``text``, or `Document`; or a list (or an iterator) of texts, whose ids are
            their places, 0, 1, 2, ...
        encoder: turns texts into vectors, or a description of one as `espnx.load_encoder` takes it;
            needed unless every document brings its own vectors.
        format, coarse, pca, pooling, first_stages, language, sparse_encoder: see `BuildOptions`;
            None: its default, or what `trained` was trained with.
        first_stage_code, nlist, centroids, cls_weight, memory, directories: the same.
        dims: (d_cls, dim) of vectors that documents bring; an encoder knows its own.
        engine: a native engine to use; default ``auto``.
        codebook: of the token rows that documents bring already in a residual format
            (`Document.rows`); they are kept bit for bit.
        trained: what `train` made, of this encoder and these dimensions; nothing is trained then,
            and the options that decided on it (`TRAINED_OPTIONS`) are its own. Scores of stores
            that share it may be merged.
        restart: discards an interrupted build instead of continuing with it.
        replace: publishes over the store that is there. It stays readable until the new one is
            complete.
        progress: called often, from this thread.

    Raises:
        InvalidInputError: documents, vectors or options that do not fit; a store is there and
            `replace` is not set.
        StoreBusyError: another process is building here.
        DiskFullError, WriteError, ReadError, ...: what was spooled is kept; the same call resumes.
            A WriteError that says "published": the store is there, and only the last flush failed.
    """
    given = given_options(
        format=format,
        coarse=coarse,
        pca=pca,
        pooling=pooling,
        first_stages=first_stages,
        language=language,
        sparse_encoder=sparse_encoder,
        first_stage_code=first_stage_code,
        nlist=nlist,
        centroids=centroids,
        cls_weight=cls_weight,
        memory=memory,
        directories=directories,
    )
    for name, value, kind in (("trained", trained, Trained), ("codebook", codebook, Codebook)):
        if value is not None and not isinstance(value, kind):
            raise errors.InvalidInputError(
                name, got=type(value).__name__, expected=f"a {kind.__name__}, or None"
            )
    chosen = BuildOptions.given(**given) if trained is None else options_of(trained, given)
    check_documents(documents)
    check_place(path, chosen.directories, replace=replace)
    check_callable("progress", progress)
    makes = encoder_of(encoder, built_with=trained.encoder if trained else None)
    stage = None if trained is None else trained.first_stage
    recipe = Recipe.of(
        chosen,
        _checked_dims(makes, dims, trained),
        makes.name if makes else None,
        codebook=codebook,
        stage=stage,
    )
    if trained is not None:
        check_trained(trained, recipe)
    with locked(path, engine, chosen.directories) as (where, owned):
        return Builder(where, makes, chosen, owned, recipe, progress, trained=trained).run(
            documents, restart, replace
        )


@suggests_keywords
def train(
    path: str | os.PathLike[str],
    documents: Iterable[Any],
    encoder: EncoderLike | None = None,
    *,
    format: str | None = None,  # noqa: A002 - as of `build`
    coarse: str | None = None,
    pca: int | None = None,
    pooling: str | None = None,
    first_stages: FirstStages | None = None,
    language: str | None = None,
    sparse_encoder: SparseEncoderLike | None = None,
    first_stage_code: str | None = None,
    nlist: int | None = None,
    centroids: int | None = None,
    memory: int | str | None = None,
    dims: tuple[int, int] | None = None,
    engine: NativeEngine | None = None,
    restart: bool = False,
    replace: bool = False,
    progress: Progress = lambda phase, done, total: None,
) -> Trained:
    """Trains first stage, projection and codebooks on a sample of documents, once for any number of
    stores.

    Args:
        path: a new or empty directory, where it is kept; `Trained.load` reads it back.
        format, coarse, pca, pooling, first_stages, language, sparse_encoder, first_stage_code,
        nlist, centroids, memory: see `BuildOptions`; None: its default.
        documents, encoder, dims, engine, restart, progress: as of `build`; documents are spooled
            below `path` meanwhile.
        replace: what was trained there before, which stays as it is until this is whole.

    Raises:
        InvalidInputError: a sample without documents. The others are those of `build`; an
            interrupted call is continued, as a build is.
    """
    given = given_options(
        format=format,
        coarse=coarse,
        pca=pca,
        pooling=pooling,
        first_stages=first_stages,
        language=language,
        sparse_encoder=sparse_encoder,
        first_stage_code=first_stage_code,
        nlist=nlist,
        centroids=centroids,
        memory=memory,
    )
    chosen = BuildOptions.given(**given)
    check_documents(documents)
    check_callable("progress", progress)
    makes = encoder_of(encoder)
    recipe = Recipe.of(
        chosen, _checked_dims(makes, dims, None), makes.name if makes else None, codebook=None
    )
    with locked(path, engine) as (where, owned):
        return Builder(where, makes, chosen, owned, recipe, progress, kind="train").train(
            documents, restart, replace
        )


def _checked_dims(
    encoder: Encoder | None, dims: tuple[int, int] | None, trained: Trained | None
) -> tuple[int, int]:
    if dims is None and encoder is not None:
        dims = encoder.d_cls, encoder.dim
    if dims is None and trained is not None:
        dims = trained.schema.d_cls, trained.dim
    if dims is None:
        raise errors.InvalidInputError(
            "build needs an encoder, or dims=(d_cls, dim) and documents with vectors"
        )
    return checked_dims(dims)
