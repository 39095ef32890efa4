"""What commands write for programs: errors too, in the form that is published."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from espnx import errors
from espnx.cli.failures import report
from espnx.cli.main import main
from espnx.cli.output import check_json
from espnx.cli.registry import COMMANDS
from tests.cli.documents import SCHEMA, check, strict_json

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed (extra [dev])")

PAGE = SCHEMA.with_name("json.md")


def test_the_schema_is_one_and_has_every_command() -> None:
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    assert COMMANDS.keys() - {"bench", "completion"} <= set(schema["$defs"])
    whole = jsonschema.Draft202012Validator(schema)
    whole.validate({"schema_version": 1, "command": "cache rm", "removed": ["a"]})
    for wrong in (
        {"command": "cache rm", "removed": []},
        {"schema_version": 1, "command": "cache rm", "removed": [1]},
    ):
        assert not whole.is_valid(wrong)


def test_the_example_of_the_page() -> None:
    [example] = re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    check(json.loads(example))


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (
            ["search", "{0}/nowhere", "x"],
            {"class": "StoreNotFoundError", "exit_code": 1, "path": "{0}/nowhere"},
        ),
        (
            ["search", "{0}/nowhere"],
            {
                "class": "InvalidInputError",
                "exit_code": 2,
                "what": "espnx search",
                "got": "no query",
            },
        ),
        (
            ["search", "--nprob", "3"],
            {
                "class": "UsageError",
                "exit_code": 2,
                "message": "the following arguments are required: store, query",
            },
        ),
        (
            ["cache", "ls", "{0}", "--alll"],
            {"class": "UsageError", "exit_code": 2, "message": "unrecognized arguments: --alll"},
        ),
        (["index"], {"class": "UsageError", "exit_code": 2}),
        (["nonsense"], {"class": "UsageError", "exit_code": 2}),
        (["doctor", "--path", "{0}/nowhere"], {"class": "InvalidInputError", "fix": "--path DIR"}),
    ],
)
def test_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], expected: dict[str, object]
) -> None:
    words = [word.format(tmp_path) for word in argv]
    target = tmp_path / "e.json"
    for option in (["--json", str(target)], [f"--json={target}"]):
        code = main([*words, *option])
        said = capsys.readouterr()
        assert said.out == ""
        error = strict_json(target.read_text())["error"]
        target.unlink()
        assert error["exit_code"] == code
        wanted = {
            name: value.format(tmp_path) if isinstance(value, str) else value
            for name, value in expected.items()
        }
        assert {name: error[name] for name in wanted} == wanted
        assert error["message"] in " ".join(said.err.split())
    main([*words, "--json=-"])
    assert strict_json(capsys.readouterr().out)["error"] == error


ANY: list[BaseException] = [
    errors.DiskFullError("write", needed_bytes=2, free_bytes=1, path="x"),
    errors.InvalidInputError("k", got=0, expected=[1, 2]),
    errors.PathUnavailableError("no gds"),
    ImportError("no torch", name="torch"),
    OSError(5, "Input/output error"),
    ZeroDivisionError("division by zero"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", ANY, ids=lambda error: type(error).__name__)
def test_every_kind_of_failure_has_the_same_form(
    error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    error.add_note("noted on its way")
    code = report(error, command="search", json="-")
    said = capsys.readouterr()
    document = strict_json(said.out)
    assert (
        document["error"]["exit_code"]
        == code
        == {"InvalidInputError": 2, "PathUnavailableError": 3, "KeyboardInterrupt": 130}.get(
            type(error).__name__, 1
        )
    )
    assert "noted on its way" in document["error"]["message"]
    assert said.err.count("\n") == 1
    assert "noted on its way" in said.err


@pytest.mark.parametrize("where", ["no/x.json", "", "dir", "file/x.json", "/proc/x.json"])
def test_a_file_that_cannot_be_written_is_told_before_the_work_and_once(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the command; beside wrong usage, which is another thing."""
    monkeypatch.chdir(tmp_path)
    Path("dir").mkdir()
    Path("file").touch()
    for command in (
        ["search", "nowhere", "x"],
        ["bench", "io"],
        ["generate", "--model", "m", "--storage", "s"],
        ["doctor"],
    ):
        assert main([*command, "--json", where]) == 1
        said = capsys.readouterr()
        assert (said.out, said.err.count("\n")) == ("", 1), said.err
        assert said.err.startswith("espnx: error: cannot write JSON in ")
        assert said.err.endswith("Fix: name another file after --json\n")
    assert main(["search", "--nprob", "3", "--json", where]) == 2
    said = capsys.readouterr()
    assert "the following arguments are required" in said.err
    assert "cannot write JSON" in said.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dir", "file"]


def test_what_the_check_and_the_result_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that is there already stays until the result takes its place, also behind a link; a
    device is written to, not replaced."""
    monkeypatch.chdir(tmp_path)
    old, link = tmp_path / "old.json", tmp_path / "link.json"
    old.write_text("old")
    link.symlink_to(old)
    assert main(["bench", "clean", "--path", "nowhere", "--json", "/dev/null"]) == 2
    assert main(["bench", "ls", "--json", "/dev/null"]) == 0
    assert not Path("/dev/null").is_file()
    check_json(str(link))
    assert old.read_text() == "old"
    assert main(["bench", "ls", "--json", str(link)]) == 0
    assert link.is_symlink()
    strict_json(old.read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "old.json"]


def test_a_file_that_becomes_unwritable_during_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "x.json"
    monkeypatch.setattr("espnx.cli.commands.bench._cases_table", lambda: str(target.mkdir()))
    assert main(["bench", "ls", "--json", str(target)]) == 1
    assert capsys.readouterr().err.count("cannot write JSON") == 1


@pytest.mark.parametrize(
    "words", [["doctor"], ["env"], ["bench", "ls"], ["bench", "clean"]], ids=" ".join
)
def test_results_that_no_other_test_looks_at(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("espnx.cli.commands.machine.env.torch_facts", dict)  # a process of its own
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--json", "-"]) == 0
    strict_json(capsys.readouterr().out)
