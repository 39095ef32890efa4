"""``ESPNX_LOG`` shows what was decided, and why: for storage, search and KV caches; without it
nothing is said."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import espnx
from espnx import log
from espnx.storage import NativeEngine
from espnx.storage.native import CPU_LEVELS
from tests.retrieval import common

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def own_logger() -> Iterator[logging.Logger]:
    """That of the package, as it is before anybody has set it up."""
    logger = logging.getLogger("espnx")
    before = logger.handlers, logger.level
    logger.handlers, logger.level = [], logging.NOTSET
    yield logger
    logger.handlers, logger.level = before
    logging.getLogger().manager._clear_cache()  # type: ignore[attr-defined]  # what levels children remember


def test_the_variable_is_followed(
    own_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(log.VARIABLE, " Debug")
    for _ in range(2):
        log.from_environment()
    logging.getLogger("espnx.storage").debug("a path was taken")
    assert len(own_logger.handlers) == 1
    assert re.search(r"^ *\d+ ms  espnx\.storage: a path was taken\n$", capsys.readouterr().err)


@pytest.mark.parametrize("word", ["", "  "])
def test_without_it_nothing_is_said(
    own_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.setenv(log.VARIABLE, word)
    log.from_environment()
    assert not own_logger.handlers
    assert not own_logger.isEnabledFor(logging.DEBUG)


def test_another_word_is_warned_of(
    own_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(log.VARIABLE, "path")
    with pytest.warns(UserWarning, match=r"ESPNX_LOG; got 'path'; expected debug, info, warning"):
        log.from_environment()
    assert not own_logger.handlers


def test_an_import_follows_it() -> None:
    code = (
        "import logging, espnx; print(logging.getLogger('espnx').level, "
        "len(logging.getLogger('espnx').handlers))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"ESPNX_LOG": "debug"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["10", "1"]


def test_storage_says_which_path_and_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "espnx")
    (tmp_path / "x").write_bytes(bytes(8192))
    with NativeEngine("posix") as engine:
        engine.open(tmp_path / "x", direct=False)
    with NativeEngine("auto") as engine:
        reason, effective = engine.fallback_reason, engine.effective
    assert "engine posix takes posix" in caplog.messages
    assert f"{tmp_path / 'x'} (r) by posix, buffered: as asked" in caplog.messages
    assert f"engine auto takes {effective}{f' ({reason})' if reason else ''}" in caplog.messages


def test_levels_of_the_processor_are_those_of_the_kernels() -> None:
    numbers = re.findall(
        r"^  k\w+ = (\d+),", (ROOT / "csrc/cpu/cpu_level.hpp").read_text(), re.MULTILINE
    )
    assert [int(number) for number in numbers] == list(range(len(CPU_LEVELS)))


def test_a_search_says_what_it_decided(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    common.build(tmp_path / "s", common.corpus(60), coarse="bit1")
    caplog.set_level(logging.DEBUG, "espnx")
    one, two = common.queries(2)
    with espnx.open(tmp_path / "s", engine="posix", coarse="ram") as index:
        index.search(one, candidates=20)
        index.search(one, candidates=20)
        index.search(one, candidates=20, prefetch_step=0.3, rerank=5)
        index.search([one, two], candidates=20)
    said = "\n".join(caplog.messages)
    assert "60 documents, records by posix" in said
    assert "first stage on cpu" in said
    assert "reads cost (given, or supposed for a small store)" in said
    assert "coarse records in memory" in said
    plans = [message for message in caplog.messages if "prefetch after" in message]
    assert (
        plans[0]
        == "queries: 1, candidates: 20, scored: 20, prefetch after no step: the first search of "
        "its kind"
    )
    assert re.search(r"prefetch after .*: \d+\.\d\d ms predicted$", plans[1])
    assert plans[2] == "queries: 1, candidates: 20, scored: 5, prefetch after (0.3,): as asked"
    assert plans[3].startswith(
        "queries: 2, candidates: 20, scored: 20, prefetch after no step: the first stages of a "
        "batch"
    )


def test_a_kv_cache_says_where_its_layers_go(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from tests.integrations.transformers.tiny import enabled, prompt

    model = enabled("llama")
    caplog.set_level(logging.DEBUG, "espnx")
    with espnx.KVCache(model.config, tmp_path / "kv") as cache:
        model.generate(**prompt([9]), past_key_values=cache, max_new_tokens=2, do_sample=False)
    assert (
        f"{len(cache.layers)} layers go to {tmp_path / 'kv'}, 0 stay in memory (windows or states)"
        in caplog.messages
    )
    assert any(
        message.startswith("0 sequences keep X instead of K and V: ") for message in caplog.messages
    )
    assert any(
        "are kept by the device ssd, computed on cpu" in message for message in caplog.messages
    )
