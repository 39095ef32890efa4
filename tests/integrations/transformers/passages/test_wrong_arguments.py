"""Arguments of the wrong kind for a library of passages and for what it composes: each is refused
by a typed error, and nothing was computed or kept by then."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from espnx import errors
from espnx.integrations.transformers.passages.passage_kv import PassageKV
from tests.integrations.transformers.passages.families import WORDS, enabled, words

PASSAGES, QUESTION = [words(40, 2), words(33, 3)], words(12, 5)
NO_IDS = [
    None,
    5,
    1.5,
    True,
    "text",
    b"text",
    {},
    {1, 2},
    [1.5],
    [math.nan],
    ["a"],
    [None],
    [True, False],
    [[1, 2], [3]],
    [-1],
    [WORDS],
    [1 << 70],
    torch.zeros(3),
    torch.zeros(3, requires_grad=True),
    torch.zeros(3, dtype=torch.bfloat16),
    torch.zeros(3, dtype=torch.bool),
    torch.zeros(3, dtype=torch.int64, device="meta"),
    torch.zeros(2, 2, dtype=torch.int64),
    torch.tensor(3),
    np.zeros(3, "m8[s]"),
    np.zeros(3, "U1"),
]
NO_PASSAGES = [None, 5, 1.5, True, b"text", {"a": 1}, {"a"}, torch.tensor(3), [None], [5], [[1.5]]]
NO_NAME = [5, 1.5, b"a", ["a"], "", "\ud800"]
NO_COUNT = ["5", 1.5, True, 0, -1, math.nan, [3]]


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """(method, arguments), with one of them wrong."""
    yield from (("add", {"token_ids": each}) for each in NO_IDS)
    yield from (("add", {"token_ids": [1], "key": each}) for each in NO_NAME)
    yield from (("remove", {"key": each}) for each in [None, *NO_NAME, "nobody"])
    for each in [*NO_PASSAGES, "a", [""], ["\ud800"], [torch.zeros(3)], [[WORDS]]]:
        yield "compose", {"passages": each}
        yield "prefetch", {"passages": each}
        yield "loss", {"passages": each, "question": QUESTION}
    yield "compose", {"passages": ["nobody"]}
    yield "compose", {"passages": [["a"], [3, 4]]}
    yield from (("prefetch", {"max_bytes": each}) for each in (None, 1.5, True, -1, "much", [3]))
    yield from (("loss", {"passages": PASSAGES, "question": each}) for each in [*NO_IDS, []])
    yield "loss", {"passages": [["a"], ["a"]], "question": QUESTION}
    for name, wrong in {
        "mode": [None, 5, "both", ["blocks"], torch.zeros(2)],
        "repair": ["1", 1.5, True, -1, math.nan, [1]],
        "blend": ["1", True, -0.1, 1.1, math.nan, [1]],
        "prefetch": [5, "a", [], PassageKV],
        "question_tokens": NO_COUNT,
        "check": [5, "check", []],
        "draft": ["copies"],
        "spill_interval": NO_COUNT,
        "capacity_tokens": NO_COUNT,
        "threads": NO_COUNT,
        "deadline_s": ["5", True, 0, -1, math.nan, [3]],
        "read_ahead_bytes": [None, 1.5, True, 0, -1, "much"],
        "format": [5, "fp64", ["fp32"]],
        "engine": [None, 5, []],
        "compute": [1.5, "nowhere", []],
        "x_rows": [0],
        "name": ["a"],
        "modes": ["blocks"],
    }.items():
        for each in wrong:
            yield "compose", {"passages": PASSAGES, name: each}
    yield "compose", {"passages": PASSAGES, "repair": 1, "blend": 0.5}
    yield "compose", {"passages": PASSAGES, "repair": 1, "mode": "prefix"}
    yield "compose", {"passages": [["a"], ["a"]], "repair": 1}


def refused(call: Any, given: dict[str, Any]) -> None:
    try:
        with pytest.raises(errors.InvalidInputError) as caught:
            call(**given)
    except BaseException:
        print(given)
        raise
    assert len(str(caught.value)) < 1000
    assert None not in (caught.value.got, caught.value.expected), caught.value


def test_wrong_arguments_of_a_library(folder: Path) -> None:
    model, passes = enabled("llama"), list[int]()
    with PassageKV(model, folder, prefix=words(9, 1)) as kv:
        kv.add(PASSAGES[0], key="a")
        before = kv.stats()
        hook = model.base_model.register_forward_pre_hook(lambda *_: passes.append(1))
        try:
            for name, given in cases():
                refused(getattr(kv, name), given)
        finally:
            hook.remove()
        assert not passes
        assert kv.stats() == before
        assert not kv._caches.under_way
        # what is right is taken
        with kv.compose(iter(["a", PASSAGES[1]]), draft=None) as cache:
            assert cache.passages == [40, 33]
        with kv.compose([]) as cache:
            assert cache.passages == []
        assert kv.loss(iter(["a"]), QUESTION).same_next == 1
        assert kv.add([])
        assert kv.add(torch.empty(0))
        assert kv.add(np.zeros((1, 0)))
        with kv.prefetch(iter(["a", "nobody", [3, 4]])) as early:
            refused(early.want, {"passages": 5})
            refused(early.want, {"passages": "a"})


def test_wrong_arguments_of_what_is_composed(folder: Path) -> None:
    with PassageKV(enabled("llama"), folder) as kv, kv.compose(PASSAGES) as cache:
        right = torch.zeros(1, 3, dtype=torch.int64)
        no_questions = [each for each in NO_IDS if getattr(each, "ndim", 0) != 2]
        no_questions += [QUESTION, right.float(), right - 1, right + WORDS, right[:0], right > 1]
        for each in no_questions:
            refused(cache.prompt, {"input_ids": each})
        for mask in (5, [[1, 1, 1]], right[:, :2], right[0]):
            refused(cache.prompt, {"input_ids": right, "attention_mask": mask})
        for each in (None, *NO_IDS[1:6], QUESTION, right):
            refused(cache.reuse_prefix, {"input_ids": each})
        for each in [None, *NO_COUNT]:
            refused(cache.begin, {"question_tokens": each})
            if each != 0 or each is False:
                refused(cache.passage_mass, {"begin": each})
                refused(cache.head_mass, {"begin": each})
                if each is not None:
                    refused(cache.passage_mass, {"end": each})
                    refused(cache.head_mass, {"end": each})
                if each != -1:
                    refused(cache.crop, {"tokens_to_remove": each})
        for heads in (5, "all", [5], [(0,)], [(0, 9)], [(9, 0)], [(-1, 0)], [(True, 0)], {0: 0}):
            refused(cache.watch_heads, {"heads": heads})
        refused(cache.crop, {"tokens_to_remove": -1})
        refused(cache.crop, {"tokens_to_remove": 1})
        assert cache.prompt(right)["input_ids"].shape == (1, 40 + 33 + 3)
        assert cache.prompt(right[:, :0])["input_ids"].shape == (1, 40 + 33)
        assert cache.prompt(right.int())["input_ids"].dtype == torch.int32


@pytest.mark.parametrize(
    "given",
    [
        *({"model": each} for each in (None, 5, "demo", torch.nn.Linear(2, 2), PassageKV)),
        *({"directory": each} for each in (None, 5, "", [], b"kv", [None], ["kv", ""], "a\0b")),
        *({"prefix": each} for each in NO_IDS),
        *({"tokenizer": each} for each in (5, "demo", [])),
        *({"library_bytes": each} for each in (1.5, True, -1, "much", [3])),
        *({"fingerprint": each} for each in (None, 5, "half", ["whole"], {})),
        *({"engine": each} for each in (None, 5, [], "fast")),
        *({"device": each} for each in (5, [], [5], {}, "no-such-device")),
        *({"compute": each} for each in (1.5, "nowhere", [])),
        *({"threads": each} for each in NO_COUNT),
        *({"read_ahead_bytes": each} for each in (None, 1.5, True, 0, -1, "much")),
        *({"deadline_s": each} for each in ("5", True, 0, -1, math.nan, None)),
    ],
    ids=lambda given: f"{next(iter(given))}-{next(iter(given.values()))!r}"[:40].split("\n")[0],
)
def test_wrong_arguments_of_opening(folder: Path, given: dict[str, Any]) -> None:
    options = {"model": enabled("llama"), "directory": folder / "kv"} | given
    refused(PassageKV, options)
    assert not list(folder.iterdir()), "nothing was made"
