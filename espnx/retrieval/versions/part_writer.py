"""What every part's file ends with: ids and texts, the first stage's sections, metadata; of a base
also what was trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from safetensors.numpy import save as save_safetensors

from ...storage.documents.ids import DocumentId
from ...storage.documents.rows import write_texts
from ...storage.files import BLOCK_BYTES
from ..store.part import PartEntry, Segment, stage_section
from ..store.part_file import MAIN, FileWriter
from .segments import Layout


@dataclass(frozen=True)
class PartContents:
    """What a part holds beside its records, in the order of the records.

    Attributes:
        rows: (id, text) of each record.
        sections: of the first stage, by name, in any pieces.
        in_place: of those, which begin at multiples of 4096 bytes.
        model: of a base: everything that was trained.
    """

    rows: Iterable[tuple[DocumentId, str]]
    sections: Mapping[str, Iterable[np.ndarray]]
    in_place: frozenset[str] = frozenset()
    model: Mapping[str, np.ndarray] | None = None


@dataclass(frozen=True)
class PartPlace:
    """The place of a part: its generation, its directory's name, and the path of its file as the
    manifest has it."""

    store_id: str
    salt: int
    generation: int
    directory: str
    path: str
    first_number: int


def finish_part(
    file: FileWriter,
    place: PartPlace,
    layouts: Mapping[str, Layout],
    contents: PartContents,
    segments: Mapping[str, list[Segment]] | None = None,
) -> PartEntry:
    """Writes the sections, flushes and closes the file, and returns what the manifest is to say of
    the part.

    `segments`: the data files of each tier; None where the records lie in this very file.
    """
    count = layouts["full"].count
    try:
        write_texts(file, contents.rows, place.first_number, place.salt)
        for name, chunks in contents.sections.items():
            file.section(
                stage_section(name),
                chunks,
                align_bytes=BLOCK_BYTES if name in contents.in_place else 8,
            )
        meta = {"n_tokens": layouts["full"].all_tokens()}
        meta |= {f"{tier}_group_offset_bytes": layout.offsets() for tier, layout in layouts.items()}
        file.section("meta", [save_safetensors(meta)])
        if contents.model is not None:
            file.section(
                "model",
                [
                    save_safetensors(
                        {
                            name: np.ascontiguousarray(array)
                            for name, array in contents.model.items()
                        }
                    )
                ],
            )
    except BaseException:
        file.abandon()
        raise
    size = file.finish(place.store_id, place.generation, MAIN, place.first_number, count)
    if segments is None:
        segments = {
            tier: [Segment(place.path, place.first_number, count, size)] for tier in layouts
        }
    return PartEntry(
        place.generation,
        place.directory,
        place.first_number,
        count,
        layouts["full"].tokens,
        place.path,
        size,
        dict(segments),
    )
