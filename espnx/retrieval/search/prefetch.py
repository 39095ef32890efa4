"""Prefetch or not, and at which steps: chosen from predicted times, which are replaced by measured
ones as searches go by.

Prefetching hides reads behind the first stage (ESPN, eq. 2), and costs: the first stage shares its
cores with the scoring, some records are read for nothing, every step is a call. On a fast first
stage and few records it loses, so a searcher has to choose.
"""

from __future__ import annotations

import itertools
import statistics
import threading
from collections import OrderedDict, deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

Steps = tuple[float, ...]

NO_PREFETCH: Steps = ()
#: What is chosen among. One step reads little for nothing; several begin earlier and miss less.
STRATEGIES: tuple[Steps, ...] = (NO_PREFETCH, (0.1,), (0.3,), (0.05, 0.1, 0.2, 0.4))

_SAMPLES = 15  # of a strategy; the median of so many forgets a slow disk within seconds
_ENOUGH = 3  # samples from which on the measured time counts, not the predicted one
# a strategy predicted (or measured) to take longer than so many times the best is not tried
_WORTH_A_TRY = 1.15
_TRY_EVERY = 16  # searches: whoever was close once may be better now
_KINDS_MAX = 64
_STEP_S = 0.15e-3  # what a step costs its caller: a merge, a plan, a task


@dataclass
class _Kind:
    """What is known of searches of one kind."""

    times: dict[Steps, deque[float]] = field(default_factory=dict)
    first_stage_s: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    rest_s: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    searches: int = 0


class PrefetchPolicy:
    """Thread-safe.

    Args:
        hit_rates: share of the candidates that are known after a share of the lists measured at
            build; empty where unknown.
    """

    def __init__(self, hit_rates: Mapping[float, float]):
        self._hit_rates = sorted(hit_rates.items())
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()
        self._lock = threading.Lock()

    def choose(self, kind: Hashable) -> tuple[Steps, float | None]:
        """(steps, predicted seconds) for a search of that kind: (number of lists, candidates,
        records to score, ...)."""
        with self._lock:
            known = self._known(kind)
            known.searches += 1
            if not known.rest_s:
                return NO_PREFETCH, None
            predicted = {steps: self._predict(known, steps) for steps in STRATEGIES}
            best = min(predicted, key=lambda steps: predicted[steps])
            close = [
                steps for steps in STRATEGIES if predicted[steps] <= _WORTH_A_TRY * predicted[best]
            ]
            for steps in close:
                if len(known.times.get(steps, ())) < _ENOUGH:
                    return steps, predicted[steps]
            if known.searches % _TRY_EVERY == 0:
                best = close[known.searches // _TRY_EVERY % len(close)]
            return best, predicted[best]

    def learn(self, kind: Hashable, steps: Steps, first_stage_s: float, total_s: float) -> None:
        """Notes what a search took: its first stage, and the whole."""
        with self._lock:
            known = self._known(kind)
            known.times.setdefault(steps, deque(maxlen=_SAMPLES)).append(total_s)
            if steps == NO_PREFETCH:
                known.first_stage_s.append(first_stage_s)
                known.rest_s.append(total_s - first_stage_s)

    def budget_s(self, kind: Hashable, step: float) -> float | None:
        """The prefetch budget of such a search (ESPN, eq. 2): the first stage's time after that
        share of its lists; None if unknown."""
        with self._lock:
            first_stage_s = self._known(kind).first_stage_s
            return (1 - step) * statistics.median(first_stage_s) if first_stage_s else None

    def _known(self, kind: Hashable) -> _Kind:
        known = self._kinds.setdefault(kind, _Kind())
        self._kinds.move_to_end(kind)
        if len(self._kinds) > _KINDS_MAX:
            self._kinds.popitem(last=False)
        return known

    def _predict(self, known: _Kind, steps: Steps) -> float:
        times = known.times.get(steps, ())
        if len(times) >= _ENOUGH:
            return statistics.median(times)
        first_stage_s, rest_s = (
            statistics.median(known.first_stage_s),
            statistics.median(known.rest_s),
        )
        if not steps:
            return first_stage_s + rest_s
        missed = 1 - self._hit_rate(steps[-1])
        hidden = max((1 - steps[0]) * first_stage_s, rest_s * (1 - missed))
        return steps[0] * first_stage_s + hidden + missed * rest_s + len(steps) * _STEP_S

    def _hit_rate(self, step: float) -> float:
        """Interpolated between what was measured, 0 at no list and 1 at all."""
        points = [(0.0, 0.0), *self._hit_rates, (1.0, 1.0)]
        for (left, low), (right, high) in itertools.pairwise(points):
            if step <= right:
                return low + (high - low) * (step - left) / (right - left)
        return 1.0
