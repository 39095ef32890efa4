"""The compiled accelerator equals its reference to the bit, at every level and number of threads,
and both lie within the bound."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from espnx import errors
from espnx.ops._native import load_extension, load_ops
from espnx.ops.accelerator import (
    DIM,
    LSE_LEAST,
    Buffered,
    accelerator,
    accelerator_reference,
    accelerator_scores,
    accelerator_scores_reference,
)
from espnx.ops.accelerator.reference import exponential, logarithm, statistics
from tests.ops.accelerator.cases import (
    SCALE,
    Case,
    assert_same_bits,
    assert_within_bound,
    make_case,
)

LEVELS = pytest.mark.parametrize("cpu_level", ["portable", "avx2", "avx512"], indirect=True)


@LEVELS
@pytest.mark.parametrize("n_rows", [0, 1, 31, 32, 33, 96, 127, 128, 129, 300])
@pytest.mark.parametrize("waiting", [0, 7])
def test_lengths(cpu_level: str, n_rows: int, waiting: int) -> None:
    """Around the padding and the blocks; some rows of a sequence, or all of them, wait on the
    host."""
    case = make_case(
        [n_rows, n_rows + 17], n=2, heads=2, cuts=(5, 40, 141), waiting=min(waiting, n_rows)
    )
    got = case.run()
    assert_same_bits(got, case.reference())
    assert_within_bound(got, case)


@LEVELS
def test_thousands_of_rows(cpu_level: str) -> None:
    case = make_case([4113, 2500], n=3, cuts=(1000, 1017), block_rows=32)
    got = case.run()
    assert_same_bits(got, case.reference())
    assert_within_bound(got, case)


@LEVELS
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 11])
def test_groups(cpu_level: str, n: int) -> None:
    """More than 5 queries take several passes, and a query's result does not depend on who shares
    its pass."""
    case = make_case([150], n=n, heads=2)
    got = case.run()
    assert_same_bits(got, case.reference())
    for i in range(n):
        alone = Case(**{**vars(case), "q": case.q[:, :, i : i + 1].contiguous()})
        assert_same_bits(alone.run(), (got[0][:, :, i : i + 1], got[1][:, :, i : i + 1]))


def test_every_number_of_threads() -> None:
    case = make_case([700, 3, 64], n=7, heads=3, waiting=3)
    first = case.run(1)
    for threads in (2, 3, 16, None):
        assert_same_bits(case.run(threads), first)


@LEVELS
@pytest.mark.parametrize(
    "masks",
    [
        {"first_visible": torch.tensor([0, 140, 400])},
        {"last_position": torch.tensor([0, 131, -1, 290])},
        {"visible": (torch.arange(3 * 400) % 3 > 0).to(torch.uint8).view(3, 400)},
        {"visible": torch.zeros(3, 400, dtype=torch.uint8)},
        {
            "first_visible": torch.tensor([4, 5, 6]),
            "last_position": torch.tensor([3, 200, 250, 299]),
            "visible": (torch.arange(3 * 400) % 7 > 0).to(torch.uint8).view(3, 400),
        },
    ],
    ids=["first", "last", "visible", "nothing", "all"],
)
@pytest.mark.parametrize("waiting", [0, 40])
def test_masks(cpu_level: str, masks: dict[str, Any], waiting: int) -> None:
    """Whole blocks that are hidden, queries that see nothing (0 and -inf), buffered rows that are
    hidden."""
    case = make_case([290, 290, 290], n=4, waiting=waiting, **masks)
    got = case.run()
    assert_same_bits(got, case.reference())
    assert_within_bound(got, case)


@LEVELS
def test_what_hidden_rows_hold_has_no_effect(cpu_level: str) -> None:
    plain = make_case(
        [200], n=3, last_position=torch.tensor([199, 90, 150]), first_visible=torch.tensor([10])
    )
    broken = make_case(
        [200], n=3, last_position=torch.tensor([199, 90, 150]), first_visible=torch.tensor([10])
    )
    view = broken.buffer[3:].clone().view(torch.float16).view(-1, 2, 16, DIM)
    view[0, :, :10] = torch.tensor([torch.inf, torch.nan]).half().repeat(DIM // 2)
    broken.buffer[3:] = view.flatten().view(torch.uint8)
    assert_same_bits(broken.run(), plain.run())
    assert_same_bits(broken.reference(), plain.run())
    view[180 // 16, :, 180 % 16, 7] = torch.inf
    broken.buffer[3:] = view.flatten().view(torch.uint8)
    got = broken.run()
    assert_same_bits(got, broken.reference())
    assert_same_bits(
        (got[0][:, :, 1:], got[1][:, :, 1:]), tuple(each[:, :, 1:] for each in plain.run())
    )  # type: ignore[arg-type]
    assert not bool(got[0][0, 0, 0, 7].isfinite())  # it sees the row


@LEVELS
@pytest.mark.parametrize("what", ["largest", "smallest", "mixed"])
def test_the_limits_of_fp16(cpu_level: str, what: str) -> None:
    """Products of the largest values stay finite in fp32, and results are no NaN; subnormals
    count."""
    case = make_case([40], n=2)
    values = {"largest": 65504.0, "smallest": 2.0**-24, "mixed": 1024.0}[what]
    sign = torch.ones(DIM)
    sign[::2] = -1 if what == "mixed" else 1
    k = (torch.full((40, DIM), values) * (torch.arange(40) % 3 - 1)[:, None]).half()
    v = torch.full((40, DIM), values).half()
    q = (torch.full((1, 1, 2, DIM), values) * sign).half()
    case = _with_rows(case, q, k, v)
    got = case.run()
    assert_same_bits(got, case.reference())
    assert not got[0].isnan().any()
    assert bool((got[0] == v[0]).all())  # every row of V is the same
    if what == "largest":
        top = 65504.0 * 65504.0 * DIM * SCALE
        assert abs(float(got[1][0, 0, 0]) / top - 1) < 1e-5
    else:
        assert_within_bound(got, case)


def _with_rows(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Case:
    blocks = (
        torch.stack([k.view(-1, 8, DIM), v.view(-1, 8, DIM)], dim=1)
        .contiguous()
        .view(torch.uint8)
        .flatten()
    )
    pieces = torch.tensor([[0, 0, 0, len(k), 0]])
    return Case(q, [[k]], [[v]], [torch.arange(len(k))], blocks, pieces, 8)


@LEVELS
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("where", ["k", "v", "q", "scores"])
def test_what_is_not_finite_shows(cpu_level: str, value: float, where: str) -> None:
    """It never becomes a plausible number: infinite or NaN, in the columns or queries that meet
    it."""
    case = make_case([200], n=2, waiting=8)
    buffered = case.buffered
    assert buffered is not None
    scores = buffered.scores.clone()
    if where == "q":
        case.q[0, 0, 0, 5] = value
    elif where == "scores":
        scores[0, 0, 0, 3] = value
    else:
        view = case.buffer[3:].clone().view(torch.float16).view(-1, 2, 16, DIM)
        view[2, 0 if where == "k" else 1, 7, 5] = value
        case.buffer[3:] = view.flatten().view(torch.uint8)
    given = {"block_rows": 16, "buffered": Buffered(scores, buffered.v, buffered.first_position)}
    got = accelerator(case.q, case.buffer, case.pieces, **given)
    assert_same_bits(got, accelerator_reference(case.q, case.buffer, case.pieces, **given))
    if where == "v":
        assert not bool(got[0][..., 5].isfinite().any())
        assert bool(got[0][..., 6].isfinite().all())
    elif where == "q" or math.isnan(value) or value > 0:
        assert where == "k" or bool(got[0][0, 0, 0].isnan().all())
    assert where in ("k", "v") or bool(got[0][0, 0, 1].isfinite().all())


@LEVELS
def test_scores_beyond_the_mask_say_so(cpu_level: str) -> None:
    """Scores below -9896 are no larger than padding's: a flaw of the hardware, which lse tells."""
    case = make_case([33], size=40.0, seed=4)
    q = torch.full((1, 1, 1, DIM), 60.0).half()
    k = -torch.full((32, DIM), 30.0).half()
    v = torch.full((32, DIM), 2.0).half()
    lone = _with_rows(case, q, k, v)  # 32 rows: no padding, nothing hidden
    assert bool((lone.run()[0] == 2).all())
    padded = _with_rows(case, q, k[:24], v[:24])
    for each in (lone, padded):
        got = each.run()
        assert_same_bits(got, each.reference())
        assert float(got[1]) < LSE_LEAST
    assert bool((padded.run()[0] == 0).all())  # padding took it all


