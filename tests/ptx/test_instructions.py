"""What the executor makes of single instructions, and what it calls a fault: PTX written by hand,
which takes 32-bit words ``in``, one a thread, to ``out``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tests.ptx.global_memory import GlobalMemory
from tests.ptx.program import Fault
from tests.ptx.running import Executable

N = 64
TEMPLATE = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 in,
	.param .u64 .ptr .global .align 1 out
)
.reqntid 64
{
	.reg .pred 	%p<9>;
	.reg .b16 	%rs<9>;
	.reg .b32 	%r<99>;
	.reg .b64 	%rd<9>;
	ld.param.b64 	%rd1, [in];
	ld.param.b64 	%rd2, [out];
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd3, %r1, 4;
	add.s64 	%rd4, %rd1, %rd3;
	add.s64 	%rd5, %rd2, %rd3;
	shl.b32 	%r2, %r1, 2;  // a thread's own place in shared memory
	xor.b32 	%r3, %r2, 4;  // its neighbour's
	xor.b32 	%r4, %r2, 128;  // that of a thread of the other warp
	ld.global.b32 	{ %r5 }, [ %rd4 + 0 ];
BODY
	st.global.b32 	[ %rd5 + 0 ], { %r9 };
	ret;
}
"""


def run(body: str, words: Sequence[int] | np.ndarray = ()) -> np.ndarray:
    """What each thread gives, uint32; it may load further words of its own."""
    given = np.zeros(max(N, len(words)), dtype=np.uint32)
    given[: len(words)] = words
    made = np.zeros(N, dtype=np.uint32)
    memory = GlobalMemory()
    parameters = {
        "in": np.array(memory.add("in", given.view(np.uint8), is_output=False), dtype=np.uint64),
        "out": np.array(memory.add("out", made.view(np.uint8), is_output=True), dtype=np.uint64),
    }
    Executable(TEMPLATE.replace("BODY", body), 1024).run((1, 1, 1), parameters, memory)
    return made


def fault(body: str) -> str:
    with pytest.raises(Fault) as caught:
        run(body)
    return caught.value.kind


def bits(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32).view(np.uint32)


