"""``espnx postings``: built, searched, changed, shown and verified from a shell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from espnx.cli.main import main
from tests.cli.documents import strict_json

TEXTS = [
    "The log is written by the device.",
    "A disk writes logs, and logs, and logs.",
    "Nothing of the kind.",
]


def write_corpus(path: Path) -> str:
    path.write_text(
        "".join(json.dumps({"id": str(i), "text": text}) + "\n" for i, text in enumerate(TEXTS))
    )
    return str(path)


def test_build_search_change_info_verify(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("Stemmer")
    index, source = str(tmp_path / "x"), write_corpus(tmp_path / "c.jsonl")
    build = [
        "postings",
        "build",
        index,
        "--corpus",
        source,
        "--stemmer",
        "english",
        "--stop-words",
        "english",
    ]
    assert main([*build, "--json", str(tmp_path / "b")]) == 0
    assert strict_json((tmp_path / "b").read_text())["n_records"] == 3
    capsys.readouterr()
    assert main(["postings", "search", index, "who writes to the log?", "--json", "-"]) == 0
    found = strict_json(capsys.readouterr().out)
    assert [(hit["number"], hit["id"]) for hit in found["results"][0]["hits"]] == [
        (1, "1"),
        (0, "0"),
    ]
    assert main(["postings", "search", index, "log", "--variant", "bm25+", "--explain"]) == 0
    assert "log: 3 here" in capsys.readouterr().out
    assert main(["postings", "add", index, "--corpus", source]) == 2
    assert "--replace" in capsys.readouterr().err
    more = tmp_path / "more.jsonl"
    more.write_text('{"id": "1", "text": "A log."}\n{"id": "n", "text": "New."}\n')
    assert main(["postings", "add", index, "--corpus", str(more), "--replace"]) == 0
    assert "2 records (1 of them in the place of older ones)" in capsys.readouterr().out
    assert main(["postings", "delete", index, "2", "nothing"]) == 2
    assert main(["postings", "delete", index, "2", "2", "nothing", "--missing-ok"]) == 0
    assert "1 deleted" in capsys.readouterr().out
    assert main(["postings", "compact", index, "--json", str(tmp_path / "c")]) == 0
    assert strict_json((tmp_path / "c").read_text())["changed"] is True
    assert main(["postings", "compact", index]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert main(["postings", "info", index, "--json", str(tmp_path / "i")]) == 0
    assert strict_json((tmp_path / "i").read_text())["n_records"] == 3
    assert main(["postings", "verify", index, "--json", str(tmp_path / "v")]) == 0
    assert strict_json((tmp_path / "v").read_text())["postings"] > 0
    assert main(build) == 2
    assert main(["postings", "build", str(tmp_path / "y")]) == 2
    assert main(["postings", "search", index]) == 2
    assert main(["postings", "info", str(tmp_path)]) == 1
    assert "`espnx postings build`" in capsys.readouterr().err
    assert main(["postings", "build", source, "--corpus", source]) == 2
    assert "got a file" in capsys.readouterr().err


def test_without_ids_records_have_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index, source = str(tmp_path / "x"), write_corpus(tmp_path / "c.jsonl")
    assert main(["postings", "build", index, "--corpus", source, "--no-ids", "--keep-texts"]) == 0
    assert main(["postings", "add", index, "--corpus", source]) == 0
    assert main(["postings", "delete", index, "1", "x"]) == 2
    assert main(["postings", "delete", index, "1"]) == 0
    capsys.readouterr()
    assert main(["postings", "search", index, "disk", "--json", "-"]) == 0
    (hit,) = strict_json(capsys.readouterr().out)["results"][0]["hits"]
    assert (hit["id"], hit["number"], hit["text"]) == (4, 4, TEXTS[1])


def test_queries_of_vectors_and_stop_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index, queries = str(tmp_path / "x"), tmp_path / "q"
    (tmp_path / "v").write_text('{"vector": {"a": 1.0}}\n{"vector": {"b": 2.0}}\n')
    assert main(["postings", "build", index, "--vectors", str(tmp_path / "v")]) == 0
    queries.write_text('{"id": 7, "vector": {"a": 1}}\n{"id": "7", "vector": {"a": 1}}\n')
    capsys.readouterr()
    assert main(["postings", "search", index, "--queries", str(queries), "--json", "-"]) == 0
    assert len(strict_json(capsys.readouterr().out)["results"]) == 1
    queries.write_text('{"id": 7, "vector": {"a": 1}}\n{"id": 7, "vector": {"b": 1}}\n')
    assert main(["postings", "search", index, "--queries", str(queries)]) == 2
    assert "another query '7'" in capsys.readouterr().err
    source = write_corpus(tmp_path / "c.jsonl")
    for name, words, expected in (
        ("y", "the, logs ,", ["the", "logs"]),
        ("z", " english", "english"),
    ):
        assert (
            main(
                [
                    "postings",
                    "build",
                    str(tmp_path / name),
                    "--corpus",
                    source,
                    "--stop-words",
                    words,
                ]
            )
            == 0
        )
        capsys.readouterr()
        assert main(["postings", "info", str(tmp_path / name), "--json", "-"]) == 0
        assert strict_json(capsys.readouterr().out)["analyzer"]["stop_words"] == expected


def test_a_collection_over_several_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, trace = write_corpus(tmp_path / "c.jsonl"), str(tmp_path / "trace")
    for placement in ("passages", "terms"):
        parts = [str(tmp_path / f"{placement}-{i}") for i in range(2)]
        where = [parts[0], "--also", parts[1]]
        assert (
            main(
                [
                    "postings",
                    "build",
                    *where,
                    "--corpus",
                    source,
                    "--placement",
                    placement,
                    "--json",
                    str(tmp_path / "b"),
                ]
            )
            == 0
        )
        records = [each["n_records"] for each in strict_json((tmp_path / "b").read_text())["parts"]]
        assert records == ([2, 1] if placement == "passages" else [3, 3])
        assert main(["postings", "verify", *where]) == 0
        capsys.readouterr()
        assert (
            main(["postings", "search", parts[0], "logs and the device", *where[1:], "--json", "-"])
            == 0
        )
        found = strict_json(capsys.readouterr().out)
        assert [hit["number"] for hit in found["results"][0]["hits"]] == [1, 0, 2]
        assert found["device"] is None
        assert (
            main(
                [
                    "postings",
                    "search",
                    parts[0],
                    "logs",
                    *where[1:],
                    "--device",
                    "ragx",
                    "--stretch",
                    "0",
                    "--record",
                    trace,
                ]
            )
            == 0
        )
        out = capsys.readouterr().out
        assert f"2 devices, by {placement}: " in out
        assert "2 x ragx, emulated: " in out
        assert "espnx bench device --show postings --device ragx" in out
        assert (
            main(
                [
                    "postings",
                    "search",
                    parts[0],
                    "logs",
                    *where[1:],
                    "--device",
                    "ragx",
                    "--stretch",
                    "0",
                    "--json",
                    "-",
                ]
            )
            == 0
        )
        device = strict_json(capsys.readouterr().out)["device"]
        assert (device["devices"], device["virtual_s"], device["flash_bytes"] % 4096) == (
            2,
            None,
            0,
        )
        assert device["modelled_s"] > 0
        assert device["flash_bytes"] > 0
        lists = ["--postings", parts[0], "--postings", parts[1]]
        assert main(["device", "replay", trace, *lists, "--device", "ssd", "--json", "-"]) == 0
        assert strict_json(capsys.readouterr().out)["verbs"]["scan"]["count"] == 1
        assert main(["device", "replay", trace, *lists[:2]]) == 2
        assert main(["device", "replay", trace, "--path", str(tmp_path)]) == 2
        assert "--postings" in capsys.readouterr().err
        assert main(["postings", "search", parts[0], "logs"]) == 2
        assert main(["postings", "search", parts[0], "logs", *where[1:], "--explain"]) == 2
    assert (
        main(["postings", "search", parts[0], "logs", "--also", str(tmp_path / "passages-0")]) == 2
    )


def test_a_build_says_its_spool_and_what_it_goes_on_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, index = tmp_path / "c.jsonl", str(tmp_path / "x")
    rows = [
        json.dumps({"id": str(i), "text": " ".join(f"w{i * j % 1999}" for j in range(60))}) + "\n"
        for i in range(1100)
    ]
    source.write_text("".join(rows) + '{"id": "bad"}\n')
    build = ["postings", "build", index, "--corpus", str(source), "--memory", "1MiB"]
    assert main(build) == 2
    assert "1,101 records, about" in (said := capsys.readouterr().err)
    assert " of spool" in said
    assert (tmp_path / "x" / "work").is_dir()
    source.write_text("".join(rows))
    assert main(build) == 0
    assert "records of the attempt before: " in capsys.readouterr().err
    vectors = tmp_path / "v.jsonl"
    vectors.write_text('{"vector": {"log": 1.5}}\n')
    assert main(["postings", "build", str(tmp_path / "v"), "--vectors", str(vectors)]) == 0
    assert "1 records, about 1 postings; no spool" in capsys.readouterr().err


def test_vectors_in_two_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "v.jsonl"
    source.write_text(
        '{"id": "a", "vector": {"log": 1.5}}\n{"id": "b", "vector": {"disk": 2, "log": 0.5}}\n'
    )
    index = str(tmp_path / "x")
    assert main(["postings", "build", index, "--vectors", str(source)]) == 0
    capsys.readouterr()
    assert (
        main(
            [
                "postings",
                "search",
                index,
                "--queries",
                str(source),
                "--two-step",
                "-k",
                "2",
                "--json",
                "-",
            ]
        )
        == 0
    )
    found = strict_json(capsys.readouterr().out)
    assert [[hit["number"] for hit in each["hits"]] for each in found["results"]] == [
        [0, 1],
        [1, 0],
    ]
