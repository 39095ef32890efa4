"""``espnx index build | verify | info`` from the outside: exit codes, tables, JSON, messages,
interruption."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import espnx
from espnx.cli.index_options import FORMATS, POOLINGS
from espnx.cli.main import main
from espnx.device.record_layout import FORMAT_NUMBERS
from espnx.errors import InvalidInputError

pytest.importorskip("faiss", reason="FAISS is not installed (extra [retrieval])")

from espnx.retrieval.build.options import COARSE_FORMATS, BuildOptions
from tests.cli.documents import strict_json
from tests.forks import Forks
from tests.retrieval.common import toy_encoder
from tests.storage.common import until

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


@pytest.fixture(autouse=True)
def encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    for call in ("load_encoder", "load_named"):
        monkeypatch.setattr(f"espnx.encoders.{call}", lambda name, **options: toy_encoder())


def write_corpus(path: Path, count: int = 50) -> Path:
    lines = [
        {
            "_id": f"d{i}",
            "title": WORDS[i % 10],
            "text": " ".join(WORDS[(i * k) % 10] for k in range(i % 6)),
        }
        for i in range(count)
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    return path


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus.jsonl")


def run(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    return code, *capsys.readouterr()


def test_build_verify_info(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, report = tmp_path / "store", tmp_path / "report.json"
    code, out, err = run(
        capsys, "index", "build", store, "--corpus", corpus, "--nlist", 3, "--json", report
    )
    assert code == 0
    assert "documents          50\n" in out
    assert "flat" not in out
    assert "code sq8, nlist 3" in out
    assert "bytes a token vector on disk beside the store's" in err
    assert "loading encoder minilm ..." in err.splitlines()[0]
    assert "spool: 0 of 50\n" in err, "what there is to do is said before the first is done"
    assert "spool: 50 of 50" in err
    assert "write: 50 of 50" in err
    document = strict_json(report.read_text())
    assert (
        document["command"],
        document["report"]["documents"],
        document["report"]["first_stage"]["nlist"],
    ) == ("index build", 50, 3)
    code, out, err = run(capsys, "index", "verify", store, "--json", "-")
    assert code == 0
    assert strict_json(out) | {"bytes_moved": 0} == {
        "schema_version": 1,
        "command": "index verify",
        "store": str(store),
        "records": 50,
        "bytes_moved": 0,
        "ok": True,
    }
    assert "verify: 50 of 50" in err
    assert "50 records and all metadata are intact" in run(capsys, "index", "verify", store)[1]
    code, out, err = run(capsys, "index", "info", store)
    assert code == 0
    assert "toy@1" in out
    assert "bytes a document" in out
    document = strict_json(run(capsys, "index", "info", store, "--json", "-")[1])
    assert document["resident_bytes_per_document"] <= 8
    assert document["manifest"]["records"]["count"] == 50


def test_building_again(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["index", "build", tmp_path / "store", "--corpus", corpus]
    assert run(capsys, *words)[0] == 0
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert "already holds a store" in err
    assert "--replace" in err
    write_corpus(corpus, 60)
    code, out, _ = run(
        capsys, *words, "--replace", "--format", "fp32", "--pca", 8, "--cls-weight", 0.5
    )
    assert code == 0
    assert "documents          60\n" in out
    assert "8 fp32" in run(capsys, "index", "info", tmp_path / "store")[1]


def test_an_interrupted_build_and_its_ways_out(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A broken line in the middle leaves nothing behind, so that other settings are as good as the
    same."""
    lines = write_corpus(corpus, 300).read_text().splitlines()
    corpus.write_text("\n".join([*lines[:280], "{broken", *lines[280:]]))
    words = ["index", "build", tmp_path / "store", "--corpus", corpus]
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert f"line 281 of {corpus}" in err
    assert run(capsys, "index", "info", tmp_path / "store")[0] == 1
    write_corpus(corpus, 300)
    code, out, _ = run(capsys, *words, "--format", "fp32")
    assert code == 0
    assert "from the interrupted build" not in out, "what ended in a bad line is not continued"
    assert run(capsys, *words, "--format", "fp32", "--replace", "--restart")[0] == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "line 2"),
        (b"[1]", "line 2 .* got list"),
        (b'{"id": "x", "text": "\xff"}', "line 2 .*utf-8"),
        (
            b'{"id": "x"}',
            r"line 2 .*got a document with id; expected id \(or _id\), text and perhaps title",
        ),
        (
            b'{"text": "x", "name": 1}',
            r"line 2 .*got a document with text, name; expected id \(or _id\)",
        ),
        (b"{}", "line 2 .*got a document with nothing"),
        (b'{"id": "x", "text": null}', "line 2 .*: text; got NoneType"),
        (b'{"id": 1.5, "text": "x"}', "line 2 .*: id; got 1.5"),
        (b'{"id": true, "text": "x"}', "line 2 .*: id; got True"),
        (b'{"id": "d0", "text": "again"}', "'d0' occurs twice"),
        (b'{"id": "x", "text": "\\ud800"}', "surrogate"),
    ],
)
def test_a_corpus_with_a_bad_line(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], line: bytes, said: str
) -> None:
    first = corpus.read_bytes().splitlines()[0]
    corpus.write_bytes(first + b"\n" + line + b"\n")
    code, out, err = run(capsys, "index", "build", tmp_path / "store", "--corpus", corpus)
    assert (code, out) == (2, "")
    assert re.search(said, err), err
    assert err.splitlines()[-1].startswith("espnx: error: ")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--corpus", "nowhere.jsonl"], 2, "cannot read corpus nowhere.jsonl"),
        (["--memory", "lots"], 2, "cannot read a size"),
        (["--memory", "1MiB"], 2, "memory budget too small"),
        (["--first-stage-code", "hnsw"], 2, "flat, sq8, sq6, sq4 or pqM"),
        (["--first-stage-code", "pq4"], 2, "at least 256 documents"),
        (["--nlist", "0"], 2, "nlist"),
        (["--pca", "64"], 2, "at most 8"),
    ],
)
def test_options_that_do_not_fit(
    tmp_path: Path,
    corpus: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    said: str,
) -> None:
    found, out, err = run(capsys, "index", "build", tmp_path / "store", "--corpus", corpus, *words)
    assert (found, out) == (code, "")
    assert said in err


