"""An extent of a library: the K and V of one passage in all layers, one after the other in the data
file, with what it takes to check them in front::

    front | layer 0: head 0: blocks, head 1: blocks, ... | layer 1 | ...

The front says what the extent is of (model, the text before it, the text) and has the CRC32C of
every block; it is itself summed. So an index that was lost, restored from elsewhere or damaged
leads to no passage's rows but the right ones. All of it is whole pages of 4 KiB; an extent is never
changed.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...device.interface import SegmentPlace
from ...device.row_layout import PAGE_BYTES, RowLayout
from ...storage.files import crc32c

MAGIC = b"espnxPKV"
VERSION = 1
#: Magic, CRC32C of all that follows it, version, tokens, position of the first, then three digests.
_HEAD = struct.Struct("<8sIIQQ32s32s32s")
_SUMMED_FROM = len(MAGIC) + 4


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

    def blocks(self, tokens: int) -> int:
        """Blocks of one head of one layer."""
        return self.layout.blocks(tokens)

    def head_bytes(self, tokens: int) -> int:
        """Bytes of one head of one layer."""
        return self.blocks(tokens) * self.layout.block_bytes

    def front_bytes(self, tokens: int) -> int:
        """Bytes in front of the rows."""
        sums = 4 * self.layers * self.heads * self.blocks(tokens)
        return -(-(_HEAD.size + sums) // PAGE_BYTES) * PAGE_BYTES

    def extent_bytes(self, tokens: int) -> int:
        """Bytes of the whole extent."""
        return self.front_bytes(tokens) + self.layers * self.heads * self.head_bytes(tokens)

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


def front_of(shape: RowShape, identity: Identity, sums: np.ndarray) -> np.ndarray:
    """uint8 [front bytes]. `sums`: uint32 [layers, heads, blocks]."""
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
    front[len(MAGIC) : _SUMMED_FROM] = np.frombuffer(
        struct.pack("<I", crc32c(front[_SUMMED_FROM:])), np.uint8
    )
    return front


def read_front(shape: RowShape, identity: Identity, front: np.ndarray) -> np.ndarray | None:
    """The checksums, uint32 [layers, heads, blocks], of a front uint8 [front bytes]; None where it
    is damaged, or another extent's."""
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
    count = table[0] * table[1] * table[2]
    values = front[_HEAD.size : _HEAD.size + 4 * count].copy().view("<u4")
    return values.astype(np.uint32).reshape(table)


@dataclass(frozen=True, eq=False)
class Extent:
    """An extent that is pinned.

    Attributes:
        number: in the index.
        identity: what it is of.
        offset_bytes, size_bytes: its place in the data file.
        sums: uint32 [layers, heads, blocks].
    """

    number: int
    identity: Identity
    offset_bytes: int
    size_bytes: int
    sums: np.ndarray

    def places(self, shape: RowShape) -> list[SegmentPlace]:
        """The place of each layer's rows."""
        tokens = self.identity.tokens
        begin = self.offset_bytes + shape.front_bytes(tokens)
        each_bytes = shape.heads * shape.head_bytes(tokens)
        heads = range(shape.heads)
        return [
            SegmentPlace(shape.layout, heads, tokens, begin + layer * each_bytes, self.sums[layer])
            for layer in range(shape.layers)
        ]

    def has(self, offset_bytes: int) -> bool:
        """Whether a byte of the data file is its."""
        return self.offset_bytes <= offset_bytes < self.offset_bytes + self.size_bytes
