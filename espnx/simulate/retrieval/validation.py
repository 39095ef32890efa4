"""What RAGX was measured at, predicted: ratios and shares of its systems, each with a range."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ...errors import InvalidInputError
from ..figures import Range, draw, middles
from ..predictions import DRAWS, RAISED, SEED, Prediction, check_draws, predictions
from .answer import READS, Answer, answer
from .fitted import RETRIEVERS, SHARES, fit
from .service import FITTED, MECHANISMS, load_preset_service

SIZES = {"0.5M": 500_000, "5M": 5_000_000, "50M": 50_000_000, "500M": 500_000_000}
#: Whose vectors of 500 million passages fitted nowhere (RAGX figure 9).
TOO_LARGE = ("gtr", 500_000_000)
BASE, OURS, EIGHT, CLUSTERS = "cpu-nvme", "ragx-1", "ragx-8", "cpu-ivf-nvme"
SYSTEMS = (BASE, "cpu-dram", "disag-nvme", "disag-dram", "gpu-dram", OURS)
#: Beside them; RAGX has a networked drive in its section 2.4.
MORE_SYSTEMS = (EIGHT, CLUSTERS, "cpu-ebs")
GENERATION, SMALLER = "llama2-34b", "llama2-13b"

_READS = "reads one after another on the host; in the drive, those of a hop at once"
_WALKS = "walks by a law that is extrapolated from smaller graphs"
#: By the beginning of the id, the first that fits.
WORDS: Mapping[str, tuple[str, str]] = {
    "ragx.x_": (_READS, f"mean of ratios of five retrievers (four at 500M); {_WALKS}"),
    "ragx.over_ivf": (
        "a walk's vectors from the drive, beside one read for each vector of clusters",
        "three retrievers of vectors, all sizes; .1 % of sqrt(N) clusters, one at least",
    ),
    "ragx.over_cpu_dram": ("vectors and postings compared by the CPU", "mean of five"),
    "ragx.over_disag_nvme": (_READS + "; a crossing of the network", "mean of five"),
    "ragx.over_disag_dram": (
        "vectors and postings compared by the CPU; a crossing of the network",
        "mean of five",
    ),
    "ragx.over_gpu_dram": ("hops of a walk on a GPU, and in the drive", "mean of five"),
    "ragx.nvme_share_cpu": (
        "a read for each vector, one after another, beside the model's answer",
        f"share of a query's time, mean of five (four at 500M); {_WALKS}",
    ),
    "ragx.nvme_share_ragx": (
        "reads of a hop from all dies, hop after hop; lists at the bus's pace",
        f"share of a query's time, mean of five (four at 500M); {_WALKS}",
    ),
    "ragx.gtr_5M": (_READS, f"over cpu-nvme; {_WALKS}"),
    "ragx.bm25_8drives": ("lists spread over drives by terms", "ragx-8 over cpu-nvme"),
    "ragx.gtr_8drives": ("a graph of an eighth in each drive", f"ragx-8 over cpu-nvme; {_WALKS}"),
    "ragx.batch": (
        "searches of a batch one after another, its answers together",
        "mean of ratios of five over cpu-nvme",
    ),
    "ragx.llama": ("the model's answer is a smaller part", f"{SMALLER}, 5M, mean of five"),
    "ragx.search_energy": (
        "power of what encodes and searches, for the time that it does",
        "mean over five retrievers and four sizes, over cpu-nvme; hosts of drives not counted",
    ),
}


def all_ranges() -> dict[str, Range]:
    """The ranges of all services; what several are made of is there once."""
    found: dict[str, Range] = {}
    for system in (*SYSTEMS, *MORE_SYSTEMS):
        for retriever in RETRIEVERS:
            for model in (GENERATION, SMALLER):
                found |= load_preset_service(system, retriever, model).ranges
    return found


@dataclass(frozen=True)
class Case:
    """Everything that one set of values says.

    Attributes:
        values: of figures, with the fitted ones.
        without: of `MECHANISMS`.
    """

    values: Mapping[str, float]
    without: str | None = None

    def ask(
        self, system: str, retriever: str, size: str, batch: int = 1, model: str = GENERATION
    ) -> Answer:
        specs = load_preset_service(system, retriever, model)
        return answer(specs.given(self.values, self.without), SIZES[size], batch)

    def over(
        self,
        other: str,
        retriever: str,
        size: str,
        ours: str = OURS,
        batch: int = 1,
        model: str = GENERATION,
    ) -> float:
        """Queries a second of ours, over the other's."""
        first, second = (
            self.ask(name, retriever, size, batch, model).queries_per_s for name in (ours, other)
        )
        return first / second

    def mean_over(
        self, other: str, size: str, ours: str = OURS, batch: int = 1, model: str = GENERATION
    ) -> float:
        """The same, over all retrievers."""
        ratios = [self.over(other, each, size, ours, batch, model) for each in fitting(size)]
        return float(np.mean(ratios))

    def read_share(self, system: str, size: str) -> float:
        """The share of a query's time in which drives are read, over all retrievers."""
        return float(np.mean([self.ask(system, each, size).share(READS) for each in fitting(size)]))

    def over_clusters(self) -> list[float]:
        return [
            self.over(CLUSTERS, each, size)
            for size in SIZES
            for each in fitting(size)
            if load_preset_service(OURS, each).retriever.representation == "vectors"
        ]

    def energy_gain(self) -> float:
        gains = [
            self.ask(BASE, each, size).search_joules / self.ask(OURS, each, size).search_joules
            for size in SIZES
            for each in fitting(size)
        ]
        return float(np.mean(gains))

    def values_of_ids(self) -> dict[str, float]:
        """The prediction of each id, in the order in which they are listed."""
        found = {f"x_{size}": self.mean_over(BASE, size) for size in SIZES}
        for other in ("cpu-dram", "disag-nvme", "disag-dram", "gpu-dram"):
            found[f"over_{other.replace('-', '_')}_50M"] = self.mean_over(other, "50M")
        for name, system in (("cpu", BASE), ("ragx", OURS)):
            for size in SIZES:
                found[f"nvme_share_{name}_{size}"] = self.read_share(system, size)
        found["gtr_5M"] = self.over(BASE, "gtr", "5M")
        for retriever in ("bm25", "gtr"):
            found[f"{retriever}_8drives_50M"] = self.over(BASE, retriever, "50M", EIGHT)
        for batch in (8, 256):
            found[f"batch{batch}_5M"] = self.mean_over(BASE, "5M", batch=batch)
        found["llama_1xA100"] = self.mean_over(BASE, "5M", model=SMALLER)
        clusters = self.over_clusters()
        found["over_ivf_nvme_min"], found["over_ivf_nvme_max"] = min(clusters), max(clusters)
        found["search_energy_gain_avg"] = self.energy_gain()
        return {f"ragx.{name}": value for name, value in found.items()}


