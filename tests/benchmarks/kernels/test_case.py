"""``espnx bench kernels`` at toy size on the CPU: everything right is measured, everything wrong is
noticed, peers that are not there are rows that say so."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from espnx.benchmarks.harness.result import Row, load, rows_of
from espnx.benchmarks.kernels import attention, documents, projections, ranges, scoring
from espnx.benchmarks.kernels import case as kernels_case
from espnx.benchmarks.kernels.catalogue import points
from espnx.benchmarks.kernels.point import (
    KernelSystem,
    Point,
    Rates,
    Setting,
    Systems,
    fastest,
    measure,
)
from espnx.benchmarks.kernels.prepare import own_choices, prepare
from espnx.benchmarks.kernels.timing import Clock
from espnx.cli.main import main
from espnx.ops import device_code
from espnx.ops.attention.cuda import is_turned, tile_blocks

SETTING = Setting(Clock(torch.device("cpu"), 2), 1 << 16, seed=3)
RATES = Rates(1e9, dict.fromkeys(("fp16", "bf16", "fp32"), 1e9))
NO_PEERS = frozenset[str]()


def say(text: str) -> None:
    pass


def ours(point: Point) -> KernelSystem:
    return point.make(SETTING, NO_PEERS).ours[0]


def found(point: Point, peers: frozenset[str] = NO_PEERS) -> dict[str, Row]:
    return {row.system: row for row in measure(point, SETTING, peers, {}, RATES, 1, say)}


ODD = [
    attention._point("attention", attention.Shape("fp16", 24, 2, 3)),
    attention._point("attention", attention.Shape("bf16", 64, 1, 1)),
    attention._point("attention", attention.Shape("int8", 40, 2, 4)),
    attention._point("attention", attention.Shape("fp32", 32, 1, 2)),
    attention._point("attention", attention.Shape("int8", 32, 1, 2, block_rows=64)),
    attention._point("x", attention.Shape("fp16", 72, 1, 5, is_both=True)),
    *(
        scoring._point(documents.Shape(fmt, 24, True))
        for fmt in ("fp16", "bf16", "fp32", "int8", "bit1", "residual1", "residual2", "residual4")
    ),
    *ranges.points(),
]


@pytest.mark.parametrize("point", ODD, ids=lambda point: point.name)
def test_right_is_right_and_wrong_is_noticed(point: Point) -> None:
    """The fp64 of each point shares no code with the op; results that are off by a little more
    than rounding, in another order, or no numbers are wrong."""
    system = ours(point)
    right = system.whole(0)
    assert system.check(0, right) is None
    assert system.check(1, right) is not None  # of other data
    if right.is_floating_point():
        wrong = [right * 1.05, right.flip(0) if right.dim() == 1 else right.flip(-1)]
        wrong += [torch.where(right == right.max(), torch.nan, right)]
    else:
        wrong = [right + 1, right.flip(0)]
    for result in wrong:
        assert system.check(0, result) is not None


def small(layer: projections.Layer) -> projections.Layer:
    return dataclasses.replace(layer, hidden=64, heads=2, d=16)


@pytest.mark.parametrize("make", [projections.recomputed, projections.absorbed])
def test_projections_are_judged_rightly(make: Any) -> None:
    for layer in (projections._RECOMPUTED[1], projections._ABSORBED[0]):
        systems = make(small(layer), SETTING)
        right = systems.ours[0].whole(0)
        check = systems.ours[0].check
        assert check(0, right) is None
        assert systems.ours[0].check(0, systems.ours[0].work(0)) is None
        assert [peer.check(0, peer.whole(0)) for peer in systems.peers] == [None]
        if isinstance(right, tuple):
            assert check(0, (right[0], right[1] * 1.01)) is not None
            assert check(0, right[::-1]) is not None
        else:
            assert check(0, right * 2.0) is not None
            assert check(0, right * torch.nan) is not None


def test_a_point_has_bounds_and_ratios() -> None:
    rows = found(ODD[0])
    row = rows["espnx"]
    assert row.correct
    assert row.n == 1
    assert set(row.ratio) == {"torch-sdpa"}
    assert rows["torch-sdpa"].params["variant"] == "torch-sdpa-packed"
    assert rows["flashinfer"].params["why"] == "not installed"
    metrics, flops = row.metrics, 4.0 * 2 * 3 * 24 * row.bytes_asked / (2 * 2 * 2 * 24)
    assert metrics["flops"] == flops
    assert metrics["roofline_s"] == pytest.approx(max(row.bytes_asked, flops) / 1e9)
    assert row.median_s
    assert metrics["share_of_roofline"] == pytest.approx(metrics["roofline_s"] / row.median_s)


def test_a_wrong_peer_is_said_and_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.nn.functional as F

    plain = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *args, **options: 1.01 * plain(*args, **options)
    )
    rows = found(ODD[3])
    assert rows["espnx"].correct
    assert rows["espnx"].ratio == {}
    assert not rows["torch-sdpa"].correct


def test_a_peer_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.nn.functional as F

    def refuse(*args: Any, **options: Any) -> None:
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(F, "scaled_dot_product_attention", refuse)
    rows = found(ODD[0])
    assert rows["espnx"].correct
    assert rows["torch-sdpa"].params["why"] == "RuntimeError: no kernel"
    assert rows["torch-sdpa"].n == 0


def played(number: int, result: float, seconds: float, clock: Clock) -> KernelSystem:
    """A variant that takes so long and returns this, where 1 is right."""

    def check(i: int, found: torch.Tensor) -> str | None:
        return None if found == 1 else "wrong"

    def call(i: int) -> torch.Tensor:
        time.sleep(seconds)
        return torch.tensor(result)

    return KernelSystem(f"peer-{number}", "peer", call, check, clock, 1, 1)


def test_of_right_variants_the_fastest_stands_for_a_peer() -> None:
    kinds = [(2.0, 0.0), (1.0, 0.02), (1.0, 0.005)]
    variants = [played(i, *kind, SETTING.clock) for i, kind in enumerate(kinds)]
    missing: dict[str, str] = {}
    assert [each.name for each in fastest(variants, missing, "peer")] == ["peer-2"]
    assert [each.name for each in fastest(variants[:1], missing, "peer")] == ["peer-0"]
    assert not missing


def test_everything_that_is_timed_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's part, and launches into results that were spoilt."""
    system = played(0, 1.0, 0.0, SETTING.clock)
    assert system.verify() is None
    system.work = lambda i: torch.tensor(1.0 + i)
    assert system.verify() == "input set 1 of work: wrong"
    launched: list[torch.Tensor] = []

    def call(i: int) -> torch.Tensor:
        made = torch.zeros(())
        device_code.launch("x", "y", 1, 1, (made,), made.device, 0)
        return made

    for again, problem in ((1.0, None), (3.0, "input set 0 of launches: wrong")):
        launched.clear()

        def launch(*args: Any, again: float = again) -> None:
            launched.append(args[4][0])
            args[4][0].fill_(again if len(launched) > 2 * SETTING.clock.sets else 1.0)

        monkeypatch.setattr(device_code, "launch", launch)
        system = dataclasses.replace(
            played(0, 1.0, 0.0, SETTING.clock), whole=call, work=None, is_ours=True
        )
        assert system.verify() == problem


