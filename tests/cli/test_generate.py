"""``espnx generate`` from the outside: the framework's tokens for every prompt, each prompt once,
whatever happens on the way."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from espnx.integrations.generate import generate as generation
from espnx.integrations.generate.generate import batches
from espnx.integrations.generate.prompt_files import read_prompts
from espnx.integrations.transformers.forward import schedule as scheduling
from espnx.kv.schedule import Decision
from tests.cli.documents import strict_json
from tests.cli.generating import LENGTHS, NEW, PROMPTS, check, options, results, run, save, write
from tests.forks import Forks
from tests.integrations.transformers.tiny import make
from tests.retrieval.common import memory_folder
from tests.storage.common import until


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    with memory_folder() as path:
        yield save(path, make("llama"))


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
@pytest.mark.parametrize(
    "more",
    [[], ["--batch", 3, "--x-rows", 1, "--prefill-chunk", 7], ["--batch", 100, "--capacity", 80]],
)
def test_the_frameworks_tokens(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str], suffix: str, more: list[Any]
) -> None:
    prompts = write(folder / f"prompts.{suffix}", PROMPTS)
    code, out, err = run(capsys, *options(model, folder, prompts), *more)
    assert code == 0, err
    found, ids = (
        results(Path(f"{prompts}.out.jsonl")),
        [f"p{i}" if suffix == "jsonl" else str(i + 1) for i in range(len(PROMPTS))],
    )
    check(found, ids)
    assert list(found) == ids, "in the order of the prompts"
    assert "10 now, 0 before" in out
    assert not list((folder / "rows").iterdir())


def test_a_trace_that_stays_empty_says_why(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts too short to be written, and a run with nothing left to do; a trace that holds
    something needs no words."""
    trace, said = folder / "trace", "espnx: warning: the trace .*trace is empty: "
    for texts, why in (
        (["w1"], "all K and V stayed in memory"),
        (["w1"], "all results were there already"),
        (PROMPTS[5:6], None),
    ):
        prompts = write(folder / f"{len(texts[0])}.txt", texts)
        code, _, err = run(capsys, *options(model, folder, prompts), "--record", trace)
        assert code == 0, err
        lines = len(trace.read_text().splitlines())
        assert lines == 2 if why else lines > 2, "its head and its end"
        assert re.search(said + why, err) if why else "warning" not in err


