"""An extent of a library: the K and V of one passage in all layers, one after the other in the data
file, with what it takes to check them in front::

    front | layer 0: head 0: blocks, head 1: blocks, ... | layer 1 | ...

The front says what the extent is of (model, the text before it, the text) and has the CRC32C of
every block; it is itself summed. So an index that was lost, restored from elsewhere or damaged
leads to no passage's rows but the right ones. All of it is whole pages of 4 KiB; an extent is never
changed.

Tokens that would leave a last block mostly empty lie in the front, packed: all rows of a label of
three tokens are a few pages, where blocks would be one of them, mostly zeros, for every head of
every layer. They are read with the front, once, and wait in memory while a prompt uses them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...device.interface import SegmentPlace
from ...device.row_layout import PAGE_BYTES, RowLayout
from ...storage.files import crc32c

MAGIC = b"espnxPKV"
VERSION = 2
#: Of an extent's blocks at most one part in so many is zeros behind the last token.
_EMPTY_PART = 8
#: Magic, CRC32C of all that follows it, version, tokens, position of the first, then three digests.
_HEAD = struct.Struct("<8sIIQQ32s32s32s")
_SUMMED_FROM = len(MAGIC) + 4


#: K and V of a layer in memory: [1, heads, n, d] and [1, heads, n, dv].
Rows = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class RowShape:
    """What all passages of one model have in common.

    Attributes:
        layers: of the model.
        heads: KV heads of each.
        layout: of their blocks.
    """

    layers: int
    heads: int
    layout: RowLayout

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's rows in all layers."""
        return self.layers * self.heads * self.layout.row_bytes

    def packed_tokens(self, tokens: int) -> int:
        """How many of the last tokens lie in the front: those of a last block of which too much
        would be empty."""
        rows, rest = self.layout.block_rows, tokens % self.layout.block_rows
        is_packed = rest and (rows - rest) * _EMPTY_PART > self.layout.blocks(tokens) * rows
        return rest if is_packed else 0

    def block_tokens(self, tokens: int) -> int:
        """How many of the first tokens lie in blocks: all others are packed."""
        return tokens - self.packed_tokens(tokens)

    def blocks(self, tokens: int) -> int:
        """Blocks of one head of one layer."""
        return self.layout.blocks(self.block_tokens(tokens))

    def head_bytes(self, tokens: int) -> int:
        """Bytes of the blocks of one head of one layer."""
        return self.blocks(tokens) * self.layout.block_bytes

    def front_bytes(self, tokens: int) -> int:
        """Bytes in front of the blocks."""
        sums = 4 * self.layers * self.heads * self.blocks(tokens)
        packed = self.packed_tokens(tokens) * self.token_bytes
        return -(-(_HEAD.size + sums + packed) // PAGE_BYTES) * PAGE_BYTES

    def extent_bytes(self, tokens: int) -> int:
        """Bytes of the whole extent."""
        return self.front_bytes(tokens) + self.layers * self.heads * self.head_bytes(tokens)

    def pack(self, rows: Sequence[Rows]) -> np.ndarray:
        """uint8: the rows of each layer, one after the other: K of all heads, then V."""
        parts = [each.to(self.layout.dtype).cpu().contiguous() for pair in rows for each in pair]
        raw = [each.view(-1).view(torch.uint8) for each in parts]
        return (torch.cat(raw) if raw else torch.empty(0, dtype=torch.uint8)).numpy()

    def unpack(self, raw: np.ndarray, tokens: int) -> list[Rows]:
        """What `pack` was given, of so many tokens: of each layer K [1, heads, tokens, d] and V
        [1, heads, tokens, dv]."""
        widths = [self.layout.d, self.layout.dv]
        sizes = [self.heads * tokens * width * self.layout.dtype.itemsize for width in widths]
        values = torch.from_numpy(raw.copy()).split(sizes * self.layers)
        made = [
            each.view(self.layout.dtype).view(1, self.heads, tokens, widths[i % 2])
            for i, each in enumerate(values)
        ]
        return list(zip(made[::2], made[1::2], strict=True))

    def describe(self) -> dict[str, object]:
        """The shape, in words that can be written down."""
        layout = self.layout
        return {
            "layers": self.layers,
            "heads": self.heads,
            "format": layout.format,
            "d": layout.d,
            "dv": layout.dv,
            "block_rows": layout.block_rows,
        }


@dataclass(frozen=True)
class Identity:
    """What an extent is of. Equal identities have equal rows.

    Attributes:
        space: SHA-256 of the model, its rows' shape and its tokenizer.
        context: SHA-256 of the tokens that stood before (`digest_of`).
        text: SHA-256 of its own tokens.
        tokens: how many they are.
        first_position: of the first of them, as it was computed: how many stood before.
    """

    space: bytes
    context: bytes
    text: bytes
    tokens: int
    first_position: int

    @classmethod
    def of(cls, space: bytes, before: Sequence[np.ndarray], ids: np.ndarray) -> Identity:
        """The identity of tokens int32 [n] behind others."""
        return cls(space, digest_of(before), digest_of([ids]), len(ids), sum(map(len, before)))


def digest_of(parts: Sequence[np.ndarray]) -> bytes:
    """SHA-256 of token ids, int32, one array after the other: wherever they are cut."""
    found = hashlib.sha256()
    for each in parts:
        found.update(np.ascontiguousarray(each, dtype="<i4").tobytes())
    return found.digest()


def front_of(
    shape: RowShape, identity: Identity, sums: np.ndarray, packed: np.ndarray
) -> np.ndarray:
    """uint8 [front bytes]. `sums`: uint32 [layers, heads, blocks]; `packed`: uint8, see
    `RowShape.pack`."""
    front = np.zeros(shape.front_bytes(identity.tokens), np.uint8)
    head = _HEAD.pack(
        MAGIC,
        0,
        VERSION,
        identity.tokens,
        identity.first_position,
        identity.space,
        identity.context,
        identity.text,
    )
    front[: _HEAD.size] = np.frombuffer(head, np.uint8)
    table = np.ascontiguousarray(sums, dtype="<u4").reshape(-1).view(np.uint8)
    front[_HEAD.size : _HEAD.size + table.size] = table
    begin = _HEAD.size + table.size
    front[begin : begin + packed.size] = packed
    front[len(MAGIC) : _SUMMED_FROM] = np.frombuffer(
        struct.pack("<I", crc32c(front[_SUMMED_FROM:])), np.uint8
    )
    return front


def read_front(
    shape: RowShape, identity: Identity, front: np.ndarray
) -> tuple[np.ndarray, list[Rows]] | None:
    """What a front uint8 [front bytes] has: the checksums, uint32 [layers, heads, blocks], and the
    rows of each layer that are packed in it (none: an empty list). None where it is damaged, or
    another extent's."""
    (known,) = struct.unpack_from("<I", front[: _HEAD.size].tobytes(), len(MAGIC))
    if known != crc32c(np.ascontiguousarray(front[_SUMMED_FROM:])):
        return None
    said = _HEAD.unpack(front[: _HEAD.size].tobytes())
    own = (
        MAGIC,
        known,
        VERSION,
        identity.tokens,
        identity.first_position,
        identity.space,
        identity.context,
        identity.text,
    )
    if said != own:
        return None
    table = (shape.layers, shape.heads, shape.blocks(identity.tokens))
    begin = _HEAD.size + 4 * table[0] * table[1] * table[2]
    sums = front[_HEAD.size : begin].copy().view("<u4").astype(np.uint32).reshape(table)
    tokens = shape.packed_tokens(identity.tokens)
    end = begin + tokens * shape.token_bytes
    return sums, shape.unpack(front[begin:end], tokens) if tokens else []


@dataclass(frozen=True, eq=False)
class Extent:
    """An extent that is pinned.

    Attributes:
        number: in the index.
        identity: what it is of.
        directory: which of the library's it lies in.
        offset_bytes, size_bytes: its place in the data file there.
        sums: uint32 [layers, heads, blocks].
        packed: of each layer the rows of the tokens behind those in blocks; empty: there are none.
    """

    number: int
    identity: Identity
    directory: int
    offset_bytes: int
    size_bytes: int
    sums: np.ndarray
    packed: Sequence[Rows] = ()

    @property
    def packed_tokens(self) -> int:
        """Tokens that lie in the front."""
        return self.packed[0][0].shape[2] if self.packed else 0

    @property
    def block_tokens(self) -> int:
        """Tokens that lie in blocks."""
        return self.identity.tokens - self.packed_tokens

    def places(self, shape: RowShape) -> list[SegmentPlace]:
        """The place of each layer's blocks."""
        tokens = self.identity.tokens
        begin = self.offset_bytes + shape.front_bytes(tokens)
        each_bytes = shape.heads * shape.head_bytes(tokens)
        heads = range(shape.heads)
        return [
            SegmentPlace(
                shape.layout, heads, self.block_tokens, begin + layer * each_bytes, self.sums[layer]
            )
            for layer in range(shape.layers)
        ]

    def has(self, offset_bytes: int) -> bool:
        """Whether a byte of its data file is its."""
        return self.offset_bytes <= offset_bytes < self.offset_bytes + self.size_bytes
