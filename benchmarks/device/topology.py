"""Decoding on an emulated topology of 1 to 16 devices: attention near storage, writeback, X rows, beside the same disks without any of it.

The rows really lie in as many directories, are really read and computed on; the time is the topology's virtual one (docs/device-specs.md).
A run in which this machine took more than its share is repeated with the stretch that its report asks for.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import transformers

from espnx.device.emulation.device import EmulatedDevice
from espnx.device.emulation.report import Report, report
from espnx.device.emulation.topology import Topology
from espnx.device.registry import open_together
from espnx.integrations.transformers.cache import KVCache
from espnx.integrations.transformers.enable import enable_kv_cache

from ..harness.registry import Say
from ..harness.result import Row

WITHOUT = "without"
_SPILL = 16
_RUNS_MAX = 6
_PREFILL_TOKENS = 256


@dataclass(frozen=True)
class System:
    """What takes part.

    Attributes:
        near_storage: attention runs on the devices. spill_interval: tokens that wait in host memory. has_x_rows: some sequences keep X.
        hand_over: of tokens that wait.
    """

    near_storage: bool
    spill_interval: int
    has_x_rows: bool = False
    hand_over: str = "scores"


#: HILOS's ablation (section 6); without writeback every token is written before the next one is computed.
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
    """Attributes: path: of the rows. spec: of the devices. batch, context, steps: sequences, tokens before, steps that are timed.
    is_checked: a run in which the host took too much is repeated, or refused."""

    path: Path
    spec: str
    batch: int
    context: int
    steps: int
    layers: int
    width: int
    seed: int
    is_checked: bool = True


@dataclass
class _Run:
    """One timed decoding. Attributes: traffic: bytes of a step by kind of link. bound_s: of the busiest link in a step."""

    report: Report
    steps: list[float]
    bound_s: float
    bound_by: str
    x_rows: int
    traffic: dict[str, float]
    logits: torch.Tensor
    effective_path: str

    @property
    def step_s(self) -> float:
        return statistics.median(self.steps)


def measure(work: Work, counts: Sequence[int], systems: Sequence[str], stretch: float, say: Say) -> list[Row]:
    """Rows of every system at every number of devices. Raises TimesNotValidError where no stretch makes the times the devices'."""
    torch.manual_seed(work.seed)
    config = transformers.OPTConfig(
        vocab_size=512, hidden_size=work.width, word_embed_proj_dim=work.width, ffn_dim=work.width, num_hidden_layers=work.layers,
        num_attention_heads=work.width // 128, max_position_embeddings=work.context + work.steps + 8, init_std=0.02, dropout=0.0,
    )  # fmt: skip
    model = transformers.OPTForCausalLM(config).half().eval()  # X rows are kept as the model computes them
    tokens = torch.randint(4, 512, (work.batch, work.context + work.steps))
    wanted = _logits_in_memory(model, tokens, work)
    rows, exact = list[Row](), dict[tuple[str, int], torch.Tensor]()
    for count in counts:
        with tempfile.TemporaryDirectory(prefix="espnx-bench-devices-", dir=work.path) as folder:
            directories = [str(Path(folder, str(number))) for number in range(count)]
            baseline: _Run | None = None
            for name in systems:
                run = _settled(work, model, tokens, directories, name, stretch, say)
                # The same sequences on other numbers of devices: to the bit.
                same = torch.equal(exact.setdefault((name, run.x_rows), run.logits), run.logits)
                say(
                    f"{count} devices, {name}: {run.step_s * 1e3:.3f} virtual ms a step, {run.bound_s * 1e3:.3f} by {run.bound_by} alone; "
                    f"stretch {run.report.stretch:g}, the host's share {run.report.host_share:.0%}"
                )
                baseline = run if name == WITHOUT else baseline
                rows.append(_row(work, count, name, run, baseline, is_correct=same and _is_near(run.logits, wanted)))
    return rows


def _logits_in_memory(model: Any, tokens: torch.Tensor, work: Work) -> torch.Tensor:
    """Of every timed step, with K and V in memory: [steps, batch, vocabulary]."""
    with torch.no_grad():
        found: torch.Tensor = model(tokens, logits_to_keep=work.steps).logits.transpose(0, 1).float()
    return found


def _is_near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Rows, queries and results are fp16 on the devices. Each rounding moves a value by its part in 2^11; a layer has six of them (X or K
    and V, queries, o), and what layers add up grows no faster than the states themselves."""
    return bool((found - wanted).abs().max() <= 6 * 4 * 2.0**-11 * wanted.abs().max())


def _settled(work: Work, model: Any, tokens: torch.Tensor, directories: Sequence[str], name: str, stretch: float, say: Say) -> _Run:
    """A run whose times are the devices'."""
    run = _run(work, model, tokens, directories, SYSTEMS[name], stretch)
    for _ in range(_RUNS_MAX - 1):
        if run.report.is_valid or not work.is_checked:
            return run
        more = run.report.stretch_to_use * 1.2
        took = f"the host took {run.report.host_share:.0%} at a stretch of {run.report.stretch:g}"
        say(f"{len(directories)} devices, {name}: {took}; {more:g} is next")
        run = _run(work, model, tokens, directories, SYSTEMS[name], more)
    run.report.check()
    return run


