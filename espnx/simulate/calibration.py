"""The one figure that is fitted: how long a processing element of COSMOS+ stands between two
commands that are set up synchronously. It is fitted on one measurement, that of the synchronous
element beside the drive without one."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import InvalidInputError
from .closed_loop import ask
from .cosmos import Cosmos
from .figures import rounded
from .workloads import stress

#: Synchronous over conventional, 16 KiB clusters at consecutive addresses, the most of 1 to 32
#: threads.
SYNCHRONOUS_OVER_CONVENTIONAL = rounded(2.36, 0.01, "thesis section 3.6.1", "paper")
THREADS = 32
#: Every thread goes the same way over the channels here, so that a short window says all.
WINDOW = 3200
_TOLERANCE, _TRIALS = 1e-4, 20


def calibrate_set_up_s(
    figures: Mapping[str, float], ratio: float = SYNCHRONOUS_OVER_CONVENTIONAL.middle
) -> float:
    """The set-up's time with which that ratio comes out, by regula falsi on the time that a command
    takes of the whole drive, which grows with it. Raises InvalidInputError: none does."""
    conventional = ask(Cosmos("conventional", figures), stress(), THREADS, window=WINDOW)
    aim_s = 1 / (ratio * conventional.commands_per_s)

    def missed_s(set_up_s: float) -> float:
        board = Cosmos("synchronous", figures, set_up_s)
        return 1 / ask(board, stress(), THREADS, window=WINDOW).commands_per_s - aim_s

    low, high = 0.0, 1e-3
    at_low, at_high = missed_s(low), missed_s(high)
    for _ in range(_TRIALS):
        if at_low > 0 or at_high < 0:
            break
        middle = low - at_low * (high - low) / (at_high - at_low)
        at_middle = missed_s(middle)
        if abs(at_middle) <= _TOLERANCE * aim_s:
            return middle
        if at_middle < 0:
            low, at_low = middle, at_middle
        else:
            high, at_high = middle, at_middle
    raise InvalidInputError(
        "the time of a synchronous set-up",
        got=f"no time from 0 to 1 ms that gives {ratio:g} times the conventional drive",
        expected="figures of a drive whose flash is that much faster than its link",
    )
