"""FlexGen on espnx's disk says what it says on its own, whatever its policy puts there; a disk that
fails is a typed error."""

from __future__ import annotations

import errno
import gc
import itertools
import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flexgen")

from flexgen import flex_opt, pytorch_backend
from flexgen.timer import timers

from espnx import errors
from espnx.integrations.flexgen import disk as flexgen
from espnx.integrations.flexgen import tensor_file as flexgen_store
from espnx.integrations.flexgen.tensor_file import TensorFile
from espnx.storage import FaultRule, FaultyEngine
from tests.integrations.transformers.tiny import make
from tests.storage.common import open_descriptors, patiently

PAGE = Path(__file__).resolve().parents[2] / "docs" / "flexgen-lm-eval.md"
PAD, NEW = 1, 9
LENGTHS = [37, 20, 5, 37]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few tokens fill blocks, and few blocks transfers: a row of a cache is 512 or 1024
    bytes here."""
    monkeypatch.setattr(flexgen_store, "_BLOCK_BYTES", 4096)
    monkeypatch.setattr(flexgen_store, "_PIECE_BYTES", 2 * 4096)
    timers("generate").reset()  # what another test's failure left running


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    path = tmp_path_factory.mktemp("weights")
    sizes = {
        "hidden_size": 128,
        "word_embed_proj_dim": 128,
        "ffn_dim": 512,
        "num_attention_heads": 4,
    }
    return flexgen.convert(make("opt", pad_token_id=PAD, **sizes), path), str(path)


def prompts() -> np.ndarray:
    ids = np.random.default_rng(0).integers(3, 97, (len(LENGTHS), max(LENGTHS)))
    for row, length in zip(ids, LENGTHS, strict=True):
        row[: max(LENGTHS) - length] = PAD
    return ids


def generate(weights: tuple[Any, str], disk: Any, **policy: Any) -> np.ndarray:
    config, path = weights
    with torch.no_grad():
        model = flex_opt.OptLM(
            config, flexgen.environment(disk), path, flexgen.policy(**{"batch": 4} | policy)
        )
        return model.generate(prompts(), max_new_tokens=NEW)


def expected(weights: tuple[Any, str], folder: Path, **policy: Any) -> np.ndarray:
    """With FlexGen's own disk."""
    disk = pytorch_backend.TorchDisk(str(folder / "theirs"))
    try:
        return generate(weights, disk, **policy)
    finally:
        disk.close_copy_threads()
        shutil.rmtree(folder / "theirs")


POLICIES: dict[str, dict[str, Any]] = {
    "all": {},
    "half": {"cache_disk_percent": 50},
    "a quarter beside the GPU's": {
        "cache_disk_percent": 25,
        "cache_gpu_percent": 50,
        "cache_cpu_percent": 25,
    },
    "two batches": {"batch": 2, "batches": 2},
    "attention on the CPU": {"cpu_cache_compute": True},
    "both devices attend": {
        "cpu_cache_compute": True,
        "cache_disk_percent": 50,
        "cache_gpu_percent": 50,
        "cache_cpu_percent": 0,
    },
    "4 bits": {"compress_cache": True, "cpu_cache_compute": True},
    "weights too": {"w_gpu_percent": 30, "w_cpu_percent": 20},
    "one layer": {"sep_layer": False},
}


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")  # FlexGen's own disk, 4 bits
@pytest.mark.parametrize("name", POLICIES)
def test_tokens_are_flexgens(folder: Path, weights: tuple[Any, str], name: str) -> None:
    with flexgen.EspnxDisk(folder / "ours") as disk:
        got = generate(weights, disk, **POLICIES[name])
        gc.collect()
        stats = disk.stats()
    assert np.array_equal(got, expected(weights, folder, **POLICIES[name]))
    assert len(np.unique(got[:, max(LENGTHS) :])) > 5
    assert stats["bytes_written"] > 0
    assert stats["bytes_asked"] > 0
    assert stats["stored_bytes"] == 0
    assert not list((folder / "ours").iterdir())


def test_without_overlap(folder: Path, weights: tuple[Any, str]) -> None:
    """FlexGen's loop does not wait then, and its own disk would race; activations on disk need it,
    too."""
    wanted = expected(weights, folder)
    for more in ({}, {"act_gpu_percent": 0}):
        with flexgen.EspnxDisk(folder, overlap=False) as disk:
            assert np.array_equal(generate(weights, disk, overlap=False, **more), wanted)


