"""Token formats: bytes of rows against independent statements of their layout, errors of
quantisation, and what cannot be stored."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from espnx.errors import InvalidInputError
from espnx.ops.maxsim import FORMATS, kmeans, residual, token_format
from tests.ops.records import codebook_for, integers, normals

RESIDUAL = pytest.mark.parametrize("nbits", [1, 2, 4])
FLOATS = ["fp32", "fp16", "bf16"]


@pytest.mark.parametrize(
    ("name", "row_bytes"),
    [
        ("fp32", 512),
        ("fp16", 256),
        ("bf16", 256),
        ("int8", 132),
        ("bit1", 16),
        ("residual1", 20),
        ("residual2", 36),
        ("residual4", 68),
    ],
)
def test_sizes_and_kinds(name: str, row_bytes: int) -> None:
    token = token_format(name)
    assert token.token_row_bytes(128) == row_bytes
    assert token.needs_codebook == name.startswith("residual")
    assert token.is_lossless_float == (name in FLOATS)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("d", [8, 24, 128])
@pytest.mark.parametrize("n", [0, 1, 5])
def test_encoded_rows_decode_at_any_address(name: str, d: int, n: int) -> None:
    token, codebook = FORMATS[name], codebook_for(name, d)
    rows = token.encode(normals(n, d, seed=1), codebook)
    assert (rows.dtype, rows.shape) == (torch.uint8, (n * token.token_row_bytes(d),))
    values = token.decode(rows, d, codebook)
    assert (values.dtype, values.shape) == (torch.float32, (n, d))
    assert torch.equal(token.decode(torch.cat([rows.new_zeros(1), rows])[1:], d, codebook), values)
    for row, value in zip(rows.view(n, token.token_row_bytes(d)), values, strict=True):
        assert torch.equal(token.decode(row, d, codebook)[0], value)


@pytest.mark.parametrize("name", [*FLOATS, "bit1"])
def test_what_was_decoded_encodes_to_the_same_bytes(name: str) -> None:
    token = FORMATS[name]
    rows = token.encode(normals(50, 24, seed=2))
    assert torch.equal(token.encode(token.decode(rows, 24)), rows)


def test_int8_codes_stay_when_they_are_decoded_and_encoded_again() -> None:
    """The scale may move by the last bit: ``127 s / 127`` is not always ``s`` in fp32."""
    token = FORMATS["int8"]
    rows = token.encode(normals(2000, 24, seed=2))
    again = token.encode(token.decode(rows, 24))
    assert torch.equal(again.view(2000, -1)[:, 4:], rows.view(2000, -1)[:, 4:])
    scales, scales_again = (
        table.view(2000, -1)[:, :4].clone(memory_format=torch.contiguous_format).view(torch.int32)
        for table in (rows, again)
    )
    assert (scales - scales_again).abs().max() <= 1


def test_floats() -> None:
    tokens = integers(3, 8)
    for name in FLOATS:
        assert torch.equal(FORMATS[name].decode(FORMATS[name].encode(tokens), 8), tokens)
    assert FORMATS["bf16"].encode(torch.tensor([[1.0] * 8])).tolist() == [0x80, 0x3F] * 8
    for name, value in (("fp16", 70000.0), ("bf16", 3.4e38)):
        with pytest.raises(InvalidInputError, match=name) as raised:
            FORMATS[name].encode(torch.tensor([[1.0, -value]]))
        assert raised.value.got == pytest.approx(value)
    assert FORMATS["fp16"].encode(torch.tensor([[torch.inf, torch.nan]])).numel() == 4


def test_int8_rows_byte_by_byte() -> None:
    """Against a statement of its own with struct, one value at a time."""
    tokens = torch.cat(
        [
            normals(20, 16, seed=3),
            torch.zeros(1, 16),
            torch.full((1, 16), 1e-44),
            torch.full((1, 16), -3e38),
        ]
    )
    rows = FORMATS["int8"].encode(tokens).view(len(tokens), -1)
    for token, row in zip(tokens.numpy(), rows, strict=True):
        scale = np.float32(np.abs(token).max()) / np.float32(127)
        codes = [int(np.clip(np.rint(value / scale), -127, 127)) if scale else 0 for value in token]
        assert bytes(row.tolist()) == struct.pack("<f16b", scale, *codes)
    decoded = FORMATS["int8"].decode(rows.view(-1), 16)
    half_steps = tokens.abs().amax(dim=1, keepdim=True) / 254
    assert ((decoded - tokens).abs() <= half_steps * (1 + 2.0**-16) + 1e-44).all()


def test_bit1_rows_byte_by_byte() -> None:
    tokens = normals(20, 24, seed=4)
    tokens[0, :3] = torch.tensor([0.0, -0.0, -1e-45])
    rows = FORMATS["bit1"].encode(tokens)
    expected = np.packbits(tokens.numpy() >= 0, axis=1, bitorder="little")
    assert np.array_equal(rows.view(20, 3).numpy(), expected)
    decoded = FORMATS["bit1"].decode(rows, 24)
    assert torch.equal(decoded, torch.where(tokens >= 0, 1.0, -1.0) * torch.tensor(24.0**-0.5))
    assert decoded[0, :3].sign().tolist() == [1, 1, -1]


def colbert_rows(
    tokens: np.ndarray, centroids: np.ndarray, cutoffs: np.ndarray, nbits: int
) -> tuple[np.ndarray, np.ndarray]:
    """What ColBERTv2's residual codec stores (``compress_into_codes`` and ``binarize``): centroid
    numbers, and packed residuals."""
    numbers = (centroids @ tokens.T).argmax(axis=0)
    codes = np.searchsorted(cutoffs, tokens - centroids[numbers], side="left").astype(np.uint8)
    bits = (codes[:, :, None] >> np.arange(nbits, dtype=np.uint8)) & 1
    return numbers, np.packbits(bits.reshape(-1)).reshape(len(tokens), -1)


def colbert_values(
    numbers: np.ndarray, packed: np.ndarray, centroids: np.ndarray, weights: np.ndarray, nbits: int
) -> np.ndarray:
    """What it makes of them (``decompress``), a byte at a time: bits turned around within each
    code, then looked up."""
    values = []
    for number, row in zip(numbers, packed, strict=True):
        digits = "".join(f"{byte:08b}" for byte in row)
        codes = [int(digits[i : i + nbits][::-1], 2) for i in range(0, len(digits), nbits)]
        value = centroids[number].astype(np.float64) + weights[codes]
        values.append(value / np.linalg.norm(value))
    return np.array(values)


@RESIDUAL
@pytest.mark.parametrize("d", [8, 24, 128])
def test_residual_rows_are_those_of_colbert(nbits: int, d: int) -> None:
    token, codebook = token_format(f"residual{nbits}"), codebook_for(f"residual{nbits}", d)
    tokens = normals(300, d, seed=5)
    # a residual that is (nearly) a cutoff
    tokens[0] = codebook.centroids[7] + codebook.bucket_cutoffs[0]
    rows = token.encode(tokens, codebook).view(300, -1).numpy()
    centroids, cutoffs, weights = (
        table.numpy()
        for table in (codebook.centroids, codebook.bucket_cutoffs, codebook.bucket_weights)
    )
    numbers, packed = colbert_rows(tokens.numpy(), centroids, cutoffs, nbits)
    assert np.array_equal(rows[:, :4].copy().view("<i4")[:, 0], numbers)
    assert np.array_equal(rows[:, 4:], packed)
    decoded = token.decode(torch.from_numpy(rows.reshape(-1)), d, codebook).numpy()
    assert np.abs(decoded - colbert_values(numbers, packed, centroids, weights, nbits)).max() < 1e-6


@RESIDUAL
def test_residual_bits_of_a_known_row(nbits: int) -> None:
    """ColBERT's layout written out by hand: a code's lowest bit first, the first bit of eight a
    byte's highest."""
    codes = {
        1: [1, 0, 0, 0, 1, 1, 0, 1],
        2: [0, 1, 2, 3, 3, 0, 0, 2],
        4: [1, 8, 0, 15, 4, 2, 7, 9],
    }[nbits]
    packed = {
        1: [0b10001101],
        2: [0b00100111, 0b11000001],
        4: [0b10000001, 0b00001111, 0b00100100, 0b11101001],
    }[nbits]
    token = token_format(f"residual{nbits}")
    codebook = codebook_for(token.name, 8, n_centroids=1)
    residuals = codebook.bucket_weights[torch.tensor([codes])]
    assert token.pack(residuals, codebook).tolist() == [packed]
    assert token.unpack(torch.tensor([packed], dtype=torch.uint8)).tolist() == [codes]


