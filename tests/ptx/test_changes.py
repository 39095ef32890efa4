"""Each barrier, wait, fence and mask of compiled kernels is taken out, and that is noticed: by the
executor, or by a wrong result. Those that go unnoticed are listed here."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from espnx.ops import crc32c_ranges_reference, maxsim_reference
from espnx.ops.attention import by_slices
from espnx.ops.crc32c.cuda import crc32c_cuda, crc32c_triton
from espnx.ops.gather import gather_reference
from espnx.ops.gather.cuda import gather_cuda
from espnx.ops.maxsim import by_warps
from espnx.ops.maxsim.cuda import is_whole, maxsim_cuda, maxsim_triton
from tests.ops.attention.merging import check_merge
from tests.ops.attention.test_attention import assert_close, causal, make_case
from tests.ops.attention.test_kernel import PRECISION, case_dtype, run, stored_row
from tests.ops.records import integers, normals, scatter
from tests.ops.tolerances import assert_scores_close, maxsim_bound
from tests.ptx.changes import Change, changes
from tests.ptx.nvcc import compiled, needs_nvcc
from tests.sweeps import in_steps


def scores(fmt: str, n_query_tokens: int, d: int) -> None:
    """Three tiles of tokens, and at the buffer's end a document of one: there every mask of a row
    or a column matters. Then the same by an infinite query value, which has to be made with
    care."""
    records = scatter([normals(n, d, seed=n) for n in (130, 1)], fmt, align_bytes=16)
    assert records.offset_bytes[1] > records.offset_bytes[0]
    query = normals(n_query_tokens, d, seed=9)
    bound = maxsim_bound(query, records, tensor_cores=True)
    codebook = records.codebook
    tables = () if codebook is None else (codebook.centroids, codebook.bucket_weights)
    for value in (None, torch.inf) if is_whole(n_query_tokens, d, fmt) else (None,):
        if value is not None:
            query[0, 3] = value
        found = maxsim_triton(query, *records.args, 0, *tables)
        expected = maxsim_reference(query, *records.args, codebook=codebook)
        assert_scores_close(found, expected, bound)


def attends(fmt: str, group: int, d: int) -> None:
    """Tiles of which one holds an infinity, and a sequence of one row."""
    for n_rows in (70, 1):
        case = make_case(n_rows=[n_rows], n_kv=1, group=group, d=d, fmt=fmt, gap_bytes=0)
        if fmt == "int8":
            v_scales = case.buffer[4 * d + 16 * d :]
            v_scales[:4] = torch.tensor([torch.inf]).view(torch.uint8)
        else:
            case.buffer.view(case_dtype(case)).view(-1, 2, 16, d)[0, 1, 0, 5] = torch.inf
        assert_close(case, run(case), **PRECISION)


def attends_to_short_blocks(fmt: str, block_rows: int) -> None:
    """Few queries over tiles of several blocks, or of one block that is the only one, of which one
    holds an infinity, some rows masked; behind the last row nothing but NaNs."""
    for n_rows, rows in (([150], block_rows), ([1, 50], block_rows), ([150], 150)):
        case = make_case(
            n_rows=n_rows, n_kv=1, group=3, d=24, fmt=fmt, block_rows=rows, gap_bytes=0
        )
        case.visible = torch.ones(len(n_rows), max(n_rows), dtype=torch.uint8)
        case.visible[0, 5:9] = 0
        for row in range(n_rows[0], case.table.shape[2] * rows):
            for of_v in (False, True):
                stored_row(case, row, of_v=of_v).fill_(torch.nan)
        assert_close(case, run(case), **PRECISION)
        stored_row(case, 0, of_v=True)[5] = torch.inf
        assert_close(case, run(case), **PRECISION)


def attends_to_blocks() -> None:
    """int8 rows of blocks that tiles are parts of, some masked."""
    for n_rows in (150, 1):
        case = make_case(
            n_rows=[n_rows], n_kv=1, group=3, d=72, dv=24, fmt="int8", block_rows=128, gap_bytes=0
        )
        case.visible = torch.ones(1, n_rows, dtype=torch.uint8)
        case.visible[0, 5:9] = 0
        assert_close(case, run(case), **PRECISION)
        case.buffer[72 * 132 :][:4] = torch.tensor([torch.inf]).view(torch.uint8)
        assert_close(case, run(case), **PRECISION)


def attends_widely() -> None:
    """X rows in two pieces, of several tiles and of one row; the last query alone sees an
    infinity."""
    for n_rows in (40, 1):
        case = causal(
            make_case(n_rows=[n_rows], q_len=2, n_kv=1, d=272, dv=0, gap_bytes=0, block_rows=8)
        )
        assert_close(case, run(case), **PRECISION)
        case.buffer.view(torch.float16).view(-1, 272)[n_rows - 1, 5] = torch.inf
        case.query[..., 5] = 0.5
        assert_close(case, run(case), **PRECISION)


def sums(unit: int) -> None:
    """Several rounds, and less than one."""
    sizes, offsets = torch.tensor([258, 1]) * unit, torch.tensor([0, 258]) * unit
    buffer = torch.arange(259 * unit).to(torch.uint8)
    expected = crc32c_ranges_reference(buffer, offsets, sizes, 7)
    assert torch.equal(crc32c_triton(buffer, offsets, sizes, 7), expected)


def gathers() -> None:
    """All three variants: records at the ends of a buffer and of a warp's share, shorter than a
    word and longer than what lanes load ahead; enough of them for a search of several steps."""
    for unit in (1, 4, 16):
        sizes = unit * (torch.arange(70) * 5 % 13)
        sizes[[3, 40]] = torch.tensor([300 * unit, 24000])
        offsets = unit * (torch.arange(70) * 11 % 20)
        buffer = (torch.arange(24016) * 37 % 251).to(torch.uint8)
        buffer = buffer[-buffer.data_ptr() % 16 :][:24000]
        offsets[40] = 0
        expected = gather_reference(buffer, offsets, sizes)
        assert torch.equal(gather_cuda(buffer, offsets, sizes), expected)


def sums_by_warps() -> None:
    """More ranges than a block has warps, of one round to five, with and without bytes before and
    after their pieces."""
    sizes = torch.tensor([0, 7, 16, 33, 600, 1024, 1061, 2100, 2560] * 4)
    offsets = torch.arange(36) * 7
    offsets[8], offsets[-1] = 0, 245
    buffer = (torch.arange(2821) * 91 % 253).to(torch.uint8)
    buffer = buffer[-buffer.data_ptr() % 16 :][:2805]
    expected = crc32c_ranges_reference(buffer, offsets, sizes, 7)
    assert torch.equal(crc32c_cuda(buffer, offsets, sizes, 7), expected)


def scores_by_warps(fmt: str, d: int = 64) -> None:
    """Documents one after another in the same ring, of which each has another last tile; one is
    empty, one is made with care, and the last ends where the buffer does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_warps, "WARPS", 2)
        patch.setattr(by_warps, "_MULTIPROCESSORS", 1)
        documents = [integers(n, d, seed=n) for n in (1, 0, 33, 2, 1, 1, 50)]
        records = scatter(documents, fmt, align_bytes=16, seed=4)
        assert records.offset_bytes.argmax() == 6
        query = integers(5, d, seed=9)
        codebook = records.codebook
        expected = maxsim_reference(query, *records.args, codebook=codebook)
        if fmt == "bf16":
            place = records.offset_bytes[4].item() + 2
            records.buffer[place : place + 2] = torch.tensor([0x80, 0x7F]).to(torch.uint8)
            expected = maxsim_reference(query, *records.args)
        elif fmt == "fp32":
            place = records.offset_bytes[4].item() + 4
            records.buffer[place : place + 4] = torch.tensor([0, 0, 0x80, 0x7F]).to(torch.uint8)
            expected = maxsim_reference(query, *records.args)
        elif codebook is not None:
            place = records.offset_bytes[4].item()
            records.buffer[place : place + 4] = 0xFF
            expected[4] = torch.nan
        tables = () if codebook is None else (codebook.centroids, codebook.bucket_weights)
        found = maxsim_cuda(query, *records.args, 0, *tables)
        assert torch.allclose(found, expected, rtol=1e-5, equal_nan=True)


