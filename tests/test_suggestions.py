"""What mistyped words were meant to be, in calls: every public function says it, and costs what it
did."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import espnx
import espnx.graph
import espnx.postings
from espnx.suggestions import CALL_FRAMES, nearest, suggests_keywords

#: Made by espnx and read by callers, or protocols; Python makes their calls.
NOT_CALLED = {"Corpus", "Encoder", "Engine", "Future", "SparseEncoder"}


def public() -> dict[str, Callable[..., Any]]:
    """By name, what takes keyword arguments that are typed by people."""
    found = dict[str, Callable[..., Any]]()
    for package in (espnx, espnx.graph, espnx.postings):
        for name in package.__all__:
            each = getattr(package, name)
            if inspect.isfunction(each) or (
                inspect.isclass(each)
                and name not in NOT_CALLED
                and not hasattr(each, "__dataclass_fields__")
            ):
                found[f"{package.__name__}.{name}"] = each
    found |= {
        f"espnx.Postings.{name}": getattr(espnx.Postings, name)
        for name in ("build", "search", "search_two_step")
    }
    return found | {
        "espnx.Index.search": espnx.Index.search,
        "espnx.graph.open.search": espnx.graph.open.search,
    }


def typed_keywords(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [
        each.name for each in parameters if each.kind == each.KEYWORD_ONLY and len(each.name) > 4
    ]


#: Of these; two hand on what they do not know, to `build` and to the model's own `generate`.
PUBLIC = {
    name: each
    for name, each in public().items()
    if typed_keywords(each) and name not in ("espnx.graph.build_private", "espnx.generate")
}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_mistyped_keyword_is_told_with_the_one_that_was_meant(name: str) -> None:
    function = PUBLIC[name]
    word = typed_keywords(function)[0]
    mistyped = word[:-2] + word[-1]
    with pytest.raises(
        TypeError, match=f"unexpected keyword argument '{mistyped}'. Did you mean '{word}'"
    ):
        function(**{mistyped: 1})


def test_the_ones_that_people_type_are_among_them() -> None:
    wanted = {
        "build",
        "open",
        "open_engine",
        "KVCache",
        "add",
        "load_encoder",
        "read_corpus",
        "load_streamed",
        "Index.search",
        "graph.build",
    }
    assert {f"espnx.{name}" for name in wanted} <= set(PUBLIC)
    for call, meant in (
        (lambda: espnx.build("s", [], fromat="int8"), "format"),  # type: ignore[call-arg]
        (lambda: espnx.open_engine(quee_depth=3), "queue_depth"),  # type: ignore[call-arg]
        (lambda: espnx.KVCache(None, spil_interval=3), "spill_interval"),  # type: ignore[arg-type, call-arg]
    ):
        with pytest.raises(TypeError, match=f"Did you mean '{meant}'"):
            call()


@suggests_keywords
def takes(a: int, *, threads: int = 1) -> int:
    """Raises TypeError of its own for a 0."""
    if a == 0:
        takes(1, thread=2)  # type: ignore[call-arg]
    if a < 0:
        (lambda: 0)(thread=1)  # type: ignore[call-arg]
    return a * threads


def test_only_the_call_itself_is_mended() -> None:
    assert takes(2, threads=3) == 6
    with pytest.raises(TypeError, match=r"takes\(\) got an unexpected keyword argument 'colour'$"):
        takes(1, colour=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        takes()  # type: ignore[call-arg]
    if sys.version_info < (3, 13):
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'thread'$"):
            takes(-1)  # what the function does with others is its own affair


def test_signatures_stay() -> None:
    assert str(inspect.signature(takes)) == "(a: 'int', *, threads: 'int' = 1) -> 'int'"
    assert takes.__doc__ == "Raises TypeError of its own for a 0."
    assert "format" in inspect.signature(espnx.build).parameters


def test_warnings_name_the_line_of_the_caller() -> None:
    @suggests_keywords
    def warns() -> None:
        warnings.warn("here", stacklevel=2 + CALL_FRAMES)

    with pytest.warns(UserWarning, match="here") as caught:
        warns()
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("serach", ["search", "env"], "search"),
        ("--fromat", ["--format", "--from"], "--format"),
        ("colour", ["threads", "k"], None),
    ],
)
def test_nearest(word: str, known: list[str], meant: str | None) -> None:
    assert nearest(word, known) == meant
