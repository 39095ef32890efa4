"""Plots in documents, drawn from result files (one from the record of the demo's model) as the
tables are rendered from them: docs/plots/*.svg. A page shows them between ``<!-- plots:NAME,...
-->`` and ``<!-- /plots -->``, those that results have something for."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espnx.errors import InvalidInputError, MissingDependencyError

from ..harness.result import rows_of
from . import device_plots, graph_plots, kv_plots, search_plots, training
from .found import Found
from .looks import use_style

FOLDER = "docs/plots"
BLOCK = re.compile(r"(<!-- plots:(?P<names>[\w,-]+) -->\n).*?(<!-- /plots -->)", re.DOTALL)


@dataclass(frozen=True)
class Plot:
    """A plot of the rows of one case and its shows.

    Attributes:
        alt: what it shows, in words.
        width: as a page shows it.
        draw: None where nothing can be drawn of the rows.
        needs: those rows that it is drawn of; none where something is missing, for a page is filled
            without matplotlib, too.
    """

    case: str
    shows: Sequence[str]
    alt: str
    draw: Callable[[Sequence[Found]], Any]
    width: str = "49%"
    needs: Callable[[Sequence[Found]], Sequence[Found]] = tuple

    def rows(self, results: Mapping[Path, Mapping[str, Any]]) -> Sequence[Found]:
        documents = [
            (document["machine"]["memory_bytes"], row)
            for document in results.values()
            for row in rows_of(document)
        ]
        wanted = [
            row
            for row in documents
            if row[1].case == self.case
            and row[1].params.get("show") in self.shows
            and row[1].correct
        ]
        return self.needs([Found(row, size) for size, row in wanted])


def fill(text: str, results: Mapping[Path, Mapping[str, Any]], folder: str) -> str:
    """The text with its marked blocks filled. `folder`: of the plots, as seen from the page. Raises
    InvalidInputError: an unknown plot."""

    def images(match: re.Match[str]) -> str:
        names = match["names"].split(",")
        if unknown := [name for name in names if name not in PLOTS]:
            raise InvalidInputError(
                "a marked block names an unknown plot", got=unknown[0], expected=", ".join(PLOTS)
            )
        drawn = [(name, PLOTS[name]) for name in names if PLOTS[name].rows(results)]
        lines = [
            f'<img src="{folder}/{name}.svg" alt="{plot.alt}" width="{plot.width}">'
            for name, plot in drawn
        ]
        return match[1] + (f"\n{' '.join(lines)}\n\n" if lines else "") + match[3]

    return BLOCK.sub(images, text)


def draw_all(root: Path, results: Mapping[Path, Mapping[str, Any]]) -> list[Path]:
    """Draws every plot that the results have rows for. Returns the files.

    Raises MissingDependencyError without matplotlib.
    """
    try:
        use_style()
    except ImportError as error:
        raise MissingDependencyError(
            "plots need matplotlib", got=str(error), fix="pip install 'espnx[bench]'"
        ) from error
    figures = {
        name: plot.draw(rows) if (rows := plot.rows(results)) else None
        for name, plot in PLOTS.items()
    }
    record = training.load_record(root)
    figures[training.PLOT] = None if record is None else training.loss_curve(record)
    drawn = []
    for name, figure in figures.items():
        if figure is not None:
            path = root / FOLDER / f"{name}.svg"
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, metadata={"Date": None})
            drawn.append(path)
    return drawn


PLOTS: dict[str, Plot] = {
    "first-token": Plot(
        "kv",
        ["resume"],
        "seconds to the first token about a text read before",
        kv_plots.first_token,
    ),
    "kv-memory": Plot(
        "kv",
        ["context"],
        "tokens a second over the context, under a memory limit",
        kv_plots.under_a_limit,
        needs=kv_plots.limited,
    ),
    "kv-context": Plot(
        "kv",
        ["context"],
        "tokens a second over the context, with memory to spare",
        kv_plots.context,
        needs=kv_plots.ample,
    ),
    "kv-speculation": Plot(
        "kv",
        ["speculation"],
        "seconds a step over the rate of the disk, with drafts and one by one",
        kv_plots.speculation,
        needs=kv_plots.timed,
    ),
    "search-sizes": Plot(
        "retrieval", ["sizes"], "time of a search over the size of the records", search_plots.sizes
    ),
    "formats": Plot(
        "retrieval",
        ["formats"],
        "nDCG@10 of record formats beside fp16's",
        search_plots.formats,
        "80%",
    ),
    "hit-rate": Plot(
        "retrieval", ["hit-rate"], "hit rate over the prefetch step", search_plots.hit_rate, "80%"
    ),
    "device-topology": Plot(
        "device",
        ["topology"],
        "what attention in the drive brings, by the number of drives",
        device_plots.decoding,
    ),
    "device-search": Plot(
        "device",
        ["search"],
        "what MaxSim in the drive brings, by the number of drives",
        device_plots.searching,
    ),
    "graph-reads": Plot(
        "graph", ["sweep", "summary"], "reads a query over recall, by system", graph_plots.reads
    ),
    "graph-rates": Plot(
        "graph", ["sweep", "summary"], "queries a second over recall, by system", graph_plots.rates
    ),
    "graph-clusters": Plot(
        "graph",
        ["clusters"],
        "reads a query over the number of clusters, beside blind sharding",
        graph_plots.over_clusters,
    ),
}