def test_the_tokens_are_transformers(folder: Path, tmp_path: Path) -> None:
    """Not FlexGen alone: the model that was converted says the same, in the precision of its
    prefill."""
    sizes = {
        "hidden_size": 128,
        "word_embed_proj_dim": 128,
        "ffn_dim": 512,
        "num_attention_heads": 4,
    }
    model = make("opt", pad_token_id=PAD, **sizes).half().float()
    ids = torch.from_numpy(prompts())
    said = model.generate(
        ids,
        attention_mask=(ids != PAD).long(),
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=PAD,
    )
    with flexgen.EspnxDisk(folder) as disk:
        got = generate((flexgen.convert(model, tmp_path), str(tmp_path)), disk)
    # float16 may turn a close choice
    assert float((torch.from_numpy(got) == said).float().mean()) > 0.95


@pytest.mark.parametrize(
    ("rule", "error"),
    [
        (FaultRule(operation="read", nth=3, count=1), errors.ReadError),
        (FaultRule(operation="read", fault="flip", value=5, nth=4, count=1), errors.ChecksumError),
        (FaultRule(operation="read", fault="stale", nth=2, count=1), errors.ChecksumError),
        (FaultRule(operation="write", nth=3, count=1), errors.WriteError),
        (FaultRule(operation="write", nth=2, count=1, value=errno.ENOSPC), errors.DiskFullError),
        (FaultRule(operation="read", fault="never", nth=2, count=1), errors.DeadlineExceededError),
        (FaultRule(operation="allocate", count=4, value=errno.ENOSPC), errors.DiskFullError),
    ],
    ids=lambda value: (
        f"{value.operation}-{value.fault}-{value.value}"
        if isinstance(value, FaultRule)
        else value.__name__
    ),
)
def test_a_failing_disk(
    folder: Path, weights: tuple[Any, str], rule: FaultRule, error: type[Exception]
) -> None:
    """The error comes out of `generate`, and the disk then goes on."""
    wanted = expected(weights, folder)

    def attempt(deadline_s: float) -> bool:
        engine = FaultyEngine([rule], poison=True)
        try:
            with flexgen.EspnxDisk(folder, engine=engine, deadline_s=deadline_s) as disk:
                with pytest.raises(error):
                    generate(weights, disk)
                assert engine.stats().fault_hits
                assert np.array_equal(generate(weights, disk), wanted)
                gc.collect()
                assert disk.stats()["stored_bytes"] == 0
        finally:
            engine.close(grace_s=0.1)
        return True

    patiently(attempt, 0.25 if rule.fault == "never" else 30.0)


