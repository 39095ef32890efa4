"""Attention from memory with one thread: how fast rows are consumed when no device is in the
way."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from espnx.ops.attention import Queries, RowsInMemory, attend_rows
from espnx.sizes import parse_size

from ..harness.processes import Worker
from ..harness.registry import Say
from ..harness.result import Row
from ..harness.runner import Sample, compare
from .options import Options
from .systems.models import DTYPES

#: Name -> (KV heads, query heads of each, d).
SHAPES: Mapping[str, tuple[int, int, int]] = {
    "MHA d=64": (32, 1, 64),
    "MHA d=128": (16, 1, 128),
    "GQA 8 d=128": (2, 8, 128),
    "GQA 3 d=64": (16, 3, 64),
    "GQA 4 d=128": (8, 4, 128),
}
#: Of a pass that verifies eight tokens that were proposed.
POSITIONS = 9
_LEAST_BYTES, _QUICK_BYTES, _CACHES = 256 << 20, 4 << 20, 4
# fp16 and bf16 outputs and weights are rounded once each; eight times that holds for sums of them.
ROUNDINGS = 8
_CACHE_SIZE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


class AttendWork:
    """A worker's rows in memory, and ways to go over all of them. The process keeps to one
    processor from then on."""

    def __init__(self, heads: int, groups: int, d: int, size_bytes: int, dtype: str, seed: int):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        torch.set_num_threads(1)
        kind = DTYPES[dtype]
        n = size_bytes // (2 * heads * d * kind.itemsize)
        generator = torch.Generator().manual_seed(seed)
        self.k, self.v = (
            torch.randn((1, heads, n, d), generator=generator).to(kind) for _ in range(2)
        )
        # queries of several positions, those of the first one in front
        self.queries = torch.randn((1, heads, POSITIONS * groups, d), generator=generator).to(kind)
        self.q = self.queries[:, :, :groups].contiguous()
        self.scale = d**-0.5
        self.bytes_asked = 2 * self.k.numel() * kind.itemsize

    def espnx(self) -> torch.Tensor:
        return self._attended(self.q)

    def positions(self) -> torch.Tensor:
        """The queries of all positions in one pass."""
        return self._attended(self.queries)

    def _attended(self, q: torch.Tensor) -> torch.Tensor:
        queries = Queries(q.float().mul(self.scale).contiguous(), self.v.shape[-1])
        o, _ = attend_rows(queries, RowsInMemory(self.k, self.v, 0, self.k.shape[2], 0), threads=1)
        return o

    def sdpa(self) -> torch.Tensor:
        q = self.q.flatten(1, 2).unsqueeze(2)
        o = F.scaled_dot_product_attention(
            q, self.k, self.v, scale=self.scale, enable_gqa=q.shape[1] != self.k.shape[1]
        )
        return o.reshape(self.q.shape)

    def stream(self) -> torch.Tensor:
        """Reads every byte once and does next to nothing with it."""
        for rows in (self.k, self.v):
            rows.view(torch.int64).numpy().max()
        return torch.empty(0)

    def check(self, name: str) -> str | None:
        if name == "stream":
            return None
        worst, largest = 0.0, 0.0
        found = getattr(self, name)()
        asked = self.queries if name == "positions" else self.q
        for head in range(self.k.shape[1]):
            scores = asked[0, head].float() @ self.k[0, head].float().T * self.scale
            expected = scores.softmax(-1) @ self.v[0, head].float()
            worst = max(worst, float((found[0, head].float() - expected).abs().max()))
            largest = max(largest, float(expected.abs().max()))
        allowed = ROUNDINGS * torch.finfo(self.k.dtype).eps * largest
        return None if worst <= allowed else f"off by {worst:.3g}, allowed are {allowed:.3g}"

    def run(self, name: str) -> float:
        begin = time.perf_counter()
        getattr(self, name)()
        return time.perf_counter() - begin


class AttendSystem:
    """A way to go over the rows, for the runner."""

    requested_path = effective_path = "memory"

    def __init__(self, name: str, worker: Worker):
        self.name = self.group = name
        self.worker = worker

    def verify(self) -> str | None:
        problem: str | None = self.worker.ask("attend_check", name=self.name)["problem"]
        return problem

    def prepare(self, turn: int) -> str:
        return "warm"

    def run(self) -> Sample:
        answer = self.worker.ask("attend_run", name=self.name)
        seconds, size = answer["seconds"], int(answer["bytes_asked"])
        return Sample(seconds, size, 0, {"bytes_per_s": size / seconds})

    def close(self) -> None:
        pass


def rows_bytes(*, quick: bool) -> int:
    """Several times what the caches hold."""
    if quick:
        return _QUICK_BYTES
    try:
        cache_bytes = parse_size(_CACHE_SIZE.read_text().strip() + "iB")
    except (OSError, ValueError):
        cache_bytes = 0
    return max(_LEAST_BYTES, _CACHES * cache_bytes)


def show_attend(options: Options, say: Say) -> list[Row]:
    """K and V in memory, larger than the caches, one thread on one processor: the queries of one
    position, and those of several beside them."""
    size_bytes = rows_bytes(quick=options.quick)
    found: list[Row] = []
    for shape, (heads, groups, d) in SHAPES.items():
        say(f"attend: {shape}, {size_bytes >> 20} MiB")
        with Worker("kv", "attend") as worker:
            words: dict[str, Any] = {
                "heads": heads,
                "groups": groups,
                "d": d,
                "size_bytes": size_bytes,
                "dtype": options.dtype,
            }
            worker.ask("attend_open", kind="rows", **words, seed=options.seed)
            ours, stream, sdpa, several = (
                AttendSystem(name, worker) for name in ("espnx", "stream", "sdpa", "positions")
            )
            params = {"show": "attend", "shape": shape, **words, "threads": 1}
            more = {**params, "shape": f"{shape}, {POSITIONS} positions", "positions": POSITIONS}
            for each, system, baselines in (
                (params, ours, [stream, sdpa]),
                (more, several, [ours]),
            ):
                found += compare(
                    "kv", each, [system], baselines, pairs=options.pairs, seed=options.seed, say=say
                )
    return found