def scores_by_slices(fmt: str = "bf16") -> None:
    """Documents one after another in rings of 4, 3 and 2 stages, with two buffers of shares and
    with one; one is made with care, and the last ends where the buffer does."""
    documents = [integers(n, 136, seed=n) for n in (1, 0, 65, 2, 33)]
    records = scatter(documents, fmt, align_bytes=16, seed=6)
    assert records.offset_bytes.argmax() == 4
    query = integers(5, 136, seed=9)
    place = records.offset_bytes[3].item() + 2  # the second value, or the scale's upper half
    records.buffer[place : place + 2] = torch.tensor([0x80, 0x7F]).to(torch.uint8)
    expected = maxsim_reference(query, *records.args)
    for depth in ((4, 2), (3, 1), (2, 2)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(by_warps, "_MULTIPROCESSORS", 1)
            patch.setattr(by_warps, "_RESIDENT_WARPS", 4)
            patch.setattr(by_warps, "_DEPTHS", (depth,))
            patch.setattr(by_warps, "_DEPTHS_OF_FLAT", ((depth[0], 1),))
            by_warps.sliced.cache_clear()
            try:
                found = maxsim_cuda(query, *records.args)
            finally:
                by_warps.sliced.cache_clear()
            assert torch.allclose(found, expected, rtol=1e-5, equal_nan=True)


def attends_by_slices() -> None:
    """X rows of three warps in two tiles, from rings of 2, 3 and 4 stages; the last query alone
    sees an infinity in the last row, which ends where the buffer does."""
    case = causal(
        make_case(n_rows=[40], q_len=2, n_kv=1, d=136, dv=0, gap_bytes=0, block_rows=8, seed=6)
    )
    assert case.table.argmax() == 4
    case.buffer.view(torch.float16)[5 - 136] = torch.inf
    case.query[..., 5] = 0.5
    for stages in (2, 3, 4):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(by_slices, "_STAGES", (stages,))
            by_slices.plan.cache_clear()
            assert_close(case, run(case, 1), **PRECISION)
    by_slices.plan.cache_clear()


PROGRAMS: dict[str, Callable[[], None]] = {
    "maxsim fp16": lambda: scores("fp16", 1, 24),
    "maxsim bf16": lambda: scores("bf16", 1, 24),
    "maxsim int8": lambda: scores("int8", 1, 24),
    "maxsim bit1": lambda: scores("bit1", 1, 24),
    "maxsim residual2": lambda: scores("residual2", 1, 24),
    "maxsim fp32": lambda: scores("fp32", 1, 24),
    "maxsim fp16, four warps at a time": lambda: scores("fp16", 65, 64),
    "attention fp16": lambda: attends("fp16", 9, 24),
    "attention bf16": lambda: attends("bf16", 9, 24),
    "attention fp16, few queries": lambda: attends_to_short_blocks("fp16", 32),
    "attention bf16, few queries": lambda: attends_to_short_blocks("bf16", 48),
    "attention int8": lambda: attends("int8", 3, 24),
    "attention int8, blocks": attends_to_blocks,
    "attention fp32": lambda: attends("fp32", 3, 24),
    "attention of wide rows": attends_widely,
    "attention's merge": lambda: check_merge(9, 1, 2, 72),
    "crc32c of words": lambda: sums(4),
    "crc32c of bytes": lambda: sums(1),
}
DEVICE_PROGRAMS: dict[str, Callable[[], None]] = {
    "gather": gathers,
    "crc32c by warps": sums_by_warps,
    "maxsim bf16 by warps": lambda: scores_by_warps("bf16"),
    "maxsim int8 by warps": lambda: scores_by_warps("int8"),
    "maxsim bit1 by warps": lambda: scores_by_warps("bit1", 128),
    "maxsim residual2 by warps": lambda: scores_by_warps("residual2"),
    "maxsim fp32 by warps": lambda: scores_by_warps("fp32"),
    "maxsim by slices": scores_by_slices,
    "maxsim int8 by slices": lambda: scores_by_slices("int8"),
    "attention by slices": attends_by_slices,
}
#: The file of csrc/cuda, the kernel where it has several, and how many barriers and waits. Masks of
#: MaxSim's copies spare the memory reads of the document's first row, in place of rows that are not
#: there; what stands in their place is never the largest.
DEVICE_CODE = {
    "gather": ("gather", "", 0),
    "crc32c by warps": ("crc32c", "", 1),
    "maxsim bf16 by warps": ("maxsim", "espnx_maxsim_bf16_64", 3),
    "maxsim int8 by warps": ("maxsim", "espnx_maxsim_int8_64", 2),
    "maxsim bit1 by warps": ("maxsim", "espnx_maxsim_bit1_128", 2),
    "maxsim residual2 by warps": ("maxsim_residual", "espnx_maxsim_residual2_64", 4),
    "maxsim fp32 by warps": ("maxsim_fp32", "espnx_maxsim_fp32_64", 2),
    "maxsim by slices": ("maxsim_slices", "espnx_maxsim_bf16_slices_64", 8),
    "maxsim int8 by slices": ("maxsim_slices", "espnx_maxsim_int8_slices_96", 7),
    "attention by slices": ("attention", "espnx_attention_fp16_8_64", 17),
}
#: Of each program's barriers, waits and masks, by their order, those of which none is missed: no
#: result changes and no rule of the executor is broken without one. Why has not been worked out.
UNNOTICED: dict[str, set[tuple[str, int]]] = {
    # of products that continue the same sums
    "maxsim fp16": {("barrier", 23), *(("wait", n) for n in (2, 3, 4))},
    "maxsim int8": {("wait", n) for n in (2, 3, 4)},
    "maxsim bf16": {("barrier", 0), ("barrier", 12), *(("wait", n) for n in (2, 3, 4, 5, 6))},
    "maxsim fp16, four warps at a time": {("barrier", 0)},
    "maxsim fp32": {("barrier", 0), ("barrier", 6), ("barrier", 11)},
    "maxsim bit1": {("barrier", 16), *(("wait", n) for n in (1, 2, 3))},
    "maxsim residual2": {("barrier", n) for n in (0, 6, 7, 10)},
    "attention fp16": {("mask", 36), *(("barrier", n) for n in (28, 36, 37, 38))},
    "attention bf16": {("barrier", 28)},
    "attention fp16, few queries": {("barrier", n) for n in (1, 31, 41, 50, 80, 90)},
    "attention bf16, few queries": {("barrier", n) for n in (0, 30, 40, 48, 78, 88)},
    "attention int8": {("barrier", n) for n in (48, 62, 108)},
    "attention int8, blocks": {("barrier", 0)},
    "attention fp32": {("barrier", 32)},
}


def why_a_mask_is_not_needed(program: str, text: str) -> str | None:
    if "st.shared" in text or re.search(r"st\.global\.b\d", text):
        return "threads that the mask leaves out hold the same value as the one that stores it"
    if "ld.shared" in text:
        return "what further lanes load has been written, and none of it is used"
    if ("ld.global" in text or "cp.async" in text) and program.startswith("attention"):
        return (
            "blocks are whole, so rows that do not count lie in the buffer, and no query sees them"
        )
    if "cp.async" in text and program == "maxsim residual2":
        return "rows that are not there name the first centroid and weight; none of it is used"
    return None


@in_steps(36)
@pytest.mark.parametrize("program", PROGRAMS)
def test_one_less_is_noticed(program: str, step: int, launch: Callable[..., Any]) -> None:
    texts: list[str] = []

    def kept(ptx: str) -> str:
        texts.append(ptx)
        return ptx

    launch(kept)
    PROGRAMS[program]()
    turn: Counter[str] = Counter()
    every, found = [], {}
    for ptx in dict.fromkeys(texts):
        for change in changes(ptx):
            key = (change.kind, turn[change.kind])
            turn[change.kind] += 1
            # others may be noticed or not
            if change.kind != "mask" or not why_a_mask_is_not_needed(program, change.before):
                every.append((key, ptx, change))
    tried = every[::step]
    for key, ptx, change in tried:
        launch(partial(_changed, ptx, change))
        if not _is_noticed(PROGRAMS[program]):
            found[key] = change
    assert tried
    expected = {key for key, *_ in tried} & UNNOTICED.get(program, set())
    assert set(found) == expected, _listed(found)


@needs_nvcc
@in_steps(18)
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(each, marks=[pytest.mark.sweep] if "int8" in each or "bit1" in each else [])
        for each in DEVICE_PROGRAMS
    ],
)
def test_one_less_in_cuda_is_noticed(
    program: str, step: int, device_code: Callable[..., Any]
) -> None:
    """Every barrier and wait, and of branches at least two in five; of attention's one in four, as
    caps, windows, slopes and masks are branches, too, which this program has none of. Of the others
    some lead past a loop that has no turn to take, some back to a loop that loads ahead where the
    one after it does the rest, some past a store of the same value by further lanes or warps; which
    they are differs between compilers."""
    monkey = pytest.MonkeyPatch()
    monkey.setattr("tests.ptx.running.STEPS_MAX", 20_000)  # of the unchanged ones: 3,000
    name, entry, n_barriers = DEVICE_CODE[program]
    every = list(changes(compiled(name).decode(), entry=entry, branches=True))
    barriers = [each for each in every if each.kind in ("barrier", "wait")]
    branches = [each for each in every if each.kind == "branch"][::step]
    unnoticed = []
    with monkey.context():
        DEVICE_PROGRAMS[program]()
        for change in barriers + branches:
            device_code(change)
            if not _is_noticed(DEVICE_PROGRAMS[program]):
                unnoticed.append(change)
    monkey.undo()
    assert len(barriers) == n_barriers
    assert {each.kind for each in unnoticed} <= {"branch"}
    share = 0.9 if step > 1 else 0.75 if "attention" in program else 0.6
    assert len(unnoticed) <= share * len(branches), "\n".join(
        f"line {each.line}: {each.before}" for each in unnoticed
    )


def _changed(ptx: str, change: Change, text: str) -> str:
    """One of the programs that a call launches is changed."""
    return change(text) if text == ptx else text


def _is_noticed(check: Callable[[], None]) -> bool:
    try:
        check()
    except AssertionError:  # the executor's faults are, too
        return True
    return False


def _listed(found: dict[tuple[str, int], Change]) -> str:
    return "\n".join(f"{key}: line {each.line}: {each.before}" for key, each in found.items())