def test_beams_and_two_directories(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = write(folder / "prompts.txt", PROMPTS[:3]), folder / "out"
    more = ["--num-beams", 2, "--x-rows", 0, "--storage", folder / "more", "--out", out]
    assert run(capsys, *options(model, folder, prompts), *more)[0] == 0
    check(results(out), ["1", "2", "3"], PROMPTS[:3], num_beams=2)


def test_the_summary(model: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens a second of both phases, bytes asked and moved, the path, and the decision with what
    was predicted and measured."""
    prompts = write(folder / "prompts.txt", PROMPTS)
    with pytest.MonkeyPatch.context() as patch:
        made = Decision(1, "the least predicted step time", (0.5, 0.25, 0.75, 1.0, 2.0))
        patch.setattr(scheduling, "decide", lambda *args, **options: made)
        code, out, _ = run(
            capsys, *options(model, folder, prompts), "--json", folder / "report.json"
        )
    assert code == 0
    rows = {
        line.split("  ")[0]: line.split("  ", 1)[1].strip()
        for line in out.splitlines()
        if "  " in line
    }
    assert rows["prefill"].endswith("tokens/s")
    assert rows["decode"].endswith("tokens/s")
    assert re.fullmatch(
        r"[\d.]+ [KM]iB written, [\d.]+ [KM]?i?B asked, [\d.]+ [KM]?i?B moved", rows["bytes"]
    )
    assert rows["effective path"]
    assert rows["waited for the disk"].endswith(" s")
    assert rows["sequences kept as X"] == "1 (the least predicted step time)"
    assert re.fullmatch(r"\d\.\d{3} s measured, 0\.250 s predicted", rows["a decode step"])
    report = strict_json((folder / "report.json").read_text())
    assert (report["command"], report["prompts"], report["skipped"]) == (
        "generate",
        len(PROMPTS),
        0,
    )
    every = [report["batches"][i] for i in range(len(report["batches"]))]
    assert sum(batch["sequences"] for batch in every) == len(PROMPTS)
    for batch in every:
        assert batch["bytes_moved"] >= batch["bytes_asked"] >= 0
        assert batch["decode_s"] >= 0
        assert batch["decision"]["why"] == "the least predicted step time"
        assert (batch["x_rows"], batch["step_s"] > 0) == (1, True)
        assert batch["decode_tokens"] <= batch["sequences"] * (NEW - 1)


def test_asked_and_not_decided(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write(folder / "prompts.txt", PROMPTS[:2])
    out = run(capsys, *options(model, folder, prompts), "--x-rows", 1)[1]
    assert "1, as asked" in out
    assert re.search(r"a decode step +\d\.\d{3} s measured\n", out)


def test_a_second_run_goes_on(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the results that are whole; other settings are refused, and nothing is changed then."""
    prompts, out = write(folder / "prompts.txt", PROMPTS), folder / "prompts.txt.out.jsonl"
    words = options(model, folder, prompts)
    assert run(capsys, *words)[0] == 0
    whole = out.read_bytes()
    first, second = whole.splitlines(keepends=True)[:2]
    for left in (b"", first, first + second[:-1], first + second[:7], first + second):
        out.write_bytes(left)
        code, said, _ = run(capsys, *words)
        assert code == 0
        done = left.count(b"}\n")
        assert f"{10 - done} now, {done} before" in said
        check(results(out), [str(i + 1) for i in range(10)])
    before = out.read_bytes()
    code, said, _ = run(capsys, *words)
    assert (code, out.read_bytes()) == (0, before)
    assert "0 now, 10 before" in said
    for other in (
        ["--max-new-tokens", 7],
        ["--num-beams", 2],
        ["--format", "int8"],
        ["--temperature", 1],
        ["--dtype", "bfloat16"],
    ):
        code, _, err = run(capsys, *words, *other)
        assert (code, out.read_bytes()) == (2, before), other
        assert "--out" in err


def test_sampling_is_repeatable(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write(folder / "prompts.txt", PROMPTS)
    outs = [folder / f"out{i}" for i in range(3)]
    for out, seed in zip(outs, (5, 5, 6), strict=True):
        assert (
            run(
                capsys,
                *options(model, folder, prompts),
                "--temperature",
                2,
                "--seed",
                seed,
                "--out",
                out,
                "--x-rows",
                0,
            )[0]
            == 0
        )
    one, same, other = (
        {name: line["tokens"] for name, line in results(out).items()} for out in outs
    )
    assert one == same != other


def lines_of(path: Path) -> int:
    """Written so far; a program that looks whether it may write there makes an empty file for a
    moment."""
    try:
        return path.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def test_killed_and_run_again(
    model: Path,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    open_forks: Callable[[str], Forks],
) -> None:
    """No prompt comes twice, none is lost, and what was finished is not computed again."""
    texts = PROMPTS * 8
    prompts, out = write(folder / "prompts.jsonl", texts), folder / "prompts.jsonl.out.jsonl"
    words = [str(word) for word in [*options(model, folder, prompts), "--batch", 2]]
    processes = open_forks("tests.integrations.transformers.forks")
    child = processes.start(
        argv=["generate", *words], stdout=folder / "said", stderr=folder / "complained"
    )
    assert until(lambda: lines_of(out) >= 11, 60)
    os.kill(child, signal.SIGKILL)
    assert processes.wait(child) == -signal.SIGKILL
    kept = out.read_bytes()
    assert kept.count(b"\n") >= 11
    assert not list((folder / "rows").iterdir())
    done = kept.count(b"\n")
    code, said, _ = run(capsys, *words)
    assert code == 0
    assert f"{len(texts) - done} now, {done} before" in said
    assert set(kept[: kept.rfind(b"\n") + 1].splitlines()) <= set(out.read_bytes().splitlines())
    check(results(out), [f"p{i}" for i in range(len(texts))], texts)


def test_results_come_as_batches_finish(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever happens to a batch, those before it were written."""
    calls = list[int]()

    class Spy(generation.KVCache):
        def close(self) -> None:
            out = folder / "prompts.txt.out.jsonl"
            calls.append(out.read_bytes().count(b"\n") if out.exists() else 0)
            super().close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "KVCache", Spy)
        assert (
            run(
                capsys,
                *options(model, folder, write(folder / "prompts.txt", PROMPTS)),
                "--batch",
                2,
            )[0]
            == 0
        )
    assert calls[0] == 0
    assert calls == sorted(set(calls)), "a batch began before the last one was written"
    assert max(calls) >= 8


def test_batches_are_of_like_length() -> None:
    for lengths in ([], [5], LENGTHS, [1] * 9, list(range(1, 60)), [100, 1, 1, 1]):
        for size in (1, 2, 4, 100):
            found = list(batches(lengths, size))
            assert sorted(i for batch in found for i in batch) == list(range(len(lengths)))
            for batch in found:
                own = [lengths[i] for i in batch]
                assert 1 <= len(own) <= size
                assert max(own) * len(own) <= 1.25 * sum(own)


def test_prompts_files(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "a"}\n\n{"id": 7, "prompt": "b"}\n{"id": "x", "prompt": ""}\n', encoding="utf-8"
    )
    assert [(each.id, each.text) for each in read_prompts(path)] == [
        ("1", "a"),
        ("7", "b"),
        ("x", ""),
    ]
    path.write_text("")
    assert read_prompts(path) == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"prompt": "a"}\n{"prompt": \n', "line 2"),
        (b'{"id": "a"}\n', "line 1"),
        (b'["a"]\n', "line 1"),
        (b'{"prompt": 5}\n', "line 1"),
        (b'{"id": 1, "prompt": "a"}\n{"id": "1", "prompt": "b"}\n', "line 2"),
        (b'{"prompt": "w1"}\n{"prompt": ""}\n', "no tokens"),
        (b"\xff\xfe", "UTF-8"),
        (None, "readable"),
    ],
)
def test_bad_prompts(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, said: str
) -> None:
    prompts = folder / "p.jsonl"
    if content is not None:
        prompts.write_bytes(content)
    code, _, err = run(capsys, *options(model, folder, prompts))
    assert code == 2, err
    assert said in err
    assert "Traceback" not in err


def test_no_prompts(model: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *options(model, folder, write(folder / "p.jsonl", [])))
    assert code == 0
    assert "0 now, 0 before" in out


def test_wrong_usage(model: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = write(folder / "p.txt", PROMPTS[:1])
    words = options(model, folder, prompts)
    for more, wanted_code in (
        (["--model", folder], 2),
        (["--storage", prompts], 2),
        (["--engine", "nvme"], 2),
        (["--memory", "much"], 2),
        (["--out", folder], 2),
    ):
        code, _, err = run(capsys, *words, *more)
        assert code == wanted_code, (more, err)
        assert "Traceback" not in err
        assert err.splitlines()[-1].startswith("espnx: error: ")
    for bad in (
        ["--format", "fp4"],
        ["--batch", "x"],
        ["--dtype", "int8"],
        ["--prompt", "one more"],
    ):
        assert run(capsys, *words, *bad)[0] == 2
    for missing in ("--model", "--prompts", "--storage"):
        at = words.index(missing)
        assert run(capsys, *words[:at], *words[at + 2 :])[0] == 2
    assert os.path.getsize(prompts) == len(PROMPTS[0]) + 2


def test_one_prompt(model: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Printed with what follows it; nothing is written."""
    words = ["--model", model, "--storage", folder / "rows", "--max-new-tokens", NEW]
    code, out, err = run(
        capsys,
        *words,
        "--prompt",
        PROMPTS[0],
        "--prompt",
        PROMPTS[2],
        "--json",
        folder / "report.json",
    )
    assert code == 0, err
    assert "loading model" in err
    assert "prompts: 0 of 2" in err
    assert "Loading weights" not in err, "the framework's own bar"
    found = strict_json((folder / "report.json").read_text())["results"]
    check({line["id"]: line for line in found}, ["1", "2"], [PROMPTS[0], PROMPTS[2]])
    shown = out.split("\n\n")
    assert shown[:2] == [f"{PROMPTS[0]}\n{found[0]['text']}", f"{PROMPTS[2]}\n{found[1]['text']}"]
    assert sorted(path.name for path in folder.iterdir()) == ["report.json", "rows"]


def test_a_mistyped_directory_shows_before_a_model_is_loaded(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(
        capsys, "--model", model, "--storage", folder / "nvme_typo" / "x", "--prompt", "w1"
    )
    assert code == 2
    assert "is the drive mounted?" in err
    assert "loading model" not in err
    assert list(folder.iterdir()) == []


def test_results_of_other_prompts_stay(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What an earlier run did for prompts that are asked no more comes last; the file's mode, and a
    link to it, stay."""
    prompts, out = write(folder / "p.jsonl", PROMPTS[:4]), folder / "out"
    assert run(capsys, *options(model, folder, prompts), "--out", out)[0] == 0
    os.chmod(out, 0o640)
    (folder / "link").symlink_to(out)
    lines = [json.loads(line) for line in prompts.read_text().splitlines()]
    prompts.write_text(
        "".join(
            json.dumps(line) + "\n"
            for line in [{"id": "new", "prompt": PROMPTS[1]}, lines[3], lines[0]]
        )
    )
    assert run(capsys, *options(model, folder, prompts), "--out", folder / "link")[0] == 0
    assert list(results(out)) == ["new", "p3", "p0", "p1", "p2"]
    assert ((folder / "link").is_symlink(), out.stat().st_mode & 0o777) == (True, 0o640)


def test_on_emulated_devices(model: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows in fp16 are attended to by their accelerators; a note says whose the times are."""
    more = [
        "--x-rows",
        0,
        "--format",
        "fp16",
        "--device",
        "smartssd",
        "--stretch",
        0,
        "--max-new-tokens",
        NEW,
    ]
    words = [
        "--model",
        model,
        "--prompt",
        PROMPTS[1],
        "--storage",
        folder / "a",
        "--storage",
        folder / "b",
        *more,
    ]
    code, out, err = run(capsys, *words, "--json", folder / "report.json")
    assert code == 0, err
    document = strict_json((folder / "report.json").read_text())
    (stats,), device = document["batches"], document["device"]
    assert stats["layers_attended_on_host"] == 0
    assert stats["bytes_asked"] > 0
    assert (device["name"], device["devices"], device["virtual_s"], device["host_share"]) == (
        "smartssd",
        2,
        None,
        None,
    )
    assert device["modelled_s"] > 0
    assert device["flash_bytes"] > device["to_host_bytes"] > 0  # results cross the links, not rows
    assert re.search(r"devices +2 x smartssd, emulated: .* modelled \| .* from flash", out)
    assert "espnx bench device --show topology --device smartssd" in out
    code, recorded, err = run(capsys, *words, "--record", folder / "trace")
    assert code == 0, err
    assert re.search(r"devices +2 x smartssd, emulated: .* modelled", recorded)
    code, _, err = run(capsys, *words[:6], "--stretch", 3)
    assert code == 2
    assert "--device smartssd" in err


def test_prompts_shorter_than_a_block(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written, and it says why; of the devices there is no time to say, and no stretch
    in millions is advised."""
    more = [
        "--x-rows",
        0,
        "--format",
        "fp16",
        "--device",
        "smartssd",
        "--stretch",
        100,
        "--max-new-tokens",
        2,
    ]
    code, out, err = run(
        capsys, "--model", model, "--prompt", "ab", "--storage", folder / "a", *more
    )
    assert code == 0, err
    assert "nothing was written: a sequence has fewer tokens than a block" in out
    assert re.search(r"devices +smartssd, emulated: untimed \| 0 B from flash", out)
    assert "nothing was asked of the devices" in out
    assert "run it again" not in out