def test_what_is_refused(folder: Path, weights: tuple[Any, str], tmp_path: Path) -> None:
    with (
        flexgen.EspnxDisk(folder) as disk,
        pytest.raises(errors.InvalidInputError, match="sparsity"),
    ):
        generate(weights, disk, attn_sparsity=0.5, cpu_cache_compute=True)
    with pytest.raises(errors.InvalidInputError, match="cache_percent"):
        flexgen.policy(2, cache_percent=3)
    for model in (make("llama"), make("opt")):
        with pytest.raises(errors.InvalidInputError, match="OPT"):
            flexgen.convert(model, tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(errors.WriteError):
        flexgen.EspnxDisk(tmp_path / "file")
    with pytest.raises(errors.DiskFullError):
        flexgen.EspnxDisk(tmp_path, reserve_bytes=1 << 43)


def test_nothing_stays_open(folder: Path) -> None:
    before = open_descriptors()
    closed = flexgen.EspnxDisk(folder)
    tensor = closed.allocate((5, 2, 4), np.float16)
    for _ in range(2):
        closed.close()
    tensor.delete()
    with pytest.raises(errors.EngineClosedError):
        closed.allocate((5, 2, 4), np.float16)
    with pytest.raises(errors.EngineClosedError):
        closed.synchronize()
    forgotten = flexgen.EspnxDisk(folder)
    pytorch_backend.global_disk_device = None
    del forgotten
    gc.collect()
    assert open_descriptors() <= before
    assert "cuda" not in vars(torch.Tensor)


SHAPES = [
    (1,),
    (300,),
    (5, 3),
    (70, 2, 8),
    (33, 4, 100),
    (9, 3000),
    (41, 1, 1, 7),
    (0, 4),
    (4, 0),
    (2, 5000, 1),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_slices_as_in_memory(folder: Path, shape: tuple[int, ...]) -> None:
    """Random assignments and reads beside a tensor in memory."""
    generator = np.random.default_rng(sum(shape))
    store = TensorFile(folder)
    for dtype in (torch.float16, torch.uint8, torch.float32):
        known, array = torch.zeros(shape, dtype=dtype), store.allocate(shape, dtype)
        for turn in range(40):
            bounds = [
                sorted(generator.integers(0, n + 1, 2).tolist())
                if generator.random() < 0.6
                else [0, n]
                for n in shape
            ]
            index = tuple(itertools.starmap(slice, bounds))[
                : int(generator.integers(1, len(shape) + 1))
            ]
            if turn % 2:
                values = torch.from_numpy(generator.integers(1, 200, known[index].shape)).to(
                    torch.float32
                )
                known[index] = values.to(dtype)
                store.write(array, index, values)
            target = torch.full_like(known[index], 7)
            store.read(array, index, target)
            assert torch.equal(target, known[index]), (turn, index)
        store.flush(array)
        whole = torch.full(shape, 7.0)
        store.read(array, None, whole)
        assert torch.equal(whole, known.float())
        store.free(array)
    assert store.stored_bytes == 0
    store.close()


def test_rows_that_are_appended_are_written_once(folder: Path) -> None:
    store = TensorFile(folder)
    array = store.allocate((64, 8, 32), torch.float16)  # 512 bytes a row, 8 rows a block
    for row in range(64):
        store.write(array, (slice(row, row + 1), slice(0, 8)), torch.full((1, 8, 32), float(row)))
    store.flush(array)
    assert store.bytes_written == 64 * 512
    target = torch.empty(3, 8, 32)
    store.read(array, (slice(15, 18),), target)
    assert target[:, 0, 0].tolist() == [15.0, 16.0, 17.0]
    assert store.bytes_asked == 2 * 4096
    store.close()


def test_a_write_that_failed_leaves_no_rows(folder: Path) -> None:
    """Appended rows stay in memory until they are on disk; rows of a failed transfer are an error,
    never old rows."""
    with FaultyEngine([FaultRule(operation="write", nth=2, count=1)]) as engine:
        store = TensorFile(folder, engine=engine)
        array = store.allocate((16, 1024), torch.float16)  # two rows a block
        store.write(array, (slice(0, 4),), torch.ones(4, 1024))
        with pytest.raises(errors.WriteError):
            store.write(array, (slice(0, 4),), torch.full((4, 1024), 2.0))
        with pytest.raises(errors.ChecksumError):
            store.read(array, (slice(0, 4),), torch.empty(4, 1024))
        store.close()
    with FaultyEngine([FaultRule(operation="write", nth=1, count=1)]) as engine:
        store = TensorFile(folder, engine=engine)
        array = store.allocate((16, 1024), torch.float16)
        store.write(array, (slice(0, 1),), torch.full((1, 1024), 3.0))
        with pytest.raises(errors.WriteError):
            store.flush(array)
        for _ in range(2):
            target = torch.empty(2, 1024)
            store.read(array, (slice(0, 2),), target)
            assert target[:, 0].tolist() == [3.0, 0.0]
            store.flush(array)
        store.close()


@pytest.mark.parametrize(
    "index", [(slice(0, 4, 2),), (slice(0, 1),) * 3, (3,), (torch.zeros(2),)], ids=str
)
def test_indices_that_are_refused(folder: Path, index: Any) -> None:
    store = TensorFile(folder)
    array = store.allocate((5, 6), torch.float16)
    with pytest.raises(errors.InvalidInputError):
        store.read(array, index, torch.empty(1, 6))
    with pytest.raises(errors.InvalidInputError):
        store.write(array, (slice(0, 2),), torch.empty(1, 6))
    store.close()


def test_the_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the module and of the documentation, as they stand."""
    monkeypatch.chdir(tmp_path)
    (shown,) = re.findall(r"For example::\n\n(.*?)\n\S", flexgen.__doc__ or "", re.DOTALL)
    names: dict[str, Any] = {}
    exec(textwrap.dedent(shown), names)
    assert names["tokens"].shape == (2, 8)
    (text,) = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    exec(text, names)
    assert not list((tmp_path / "cache").iterdir())
