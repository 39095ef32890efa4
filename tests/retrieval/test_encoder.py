"""Your own function as an encoder: what is accepted, and what is refused with the text's name."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
import torch

from espnx.errors import InvalidInputError
from espnx.retrieval import encoder as module
from espnx.retrieval.encoder import Encoded, Encoder, FunctionEncoder

D_CLS, DIM = 3, 2


def good(texts):
    return [
        (np.full(D_CLS, len(text), np.float32), np.full((len(text), DIM), number, np.float32))
        for number, text in enumerate(texts)
    ]


def returning(result):
    """An encoder whose second text gets ``result``."""
    return FunctionEncoder(
        lambda texts: [*good(texts[:1]), result, *good(texts[2:])], "mine@1", d_cls=D_CLS, dim=DIM
    )


def test_results_in_order_with_ragged_and_empty_texts():
    encoder = FunctionEncoder(good, "mine@1", d_cls=D_CLS, dim=DIM)
    assert isinstance(encoder, Encoder)
    results = encoder.encode_documents(["abc", "", "z"])
    assert [list(r.tokens.shape) for r in results] == [[3, 2], [0, 2], [1, 2]]
    assert [r.cls.tolist() for r in results] == [[3.0] * 3, [0.0] * 3, [1.0] * 3]
    assert results[2].tokens.tolist() == [[2.0, 2.0]]
    assert all(r.cls.dtype == r.tokens.dtype == torch.float32 for r in results)
    assert encoder.encode_documents([]) == []


def test_queries_go_to_their_own_function():
    encoder = FunctionEncoder(
        good,
        "mine@1",
        d_cls=D_CLS,
        dim=DIM,
        query_fn=lambda texts: [(np.zeros(D_CLS), np.zeros((7, DIM)))] * len(texts),
    )
    assert len(encoder.encode_queries(["a"])[0].tokens) == 7
    assert len(encoder.encode_documents(["a"])[0].tokens) == 1
    assert (
        len(FunctionEncoder(good, "mine@1", d_cls=D_CLS, dim=DIM).encode_queries(["ab"])[0].tokens)
        == 2
    )


@pytest.mark.parametrize(
    "result",
    [
        (np.array([1, 2, 3]), np.array([[1.5, 2]], np.float64)),
        (
            torch.tensor([1.0, 2, 3], dtype=torch.bfloat16),
            torch.tensor([[1.5, 2]], dtype=torch.float16),
        ),
        (torch.tensor([1.0, 2, 3], requires_grad=True), torch.tensor([[1.5], [2.0]]).T),
        [[1, 2, 3], [[1.5, 2]]],
        Encoded(torch.tensor([1.0, 2, 3]), torch.tensor([[1.5, 2.0]])),
    ],
    ids=["numpy", "half", "grad-and-strided", "lists", "encoded"],
)
def test_kinds_of_numbers(result):
    got = returning(result).encode_documents(["a", "b", "c"])[1]
    assert torch.equal(got.cls, torch.tensor([1.0, 2, 3]))
    assert torch.equal(got.tokens, torch.tensor([[1.5, 2.0]]))
    assert got.tokens.is_contiguous()
    assert not got.cls.requires_grad
    assert got.cls.dtype == got.tokens.dtype == torch.float32


@pytest.mark.parametrize("make", [np.zeros, torch.zeros])
def test_the_function_may_reuse_its_buffer(make):
    buffer = make((4, DIM))

    def fn(texts):
        buffer[:] = len(texts[0])
        return [(buffer.reshape(-1)[:D_CLS], buffer)]

    encoder = FunctionEncoder(fn, "mine@1", d_cls=D_CLS, dim=DIM)
    first = encoder.encode_documents(["a"])[0]
    encoder.encode_documents(["abc"])
    assert first.tokens.eq(1).all()
    assert first.cls.eq(1).all()


CLS, TOKENS = np.zeros(D_CLS), np.zeros((2, DIM))


@pytest.mark.parametrize(
    ("result", "says"),
    [
        ((np.zeros(4), TOKENS), r"cls; got shape \[4\]; expected \[3\]"),
        ((np.zeros((1, 3)), TOKENS), r"cls; got shape \[1, 3\]"),
        ((np.float64("nan"), TOKENS), r"cls; got shape \[\]"),
        ((CLS, np.zeros((2, 3))), r"tokens; got shape \[2, 3\]; expected \[n, 2\]"),
        ((CLS, np.zeros(2)), r"tokens; got shape \[2\]"),
        ((CLS, []), r"tokens; got shape \[0\].*has shape \[0, 2\]"),
        ((CLS, np.array([[0, 0], [0, np.nan]])), r"tokens; got nan at \[1, 1\]"),
        ((np.array([0, np.inf, 0]), TOKENS), r"cls; got inf at \[1\]"),
        ((CLS, torch.tensor([[float("-inf"), 0]])), r"tokens; got -inf at \[0, 0\]"),
        ((CLS, np.array([[1e39, 0]])), r"tokens; got inf at \[0, 0\]"),
        ((np.zeros(D_CLS, complex), TOKENS), "complex128; expected real"),
        ((torch.zeros(D_CLS, dtype=torch.complex64), TOKENS), "complex64; expected real"),
        ((CLS, np.zeros((2, DIM), bool)), "bool; expected real"),
        ((CLS, torch.zeros(2, DIM, dtype=torch.bool)), "bool; expected real"),
        ((CLS, "text"), "expected real"),
        ((CLS, [[1.0, 2.0], [1.0]]), "one shape"),
        ((CLS,), "tuple; expected a pair"),
        (None, "NoneType; expected a pair"),
        (np.zeros((2, 3)), "ndarray; expected a pair"),
    ],
)
def test_wrong_results_name_the_text(result, says):
    with pytest.raises(InvalidInputError, match=says) as raised:
        returning(result).encode_documents(["a", "bad", "c"])
    assert "mine@1: text 1 ('bad')" in str(raised.value)


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (good(["a"]), "got 1 results"),
        (good("abc"), "got 3 results"),
        (None, "NoneType"),
        (7, "int"),
    ],
)
def test_wrong_number_of_results(result, says):
    with pytest.raises(InvalidInputError, match=says):
        FunctionEncoder(lambda texts: result, "mine@1", d_cls=D_CLS, dim=DIM).encode_queries(
            ["a", "b"]
        )


@pytest.mark.parametrize(
    "cls", [None, [], np.zeros(0), torch.zeros(0)], ids=["none", "list", "numpy", "tensor"]
)
def test_no_first_stage_vector(cls):
    encoder = FunctionEncoder(
        lambda texts: [(cls, np.ones((2, DIM)))] * len(texts), "mine@1", d_cls=0, dim=DIM
    )
    result = encoder.encode_documents(["a"])[0]
    assert result.cls.shape == (0,)
    assert result.cls.dtype == torch.float32
    assert result.tokens.shape == (2, DIM)


@pytest.mark.parametrize(
    ("d_cls", "cls", "says"),
    [(0, [1.0], r"cls; got shape \[1\]; expected \[0\]"), (3, None, "cls; got dtype object")],
)
def test_first_stage_vector_where_there_is_none_and_none_where_there_is_one(d_cls, cls, says):
    with pytest.raises(InvalidInputError, match=says):
        FunctionEncoder(
            lambda texts: [(cls, np.ones((2, DIM)))], "mine@1", d_cls=d_cls, dim=DIM
        ).encode_queries(["a"])


def test_what_the_function_raises_passes_through():
    error = KeyError("mine")

    def fn(texts):
        raise error

    with pytest.raises(KeyError) as raised:
        FunctionEncoder(fn, "mine@1", d_cls=D_CLS, dim=DIM).encode_documents(["a"])
    assert raised.value is error


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ("one text", "got str"),
        (b"x", "got bytes"),
        (iter(["a"]), "iterator"),
        (["a", 7], "text 1; got int"),
        (["a", "b\ud800"], "text 1.*surrogate at character 1"),
    ],
)
def test_wrong_texts(texts, says):
    with pytest.raises(InvalidInputError, match=says):
        FunctionEncoder(good, "mine@1", d_cls=D_CLS, dim=DIM).encode_documents(texts)


@pytest.mark.parametrize(
    "change",
    [
        {"fn": None},
        {"query_fn": 3},
        {"name": ""},
        {"name": 3},
        {"d_cls": -1},
        {"d_cls": False},
        {"dim": 0},
        {"dim": -1},
        {"dim": 2.0},
        {"dim": True},
    ],
)
def test_wrong_arguments(change):
    with pytest.raises(InvalidInputError):
        FunctionEncoder(**{"fn": good, "name": "mine@1", "d_cls": 3, "dim": 2} | change)


def test_docstring_example():
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed
