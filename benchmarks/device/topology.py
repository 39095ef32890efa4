"""Decoding on an emulated topology of 1 to 16 devices: attention near storage, writeback, X rows,
beside the same disks without any of it.

The rows really lie in as many directories, are really read and computed on; the time is the
topology's virtual one (docs/device-specs.md). A run in which this machine took more than its share
is repeated with a larger stretch. Results are compared with the framework's own cache over the same
rows; what the devices attend to is the same to the bit for every number of them. What the host
attends to it merges as rows come, device by device.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Cache

from espnx.device.emulation.report import report
from espnx.device.emulation.topology import Topology
from espnx.device.model.spec import DeviceSpec
from espnx.device.registry import open_device
from espnx.integrations.transformers.cache import KVCache
from espnx.integrations.transformers.enable import enable_kv_cache

from ..harness.registry import Say
from ..harness.result import Row
from ..harness.traces import Steps
from ..kv.systems.caches import EspnxDecoder, HFDecoder
from ..kv.systems.models import Task, logit_tolerance, write_weights
from . import emulated
from .emulated import WITHOUT, Stretches, Timed

_SPILL = 16
_WARM_UP = 1  # steps; the reads of the first have not been put in line yet


@dataclass(frozen=True)
class System:
    """What takes part.

    Attributes:
        near_storage: attention runs on the devices. spill_interval: tokens that wait in host
            memory. has_x_rows: some sequences keep X.
        hand_over: of tokens that wait.
    """

    near_storage: bool
    spill_interval: int
    has_x_rows: bool = False
    hand_over: str = "scores"

    @property
    def is_exact(self) -> bool:
        """Whether its results are the same bits on every number of devices: nothing is attended to
        on the host."""
        return self.near_storage and not self.has_x_rows and self.hand_over == "scores"


#: HILOS's ablation (section 6); without writeback every token is written before the next one is
#: computed.
SYSTEMS = {
    WITHOUT: System(near_storage=False, spill_interval=_SPILL),
    "attention": System(near_storage=True, spill_interval=1),
    "attention+writeback": System(near_storage=True, spill_interval=_SPILL),
    "attention+x": System(near_storage=True, spill_interval=1, has_x_rows=True),
    "all": System(near_storage=True, spill_interval=_SPILL, has_x_rows=True),
    "all-lse": System(near_storage=True, spill_interval=_SPILL, has_x_rows=True, hand_over="lse"),
}


@dataclass(frozen=True)
class Work:
    """Attributes: path: of the rows. spec: of the devices. batch, context, steps: sequences, tokens
    before, steps that are timed. record: a folder for traces."""

    path: Path
    spec: DeviceSpec
    batch: int
    context: int
    steps: int
    layers: int
    width: int
    seed: int
    record: Path | None = None

    @property
    def task(self) -> Task:
        """OPT, whose X rows need no rotation, with little beside its attention: what it computes is
        this machine's time."""
        config = {
            "model_type": "opt",
            "hidden_size": self.width,
            "word_embed_proj_dim": self.width,
            "ffn_dim": self.width,
            "vocab_size": 512,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.width // 128,
        }
        return Task(
            "opt",
            config,
            self.batch,
            self.context,
            _WARM_UP + self.steps,
            "fp16",
            self.seed,
            of_x=True,
        )


@dataclass(frozen=True)
class _Run:
    """One timed decoding. Attributes: logits: of every timed step, float32 [steps, batch,
    vocabulary]."""

    timed: Timed
    x_rows: int
    logits: torch.Tensor
    effective_path: str


class _Decoder(EspnxDecoder):
    """Decodes on devices, which are among its options."""

    def make_cache(self) -> Cache:
        enable_kv_cache(self.model)
        return KVCache(self.model.config, format="fp16", fingerprint="sampled", **self.options)


def measure(
    work: Work, counts: Sequence[int], systems: Sequence[str], stretches: Stretches, say: Say
) -> list[Row]:
    """Rows of every system at every number of devices. Raises TimesNotValidError where no stretch
    makes the times the devices'."""
    rows, exact = list[Row](), dict[str, torch.Tensor]()
    with tempfile.TemporaryDirectory(prefix="espnx-bench-devices-", dir=work.path) as folder:
        weights = Path(folder, "model")
        write_weights(work.task, weights)
        wanted = _logits_in_memory(work, weights)
        for count in counts:
            with tempfile.TemporaryDirectory(dir=folder) as place:
                directories = [str(Path(place, str(number))) for number in range(count)]
                baseline: Timed | None = None
                for name in systems:
                    run = stretches.settled(
                        name, count, partial(_run, work, weights, directories, name)
                    )
                    is_right = _is_near(work.task, run.logits, wanted)
                    if SYSTEMS[name].is_exact:
                        is_right &= torch.equal(exact.setdefault(name, run.logits), run.logits)
                    say(
                        f"{count} devices, {name}: {run.timed.median_s * 1e3:.3f} virtual ms a "
                        f"step, {run.timed.bound_s * 1e3:.3f} by {run.timed.bound_by} alone; "
                        f"stretch {run.timed.report.stretch:.3g}, host "
                        f"{run.timed.report.host_share:.0%}"
                    )
                    baseline = run.timed if name == WITHOUT else baseline
                    rows.append(_row(work, count, name, run, baseline, is_correct=is_right))
    return rows


