"""What a run on emulated devices may be quoted for: how much of its time was the devices', and how
much this machine's.

Emulated time passes as the wall clock does, slower by the stretch. So what the host computes, and
what real work takes longer than the hardware would, stands in it divided by the stretch. Where that
is more than a fifth of a run, its time says too much of this machine, and is not to be quoted:
results are right all the same. A larger stretch makes the share smaller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...errors import StateError, TimesNotValidError
from .topology import Times, Topology

#: Of a run's time, at most, that may be the host's.
HOST_SHARE_MAX = 0.2
_FIGURES = 2  # of a stretch that is proposed
#: That is proposed: a second of the devices takes hours then, and what asks for more hardly waits
#: for them.
STRETCH_MAX = 10_000.0


@dataclass(frozen=True)
class Report:
    """How the time of a run, or of a part of one, was spent.

    Attributes:
        stretch: wall seconds of a virtual second.
        wall_s: how long it took.
        waited_s: wall seconds in which somebody waited for what the devices had not done yet, and
            nobody was late: the devices' time.
        late_s: wall seconds in which somebody waited for what the devices had done already: for
            real work, and for threads to wake. Others may have waited for devices meanwhile; where
            one of many is late, the run is. They are in `host_s`.
    """

    stretch: float
    wall_s: float
    waited_s: float
    late_s: float

    @property
    def virtual_s(self) -> float:
        """How long it took the emulated hardware."""
        return self.wall_s / self.stretch

    @property
    def host_s(self) -> float:
        """Wall seconds that were not the devices'."""
        return max(self.wall_s - self.waited_s, 0.0)

    @property
    def host_share(self) -> float:
        """The host's share of the time; 0 of a run that took none."""
        return self.host_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def is_valid(self) -> bool:
        """Whether its times may be quoted."""
        return self.host_share <= HOST_SHARE_MAX

    @property
    def stretch_to_use(self) -> float:
        """The least stretch, rounded up, that makes the host's share small enough if the host takes
        as long as now and the devices wait for nothing else; infinite above `STRETCH_MAX`, where
        they were waited for so little that it is chance."""
        if self.is_valid:
            return self.stretch
        # host / (host + waited x more) = share
        more = (
            self.host_s * (1 - HOST_SHARE_MAX) / (HOST_SHARE_MAX * self.waited_s)
            if self.waited_s > 0
            else math.inf
        )
        wanted = _rounded_up(self.stretch * more)
        return wanted if wanted <= STRETCH_MAX else math.inf

    def _way_out(self, stretch: float) -> str:
        elsewhere = "`espnx bench device` measures such devices"
        if not self.waited_s:
            return f"nobody waited for an emulated device; {elsewhere}"
        if not math.isfinite(stretch):
            waited = (
                f"its devices were waited for in {self.waited_s:.2g} s of it, too little to say "
                "which stretch would do"
            )
            return f"{waited}: give them more to do; {elsewhere}"
        return (
            f"run it again with a stretch of {stretch:g}, for about "
            f"{self.host_s + self.waited_s * stretch / self.stretch:.2g} s"
        )

    @property
    def refusal(self) -> TimesNotValidError | None:
        """Why its times are not to be quoted; None: they may be. A benchmark raises it; a program
        whose results count prints it."""
        if self.is_valid:
            return None
        more = self.stretch_to_use
        return TimesNotValidError(
            "the times of this emulated run are not the devices' (its results are right)",
            got=(
                f"{self.host_share:.0%} of {self.wall_s:.3g} s that were this machine's, at a "
                f"stretch of {self.stretch:g}"
            ),
            expected=f"at most {HOST_SHARE_MAX:.0%}",
            fix=self._way_out(more),
            stretch_to_use=more,
        )

    def check(self) -> None:
        """Raises TimesNotValidError where its times are not to be quoted."""
        if refusal := self.refusal:
            raise refusal


def report(topology: Topology, since: Times | None = None) -> Report:
    """The report of everything on a topology, or of what came after `since` (`Topology.times`, when
    nobody waited).

    Raises:
        StateError: the topology's `stretch` is 0, so that the wall clock says nothing of it.
    """
    if topology.stretch == 0:
        raise StateError(
            "a report of emulated time",
            got="a topology with a stretch of 0",
            expected="one that the wall clock moves",
        )
    times, before = topology.times(), since or Times(0.0, 0.0, 0.0)
    wall = topology.stretch
    return Report(
        wall,
        (times.now_s - before.now_s) * wall,
        (times.waited_s - before.waited_s) * wall,
        (times.late_s - before.late_s) * wall,
    )


def _rounded_up(value: float) -> float:
    """Rounds up to so many figures that people can type it."""
    if not math.isfinite(value):
        return value
    unit = 10.0 ** (math.floor(math.log10(value)) - _FIGURES + 1)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.{_FIGURES + 1}g}")
