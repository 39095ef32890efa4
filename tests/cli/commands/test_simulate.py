"""``espnx simulate``: answers for programs and for people, and wrong usage."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from espnx.cli.main import main
from espnx.cli.simulations import plots
from espnx.simulate import predictions, validation
from espnx.simulate.decoding import validation as decoding
from espnx.simulate.graphs import validation as graphs
from espnx.simulate.retrieval import validation as retrieval
from tests.cli.documents import strict_json

COSMOS = ("simulate", "--system", "cosmos")
NEAR = ("simulate", "--system", "smartssd-16")
OPT = ("--workload", "opt-66b")
DRIVE = ("simulate", "--system", "ragx-1", "--workload", "gtr")
SERVER = ("simulate", "--system", "dell-r760xa", "--workload", "falcon-4.8b")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "simulate.md"
needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None,
    reason="matplotlib is not installed (extra [bench])",
)


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


def test_threads(capsys: pytest.CaptureFixture[str]) -> None:
    """A sweep has each number of threads, the least first; the table is of the most."""
    words = [*COSMOS, "--workload", "stress", "--threads", "4,1"]
    assert main([*words, "--json", "-"]) == 0
    found = strict_json(capsys.readouterr().out)
    assert [each["threads"] for each in found["sweep"]] == [1, 4]
    assert found["sweep"][1]["elements"] == found["elements"]
    one, four = (each["elements"]["synchronous"]["commands_per_s"] for each in found["sweep"])
    assert four == pytest.approx(4 * one, rel=0.01)
    assert main(words) == 0
    text = capsys.readouterr().out
    for element in ("asynchronous", "synchronous", "conventional"):
        assert f"{element}, threads" in text
    assert f"{one:,.0f}" in text


def test_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A preset beside a file of one's own, with drives that take longer."""
    from espnx.simulate.specs import load

    own = Path(load.__file__).parent / "presets" / "server" / "dell-r760xa.yaml"
    text = own.read_text().replace("name: dell-r760xa", "name: slow")
    text = text.replace("value: 85, low: 60, high: 110", "value: 850")
    (tmp_path / "slow.yaml").write_text(text)
    words = [*SERVER, "--list-size", "10,20", "--streams", "1"]
    words += ["--vs", str(tmp_path / "slow.yaml")]
    assert main([*words, "--json", "-"]) == 0
    found = strict_json(capsys.readouterr().out)
    asked = [(each["system"], each["list_size"]) for each in found["answers"]]
    assert asked == [(name, size) for size in (10, 20) for name in ("dell-r760xa", "slow")]
    rates = [each["queries_per_s"] for each in found["answers"]]
    assert found["ratios"] == [rates[0] / rates[1], rates[2] / rates[3]]
    assert found["ratios"][0] > 2
    assert found["figures"]["slow.read"]["value"] == pytest.approx(850e-6)
    assert main(words) == 0
    text = capsys.readouterr().out
    assert f"dell-r760xa over slow, queries/s: {found['ratios'][0]:.2f}" in text
    assert "which recall a list leads to is not modelled" in text


def test_several_systems(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*NEAR, "--workload", "opt-30b", "--context", "16384,32768"]
    words += ["--vs", "smartssd-8,flexgen-4ssd"]
    assert main([*words, "--json", "-"]) == 0
    found = strict_json(capsys.readouterr().out)
    rates = [each["tokens_per_s"] for each in found["answers"]]
    assert [each["system"] for each in found["answers"][:3]] == [
        "smartssd-16",
        "smartssd-8",
        "flexgen-4ssd",
    ]
    assert found["ratios"] == [rates[at] / rates[at + other] for at in (0, 3) for other in (1, 2)]
    assert main(words) == 0
    line = f"over flexgen-4ssd, tokens/s: {found['ratios'][1]:.2f}, {found['ratios'][3]:.2f}"
    assert line in capsys.readouterr().out


def cases() -> list[list[str]]:
    """The words of each case that the page shows."""
    [block] = re.findall(
        r"<!-- cases -->\n\n```\n(.*?)```\n\n<!-- /cases -->", PAGE.read_text(), re.DOTALL
    )
    return [line.split()[1:] for line in block.splitlines()]


