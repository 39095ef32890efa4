"""``espnx search`` from the outside: rankings, costs, JSON, and what it says when it cannot."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import espnx
from espnx.cli.main import main
from espnx.retrieval.search.result import Hit, SearchResult

pytest.importorskip("faiss", reason="FAISS is not installed (extra [retrieval])")

from tests.cli.documents import strict_json
from tests.cli.test_index import run
from tests.retrieval.common import build, toy_encoder

TEXTS = [
    ("a", "red green blue"),
    ("b", "one two three"),
    (3, "red and one"),
    ("empty", ""),
    ("other", "nothing of that kind"),
]


@pytest.fixture(autouse=True)
def encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("espnx.encoders.load_encoder", lambda name, **options: toy_encoder())


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("search") / "store"
    build(path, TEXTS, encoder=toy_encoder(), dims=None, nlist=2)
    return path


def test_a_ranking(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(
        capsys,
        "search",
        store,
        "red green",
        "two three",
        "-k",
        2,
        "--encoder",
        "toy",
        "--nprobe",
        2,
    )
    assert code == 0
    first, second = out.split("\n\n")
    assert first.splitlines()[0] == "red green"
    assert first.splitlines()[1].split()[0::2] == ["1.", "a"]
    assert "red green blue" in first
    assert second.splitlines()[1].split()[0::2] == ["1.", "b"]
    assert "5 of 5 candidates re-ranked" in first
    assert not err


def test_json(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every score is a number, that of a document without tokens too."""
    target = tmp_path / "found.json"
    words = ["search", store, "red", "--encoder", "toy", "--nprobe", 2]
    for rerank, flags in (
        (5, []),
        (1, ["--rerank", 1]),
        (0, ["--rerank", 0]),
        (5, ["--prefetch-step", 0]),
        (5, ["--engine", "posix"]),
    ):
        assert run(capsys, *words, *flags, "--json", target)[0] == 0
        document = strict_json(target.read_text())
        [result] = document["results"]
        assert (document["command"], result["query"], result["reranked"]) == (
            "search",
            "red",
            rerank,
        )
        assert len(result["hits"]) == 5
        assert {hit["id"] for hit in result["hits"]} == {"a", "b", 3, "empty", "other"}
        if rerank == 5:
            assert [hit["score"] for hit in result["hits"] if hit["id"] == "empty"] == [0.0]
    assert (
        strict_json(run(capsys, *words, "--json", "-")[1])["results"][0]["hits"] == result["hits"]
    )
    assert "(not re-ranked)" in run(capsys, *words, "--rerank", 1)[1]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "name it with encoder=FOLDER (--encoder FOLDER)"),
        (["--encoder", "toy", "--nprobe", "many"], 2, "--nprobe"),
        (["--encoder", "toy", "--nprobe", "0"], 2, "nprobe"),
        (["--encoder", "toy", "-k", "0"], 2, "k; got 0"),
        (["--encoder", "toy", "--prefetch-step", "2"], 2, "prefetch_step"),
        (["--encoder", "toy", "--rerank", "-1"], 2, "rerank; got -1"),
        (["--encoder", "toy", "--engine", "carrier-pigeon"], 2, "carrier-pigeon"),
        (["--encoder", "toy", "--compute", "abacus"], 2, "abacus"),
    ],
)
def test_what_it_cannot_do(
    store: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, said: str
) -> None:
    found, out, err = run(capsys, "search", store, "red", *words)
    assert (found, out) == (code, ""), err
    assert said in err
    assert err.startswith("espnx: error: ")


