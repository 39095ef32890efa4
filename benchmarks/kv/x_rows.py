"""Attention over X rows in memory: absorption beside recomputation, in time and in operations."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import torch

from espnx.device.row_layout import RowLayout
from espnx.kv.x_rows import Projection, Recomputer, absorb, release
from espnx.ops.attention import Queries, RowsInMemory, attend_rows

from ..harness.processes import Worker
from ..harness.registry import Say
from ..harness.result import Row
from ..harness.runner import compare
from .attend import ROUNDINGS, AttendSystem
from .options import Options
from .systems.models import DTYPES, KVShape

_TOKENS, _QUICK_TOKENS = 3840, 96


class XWork:
    """A worker's X rows of one layer, and two ways to attend over them with one query for each
    sequence."""

    def __init__(
        self,
        hidden: int,
        heads: int,
        d: int,
        batch: int,
        tokens: int,
        dtype: str,
        threads: int,
        seed: int,
    ):
        torch.set_num_threads(threads)
        self._threads, kind = threads, DTYPES[dtype]
        generator = torch.Generator().manual_seed(seed)

        def draw(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator)

        self.x = draw(batch, 1, tokens, hidden).to(kind)
        weights = [draw(heads * d, hidden).mul(hidden**-0.5).to(kind) for _ in range(2)]
        self.projection = Projection(weights[0], weights[1], None, None, heads, None)
        self.q, self.scale, self.heads, self.d = (
            draw(batch, heads, 1, d).to(kind),
            d**-0.5,
            heads,
            d,
        )
        self.bytes_asked = self.x.numel() * kind.itemsize

    def absorbed(self) -> torch.Tensor:
        queries = Queries(absorb(self.q, self.projection, self.scale), self.projection.hidden)
        o, lse = attend_rows(
            queries, RowsInMemory(self.x, self.x, 0, self.x.shape[2], 0), threads=self._threads
        )
        return release(o, lse, self.projection, self.heads)

    def recomputed(self) -> torch.Tensor:
        queries = Queries(self.q.float().mul(self.scale).contiguous(), self.d)
        layout = RowLayout("fp16", self.projection.hidden, self.projection.hidden, is_shared=True)
        made = Recomputer(queries, self.projection, layout, self._threads)
        for sequence, rows in enumerate(self.x):
            made.add(sequence, rows[0], 0)
        return made.over.o

    def check(self, name: str) -> str | None:
        found = getattr(self, name)()[-1].float()
        x = self.x[-1, 0].double()
        k, v = (
            (x @ weight.double().T).unflatten(-1, (self.heads, self.d)).transpose(0, 1)
            for weight in (self.projection.k_weight, self.projection.v_weight)
        )
        weights = (self.q[-1].double() @ k.transpose(-1, -2) * self.scale).softmax(-1)
        expected = weights @ v
        # Scores of deviation 1 are off by their roundoff, and with them the weights of all rows;
        # weighted by the rows' largest values.
        allowed = ROUNDINGS * torch.finfo(self.x.dtype).eps * float((weights @ v.abs()).max())
        worst = float((found - expected).abs().max())
        return None if worst <= allowed else f"off by {worst:.3g}, allowed are {allowed:.3g}"

    def run(self, name: str) -> float:
        begin = time.perf_counter()
        getattr(self, name)()
        return time.perf_counter() - begin


def operations(hidden: int, heads: int, d: int, tokens: int) -> Mapping[str, int]:
    """Multiplications and additions over stored rows, one query: what either way needs."""
    return {
        "absorbed": tokens * 4 * heads * hidden,
        "recomputed": tokens * (4 * heads * d * hidden + 4 * heads * d),
    }


def show_x(options: Options, say: Say) -> list[Row]:
    """X rows of one layer of the model, from memory."""
    hidden = options.task(options.plan()).hf_config().hidden_size
    shape = KVShape.of(options.task(options.plan()).hf_config())
    words: dict[str, Any] = {
        "hidden": hidden,
        "heads": shape.heads,
        "d": shape.d,
        "batch": options.batch,
        "tokens": _QUICK_TOKENS if options.quick else _TOKENS,
        "dtype": options.dtype,
        "threads": int(options.cache.get("threads", torch.get_num_threads())),
    }
    say(f"x: {options.name}, {options.batch} x {words['tokens']} rows of {hidden}")
    with Worker("kv", "x") as worker:
        worker.ask("attend_open", kind="x", **words, seed=options.seed)
        absorbed, recomputed = (AttendSystem(name, worker) for name in ("absorbed", "recomputed"))
        params = {
            "show": "x",
            "shape": f"{options.name}, {options.batch} x {words['tokens']} rows",
            **words,
        }
        rows = compare(
            "kv", params, [absorbed], [recomputed], pairs=options.pairs, seed=options.seed, say=say
        )
    needed = operations(hidden, shape.heads, shape.d, options.batch * words["tokens"])
    return [_with_operations(row, needed[row.system]) for row in rows]


def _with_operations(row: Row, flop: int) -> Row:
    rate = {"flop_per_s": flop / row.median_s} if row.median_s else {}
    return dataclasses.replace(row, metrics={**row.metrics, "flop": flop, **rate})
