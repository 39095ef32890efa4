"""Links in plain Python: queues and servers, one event after the other. What the compiled clock must agree with; shares no code with it,
and does it another way: a server takes the next chunk of its queue when it has done one, and reserves nothing."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

LEAVES, ARRIVES = 0, 1


@dataclass
class Work:
    """A transfer. `path`: (link, amount, per second) of each leg; `after`: numbers of earlier ones."""

    issued_s: float
    path: list[tuple[int, float, float]]
    size_bytes: int
    chunk_bytes: int
    after: tuple[int, ...] = ()

    def chunks(self) -> list[int]:
        whole, rest = divmod(self.size_bytes, self.chunk_bytes)
        return [self.chunk_bytes] * whole + ([rest] if rest or not whole else [])

    def service_s(self, leg: int, chunk: int) -> float:
        _, amount, per_s = self.path[leg]
        return (self.chunks()[chunk] * (amount / self.size_bytes) if self.size_bytes else amount) / per_s


@dataclass
class Server:
    latency_s: float
    queue: deque[tuple[int, int, int]] = field(default_factory=deque)
    is_busy: bool = False
    busy_s: float = 0.0


def ends(latencies_s: list[float], works: list[Work]) -> tuple[list[float], list[float]]:
    """(virtual seconds at which each work ends, busy seconds of each link)."""
    servers = [Server(each) for each in latencies_s]
    left = [len(work.chunks()) for work in works]
    found: list[float | None] = [None] * len(works)
    events: list[tuple[float, int, int, int, int]] = []  # (time, kind, number, chunk, leg)

    def start(link: int, now_s: float) -> None:
        server = servers[link]
        if server.is_busy or not server.queue:
            return
        number, chunk, leg = server.queue.popleft()
        service_s = works[number].service_s(leg, chunk)
        server.is_busy, server.busy_s = True, server.busy_s + service_s
        heapq.heappush(events, (now_s + service_s, LEAVES, number, chunk, leg))

    def issue_what_can() -> None:
        for number, work in enumerate(works):
            if not is_issued[number] and all(found[each] is not None for each in work.after):
                is_issued[number] = True
                heapq.heappush(events, (max([work.issued_s, *(found[each] or 0.0 for each in work.after)]), ARRIVES, number, 0, 0))

    is_issued = [False] * len(works)
    issue_what_can()
    while events:
        now_s, kind, number, chunk, leg = heapq.heappop(events)
        path = works[number].path
        if kind == LEAVES:
            link = path[leg][0]
            servers[link].is_busy = False
            heapq.heappush(events, (now_s + servers[link].latency_s, ARRIVES, number, chunk, leg + 1))
            start(link, now_s)
        elif leg == len(path):
            left[number] -= 1
            if not left[number]:
                found[number] = now_s
                issue_what_can()
        else:
            chunks = range(len(works[number].chunks())) if leg == 0 else [chunk]
            servers[path[leg][0]].queue.extend((number, each, leg) for each in chunks)
            start(path[leg][0], now_s)
    assert None not in found
    return [each or 0.0 for each in found], [server.busy_s for server in servers]
