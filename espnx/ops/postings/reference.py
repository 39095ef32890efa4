"""Posting lists in plain Python and PyTorch: how the bytes are read, and what the op means. No
compiled code."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import torch

from ...errors import InvalidInputError
from ..crc32c import crc32c_reference
from .checks import Rules, check_arguments

_HEADER = struct.Struct("<6IH2B2H")
_PIECE_BYTES, _BLOCK = 960 << 10, 128
_LAST_PIECE, _LAST_LAYER = 1, 2


def postings_reference(
    buffer: torch.Tensor,
    lists: torch.Tensor,
    weights: torch.Tensor,
    rules: Rules,
    k: int,
    *,
    lengths: torch.Tensor | None = None,
    norms: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One posting after the other. Arguments, results and errors are those of
    `espnx.ops.postings`."""
    check_arguments(buffer, lists, weights, rules, k, lengths, norms, allowed)
    sums: dict[int, torch.Tensor] = {}
    for place, (offset, size, first_layer, term) in enumerate(lists.tolist()):
        if offset < 0 or size <= 0 or offset > buffer.numel() - size:
            raise InvalidInputError(
                "a posting list", got=f"list {place} outside the buffer", expected="one inside"
            )
        for record, value in read_list(
            bytes(buffer[offset : offset + size].tolist()), first_layer, term, rules
        ):
            score = _score(value, record, weights[place], rules, lengths, norms)
            sums[record] = sums[record] + score if record in sums else score
    constant = torch.tensor(rules.constant, dtype=torch.float32)
    found = [
        (-float(score + constant), record)
        for record, score in sums.items()
        if allowed is None or int(allowed[record // 8]) >> (record % 8) & 1
    ]
    best = sorted(found)[:k]
    numbers, scores = torch.full((k,), -1, dtype=torch.int64), torch.full((k,), -torch.inf)
    numbers[: len(best)] = torch.tensor([record for _, record in best], dtype=torch.int64)
    scores[: len(best)] = torch.tensor([-score for score, _ in best])
    return numbers, scores


def _score(
    value: int,
    record: int,
    weight: torch.Tensor,
    rules: Rules,
    lengths: torch.Tensor | None,
    norms: torch.Tensor | None,
) -> torch.Tensor:
    """float32, of one posting."""
    if lengths is None or norms is None or rules.kind != "count":
        held = torch.tensor(value, dtype=torch.int32)
        stored = held.view(torch.float32) if rules.kind == "float" else held.float()
        return weight[0].float() * stored
    norm, count, k1 = (
        norms[int(lengths[record])],
        torch.tensor(float(value), dtype=torch.float64),
        rules.k1,
    )
    if rules.variant == "bm25l":
        c = count / norm
        part = (k1 + 1) * (c + rules.delta) / (k1 + c + rules.delta)
    elif rules.variant in ("robertson", "lucene"):
        part = count / (norm + count)
    else:
        part = (count.float() * torch.tensor(k1 + 1, dtype=torch.float32)).double() / (norm + count)
        part = part + rules.delta if rules.variant == "bm25+" else part
    return (weight[0] * part - weight[1]).float()


def read_list(
    data: bytes, first_layer_bytes: int, term: int, rules: Rules
) -> Iterator[tuple[int, int]]:
    """(record, value) of each posting of a list; of floats the value's bits. Raises
    InvalidInputError for a damaged one."""
    ends = [first_layer_bytes, len(data)] if first_layer_bytes else [len(data)]
    begin = 0
    for layer, end in enumerate(ends):
        least, number = 0, 0
        while begin < end:
            piece = data[begin : begin + min(_PIECE_BYTES, end - begin)]
            header = _checked_header(piece, term, rules)
            begin += len(piece)
            flags = (_LAST_PIECE if begin == end else 0) | (
                _LAST_LAYER if begin == len(data) else 0
            )
            if (header[6], header[7], header[8] & 3) != (number, layer, flags) or header[4] < least:
                raise InvalidInputError(
                    "a posting list", got="pieces out of order", expected="those of a list"
                )
            yield from _postings(piece, header, rules)
            least, number = header[5] + 1, number + 1


def _checked_header(piece: bytes, term: int, rules: Rules) -> tuple[int, ...]:
    header = _HEADER.unpack_from(piece) if len(piece) >= _HEADER.size else (0,) * 11
    if (
        header[1] != rules.salt
        or header[2] != term
        or header[0] != crc32c_reference(piece[4:])
        or header[5] >= rules.n_records
    ):
        raise InvalidInputError(
            "a posting list", got=f"a piece of {header[:3]}", expected="one of this term, and whole"
        )
    return header


def _postings(piece: bytes, header: tuple[int, ...], rules: Rules) -> Iterator[tuple[int, int]]:
    count, record = header[3], header[4]
    blocks = -(-count // _BLOCK)
    table = _HEADER.size + header[9]
    at = table + 2 * blocks
    values, records = list[int](), list[int]()
    for block in range(blocks):
        n = min(_BLOCK, count - block * _BLOCK)
        for width, out in zip(
            piece[table + 2 * block : table + 2 * block + 2], (records, values), strict=True
        ):
            bits = int.from_bytes(piece[at : at + (width * n + 7) // 8], "little")
            out += [bits >> (i * width) & ((1 << width) - 1) for i in range(n)]
            at += (width * n + 7) // 8
    for i in range(header[10]):
        posting, value = struct.unpack_from("<2I", piece, at + 8 * i)
        values[posting] = value
    for gap, value in zip(records, values, strict=True):
        record += gap
        yield record, value if rules.kind == "float" else value + 1
        record += 1
