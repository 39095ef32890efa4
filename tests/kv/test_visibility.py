"""Padding masks, as what devices look at: the same positions are hidden, said in the shortest way
that says it."""

from __future__ import annotations

import pytest
import torch

from espnx.errors import InvalidInputError
from espnx.kv.visibility import Visibility

LEFT = [[1, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1]]
RIGHT = [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]]
HOLES = [[0, 1, 0, 1], [1, 1, 1, 1], [1, 0, 0, 1]]
ALL_HIDDEN = [[0, 0, 0, 0], [1, 1, 1, 1]]


def seen(visibility: Visibility, n_sequences: int, positions: int) -> torch.Tensor:
    """What a device sees of it."""
    found = torch.ones(n_sequences, positions, dtype=torch.bool)
    if visibility.first_visible is not None:
        found &= torch.arange(positions) >= visibility.first_visible[:, None]
    if visibility.visible is not None:
        found &= visibility.visible != 0
    return found


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.uint8])
@pytest.mark.parametrize("rows", [LEFT, RIGHT, HOLES, ALL_HIDDEN])
def test_masks(rows: list[list[int]], dtype: torch.dtype) -> None:
    mask = torch.tensor(rows, dtype=dtype)
    found = Visibility.of(mask, *mask.shape)
    assert torch.equal(seen(found, *mask.shape), mask.bool())
    assert found.hidden is not None
    assert torch.equal(found.hidden, ~mask.bool())
    assert found.first_visible is not None
    assert found.first_visible.dtype == torch.int64
    assert (found.visible is None) == (rows in (LEFT, ALL_HIDDEN)), (
        "padding on the left alone needs no list of positions"
    )
    if found.visible is not None:
        assert found.visible.dtype == torch.uint8
        assert found.visible.is_contiguous()


@pytest.mark.parametrize("seed", range(20))
def test_random_masks(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    n_sequences, positions = (int(torch.randint(1, limit, (), generator=rng)) for limit in (5, 40))
    mask = torch.rand(n_sequences, positions, generator=rng) > torch.rand(
        n_sequences, 1, generator=rng
    )
    if seed % 2:
        mask = mask.sort(dim=1).values  # on the left
    found = Visibility.of(mask.T.contiguous().T, n_sequences, positions)
    assert torch.equal(seen(found, n_sequences, positions), mask)
    assert not seed % 2 or found.visible is None


def test_nothing_is_hidden() -> None:
    """No mask, or one of ones: nothing to look at."""
    nothing = Visibility()
    assert Visibility.of(None, 3, 7) == nothing
    assert Visibility.of(torch.ones(3, 7), 3, 7) == nothing
    assert Visibility.of(torch.ones(3, 0), 3, 0) == nothing
    assert nothing.part(1, 2) == nothing


@pytest.mark.parametrize("size", [(3, 6), (3, 8), (2, 7), (3, 1), (7,), (3, 7, 1), (3, 1, 7, 7)])
def test_masks_of_another_shape(size: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInputError, match="attention mask") as caught:
        Visibility.of(torch.ones(size), 3, 7)
    assert (caught.value.got, caught.value.expected) == (list(size), [3, 7])


@pytest.mark.parametrize("rows", [LEFT, RIGHT, HOLES])
def test_parts(rows: list[list[int]]) -> None:
    """Of some sequences: what they see alone."""
    mask = torch.tensor(rows)
    for begin, end in ((0, 1), (1, 3), (0, 3), (2, 2)):
        part = Visibility.of(mask, 3, 4).part(begin, end)
        assert torch.equal(seen(part, end - begin, 4), mask[begin:end].bool())
        assert part.hidden is not None
        assert torch.equal(part.hidden, mask[begin:end] == 0)
