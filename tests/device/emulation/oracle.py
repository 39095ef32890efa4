"""Links in plain Python, in fractions: who flows, how fast, and when the next one begins or has
flowed. What the compiled clock must agree with; shares no code with it, and does it another way:
every moment is computed from nothing, and no rate is kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction


@dataclass
class Work:
    """A transfer. `path`: (link, amount, per second) of each leg; `after`: numbers of earlier
    ones."""

    issued_s: float
    path: list[tuple[int, float, float]]
    size_bytes: int
    lane: int
    before_s: float = 0.0
    after: tuple[int, ...] = ()

    def seconds(self) -> dict[int, Fraction]:
        """Of each link that it has work on, for one unit."""
        units = self.size_bytes or 1
        found: dict[int, Fraction] = {}
        for link, amount, per_s in self.path:
            if amount:
                found[link] = (
                    found.get(link, Fraction(0)) + Fraction(amount) / Fraction(per_s) / units
                )
        return found


@dataclass
class State:
    in_lane_s: dict[int, Fraction] = field(default_factory=dict)
    left: dict[int, Fraction] = field(default_factory=dict)
    end_s: dict[int, Fraction] = field(default_factory=dict)


def fair(costs: dict[int, dict[int, Fraction]]) -> dict[int, Fraction | None]:
    """Max-min fair rates of who has these costs on these links; None: nothing holds it back. Of
    each link that is full somebody can have more only if somebody else has less, who has no more
    than that one."""
    found: dict[int, Fraction | None] = {who: None for who, cost in costs.items() if not cost}
    while len(found) < len(costs):
        levels = {}
        for link in {link for cost in costs.values() for link in cost}:
            users = [who for who, cost in costs.items() if link in cost]
            taken = sum((found[who] or 0) * costs[who][link] for who in users if who in found)
            growing = sum((costs[who][link] for who in users if who not in found), Fraction(0))
            if growing:
                levels[link] = (1 - taken) / growing
        level = min(levels.values())
        full = {link for link, at in levels.items() if at == level}
        found |= {
            who: level for who, cost in costs.items() if who not in found and full & set(cost)
        }
    return found


def ends(latencies_s: list[float], works: list[Work]) -> tuple[list[float], list[float]]:
    """(virtual seconds at which each work ends, busy seconds of each link)."""
    state = State()
    now = Fraction(0)
    while len(state.end_s) < len(works):
        for number, work in enumerate(works):
            if number not in state.in_lane_s and all(each in state.end_s for each in work.after):
                begun = max([Fraction(work.issued_s), *(state.end_s[each] for each in work.after)])
                state.in_lane_s[number] = begun + Fraction(work.before_s)
                state.left[number] = Fraction(work.size_bytes or 1)
        first: dict[int, int] = {}
        for number in sorted(state.left, key=lambda each: (state.in_lane_s[each], each)):
            if state.in_lane_s[number] <= now:
                first.setdefault(works[number].lane, number)
        rates = fair({number: works[number].seconds() for number in first.values()})
        moments = [
            at for number, at in state.in_lane_s.items() if at > now and number in state.left
        ]
        moments += [
            now if rate is None else now + state.left[number] / rate
            for number, rate in rates.items()
        ]
        later = min(moments)
        for number, rate in rates.items():
            state.left[number] -= state.left[number] if rate is None else rate * (later - now)
            if not state.left[number]:
                del state.left[number]
                state.end_s[number] = later + sum(
                    Fraction(latencies_s[link]) for link, _, _ in works[number].path
                )
        now = later
    busy_s = [
        sum(
            float(Fraction(amount) / Fraction(per_s))
            for work in works
            for at, amount, per_s in work.path
            if at == link
        )
        for link in range(len(latencies_s))
    ]
    return [float(state.end_s[number]) for number in range(len(works))], busy_s