def test_decoding_is_measured_in_blocks_of_caches() -> None:
    """Of which a tile of the kernel for few queries has several."""
    short = [point for point in points() if "block_rows" in point.params]
    assert [(point.params["format"], point.params["d"]) for point in short] == [
        (fmt, d) for fmt in ("fp16", "bf16") for d in (64, 128)
    ]
    for point in short:
        rows = point.params["block_rows"]
        assert f"8 x 4, blocks of {rows}" in point.name
        d = point.params["d"]
        assert is_turned(4, d, d, point.params["format"], rows)
        assert tile_blocks(d, d, rows, 2) == 4


@pytest.mark.parametrize(("fmt", "group", "is_both"), [("fp32", 3, False), ("fp16", 5, True)])
def test_plain_products_are_among_torchs_ways(fmt: str, group: int, is_both: bool) -> None:
    shape = attention.Shape(fmt, 64, 1, group, is_both=is_both)
    inputs = attention.Inputs(shape, SETTING)
    k, v = (each[None] for each in inputs.stored(0, shape.peer_dtype))
    rows = [(k, k if is_both else v)]
    query = inputs.query.to(shape.peer_dtype)
    calls = dict(attention._sdpa_calls(shape, query, rows, True))
    for name in ("math", "math-packed", "products"):
        found = calls[name](0)
        assert inputs.check_peer(0, found) is None
        assert inputs.check_peer(0, found * 1.05) is not None


def test_choices_of_torch_compile_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, and none afterwards; where Triton's code lies stays."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "/triton")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with own_choices():
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert not list(folder.iterdir())
        assert os.environ["TRITON_CACHE_DIR"] == "/triton"
    assert not folder.exists()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    assert os.environ["TRITON_CACHE_DIR"] == "/triton"


def test_what_fails_of_ours_is_a_wrong_row() -> None:
    def fail(setting: Setting, peers: frozenset[str]) -> Systems:
        raise ValueError("out of registers")

    rows = found(dataclasses.replace(ODD[0], make=fail))
    assert not rows["espnx"].correct
    assert rows["espnx"].params["why"] == "ValueError: out of registers"


