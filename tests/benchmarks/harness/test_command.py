"""``espnx bench`` from end to end, at toy size."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest

from espnx.benchmarks.harness.doubts import doubtful
from espnx.benchmarks.harness.registry import cases
from espnx.benchmarks.harness.result import load, rows_of
from espnx.benchmarks.io import case as io_case
from espnx.benchmarks.io import engine as io_engine
from espnx.cli.commands import bench
from espnx.cli.main import main, parse
from espnx.storage import FaultRule, FaultyEngine, open_engine
from tests.retrieval.common import build
from tests.retrieval.common import corpus as documents

ROOT = Path(__file__).resolve().parents[3]
TOY = ["--size", "8MiB", "--quick", "--pairs", "2", "--block", "4KiB", "--queue-depth", "8"]


def bench_io(path: Path, *words: str) -> int:
    return main(["bench", "io", "--path", str(path), *TOY, *words])


def test_the_list_of_cases(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["bench"], ["bench", "ls"]):
        assert main(words) == 0
        out = capsys.readouterr().out
        for case in cases().values():
            assert f"{case.name} " in out
            assert case.summary in out


def test_what_is_left_is_said_and_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Data files and stores; what else lies there stays, also inside."""
    assert (
        bench_io(
            tmp_path, "--engine", "memory", "--note", "a test", "--json", str(tmp_path / "r.json")
        )
        == 0
    )
    assert load(tmp_path / "r.json")["note"] == "a test"
    said = capsys.readouterr().err
    assert f"kept for the next run: {tmp_path / io_case.FILE_NAME}" in said
    assert f"espnx bench clean --path {tmp_path}" in said
    corpus = tmp_path / "B-20000-key"
    for store in (corpus / "store", tmp_path / "additions"):
        store.parent.mkdir(exist_ok=True)
        build(store, documents(20))
    for name in ("CORPUS.json", "queries.safetensors"):
        (corpus / name).write_text("{}")
    (tmp_path / "additions" / "mine.txt").write_text("x")
    (tmp_path / "other").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert main(["bench", "clean", "--path", str(tmp_path), "--dry-run"]) == 0
    assert sorted(tmp_path.rglob("*")) == before
    assert capsys.readouterr().out.count("kept") == 4
    assert main(["bench", "clean", "--path", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert (out.count("removed"), out.count("holds other files, too")) == (3, 1)
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == [
        "additions",
        "additions/mine.txt",
        "other",
        "r.json",
    ]
    assert main(["bench", "clean", "--path", str(tmp_path / "other")]) == 0
    assert "nothing of a benchmark" in capsys.readouterr().out
    assert main(["bench", "clean", "--path", str(tmp_path / "nowhere")]) == 2


def test_help_imports_no_torch() -> None:
    code = (
        "import sys\nfrom espnx.cli.main import main\n"
        "try:\n    main(['bench', 'io', '--help'])\nexcept SystemExit as stop:\n"
        "    code = stop.code\n"
        "print([name for name in ('torch', 'numpy') if name in sys.modules], code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[] 0", done.stderr
    assert "--queue-depth" in done.stdout


def test_a_quick_run_with_mmap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "r.json"
    assert (
        bench_io(
            tmp_path,
            "--engine",
            "posix,memory",
            "--baseline",
            "mmap",
            "--pattern",
            "random,sequential",
            "--json",
            str(result),
        )
        == 0
    )
    document = load(result)
    rows = rows_of(document)
    assert [row.system for row in rows] == ["espnx-posix", "espnx-memory", "mmap"] * 2
    for row in rows:
        assert (row.case, row.kind, row.n, row.correct) == ("io", "measured", 2, True)
        assert set(row.ratio) | set(doubtful(row)) == (set() if row.system == "mmap" else {"mmap"})
        assert row.params["file_bytes"] == 8 << 20
        assert row.median_s is not None
    assert rows[1].effective_path == "memory"
    assert rows[1].cache == "warm"
    out = capsys.readouterr()
    assert "vs mmap" in out.out
    assert "[1/2] random read" in out.err
    assert str(tmp_path) not in document["command"]


def test_json_alone_on_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_io(tmp_path, "--engine", "memory", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["schema_version"] == 1


@pytest.mark.skipif(shutil.which("fio") is None, reason="needs fio (apt install fio)")
def test_a_quick_run_with_fio(tmp_path: Path) -> None:
    result = tmp_path / "r.json"
    assert bench_io(tmp_path, "--baseline", "fio", "--engine", "posix", "--json", str(result)) == 0
    rows = {row.system: row for row in rows_of(load(result))}
    assert set(rows) == {"espnx-posix", "fio"}
    assert rows["espnx-posix"].bytes_asked == rows["fio"].bytes_asked
    assert rows["fio"].metrics["latency_us_p99"] > 0


def test_writes_go_to_a_file_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_io(tmp_path, "--engine", "posix") == 0
    before = (tmp_path / io_case.FILE_NAME).stat().st_mtime_ns
    assert bench_io(tmp_path, "--engine", "posix", "--op", "write", "--baseline", "mmap") == 0
    assert (tmp_path / io_case.FILE_NAME).stat().st_mtime_ns == before
    assert (tmp_path / io_case.SCRATCH_NAME).stat().st_size == 8 << 20
    assert "mmap is a baseline of reads alone" in capsys.readouterr().err


def test_a_damaged_file_gives_no_ratio_and_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_io(tmp_path, "--engine", "posix") == 0
    path, result = tmp_path / io_case.FILE_NAME, tmp_path / "r.json"
    status = path.stat()
    damaged = bytearray(path.read_bytes())
    damaged[100::4096] = bytes(byte ^ 4 for byte in damaged[100::4096])
    path.write_bytes(damaged)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    capsys.readouterr()
    # Without checksums nothing but the verification before the runs can see it.
    assert (
        bench_io(
            tmp_path,
            "--engine",
            "posix",
            "--baseline",
            "mmap",
            "--no-checksums",
            "--json",
            str(result),
        )
        == 1
    )
    rows = rows_of(load(result))
    assert not any(row.correct for row in rows)
    assert not any(row.ratio for row in rows)
    out = capsys.readouterr()
    assert "WRONG RESULT of espnx-posix" in out.err
    assert "NO" in out.out


def test_an_engine_that_flips_bits_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = io_engine.EngineSystem

    def lying(engine: str, work: io_engine.Work, **options: object) -> io_engine.EngineSystem:
        rules = [FaultRule("flip", "read", value=9, nth=20)]
        return honest(
            engine,
            work,
            open_engine=lambda path, **more: FaultyEngine(rules, path, **more),
            **options,
        )

    assert bench_io(tmp_path, "--engine", "posix") == 0
    monkeypatch.setattr(
        io_case, "size_work", lambda point, data, options: io_engine.Work(point, data, items=64)
    )
    monkeypatch.setattr(io_engine, "EngineSystem", lying)
    result = tmp_path / "r.json"
    assert bench_io(tmp_path, "--engine", "posix", "--baseline", "mmap", "--json", str(result)) == 1
    rows = {row.system: row for row in rows_of(load(result))}
    assert (rows["espnx-posix"].correct, rows["espnx-posix"].ratio, rows["espnx-posix"].n) == (
        False,
        {},
        0,
    )
    assert rows["mmap"].correct
    assert "expected CRC32C" in capsys.readouterr().err


def test_without_fio_the_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert bench_io(tmp_path, "--baseline", "fio,mmap") == 3
    assert "apt install fio" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())  # said before gigabytes are written


@pytest.mark.parametrize(
    ("words", "size_bytes", "name"),
    [(["--quick"], 256 << 20, io_case.QUICK_NAME), ([], 4 << 30, io_case.FILE_NAME)],
)
def test_a_quick_run_has_a_small_file_of_its_own(
    tmp_path: Path, words: list[str], size_bytes: int, name: str
) -> None:
    options = io_case.read_options(
        parse(["bench", "io", "--path", str(tmp_path), "--pairs", "2", *words])
    )
    assert (options.size_bytes, options.file_name) == (size_bytes, name)
    (tmp_path / name).write_text("")
    assert io_case.leaves(tmp_path) == [tmp_path / name]


@pytest.mark.parametrize(
    "words",
    [
        ["--baseline", "dd"],
        ["--engine", "spdk"],
        ["--pattern", "zigzag"],
        ["--op", "erase"],
        ["--block", "5KiB"],
        ["--block", "16MiB"],
        ["--queue-depth", "0"],
        ["--queue-depth", "many"],
        ["--size", "4097"],
        ["--throttle", "0"],
        ["--pairs", "0"],
    ],
)
def test_wrong_usage_ends_with_2(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_io(tmp_path, *words) == 2
    assert "espnx: error:" in capsys.readouterr().err


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    assert bench_io(tmp_path / "none") == 2


@pytest.mark.parametrize("name", sorted(cases()))
def test_a_directory_that_is_not_there_is_an_error_at_once(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is made or measured: in words, whatever the case."""
    nowhere = tmp_path / "nowhere"
    words = {"head-to-head": ["search"]}.get(name, [])
    if "--path" not in _options(name):
        pytest.skip("it measures no disk")
    assert main(["bench", name, *words, "--path", str(nowhere)]) == 2
    said = capsys.readouterr().err
    assert (
        said == f"espnx: error: bench {name} needs a directory; got {str(nowhere)!r}; expected an "
        "existing one. Fix: --path DIR\n"
    )
    assert not nowhere.exists()


def _options(name: str) -> set[str]:
    """Of a case, on the command line."""
    parser = ArgumentParser()
    cases()[name].configure(parser)
    return {option for action in parser._actions for option in action.option_strings}


def test_tune_prints_configuration_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_io(tmp_path, "--engine", "posix", "--tune") == 0
    out = capsys.readouterr().out
    assert out.startswith("# ")
    assert "queue_depth = " in out


def test_tune_writes_a_file_that_an_engine_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "nvme.toml"
    assert bench_io(tmp_path, "--engine", "posix", "--tune", str(file)) == 0
    assert f"written to {file}" in capsys.readouterr().out
    with open_engine(file) as engine:
        assert engine.requested == "posix"
    before = sorted(tmp_path.iterdir())
    for wrong, code in ((tmp_path / "nvme.yaml", 2), (tmp_path / "no" / "x.toml", 2)):
        assert bench_io(tmp_path, "--engine", "posix", "--tune", str(wrong)) == code
    assert sorted(tmp_path.iterdir()) == before


def test_render_check_of_this_tree(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--render", "--check"]) == 0
    assert capsys.readouterr().out == ""


def test_the_command_line_is_published_without_directories() -> None:
    typed = [
        "bench",
        "io",
        "--path",
        "/mnt/of somebody/disk",
        "--baseline",
        "fio,mmap",
        "--json",
        "/x/y/io.json",
        "--throttle",
        "800MB/s",
    ]
    assert (
        bench.command_line(typed)
        == "espnx bench io --path disk --baseline fio,mmap --json io.json --throttle 800MB/s"
    )
