"""The last step of everything that changes a store: what was written becomes a part of a new manifest, in one rename."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors.numpy import save as save_safetensors

from .. import errors
from ..storage import NativeEngine
from ..storage.manifest import write_manifest
from ..storage.stream import file_sums, read_windows, write_file
from . import generations
from .segments import SegmentWriter
from .store import FIRST_STAGE_NAME, MAGIC, META_NAME, TEXTS_NAME, VERSION


@dataclass(frozen=True)
class Written:
    """A part that is on disk but for its metadata.

    Attributes:
        writers: tier -> its segments.
        first_stage: size and checksum of first_stage.faiss; None for a part without records.
        extra: tensors for meta.safetensors: projection and codebooks, of a base part.
    """

    generation: int
    first_number: int
    writers: Mapping[str, SegmentWriter]
    first_stage: tuple[int, int] | None
    extra: Mapping[str, np.ndarray]

    @property
    def tokens(self) -> int:
        return int(sum(int(counts.sum(dtype=np.int64)) for counts in self.writers["full"].n_tokens))


def finish_part(engine: NativeEngine, path: str, written: Written, directories: Sequence[str] = ()) -> dict[str, Any]:
    """Writes the metadata of a part, flushes everything, and returns the part's entry for the manifest."""
    directory = os.path.join(path, generations.name(written.generation))
    meta = written.writers["full"].metadata()
    if "compact" in written.writers:
        meta["compact_group_offset_bytes"] = written.writers["compact"].metadata()["group_offset_bytes"]
    meta |= written.extra
    sizes = {META_NAME: write_file(engine, os.path.join(directory, META_NAME), save_safetensors(meta))}
    if written.first_stage is not None:
        sizes[FIRST_STAGE_NAME] = written.first_stage
    texts = os.path.join(directory, TEXTS_NAME)
    whole, parts = file_sums(engine, texts)
    for _ in read_windows(engine, texts, sums=parts):
        pass  # SQLite wrote it, so nothing else is known of it: what two reads agree on is what is there
    sizes[TEXTS_NAME] = (os.path.getsize(texts), whole)
    for flushed in (directory, path, *directories):
        engine.sync_directory(flushed)
    return {
        "generation": written.generation,
        "directory": generations.name(written.generation),
        "first_number": written.first_number,
        "count": written.writers["full"].count,
        "segments": {tier: writer.state() for tier, writer in written.writers.items()},
        "files": {name: {"size_bytes": size, "crc32c": crc} for name, (size, crc) in sizes.items()},
    }


def publish(engine: NativeEngine, path: str, contents: Mapping[str, Any], replaced: Mapping[str, Any] | None) -> None:
    """Makes `contents` the store's manifest, then removes what only the manifest before it referred to.

    Raises what writing raises: nothing was published; or WriteError that says "published": only the last flush failed.
    """
    before = generations.manifest_file(path)
    try:
        write_manifest(engine, path, MAGIC, VERSION, dict(contents))
    except errors.StorageError as error:
        if generations.manifest_file(path) == before:
            raise
        # Nothing is removed: after a power cut the version before may be the one that is there.
        raise errors.WriteError(
            "cannot flush the directory of the new version", path=path, errno=error.errno,
            got=f"{error.got}: it is published, but not known to survive a power cut",
            fix="do not repeat the change; check the device, then compact (or change something else), which flushes again",
        ) from error  # fmt: skip
    generations.clean(path, contents, replaced)
