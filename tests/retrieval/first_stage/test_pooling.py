"""Pooled first-stage vectors: MUVERA against a slow reading of the paper, where it is exact, and
what it finds beside the mean."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from espnx.errors import InvalidInputError
from espnx.retrieval.first_stage import pooling as module
from espnx.retrieval.first_stage.pooling import Muvera, make_pooling

NAMES = [
    ("mean", {}),
    ("muvera", {}),
    ("muvera", {"repetitions": 3, "simhash_bits": 2, "projection": 5, "final": 17, "seed": 9}),
]

PLANES = [-0.826129, 0.053192, -1.492554, 0.281842]
BUCKETS = [1, 4, 2, 2, 0, 2, 2, 2, 1, 1, 4, 4, 2, 0, 2, 3, 1, 1, 2, 3, 2, 2, 3, 0]
SIGNS = [-1, 1, 1, -1, -1, -1, 1, 1]


def tokens(n, d=24, seed=0):
    return normalize(torch.randn(n, d, generator=torch.Generator().manual_seed(seed)), dim=1)


def maxsim(query, document):
    return float((query @ document.T).max(1).values.sum()) if len(document) else 0.0


def by_the_paper(pooling, values, is_query):
    """Section 2 of the paper in loops, with the pooling's own hyperplanes, signs and sketch."""
    values = values.numpy().astype(np.float64)
    planes = pooling._planes.reshape(pooling.d, pooling.repetitions, pooling.simhash_bits)
    whole = []
    for repetition in range(pooling.repetitions):
        projection = np.eye(pooling.d)
        if pooling._signs is not None:
            projection = pooling._signs.reshape(pooling.d, pooling.repetitions, pooling.projection)[
                :, repetition
            ]
        codes = [
            [int(value @ planes[:, repetition, bit] > 0) for bit in range(pooling.simhash_bits)]
            for value in values
        ]
        for number in range(pooling.partitions):
            partition = [number >> bit & 1 for bit in range(pooling.simhash_bits)]
            inside = [value for value, code in zip(values, codes, strict=True) if code == partition]
            if is_query:
                block = np.sum(inside, axis=0) if inside else np.zeros(pooling.d)
            elif inside:
                block = np.mean(inside, axis=0)
            else:
                other_bits = [
                    sum(a != b for a, b in zip(code, partition, strict=True)) for code in codes
                ]
                block = values[other_bits.index(min(other_bits))]
            whole.append(block @ projection)
    result = np.concatenate(whole) / pooling.repetitions**0.5
    if pooling.final:
        sketch = np.zeros(pooling.final)
        for value, bucket, sign in zip(result, pooling._bucket, pooling._bucket_sign, strict=True):
            sketch[bucket] += value * sign
        result = sketch
    return torch.from_numpy(result)


@pytest.mark.parametrize("n", [1, 2, 7, 40])
@pytest.mark.parametrize(
    "parameters",
    [
        {"repetitions": 3, "simhash_bits": 3, "projection": 5},
        {"repetitions": 2, "simhash_bits": 4, "projection": 24},
        {"repetitions": 4, "simhash_bits": 0, "projection": 8},
        {"repetitions": 3, "simhash_bits": 2, "projection": 100, "final": 11},
    ],
    ids=str,
)
def test_against_the_paper(n, parameters):
    pooling = Muvera(24, **parameters)
    # Sums of at most 40 unit vectors in float32, projected by 24 signs: 40 * 24 roundings of 2^-24
    # on values of at most 40.
    for got, is_query in ((pooling.documents(tokens(n)), False), (pooling.query(tokens(n)), True)):
        assert got.shape == (pooling.dim,)
        assert got.dtype == torch.float32
        torch.testing.assert_close(
            got.double(), by_the_paper(pooling, tokens(n), is_query), atol=1e-4, rtol=0
        )


