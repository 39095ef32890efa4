"""``espnx generate`` refuses what it cannot do right: results of another prompt or model; numbers,
lengths, files that do not fit."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from espnx.cli.main import main
from espnx.errors import EspnxError, InvalidInputError, WriteError
from espnx.integrations.generate import model_folder
from espnx.integrations.generate.generate import until_end
from espnx.integrations.generate.model_folder import model_fingerprint
from espnx.integrations.generate.prompt_files import Prompt, append, read_done, read_prompts
from espnx.integrations.transformers.forward.positions import learned_positions
from espnx.weights.safetensors_files import read_header
from tests.cli.generating import NEW, PROMPTS, check, options, results, run, save, wanted, write
from tests.integrations.transformers.tiny import VOCABULARY, make
from tests.retrieval.common import memory_folder


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    with memory_folder() as path:
        yield save(path, make("llama"))


def refuse_to_load(*args: Any) -> Any:
    raise AssertionError("the model was loaded")


def test_an_edited_prompt_is_refused(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished id whose prompt is another one now; ids that are gone, and new ones, are fine."""
    prompts, out = write(folder / "prompts.txt", PROMPTS[:3]), folder / "prompts.txt.out.jsonl"
    words = options(model, folder, prompts)
    assert run(capsys, *words)[0] == 0
    before = out.read_bytes()
    for edited in (
        [PROMPTS[0], PROMPTS[3], PROMPTS[2]],
        [PROMPTS[0], PROMPTS[1] + " w1"],
        PROMPTS[1:4],
    ):
        write(prompts, edited)
        with monkeypatch.context() as patch:
            patch.setattr(model_folder, "load_model", refuse_to_load)
            code, _, err = run(capsys, *words)
        assert (code, out.read_bytes()) == (2, before), err
        assert f"id '{2 if edited[0] == PROMPTS[0] else 1}'" in err
        assert "name another --out" in err
    write(prompts, PROMPTS[:1])
    code, said, _ = run(capsys, *words)
    assert (code, out.read_bytes()) == (0, before)
    write(prompts, PROMPTS[:4])
    code, said, _ = run(capsys, *words)
    assert code == 0
    assert "1 now, 3 before" in said
    check(results(out), ["1", "2", "3", "4"], PROMPTS[:4])


def test_results_without_digests(tmp_path: Path) -> None:
    """Of an earlier version: neither the prompt nor the model is known."""
    out = tmp_path / "out"
    for line, settings in (
        ({"id": "1", "settings": {"a": 1}}, {"a": 1}),
        (
            {"id": "1", "prompt_digest": Prompt("1", "x").digest, "settings": {"a": 1}},
            {"a": 1, "model_fingerprint": "0"},
        ),
        ({"id": ["1"], "settings": {"a": 1}}, {"a": 1}),
    ):
        out.write_text(json.dumps(line) + "\n")
        with pytest.raises(InvalidInputError, match="another --out"):
            read_done(out, settings, [Prompt("1", "x")])
    out.write_text(json.dumps({"id": "1", "settings": {}}) + "\n")
    assert read_done(out, {}, [Prompt("2", "x")]) == {"1"}


def test_what_differs_is_named_and_nothing_else(tmp_path: Path) -> None:
    out, settings = (
        tmp_path / "out",
        {"model": "m", "seed": 3, "temperature": 0.5, "format": None, "dtype": "float16"},
    )
    for found, got, expected in (
        (settings | {"seed": 1, "format": "int8"}, "seed 1, format int8", "seed 3, no format"),
        (settings | {"device": "smartssd"}, "device smartssd", "nothing of device"),
        (
            {"model": "m", "seed": 3, "temperature": 0.5, "dtype": None},
            "nothing of format, no dtype",
            "no format, dtype float16",
        ),
        (7, "settings 7", "those of this run"),
    ):
        out.write_text(json.dumps({"id": "1", "settings": found}) + "\n")
        with pytest.raises(InvalidInputError, match="another --out") as caught:
            read_done(out, settings, [Prompt("1", "x")])
        assert (caught.value.got, caught.value.expected) == (got, expected)
        assert caught.value.what == f"line 1 of {out}, a result of other settings"


def test_half_a_character(tmp_path: Path) -> None:
    """JSON can name half of a surrogate pair, which UTF-8 cannot: the id comes back as it was."""
    path, out = tmp_path / "p.jsonl", tmp_path / "out"
    path.write_text('{"id": "\\ud800", "prompt": "\\udc00"}\n')
    (prompt,) = read_prompts(path)
    append(out, [{"id": prompt.id, "prompt_digest": prompt.digest, "settings": {}}])
    assert read_done(out, {}, [prompt]) == {"\ud800"}