@pytest.mark.parametrize(
    ("instruction", "given", "expected"),
    [
        ("bfe.u32 %r9, %r5, 4, 8;", 0xABCDE, 0xCD),
        ("bfe.s32 %r9, %r5, 4, 8;", 0xABCDE, 0xFFFFFFCD),
        ("bfi.b32 %r9, %r5, 0xFFFFFFFF, 8, 4;", 0x75, 0xFFFFF5FF),
        ("bfi.b32 %r9, %r5, 3, 28, 8;", 0x75, 0x50000003),
        ("shl.b32 %r9, %r5, 32;", 1, 0),
        ("shr.u32 %r9, %r5, 40;", 1, 0),
        ("shr.s32 %r9, %r5, 40;", 1 << 31, 0xFFFFFFFF),
        ("div.s32 %r9, %r5, 2;", 0xFFFFFFFD, 0xFFFFFFFF),  # -3 / 2 = -1
        ("rem.s32 %r9, %r5, 2;", 0xFFFFFFFD, 0xFFFFFFFF),
        ("prmt.b32 %r9, %r5, 0, 0x4123;", 0x11223344, 0x00332211),
        ("prmt.b32 %r9, %r5, 0, 0x8;", 0x80, 0x808080FF),
        ("lop3.b32 %r9, %r5, 0x00ff00ff, 0x64806480, 0x6a;", 0x80017FFE, 0x6481647E),
        ("lop3.b32 %r9, %r5, 0x0f0f0f0f, 0x33333333, 0xca;", 0xFF00FF00, 0x0F330F33),
        ("{ .reg .b32 %own<1>; mov.b32 %own0, 5; add.u32 %r9, %r5, %own0; }", 7, 12),
        ("cvt.rn.f32.s32 %r9, %r5;", 0xFFFFFFFF, int(bits(-1.0)[0])),
        ("rsqrt.approx.f32 %r9, %r5;", int(bits(16.0)[0]), int(bits(0.25)[0])),
        ("rsqrt.approx.f32 %r9, %r5;", 0, int(bits(float("inf"))[0])),
        ("cvt.rna.tf32.f32 %r9, %r5;", 0x3F801000, 0x3F802000),
        ("cvt.rna.tf32.f32 %r9, %r5;", 0x3F800FFF, 0x3F800000),
        ("cvt.rzi.s32.f32 %r9, %r5;", 0xC0200000, 0xFFFFFFFE),  # -2.5
        ("cvt.rzi.s32.f32 %r9, %r5;", 0x7FC00000, 0),
        ("cvt.rni.s32.f32 %r9, %r5;", 0xC0200000, 0xFFFFFFFE),  # -2.5, to even
        ("cvt.rni.s32.f32 %r9, %r5;", 0x40700000, 4),  # 3.75
        ("cvt.rn.bf16x2.f32 %r9, %r5, 0f3F800000;", 0x3F808000, 0x3F803F80),  # a tie, to even
        ("add.f16x2 %r9, %r5, %r5;", 0x3C004000, 0x40004400),
        ("add.s16x2 %r9, %r5, %r5;", 0x7FFF8001, 0xFFFE0002),
        ("max.f32 %r9, %r5, 0f3F800000;", 0x7FC00000, 0x3F800000),
        ("max.NaN.f32 %r9, %r5, 0f3F800000;", 0x7FC00000, 0x7FC00000),
        ("max.relu.s32 %r9, %r5, -3;", 0xFFFFFFFE, 0),
        ("max.relu.s32 %r9, %r5, 5;", 0xFFFFFFFE, 5),
        ("min.relu.s32 %r9, %r5, 5;", 7, 5),
        ("fma.rn.ftz.f32 %r9, %r5, 0f3F000000, 0f00000000;", 0x00800000, 0),
        ("not.b32 %r9, %r5;", 0, 0xFFFFFFFF),
        ("popc.b32 %r9, %r5;", 0x80000103, 4),
        ("shf.r.wrap.b32 %r9, %r5, 0x55667788, 40;", 0x11223344, 0x88112233),
        ("shf.r.wrap.b32 %r9, %r5, 0x55667788, 32;", 0x11223344, 0x11223344),
        (
            "mov.u32 %r6, 31; mov.u32 %r7, -1; shfl.sync.idx.b32 %r9|%p1, %r5, 0, %r6, %r7;",
            0xABC,
            0xABC,
        ),
        ("cvta.to.global.u64 %rd6, %rd4; ld.global.nc.u32 %r9, [%rd6];", 0xABC, 0xABC),
        (
            "cvt.u16.u32 %rs1, %r5; cvt.s8.s32 %rs2, %r5; mov.b32 %r9, {%rs1, %rs2};",
            0x80,
            0xFF800080,
        ),
        ("setp.ne.f32 %p1, %r5, %r5; selp.b32 %r9, 1, 0, %p1;", 0x7FC00000, 0),
        ("setp.neu.f32 %p1, %r5, %r5; selp.b32 %r9, 1, 0, %p1;", 0x7FC00000, 1),
        ("setp.num.f32 %p1, %r5, %r5; selp.b32 %r9, 1, 0, %p1;", 0x7FC00000, 0),
        ("setp.eq.f16x2 %p1|%p2, %r5, 0x7C003C00; selp.b32 %r9, 1, 0, %p1;", 0x40003C00, 1),
        ("setp.eq.f16x2 %p1|%p2, %r5, 0x7C003C00; selp.b32 %r9, 1, 0, %p2;", 0x40003C00, 0),
        ("setp.eq.f16x2 %p1|%p2, %r5, %r5; selp.b32 %r9, 1, 0, %p2;", 0x7E003C00, 0),
        ("mad.wide.s32 %rd6, %r5, 3, 7; cvt.u32.u64 %r9, %rd6;", 0xFFFFFFFF, 4),
    ],
)
def test_arithmetic(instruction: str, given: int, expected: int) -> None:
    found = run(f"{instruction}\n", [given])[0]
    assert f"{found:#x}" == f"{expected:#x}"


