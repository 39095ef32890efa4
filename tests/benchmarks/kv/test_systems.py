"""The systems of the KV benchmark, each from the same rows and on the same tokens; and that a wrong
one is found."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from espnx.benchmarks.kv.attend import AttendWork
from espnx.benchmarks.kv.fleet import Spec
from espnx.benchmarks.kv.measure import judge
from espnx.benchmarks.kv.session import Session
from espnx.benchmarks.kv.systems.caches import KINDS, EspnxDecoder, HostDecoder
from espnx.benchmarks.kv.systems.models import (
    KVShape,
    Rows,
    Task,
    load_model,
    logit_tolerance,
    write_weights,
)
from espnx.device.trace.reader import read_trace
from tests.benchmarks.kv.test_case import CONFIG

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 300,
}
STEPS = 4


def task_of(config: Mapping[str, Any], **changes: Any) -> Task:
    return Task(
        **{
            "name": "tiny",
            "config": config,
            "batch": 3,
            "context": 301,
            "steps": STEPS,
            "dtype": "fp16",
            "seed": 1,
        }
        | changes
    )


def decode(task: Task, kind: str, folder: Path, name: str = "", **options: Any) -> list[list[int]]:
    """Runs a system as its process would; its logits lie in ``logits/NAME`` then."""
    place, logits = folder / f"rows-{name or kind}", folder / "logits" / (name or kind)
    place.mkdir()
    logits.mkdir(parents=True)
    if not (folder / "weights").exists():
        write_weights(task, folder / "weights")
    if KINDS[kind] in (EspnxDecoder, HostDecoder):
        options.setdefault("x_rows", 0)
    words = {
        "kind": kind,
        "task": task.words(),
        "weights": str(folder / "weights"),
        "storage": str(place),
        "options": options,
    }
    session = Session()
    try:
        session.handle({"do": "open", **words})
        session.handle({"do": "seed"})
        ids = session.handle({"do": "warm_up", "count": 1, "keep": [0], "folder": str(logits)})[
            "ids"
        ]
        answer = session.handle(
            {"do": "steps", "count": STEPS - 1, "keep": list(range(STEPS)), "folder": str(logits)}
        )
    finally:
        session.close()
    assert answer["seconds"] > 0
    found: list[list[int]] = ids + answer["ids"]
    return found


def fleet_of(task: Task, folder: Path, ids: Mapping[str, list[list[int]]]) -> Any:
    return SimpleNamespace(task=task, keep=list(range(STEPS)), ids=ids, logits=folder / "logits")


@pytest.mark.parametrize("config", [CONFIG, LLAMA], ids=["opt", "llama"])
def test_all_systems_agree(tmp_path: Path, config: Mapping[str, Any]) -> None:
    task = task_of(config)
    ids = {kind: decode(task, kind, tmp_path) for kind in KINDS}
    fleet = fleet_of(task, tmp_path, ids)
    for kind in KINDS:
        verdict = judge(fleet, Spec(kind, kind), "dynamic")
        assert verdict.problem is None
        assert verdict.error is not None
        assert verdict.error <= logit_tolerance(task, None)
        assert len(ids[kind]) == STEPS


def test_a_recorded_system_does_the_same(tmp_path: Path) -> None:
    """Its trace holds what it put and read."""
    task, file = task_of(CONFIG), tmp_path / "espnx-recorded.trace"
    assert decode(task, "espnx", tmp_path, "espnx-recorded", record=str(file)) == decode(
        task, "espnx", tmp_path
    )
    trace = read_trace(file)
    assert trace.program == "espnx bench kv"
    verbs = Counter(each.verb for each in trace.commands)
    assert verbs["attend"] == STEPS * 2
    assert verbs["put"] > 0


def test_rows_of_less_precision_have_a_tolerance_of_their_own(tmp_path: Path) -> None:
    task = task_of(CONFIG, context=1100)  # of 16 wide rows 1024 make a block
    ids = {
        "dynamic": decode(task, "dynamic", tmp_path),
        "espnx-int8": decode(task, "espnx", tmp_path, "espnx-int8", format="int8"),
    }
    fleet = fleet_of(task, tmp_path, ids)
    verdict = judge(fleet, Spec("espnx-int8", "espnx", lossy="int8"), "dynamic")
    print(verdict)
    assert verdict.problem is None
    assert judge(fleet, Spec("espnx-int8", "espnx"), "dynamic").problem is not None


@pytest.mark.parametrize("config", [CONFIG, LLAMA], ids=["opt", "llama"])
def test_rows_of_x_are_those_that_the_others_start_from(
    tmp_path: Path, config: Mapping[str, Any]
) -> None:
    task = task_of(config, of_x=True)
    ids = {
        name: decode(task, kind, tmp_path, name, **more)
        for name, kind, more in (("dynamic", "dynamic", {}), ("espnx", "espnx", {"x_rows": 2}))
    }
    assert judge(fleet_of(task, tmp_path, ids), Spec("espnx", "espnx"), "dynamic").problem is None


@pytest.mark.parametrize("wrong", ["one row", "last tokens", "tokens"])
def test_a_wrong_system_is_found(
    tmp_path: Path, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of(CONFIG)
    ids = {"dynamic": decode(task, "dynamic", tmp_path)}
    right = Rows.kv

    def damaged(self: Rows, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (part.clone() for part in right(self, layer))
        if wrong == "one row" and layer == 1:
            v[0] = v[0].roll(1, dims=1)  # as if the blocks of a sequence were one token off
        if wrong == "last tokens":
            v[:, :, -32:] = 0
        return k, v

    monkeypatch.setattr(Rows, "kv", damaged)
    ids["memmap"] = decode(task, "memmap", tmp_path)
    if wrong == "tokens":
        monkeypatch.setattr("espnx.benchmarks.kv.measure.logit_tolerance", lambda *_: 0.1)
        ids["memmap"] = [[(token + 7) % 300 for token in step] for step in ids["memmap"]]
    verdict = judge(fleet_of(task, tmp_path, ids), Spec("memmap", "memmap"), "dynamic")
    assert verdict.problem is not None
    assert verdict.problem.startswith("step 0: a " + ("token" if wrong == "tokens" else ""))


def test_rows_and_weights_follow_from_the_seed(tmp_path: Path) -> None:
    task = task_of(LLAMA)
    for name in ("a", "b"):
        write_weights(task, tmp_path / name)
    first, second = (load_model(tmp_path / name, "fp16") for name in ("a", "b"))
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )
    one, other = Rows(task, first), Rows(task_of(LLAMA, seed=2), first)
    k, v = one.kv(1)
    assert k.shape == v.shape == (3, 2, 301, 16)
    assert torch.equal(k, Rows(task, second).kv(1)[0])
    assert not torch.equal(k, one.kv(0)[0])
    assert not torch.equal(k, other.kv(1)[0])
    assert task.kv_bytes(301) == KVShape.of(first.config).layers * (k.nbytes + v.nbytes)


def test_projected_rows_are_the_models_own(tmp_path: Path) -> None:
    """What the model's attention hands to its cache for the same input."""
    task = task_of(LLAMA, of_x=True, context=7)
    write_weights(task, tmp_path / "w")
    model = load_model(tmp_path / "w", "fp16")
    rows = Rows(task, model)
    from transformers import DynamicCache

    cache = DynamicCache()
    with torch.inference_mode():
        rows.modules[1](
            hidden_states=rows.x(1),
            position_embeddings=rows.rotations,
            attention_mask=None,
            past_key_values=cache,
        )
    k, v = rows.kv(1)
    assert torch.equal(cache.layers[1].keys, k)
    assert torch.equal(cache.layers[1].values, v)


@pytest.mark.parametrize(("heads", "groups", "d"), [(2, 1, 64), (1, 8, 128)])
def test_attention_from_memory_is_checked(
    heads: int, groups: int, d: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[Any] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, places: pinned.append(places))
    monkeypatch.setattr(torch, "set_num_threads", pinned.append)
    work = AttendWork(heads, groups, d, 1 << 20, "fp16", 1)
    assert len(pinned[0]) == pinned[1] == 1
    assert work.bytes_asked == 1 << 20
    for name in ("espnx", "positions", "sdpa", "stream"):
        assert work.check(name) is None
        assert work.run(name) > 0
    several = work.positions()
    several[:, :, -1] *= 1.1  # of the last position
    monkeypatch.setattr(work, "positions", lambda: several)
    monkeypatch.setattr(work, "espnx", lambda: work.sdpa() * 1.1)
    for name in ("espnx", "positions"):
        assert str(work.check(name)).startswith("off by")
