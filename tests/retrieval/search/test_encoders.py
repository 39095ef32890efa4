"""The encoder of an index and of an addition: given, described, remembered by the store, or
none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import espnx
from espnx import errors
from tests.retrieval.common import toy_encoder

TEXTS = [("a", "red green blue"), ("b", "one two three")]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    espnx.build(tmp_path / "store", TEXTS, toy_encoder())
    return tmp_path / "store"


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What was loaded by name or by description, and where to; the toy encoder stands for all."""
    seen: list[tuple[str, str]] = []

    def load(spec: str, *, device: str = "cpu", dtype: str = "fp32") -> espnx.Encoder:
        seen.append((spec, device))
        return toy_encoder()

    monkeypatch.setattr("espnx.encoders.load_encoder", load)
    monkeypatch.setattr("espnx.encoders.load_named", load)
    return seen


def test_the_one_that_the_store_remembers_is_loaded_with_the_first_text(
    store: Path, loads: list[tuple[str, str]]
) -> None:
    with espnx.open(store) as index:
        index.search(toy_encoder().encode_queries(["red"])[0])
        assert loads == []
        assert index.search("red green")[0].id == "a"
        assert index.search("two three")[0].id == "b"
        assert loads == [("toy@1", "cpu")]


def test_many_threads_load_it_once(store: Path, loads: list[tuple[str, str]]) -> None:
    ready, found = threading.Barrier(6), []
    with espnx.open(store) as index:

        def ask() -> None:
            ready.wait()
            found.append(index.search("red").hits[0].id)

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (found, len(loads)) == (["a"] * 6, 1)


def test_one_out_of_a_folder_has_to_be_named(store: Path) -> None:
    with espnx.open(store) as index:
        with pytest.raises(
            errors.InvalidInputError,
            match=r"folder is not known; got a store built with toy@1.*encoder=FOLDER",
        ):
            index.search("red")
        index.use_encoder(toy_encoder())
        assert index.search("red").hits[0].id == "a"


def test_a_store_without_one(tmp_path: Path, loads: list[tuple[str, str]]) -> None:
    vectors = toy_encoder().encode_documents([text for _, text in TEXTS])
    documents = [
        espnx.Document(name, text, vector)
        for (name, text), vector in zip(TEXTS, vectors, strict=True)
    ]
    espnx.build(tmp_path / "s", documents, dims=(toy_encoder().d_cls, toy_encoder().dim))
    with (
        espnx.open(tmp_path / "s") as index,
        pytest.raises(errors.InvalidInputError, match="documents brought their vectors"),
    ):
        index.search("red")
    with (
        espnx.open(tmp_path / "s", None) as index,
        pytest.raises(errors.InvalidInputError, match="got encoder=None"),
    ):
        index.search("red")
    with pytest.raises(errors.InvalidInputError, match="'c' has no vectors"):
        espnx.add(tmp_path / "s", [("c", "red")])
    assert loads == []


def test_a_description_stands_for_an_encoder_everywhere(
    tmp_path: Path, loads: list[tuple[str, str]]
) -> None:
    espnx.train(tmp_path / "trained", TEXTS, "toy")
    espnx.build(tmp_path / "s", TEXTS, "toy", trained=espnx.Trained.load(tmp_path / "trained"))
    espnx.add(tmp_path / "s", [("c", "red red")], Path("toy"))
    with espnx.open(tmp_path / "s", "toy") as index:
        assert len(loads) == 4, "a name that was given is looked up at once"
        assert len(index.search("red")) == 3
        index.use_encoder("toy")
    assert {spec for spec, _ in loads} == {"toy"}


def test_additions_take_what_the_store_remembers(
    tmp_path: Path, store: Path, loads: list[tuple[str, str]]
) -> None:
    vectors = toy_encoder().encode_documents(["blue"])[0]
    espnx.add(store, [espnx.Document("c", "blue", vectors)])
    assert loads == [], "nothing had to be encoded"
    espnx.add(store, [("d", "blue red")])
    espnx.build(tmp_path / "empty", [], toy_encoder())
    espnx.add(tmp_path / "empty", [("d", "blue red")])
    assert loads == [("toy@1", "cpu")] * 2


@pytest.mark.parametrize("given", [7, object(), torch.ones(2), espnx.FunctionEncoder, len])
def test_what_is_no_encoder(store: Path, tmp_path: Path, given: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: espnx.open(store, given),
        lambda: espnx.build(tmp_path / "other", TEXTS, given),
        lambda: espnx.add(store, TEXTS, given),
        lambda: espnx.train(tmp_path / "other", TEXTS, given),
    ]
    for call in calls:
        with pytest.raises(errors.InvalidInputError, match="encoder; got"):
            call()
    assert not (tmp_path / "other").exists()


def test_names_that_lead_nowhere(store: Path) -> None:
    with pytest.raises(
        errors.InvalidInputError,
        match=r"got 'colbert-ir/colbertv2.0'.*hf download colbert-ir/colbertv2.0 --local-dir",
    ):
        espnx.open(store, "colbert-ir/colbertv2.0")
    with pytest.raises(errors.InvalidInputError, match=r"got 'nowhere'.*config.json$"):
        espnx.load_encoder("nowhere")
    with pytest.raises(errors.InvalidInputError, match="encoder; got 7"):
        espnx.load_encoder(7)  # type: ignore[arg-type]


def test_another_encoder(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = espnx.FunctionEncoder(lambda texts: [], "other@1", d_cls=2, dim=2)
    monkeypatch.setattr("espnx.encoders.load_named", lambda name, **options: other)
    with espnx.open(store) as index:
        for call in (
            lambda: index.search("red"),
            lambda: index.use_encoder(other),
            lambda: espnx.add(store, [("c", "red")]),
        ):
            with pytest.raises(
                errors.InvalidInputError,
                match="built with another encoder; got other@1; expected toy@1",
            ):
                call()