def fitting(size: str) -> list[str]:
    """Retrievers that were tried with so many passages."""
    return [each for each in RETRIEVERS if (each, SIZES[size]) != TOO_LARGE]


@dataclass(frozen=True)
class Validation:
    """Attributes:
    rows: of each id.
    fitted: figures that were, in seconds.
    fitted_on: what, and on which values.
    checks: what else RAGX's section 2.4 says and nothing was fitted on: id, measured, predicted.
    """

    rows: tuple[Prediction, ...]
    fitted: Mapping[str, float]
    fitted_on: Mapping[str, float]
    checks: tuple[Mapping[str, object], ...]


def validate(n_draws: int = DRAWS) -> Validation:
    """All ids of RAGX.

    Raises:
        InvalidInputError: too few draws for a range.
        StateError: a value outside its own range.
    """
    check_draws(n_draws)
    known = all_ranges()
    values, fitted = middle_values()
    middle = Case(values)
    rng = np.random.default_rng(SEED)
    drawn = [Case(_drawn(known, rng)).values_of_ids() for _ in range(n_draws)]
    moved = {
        f"without {each}": replace(middle, without=each).values_of_ids() for each in MECHANISMS
    }
    raised = [name for name, each in known.items() if each.low < each.high] + list(FITTED)
    for name in raised:
        other = {**values, name: values[name] * RAISED}
        moved[f"{name} 10 % up"] = Case(other).values_of_ids()
    return Validation(
        predictions(middle.values_of_ids(), drawn, moved, _words),
        fitted,
        {f"search in all, {size:,} passages": each.middle for size, each in SHARES.items()},
        tuple(_checks(middle)),
    )


def middle_values() -> tuple[dict[str, float], dict[str, float]]:
    """Those of all figures, with the fitted ones; and the fitted ones alone."""
    values = middles(all_ranges())
    fitted = fit(values, {size: each.middle for size, each in SHARES.items()})
    return {**values, **fitted}, fitted


def _drawn(known: Mapping[str, Range], rng: np.random.Generator) -> dict[str, float]:
    """Values of all figures, drawn until the shares can be fitted with them."""
    while True:
        values = draw(known, rng)
        shares = {size: float(rng.uniform(each.low, each.high)) for size, each in SHARES.items()}
        try:
            return {**values, **fit(values, shares)}
        except InvalidInputError:
            continue


def _checks(case: Case) -> list[dict[str, object]]:
    colbert = case.ask(BASE, "colbert", "5M")
    search_s = colbert.search_share * colbert.serial_s
    disag = case.mean_over("cpu-dram", "5M", "disag-dram")
    return [
        {"id": "reads of ColBERT's search, 5M", "measured": 395, "predicted": colbert.distances},
        {
            "id": "reads in ColBERT's search, 5M",
            "measured": 0.74,
            "predicted": colbert.phases_s[READS] / search_s,
        },
        {
            "id": "cpu-dram over cpu-nvme, 5M",
            "measured": 1.9,
            "predicted": case.mean_over(BASE, "5M", "cpu-dram"),
        },
        {"id": "disag-dram over cpu-dram, 5M", "measured": 0.72, "predicted": disag},
    ]


def _words(name: str) -> tuple[str, str]:
    return next(words for start, words in WORDS.items() if name.startswith(start))
