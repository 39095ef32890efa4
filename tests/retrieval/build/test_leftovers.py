"""What a build that fails, or a path that was mistyped, leaves behind: nothing, unless there is
something to continue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import espnx
from espnx import errors
from espnx.integrations.flexgen.tensor_file import TensorFile
from espnx.kv.cache import SsdCache
from espnx.kv.kept.folders import KeptName
from tests.retrieval.common import D_CLS, DIM, build, check_store, corpus

DOCUMENTS = corpus(40)


def _broken() -> Iterator[espnx.Document]:
    yield from DOCUMENTS[:20]
    raise errors.InvalidInputError("line 21 of a corpus")


def _interrupted() -> Iterator[espnx.Document]:
    yield from DOCUMENTS[:20]
    raise KeyboardInterrupt


FAILURES: dict[str, tuple[Any, dict[str, Any]]] = {
    "a bad document": (_broken, {}),
    "a bad first document": (lambda: ["no document"], {}),
    "too little memory": (lambda: DOCUMENTS, {"memory": "1MiB"}),
    "interrupted before anything is on disk": (_interrupted, {}),
    "wrong options": (lambda: DOCUMENTS, {"pca": DIM + 1}),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", ["new", "empty", "a store"])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failed_build_leaves_nothing(tmp_path: Path, failure: str, place: str) -> None:
    documents, options = FAILURES[failure]
    if place == "empty":
        (tmp_path / "s").mkdir()
        (tmp_path / "data").mkdir()
    elif place == "a store":
        build(tmp_path / "s", DOCUMENTS, directories=[tmp_path / "data"])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((errors.InvalidInputError, KeyboardInterrupt)):
        build(
            tmp_path / "s",
            documents(),
            replace=True,
            **{"directories": [tmp_path / "data"], **options},
        )
    assert sorted(tmp_path.rglob("*")) == before
    if place == "a store":
        check_store(tmp_path / "s", DOCUMENTS)


def test_what_can_be_gone_on_with_stays_and_the_error_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("espnx.retrieval.build.builder.CHECKPOINT_S", 0.0)
    monkeypatch.setattr("espnx.retrieval.build.builder.BATCH_DOCUMENTS", 5)
    with pytest.raises(KeyboardInterrupt) as caught:
        build(tmp_path / "s", _interrupted())
    assert caught.value.__notes__ == [
        f"20 documents are kept in {tmp_path / 's/building'}: the same build continues with them"
    ]
    steps: list[tuple[str, int, int | None]] = []
    report = build(tmp_path / "s", DOCUMENTS, progress=lambda *step: steps.append(step))
    assert report.resumed_documents == 20
    assert ("confirm", 20, 20) in steps
    assert ("spool", 20, 40) in steps, "counted from what is there"


def _keep(directory: Path) -> object:
    return KeptName([str(directory)], "name")


CALLS: dict[str, Callable[[Path], object]] = {
    "build": lambda path: espnx.build(path, DOCUMENTS, dims=(D_CLS, DIM)),
    "data of a build": lambda path: espnx.build(
        path.parents[1] / "s", DOCUMENTS, dims=(D_CLS, DIM), directories=[path]
    ),
    "train": lambda path: espnx.train(path, DOCUMENTS, dims=(D_CLS, DIM)),
    "rows": lambda path: SsdCache(path, 1),
    "a kept cache": _keep,
    "FlexGen": lambda path: TensorFile(path),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_mistyped_mount_point_is_no_new_directory(tmp_path: Path, call: str) -> None:
    with pytest.raises(
        errors.InvalidInputError,
        match=r"got no directory .*nvme_typo; .*is the drive mounted\?.*mkdir -p .*nvme_typo",
    ):
        CALLS[call](tmp_path / "nvme_typo" / "x")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "nvme").mkdir()
    CALLS[call](tmp_path / "nvme" / "x")
    assert (tmp_path / "nvme" / "x").is_dir(), "the last part is made"
