"""Builds an embedding store from a stream of documents, in bounded memory, resumable, published
atomically.

Three passes: spool (encode and write in arrival order), arrange (train the first stage, assign
lists), write (records in list order). The spool and the store exist side by side for a while, so a
build needs about twice the store's size on disk. After a crash at any point, the same call goes on
from the last checkpoint; the store published before stays untouched until the end. What goes on is
what the corpus of this call confirms, document by document (see under_way.py).
"""

from __future__ import annotations

import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

from ... import errors
from ...storage import NativeEngine
from ...storage.files import crc32c, make_directory, read_file, write_file
from ...storage.native import free_bytes
from ...storage.parse import Fields
from ...storage.replacing import check_target
from ..encoder import Encoder
from ..first_stage.interface import FirstStage
from ..first_stage.registry import described, parse_stage
from ..store.manifest import EncoderEntry, Manifest, score_space
from ..store.part import PartEntry, Segment
from ..store.part_file import HEADER_BYTES, FileWriter
from ..store.places import BUILDING, STATE, TEXTS, TRAINED
from ..store.projection import Projection
from ..store.rows import Target, fills
from ..store.store import codebook_of, projection_of
from ..store.texts import TextReader
from ..versions import generations
from ..versions.draft import place_of_base
from ..versions.part_writer import PartContents, PartPlace, finish_part
from ..versions.publish import publish
from ..versions.segments import NO_LIMIT, SegmentWriter, pieces, resident_bytes
from . import arrange, under_way
from .budget import MemoryBudget
from .codebooks import codebook_sum
from .documents import Document, batches, count_hint, decode_rows, encode
from .options import BuildOptions
from .reports import BuildReport
from .spool import DISCARD, Spool, SpoolWriter, cut, digests, spool_salt, trim
from .state import Arranged, BuildSettings, BuildState, SpoolFile, in_words, write_state
from .trained import KIND as TRAINED_KIND
from .trained import Trained
from .training import Recipe, train_recipe

CHECKPOINT_S = 5.0
BATCH_DOCUMENTS = 256  # encoded together, at most
# of the first batch, encoded before the rest of it, so that progress can say at once how long it
# takes
FIRST_DOCUMENTS = 16

#: Called with (phase, done, total or None): ``confirm`` (documents of an interrupted build,
#: compared with the corpus), ``spool``, ``arrange``, ``write``.
Progress = Callable[[str, int, int | None], None]


def segment_bytes(total_bytes: int, devices: int) -> int:
    """One file per GiB on one SSD; on several, enough files that they share the load."""
    return (
        1 << 30 if devices <= 1 else int(np.clip(total_bytes // (8 * devices), 16 << 20, 1 << 30))
    )


class Builder:
    """One build, from lock to publication. Use `espnx.build`."""

    def __init__(
        self,
        path: str,
        encoder: Encoder | None,
        options: BuildOptions,
        engine: NativeEngine,
        recipe: Recipe,
        progress: Progress,
        kind: str = "build",
        trained: Trained | None = None,
    ):
        self.kind = kind
        self.path, self.encoder, self.options, self.engine, self.progress = (
            path,
            encoder,
            options,
            engine,
            progress,
        )
        self.recipe, self.given = recipe, trained
        self.budget = MemoryBudget(options.memory)
        self.building = os.path.join(path, BUILDING)
        self.state: BuildState
        self.restarted_because: str | None = None
        self._encoder_failed = False

    def _settings(self) -> BuildSettings:
        options, recipe = self.options, self.recipe
        stages = options.stage_options()
        later = {
            "kind": self.kind,
            "first_stage_code": stages.pop("first_stage_code"),
            "nlist": stages.pop("nlist"),
        }
        later |= {
            name: getattr(options, name)
            for name in ("format", "pca", "cls_weight", "coarse", "centroids")
        }
        spooled = {
            "encoder": recipe.encoder,
            "d_cls": recipe.spooled.d_cls,
            "dim": recipe.spooled.dim,
            "spool": recipe.spooled.format,
            "codebook": None if recipe.codebook is None else codebook_sum(recipe.codebook),
            "trained": None if self.given is None else self.given.id,
            "first_stages": " ".join(options.stages),
            "sparse_encoder": getattr(stages.pop("sparse_encoder"), "name", None),
            "pooling": options.pooling,
            **stages,
        }
        return BuildSettings(in_words(spooled), in_words(later), list(options.directories))

    def train(self, documents: Iterable[Any], restart: bool, replace: bool) -> Trained:
        """The first two passes alone, and of the second only the training, which is published; what
        they wrote is removed."""
        is_replacement = check_target(self.path, TRAINED_KIND, replace=replace)
        self.state, changed = under_way.begin(
            self.engine, self.path, self._settings(), None, restart
        )
        if changed:
            self._restarted(changed)
        self._spool(documents, None)
        spool = self._open_spool()
        try:
            if not len(spool):
                raise errors.InvalidInputError(
                    "documents to train on", got="none", expected="a sample of the corpora"
                )
            trained = train_recipe(self.recipe, spool, self.budget)
        finally:
            spool.close()
        under_way.discard(self.engine, self.path, None)
        trained.write(self.engine, self.path, is_replacement=is_replacement)
        return trained

    def _open_spool(self) -> Spool:
        recipe = self.recipe
        return Spool(
            self.engine,
            self.building,
            recipe.spooled,
            self.state,
            recipe.stage.vector_dim,
            recipe.codebook,
        )

    def run(self, documents: Iterable[Any], restart: bool, replace: bool) -> BuildReport:
        published = under_way.published(self.engine, self.path, replace)
        store_id = published.store_id if published is not None and self.kind == "add" else None
        self.state, changed = under_way.begin(
            self.engine, self.path, self._settings(), published, restart, store_id
        )
        if changed:
            self._restarted(changed)
        try:
            return self._passes(documents, published)
        except BaseException as error:
            if self.state.documents and os.path.lexists(os.path.join(self.building, STATE)):
                error.add_note(
                    f"{self.state.documents:,} documents are kept in {self.building}: the same "
                    "build continues with them"
                )
            raise

    def _passes(self, documents: Iterable[Any], published: Manifest | None) -> BuildReport:
        begun = time.perf_counter()
        resumed = self._spool(documents, published)
        spooled = time.perf_counter()
        spool = self._open_spool()
        try:
            self._check_disk(spool)
            arranged = self._arrange(spool)
            arranged_at = time.perf_counter()
            writers = self._write(spool, arranged)
        finally:
            spool.close()
        model = self._model(arranged) if writers[0].count else {}
        entry = self._finish(writers, arranged, model) if writers[0].count else None
        for directory in (self.path, *self.options.directories):
            self.engine.sync_directory(directory)
        publish(self.engine, self.path, self._manifest(entry, arranged, model), published)
        written, count = time.perf_counter(), writers[0].count
        held_bytes, trained_bytes = resident_bytes(writers, model)
        return BuildReport(
            path=self.path,
            documents=count,
            tokens=writers[0].layout.tokens,
            without_tokens=sum(int((counts == 0).sum()) for counts in writers[0].layout.n_tokens),
            generation=self.state.generation,
            resumed_documents=resumed,
            record_bytes=sum(segment.size_bytes for each in writers for segment in each.segments),
            resident_bytes_per_document=held_bytes / max(count, 1),
            trained_bytes=trained_bytes,
            first_stage=arranged.first_stage,
            spool_s=spooled - begun,
            arrange_s=arranged_at - spooled,
            write_s=written - arranged_at,
            restarted_because=self.restarted_because,
        )

    def _spool(self, documents: Iterable[Any], published: Manifest | None) -> int:
        """Returns how many documents are an interrupted build's. An error in the documents leaves
        nothing to resume."""
        total = count_hint(documents)
        try:
            # What is added has ids of its own: a number would be that of another document.
            stream = batches(
                documents,
                BATCH_DOCUMENTS,
                self.budget.encoded_bytes(),
                self.recipe.spooled.dim,
                numbers_texts=self.kind != "add",
            )
            first, resumed = self._confirm(stream, total, published)
            if first or self.state.phase == "spool":
                self._append(itertools.chain([first] if first else [], stream), total)
        except BaseException as error:
            if isinstance(error, errors.InvalidInputError) or self._encoder_failed:
                under_way.discard(self.engine, self.path, published)
            elif not self.state.documents:  # nothing is on disk that could be continued
                with suppress(errors.EspnxError, OSError):
                    under_way.discard(self.engine, self.path, published)
            raise
        return resumed

    def _confirm(
        self, stream: Iterator[list[Document]], total: int | None, published: Manifest | None
    ) -> tuple[list[Document], int]:
        """Keeps what the corpus confirms of an interrupted build. Returns the first documents that
        are new, and how many are not."""
        kept, phase = self.state.documents, self.state.phase
        if not kept and phase == "spool":
            return [], 0
        trim(self.engine, self.building, self.state)
        same, other = under_way.confirm(
            stream,
            digests(self.engine, self.building, self.state),
            lambda done: self.progress("confirm", done, kept),
        )
        if same < kept:
            got = (
                f"document {same} ({other[0].id!r}) is another one"
                if other
                else f"the corpus ends after {same} documents"
            )
            self._restarted(f"{got}; {kept} were spooled")
        elif other and phase != "spool":
            self._restarted(f"the corpus goes on after the {kept} documents that it had")
        if same < kept or (other and phase != "spool"):
            under_way.back_to_spool(self.engine, self.path, self.state, published)
            cut(
                self.engine,
                self.building,
                self.recipe.spooled,
                self.recipe.stage.vector_dim,
                self.state,
                same,
            )
            make_directory(self.directory)
        return other, same

    def _restarted(self, why: str) -> None:
        """Says that this build is not simply the interrupted one."""
        self.restarted_because = (
            why if self.restarted_because is None else f"{self.restarted_because}; {why}"
        )
        warnings.warn(
            f"{self.path}: not all of the interrupted build is continued: {why}", stacklevel=2
        )

    def _append(self, stream: Iterable[list[Document]], total: int | None) -> None:
        """Spools what the interrupted build did not."""
        spool = SpoolWriter(
            self.engine,
            self.building,
            self.recipe.spooled,
            self.state,
            self.recipe.stage,
            self.options.format,
        )
        try:
            self.progress("spool", spool.count, total)
            last, begun = time.monotonic(), spool.count
            for batch in stream:
                decoded = decode_rows(
                    batch, self.recipe.schema.format, self.recipe.spooled.dim, self.recipe.codebook
                )
                try:
                    head = FIRST_DOCUMENTS if spool.count == begun else 0
                    vectors = encode(decoded[:head], self.encoder) if head else []
                    if head:
                        self.progress("spool", begun + len(vectors), total)
                    vectors += encode(decoded[head:], self.encoder)
                except Exception as error:
                    # Once mended, it may make other vectors under the same name; of a machine that
                    # was too small that is not to be feared.
                    self._encoder_failed = not isinstance(
                        error, (OSError, MemoryError, torch.OutOfMemoryError)
                    )
                    raise
                spool.append(batch, vectors)
                self.budget.trim()
                self.progress("spool", spool.count, total)
                if time.monotonic() - last > CHECKPOINT_S:
                    spool.checkpoint()
                    last = time.monotonic()
            spool.checkpoint(phase="arrange")
            spool.close()
        except BaseException:
            spool.abandon()
            raise

    def _check_disk(self, spool: Spool) -> None:
        """Says now, not in an hour, that the store will not fit."""
        if self.state.segments:
            return
        tiers = self.recipe.tiers.values()
        need = sum(int(schema.sizes(spool.n_tokens).sum()) for schema in tiers) * 21 // 20 + (
            16 << 20
        )
        roots = [os.path.join(self.path, root) for root in self._data_directories()]
        devices = [os.stat(root).st_dev for root in roots]
        for root, device in zip(roots, devices, strict=True):
            free, share = free_bytes(root), need * devices.count(device) // len(devices)
            # a file system that counts no blocks (ramfs, some network ones) cannot say
            if free < share and os.statvfs(root).f_blocks:
                raise errors.DiskFullError(
                    "the store's records will not fit",
                    needed_bytes=share,
                    free_bytes=free,
                    path=root,
                )

    def _arrange(self, spool: Spool) -> Arranged:
        if self.state.arranged is not None:
            self._described(self.state.arranged)  # now, not after all records are written
            return self.state.arranged
        self.progress("arrange", 0, len(spool))
        stage, files, crc, is_normalised = (
            self.recipe.stage.fresh(),
            dict[str, SpoolFile](),
            0,
            False,
        )
        if len(spool):
            trained = (
                train_recipe(self.recipe, spool, self.budget) if self.given is None else self.given
            )
            _, crc = write_file(
                self.engine, os.path.join(self.building, TRAINED), save_safetensors(trained.model)
            )
            files = arrange.assign(
                self.engine, self.building, spool, trained.first_stage, self.budget
            )
            stage = arrange.tune(self.engine, self.building, spool, trained.first_stage, files)
            is_normalised = trained.is_normalised
        self.progress("arrange", len(spool), len(spool))
        self.state.phase, self.state.arranged = (
            "write",
            Arranged(files, described(stage), crc, is_normalised),
        )
        write_state(self.engine, self.building, self.state)
        return self.state.arranged

    @property
    def directory(self) -> str:
        return os.path.join(self.path, generations.name(self.state.generation))

    def _writers(self, spool: Spool, directories: list[str]) -> list[SegmentWriter]:
        """One for each tier. Their segments cover the same records, so that they end, and a build
        resumes, together."""
        total_bytes = int(self.recipe.schema.sizes(spool.n_tokens).sum())
        # of the coarse tier where the full one's ends
        limits = [segment_bytes(total_bytes, len(self.options.directories)), NO_LIMIT]
        return [
            SegmentWriter(
                self.engine,
                self.path,
                directories,
                schema,
                self.state.store_id,
                self.state.generation,
                limit,
                self._finished(name, directories),
                salt=self._place()[0].salt,
                name="segment" if name == "full" else name,
            )
            for (name, schema), limit in zip(self.recipe.tiers.items(), limits, strict=False)
        ]

    def _finished(self, tier: str, directories: list[str]) -> list[Segment]:
        """The data files that an interrupted build finished."""
        found = self.state.segments.get(tier, [])
        for segment in found:
            if os.path.dirname(segment.path) not in directories:
                raise errors.FormatError(
                    "state of an interrupted build names a foreign file",
                    path=segment.path,
                    expected=f"one in {directories}",
                    fix=DISCARD,
                )
        return found

    def _data_directories(self) -> list[str]:
        return generations.data_directories(
            self.path, self.options.directories, self.state.store_id, self.state.generation
        )

    def _place(self) -> tuple[PartPlace, str]:
        return place_of_base(self.path, self.state.store_id, self.state.generation)

    def _write(self, spool: Spool, arranged: Arranged) -> list[SegmentWriter]:
        writers = self._writers(spool, self._data_directories())
        limit_bytes = self.budget.record_bytes()
        try:
            runs = pieces(
                self._order(arranged),
                lambda a: self.recipe.spooled.sizes(spool.n_tokens[a]),
                limit_bytes,
                writers[0].room,
            )
            self._skip_and_write(spool, arranged, writers, runs)
            for writer in writers:
                writer.finish_segment()
        except BaseException:
            for writer in writers:
                writer.abandon()
            raise
        return writers

    def _order(self, arranged: Arranged) -> Iterator[np.ndarray]:
        """Arrival numbers in record order."""
        if not self.state.documents:
            return iter(())
        return arrange.record_order(
            self.engine, self.building, arranged.files, self.state.documents
        )

    def _model(self, arranged: Arranged) -> dict[str, np.ndarray]:
        """Everything that was trained, as the second pass left it: what a base's file holds of
        it."""
        path = os.path.join(self.building, TRAINED)
        data = read_file(self.engine, path)
        if crc32c(data) != arranged.trained:
            raise errors.ChecksumError("a file of the build is damaged", path=path, fix=DISCARD)
        return load_safetensors(data)

    def _finish(
        self, writers: list[SegmentWriter], arranged: Arranged, model: dict[str, np.ndarray]
    ) -> PartEntry:
        """Writes the file that holds all but the records: ids and texts, what the first stage
        keeps, metadata, and what was trained."""
        place, path = self._place()
        source = TextReader(os.path.join(self.building, TEXTS), spool_salt(self.state))
        try:
            contents = PartContents(
                rows=(row for arrivals in self._order(arranged) for row in source.rows(arrivals)),
                sections=arrange.SpooledEntries(
                    self.engine, self.building, arranged.files, self.state.documents
                ).sections(),
                in_place=self.recipe.stage.in_place,
                model=model,
            )
            names = list(self.recipe.tiers)
            layouts = {name: writer.layout for name, writer in zip(names, writers, strict=True)}
            segments = {name: writer.segments for name, writer in zip(names, writers, strict=True)}
            return finish_part(FileWriter(self.engine, path), place, layouts, contents, segments)
        finally:
            source.close()

    def _targets(self, arranged: Arranged) -> tuple[Projection | None, list[Target]]:
        """How records of each tier are made of spooled vectors."""
        recipe, model = self.recipe, self._model(arranged) if self.state.documents else {}
        projection = projection_of(
            model, (recipe.spooled.dim, recipe.schema.dim), arranged.is_normalised, self.building
        )
        return projection, [
            Target(schema, codebook_of(model, name, schema, self.building))
            for name, schema in recipe.tiers.items()
        ]

    def _skip_and_write(
        self,
        spool: Spool,
        arranged: Arranged,
        writers: list[SegmentWriter],
        runs: Iterable[np.ndarray],
    ) -> None:
        first = writers[0]
        projection, targets = self._targets(arranged)
        again = [segment.records for segment in first.segments]  # finished by an interrupted build
        left, free_at = (again.pop(0) if again else 0), [HEADER_BYTES] * len(writers)
        for run in runs:
            while left and len(run):
                part, run = run[:left], run[left:]
                free_at = [
                    writer.count_again(spool.n_tokens[part], at)
                    for writer, at in zip(writers, free_at, strict=True)
                ]
                left -= len(part)
                if not left and again:
                    left, free_at = again.pop(0), [HEADER_BYTES] * len(writers)
            if not len(run):
                continue
            for writer, fill in zip(writers, fills(spool, run, projection, targets), strict=True):
                writer.append(spool.n_tokens[run], fill)
            self.progress("write", first.count, len(spool))
            if first.full():
                for writer in writers:
                    writer.finish_segment()
                self.state.segments = {
                    name: list(writer.segments)
                    for (name, _), writer in zip(self.recipe.tiers.items(), writers, strict=True)
                }
                write_state(self.engine, self.building, self.state)

    def _manifest(
        self, entry: PartEntry | None, arranged: Arranged, model: Mapping[str, np.ndarray]
    ) -> Manifest:
        """The manifest of a store of one part, or of none."""
        recipe, schema = self.recipe, self.recipe.schema
        encoder = EncoderEntry(recipe.encoder, recipe.spooled.d_cls, recipe.spooled.dim)
        cls_weight = self.options.cls_weight if schema.d_cls else 0.0
        is_normalised = arranged.is_normalised if schema.dim != encoder.dim else None
        # Vectors of an encoder that nobody named are of one kind where they were trained together,
        # and in one store.
        origin = (
            None
            if recipe.encoder is not None
            else self.state.store_id
            if self.given is None
            else self.given.id
        )
        scoring = {
            "encoder": asdict(encoder),
            "origin": origin,
            "record": asdict(schema),
            "cls_weight": cls_weight,
        }
        return Manifest(
            store_id=self.state.store_id,
            generation=self.state.generation,
            base_generation=self.state.generation,
            score_space=score_space({**scoring, "is_normalised": is_normalised}, model),
            encoder=encoder,
            schema=schema,
            coarse=recipe.coarse,
            count=entry.count if entry else 0,
            tokens=entry.tokens if entry else 0,
            is_normalised=is_normalised,
            first_stage=self._described(arranged),
            cls_weight=cls_weight,
            directories=tuple(self.options.directories),
            parts=(entry,) if entry else (),
            deleted=None,
        )

    def _described(self, arranged: Arranged) -> FirstStage:
        """The first stage as the second pass left it, without what was trained."""
        state = os.path.join(self.building, STATE)
        return parse_stage(
            Fields(arranged.first_stage, state, fix=DISCARD),
            self.recipe.spooled.d_cls,
            self.recipe.spooled.dim,
        )