def test_in_slices_of_repetitions_it_is_the_same(monkeypatch):
    pooling = Muvera(24, 5, 3, 4)
    whole = pooling.documents(tokens(30))
    monkeypatch.setattr(module, "WEIGHTS_AT_ONCE", 2 * 8 * 30)
    assert torch.equal(pooling.documents(tokens(30)), whole)
    pooling = Muvera(24, 5, 3, 24)
    monkeypatch.setattr(module, "WEIGHTS_AT_ONCE", 1)
    assert torch.isfinite(pooling.documents(tokens(30))).all()


def test_one_token_is_exact():
    pooling = Muvera(24, repetitions=3, simhash_bits=5, projection=24)
    query, document = tokens(9), tokens(1, seed=1)
    # Every partition of the document holds its one token: the product is the sum over the query,
    # whatever the hyperplanes.
    assert float(pooling.query(query) @ pooling.documents(document)) == pytest.approx(
        maxsim(query, document), abs=1e-4
    )


def test_queries_sum_and_documents_average():
    pooling = Muvera(24, repetitions=3, simhash_bits=2, projection=24)
    twice = torch.cat([tokens(5), tokens(5)])
    torch.testing.assert_close(
        pooling.documents(twice), pooling.documents(tokens(5)), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        pooling.query(twice), 2 * pooling.query(tokens(5)), atol=1e-5, rtol=0
    )
    assert not torch.allclose(pooling.query(tokens(5)), pooling.documents(tokens(5)), atol=1e-2)


def test_error_falls_with_repetitions():
    pairs = [
        (tokens(8, seed=seed), torch.cat([tokens(8, seed=seed)[:4], tokens(20, seed=seed + 100)]))
        for seed in range(30)
    ]

    def spread(repetitions):
        made = [Muvera(24, repetitions, 5, 24, seed=seed) for seed in range(4)]
        values = np.array(
            [[float(pooling.query(q) @ pooling.documents(d)) for pooling in made] for q, d in pairs]
        )
        return values.std(1).mean()

    assert spread(32) < 0.5 * spread(2)  # independent repetitions: a quarter


def clustered(n_documents=600, n_queries=60, d=64):
    """Documents whose tokens are from 800 clusters, half of them from ten that all share; queries
    are a document's other tokens."""
    g = torch.Generator().manual_seed(0)
    centres = normalize(torch.randn(800, d, generator=g), dim=1)
    weights = torch.rand(800, generator=g) ** 3
    weights[:10] = weights.sum() / 10
    members = [
        torch.multinomial(weights, int(n), replacement=True, generator=g)
        for n in torch.randint(10, 80, (n_documents,), generator=g)
    ]
    near = [
        normalize(centres[m] + 0.3 / d**0.5 * torch.randn(len(m), d, generator=g), dim=1)
        for m in members
    ]
    asked = [m[torch.randint(len(m), (12,), generator=g)] for m in members[:n_queries]]
    return [
        normalize(centres[m] + 0.4 / d**0.5 * torch.randn(12, d, generator=g), dim=1) for m in asked
    ], near


def test_it_finds_more_of_maxsim_than_the_mean():
    queries, documents = clustered()
    lengths = torch.tensor([len(document) for document in documents])
    exact = torch.stack(
        [
            torch.segment_reduce(
                (torch.cat(documents) @ q.T).contiguous(), "max", lengths=lengths, axis=0
            ).sum(1)
            for q in queries
        ]
    )
    best = exact.topk(10).indices

    def recall(name, at):
        pooling = make_pooling(name, 64)
        vectors = torch.stack([pooling.documents(document) for document in documents])
        found = (
            torch.stack([pooling.query(query) @ vectors.T for query in queries]).topk(at).indices
        )
        return np.mean(
            [np.isin(b, f).mean() for b, f in zip(best.numpy(), found.numpy(), strict=True)]
        )

    mean, muvera = recall("mean", 60), recall("muvera", 60)
    assert muvera > mean + 0.1, (muvera, mean)
    assert muvera > 0.4  # 0.1 by chance


