"""So many threads, each of which asks for the next thing when it has its answer: what a system
brings then, what bounds it, and where a command's time goes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import InvalidInputError
from .cosmos import Cosmos
from .queues import Outcome, walk
from .system import System
from .workloads import Workload

SEED = 1
#: Commands of the window, and of each thread before it.
WINDOW, BEFORE = 24_000, 40
THREADS_MAX = 4096


@dataclass(frozen=True)
class Stage:
    """A group of parts, over the window.

    Attributes:
        name: of the group.
        busy: share of its places that were taken, in service or kept; the mean of its parts.
        idle: share of the time at which a part had no place taken; the mean of its parts.
        service_s, waiting_s: of a command there.
        bound_per_s: commands a second that it allows: its places over the services for which a
            command keeps one, without any waiting; None: those take no time.
    """

    name: str
    busy: float
    idle: float
    service_s: float
    waiting_s: float
    bound_per_s: float | None


@dataclass(frozen=True)
class Answer:
    """Attributes:
    system, workload: by name.
    threads: that asked.
    commands_per_s: in the window.
    queries_per_s: None where the workload has no queries.
    bound: name of the stage with the least bound; "threads" where that of the loop is less.
    command_s: from a command's beginning to its end, the mean.
    stages: in the order in which a command passes them.
    loop_bound_per_s: threads over the sum of services, without any waiting.
    window_s, n_commands: that were accounted.
    residual: the second half's rate over the first's, less 1.
    """

    system: str
    workload: str
    threads: int
    commands_per_s: float
    queries_per_s: float | None
    bound: str
    command_s: float
    stages: tuple[Stage, ...]
    loop_bound_per_s: float
    window_s: float
    n_commands: int
    residual: float

    def stage(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)


def ask(
    board: Cosmos, workload: Workload, threads: int, *, window: int = WINDOW, seed: int = SEED
) -> Answer:
    """Simulates a window of so many commands, after each thread has had some.

    Raises:
        InvalidInputError: no such number of threads, a seed below 0, a cluster that is larger than
            a page.
    """
    if not 1 <= threads <= THREADS_MAX:
        raise InvalidInputError("threads", got=threads, expected=f"1 to {THREADS_MAX}")
    if seed < 0:
        raise InvalidInputError("a seed", got=seed, expected="0 or more")
    rng = np.random.default_rng(seed)
    each = -(-window // threads)
    n_before, n_until = threads * BEFORE, threads * (BEFORE + each)
    # A thread that is ahead of the others must not run out of commands: those behind still have as
    # many before the window ends.
    each += BEFORE + each // 4 + BEFORE
    dies = workload.dies(threads, each, board.dies, rng).ravel()
    clusters = workload.clusters(threads * each, rng)
    system = board.system()
    kinds, route = np.unique(clusters * board.dies + dies, return_inverse=True)
    routes = [
        system.route("distances", board.sizes(cluster), board.members(die))
        for cluster, die in (divmod(int(kind), board.dies) for kind in kinds)
    ]
    client = np.repeat(np.arange(threads), each)
    parts = system.parts()
    done = walk(parts, routes, route, client, n_before=n_before, n_until=n_until)
    return _answer(system, workload, threads, done)


def _answer(system: System, workload: Workload, threads: int, done: Outcome) -> Answer:
    window_s = done.end_s - done.begin_s
    inside = (done.ended_s > done.begin_s) & (done.ended_s <= done.end_s)
    n = int(np.count_nonzero(inside))
    rate = n / window_s
    names, legs = np.array(system.names()), system.legs("distances")
    own = [[done.accounts[i] for i in np.flatnonzero(names == leg.group)] for leg in legs]
    service_s = [sum(account.served_s for account in each) / n for each in own]
    until = {leg.group: number + 1 for number, leg in enumerate(legs)}
    stages = []
    for number, (leg, each) in enumerate(zip(legs, own, strict=True)):
        places = system.group(leg.group).places * len(each)
        kept_s = sum(service_s[number : until[leg.until or leg.group]])
        stages.append(
            Stage(
                leg.group,
                sum(account.held_s for account in each) / window_s / places,
                sum(account.idle_s for account in each) / window_s / len(each),
                service_s[number],
                sum(account.waited_s for account in each) / n,
                places / kept_s if kept_s else None,
            )
        )
    half_s = done.begin_s + window_s / 2
    first = int(np.count_nonzero(inside & (done.ended_s <= half_s)))
    per_query, loop_per_s = workload.clusters_per_query, threads / sum(service_s)
    bounds = {each.bound_per_s: each.name for each in stages if each.bound_per_s is not None}
    least_per_s = min(bounds)
    return Answer(
        system.name,
        workload.name,
        threads,
        rate,
        None if per_query is None else rate / per_query,
        bounds[least_per_s] if least_per_s <= loop_per_s else "threads",
        float(np.mean(done.ended_s[inside] - done.begun_s[inside])),
        tuple(stages),
        loop_per_s,
        window_s,
        n,
        (n - first) / first - 1 if first else 0.0,
    )
