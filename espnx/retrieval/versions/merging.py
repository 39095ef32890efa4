"""How parts become one: small ones into larger ones (`espnx.storage.levels` says which), first
stages included.

A file of its own: what a draft decides is there, how parts are written is here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...storage import NativeEngine
from ..store.part import Part, PartEntry
from ..store.part_file import FileWriter
from ..store.store import Version
from .copying import Source, live_numbers, merged_order
from .part_writer import PartContents, PartPlace, finish_part
from .segments import NO_LIMIT, Layout, pieces


def write_merged(
    engine: NativeEngine,
    version: Version,
    parts: Sequence[Part],
    deleted: np.ndarray,
    place: PartPlace,
    path: str,
    limit_bytes: int,
) -> PartEntry | None:
    """Writes the live records of some parts as one, to `path`; None where none is alive. Holds what
    the first stage needs for that and 60 bytes a record, and `limit_bytes` of records at a time."""
    live = live_numbers(parts, deleted)
    if not len(live):
        return None
    entries = version.first_stage.merge(parts, deleted)
    order = merged_order(entries, live)
    file, layouts = (
        FileWriter(engine, path),
        {tier: Layout(version.schema_of(tier)) for tier in version.tiers},
    )
    with Source(version, parts) as source:
        sizes = version.schema_of("full").sizes
        try:
            for tier, layout in layouts.items():
                for run in pieces(
                    iter([order]),
                    lambda n: sizes(source.n_tokens[n]),
                    limit_bytes,
                    lambda: NO_LIMIT,
                ):
                    layout.append(
                        file,
                        source.n_tokens[run],
                        source.records(tier, run),
                        place.first_number,
                        place.salt,
                    )
        except BaseException:
            file.abandon()
            raise
        contents = PartContents(source.rows(order), entries.sections, version.first_stage.in_place)
        return finish_part(file, place, layouts, contents)