def _logits_in_memory(work: Work, weights: Path) -> torch.Tensor:
    """Logits of each timed step by the framework's cache: float32 [steps, batch, vocabulary]."""
    decoder = HFDecoder(work.task, weights, weights, {})
    decoder.seed()
    return _decode(decoder, work)


def _decode(decoder: HFDecoder, work: Work) -> torch.Tensor:
    found = [logits for _, logits in map(decoder.step, work.task.tokens()) if logits is not None]
    return torch.stack(found[_WARM_UP:]).float()


def _is_near(task: Task, found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Rows, queries and results are fp16 on the devices, as what the model computes is: the
    roundings of `logit_tolerance`."""
    return bool(
        ((found - wanted).abs().amax(-1) <= logit_tolerance(task, None) * wanted.std(-1)).all()
    )


def _run(work: Work, weights: Path, directories: Sequence[str], name: str, stretch: float) -> _Run:
    system, record = SYSTEMS[name], emulated.trace_file(work.record, len(directories), name)
    near: dict[str, Any] = {
        "near_storage": system.near_storage,
        "hand_over": system.hand_over,
        "record": record,
        "steps": (timed_steps := Steps()),
    }
    with emulated.opened(work.spec, directories, stretch=stretch, **near) as (devices, topology):
        x_rows = _x_rows(topology, work.batch) if system.has_x_rows else 0
        kept: dict[str, Any] = {"name": f"x{x_rows}", "x_rows": x_rows}
        if not Path(directories[0], kept["name"]).exists():
            _fill(work, weights, directories, kept)
        decoder = _Decoder(
            work.task,
            weights,
            weights,
            {"device": devices, "spill_interval": system.spill_interval, **kept},
        )
        cache, tokens = decoder.cache, work.task.tokens()
        try:
            logits, times = list[torch.Tensor](), list[float]()
            before, since = topology.traffic(), topology.times()
            for step in range(len(tokens)):
                if step == _WARM_UP:
                    before, since = topology.traffic(), topology.times()
                begun_s = topology.now()
                with timed_steps.step():
                    _, found = decoder.step(tokens[step])
                    if system.spill_interval == 1:
                        for device in cache.store.striped.devices:
                            device.flush()
                if step < _WARM_UP:
                    timed_steps.forget()
                if step >= _WARM_UP and found is not None:
                    times.append(topology.now() - begun_s)
                    logits.append(found.float())
            timed = emulated.timed(report(topology, since), times, before, topology.traffic())
            path = decoder.effective_path
            cache.crop(work.context - cache.get_seq_length())
        finally:
            decoder.close()
    return _Run(timed, x_rows, torch.stack(logits), path)


def _fill(work: Work, weights: Path, directories: Sequence[str], kept: dict[str, Any]) -> None:
    """Keeps the context's rows, at this machine's own speed: only decoding is timed."""
    decoder = _Decoder(
        work.task, weights, weights, {"device": open_device("ssd", directories), **kept}
    )
    try:
        decoder.seed()
    finally:
        decoder.close()


def _x_rows(topology: Topology, batch: int) -> int:
    """HILOS, section 4.2: alpha = 2 B_PCI / (B_SSD + B_PCI) of the batch, where every head has K
    and V of its own."""
    rates, n = topology.links, topology.n_devices
    ssd = n * rates["device 0 flash read"]
    pci = min(rates.get("uplink out", float("inf")), n * rates["device 0 link out"])
    return round(batch * min(1.0, 2 * pci / (ssd + pci)))


def _row(
    work: Work, count: int, name: str, run: _Run, baseline: Timed | None, *, is_correct: bool
) -> Row:
    params = {
        "spec": work.spec.name,
        "devices": count,
        "batch": work.batch,
        "context": work.context,
        "layers": work.layers,
        "heads": work.width // 128,
    }
    metrics = {"x_rows": float(run.x_rows), "tokens_per_s": work.batch / run.timed.median_s}
    return emulated.row(
        "topology",
        params,
        name,
        run.timed,
        baseline,
        path=run.effective_path,
        is_correct=is_correct,
        metrics=metrics,
    )


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headers and cells. MB are of a step, of all devices together."""
    return emulated.headers("step", "tokens/s", "X rows"), [
        emulated.cells(row, f"{row.metrics['tokens_per_s']:.0f}", f"{row.metrics['x_rows']:.0f}")
        for row in rows
    ]
