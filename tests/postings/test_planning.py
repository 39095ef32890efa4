"""What posting lists will take, against what they took: texts whose words follow Zipf's law, and
sparse vectors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import espnx
from espnx import errors
from espnx.cli.main import main
from espnx.postings.planning import plan_postings
from tests.cli.documents import strict_json

N, TERMS, VOCABULARY = 4000, 40, 6000


@pytest.fixture(scope="module")
def records() -> list[np.ndarray]:
    """Different terms of each, as many in all of them."""
    random, shares = np.random.default_rng(0), 1 / np.arange(1, VOCABULARY + 1)
    edges = np.cumsum(shares / shares.sum())
    drawn = (np.unique(np.searchsorted(edges, random.random(5 * TERMS))) for _ in range(N))
    return [random.permutation(each)[:TERMS] for each in drawn]


@pytest.mark.parametrize("is_weighted", [False, True])
def test_sizes_are_those_of_a_build(
    records: list[np.ndarray], is_weighted: bool, folder: Path
) -> None:
    """Of memory nearly to the byte (a few terms are drawn by nobody); of lists within a tenth."""
    random = np.random.default_rng(1)
    if is_weighted:
        built = espnx.Postings.build(
            folder / "p",
            vectors=[
                {f"t{term}": float(random.random()) + 0.1 for term in each} for each in records
            ],
        )
    else:
        texts = [
            [f"t{term}" for term in np.repeat(each, random.geometric(0.7, len(each)))]
            for each in records
        ]
        built = espnx.Postings.build(folder / "p", terms=texts)
    plan = plan_postings(N, TERMS, n_terms=VOCABULARY, is_weighted=is_weighted)
    assert plan.n_postings == built.n_postings
    assert plan.memory["total_bytes"] == pytest.approx(built.memory_bytes, rel=0.01)
    assert plan.disk["total_bytes"] == pytest.approx(built.size_bytes, rel=0.1)


@pytest.mark.parametrize(
    ("n_records", "terms", "n_terms"), [(0, 5, 10), (5, 0, 10), (5, 11, 10), (2**31, 5, None)]
)
def test_refused(n_records: int, terms: int, n_terms: int | None) -> None:
    with pytest.raises(errors.InvalidInputError):
        plan_postings(n_records, terms, n_terms=n_terms)


def test_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--postings", "1000000", "--json", "-"]) == 0
    found = strict_json(capsys.readouterr().out)
    assert (found["assumed"], found["inputs"]["terms"], found["n_postings"]) == (
        ["terms", "vocabulary"],
        50,
        50_000_000,
    )
    assert main(["plan", "--postings", "1000000", "--weights", "--terms", "100"]) == 0
    out = capsys.readouterr().out
    assert "100 terms each" in out
    assert out.count("  assumed") == 1