def test_another_model_in_the_same_folder(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained on in place: names, sizes and times may be as they were."""
    own, prompts = folder / "model", write(folder / "prompts.txt", PROMPTS[:2])
    shutil.copytree(model, own)
    words = options(own, folder, prompts)
    assert run(capsys, *words)[0] == 0
    trained = make("llama")
    with torch.no_grad():
        trained.model.layers[1].self_attn.q_proj.weight.mul_(1.5)
    trained.save_pretrained(own)
    code, _, err = run(capsys, *words)
    assert code == 2
    assert re.search(
        r"got model_fingerprint \w+; expected model_fingerprint \w+\. Fix: .* another --out\n", err
    )


def test_the_fingerprint(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for a copy; another where the config, the tokenizer or any one tensor differs, at
    whichever end."""
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    known = model_fingerprint(str(model))
    assert model_fingerprint(str(copy)) == known
    seen = {known}
    weights = copy / "model.safetensors"
    whole = bytearray(weights.read_bytes())
    tensors = read_header(weights).values()
    assert max(tensor.size_bytes for tensor in tensors) > 2 * 4096
    places = [
        at
        for tensor in tensors
        for at in (tensor.offset_bytes, tensor.offset_bytes + tensor.size_bytes - 1)
    ]
    for at in [*places, len(whole) - 1]:
        changed = bytearray(whole)
        changed[at] ^= 1
        weights.write_bytes(changed)
        seen.add(model_fingerprint(str(copy)))
    assert len(seen) == 1 + len(set(places))
    weights.write_bytes(whole)
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        kept = (copy / name).read_bytes()
        (copy / name).write_bytes(kept + b"\n")
        seen.add(model_fingerprint(str(copy)))
        (copy / name).write_bytes(kept)
    assert len(seen) == 4 + len(set(places))
    assert model_fingerprint(str(copy)) == known
    weights.write_bytes(b"no safetensors")
    assert model_fingerprint(str(copy)) not in seen
    weights.rename(copy / "pytorch_model.bin")
    pickled = model_fingerprint(str(copy))
    (copy / "pytorch_model.bin").write_bytes(b"no safetensorz")
    assert model_fingerprint(str(copy)) != pickled


@pytest.mark.parametrize(
    "bad",
    [
        ["--batch", "0"],
        ["--batch", "-1"],
        ["--batch", "1.5"],
        ["--max-new-tokens", "0"],
        ["--num-beams", "0"],
        ["--prefill-chunk", "-1"],
        ["--prefill-chunk", "0"],
        ["--seed", "9" * 30],
        ["--x-rows", "-1"],
        ["--capacity", "-4"],
        ["--capacity", "0"],
        ["--temperature", "-1"],
        ["--temperature", "nan"],
        ["--temperature", "inf"],
        ["--temperature", "hot"],
    ],
    ids="=".join,
)
def test_numbers_out_of_range(
    folder: Path, capsys: pytest.CaptureFixture[str], bad: list[str]
) -> None:
    assert (
        main(
            [
                "generate",
                "--model",
                str(folder),
                "--prompts",
                str(folder / "p"),
                "--storage",
                str(folder),
                *bad,
            ]
        )
        == 2
    )
    said = (
        rf"argument {bad[0]}: got '{re.escape(bad[1])}', expected a .*, at least [01](, at most "
        r"\d+)?\n"
    )
    assert re.search(said, capsys.readouterr().err)


def test_numbers_at_their_least(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write(folder / "prompts.txt", PROMPTS[:3])
    least = [
        "--batch",
        1,
        "--max-new-tokens",
        1,
        "--num-beams",
        1,
        "--prefill-chunk",
        1,
        "--x-rows",
        0,
        "--capacity",
        1,
        "--temperature",
        0,
    ]
    assert run(capsys, *options(model, folder, prompts), *least)[0] == 0
    found = results(folder / "prompts.txt.out.jsonl")
    assert [found[str(i + 1)]["tokens"] for i in range(3)] == [
        wanted(text)[:1] for text in PROMPTS[:3]
    ]


POSITIONS = {
    "gpt2": {"n_positions": 32},
    "opt": {"max_position_embeddings": 32},
    "llama": {"max_position_embeddings": 32},
}


@pytest.mark.parametrize("name", POSITIONS)
def test_more_tokens_than_positions(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Learned positions are all there are: a prompt that needs one more is named before anything is
    generated. Rotary ones do not end."""
    made = make(name, **POSITIONS[name])
    path, out = save(folder / "model", made), folder / "p.jsonl.out.jsonl"
    assert learned_positions(made) == (None if name == "llama" else 32)
    fitting, longer = (" ".join(["w5", "w9"] * 20)[: 3 * n] for n in (32 - NEW + 1, 32 - NEW + 2))
    words = options(path, folder, write(folder / "p.jsonl", ["w1", "w2 w3", fitting]))
    assert run(capsys, *words)[0] == 0
    assert len(results(out)) == 3
    before = out.read_bytes()
    words = options(path, folder, write(folder / "p.jsonl", ["w1", "w2 w3", fitting, "w7", longer]))
    code, _, err = run(capsys, *words)
    if name == "llama":
        assert (code, len(results(out))) == (0, 5)
        return
    assert (code, out.read_bytes()) == (2, before), err
    assert (
        f"prompt 'p4'; got {32 - NEW + 2} tokens and {NEW} new ones; expected at most the model's "
        "32 positions" in err
    )


@pytest.mark.parametrize("where", ["missing/out", "prompts.txt/out", ".", "pipe", "/proc/out"])
def test_results_that_cannot_be_written(
    model: Path,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    """Said before the model is loaded, and with what to do."""
    prompts = write(folder / "prompts.txt", PROMPTS[:1])
    os.mkfifo(folder / "pipe")
    before = sorted(os.listdir(folder))
    monkeypatch.setattr(model_folder, "load_model", refuse_to_load)
    code, _, err = run(capsys, *options(model, folder, prompts), "--out", folder / where)
    assert code == (2 if where in (".", "pipe") else 1)
    assert re.search(r"espnx: error: (cannot write )?results in .*name another --out\n", err)
    assert sorted(os.listdir(folder)) == before
    with pytest.raises(EspnxError) as caught:
        read_done(folder / where, {}, [])
    assert isinstance(caught.value, InvalidInputError if code == 2 else WriteError)


def test_a_check_leaves_nothing(folder: Path) -> None:
    """But what was there, a link to nowhere too, which stands for a file to come."""
    assert read_done(folder / "out", {}, []) == set()
    assert os.listdir(folder) == []
    (folder / "link").symlink_to(folder / "to")
    assert read_done(folder / "link", {}, []) == set()
    assert (folder / "link").is_symlink()


def test_a_full_disk(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where results go, after the first batches: a typed error, and the next run goes on."""
    prompts, out = write(folder / "prompts.txt", PROMPTS[:4]), folder / "prompts.txt.out.jsonl"
    words = [*options(model, folder, prompts), "--batch", 1]
    fsync = os.fsync

    def full(fd: int) -> None:
        if (
            out.exists()
            and os.path.samestat(os.fstat(fd), out.stat())
            and out.read_bytes().count(b"\n") == 3
        ):
            os.ftruncate(fd, os.fstat(fd).st_size - 9)
            raise OSError(errno.ENOSPC, "full")
        fsync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        code, _, err = run(capsys, *words)
    assert code == 1
    assert "cannot write results" in err
    assert "bytes free" in err
    code, said, _ = run(capsys, *words)
    assert code == 0
    assert "2 now, 2 before" in said
    check(results(out), ["1", "2", "3", "4"], PROMPTS[:4])


def test_no_such_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = write(folder / "prompts.txt", PROMPTS[:1])
    for nowhere in (folder / "nope", prompts):
        code, _, err = run(capsys, *options(nowhere, folder, prompts))
        assert code == 2
        assert (
            f"espnx: error: model in {nowhere}; got no such folder; expected a folder with model "
            "and tokenizer" in err
        )
        with pytest.raises(InvalidInputError, match="no such folder"):
            model_folder.load_model(str(nowhere), None, None)
        with pytest.raises(InvalidInputError, match="no such folder"):
            model_fingerprint(str(nowhere))
    (folder / "empty").mkdir()
    code, _, err = run(capsys, *options(folder / "empty", folder, prompts))
    assert code == 2
    assert (
        f"espnx: error: model in {folder / 'empty'}; got a folder without config.json; expected a "
        "folder with model and" in err
    )


@pytest.mark.parametrize("many", [False, True])
def test_nothing_after_the_end(
    folder: Path, capsys: pytest.CaptureFixture[str], many: bool
) -> None:
    """What a prompt gets does not depend on how long the others of its batch go on."""
    end = wanted(PROMPTS[1])[2]
    ends = (end, VOCABULARY - 1) if many else end
    made = make("llama")
    made.generation_config.update(eos_token_id=list(ends) if isinstance(ends, tuple) else ends)
    words = options(save(folder / "model", made), folder, write(folder / "prompts.txt", PROMPTS))
    assert run(capsys, *words, "--batch", 4)[0] == 0
    found = results(folder / "prompts.txt.out.jsonl")
    lengths = {len(line["tokens"]) for line in found.values()}
    assert len(lengths) > 1, "no prompt ended before the others"
    check(found, [str(i + 1) for i in range(len(PROMPTS))], eos_token_id=ends)


@pytest.mark.parametrize(
    ("tokens", "ends", "left"),
    [
        ([9, 9, 3, 0, 0, 0], 3, [9, 9, 3]),
        ([9, 3, 3], [3], [9, 3]),
        ([9, 4, 3, 0], [3, 4], [9, 4]),
        ([3], 3, [3]),
        ([9, 0, 0], 0, [9, 0]),
        ([9, 0, 3], None, [9, 0, 3]),
        ([9, 8], 3, [9, 8]),
        ([9, 8], [], [9, 8]),
        ([], 3, []),
    ],
)
def test_until_end(tokens: list[int], ends: int | list[int] | None, left: list[int]) -> None:
    assert until_end(tokens, ends) == left