def _run(work: Work, model: Any, tokens: torch.Tensor, directories: Sequence[str], system: System, stretch: float) -> _Run:
    with _opened(work.spec, directories, stretch=stretch, near_storage=system.near_storage, hand_over=system.hand_over) as devices:
        topology = devices[0].topology
        x_rows = _x_rows(topology, work.batch) if system.has_x_rows else 0
        name = f"x{x_rows}"
        if not Path(directories[0], name).exists():
            _prefill(work, model, tokens, directories, name, x_rows)
        kept_as: dict[str, Any] = {"name": name, "format": "fp16", "x_rows": x_rows, "fingerprint": "sampled"}
        with KVCache(model.config, device=devices, spill_interval=system.spill_interval, **kept_as) as cache, torch.no_grad():
            enable_kv_cache(model)
            logits, steps, end = list[torch.Tensor](), list[float](), work.context - 1
            _cut(cache, end)
            for step in range(-1, work.steps):  # the first is not timed: its reads have not been put in line yet
                if step == 0:
                    before, since = topology.traffic(), topology.times()
                begun_s = topology.now()
                seen = torch.ones(work.batch, end + 1)
                found = model(tokens[:, end : end + 1], past_key_values=cache, attention_mask=seen).logits[:, 0].float()
                if system.spill_interval == 1:
                    for device in cache.store.striped.devices:
                        device.flush()
                if step >= 0:
                    steps.append(topology.now() - begun_s)
                    logits.append(found)
                end += 1
            said, after, path = report(topology, since), topology.traffic(), str(cache.stats()["effective_path"])
            _cut(cache, work.context - 1)
    busy_s = {link: (use.busy_s - before[link].busy_s) / work.steps for link, use in after.items()}
    moved = {link: (use.amount - before[link].amount) / work.steps for link, use in after.items()}
    by = max(busy_s, key=lambda link: busy_s[link])
    return _Run(said, steps, busy_s[by], by, x_rows, _by_kind(moved), torch.stack(logits), path)


def _cut(cache: KVCache, tokens: int) -> None:
    """Back to so many tokens."""
    if cache.get_seq_length() > tokens:
        cache.crop(tokens - cache.get_seq_length())


@contextmanager
def _opened(spec: str, directories: Sequence[str], **options: Any) -> Iterator[list[EmulatedDevice]]:
    devices = cast("list[EmulatedDevice]", open_together(spec, directories, **options))
    try:
        yield devices
    finally:
        for each in devices:
            each.close()


def _prefill(work: Work, model: Any, tokens: torch.Tensor, directories: Sequence[str], name: str, x_rows: int) -> None:
    """Keeps the context, at this machine's own speed: only decoding is timed."""
    cached: dict[str, Any] = {"name": name, "format": "fp16", "x_rows": x_rows, "fingerprint": "sampled"}
    with KVCache(model.config, list(directories), **cached) as cache, torch.no_grad():
        enable_kv_cache(model)
        for begin in range(0, work.context, _PREFILL_TOKENS):
            end = min(begin + _PREFILL_TOKENS, work.context)
            model(tokens[:, begin:end], past_key_values=cache, attention_mask=torch.ones(work.batch, end), logits_to_keep=1)


def _x_rows(topology: Topology, batch: int) -> int:
    """HILOS, section 4.2: alpha = 2 B_PCI / (B_SSD + B_PCI) of the batch, where every head has K and V of its own."""
    rates, n = topology.links, topology.n_devices
    ssd = n * rates["device 0 flash read"]
    pci = min(rates.get("uplink out", float("inf")), n * rates["device 0 link out"])
    return round(batch * min(1.0, 2 * pci / (ssd + pci)))


def _by_kind(moved: dict[str, float]) -> dict[str, float]:
    """By kind of link, all devices together."""
    found = defaultdict[str, float](float)
    for link, amount in moved.items():
        kind = "_".join(word for word in link.split() if not word.isdigit())
        if "accelerator" not in kind:
            found[f"{kind}_bytes"] += amount
    return dict(found)


def _row(work: Work, count: int, name: str, run: _Run, baseline: _Run | None, *, is_correct: bool) -> Row:
    ordered, moved = sorted(run.steps), round(run.traffic.get("device_flash_read_bytes", 0.0))
    row = Row(
        "device", {"show": "topology", "spec": work.spec, "devices": count, "batch": work.batch, "context": work.context}, name, "emulated",
        "auto", run.effective_path, "cold", len(run.steps) if is_correct else 0, run.step_s if is_correct else None,
        ordered[-1] if is_correct else None, ordered[len(ordered) * 3 // 4] - ordered[len(ordered) // 4] if is_correct else None,
        moved, moved, is_correct,
        {
            "bound_s": run.bound_s, "stretch": run.report.stretch, "host_share": run.report.host_share, "x_rows": float(run.x_rows),
            "tokens_per_s": work.batch / run.step_s, **run.traffic,
        },
    )  # fmt: skip
    if baseline is None or not is_correct or name == WITHOUT:
        return row
    return replace(row, ratio={WITHOUT: baseline.step_s / run.step_s})


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headers and cells. MB are of a step, of all devices together."""
    headers = [
        "devices", "system", "virtual ms a step", "of its bound", "faster than without", "tokens/s", "X rows", "flash MB", "uplink in MB",
        "uplink out MB", "stretch", "host", "right",
    ]  # fmt: skip
    return headers, [_cells(row) for row in rows]


def _cells(row: Row) -> list[str]:
    found = row.metrics
    timed = row.median_s is not None
    return [
        str(row.params["devices"]), row.system, f"{1e3 * (row.median_s or 0):.3f}" if timed else "-",
        f"{(row.median_s or 0) / found['bound_s']:.2f}x" if timed and found["bound_s"] else "-",
        f"{row.ratio[WITHOUT]:.2f}x" if WITHOUT in row.ratio else "-", f"{found['tokens_per_s']:.0f}", f"{found['x_rows']:.0f}",
        *(f"{found.get(name, 0.0) / 1e6:.3f}" for name in ("device_flash_read_bytes", "uplink_in_bytes", "uplink_out_bytes")),
        f"{found['stretch']:g}", f"{found['host_share']:.0%}", "yes" if row.correct else "NO",
    ]  # fmt: skip