def test_scores_of_the_host_are_those_of_the_accelerator() -> None:
    """A row that waits gives the bits that it gives when it is stored."""
    for waiting in (1, 5, 130, 200):
        stored, handed = (
            make_case([200], n=6, heads=2),
            make_case([200], n=6, heads=2, waiting=waiting),
        )
        assert_same_bits(handed.run(), stored.run())


@LEVELS
@pytest.mark.parametrize(("n", "t"), [(1, 1), (5, 16), (6, 130), (2, 0)])
def test_scores(cpu_level: str, n: int, t: int) -> None:
    rng = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 3, count, DIM, generator=rng).half() for count in (n, t))
    found = accelerator_scores(q, k, threads=2)
    assert torch.equal(found, accelerator_scores_reference(q, k))
    exact = q.double() @ k.double().transpose(-1, -2) * SCALE
    bound = 130 * 2.0**-24 * 1.001 * (q.double().abs() @ k.double().abs().transpose(-1, -2)) * SCALE
    assert bool(((found - exact).abs() <= bound).all())


def test_exponential_and_logarithm() -> None:
    """Within what the bound takes them for."""
    x = -np.concatenate([np.linspace(0, 110, 200_001), np.logspace(-30, 5, 2001)]).astype(
        np.float32
    )
    exact, found = np.exp(x.astype(np.longdouble)), exponential(x)
    assert bool((np.abs(found - exact) <= exact * (2.0**-24 * (1 + 2.0**-15)) + 2.0**-150).all())
    assert exponential(np.asarray([-0.0, 0.0, -np.inf], np.float32)).tolist() == [1, 1, 0]
    assert np.isnan(exponential(np.asarray([np.nan], np.float32))).all()
    for each in (1.0, 1.5, 1e-30, 2.0, 3.0e38, 128.0, 1.4142135):
        assert abs(
            logarithm(np.float32(each)) - np.log(np.float64(np.float32(each)))
        ) <= 2.0**-40 * max(1, abs(np.log(each)))
    assert np.isnan(logarithm(np.float32(np.nan)))


