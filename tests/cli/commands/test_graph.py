"""``espnx graph``: built, searched, shown and verified from a shell."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from espnx.cli.main import main
from espnx.device.trace.reader import read_trace
from tests.cli.documents import strict_json


def test_build_search_info_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = np.random.default_rng(0).standard_normal((400, 8)).astype(np.float32)
    true = np.argsort(np.square(base[:12, None].astype(np.float64) - base[None]).sum(-1), axis=1)[
        :, :5
    ]
    for name, values in (("base", base), ("queries", base[:12]), ("true", true)):
        np.save(tmp_path / f"{name}.npy", values)
    graph, queries = str(tmp_path / "g"), str(tmp_path / "queries.npy")
    assert (
        main(
            [
                "graph",
                "build",
                str(tmp_path / "base.npy"),
                graph,
                "--vector-dtype",
                "float32",
                "--json",
                str(tmp_path / "b"),
            ]
        )
        == 0
    )
    assert strict_json((tmp_path / "b").read_text())["n"] == 400
    truth = str(tmp_path / "true.npy")
    assert (
        main(
            [
                "graph",
                "search",
                graph,
                queries,
                "-k",
                "5",
                "--recall",
                "0.999",
                "--ground-truth",
                truth,
                "--json",
                "-",
            ]
        )
        == 0
    )
    found = strict_json(capsys.readouterr().out.split("measuring recall\n")[-1])
    assert found["recall"] > 0.95
    assert [each[0]["id"] for each in found["results"]] == list(range(12))
    assert main(["graph", "search", graph, queries, "-k", "5", "--list-size", "9"]) == 0
    assert "the first 10 are shown" in capsys.readouterr().out
    assert main(["graph", "info", graph, "--json", str(tmp_path / "i")]) == 0
    assert strict_json((tmp_path / "i").read_text())["metric"] == "l2"
    assert main(["graph", "verify", graph, "--json", str(tmp_path / "v")]) == 0
    assert strict_json((tmp_path / "v").read_text())["pages"] > 0
    assert main(["graph", "search", graph, queries, "-k", "5", "--ground-truth", queries]) == 2
    assert main(["graph", "build", queries, graph]) == 2
    assert main(["graph", "info", str(tmp_path)]) == 1


def test_add_delete_merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = np.random.default_rng(0).standard_normal((300, 8)).astype(np.float32)
    np.save(tmp_path / "base.npy", base)
    np.save(tmp_path / "more.npy", base[:4])
    np.save(tmp_path / "ids.npy", [900, 901, 902, 7])
    graph, more, ids = str(tmp_path / "g"), str(tmp_path / "more.npy"), str(tmp_path / "ids.npy")
    told = str(tmp_path / "told")

    def run(*words: str) -> dict[str, object]:
        assert main(["graph", *words, "--json", told]) == 0
        found: dict[str, object] = strict_json(Path(told).read_text())
        return found

    run("build", str(tmp_path / "base.npy"), graph)
    assert run("add", graph, more)["last_id"] == 303
    assert run("delete", graph, "7", "301", "--durability", "none")["vectors"] == 302
    assert run("add", graph, more, "--ids", ids)["unmerged_added"] == 7
    info = run("info", graph)
    assert (info["vectors"], info["unmerged_added"], info["unmerged_deleted"]) == (306, 7, 1)
    capsys.readouterr()
    assert main(["graph", "info", graph]) == 0
    assert "not merged: 7 vectors added, 1 deleted" in capsys.readouterr().out
    assert main(["graph", "add", graph, more, "--ids", ids]) == 2
    assert main(["graph", "delete", graph, "301"]) == 2
    assert main(["graph", "delete", graph, "one", "2"]) == 2
    assert main(["graph", "add", graph, more, "--ids", more + ".none"]) == 2
    assert run("delete", graph, ids)["vectors"] == 302
    assert run("merge", graph)["merged"] is True
    assert run("merge", graph)["merged"] is False
    assert run("verify", graph)["torn_bytes"] == 0
    assert main(["graph", "export", graph, str(tmp_path / "e")]) == 2
    assert run("add", graph, more)["torn_bytes"] == 0
    [log] = (tmp_path / "g").glob("changes*")
    log.write_bytes(log.read_bytes() + b"torn")  # of the next change the first bytes
    assert run("verify", graph)["torn_bytes"] == 4
    capsys.readouterr()
    assert main(["graph", "verify", graph]) == 0
    assert "the log ends in 4 bytes of a change that was not written" in capsys.readouterr().out
    assert run("merge", graph)["torn_bytes"] == 4
    assert run("verify", graph)["torn_bytes"] == 0


def test_a_recorded_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same is found, and a replay walks again."""
    base = np.random.default_rng(0).standard_normal((300, 8)).astype(np.float32)
    np.save(tmp_path / "base.npy", base)
    np.save(tmp_path / "queries.npy", base[:4])
    graph, trace = str(tmp_path / "g"), str(tmp_path / "run.trace")
    assert main(["graph", "build", str(tmp_path / "base.npy"), graph]) == 0
    words = ["graph", "search", graph, str(tmp_path / "queries.npy"), "--list-size", "20"]
    capsys.readouterr()
    assert main([*words, "--json", "-"]) == 0
    plain = strict_json(capsys.readouterr().out)["results"]
    assert main([*words, "--record", trace, "--json", "-"]) == 0
    assert strict_json(capsys.readouterr().out)["results"] == plain
    opened, walk = read_trace(trace).commands
    assert (opened.verb, walk.verb) == ("open_walks", "walk")
    assert walk.size_bytes > 0
    replay = ["device", "replay", trace, "--path", str(tmp_path)]
    assert main([*replay, "--graph", graph]) == 0
    assert "walk" in capsys.readouterr().out
    assert main(replay) == 2
    assert main([*words[:-2], "--record", trace]) == 2
    assert "no --list-size" in capsys.readouterr().err