def test_another_encoder(
    store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = espnx.FunctionEncoder(lambda texts: [], "other@1", d_cls=16, dim=8)
    monkeypatch.setattr("espnx.encoders.load_encoder", lambda name, **options: other)
    code, _, err = run(capsys, "search", store, "red", "--encoder", "other")
    assert code == 2
    assert "another encoder; got other@1; expected toy@1" in err


def test_no_store_and_no_gpu(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "search", tmp_path, "red", "--encoder", "toy")[0] == 1
    import torch

    if not torch.cuda.is_available():
        code, _, err = run(capsys, "search", store, "red", "--encoder", "toy", "--compute", "cuda")
        assert code == 3
        assert "no CUDA device" in err


def test_rendering() -> None:
    """Long texts are cut to a line; the numbers of hits that were not re-ranked are marked as what
    they are."""
    hits = [Hit("id", 1.5, "line\nbreak " * 50, 0, True), Hit(7, 0.25, "", 1, False)]
    result = SearchResult(
        hits,
        candidates=2,
        reranked=1,
        hit_rate=0.5,
        bytes_asked=10**6,
        bytes_moved=2 * 10**6,
        requests=3,
    )
    text = result.summary()
    assert str(result) == text
    assert max(map(len, text.splitlines()[:-1])) < 130
    assert "7  (not re-ranked)" in text
    assert (
        "1 of 2 candidates re-ranked, no prefetch | 1.00 MB asked, 2.00 MB moved in 3 requests"
        in text
    )
    assert (
        "re-ranked, prefetch hit rate 50% |"
        in dataclasses.replace(result, prefetch_steps=(0.3,)).summary()
    )
    assert repr(result) == "<SearchResult: 2 hits, best 'id' 1.500, 0.0 ms>"
    assert repr(SearchResult([])) == "<SearchResult: 0 hits, 0.0 ms>"


def test_help_is_quick(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["search", "--help"])
    assert caught.value.code == 0
    assert "--prefetch-step" in capsys.readouterr().out


def test_a_file_of_queries(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "q.jsonl").write_text(
        '{"_id": "q1", "text": "red green"}\n\n{"id": 2, "text": "two three"}\n'
    )
    (tmp_path / "q.tsv").write_text("q1\tred green\n2\ttwo three\n")
    for name in ("q.jsonl", "q.tsv"):
        code, out, _ = run(
            capsys,
            "search",
            store,
            "blue",
            "--queries",
            tmp_path / name,
            "-k",
            1,
            "--encoder",
            "toy",
            "--json",
            "-",
        )
        assert code == 0
        found = [
            (result.get("query_id"), result["query"], result["hits"][0]["id"])
            for result in strict_json(out)["results"]
        ]
        assert found == [(None, "blue", "a"), ("q1", "red green", "a"), ("2", "two three", "b")]
    out = run(
        capsys, "search", store, "--queries", tmp_path / "q.tsv", "-k", 1, "--encoder", "toy"
    )[1]
    assert "q1: red green" in out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no query"),
        ("no tab here\n", "line 1"),
        ("a\tone\na\ttwo\n", "line 2"),
        ('{"id": 1}\n', "keys id"),
        ('{"id": 1, "text": "x"\n', "line 1"),
        ('{"id": true, "text": "x"}\n', "line 1"),
    ],
)
def test_files_that_are_no_queries(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    (tmp_path / "q").write_text(text)
    code, out, err = run(capsys, "search", store, "--queries", tmp_path / "q", "--encoder", "toy")
    assert (code, out) == (2, "")
    assert said in err
    assert str(tmp_path / "q") in err


def test_without_any_query(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "search", store, "--encoder", "toy")
    assert (code, "--queries FILE" in err) == (2, True)
    code, _, err = run(
        capsys, "search", store, "--queries", tmp_path / "missing", "--encoder", "toy"
    )
    assert (code, "missing" in err) == (2, True)


def test_ids_that_nobody_has(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Have no effect, and that is said; a number stands for itself and for a text."""
    words = ["search", store, "red", "--encoder", "toy"]
    code, out, err = run(capsys, *words, "--include", "nope")
    assert (code, len(out.splitlines())) == (0, 2)
    assert err == "espnx: warning: --include: none of the 1 ids in the store; not nope\n"
    _, _, err = run(
        capsys, *words, "--include", "a", "--include", "3", "--include", "7", "--exclude", "b"
    )
    assert err == "espnx: warning: --include: 2 of the 3 ids in the store; not 7\n"


def test_on_an_emulated_device(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it took the device is said once for all queries; a time only where it may be."""
    words = ["search", store, "red green", "two three", "--encoder", "toy", "--device", "smartssd"]
    code, out, err = run(capsys, *words, "--stretch", 0)
    assert code == 0, err
    assert out.count("smartssd, emulated: ") == 1
    assert "espnx bench device --show search --device smartssd" in out
    document = strict_json(run(capsys, *words, "--stretch", 0, "--json", "-")[1])
    device = document["device"]
    assert (device["name"], device["virtual_s"], device["host_share"]) == ("smartssd", None, None)
    # The five records are read together: 82 us for 4 KiB, and what else there is at 3 GB/s.
    assert device["modelled_s"] == pytest.approx(82e-6 + (device["flash_bytes"] - 4096) / 3e9)
    assert device["to_host_bytes"] == device["flash_bytes"] >= 4096
    assert [each["device"] for each in document["results"]] == [device, device]
    assert strict_json(run(capsys, *words[:-2], "--json", "-")[1])["device"] is None
    _, out, _ = run(capsys, *words, "--stretch", 1)  # next to nothing beside this machine's work
    assert "smartssd, emulated: untimed | " in out


def test_a_first_stage_on_an_emulated_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its reads count in the device's time; where the device cannot, that is said, and there is no
    time."""
    build(
        tmp_path / "words", TEXTS, encoder=toy_encoder(), dims=None, first_stages=("bm25", "graph")
    )
    words = ["search", tmp_path / "words", "red green", "--encoder", "toy", "--stretch", 0]

    def use(*options: object) -> dict[str, Any]:
        code, out, err = run(capsys, *words, *options, "--json", "-")
        assert code == 0, err
        found: dict[str, Any] = strict_json(out)["device"]
        return found

    for kind in ("bm25", "graph"):  # so small a graph stays in memory
        found = use("--device", "smartssd", "--first-stage", kind)
        assert found["modelled_s"] > 0
        assert "past the devices" not in found["why"]
    alone = use("--device", "smartssd", "--first-stage", "bm25", "--rerank", 0)
    assert alone["modelled_s"] >= 82e-6  # a read of its own
    assert alone["modelled_s"] < use("--device", "smartssd", "--first-stage", "bm25")["modelled_s"]
