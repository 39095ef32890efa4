"""Every retriever over every number of devices, at equal effort and at equal recall: see
case.py."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

import espnx.device

from ..harness.registry import Say
from ..harness.result import Row
from ..harness.traces import recording
from . import texts, vectors
from .parts import Point, Retriever, ask, at_recall, shares_of


@dataclass(frozen=True)
class Settings:
    """Settings of a run: the options of case.py."""

    path: str
    collection: str | None
    retrievers: Sequence[str]
    counts: Sequence[int]
    encoder: str
    sparse_encoder: str
    n: int
    dim: int
    queries: int
    ef: int
    text_ef: int
    candidates: int
    k: int
    seed: int
    record: Path | None


def measure(settings: Settings, say: Say) -> list[Row]:
    """Rows of every retriever with every number of devices. Raises what the library raises."""
    rows = list[Row]()
    for retriever, n in _retrievers(settings, say):
        single: Point | None = None
        for count in settings.counts:
            point = None
            for at, point in _points(settings, retriever, n, count, single):
                rows.append(_row(settings, retriever, n, count, at, point))
                wrong = "" if point.problem is None else f"; WRONG: {point.problem}"
                way = (
                    f"{retriever.collection}, {retriever.name} by {retriever.index}, {count} "
                    f"devices, equal {at}"
                )
                say(
                    f"{way}: effort {point.effort}, recall {point.recall:.3f}, "
                    f"{point.total.reads:.1f} reads{wrong}"
                )
            single = single or point
    return rows


def _retrievers(settings: Settings, say: Say) -> Iterator[tuple[Retriever, int]]:
    """(each that was asked for, passages of its collection), made when its turn comes."""
    wanted = [name for name in settings.retrievers if name != "vectors"]
    if wanted:
        yield from texts.retrievers(
            wanted,
            settings.collection,
            settings.encoder,
            settings.sparse_encoder,
            settings.queries,
            settings.text_ef,
            settings.candidates,
            settings.k,
            say,
        )
    if "vectors" in settings.retrievers:
        data = vectors.by_recipe(
            settings.n, settings.dim, settings.queries, settings.k, settings.seed
        )
        for kind in vectors.retrievers(data, "vectors", settings.ef):
            yield kind, len(data.base)


def _points(
    settings: Settings, retriever: Retriever, n: int, count: int, single: Point | None
) -> Iterator[tuple[str, Point]]:
    """(``effort`` or ``recall``, its point); of one that is exact, or of a single device, the first
    alone."""
    shares = shares_of(n, count, settings.seed)
    with (
        tempfile.TemporaryDirectory(prefix="espnx-bench-ragx-", dir=settings.path) as folder,
        ExitStack() as opened,
    ):
        spread = retriever.build(Path(folder), shares)
        opened.callback(spread.close)
        asked = partial(ask, retriever, spread, k=settings.k)
        first = asked(retriever.effort)
        yield "effort", first
        if single is not None and retriever.effort:
            yield (
                "recall",
                at_recall(
                    asked,
                    single.recall,
                    retriever.least,
                    first,
                    max(retriever.effort, *map(len, shares)),
                ),
            )
        if settings.record is not None and isinstance(retriever, vectors.Hnsw):
            _record(settings.record, retriever, Path(folder), shares, settings.k)


def _record(
    into: Path, retriever: vectors.Hnsw, folder: Path, shares: Sequence[np.ndarray], k: int
) -> None:
    """A trace of all queries at equal effort."""
    devices = espnx.device.open("ssd", [folder / str(i) for i in range(len(shares))])
    name = re.sub(
        "[^a-z0-9]+", "-", f"{retriever.collection} {retriever.name} {retriever.index}".lower()
    ).strip("-")
    with ExitStack() as until:
        spread = retriever.opened(
            shares,
            recording(
                str(into / f"{name}-{len(shares)}.trace"), "espnx bench ragx", devices, until
            ),
        )
        until.callback(spread.close)
        spread.ask(retriever.effort, k)


def _row(
    settings: Settings, retriever: Retriever, n: int, count: int, at: str, point: Point
) -> Row:
    total, most = point.total, point.most
    metrics = {"effort": float(point.effort), "recall": point.recall, "rounds_most": most.rounds}
    for name in ("reads", "flash_bytes", "link_bytes", "distances"):
        metrics |= {name: getattr(total, name), f"{name}_most": getattr(most, name)}
    params = {
        "collection": retriever.collection,
        "passages": n,
        "retriever": retriever.name,
        "partitions": count,
        "at": at,
        "k": settings.k,
        "queries": point.queries,
    }
    return Row(
        case="ragx",
        params=params,
        system=retriever.index,
        kind="measured",
        requested_path="auto",
        effective_path="auto",
        cache="warm",
        n=0,
        median_s=None,
        p99_s=None,
        iqr_s=None,
        bytes_asked=round(total.flash_bytes),
        bytes_moved=round(total.flash_bytes),
        correct=point.problem is None,
        metrics=metrics,
    )
