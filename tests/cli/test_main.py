"""The command line's frame: help, lazy imports, exit codes, messages, JSON and tables."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from espnx import errors
from espnx._version import __version__
from espnx.cli import main as cli
from espnx.cli.output import emit, json_document, write_json
from espnx.cli.registry import COMMANDS, GROUPS, Command
from espnx.sizes import format_size, parse_size
from espnx.tables import render_json, render_table

ROOT = Path(__file__).resolve().parents[2]


def espnx(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "espnx", *words],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A command ``probe`` in the registry; tests replace its ``run``."""
    module = types.ModuleType("espnx_probe")
    module.configure = lambda parser: parser.add_argument("--size", type=int, default=1)  # type: ignore[attr-defined]
    module.run = lambda args: 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "espnx_probe", module)
    monkeypatch.setitem(COMMANDS, "probe", Command("espnx_probe", "a test"))
    return module


def test_help_lists_every_command_quickly() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = espnx("--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0
    assert {key.split()[0] for key in COMMANDS} <= set(done.stdout.split())
    # CPU time, not the clock on the wall: the machine may be busy with other things.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3


@pytest.mark.parametrize(
    "words", [("--version",), ("doctor", "--help"), ("env", "--help"), ("index", "--help")]
)
def test_help_and_version_exit_with_0(words: tuple[str, ...]) -> None:
    done = espnx(*words)
    assert done.returncode == 0
    assert done.stdout.startswith(
        f"espnx {__version__}" if words == ("--version",) else f"usage: espnx {words[0]}"
    )
    assert not done.stderr


@pytest.mark.parametrize(
    "words", [(), ("nonsense",), ("index",), ("index", "nonsense"), ("doctor", "--nonsense")]
)
def test_wrong_usage_exits_with_2(words: tuple[str, ...]) -> None:
    done = espnx(*words)
    assert done.returncode == 2
    assert "usage: espnx" in done.stderr
    assert not done.stdout


def test_wrong_usage_shows_one_line_of_usage_of_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Not of the program, which is a list of commands, and not its 30 options."""
    for words, usage in (
        (
            ["cache", "ls", ".", "--alll"],
            "usage: espnx cache ls DIR [options]; `espnx cache ls --help` lists them",
        ),
        (
            ["index", "build", "s", "--corpus", "c", "--nope"],
            "usage: espnx index build --corpus PATH store [options]; `",
        ),
        (["bench", "io", "--nope"], "usage: espnx bench io [options]; `espnx bench io --help`"),
        (["bench", "--list"], "usage: espnx bench CASE ..."),
    ):
        assert cli.main(words) == 2
        first, second = capsys.readouterr().err.splitlines()
        assert first.startswith(usage)
        assert "unrecognized arguments" in second


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("serach my.index x", "got 'serach'; did you mean search?"),
        ("index biuld x", "espnx index: error: argument COMMAND: got 'biuld'; did you mean build?"),
        (
            "index build x --corpus c --fromat int8",
            "unrecognized arguments: --fromat int8; --fromat: did you mean --format?",
        ),
        ("index build x --corpsu=c", "required: --corpus; --corpsu: did you mean --corpus?"),
        ("index build x --corpus c --encoder-dtype fp3", "got 'fp3'; did you mean fp32?"),
        ("index build x --corpus c --xyzzy", "unrecognized arguments: --xyzzy\n"),
        ("xyzzy", "invalid choice: 'xyzzy' (choose from"),
        # --form is --format, cut short
        ("index build x --corpus c --form int8 --nope", "unrecognized arguments: --nope\n"),
    ],
)
def test_a_mistyped_word_is_told_with_the_one_that_was_meant(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(line.split()) == 2
    assert said in capsys.readouterr().err


EXAMPLES = [line for command in COMMANDS.values() for line in command.examples]


def test_every_command_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for key, command in COMMANDS.items():
        assert command.examples, key
        assert all(line == key or line.startswith(f"{key} ") for line in command.examples)
        with pytest.raises(SystemExit) as caught:
            cli.main([*key.split(), "--help"])
        assert caught.value.code == 0
        shown = capsys.readouterr().out
        assert all(f"  espnx {line}\n" in shown for line in command.examples), (
            "not wrapped, to be pasted"
        )


@pytest.mark.parametrize("line", EXAMPLES)
def test_examples_are_understood(line: str) -> None:
    """Up to a redirection, which is the shell's."""
    words = shlex.split(line.partition(" > ")[0])
    assert callable(cli.parse(words).run)


def test_every_group_has_commands() -> None:
    assert {key.split()[0] for key in COMMANDS if " " in key} == set(GROUPS)


@pytest.mark.parametrize("key", sorted(COMMANDS))
def test_every_registered_command_loads(key: str) -> None:
    configure, run = COMMANDS[key].load()
    parser = argparse.ArgumentParser()
    configure(parser)
    assert callable(run)


@pytest.mark.parametrize(
    ("argv", "key"),
    [
        (["doctor"], "doctor"),
        (["index", "build", "x"], "index build"),
        (["index"], None),
        (["--version"], None),
        (["search", "build"], "search"),
    ],
)
def test_chosen_command(argv: list[str], key: str | None) -> None:
    assert cli.chosen_command(argv) == key


def test_arguments_and_exit_code_pass_through(command: types.ModuleType) -> None:
    seen = []
    command.run = lambda args: seen.append(args.size) or 1  # type: ignore[attr-defined]
    assert cli.main(["probe", "--size", "7"]) == 1
    assert seen == [7]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            errors.InvalidInputError("bad k", got=0, expected="at least 1", fix="pass k=10"),
            2,
            "bad k; got 0; expected at least 1. Fix: pass k=10",
        ),
        (errors.PathUnavailableError("no gds here"), 3, "no gds here"),
        (
            errors.MissingDependencyError("faiss is not installed", fix="pip install faiss-cpu"),
            1,
            "Fix: pip install faiss-cpu",
        ),
        (
            errors.ReadError(
                "read failed", path="a.seg", offset_bytes=4096, size_bytes=512, errno=5
            ),
            1,
            "in a.seg at offset 4096, 512 bytes",
        ),
        (errors.EspnxError("two\nlines"), 1, "two lines"),
        (ImportError("No module named 'torch'", name="torch"), 1, "torch cannot be imported"),
        (FileNotFoundError(2, "No such file or directory", "x.jsonl"), 1, "x.jsonl"),
        (
            ZeroDivisionError("division by zero"),
            1,
            "unexpected ZeroDivisionError: division by zero. ESPNX_DEBUG=1",
        ),
    ],
)
def test_failures_become_one_paragraph(
    command: types.ModuleType,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
    said: str,
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise error

    command.run = run  # type: ignore[attr-defined]
    assert cli.main(["probe"]) == code
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("espnx: error: ")
    assert said in err
    assert err.count("\n") == 1


def test_debug_shows_the_traceback(
    command: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise errors.EspnxError("boom")

    command.run = run  # type: ignore[attr-defined]
    monkeypatch.setenv("ESPNX_DEBUG", "1")
    with pytest.raises(errors.EspnxError, match="boom"):
        cli.main(["probe"])


def test_ctrl_c_exits_with_130(
    command: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    command.run = run  # type: ignore[attr-defined]
    assert cli.main(["probe"]) == 130
    assert capsys.readouterr().err == "espnx: interrupted; what was published before is intact\n"


def test_a_missing_module_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(COMMANDS, "ghost", Command("espnx.cli.no_such_module", "a test"))
    assert cli.main(["ghost"]) == 1
    assert "lacks the command" in capsys.readouterr().err


def test_a_closed_pipe_ends_quietly() -> None:
    # as at a terminal: the output leaves when the buffer is flushed
    environment = os.environ | {"PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-m", "espnx", "--help"]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 1
    assert said == b""


def test_table_is_aligned() -> None:
    text = render_table(
        ["NAME", "MiB/s"], [["uring", 1234.5], ["a longer name", None]], right=["MiB/s"]
    )
    assert text == "NAME            MiB/s\nuring          1234.5\na longer name       -"
    assert render_table(["A"], []) == "A"
    assert render_table(["", ""], [["a", 1], ["bb", 2]]) == "a   1\nbb  2"


def test_a_row_of_json_is_a_line() -> None:
    document = {
        "command": "x",
        "rows": [{"a": 1, "b": [1.5, {"c": None}]}, {"a": "\u00e9\n"}],
        "none": [],
        "numbers": [1, 2],
        "machine": {},
    }
    text = render_json(document)
    assert json.loads(text) == document
    assert text.splitlines()[2:5] == [
        '"rows": [',
        '  {"a": 1, "b": [1.5, {"c": null}]},',
        '  {"a": "\\u00e9\\n"}',
    ]
    assert json.loads(render_json({})) == {}
    for bad in ({"a": float("nan")}, {"rows": [{"a": float("inf")}]}):
        with pytest.raises(ValueError, match="JSON"):
            render_json(bad)


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    write_json(target, json_document("test", rows=[1]))
    assert json.loads(target.read_text()) == {"schema_version": 1, "command": "test", "rows": [1]}
    with pytest.raises(ValueError):
        write_json(target, {"x": float("nan")})
    with pytest.raises(errors.WriteError, match="nowhere"):
        write_json(tmp_path / "nowhere" / "x.json", {})
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    assert json.loads(target.read_text())["rows"] == [1]


def test_json_on_standard_output_replaces_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    emit(argparse.Namespace(json="-"), "table", json_document("test"))
    assert json.loads(capsys.readouterr().out)["command"] == "test"
    emit(argparse.Namespace(json=None), "table", {})
    assert capsys.readouterr().out == "table\n"


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("64KiB", 65536),
        ("64k", 65536),
        ("1 MB", 10**6),
        ("1.5GiB", 3 << 29),
        ("2TiB", 2 << 40),
        ("0.1kb", 100),
        (7, 7),
        ("4096PiB", 1 << 62),
    ],
)
def test_parse_size(text: str | int, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "KiB",
        "-1",
        "1.5",
        "1e3",
        "64 KiBs",
        "64KiB/s",
        "nan",
        -1,
        "1,5GiB",
        "4097PiB",
        2**62 + 1,
        2**70,
    ],
)
def test_parse_size_refuses(text: str | int) -> None:
    with pytest.raises(errors.InvalidInputError):
        parse_size(text)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (64 << 20, "64 MiB"),
        ((1 << 30) - 1, "1 GiB"),
        (5 << 50, "5 PiB"),
    ],
)
def test_format_size(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["search", "nope", "hi"], "no published store in nope"),
        (["evaluate", "nope", "--queries", "q", "--qrels", "r"], "nope"),
        (["generate", "--model", "nope", "--storage", "x", "--prompt", "a"], "model in nope"),
        (
            ["generate", "--model", "meta-llama/Llama-3-8B", "--storage", "x", "--prompt", "a"],
            "hf download meta-llama/Llama-3-8B",
        ),
        (
            ["generate", "--model", ".", "--storage", "/nodrive/kv", "--prompt", "a"],
            "is the drive mounted?",
        ),
        (
            ["generate", "--model", ".", "--storage", ".", "--prompts", "nope.txt"],
            "prompts nope.txt; got no such file",
        ),
        (["index", "build", "my.index", "--corpus", "nope.jsonl"], "nope.jsonl"),
        (["index", "build", "/nodrive/my.index", "--corpus", "c.jsonl"], "is the drive mounted?"),
        (
            ["index", "build", "my.index", "--corpus", "c.jsonl", "--directory", "/nodrive/a"],
            "is the drive mounted?",
        ),
        (
            ["index", "build", "my.index", "--corpus", "c.jsonl", "--format", "int9"],
            "got 'int9'; did you mean int8?",
        ),
        (["index", "add", "nope", "--corpus", "c.jsonl"], "no published store in nope"),
        (["index", "import", "x", "/nodrive/my.index"], "is the drive mounted?"),
        (
            ["graph", "build", "c.jsonl", "g", "--memory", "200MiB"],
            "got 200 MiB; expected more than 256 MiB",
        ),
        (["graph", "build", "nope.npy", "g"], "vectors nope.npy; got no such file"),
        (["graph", "build", "c.jsonl", "/nodrive/g"], "is the drive mounted?"),
        (
            ["plan", "--vectors", "1000", "--dim", "32", "--memory", "200MiB"],
            "got 200 MiB; expected more than 256 MiB",
        ),
    ],
)
def test_what_is_wrong_shows_before_anything_heavy_is_imported(
    words: list[str], says: str, tmp_path: Path
) -> None:
    (tmp_path / "c.jsonl").write_text('{"id": "a", "text": "red"}\n')
    program = (
        f"import sys; from espnx.cli.main import main; code = main({words!r}); sys.exit(code if "
        "'torch' not in sys.modules else 99)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode in (1, 2), done.stderr
    assert says in done.stderr


def test_an_interrupted_build_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s" / "building").mkdir(parents=True)
    assert cli.main(["search", str(tmp_path / "s"), "hi"]) == 1
    assert "a build was interrupted here" in capsys.readouterr().err


needs_shtab = pytest.mark.skipif(
    importlib.util.find_spec("shtab") is None, reason="shtab is not installed (extra [completion])"
)
#: The words of a line, and what the shell is to offer for the last of them.
_OFFERED = """
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_shtab_espnx espnx "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def completion(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@needs_shtab
def test_bash_offers_commands_options_and_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "espnx.bash").write_text(completion("bash", capsys))
    (tmp_path / "my.index").mkdir()
    for line, offered in (
        ("espnx sea", ["search"]),
        ("espnx index bu", ["build"]),
        ("espnx index build x --corpus-", ["--corpus-format"]),
        ("espnx index build x --encoder-dtype ", ["fp32", "bf16"]),
        ("espnx search my", ["my.index"]),
        ("espnx generate --storage my", ["my.index"]),
        ("espnx completion f", ["fish"]),
    ):
        words = [
            "bash",
            "--norc",
            "-c",
            _OFFERED,
            "bash",
            str(tmp_path / "espnx.bash"),
            *line.split(" "),
        ]
        said = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=30)
        assert said.stdout.split() == offered, (line, said.stderr)


@needs_shtab
@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_know_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = completion(shell, capsys)
    assert all(key.split()[-1] in text for key in COMMANDS)
    assert {"zsh": "#compdef espnx", "fish": "complete -c espnx"}[shell] in text
    if shutil.which(shell):
        assert (
            subprocess.run(
                [shell, "-n"], input=text, text=True, capture_output=True, timeout=30
            ).returncode
            == 0
        )


def test_without_shtab_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 1
    assert "pip install shtab" in capsys.readouterr().err