def test_several_directories(
    tmp_path: Path,
    corpus: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        run(
            capsys,
            "index",
            "build",
            "store",
            "--corpus",
            corpus,
            "--directory",
            "a",
            "--directory",
            "b",
        )[0]
        == 0
    )
    assert len(list(tmp_path.glob("[ab]/espnx-*/gen-*/segment-*"))) == 1
    monkeypatch.chdir("/")
    assert run(capsys, "index", "verify", tmp_path / "store")[0] == 0


def test_damage_is_an_error_with_a_name(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    run(capsys, "index", "build", store, "--corpus", corpus)
    target = next(store.glob("gen-*/segment-*"))
    data = bytearray(target.read_bytes())
    data[4200] ^= 4
    target.write_bytes(data)
    code, out, err = run(capsys, "index", "verify", store)
    assert (code, out) == (1, "")
    assert str(target) in err
    for command in ("verify", "info"):
        assert run(capsys, "index", command, tmp_path / "nowhere")[0] == 1


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL], ids=lambda end: end.name)
def test_an_ended_build(
    tmp_path: Path,
    open_forks: Callable[[str], Forks],
    capsys: pytest.CaptureFixture[str],
    end: signal.Signals,
) -> None:
    """Nothing is published, whoever asks is told why, and the same command goes on. By hand it ends
    with exit code 130."""
    corpus, said = write_corpus(tmp_path / "corpus.jsonl", 3000), tmp_path / "err"
    job = {
        "argv": ["index", "build", str(tmp_path / "store"), "--corpus", str(corpus)],
        "stdout": tmp_path / "out",
        "stderr": said,
    }
    processes = open_forks("tests.retrieval.zygote")
    child = processes.start(delay_s=0.3, **job)
    state = tmp_path / "store" / "building" / "STATE.json"
    assert until(
        lambda: state.exists() and json.loads(state.read_bytes().splitlines()[0])["documents"] > 0,
        60,
    )
    time.sleep(0.1)
    os.kill(child, end)
    code = processes.wait(child)
    if end is signal.SIGINT:
        assert code == 130
        told = (
            r"interrupted; what was published before is intact; [\d,]+ documents are kept in .*: "
            r"the same build continues with them"
        )
        assert re.search(told, said.read_text())
    assert "Traceback" not in said.read_text()
    assert not (tmp_path / "store" / "MANIFEST.json").exists()
    for words in (("search", tmp_path / "store", "x"), ("index", "info", tmp_path / "store")):
        assert run(capsys, *words)[0] == 1
        assert re.search(
            "no published store in .*a build was interrupted here: the same .*build`? goes on",
            run(capsys, *words)[2],
        )
    assert processes.wait(processes.start(**job)) == 0
    assert "from the interrupted build" in (tmp_path / "out").read_text()
    assert re.search(r"confirm: [\d,]+ of [\d,]+", said.read_text()), "it says when it goes on"
    assert main(["index", "verify", str(tmp_path / "store")]) == 0


