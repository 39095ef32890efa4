"""``espnx clusters``: built, searched, shown, verified and planned from a shell."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from espnx.cli.main import main
from tests.cli.documents import strict_json


def test_build_search_info_verify_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = np.random.default_rng(0).standard_normal((400, 8)).astype(np.float32)
    far = np.square(base[:12, None].astype(np.float64) - base[None]).sum(-1)
    values = {"base": base, "queries": base[:12], "true": np.argsort(far, axis=1)[:, :5]}
    for name, each in values.items():
        np.save(tmp_path / f"{name}.npy", each)
    where, queries = str(tmp_path / "c"), str(tmp_path / "queries.npy")
    truth, told = str(tmp_path / "true.npy"), tmp_path / "told"

    def run(*words: str) -> int:
        return main(["clusters", *words, "--json", str(told)])

    assert (
        run(
            *("build", str(tmp_path / "base.npy"), where, "--n-lists", "30", "--queries", queries),
            *("--list-bytes", "1024", "--vector-dtype", "float32", "--page-bytes", "16384"),
        )
        == 0
    )
    assert strict_json(told.read_text())["n"] == 400
    search = ("search", where, queries, "-k", "5", "--n-lists", "1000", "--ground-truth", truth)
    assert run(*search) == 0
    found = strict_json(told.read_text())
    assert found["recall"] == 1.0
    assert [each[0]["id"] for each in found["results"]] == list(range(12))
    assert run(*search, "--max-dist-ratio", "1.2", "--device", "cosmos-async-pe") == 0
    fewer = strict_json(told.read_text())
    assert fewer["lists_mean"] < found["lists_mean"]
    capsys.readouterr()
    assert main(["clusters", "search", where, queries, "-k", "5"]) == 0
    assert "pages of 16 KiB" in capsys.readouterr().out
    assert run("info", where) == 0
    assert strict_json(told.read_text())["packing"] == "co-access"
    assert run("verify", where) == 0
    assert strict_json(told.read_text())["lists"] >= 30
    assert run("plan", "--vectors", "1000000", "--dim", "128", "--heads", "graph") == 0
    assert strict_json(told.read_text())["disk"]["total_bytes"] > 10**9
    assert run("build", queries, where) == 2
    assert run("build", str(tmp_path / "none.npy"), where) == 2
    assert run("info", str(tmp_path)) == 1
