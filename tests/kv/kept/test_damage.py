"""Kept caches whose files are damaged, or belong to another model: a typed error that says what and
where, never other tokens."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from espnx import errors
from espnx.cli.main import main
from espnx.integrations.transformers.cache import KVCache
from espnx.integrations.transformers.enable import enable_kv_cache
from espnx.kv.kept.library import entries, remove, verify
from espnx.kv.kept.state import _segments
from tests.integrations.transformers.forks import LENGTHS, go_on, inputs, wanted
from tests.integrations.transformers.tiny import enabled, generate, make
from tests.retrieval.common import memory_folder

LONGEST = max(LENGTHS)
DAMAGE = (errors.ChecksumError, errors.FormatError, errors.TruncatedFileError)


@pytest.fixture(scope="module")
def whole() -> Iterator[Path]:
    """A sound cache of two directories, the first sequence kept as X."""
    with memory_folder() as path:
        with KVCache(
            enabled("llama").config, [path / "a", path / "b"], name="c", x_rows=1, spill_interval=8
        ) as cache:
            go_on("llama", cache, until=9)
        yield path


@pytest.fixture
def storage(folder: Path, whole: Path) -> list[Path]:
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    return [folder / "a", folder / "b"]


def found(storage: list[Path]) -> errors.StorageError | None:
    """What `verify` says, None: nothing. Opening and going on says the same, or, where blocks
    nobody asks for are damaged, all is right."""
    said = None
    try:
        assert verify(storage, "c") > 0
    except DAMAGE as error:
        said = error
    try:
        with KVCache(enabled("llama").config, storage, name="c") as cache:
            go_on("llama", cache)
    except DAMAGE:
        if said is None:
            raise  # verify saw nothing, and reading did
    return said


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def test_a_sound_cache(storage: list[Path]) -> None:
    assert found(storage) is None


def spots(size: int) -> list[int]:
    """Both ends, and forty between them."""
    return sorted({0, 1, size - 2, size - 1, *range(0, size, max(1, size // 40))})


@pytest.mark.parametrize("kind", ["MANIFEST.json", "state"])
def test_a_flipped_bit_in_what_is_not_rows(storage: list[Path], kind: str) -> None:
    """Of the manifest all that is not white space; of the state (tables, checksums, rows in memory,
    tokens) everything."""
    (path,) = [path for path in (storage[0] / "c").iterdir() if path.name.startswith(kind)]
    sound = path.read_bytes()
    fields = (
        [sound.find(f'"{name}"'.encode()) for name in json.loads(sound)]
        if kind == "MANIFEST.json"
        else []
    )
    for at in [*spots(len(sound)), *(at + skip for at in fields for skip in (1, 4))]:
        if sound[at : at + 1].isspace():
            continue
        flip(path, at, at % 7)
        with pytest.raises(DAMAGE) as caught:
            verify(storage, "c")
        assert caught.value.path in (str(path), str(storage[0] / "c")), at
        with pytest.raises(DAMAGE):
            KVCache(enabled("llama").config, storage, name="c")
        path.write_bytes(sound)
    assert found(storage) is None


@pytest.mark.parametrize("device", [0, 1])
def test_a_flipped_bit_in_every_block(storage: list[Path], device: int) -> None:
    """The error says which file, which place in it and which layer."""
    path = storage[device] / "c" / "rows.bin"
    sound, layers = path.read_bytes(), set[str]()
    is_used = [False] * (len(sound) // 4096)
    with KVCache(enabled("llama").config, storage, name="c") as cache:
        for place in (cache.store.striped.place(each) for each in _segments(cache.store, device)):
            for block in range(
                place.offset_bytes // 4096, (place.offset_bytes + place.size_bytes) // 4096
            ):
                is_used[block] = True
    assert sum(is_used) > len(is_used) // 2
    for block in range(0, len(sound), 4096):
        at = block + (block * 7919) % 4096
        flip(path, at, at % 8)
        if not is_used[block // 4096]:
            verify(storage, "c")
            path.write_bytes(sound)
            continue
        with pytest.raises(errors.ChecksumError, match=r"(X|K and V) of layer [01]") as caught:
            verify(storage, "c")
        layers.add(str(caught.value).split(" in ")[0])
        assert caught.value.path == str(path)
        assert caught.value.offset_bytes is not None
        assert (
            caught.value.offset_bytes
            <= at
            < caught.value.offset_bytes + (caught.value.size_bytes or 4096)
        )
        path.write_bytes(sound)
    assert len(layers) == 4 if device == 0 else layers
    flip(path, 4096 * is_used.index(True) + 5)
    with (
        pytest.raises(errors.ChecksumError) as caught,
        KVCache(enabled("llama").config, storage, name="c") as cache,
    ):
        go_on("llama", cache)
    assert caught.value.path == str(path)


@pytest.mark.parametrize("kind", ["MANIFEST.json", "state", "rows.bin"])
@pytest.mark.parametrize("left", [0.0, 0.5, 1.0])
def test_files_that_are_cut_short(storage: list[Path], kind: str, left: float) -> None:
    (path,) = [path for path in (storage[0] / "c").iterdir() if path.name.startswith(kind)]
    data = path.read_bytes()
    cut = min(int(left * len(data)), len(data.rstrip()) - 1)
    path.write_bytes(data[:cut])
    with pytest.raises(DAMAGE) as caught:
        verify(storage, "c")
    assert caught.value.path == str(path)
    with pytest.raises(DAMAGE):
        KVCache(enabled("llama").config, storage, name="c")
    remove(storage, "c")
    with KVCache(enabled("llama").config, storage, name="c", x_rows=0) as cache:
        go_on("llama", cache)


@pytest.mark.parametrize(("kind", "device"), [("state", 0), ("rows.bin", 0), ("rows.bin", 1)])
def test_files_that_are_gone(storage: list[Path], kind: str, device: int) -> None:
    (path,) = [path for path in (storage[device] / "c").iterdir() if path.name.startswith(kind)]
    path.unlink()
    with pytest.raises(errors.StorageError) as caught:
        verify(storage, "c")
    assert caught.value.path == str(path)
    with pytest.raises(errors.StorageError):
        KVCache(enabled("llama").config, storage, name="c")


def test_blocks_of_another_place(storage: list[Path]) -> None:
    """Whole blocks, each with a checksum that is right somewhere else."""
    path = storage[0] / "c" / "rows.bin"
    data = path.read_bytes()
    path.write_bytes(data[4096:8192] + data[:4096] + data[8192:])
    assert isinstance(found(storage), errors.ChecksumError)


def test_files_of_another_save(storage: list[Path], folder: Path) -> None:
    """A manifest with the state of an older one."""
    older = next((storage[0] / "c").glob("state-*"))
    data = older.read_bytes()
    with KVCache(enabled("llama").config, storage, name="c") as cache:
        go_on("llama", cache, until=12)
    assert not older.exists()
    newer = next((storage[0] / "c").glob("state-*"))
    newer.write_bytes(data)
    with pytest.raises(errors.ChecksumError, match="state"):
        KVCache(enabled("llama").config, storage, name="c")


def rewrite(storage: list[Path], change: Callable[[dict[str, Any]], None]) -> None:
    """A manifest whose own checksum is right."""
    path = storage[0] / "c" / "MANIFEST.json"
    fields = json.loads(path.read_text())
    del fields["checksum"]
    change(fields)
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    path.write_text(
        json.dumps(
            fields | {"checksum": "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()}
        )
    )


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"version": 2}, "version"),
        ({"version": 0}, "version"),
        ({"byte_order": "big"}, "byte order"),
        ({"magic": "espnx-store"}, "kind"),
        ({"n_layers": 3}, "rows of all 3 layers"),
        ({"devices": 3}, "number of directories"),
    ],
)
def test_another_format(storage: list[Path], change: dict[str, Any], match: str) -> None:
    rewrite(storage, lambda fields: fields.update(change))
    with pytest.raises(errors.FormatError, match=match) as caught:
        KVCache(enabled("llama").config, storage, name="c")
    assert str(storage[0] / "c") in str(caught.value.path)
    further = [word for path in storage[1:] for word in ("--storage", str(path))]
    assert main(["cache", "verify", str(storage[0]), "c", *further]) == 1


def changed(*, name: str = "model.layers.1.self_attn.k_proj.weight", **options: Any) -> Any:
    """The usual model, but for one value of a weight, or for some options."""
    model = make("llama", **options)
    if not options:
        with torch.no_grad():
            model.get_parameter(name)[-1, -1] += 2.0**-10
    return enable_kv_cache(model)


def trained(name: str) -> Any:
    """But for all values of one weight."""
    model = make("llama")
    with torch.no_grad():
        model.get_parameter(name).mul_(1 + 2.0**-12)
    return enable_kv_cache(model)


OTHERS: list[tuple[Callable[[], Any], str]] = [
    (lambda: changed(), "model.layers.1.self_attn.k_proj.weight"),
    (lambda: changed(name="model.embed_tokens.weight"), "model.embed_tokens.weight"),
    (
        lambda: changed(name="model.layers.0.self_attn.v_proj.weight"),
        "model.layers.0.self_attn.v_proj.weight",
    ),
    (lambda: trained("model.layers.0.mlp.down_proj.weight"), "model.layers.0.mlp.down_proj.weight"),
    (
        lambda: trained("model.layers.0.self_attn.o_proj.weight"),
        "model.layers.0.self_attn.o_proj.weight",
    ),
    (
        lambda: trained("model.layers.1.input_layernorm.weight"),
        "model.layers.1.input_layernorm.weight",
    ),
    (lambda: changed(rope_theta=5000.0), "config"),
    (lambda: changed(rms_norm_eps=1e-3), "config"),
    (lambda: changed(dtype=torch.bfloat16), "dtype"),
    (lambda: enabled("qwen2"), "model"),
]


@pytest.mark.parametrize("number", range(len(OTHERS)))
def test_another_model(storage: list[Path], number: int) -> None:
    """Before a token is computed, and again if it is tried again. The cache is as it was."""
    model, key = OTHERS[number][0](), OTHERS[number][1]
    with KVCache(model.config, storage, name="c") as cache:
        for _ in range(2):
            with pytest.raises(
                errors.ForeignFileError, match=rf"another model \({re.escape(key)}\)"
            ) as caught:
                model(input_ids=torch.ones(2, 1, dtype=torch.long), past_key_values=cache)
            assert caught.value.path == str(storage[0] / "c")
            assert cache.get_seq_length() == LONGEST + 8
    assert found(storage) is None


def test_another_depth(storage: list[Path]) -> None:
    with pytest.raises(errors.ForeignFileError, match="number of layers"):
        KVCache(make("llama", num_hidden_layers=3).config, storage, name="c")


def test_the_same_model_elsewhere(storage: list[Path], tmp_path: Path) -> None:
    """From a folder, with another head for its tokens: K and V are the same."""
    model = make("llama")
    model.save_pretrained(tmp_path / "model")
    again = enable_kv_cache(type(model).from_pretrained(tmp_path / "model", dtype=torch.float32))
    with torch.no_grad():
        again.lm_head.weight.mul_(2)
    said = inputs(wanted("llama")[:, : LONGEST + 9])
    with KVCache(again.config, storage, name="c") as cache:
        assert torch.equal(
            generate(again, said, cache, max_new_tokens=9), wanted("llama")[:, : LONGEST + 18]
        )


def test_a_link_in_place_of_a_file(storage: list[Path], folder: Path) -> None:
    """An archive may hold links: what is written must not go where they lead, nor what they lead to
    be removed."""
    (folder / "victim").write_text("mine")
    for name in ("rows.bin", "LOCK", "LAST_USED", "PART", "MANIFEST.json.new"):
        path = storage[0] / "c" / name
        aside = path.read_bytes() if path.exists() else None
        path.unlink(missing_ok=True)
        path.symlink_to(folder / "victim")
        for call in (
            lambda: verify(storage, "c"),
            lambda: KVCache(enabled("llama").config, storage, name="c"),
        ):
            with pytest.raises((errors.FormatError, errors.WriteError)):
                call()
        path.unlink()
        if aside is not None:
            path.write_bytes(aside)
    shutil.move(storage[0] / "c", folder / "elsewhere")
    (storage[0] / "c").symlink_to(folder / "elsewhere")
    for call in (
        lambda: remove(storage, "c"),
        lambda: KVCache(enabled("llama").config, storage, name="c"),
    ):
        with pytest.raises(errors.StorageError):
            call()
    assert (folder / "victim").read_text() == "mine"
    assert (folder / "elsewhere" / "MANIFEST.json").exists()


@pytest.mark.parametrize("make_other", [lambda path: path.symlink_to(path), os.mkfifo, os.mkdir])
def test_something_else_in_place_of_the_lock_file(
    storage: list[Path], make_other: Callable[[Path], None]
) -> None:
    """The error says so, and how to go on; a list waits for nobody."""
    lock = storage[0] / "c" / "LOCK"
    lock.unlink()
    make_other(lock)
    assert [entry.name for entry in entries(storage)] == ["c"]
    for call in (
        lambda: verify(storage, "c"),
        lambda: remove(storage, "c"),
        lambda: KVCache(enabled("llama").config, storage, name="c"),
    ):
        with pytest.raises(errors.FormatError, match="lock file is not a plain file") as raised:
            call()
        assert "remove it" in str(raised.value)
    lock.rmdir() if lock.is_dir() else lock.unlink()
    assert verify(storage, "c") > 0


def test_a_copy_of_the_first_folder_alone(storage: list[Path], folder: Path) -> None:
    """It names rows that are the original's: it is refused, and removing it removes nothing of the
    original."""
    with KVCache(enabled("llama").config, storage, name="c") as cache:
        go_on("llama", cache, until=10)
    shutil.copytree(storage[0], folder / "copy")
    with pytest.raises(errors.ForeignFileError, match="copy"):
        KVCache(enabled("llama").config, [folder / "copy", storage[1]], name="c")
    remove([folder / "copy", storage[1]], "c")
    assert not (folder / "copy" / "c").exists()
    assert found(storage) is None


def test_one_directory_named_twice(folder: Path) -> None:
    with pytest.raises(errors.InvalidInputError, match="each of them once"):
        KVCache(enabled("llama").config, [folder / "a", folder / "x" / ".." / "a"], name="c")


def test_somebodys_files_beside(storage: list[Path]) -> None:
    """Also files whose names begin as ours do."""
    for name in ("state-of-the-art.pdf", "MANIFEST.jsonl", "thesis.tex"):
        (storage[0] / "c" / name).write_text("mine")
    with KVCache(enabled("llama").config, storage, name="c") as cache:
        go_on("llama", cache, until=10)
    remove(storage, "c")
    assert sorted(path.name for path in (storage[0] / "c").iterdir()) == [
        "MANIFEST.jsonl",
        "state-of-the-art.pdf",
        "thesis.tex",
    ]