@pytest.mark.parametrize(("name", "parameters"), NAMES)
def test_made_again_from_its_parameters(name, parameters):
    pooling = make_pooling(name, 24, **parameters)
    again = make_pooling(name, 24, **json.loads(json.dumps(pooling.parameters())))
    assert (again.name, again.dim, again.parameters()) == (name, pooling.dim, pooling.parameters())
    assert torch.equal(again.documents(tokens(6)), pooling.documents(tokens(6)))
    assert torch.equal(again.query(tokens(6)), pooling.query(tokens(6)))


def test_the_random_parts_never_change():
    pooling = make_pooling(
        "muvera", 8, repetitions=2, simhash_bits=2, projection=3, final=5, seed=1
    )
    # A store built elsewhere, earlier, must be found with the same hyperplanes: these values are
    # fixed for good.
    assert pooling._planes[0].tolist() == pytest.approx(PLANES, abs=1e-6)
    assert pooling._bucket.tolist() == BUCKETS
    assert np.sign(pooling._signs[:8]).tolist() == SIGNS
    assert (
        make_pooling("muvera", 8, seed=2)._planes[0, 0]
        != make_pooling("muvera", 8, seed=3)._planes[0, 0]
    )


def test_hyperplanes_are_normal():
    # 12,800 values: five standard errors of mean, deviation and kurtosis
    planes = Muvera(64, 20, 10, 1)._planes.ravel()
    assert abs(planes.mean()) < 5 / planes.size**0.5
    assert abs(planes.std() - 1) < 5 * (0.5 / planes.size) ** 0.5
    assert abs((planes**4).mean() - 3) < 5 * (96 / planes.size) ** 0.5


@pytest.mark.parametrize(("name", "parameters"), NAMES)
def test_no_tokens(name, parameters):
    pooling = make_pooling(name, 24, **parameters)
    for vector in (pooling.documents(torch.zeros(0, 24)), pooling.query(torch.zeros(0, 24))):
        assert vector.tolist() == [0.0] * pooling.dim


def test_mean():
    pooling = make_pooling("mean", 2)
    assert pooling.dim == 2
    assert pooling.documents(torch.tensor([[1.0, 0], [0, 0], [0, 1]])).tolist() == pytest.approx(
        [0.5**0.5] * 2
    )
    assert pooling.query(torch.tensor([[3.0, 4]])).tolist() == pytest.approx([0.6, 0.8])


def test_dimensions():
    assert make_pooling("muvera", 128).dim == 20 * 32 * 8
    assert make_pooling("muvera", 4).dim == 20 * 32 * 4  # never projected to more
    assert Muvera(16, 2, 2, 4, final=8).dim == 8
    assert Muvera(16, 2, 2, 4, final=32).final == 0  # nothing to reduce


@pytest.mark.parametrize(
    ("name", "d", "parameters"),
    [
        ("max", 8, {}),
        ("mean", 0, {}),
        ("mean", 8, {"seed": 1}),
        ("muvera", 8, {"repetitions": 0}),
        ("muvera", 8, {"simhash_bits": 11}),
        ("muvera", 8, {"simhash_bits": -1}),
        ("muvera", 8, {"projection": 0}),
        ("muvera", 8, {"final": -1}),
        ("muvera", 8, {"seed": 1.0}),
        ("muvera", 8, {"repetitions": True}),
        ("muvera", 8, {"bits": 3}),
        ("muvera", 1024, {"repetitions": 1024, "simhash_bits": 10, "projection": 1024}),
    ],
    ids=str,
)
def test_wrong_parameters(name, d, parameters):
    with pytest.raises(InvalidInputError):
        make_pooling(name, d, **parameters)


@pytest.mark.parametrize(
    "wrong",
    [torch.zeros(3, 5), torch.zeros(24), torch.zeros(3, 24, dtype=torch.float16)],
    ids=["d", "one", "half"],
)
@pytest.mark.parametrize("name", ["mean", "muvera"])
def test_wrong_tokens(name, wrong):
    with pytest.raises(InvalidInputError, match="tokens to pool"):
        make_pooling(name, 24).documents(wrong)
