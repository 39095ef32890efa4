"""Windows, batches and pooling, with a model that can be checked by hand: the vector of an id is a
table's row."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn.functional import normalize

from espnx.encoders import load_encoder
from espnx.encoders.windows import WindowedEncoder, batches, split_evenly
from espnx.errors import InvalidInputError

BEGIN, END, PAD = 1, 2, 0


class Table(WindowedEncoder):
    """Ids are the words, written as numbers. Records the shape of every batch."""

    name, d_cls, dim = "table", 4, 4

    def __init__(self, *, window_tokens=6, batch_tokens=24, pooling="mean", special=True):
        self.window_tokens, self.batch_tokens, self.pooling = window_tokens, batch_tokens, pooling
        self.prefix, self.suffix = ([BEGIN], [END]) if special else ([], [])
        self.rows = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
        self.rows[PAD] = torch.nan  # must not be seen
        self.shapes = []

    def wordpieces(self, texts):
        return ([int(word) for word in text.split()] for text in texts)

    def hidden(self, ids, mask):
        self.shapes.append(tuple(ids.shape))
        assert (ids == PAD).any() == (mask is not None)
        assert mask is None or torch.equal(mask, ids != PAD)
        return self.rows[ids]


def text_of(ids):
    return " ".join(map(str, ids))


def test_each_text_gets_its_own_tokens_and_mean():
    encoder, rng = Table(), random.Random(1)
    ids = [
        [rng.randrange(3, 100) for _ in range(length)] for length in (0, 1, 3, 4, 5, 8, 9, 30, 0, 2)
    ]
    results = encoder.encode_documents([text_of(row) for row in ids])
    for row, result in zip(ids, results, strict=True):
        windows = max(1, -(-len(row) // 4))
        assert torch.equal(result.tokens, normalize(encoder.rows[row], dim=-1))
        assert result.tokens.shape == (len(row), 4)
        total = encoder.rows[row].sum(0) + windows * (encoder.rows[BEGIN] + encoder.rows[END])
        torch.testing.assert_close(result.cls, normalize(total, dim=0))
    assert all(count * length <= 24 for count, length in encoder.shapes)
    assert all(length <= 6 for _, length in encoder.shapes)


def test_cls_pooling_weights_windows_by_their_length():
    encoder = Table(pooling="cls")
    encoder.hidden = lambda ids, mask: (
        torch.where(ids[:, 1:2, None] == 50, 1.0, 2.0)
        * torch.eye(4)[(ids[:, 1:2] == 50).long()].expand(-1, ids.shape[1], -1)
    )
    # windows 50 3 3 and 51 3 3 3: 5 and 6 positions
    result = encoder.encode_documents([text_of([50, 3, 3, 51, 3, 3, 3])])[0]
    torch.testing.assert_close(result.cls, normalize(torch.tensor([12.0, 5.0, 0, 0]), dim=0))


def test_without_special_tokens_an_empty_text_is_zero():
    encoder = Table(special=False)
    empty, other = encoder.encode_queries(["", "5"])
    assert empty.cls.tolist() == [0.0] * 4
    assert empty.tokens.shape == (0, 4)
    torch.testing.assert_close(other.tokens[0], normalize(encoder.rows[5], dim=0))
    assert encoder.encode_documents([""])[0].cls.tolist() == [0.0] * 4


def test_results_may_be_changed_and_hold_no_batch():
    results = Table(batch_tokens=1000).encode_documents(["3 4", "5 6", text_of([7] * 20)])
    before = results[1].tokens.clone()
    results[0].tokens.zero_()
    results[0].cls.zero_()
    assert torch.equal(results[1].tokens, before)
    for result in results:
        assert result.tokens.is_contiguous()
        assert result.tokens.untyped_storage().nbytes() == 24 * 4 * 4
        assert not result.tokens.is_inference()
        assert not result.cls.is_inference()


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8, 9, 253, 254, 255, 1000])
@pytest.mark.parametrize("room", [1, 4, 254])
def test_split_evenly(count, room):
    runs = split_evenly(list(range(count)), room)
    assert [number for run in runs for number in run] == list(range(count))
    lengths = [len(run) for run in runs]
    assert len(runs) == max(1, -(-count // room))
    assert max(lengths) <= room
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("budget", [1, 7, 64, 4096])
def test_batches_hold_every_index_once_within_the_budget(budget):
    rng = random.Random(budget)
    lengths = [rng.randrange(0, 60) for _ in range(200)]
    groups = list(batches(lengths, budget))
    assert sorted(index for group in groups for index in group) == list(range(200))
    assert all(
        len(group) == 1 or len(group) * max(lengths[index] for index in group) <= budget
        for group in groups
    )
    assert groups == list(batches(lengths, budget))
    assert list(batches([], budget)) == []


def test_padding_is_small():
    """Sorted, neighbours differ by 256/2000, so a batch of 4096/L texts pads 262/L^2 of its tokens.

    Over uniform lengths that is 262 ln(256) / (256^2 / 2) = 4.4 %.
    """
    rng = random.Random(0)
    lengths = [rng.randrange(1, 257) for _ in range(2000)]
    positions = sum(
        len(group) * max(lengths[index] for index in group) for group in batches(lengths, 4096)
    )
    assert positions < 1.045 * sum(lengths)


def test_load_encoder_refuses_what_it_does_not_know(tmp_path):
    with pytest.raises(InvalidInputError, match="got 'colbert'"):
        load_encoder("colbert")
    with pytest.raises(InvalidInputError, match=r"no config\.json"):
        load_encoder(str(tmp_path))