def test_threads_that_part_meet_again() -> None:
    body = """
	mov.b32 %r9, 7;
	setp.lt.u32 %p1, %r1, 3;
	@%p1 bra $L__few;
	add.s32 %r9, %r9, 1;
	bra.uni $L__end;
$L__few:
	add.s32 %r9, %r9, 100;
$L__end:
	bar.sync 0;
	add.s32 %r9, %r9, %r1;
    """
    expected = np.where(np.arange(N) < 3, 107, 8) + np.arange(N)
    assert (run(body) == expected).all()


def test_a_loop_of_each_threads_own_length() -> None:
    body = """
	mov.b32 %r9, 0;
$L__loop:
	add.s32 %r9, %r9, 2;
	setp.le.u32 %p1, %r9, %r1;
	@%p1 bra $L__loop;
    """
    assert (run(body) == np.arange(N) // 2 * 2 + 2).all()


def test_lanes() -> None:
    words = np.arange(N) * 3
    swapped = run("shfl.sync.bfly.b32 %r9, %r5, 5, 31, -1;", words)
    assert (swapped == words[np.arange(N) ^ 5]).all()
    voted = run("setp.gt.u32 %p1, %r1, 34; vote.sync.ballot.b32 %r9, %p1, -1;")
    assert (voted == np.where(np.arange(N) < 32, 0, 0xFFFFFFF8)).all()
    joined = run("mov.b32 %r6, -1; redux.sync.xor.b32 %r9, %r5, %r6;", words)
    expected = np.bitwise_xor.reduce(words.reshape(2, 32), axis=1)
    assert (joined == np.repeat(expected, 32)).all()


A_FP16 = """
	cvt.rn.f16.u32 %rs1, %r10; cvt.rn.f16.u32 %rs2, %r11; mov.b32 %rTO, {%rs1, %rs2};
"""


def test_a_product_of_fp16() -> None:
    """A[row, column] = row + 16 column, of 16 x 16, times a B that picks columns 1, 3, ... 15: each
    value comes from its own place of A."""
    body = ["and.b32 %r6, %r1, 31; shr.u32 %r7, %r6, 2; and.b32 %r8, %r6, 3; shl.b32 %r8, %r8, 1;"]
    for i in range(4):
        row, column = 8 * (i % 2), 8 * (i // 2)
        body.append(
            f"add.s32 %r10, %r8, {column}; shl.b32 %r10, %r10, 4; add.s32 %r10, %r10, %r7;"
            f"add.s32 %r10, %r10, {row}; add.s32 %r11, %r10, 16;"
            + A_FP16.replace("TO", f"{20 + i}")
        )
    for i in range(2):  # B[k, n] = 1 where k = 2 n + 1: k = 8 i + r8 + half, n = r7
        body.append(
            f"add.s32 %r12, %r8, {8 * i}; shl.b32 %r13, %r7, 1; setp.eq.b32 %p1, %r12, %r13;"
            "mov.b32 %r10, 0; selp.b32 %r11, 1, 0, %p1;" + A_FP16.replace("TO", f"{30 + i}")
        )
    zeros = "mov.b32 %r40, 0f00000000;"
    product = (
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r50, %r51, %r52, %r53}, "
        "{%r20, %r21, %r22, %r23}, {%r30, %r31}, {%r40, %r40, %r40, %r40};"
    )
    lane = np.arange(N) % 32
    for i in range(4):
        found = run("\n".join([*body, zeros, product, f"mov.b32 %r9, %r{50 + i};"]))
        rows, columns = lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2
        assert (found.view(np.float32) == rows + 16 * (2 * columns + 1)).all()


WHOLE_PRODUCT = (
    "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%r50, %r51, %r52, %r53}, "
    "{%r20, %r21, %r22, %r23}, {%r30, %r31}, {%r40, %r40, %r40, %r40};"
)
HALF_PRODUCT = (
    "mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%r50, %r51, %r52, %r53}, "
    "{%r20, %r21}, {%r30}, {%r40, %r40, %r40, %r40};"
)


@pytest.mark.parametrize("depth", [16, 32])
def test_products_of_int8_are_whole_numbers(depth: int) -> None:
    """A[row, k] = row - 8 where k = 5 row % depth, else 0; B[k, column] = 16 column - 100 + k. As
    NVIDIA describes the operands: four values of a row, or of a column, in a register."""
    lane = np.arange(N) % 32
    group, quad = lane // 4, lane % 4
    n_registers = depth // 8  # of A; B has half as many
    words = []
    for i in range(n_registers):
        row, first = group + 8 * (i % 2), 4 * quad + 16 * (i // 2)
        each = [np.where(first + j == 5 * row % depth, row - 8, 0) & 0xFF for j in range(4)]
        words.append(sum(value << 8 * j for j, value in enumerate(each)))
    for i in range(n_registers // 2):
        each = [(16 * group - 100 + 4 * quad + 16 * i + j) & 0xFF for j in range(4)]
        words.append(sum(value << 8 * j for j, value in enumerate(each)))
    registers = [*range(20, 20 + n_registers), *range(30, 30 + n_registers // 2)]
    loads = [
        f"ld.global.b32 {{ %r{register} }}, [ %rd4 + {4 * N * number} ];"
        for number, register in enumerate(registers)
    ]
    product = WHOLE_PRODUCT if depth == 32 else HALF_PRODUCT
    for added in (3, 2**31 - 1):  # which wraps
        for i in range(4):
            body = [*loads, f"mov.b32 %r40, {added};", product, f"mov.b32 %r9, %r{50 + i};"]
            found = run("\n".join(body), np.concatenate(words))
            row, column = group + 8 * (i // 2), 2 * quad + i % 2
            expected = (row - 8) * (16 * column - 100 + 5 * row % depth) + added
            assert (found == (expected & 0xFFFFFFFF)).all()


def test_products_of_int8_that_saturate_are_not_known() -> None:
    body = WHOLE_PRODUCT.replace(".s8.s32 ", ".s8.s32.satfinite ")
    zeros = "\n".join(f"mov.b32 %r{i}, 0;" for i in (20, 21, 22, 23, 30, 31, 40))
    assert fault(f"{zeros}\n{body}\nmov.b32 %r9, %r50;") == "unknown"
    assert (run(f"{zeros}\n{WHOLE_PRODUCT}\nmov.b32 %r9, %r50;") == 0).all()


def test_tf32_operands_lose_13_bits() -> None:
    body = """
	mov.b32 %r10, 0f3F801FFF;
	mov.b32 %r11, 0f00000000;
	mov.b32 %r12, 0f3F800000;
	mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r9, %r13, %r14, %r15},
	{%r10, %r11, %r11, %r11},
	{%r12, %r11}, {%r11, %r11, %r11, %r11};
    """
    assert (run(body).view(np.float32) == 4.0).all()


def test_matrices_come_from_the_rows_that_lanes_name() -> None:
    """Word w of shared memory holds w; row r of matrix j begins at word 4 r + 32 j."""
    body = """
	st.shared.b32 [ %r2 + 0 ], %r1;
	bar.sync 0;
	and.b32 %r6, %r1, 15;
	shl.b32 %r6, %r6, 4;
	ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r8, %r9}, [%r6];
    """
    assert (run(body) == 32 + np.arange(N) % 32).all()


STORED = "st.shared.b32 [ %r2 + 0 ], %r5;\n"
COPIED = "cp.async.ca.shared.global [ %r2 + 0 ], [ %rd4 + 0 ], 0x4;\ncp.async.commit_group;\n"
WAITED = "cp.async.wait_group 0;\n"
BARRIER, WARP_BARRIER = "bar.sync 0;\n", "bar.warp.sync -1;\n"
OWN, NEXT, FAR = (f"ld.shared.b32 %r9, [%r{i}];\n" for i in (2, 3, 4))


@pytest.mark.parametrize(
    "body",
    [
        STORED + OWN,
        STORED + WARP_BARRIER + NEXT,
        STORED + BARRIER + FAR,
        COPIED + WAITED + OWN,
        COPIED + WAITED + BARRIER + FAR,
        STORED + BARRIER + FAR + BARRIER + STORED,
    ],
)
def test_what_barriers_and_waits_allow(body: str) -> None:
    words = np.arange(N) + 5
    by = 1 if NEXT in body else 32 if FAR in body else 0
    assert (run(body, words) == words[np.arange(N) ^ by]).all()


def test_nans_of_the_same_place_are_the_same() -> None:
    """Of whatever bits, which the host gives them."""
    alike = "or.b32 %r9, %r1, 0x7FC00000;\nst.shared.b32 [global_smem], %r9;\n" + BARRIER
    assert (run(alike) >= 0x7FC00000).all()
    assert fault(alike.replace("0x7FC00000", "0x7F000000")) == "race"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (OWN, "unwritten"),
        (STORED + NEXT, "race"),
        (STORED + FAR, "race"),
        (STORED + WARP_BARRIER + FAR, "race"),
        (STORED + BARRIER + FAR + STORED, "race"),
        (STORED + "st.shared.b32 [ %r3 + 0 ], %r5;\n" + BARRIER + OWN, "race"),
        ("st.shared.b32 [global_smem], %r1;\n" + BARRIER + "mov.b32 %r9, 0;", "race"),
        (COPIED + OWN, "in flight"),
        (COPIED + BARRIER + OWN, "in flight"),
        (COPIED + STORED + WAITED + OWN, "in flight"),
        (COPIED + COPIED + WAITED + OWN, "in flight"),
        (COPIED + WAITED + FAR, "race"),
        (COPIED + BARRIER + WAITED + FAR, "race"),
        (COPIED.replace("cp.async.commit_group;", "") + WAITED + BARRIER + OWN, "in flight"),
        ("ld.shared.b32 %r9, [%r2+1024];", "outside"),
        ("ld.shared.b32 %r9, [%r2+2];", "misaligned"),
        ("ld.global.b32 { %r9 }, [ %rd4 + 4 ];", "outside"),
        ("ld.global.b32 { %r9 }, [ %rd4 + -4 ];", "outside"),
        ("ld.global.b32 { %r9 }, [ %rd3 + 0 ];", "outside"),
        ("ld.global.v2.b32 { %r9, %r8 }, [ %rd4 + 0 ];", "misaligned"),
        ("ld.global.b32 { %r9 }, [ %rd5 + 0 ];", "unwritten"),
        ("mov.b32 %r9, 0; st.global.b32 [ %rd4 + 0 ], { %r9 };", "outside"),
        ("st.global.b32 [ %rd2 + 0 ], { %r1 };", "race"),
        ("", "unwritten"),
        ("setp.lt.u32 %p1, %r1, 9; @%p1 mov.b32 %r9, 0;", "unwritten"),
        ("add.s32 %r9, %r8, 1;", "unwritten"),
        ("setp.lt.u32 %p1, %r1, 9; @%p1 ret; mov.b32 %r9, 0;", "unwritten"),
        ("div.u32 %r9, %r1, %r5;", "division"),
        (
            "setp.lt.u32 %p1, %r1, 9; @%p1 bra $L__a; bar.sync 0;\n$L__a:\nmov.b32 %r9, 0;",
            "divergent",
        ),
        ("setp.lt.u32 %p1, %r1, 9; @%p1 bar.sync 0; mov.b32 %r9, 0;", "divergent"),
        ("atom.global.inc.u32 %r9, [%rd4], 1;", "outside"),
        ("setp.lt.u32 %p1, %r1, 9; @%p1 shfl.sync.bfly.b32 %r9, %r5, 1, 31, -1;", "divergent"),
        ("brev.b32 %r9, %r1;", "unknown"),
        ("shf.l.wrap.b32 %r9, %r1, %r1, 3;", "unknown"),
        ("cvta.to.shared.u64 %rd6, %rd4; mov.b32 %r9, 0;", "unknown"),
        ("shfl.sync.bfly.b32 %r9, %r5, 1, 15, -1;", "unknown"),
        ("setp.lt.u32 %p1, %r1, 9; vote.sync.ballot.b32 %r9, %p1, 7;", "unknown"),
        (
            "setp.lt.u32 %p1, %r1, 9; @%p1 vote.sync.ballot.b32 %r9, %p1, -1; mov.b32 %r9, 0;",
            "divergent",
        ),
        ("add.sat.s32 %r9, %r1, %r1;", "unknown"),
        ("bar.sync 1; mov.b32 %r9, 0;", "unknown"),
        ("cvt.rzi.u32.f32 %r9, %r1;", "unknown"),
    ],
)
def test_what_is_a_fault(body: str, kind: str) -> None:
    assert fault(body) == kind


def test_copies_of_a_part_leave_zeros_and_read_no_more() -> None:
    """Of four bytes so many as the thread's number says, up to all."""
    copied = COPIED.replace("0x4;", "0x4, %r6;") + WAITED + BARRIER + OWN
    found = run("min.u32 %r6, %r1, 4;\n" + copied, [0x44332211] * 6)
    assert found[:6].tolist() == [0, 0x11, 0x2211, 0x332211, 0x44332211, 0x44332211]


def test_threads_wait_for_others_that_still_come() -> None:
    """Before what a warp does together, though it stands before where the others are."""
    body = """
setp.lt.u32 %p1, %r1, 9;
mov.b32 %r6, %r5;
@%p1 bra $L__far;
$L__back:
shfl.sync.bfly.b32 %r9, %r6, 1, 31, -1;
bra.uni $L__end;
$L__far:
add.u32 %r6, %r5, 100;
bra.uni $L__back;
$L__end:
"""
    expected = [each + 100 if each < 9 else each for each in (i ^ 1 for i in range(N))]
    assert run(body, range(N)).tolist() == expected


def test_blocks_wait_for_warps_that_do_something_before() -> None:
    """A barrier may stand before what some warps do together until they reach it."""
    body = """
setp.lt.u32 %p1, %r1, 32;
mov.b32 %r6, %r5;
@%p1 bra $L__first;
$L__met:
bar.sync 0;
mov.b32 %r9, %r6;
bra.uni $L__end;
$L__first:
shfl.sync.bfly.b32 %r6, %r5, 1, 31, -1;
bra.uni $L__met;
$L__end:
"""
    assert run(body, range(N)).tolist() == [i ^ 1 if i < 32 else i for i in range(N)]


def test_counters() -> None:
    """Threads count one after another, up to a most; nobody reads or writes a counter in another
    way."""
    memory, words = GlobalMemory(), np.array([7, 0], dtype=np.uint32)
    base = memory.add("counter", words.view(np.uint8), is_output=False, is_counter=True)
    places = np.array([base, base + 4, base, base], dtype=np.uint64)
    assert memory.count(places, np.array([8, 9, 8, 8], dtype=np.uint32)).tolist() == [7, 0, 8, 0]
    assert words.tolist() == [1, 1]
    for access in (
        lambda: memory.read(places[:1], 4),
        lambda: memory.write(places[:1], np.zeros((1, 4), dtype=np.uint8), 0),
        lambda: memory.count(places[:1] + np.uint64(8), np.ones(1, dtype=np.uint32)),
    ):
        with pytest.raises(Fault):
            access()


def test_a_program_without_end() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.ptx.running.STEPS_MAX", 100)
        assert fault("$L__again:\nbra.uni $L__again;\nmov.b32 %r9, 0;") == "endless"
