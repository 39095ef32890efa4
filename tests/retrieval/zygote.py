"""Builders, and the command line, in children that tests kill at any moment: the jobs of
tests/forks.py."""

from __future__ import annotations

from typing import Any

import faiss
import numpy.random  # noqa: F401 - as what `load` imports: for all children

import espnx
from espnx import encoders
from espnx.retrieval.build import builder as module
from espnx.retrieval.first_stage.ivf import probing
from espnx.retrieval.store.part_file import FileWriter
from espnx.retrieval.store.texts import TextWriter
from espnx.retrieval.versions import generations, part_writer, publish
from espnx.retrieval.versions.segments import Layout
from espnx.storage import NativeEngine, ownership
from tests.forks import command_line, killed_at, serve
from tests.kills import watch
from tests.retrieval.build.memory_child import measured
from tests.retrieval.common import build, corpus, toy_encoder

OWNERS: dict[str, Any] = {
    "engine": NativeEngine,
    "texts": TextWriter,
    "layout": Layout,
    "file": FileWriter,
    "part": part_writer,
    "build": module,
    "generations": generations,
    "publish": publish,
    "arrange": module.arrange,
    "remove": ownership,
    "writer": module.SegmentWriter,
}


def small_pieces() -> None:
    """A checkpoint after every batch, so that each run passes through the same states, however fast
    it is; and data files of some kilobytes."""
    whole = module.pieces
    module.CHECKPOINT_S = 0.0
    probing._SAMPLE = 16
    module.segment_bytes = lambda total_bytes, devices: 16_384
    module.pieces = lambda order, sizes, limit_bytes, room: whole(order, sizes, 8192, room)  # type: ignore[assignment]


def run(job: dict[str, Any]) -> int:
    faiss.omp_set_num_threads(1)
    if "room_mib" in job:
        return measured(**job)
    small_pieces()
    watch(job)
    if "at" in job:
        owner, name, nth, after = job["at"]
        killed_at(OWNERS[owner], name, nth, after)
    if "argv" in job:
        espnx.load_encoder = encoders.load_encoder = lambda name, **options: toy_encoder(
            job.get("delay_s", 0.0)
        )
        return command_line(job)
    build(
        job["path"],
        iter(corpus(job["count"], seed=job["seed"])),
        replace=True,
        directories=job.get("directories", ()),
    )
    return 0


PACKAGES = ("espnx.cli", "espnx.device", "espnx.ops", "espnx.retrieval", "espnx.storage")


def jobs() -> None:
    serve(run)