def test_add_delete_compact(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, more = tmp_path / "store", tmp_path / "more.jsonl"
    more.write_text(json.dumps({"id": "new", "text": "alpha omega"}) + "\n")
    assert (
        run(
            capsys,
            "index",
            "build",
            store,
            "--corpus",
            corpus,
            "--coarse",
            "bit1",
            "--format",
            "int8",
        )[0]
        == 0
    )
    assert "1 documents added" in run(capsys, "index", "add", store, "--corpus", more)[1]
    ids = tmp_path / "ids"
    ids.write_text("d3\nd4\n")
    assert "3 documents deleted" in run(capsys, "index", "delete", store, "d7", "--ids", ids)[1]
    assert "48 (3 deleted ones wait for compact)" in run(capsys, "index", "info", store)[1]
    target = tmp_path / "report.json"
    code, out, _ = run(capsys, "index", "compact", store, "--json", target)
    assert code == 0
    assert "48 documents in one part (2 before), 3 dropped" in out
    assert strict_json(target.read_text())["report"]["dropped"] == 3
    assert run(capsys, "index", "verify", store)[0] == 0
    out = run(capsys, "index", "info", store)[1]
    assert "bit1" in out
    assert "wait for compact" not in out


def test_adding_in_the_place_of_others(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, more = tmp_path / "store", tmp_path / "more.jsonl"
    run(capsys, "index", "build", store, "--corpus", corpus)
    more.write_text(json.dumps({"id": "d3", "text": "omega"}) + "\n")
    code, _, err = run(capsys, "index", "add", store, "--corpus", more)
    assert code != 0
    assert "--replace" in err
    assert (
        "1 documents added, generation 2"
        in run(capsys, "index", "add", store, "--corpus", more, "--replace")[1]
    )
    out = run(capsys, "index", "info", store)[1]
    assert "50 (1 deleted ones wait for compact)" in out
    assert [line.split() for line in out.splitlines() if line.startswith("generation")] == [
        ["generation", "2"]
    ]


def test_an_empty_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none.jsonl").write_text("\n")
    code, out, _ = run(
        capsys, "index", "build", tmp_path / "store", "--corpus", tmp_path / "none.jsonl"
    )
    assert code == 0
    assert "no document: " in out
    assert "the first addition trains its lists" in out


def test_a_corpus_from_a_pipe_or_compressed(
    tmp_path: Path,
    corpus: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Standard input and gzip, one in the other too, make the same store; damage in them is an
    error of the corpus."""
    plain = corpus.read_bytes()
    for number, (given, name) in enumerate(
        ((plain, "-"), (gzip.compress(plain), "-"), (gzip.compress(plain), "c.jsonl.gz"))
    ):
        store = tmp_path / f"store{number}"
        monkeypatch.setattr("sys.stdin", _stdin(given))
        (tmp_path / "c.jsonl.gz").write_bytes(given)
        assert (
            run(
                capsys,
                "index",
                "build",
                store,
                "--corpus",
                name if name == "-" else tmp_path / name,
            )[0]
            == 0
        )
        assert (
            f"{sum(map(bool, plain.splitlines())):,}"
            in run(capsys, "index", "info", store)[1].splitlines()[0]
        )
    for bad in (
        gzip.compress(plain)[:-9],
        gzip.compress(plain)[:40] + b"xxxx" + gzip.compress(plain)[44:],
    ):
        (tmp_path / "bad.gz").write_bytes(bad)
        code, _, err = run(
            capsys, "index", "build", tmp_path / "bad", "--corpus", tmp_path / "bad.gz"
        )
        assert code == 2
        assert "bad.gz" in err
        assert "Traceback" not in err
    monkeypatch.setattr("sys.stdin", _stdin(b'{"id": 1, "text": "a"}\n{"id": 2}\n'))
    code, _, err = run(capsys, "index", "build", tmp_path / "bad", "--corpus", "-")
    assert code == 2
    assert "line 2 of standard input" in err


def _stdin(data: bytes) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedReader(io.BytesIO(data)))  # type: ignore[arg-type]


def test_a_corpus_that_is_not_utf_8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(b'\xef\xbb\xbf{"id": 1, "text": "a"}\n{"id": 2, "text": "caf\xe9"}\n')
    code, _, err = run(capsys, "index", "build", tmp_path / "store", "--corpus", bad)
    assert code == 2
    assert "line 2" in err
    assert "'utf-8' codec" in err
    bad.write_bytes(b'"\x00a"\x00')
    assert "utf-16" not in run(capsys, "index", "build", tmp_path / "store", "--corpus", bad)[2]


def test_ids_that_are_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = tmp_path / "ints.jsonl"
    corpus.write_text("".join(json.dumps({"id": i, "text": WORDS[i]}) + "\n" for i in range(9)))
    run(capsys, "index", "build", tmp_path / "store", "--corpus", corpus)
    code, _, err = run(capsys, "index", "delete", tmp_path / "store", "3")
    assert code != 0
    assert "no such document; got '3'" in err
    assert "--int" in err
    assert (
        "1 documents deleted" in run(capsys, "index", "delete", tmp_path / "store", "3", "--int")[1]
    )


def test_what_cannot_be_changed(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    run(capsys, "index", "build", store, "--corpus", corpus)
    for words, said in (
        (["index", "add", store, "--corpus", corpus], "is in the store"),
        (["index", "delete", store, "unknown"], "no such document"),
        (["index", "delete", store, "x", "--int"], "a number"),
        (["index", "delete", store, "--ids", tmp_path / "absent"], "cannot read ids"),
        (["index", "compact", tmp_path / "nowhere"], ""),
    ):
        code, _, err = run(capsys, *words)
        assert code != 0
        assert said in err
    assert run(capsys, "index", "verify", store)[1].startswith(f"{store}: 50 records")


def test_delete_needs_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", "delete", str(tmp_path / "s")]) == 2
    assert "no ids" in capsys.readouterr().err


def test_a_folder_that_is_refused_stays_as_it_is(tmp_path: Path) -> None:
    """No lock is left in somebody else's folder."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "corpus.jsonl").write_text('{"id": "a", "text": "b"}\n')
    assert (
        main(
            ["index", "build", str(tmp_path / "model"), "--corpus", str(tmp_path / "corpus.jsonl")]
        )
        != 0
    )
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["config.json"]


def test_what_is_wrong_shows_before_the_encoder_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A store that is there, and options that contradict themselves; by the function as well."""
    corpus, store = write_corpus(tmp_path / "corpus.jsonl", 3), tmp_path / "a.index"
    words = ["index", "build", str(store), "--corpus", str(corpus)]
    assert main(words) == 0

    def load(name: str, **options: Any) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("espnx.encoders.load_encoder", load)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("")
    for wrong, said in (
        (words, "already holds a store"),
        ([*words[:2], str(tmp_path / "full"), *words[3:]], "is not empty and no store"),
        (
            [*words[:2], str(tmp_path / "b"), *words[3:], "--first-stage-code", "sq9"],
            "first-stage code",
        ),
    ):
        assert main(wrong) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(InvalidInputError, match="already holds a store"):
        espnx.build(store, [("a", "red")], "minilm")


def test_known_words_are_those_of_a_build() -> None:
    for word in FORMATS:
        BuildOptions(format=word)
    for word in POOLINGS:
        BuildOptions(pooling=word)
    assert set(FORMATS) == set(FORMAT_NUMBERS)
    assert set(FORMATS[3:]) == set(COARSE_FORMATS)


def test_ls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is published, what is unfinished, what is damaged; and nothing of what is no index."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", 12)
    assert (
        main(
            [
                "index",
                "build",
                str(tmp_path / "b.index"),
                "--corpus",
                str(corpus),
                "--format",
                "fp32",
            ]
        )
        == 0
    )
    (tmp_path / "a.index" / "building").mkdir(parents=True)
    (tmp_path / "c.index").mkdir()
    (tmp_path / "c.index" / "MANIFEST.json").write_text(
        '{"magic": "espnx-embedding-store", "version": '
    )
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "MANIFEST.json").write_text('{"magic": "of somebody else"}')
    capsys.readouterr()
    assert main(["index", "ls", str(tmp_path), "--json", "-"]) == 0
    document = strict_json(capsys.readouterr().out)
    found = {Path(each["path"]).name: each for each in document["indexes"]}
    assert {name: each["state"] for name, each in found.items()} == {
        "a.index": "unfinished",
        "b.index": "published",
        "c.index": "damaged",
    }
    built = found["b.index"]
    assert (built["documents"], built["format"], built["encoder"]) == (
        12,
        "fp32",
        toy_encoder().name,
    )
    assert built["size_bytes"] == sum(
        each.stat().st_size
        for each in (tmp_path / "b.index").glob("gen-*/*")
        if each.name != "MANIFEST.json"
    )
    assert main(["index", "ls", str(tmp_path / "b.index")]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == [str(tmp_path / "b.index"), "12"]
    assert main(["index", "ls", str(tmp_path / "other")]) == 0
    assert "no index in" in capsys.readouterr().out
    assert main(["index", "ls", str(tmp_path / "nowhere")]) == 1