@pytest.mark.parametrize("words", cases(), ids=lambda words: words[-1])
def test_the_page_s_cases(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The table always, the picture with matplotlib; it is drawn from the document alone."""
    monkeypatch.chdir(tmp_path)
    at = words.index("--plot")
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    if not has_matplotlib:
        words = words[:at] + words[at + 2 :]
    assert main([*words, "--json", "found.json"]) == 0
    text = capsys.readouterr().out
    document = strict_json(Path("found.json").read_text())
    assert document["kind"] == "modelled"
    assert words[2] in text
    if has_matplotlib:
        picture = Path(words[at + 1]).read_text()
        assert picture == plots.drawn(document)
        names = document.get("elements") or {each["system"] for each in document["answers"]}
        for name in names if len(names) > 1 else ():  # of one alone there is no need to
            assert f">{name}</text>" in picture


@needs_matplotlib
def test_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bars of one number, a line over several; a sweep of two things is no picture."""
    file = tmp_path / "a.svg"
    words = [*NEAR, "--workload", "opt-30b", "--vs", "flexgen-4ssd", "--plot", str(file)]
    assert main([*words, "--json", "-"]) == 0
    bars = strict_json(capsys.readouterr().out)
    for each in bars["answers"]:
        assert f"{each['tokens_per_s']:.3g}</text>" in file.read_text()
        assert f"{each['system']}</text>" in file.read_text()
    assert main([*words, "--batch", "1,2"]) == 0
    assert "batch</text>" in file.read_text()
    assert main([*words, "--batch", "1,2", "--output", "16,64"]) == 2
    assert "sweeps of batch and output" in capsys.readouterr().err
    assert main([*words[:-1], str(tmp_path / "a.jpg")]) == 2
    assert "ends in .svg" in capsys.readouterr().err
    assert main([*words[:-1], str(tmp_path / "no" / "a.svg")]) == 1
    assert "cannot write a plot" in capsys.readouterr().err
    assert main(["simulate", "--list", "--plot", str(file)]) == 2


def test_pictures_need_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Said before anything is computed, and no file is left."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = [*NEAR, "--workload", "opt-30b", "--plot", str(tmp_path / "a.svg")]
    assert main(words) != 0
    assert "espnx[bench]" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


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
    page = PAGE.read_text()
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
    assert "its memory is taken to hold" not in text
    assert main(["simulate", "--system", "gpu-dram", "--workload", "gtr"]) == 0
    assert "gpu-dram: its memory is taken to hold 14.31 GiB" in capsys.readouterr().out
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
    shown = graphs.show(10, (10,), ())
    monkeypatch.setattr(graphs, "show", lambda draws: shown)
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
    assert "published, not scored: P95 57 ms, 200 queries/s" in text
    assert found["aisaq"]["rows"][0]["answer"]["list_size"] == 10
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
        ([*DRIVE, "--vs", "cpu-nvme,cpu-nvme"], "each system once"),
        ([*DRIVE, "--vs", "ragx-1"], "each system once"),
        ([*COSMOS, "--workload", "sift", "--threads", "4,x"], "--threads; got 4,x"),
        ([*COSMOS, "--workload", "sift", "--vs", "smartssd-4"], "--vs; got smartssd-4"),
        ([*SERVER, "--list-size", "0"], "a list; got 0"),
        ([*SERVER, "--list-size", "10,10"], "each number once"),
        ([*SERVER, "--streams", "0"], "streams of queries; got 0"),
        ([*SERVER, "--vs", "tape"], "a server spec; got tape"),
        ([*SERVER[:-1], "falcon"], "a collection spec; got falcon"),
        ([*NEAR, "--workload", "opt-66b", "--rate", "5"], "--rate; got 5.0; expected none"),
        ([*NEAR, "--workload", "opt-66b", "--threads", "foo"], "--threads; got foo"),
        ([*NEAR, "--workload", "opt-66b", "--draws", "20"], "--draws; got 20"),
        ([*COSMOS, "--workload", "sift", "--batch", "4"], "--batch; got 4"),
        ([*DRIVE, "--context", "9"], "--context; got 9"),
        ([*SERVER, "--batch", "9"], "--batch; got 9"),
        (["simulate", "--list", "--validation"], "--validation; got given; expected none with"),
        (["simulate", "--validation", "--seed", "1"], "--seed; got 1"),
        (["simulate", "--validation", "--draws", "1001"], "draws; got 1001; expected 10 to"),
        (["simulate", "--trace", "x", "--techniques", "none"], "--techniques; got none"),
        (
            ["simulate", "--system", "flexgen-4ssd", *OPT, "--techniques", "none"],
            "--techniques; got none; expected a system",
        ),
    ],
)
def test_wrong_usage(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_one_file_is_one_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("two.yaml").write_text("schema_version: 2\n")
    words = ["simulate", "--system", "two.yaml", "--workload", "opt-30b", "--vs"]
    for same in ("./two.yaml", str(tmp_path / "two.yaml")):
        assert main([*words, same]) == 2
        assert "each system once" in capsys.readouterr().err


def test_why_nothing_wears(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "--workload", "opt-30b", "--context", "16384", "--system"]
    assert main([*words, "flexgen-dram", "--vs", "isp-1"]) == 0
    text = capsys.readouterr().out
    assert "nothing is written to drives, so none wears: flexgen-dram" in text
    assert "endurance of hilos-isp" in text
