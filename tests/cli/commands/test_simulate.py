"""``espnx simulate``: answers for programs and for people, and wrong usage."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from espnx.cli.main import main
from espnx.simulate import predictions, validation
from espnx.simulate.decoding import validation as decoding
from espnx.simulate.retrieval import validation as retrieval
from tests.cli.documents import strict_json

COSMOS = ("simulate", "--system", "cosmos")
NEAR = ("simulate", "--system", "smartssd-16")
DRIVE = ("simulate", "--system", "ragx-1", "--workload", "gtr")


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*COSMOS, *words, "--json", "-"]) == 0
    return strict_json(capsys.readouterr().out)


@pytest.mark.parametrize("workload", ["sift", "spacev", "stress"])
def test_an_answer(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--workload", workload, "--threads", "8")
    assert list(found["elements"]) == ["asynchronous", "synchronous", "conventional"]
    for each in found["elements"].values():
        assert each["threads"] == 8
        per_query = found["clusters_per_query"]
        assert (each["queries_per_s"] is None) == (workload == "stress") == (per_query is None)
        if per_query:
            assert each["queries_per_s"] == each["commands_per_s"] / per_query
    assert found["kind"] == "modelled"


def test_the_same_bytes_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*COSMOS, "--workload", "sift", "--threads", "4", "--json"]
    assert main([*words, str(tmp_path / "a.json")]) == 0
    text = capsys.readouterr().out
    assert main([*words, str(tmp_path / "b.json")]) == 0
    assert capsys.readouterr().out == text
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert "modelled" in text
    fast = json.loads((tmp_path / "a.json").read_text())["elements"]["asynchronous"]
    assert f"{fast['commands_per_s']:,.0f}" in text


def test_channels(capsys: pytest.CaptureFixture[str]) -> None:
    eight, four = (
        answer(capsys, "--workload", "stress", "--channels", str(n))["elements"]["synchronous"]
        for n in (8, 4)
    )
    assert four["commands_per_s"] < eight["commands_per_s"]


def test_machines_that_decode(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*NEAR, "--workload", "opt-66b", "--context", "32768", "--vs", "flexgen-4ssd"]
    assert main([*words, "--json", "-"]) == 0
    found = strict_json(capsys.readouterr().out)
    near, base = found["answers"]
    assert [near["system"], base["system"]] == ["smartssd-16", "flexgen-4ssd"]
    assert found["ratios"] == [near["tokens_per_s"] / base["tokens_per_s"]]
    assert near["bound"] == "flash"
    assert found["figures"]["hilos.entry_time"]["source"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert f"tokens/s: {found['ratios'][0]:.2f}" in text
    assert f"{near['watts']:,.0f}" in text


def test_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*NEAR, "--workload", "opt-30b", "--batch", "1,8", "--output", "16,64"]
    assert main([*words, "--techniques", "writeback", "--json", "-"]) == 0
    found = strict_json(capsys.readouterr().out)
    asked = [(each["batch"], each["output"]) for each in found["answers"]]
    assert asked == [(1, 16), (1, 64), (8, 16), (8, 64)]
    assert all(each["techniques"] == ["writeback"] for each in found["answers"])
    assert all(each["x_share"] == 0 for each in found["answers"])
    assert main([*words, "--techniques", "none"]) == 0
    assert capsys.readouterr().out.count("smartssd-16") == 4


def test_a_user_s_own_system(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from espnx.simulate.specs import load

    folder = Path(load.__file__).parent / "presets"
    own = (folder / "system" / "smartssd-4.yaml").read_text()
    own = own.replace("name: smartssd-4", "name: two").replace("{value: 4,", "{value: 2,")
    (tmp_path / "two.yaml").write_text(own)
    model = (folder / "workload" / "opt-30b.yaml").read_text().replace("opt-30b", "mine")
    (tmp_path / "mine.yaml").write_text(model)
    words = ["--system", str(tmp_path / "two.yaml"), "--workload", str(tmp_path / "mine.yaml")]
    assert main(["simulate", *words, "--vs", "smartssd-4", "--json", "-"]) == 0
    two, four = strict_json(capsys.readouterr().out)["answers"]
    assert (two["system"], two["workload"]) == ("two", "mine")
    assert two["tokens_per_s"] < 0.6 * four["tokens_per_s"]


def test_a_user_s_own_clusters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of them of 16 KiB, and more pass the conventional drive's link than of SIFT's mix."""
    from espnx.simulate.specs import load

    text = (Path(load.__file__).parent / "presets" / "clusters" / "sift.yaml").read_text()
    text = text.replace("name: sift", "name: mine").replace("value: 2.06", "value: 97.94")
    (tmp_path / "mine.yaml").write_text(text)
    mine = answer(capsys, "--workload", str(tmp_path / "mine.yaml"))["elements"]
    sift = answer(capsys, "--workload", "sift")["elements"]
    assert mine["conventional"]["workload"] == "mine"
    assert mine["conventional"]["commands_per_s"] < 0.9 * sift["conventional"]["commands_per_s"]


