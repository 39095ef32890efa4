"""How far to believe it: what was measured on COSMOS+, predicted, each with a range, by what it
comes about, and how it moves when a mechanism is missing or the fitted figure is another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .calibration import SYNCHRONOUS_OVER_CONVENTIONAL, THREADS, calibrate_set_up_s
from .calibration import WINDOW as STRESS_WINDOW
from .closed_loop import WINDOW, ask
from .cosmos import ELEMENTS, MECHANISMS, Cosmos, ranges
from .figures import draw, middles
from .predictions import DRAWS, RAISED, SEED, NotPredicted, Prediction, check_draws, predictions
from .workloads import KIB, WORKLOADS, Workload, stress

#: Of draws: so many commands that chance is less than the figures are.
MIX_WINDOW = 4 * WINDOW

CLUSTERS_KIB = (4, 8, 12, 16)
BASIS = "table 5.1's bandwidths and page, 8 channels x 8 ways, 32 outstanding; fitted: the set-up"
MECHANISM = {
    "sync": "one place for arguments in an element: its channel stands while it is set up",
    "conv": "clusters pass the link without elements, whole pages the channels with them",
}


@dataclass(frozen=True)
class Validation:
    """Attributes:
    rows: of each id.
    fitted: figures that were, in seconds.
    fitted_on: what, and on which value.
    check: a second measurement's id, its measured and its predicted value.
    """

    rows: tuple[Prediction | NotPredicted, ...]
    fitted: Mapping[str, float]
    fitted_on: Mapping[str, float]
    check: Mapping[str, object]


def validate(n_draws: int = DRAWS) -> Validation:
    """All ids of COSMOS+.

    Raises:
        InvalidInputError: too few draws for a range.
        StateError: a value outside its own range.
    """
    check_draws(n_draws)
    known = ranges()
    figures = middles(known)
    set_up_s = calibrate_set_up_s(figures)
    values = _values(figures, set_up_s, MIX_WINDOW)
    rng = np.random.default_rng(SEED)
    drawn: list[dict[str, float]] = []
    for _ in range(n_draws):
        own = draw(known, rng)
        ratio = draw({"ratio": SYNCHRONOUS_OVER_CONVENTIONAL}, rng)["ratio"]
        drawn.append(_values(own, calibrate_set_up_s(own, ratio), WINDOW))
    moved = {
        f"without {each}": _values(figures, set_up_s, WINDOW, without=each) for each in MECHANISMS
    }
    moved["set-up 10 % longer"] = _values(figures, set_up_s * RAISED, WINDOW)
    return Validation(
        predictions(values, drawn, moved, _words),
        {"set_up_s": set_up_s},
        {"synchronous_over_conventional_16k": SYNCHRONOUS_OVER_CONVENTIONAL.middle},
        {
            "id": "link out, 32 threads over 2, conventional",
            "measured": 13,
            "predicted": _link_growth(figures),
        },
    )


def _words(name: str) -> tuple[str, str]:
    return MECHANISM[name.rsplit("_over_")[1].split("_")[0]], BASIS


def _asked() -> Iterator[tuple[str, Workload]]:
    for size in CLUSTERS_KIB:
        yield f"{size}k", stress(size * KIB)
    for name in ("sift", "spacev"):
        yield name, WORKLOADS[name]


def _values(
    figures: Mapping[str, float], set_up_s: float, mix_window: int, *, without: str | None = None
) -> dict[str, float]:
    """The value of each id, in the order in which they are listed."""
    rates: dict[tuple[str, str], float] = {}
    for name, workload in _asked():
        window = STRESS_WINDOW if workload.in_order else mix_window
        for element in ELEMENTS:
            board = replace(Cosmos(element, figures, set_up_s), without=without)
            rates[name, element] = ask(board, workload, THREADS, window=window).commands_per_s
    over = {"sync": "synchronous", "conv": "conventional"}

    def ratio(name: str, other: str) -> float:
        return rates[name, "asynchronous"] / rates[name, over[other]]

    sizes = [f"{size}k" for size in CLUSTERS_KIB]
    found = {
        f"cosmos.async_over_{other}_{size}": ratio(size, other) for other in over for size in sizes
    }
    for name in ("sift", "spacev"):
        for other in ("conv", "sync"):
            found[f"cosmos.qps_{name}100m_async_over_{other}"] = ratio(name, other)
    return found


def _link_growth(figures: Mapping[str, float], threads: Sequence[int] = (2, 32)) -> float:
    """How much longer a command is at the link out, waiting and passing, without elements."""
    few, many = (
        ask(Cosmos("conventional", figures), stress(), each).stage("link out") for each in threads
    )
    return (many.service_s + many.waiting_s) / (few.service_s + few.waiting_s)