def test_statistics_are_those_of_algorithm_1() -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(1000) * 20).astype(np.float32)
    m, z = statistics(x)
    assert m == x.max()
    assert abs(z / np.exp(x.astype(np.float64) - x.max()).sum() - 1) < 1e-5


def test_wrong_arguments() -> None:
    case = make_case([100], n=2, waiting=4)
    buffered = case.buffered
    assert buffered is not None
    good = {
        "query": case.q,
        "buffer": case.buffer,
        "pieces": case.pieces,
        "block_rows": 16,
        "buffered": buffered,
    }
    accelerator(**good)  # type: ignore[arg-type]
    for change, match in (
        ({"query": case.q.float()}, "query"),
        ({"query": case.q[..., :64].contiguous()}, "query"),
        ({"query": torch.zeros(1, 1, DIM, 2).half().transpose(2, 3)}, "query"),
        ({"buffer": case.buffer[::2]}, "buffer"),
        ({"pieces": case.pieces[:, :4].contiguous()}, "pieces"),
        ({"pieces": case.pieces.int()}, "pieces"),
        ({"block_rows": 0}, "block_rows"),
        ({"scale": math.inf}, "scale"),
        ({"first_visible": torch.tensor([1, 2])}, "first_visible"),
        ({"last_position": torch.tensor([1])}, "last_position"),
        ({"visible": torch.ones(1, 99, dtype=torch.uint8)}, "buffered"),
        ({"visible": torch.ones(1, 100, dtype=torch.bool)}, "visible"),
        ({"buffered": Buffered(buffered.scores[..., :3].contiguous(), buffered.v, 96)}, "scores"),
        ({"buffered": Buffered(buffered.scores, buffered.v.float(), 96)}, "V rows"),
        ({"buffered": Buffered(buffered.scores, buffered.v, -1)}, "position"),
        ({"threads": 0}, "threads"),
    ):
        with pytest.raises(errors.InvalidInputError, match=match):
            accelerator(**{**good, **change})  # type: ignore[arg-type]
        if "threads" not in change:
            with pytest.raises(errors.InvalidInputError, match=match):
                accelerator_reference(**{**good, **change})  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidInputError, match="K rows"):
        accelerator_scores(case.q, case.q.float())


def test_pieces_lie_inside_the_buffer() -> None:
    """To the byte; of heads that there are; at positions that the mask has."""
    case = make_case([100], gap_bytes=0)
    shown = torch.ones(1, 100, dtype=torch.uint8)
    accelerator(case.q, case.buffer, case.pieces, block_rows=16, visible=shown)
    for column, values in enumerate(
        ((1, -1), (1, -1), (1, -1, 1 << 62), (113, -1, 1 << 62), (1, -1, 1 << 62))
    ):
        for value in values:
            wrong = case.pieces.clone()
            wrong[0, column] = value
            for call in (accelerator, accelerator_reference):
                with pytest.raises(errors.InvalidInputError, match="piece"):
                    call(case.q, case.buffer, wrong, block_rows=16, visible=shown)  # type: ignore[operator]


def test_opcheck() -> None:
    load_ops()
    case = make_case([40], n=2, waiting=4)
    buffered = case.buffered
    assert buffered is not None
    required = (case.q, case.buffer, case.pieces, 16, SCALE)
    torch.library.opcheck(torch.ops.espnx.accelerator.default, required)
    masks = (torch.tensor([1]), torch.ones(1, 40, dtype=torch.uint8), torch.tensor([30, 39]))
    torch.library.opcheck(
        torch.ops.espnx.accelerator.default, (*required, *masks, buffered.scores, buffered.v, 36, 2)
    )
    torch.library.opcheck(torch.ops.espnx.accelerator_scores.default, (case.q, case.q, SCALE, 2))


def test_the_extension_checks_what_it_is_given() -> None:
    """Also where nobody has checked before."""
    case = make_case([40], n=2)
    native, masks = load_extension(), (None, None, None)
    with pytest.raises(ValueError, match="come together"):
        native.accelerator(
            case.q, case.buffer, case.pieces, 16, SCALE, *masks, torch.zeros(1, 1, 2, 4), None, 0, 1
        )
    with pytest.raises(ValueError, match="pieces"):
        native.accelerator(
            case.q, case.buffer, case.pieces.float(), 16, SCALE, *masks, None, None, 0, 1
        )
    with pytest.raises(IndexError, match="piece 0"):
        native.accelerator(
            case.q, case.buffer[:-1], case.pieces, 16, SCALE, *masks, None, None, 0, 1
        )