def test_the_page_s_own_system(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "simulate.md").read_text()
    [text] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    [command] = re.findall(r"```\nespnx (simulate --system two-drives.*?)\n```", page)
    (tmp_path / "two-drives.yaml").write_text(text)
    words = command.replace("two-drives.yaml", str(tmp_path / "two-drives.yaml")).split()
    assert main(words) == 0
    assert "two-drives" in capsys.readouterr().out


def test_services(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*DRIVE, "--vs", "cpu-nvme", "--passages", "500000,50000000", "--rate", "0.3"]
    assert main([*words, "--json", "-"]) == 0
    found = strict_json(capsys.readouterr().out)
    asked = [(each["system"], each["passages"]) for each in found["answers"]]
    assert asked == [
        (name, size) for size in (500_000, 50_000_000) for name in ("ragx-1", "cpu-nvme")
    ]
    rates = [each["queries_per_s"] for each in found["answers"]]
    assert found["ratios"] == [rates[0] / rates[1], rates[2] / rates[3]]
    walked = found["figures"]["hnsw.walked"]["value"]
    for each in found["answers"]:
        assert each["is_extrapolated"] == (each["passages"] > walked)
    # only the last is slower than what arrives
    assert [each is None for each in found["waits"]] == [False, False, False, True]
    assert found["waits"][0]["median_s"] > sum(found["answers"][0]["phases_s"].values())
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "the queue grows" in text
    assert "by a fitted law" in text


