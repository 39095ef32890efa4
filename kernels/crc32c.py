"""CRC32C of many ranges of a byte buffer, one program per range.

A range of ``size`` bytes is seen as rounds of LANES words of 4 bytes, with zeros before its first
byte (they leave an empty register empty). Lane i takes word i of each round, so neighbouring lanes
read neighbouring words. Between rounds a lane's register moves past LANES words: a multiplication
by a constant, four look-ups. At the end lane i's register is multiplied by its distance from the
range's end, and all are XORed. A range is one program's work, whatever its size: meant for many
records or blocks, not for one huge file.

buffer                    uint8 ``[bytes]``
offset_bytes, size_bytes  int64 ``[n]``
round_shift, lane_shift   int32 ``[4, 256]`` and ``[LANES]``: bit patterns, see
                          ``espnx.ops.crc32c.shifts``
crc                       int64 ``[n]``
register                  the register before the first byte, ``seed ^ 0xFFFFFFFF``, as a signed
                          32-bit number

WORDS: every range begins at a multiple of 4 bytes and is a multiple of 4 long, so that words are
loaded whole.
"""

import triton
import triton.language as tl


@triton.jit
def _shifted(register, round_shift_ptr):
    """The register after LANES zero words."""
    moved = tl.zeros_like(register)
    for k in tl.static_range(4):
        byte = ((register >> (8 * k)) & 0xFF).to(tl.int32)
        moved ^= tl.load(round_shift_ptr + 256 * k + byte).to(tl.uint32, bitcast=True)
    return moved


@triton.jit
def _multiply(a, b):
    """The product of reflected polynomials over GF(2), modulo Castagnoli's: see
    ``espnx.ops.crc32c.shifts.multiply``."""
    product = tl.zeros_like(a)
    for power in tl.static_range(32):
        product ^= tl.where((a >> (31 - power)) & 1 != 0, b, 0)
        b = (b >> 1) ^ tl.where(b & 1 != 0, 0x82F63B78, 0).to(tl.uint32)
    return product


@triton.jit
def _load_word(first_ptr, at, initial, WORDS: tl.constexpr):
    """The 4 bytes at ``at`` of the range, zeros before its begin; its first 4 bytes XORed with the
    initial register."""
    if WORDS:
        word = tl.load(first_ptr.to(tl.pointer_type(tl.uint32)) + at // 4, mask=at >= 0, other=0)
        return word ^ tl.where(at == 0, initial, 0)
    word = tl.zeros(at.shape, dtype=tl.uint32)
    for b in tl.static_range(4):
        byte = tl.load(first_ptr + at + b, mask=at + b >= 0, other=0).to(tl.uint32)
        is_first = (at + b >= 0) & (at + b < 4)
        place = tl.where(is_first, 8 * (at + b), 0).to(tl.uint32)
        byte ^= tl.where(is_first, (initial >> place) & 0xFF, 0)
        word |= byte << (8 * b)
    return word


@triton.jit(
    do_not_specialize=["register"],
    do_not_specialize_on_alignment=["offset_bytes_ptr", "size_bytes_ptr"],
)
def crc32c_kernel(
    buffer_ptr,
    offset_bytes_ptr,
    size_bytes_ptr,
    round_shift_ptr,
    lane_shift_ptr,
    crc_ptr,
    register,
    LANES: tl.constexpr,
    WORDS: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64)
    size = tl.load(size_bytes_ptr + item)
    first_ptr = buffer_ptr + tl.load(offset_bytes_ptr + item)
    initial = register.to(tl.uint32, bitcast=True)
    lane = tl.arange(0, LANES)
    n_rounds = (size + 4 * LANES - 1) // (4 * LANES)
    # of the first round, counted from the range's first byte: 0 or negative
    begin = size - n_rounds * 4 * LANES

    state = tl.zeros([LANES], dtype=tl.uint32)
    for i in range(n_rounds):
        at = begin + i * 4 * LANES + 4 * lane
        state = _shifted(state, round_shift_ptr) ^ _load_word(first_ptr, at, initial, WORDS)
    joined = tl.xor_sum(
        _multiply(tl.load(lane_shift_ptr + lane).to(tl.uint32, bitcast=True), state), axis=0
    )
    # A range of fewer than 4 bytes leaves the rest of the initial register, moved down.
    short = tl.minimum(size, 3).to(tl.uint32)
    joined ^= tl.where(size < 4, initial >> (8 * short), 0)
    tl.store(crc_ptr + item, (joined ^ 0xFFFFFFFF).to(tl.int64))