def test_peers_of_maxsim_get_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """By stand-ins for their packages, which compute in float64 what theirs do."""

    def dense(query: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return (tokens.double() @ query.double().T).amax(1).sum(-1)

    def packed(query: torch.Tensor, tokens: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        ends = bounds.tolist()
        documents = (tokens[a:b][None] for a, b in itertools.pairwise(ends))
        return torch.cat([dense(query, each) for each in documents])

    flash = types.ModuleType("flash_maxsim")
    flash.flash_maxsim = dense  # type: ignore[attr-defined]
    flash.flash_maxsim_packed = packed  # type: ignore[attr-defined]
    late = types.ModuleType("late_interaction_kernels")
    late.maxsim = lambda query, tokens: dense(query[0], tokens)  # type: ignore[attr-defined]
    late.maxsim_varlen = (  # type: ignore[attr-defined]
        lambda query, tokens, whole, bounds, longest_query, longest: packed(query, tokens, bounds)
    )
    monkeypatch.setitem(sys.modules, "flash_maxsim", flash)
    monkeypatch.setitem(sys.modules, "late_interaction_kernels", late)
    monkeypatch.setattr(scoring, "version", lambda package: "1")
    monkeypatch.setattr(torch, "compile", lambda call, **options: call)
    for is_ragged in (False, True):
        point = scoring._point(documents.Shape("fp16", 128, is_ragged))
        rows = found(point, frozenset(point.compiled_peers))
        names = {scoring.COMPILED, scoring.FLASH, scoring.LATE}
        assert set(rows) == {"espnx", *names}
        assert all(row.correct and row.n == 1 for row in rows.values())
        assert set(rows["espnx"].ratio) == names


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    words = ["bench", "kernels", "--device", "cpu", "--quick", "--pairs", "1", "--only", "4 KiB"]
    assert main([*words, "--json", str(out)]) == 0
    rows = rows_of(load(out))
    assert [(row.system, row.params["part"]) for row in rows] == [
        ("torch", "rates"),
        ("espnx", "crc32c"),
    ]
    assert "CRC32C of 4 KiB" in capsys.readouterr().out


def test_what_there_is_is_kept_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, seen = tmp_path / "out.json", list[int]()
    monkeypatch.setattr(kernels_case, "_KEPT", 1)
    monkeypatch.setattr(
        kernels_case, "_free", lambda setting: seen.append(len(json.loads(out.read_text())["rows"]))
    )
    words = ["bench", "kernels", "--device", "cpu", "--quick", "--pairs", "1", "--only", "CRC32C"]
    assert main([*words, "--json", str(out)]) == 0
    assert seen == [2, 3]


@pytest.mark.parametrize(
    "words",
    [
        ["--show", "nothing"],
        ["--only", "nothing of that name"],
        ["--data", "0"],
        ["--compile-limit", "0"],
    ],
)
def test_wrong_usage(words: list[str]) -> None:
    assert main(["bench", "kernels", "--device", "cpu", *words]) == 2


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "kernels"]) == 3
    assert "needs a GPU" in capsys.readouterr().err


def test_the_catalogue() -> None:
    """Names are words of `--only`, and keys of what is compiled: no two alike."""
    names = [point.name for point in points()]
    assert len(set(names)) == len(names)
    assert {point.part for point in points()} == set(kernels_case.PARTS)


def test_the_page_shows_why_a_ratio_is_missing() -> None:
    params = {"part": "attention", "what": "decode int8"}
    base = found(ODD[0])["espnx"]
    rows = [
        dataclasses.replace(base, params=params, ratio={"torch-sdpa-fp16": 2.0}),
        dataclasses.replace(
            base, params={**params, "why": "not installed"}, system="flashinfer", n=0, ratio={}
        ),
        dataclasses.replace(
            base, params=params, system="flash-maxsim", n=0, correct=False, ratio={}
        ),
        dataclasses.replace(base, params=params, system="torch-sdpa-fp16", ratio={}),
    ]
    headers, cells = kernels_case.ours(rows)
    line = dict(zip(headers, cells[0], strict=True))
    assert len(cells) == 1
    assert line["vs flashinfer [IQR]"] == "not installed"
    assert line["vs flash-maxsim [IQR]"] == "wrong"
    assert line["vs torch-sdpa [IQR]"].startswith("2.00x")
    assert line["vs torch-sdpa [IQR]"].endswith("(fp16 rows)")


def test_compact_formats_are_beside_fp16() -> None:
    """Half the bytes in .8 of the time: .625 of what the bytes allow."""
    params = {"part": "maxsim", "d": 128, "ragged": False}
    fp16 = dataclasses.replace(
        found(ODD[0])["espnx"],
        params={**params, "format": "fp16", "what": "a"},
        metrics={"bytes_per_s": 100.0},
    )
    int8 = dataclasses.replace(
        fp16, params={**params, "format": "int8", "what": "b"}, metrics={"bytes_per_s": 50.0 / 0.8}
    )
    other = dataclasses.replace(int8, params={**int8.params, "d": 384})
    made = kernels_case.with_byte_ratios([fp16, int8, other])
    assert made[1].metrics["share_of_byte_ratio"] == pytest.approx(0.625)
    assert [made[0], made[2]] == [fp16, other]


def test_kernels_are_compiled_beside_each_other() -> None:
    told: list[str] = []
    setting = dataclasses.replace(SETTING, data_bytes=1 << 14)
    name = scoring.points()[0].name
    peers = (scoring.COMPILED, scoring.FLASH)  # the first is not compiled here
    failed = prepare({name: peers}, setting, 120.0, told.append)
    assert failed == {(name, scoring.FLASH): "not installed"}
    assert told[0].startswith("compiled beside each other: 1 of 2 in ")