def test_a_recorded_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a search of a graph asked, of other drives; a trace that was cut off is no answer."""
    import numpy as np

    base = np.random.default_rng(0).standard_normal((300, 8)).astype(np.float32)
    np.save(tmp_path / "base.npy", base)
    graph, trace = str(tmp_path / "g"), tmp_path / "run.trace"
    vectors = str(tmp_path / "base.npy")
    assert main(["graph", "build", vectors, graph]) == 0
    words = ["graph", "search", graph, vectors, "--list-size", "20", "--record", str(trace)]
    assert main(words) == 0
    capsys.readouterr()
    words = ["simulate", "--trace", str(trace), "--system", "smartssd-4", "--vs", "flexgen-4ssd"]
    assert main([*words, "--json", "-"]) == 0
    found = strict_json(capsys.readouterr().out)
    assert found["has_all_host_s"]
    assert [each["system"] for each in found["programs"]] == ["smartssd-4", "flexgen-4ssd"]
    for each in found["programs"]:
        assert each["verbs"]["walk"]["read_bytes"] > 0
        assert each["predicted_s"] >= each["verbs"]["walk"]["recorded_s"]
    assert main(words) == 0
    assert "on flexgen-4ssd" in capsys.readouterr().out
    trace.write_text("\n".join(trace.read_text().splitlines()[:-1]) + "\n")
    assert main(words) == 1
    assert "a trace without an end" in capsys.readouterr().err
    trace.write_text('{"espnx_trace":9}\n')
    assert main(words) == 1
    assert "version of a trace" in capsys.readouterr().err
    assert main(["simulate", "--trace", str(trace)]) == 2
    assert main([*words, "--workload", "opt-30b"]) == 2


def test_a_user_s_own_service(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from espnx.simulate.specs import load

    folder = Path(load.__file__).parent / "presets"
    own = (folder / "service" / "ragx-1.yaml").read_text().replace("ragx-1", "mine")
    (tmp_path / "mine.yaml").write_text(own.replace("value: 47.5, low: 25, high: 70", "value: 400"))
    words = ["--system", str(tmp_path / "mine.yaml"), "--workload", "gtr", "--vs", "ragx-1"]
    assert main(["simulate", *words, "--json", "-"]) == 0
    mine, preset = strict_json(capsys.readouterr().out)["answers"]
    assert mine["system"] == "mine"
    assert mine["phases_s"]["reads"] > 4 * preset["phases_s"]["reads"]


def test_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--list", "--json", "-"]) == 0
    found = strict_json(capsys.readouterr().out)["specs"]
    named = {(each["kind"], each["name"]) for each in found}
    assert {
        ("system", "cosmos"),
        ("system", "flexgen-dram"),
        ("clusters", "sift"),
        ("workload", "opt-175b"),
        ("gpu", "h100-80gb"),
        ("device", "smartssd"),
    } < named
    assert main(["simulate", "--list"]) == 0
    assert "HILOS on 16 SmartSSDs" in capsys.readouterr().out


def test_validation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    row = predictions.Prediction("a.ratio", 2.0, 1.5, 2.5, "a part", "a table", {"without": 1.0})
    none = predictions.NotPredicted("b.ratio", "no figure")
    check = {"id": "c", "measured": 3, "predicted": 4.0}
    made = validation.Validation((row, none), {"set_up_s": 1e-4}, {"a": 2.36}, check)
    monkeypatch.setattr(validation, "validate", lambda draws: made)
    near = predictions.Prediction("c.ratio", 3.0, 2.5, 3.5, "drives", "a table", {})
    monkeypatch.setattr(decoding, "validate", lambda draws: (near,))
    far = predictions.Prediction("d.ratio", 4.0, 3.5, 4.5, "reads", "a law", {})
    beside = {"id": "e", "measured": 5, "predicted": 6.0}
    services = retrieval.Validation((far,), {"s": 1e-6}, {"f": 0.5}, (beside,))
    monkeypatch.setattr(retrieval, "validate", lambda draws: services)
    order = {"model": "m", "context": 16384, "tokens_per_s": {"fast": 2.0, "slow": 1.0}}
    monkeypatch.setattr(decoding, "orders", lambda: [order])
    assert main(["simulate", "--validation", "--json", "-"]) == 0
    found = strict_json(capsys.readouterr().out)
    ids = [each["id"] for each in found["validation"]]
    assert ids == ["a.ratio", "b.ratio", "c.ratio", "d.ratio"]
    assert found["checks"] == [beside]
    assert found["fitted"] == {"set_up_s": 1e-4, "s": 1e-6}
    assert main(["simulate", "--validation"]) == 0
    text = capsys.readouterr().out
    assert "a.ratio" in text
    assert "no figure" in text
    assert "measured 3, predicted 4" in text
    assert "measured 5, predicted 6" in text
    assert "fast 2 > slow 1" in text
    assert "12.8 for 11.9" in text
    assert [each["query_heads"] for each in found["kernels"]] == [1, 4, 5]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["simulate"], "no --system"),
        (["simulate", "--system", "cosmos"], "no --workload"),
        (["simulate", "--system", "cosmo", "--workload", "sift"], "or the path of a .yaml file"),
        ([*COSMOS, "--workload", "sieve"], "a clusters spec; got sieve"),
        ([*NEAR, "--workload", "opt-66"], "did you mean opt-66b?"),
        ([*NEAR, "--workload", "opt-66b", "--vs", "tape"], "a system spec; got tape"),
        ([*NEAR, "--workload", "opt-66b", "--batch", "1,two"], "--batch; got 1,two"),
        ([*NEAR, "--workload", "opt-66b", "--batch", "1,1"], "each number once"),
        ([*NEAR, "--workload", "opt-66b", "--context", "0"], "a context; got 0"),
        ([*NEAR, "--workload", "opt-66b", "--techniques", "write"], "--techniques; got write"),
        ([*NEAR, "--workload", "opt-66b", "--batch", "999"], "too much"),
        ([*COSMOS, "--workload", "sift", "--threads", "0"], "threads; got 0"),
        ([*COSMOS, "--workload", "sift", "--channels", "0"], "channels of flash; got 0"),
        ([*COSMOS, "--workload", "sift", "--seed", "-1"], "a seed; got -1"),
        (["simulate", "--validation", "--draws", "2"], "draws; got 2"),
        (["simulate", "--system", "ragx-1", "--workload", "gtrr"], "did you mean gtr?"),
        ([*DRIVE, "--vs", "tape"], "a service spec; got tape"),
        ([*DRIVE, "--passages", "0"], "passages; got 0"),
        ([*DRIVE, "--passages", "1e6"], "--passages; got 1e6"),
        ([*DRIVE, "--batch", "0"], "a batch; got 0"),
        ([*DRIVE, "--batch", "4096"], "too much"),
        ([*DRIVE, "--vs", "cpu-nvme", "--passages", "500000000"], "too much"),
        ([*DRIVE, "--rate", "0"], "--rate; got 0"),
        ([*DRIVE, "--rate", "1", "--batch", "8"], "batches of 8"),
        ([*DRIVE, "--generation", "llama2-34"], "did you mean llama2-34b?"),
    ],
)
def test_wrong_usage(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert said in " ".join(capsys.readouterr().err.split())
