"""``espnx cache ls | verify | rm`` from the outside: exit codes, tables, JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from espnx.cli.main import main
from espnx.integrations.transformers.cache import KVCache
from tests.cli.documents import strict_json
from tests.integrations.transformers.tiny import enabled, generate, prompt


def run(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    return code, *capsys.readouterr()


def keep(storage: Path | list[Path], name: str) -> None:
    with KVCache(enabled("llama").config, storage, name=name, x_rows=0) as cache:
        generate(enabled("llama"), prompt([20, 9]), cache, max_new_tokens=2)


def test_ls(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "cache", "ls", folder)
    assert (code, len(out.splitlines())) == (0, 1)
    assert strict_json(run(capsys, "cache", "ls", folder, "--json", "-")[1])["caches"] == []
    keep(folder, "first")
    keep(folder, "second")
    (folder / "first" / "MANIFEST.json").write_text("{}")
    with KVCache(enabled("llama").config, folder, name="second"):
        code, out, err = run(capsys, "cache", "ls", folder)
        assert (code, err) == (0, "")
        assert out.splitlines()[0].split() == [
            "name",
            "model",
            "sequences",
            "tokens",
            "size",
            "last",
            "used",
            "open",
        ]
        assert [line.split()[:4] for line in out.splitlines()[1:]] == [
            ["first", "damaged", "0", "0"],
            ["second", "LlamaForCausalLM", "2", "21"],
        ]
        assert [line.split()[-1] for line in out.splitlines()[1:]] == ["no", "yes"]
        target = folder / "ls.json"
        assert run(capsys, "cache", "ls", folder, "--json", target)[1] == out
    found = strict_json(target.read_text())
    assert (found["schema_version"], found["command"]) == (1, "cache ls")
    assert [
        (each["name"], each["model"], each["tokens"], each["is_open"]) for each in found["caches"]
    ] == [("first", "damaged", 0, False), ("second", "LlamaForCausalLM", 21, True)]
    assert all(each["size_bytes"] > 0 and each["last_used_s"] > 0 for each in found["caches"])


def test_verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that is damaged or missing does not keep the others from being checked."""
    keep(folder, "a")
    keep(folder, "b")
    code, out, _ = run(capsys, "cache", "verify", folder, "a", "b")
    assert code == 0
    assert [line.split(":")[0] for line in out.splitlines()] == ["a", "b"]
    assert out.count("every checksum right") == 2
    rows = folder / "a" / "rows.bin"
    data = bytearray(rows.read_bytes())
    data[4097] ^= 1
    rows.write_bytes(data)
    code, out, _ = run(capsys, "cache", "verify", folder, "a", "nowhere", "b")
    assert code == 1
    damaged, missing, sound = out.splitlines()
    assert str(rows) in damaged
    assert "layer 0" in damaged
    assert "espnx cache rm" in damaged
    assert "no kept cache of that name" in missing
    assert sound.startswith("b: ")
    assert not (folder / "nowhere").exists()
    code, out, _ = run(capsys, "cache", "verify", folder, "a", "b", "--json", "-")
    found = strict_json(out)["caches"]
    assert code == 1
    assert [(each["name"], each["is_sound"], each.get("error")) for each in found] == [
        ("a", False, "ChecksumError"),
        ("b", True, None),
    ]
    assert found[1]["bytes"] > 0
    with KVCache(enabled("llama").config, folder, name="b"):
        code, out, _ = run(capsys, "cache", "verify", folder, "b")
        assert code == 1
        assert "open" in out


def test_rm(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "abcd":
        keep(folder, name)
    assert run(capsys, "cache", "rm", folder, "b", "b")[:2] == (0, "removed b\n")
    code, _, err = run(capsys, "cache", "rm", folder, "b")
    assert code == 1
    assert "no kept cache of that name" in err
    with KVCache(enabled("llama").config, folder, name="a"):
        code, _, err = run(capsys, "cache", "rm", folder, "a")
        assert code == 1
        assert "is open" in err
    assert run(capsys, "cache", "rm", folder, "--keep", "1GiB")[:2] == (0, "nothing removed\n")
    code, out, _ = run(capsys, "cache", "rm", folder, "c", "--keep", "0", "--json", "-")
    assert (code, strict_json(out)["removed"]) == (0, ["c", "d", "a"])
    assert not list(folder.iterdir())


def test_wrong_usage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is removed then."""
    keep(folder, "a")
    for words in (["rm"], ["rm", "a", "--keep", "some"], ["rm", "../a"], ["verify", "../a"]):
        assert run(capsys, "cache", words[0], folder, *words[1:])[0] == 2, words
    for words in (["ls"], ["verify", "x"], [], ["mv"], ["rm", "a", "--storage", folder]):
        assert run(capsys, "cache", *words)[0] == 2, words
    assert (folder / "a" / "MANIFEST.json").exists()
    for command in (["ls"], ["rm", "--keep", "1"], ["rm", "a"], ["verify", "a"]):
        assert run(capsys, "cache", command[0], folder / "nowhere", *command[1:])[0] == 1, command
    assert not (folder / "nowhere").exists()


def test_several_directories(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = [folder / "x", folder / "y"]
    keep(storage, "c")
    further = ["--storage", storage[1]]
    assert (
        strict_json(run(capsys, "cache", "ls", storage[0], *further, "--json", "-")[1])["caches"][
            0
        ]["directories"]
        == 2
    )
    assert run(capsys, "cache", "verify", storage[0], "c", *further)[0] == 0
    assert run(capsys, "cache", "verify", storage[0], "c")[0] == 1
    assert run(capsys, "cache", "rm", storage[0], "c")[0] == 2
    assert run(capsys, "cache", "rm", storage[0], "c", *further)[0] == 0
    assert [list(path.iterdir()) for path in storage] == [[], []]
