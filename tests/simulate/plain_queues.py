"""The same walk in plain Python with heapq, as the sentences of csrc/simulate/queues.hpp say it:
what test_queues.py compares with."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from espnx.simulate.queues import Account, Part, Step


@dataclass
class Server:
    part: Part
    free: int
    serving: int = 0
    waiting: deque[int] = field(default_factory=deque)
    last_s: float = 0.0
    sums: dict[str, Any] = field(
        default_factory=lambda: dict.fromkeys(NAMES, 0.0) | {"n_served": 0}
    )

    def touch(self, now_s: float) -> None:
        passed_s, taken = now_s - self.last_s, self.part.places - self.free
        self.sums["served_s"] += passed_s * self.serving
        self.sums["held_s"] += passed_s * taken
        self.sums["waited_s"] += passed_s * len(self.waiting)
        self.sums["idle_s"] += passed_s if taken == 0 else 0.0
        self.last_s = now_s


NAMES = ("served_s", "held_s", "idle_s", "waited_s")


def plain_walk(
    parts: Sequence[Part],
    routes: Sequence[Sequence[Step]],
    route: Sequence[int],
    client: Sequence[int],
    at_s: Sequence[float],
    n_before: int,
    n_until: int,
    after: Sequence[Sequence[int]] | None = None,
) -> tuple[list[float], float, float, list[Account]]:
    """(the end of each command or -1, the window, accounts)."""
    servers = [Server(part, part.places) for part in parts]
    lines: dict[int, deque[int]] = {}
    waits_for: list[list[int]] = [list(others) for others in after or [()] * len(client)]
    for command, of in enumerate(client):
        line = lines.setdefault(of, deque())
        if line:
            waits_for[command].append(line[-1])
        line.append(command)
    events: list[tuple[float, int, int]] = []
    at_step, ended_s, number, n_ended, begin_s = [-1] * len(route), [-1.0] * len(route), 0, 0, 0.0

    def push(at: float, command: int) -> None:
        nonlocal number
        heapq.heappush(events, (at, number, command))
        number += 1

    def serve(command: int, now_s: float) -> None:
        step = routes[route[command]][at_step[command]]
        server = servers[step.part]
        server.serving += 1
        server.sums["n_served"] += 1
        rate = server.part.bytes_per_s
        push(now_s + (server.part.latency_s + (step.size_bytes / rate if rate else 0.0)), command)

    def leave(server: Server, now_s: float) -> None:
        server.touch(now_s)
        if server.waiting:
            serve(server.waiting.popleft(), now_s)
        else:
            server.free += 1

    def is_due(command: int) -> bool:
        return all(ended_s[other] >= 0 for other in waits_for[command])

    for command in filter(is_due, range(len(client))):
        push(at_s[command], command)
    while True:
        now_s, _, command = heapq.heappop(events)
        steps, at = routes[route[command]], at_step[command]
        if at >= 0:
            server = servers[steps[at].part]
            server.touch(now_s)
            server.serving -= 1
            for number_, step in enumerate(steps[: at + 1]):
                if (number_ if step.until is None else step.until) == at:
                    leave(servers[step.part], now_s)
        if at + 1 == len(steps):
            ended_s[command] = now_s
            for other in range(command + 1, len(client)):
                if command in waits_for[other] and is_due(other):
                    push(max(now_s, at_s[other]), other)
            n_ended += 1
            if n_ended == n_before:
                begin_s = now_s
                for server in servers:
                    server.sums = dict.fromkeys(NAMES, 0.0) | {"n_served": 0}
                    server.last_s = now_s
            if n_ended == n_until:
                for server in servers:
                    server.touch(now_s)
                return ended_s, begin_s, now_s, [Account(**each.sums) for each in servers]
            continue
        at_step[command] = at + 1
        server = servers[steps[at + 1].part]
        server.touch(now_s)
        if server.free:
            server.free -= 1
            serve(command, now_s)
        else:
            server.waiting.append(command)