def test_build_in_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(
        tmp_path / "base.npy", np.random.default_rng(0).standard_normal((300, 8)).astype(np.float32)
    )
    given = [
        "graph",
        "build",
        str(tmp_path / "base.npy"),
        str(tmp_path / "g"),
        "--codes",
        "memory",
        "--inline-pq",
        "3",
    ]
    assert main([*given, "--memory", "256MiB"]) == 2
    assert "at least" in capsys.readouterr().err
    assert main([*given, "--memory", "16GiB"]) == 0
    assert "divide: 300 of 300" in capsys.readouterr().err
    assert main(["graph", "info", str(tmp_path / "g"), "--json", str(tmp_path / "i")]) == 0
    assert strict_json((tmp_path / "i").read_text())["inline_pq"] == 3
    assert main(["graph", "verify", str(tmp_path / "g")]) == 0


def test_export_and_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = np.random.default_rng(0).standard_normal((100, 8)).astype(np.float32)
    np.save(tmp_path / "base.npy", base)
    graph, prefix, again = str(tmp_path / "g"), str(tmp_path / "ann"), str(tmp_path / "h")
    assert (
        main(
            [
                "graph",
                "build",
                str(tmp_path / "base.npy"),
                graph,
                "--vector-dtype",
                "float32",
                "--max-degree",
                "8",
            ]
        )
        == 0
    )
    assert main(["graph", "export", graph, prefix, "--json", str(tmp_path / "e")]) == 0
    assert strict_json((tmp_path / "e").read_text())["dtype"] == "float32"
    assert (
        main(
            [
                "graph",
                "import",
                prefix,
                again,
                "--codes",
                "memory",
                "--order",
                "given",
                "--json",
                str(tmp_path / "i"),
            ]
        )
        == 0
    )
    document = strict_json((tmp_path / "i").read_text())
    assert (document["n"], document["dim"], document["repaired"]) == (100, 8, 0)
    assert main(["graph", "verify", again]) == 0
    assert main(["graph", "export", graph, prefix]) == 2
    assert main(["graph", "import", str(tmp_path / "nothing"), str(tmp_path / "i2")]) == 1
    assert "nothing_disk.index" in capsys.readouterr().err