@RESIDUAL
def test_residuals_of_many_tokens_do_not_depend_on_the_chunk(
    nbits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, codebook = token_format(f"residual{nbits}"), codebook_for(f"residual{nbits}", 16)
    tokens = normals(70, 16, seed=6)
    rows = token.encode(tokens, codebook)
    values = token.decode(rows, 16, codebook)
    monkeypatch.setattr(residual, "CHUNK_BITS", 16 * nbits * 3)
    monkeypatch.setattr(kmeans, "CHUNK_PRODUCTS", 26)
    assert torch.equal(token.encode(tokens, codebook), rows)
    assert torch.equal(token.decode(rows, 16, codebook), values)


def test_a_residual_row_that_is_zero_stays_zero() -> None:
    codebook = codebook_for("residual1", 8, n_centroids=1)
    codebook.centroids.zero_()
    codebook.bucket_weights.zero_()
    token = token_format("residual1")
    assert torch.equal(
        token.decode(token.encode(torch.zeros(1, 8), codebook), 8, codebook), torch.zeros(1, 8)
    )


@pytest.mark.parametrize("name", ["int8", "bit1", "residual2"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_values_that_have_no_code(name: str, bad: float) -> None:
    tokens = normals(3, 16)
    tokens[1, 2] = bad
    with pytest.raises(InvalidInputError, match=name) as raised:
        FORMATS[name].encode(tokens, codebook_for(name, 16))
    assert "row 1" in str(raised.value.got)


@pytest.mark.parametrize("name", ["int8", "bit1", "residual2"])
def test_shapes_that_are_no_tokens(name: str) -> None:
    codebook = codebook_for(name, 16)
    for tokens in (torch.zeros(16), torch.zeros(1, 16, dtype=torch.int32), torch.zeros(1, 2, 16)):
        with pytest.raises(InvalidInputError, match="token values"):
            FORMATS[name].encode(tokens, codebook)
    with pytest.raises(InvalidInputError):
        FORMATS[name].encode(torch.zeros(1, 12), codebook)
