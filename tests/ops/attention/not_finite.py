"""Values that are not finite, in rows, scales and queries: one table of cases for every version of
attention, and what each gives, by an oracle in fp64 that shares no code with any of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from espnx.ops.attention import ROW_FORMATS
from tests.ops.attention.test_attention import Case

Run: TypeAlias = Callable[[Case], tuple[torch.Tensor, torch.Tensor]]
INF, NAN = torch.inf, torch.nan
QUERIES = 3
#: The row that cases change, counted from behind: the second and the third query see it, the first
#: does not. Row HIDDEN is masked, and holds NaN, as rows behind the last do.
ROW, HIDDEN = -2, 3
#: Values of a row: two that cases change, and the one after them. In others nothing happens.
AT, NEXT = 5, 6
#: A query's value whose product with log2(e) in fp32 is 1, and what stands for 0 in fp16 beside 1.
LN_2, FAR_BELOW, BELOW_NORMAL = 0.69314718, 2.0**-40, 2.0**-140
TOLERANCE = 3e-5  # of values of about unit size


@dataclass
class Values:
    """A sequence's queries [QUERIES, d] and rows, k [n, d] and v [n, dv], which are one tensor for
    X rows; of int8 rows k and v are codes, and scales have their own, k's by channel."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


Change: TypeAlias = Callable[[Values], None]


def _set(name: str, value: float, at: int | slice = AT, row: int | slice = ROW) -> Change:
    def change(values: Values) -> None:
        getattr(values, name)[row, at] = value

    return change


def _all(*changes: Change) -> Change:
    def change(values: Values) -> None:
        for each in changes:
            each(values)

    return change


def _q(value: float, at: int = AT) -> Change:
    return _set("q", value, at, slice(None))


def _scale(name: str, value: float, at: int) -> Change:
    def change(values: Values) -> None:
        getattr(values, name)[at] = value

    return change


def _negative(values: Values) -> None:
    values.k[:, AT] = -values.k[:, AT].abs().clamp(min=1)


#: What is changed, and of which kind the last query's results are: value AT of o, value NEXT, all
#: others, and lse (f: finite, n: NaN, 0: as if it saw nothing); and the same of X rows, which are V
#: rows as well. All values of queries are above 0 unless a case says otherwise. A score of -inf
#: weighs nothing; one of +inf, and NaN, leave nothing but NaN.
ROWS: dict[str, tuple[Change, str, str]] = {
    "finite": (_set("k", 1.5), "ffff", "ffff"),
    "-inf": (_set("k", -INF), "ffff", "nfff"),
    "-inf everywhere": (_set("k", -INF, slice(None)), "ffff", "nnnf"),
    "-inf in the first row": (_set("k", -INF, row=0), "ffff", "nfff"),
    "-inf, query below 0": (_all(_set("k", -INF), _q(-0.7)), "nnnn", "nnnn"),
    "-inf, query 0": (_all(_set("k", -INF), _q(0.0)), "nnnn", "nnnn"),
    "-inf, query 1": (_all(_set("k", -INF), _q(1.0)), "ffff", "nfff"),
    "-inf, query of one bit": (_all(_set("k", -INF), _q(LN_2)), "ffff", "nfff"),
    "-inf, query far below others": (_all(_set("k", -INF), _q(FAR_BELOW)), "ffff", "nfff"),
    "-inf, query below normal": (_all(_set("k", -INF), _q(BELOW_NORMAL)), "ffff", "nfff"),
    "-inf in all rows": (_set("k", -INF, row=slice(None)), "0000", "0000"),
    "+inf": (_set("k", INF), "nnnn", "nnnn"),
    "+inf, query below 0": (_all(_set("k", INF), _q(-0.7)), "ffff", "nfff"),
    "infinities that agree": (
        _all(_set("k", -INF), _set("k", INF, NEXT), _q(-0.7, NEXT)), "ffff", "nnff",
    ),
    "infinities that do not": (_all(_set("k", -INF), _set("k", INF, NEXT)), "nnnn", "nnnn"),
    "-inf and NaN": (_all(_set("k", -INF), _set("k", NAN, NEXT)), "nnnn", "nnnn"),
    "product below fp32's range": (
        _all(_set("k", -6e4), _set("q", 1e35, slice(None), slice(None))), "ffff", "ffff",
    ),
    "NaN": (_set("k", NAN), "nnnn", "nnnn"),
    "NaN of the leading bits of -inf": (_set("k", NAN), "nnnn", "nnnn"),
    "V +inf": (_set("v", INF), "+fff", "nnnn"),
    "V -inf": (_set("v", -INF), "-fff", "nfff"),
    "V NaN": (_set("v", NAN), "nfff", "nnnn"),
    "V's infinities": (_all(_set("v", INF), _set("v", -INF, row=0)), "nfff", "nnnn"),
    "V +inf, K -inf": (_all(_set("v", INF), _set("k", -INF)), "nfff", "nfff"),
}  # fmt: skip
QUERY: dict[str, tuple[Change, str, str]] = {
    "query +inf": (_q(INF), "nnnn", "nnnn"),
    "query -inf": (_q(-INF), "nnnn", "nnnn"),
    "query NaN": (_q(NAN), "nnnn", "nnnn"),
    "query +inf, rows below 0": (_all(_negative, _q(INF)), "0000", "0000"),
    "query +inf, a row 0": (_all(_negative, _set("k", 0.0), _q(INF)), "nnnn", "nnnn"),
}
SCALES: dict[str, tuple[Change, str, str]] = {
    f"{name[0].upper()}'s scale {value}": (_scale(name, value, at), found, "")
    for (name, at, found), value in itertools.product(
        (("k_scale", AT, "nnnn"), ("v_scale", ROW, "nnnf")), (INF, -INF, NAN)
    )
}


#: Where all would take long.
BRIEF = [
    "-inf, query below normal",
    "-inf everywhere",
    "-inf, query of one bit",
    "-inf in all rows",
    "infinities that do not",
    "V +inf, K -inf",
    "query +inf, rows below 0",
]


def cases_of(fmt: str) -> dict[str, tuple[Change, str, str]]:
    return {**SCALES, **QUERY} if fmt == "int8" else {**ROWS, **QUERY}


def _values(fmt: str, n: int, d: int, dv: int, seed: int) -> Values:
    rng = torch.Generator().manual_seed(seed)
    q = torch.randn(QUERIES, d, generator=rng).abs() + 0.1
    if fmt == "int8":
        k, v = (torch.randint(-127, 128, (n, w), generator=rng, dtype=torch.int8) for w in (d, dv))
        scales = (torch.rand(w, generator=rng) / 50 for w in (d, n))
        return Values(q, k, v, *scales)
    k = torch.randn(n, d, generator=rng)
    return Values(q, k, torch.randn(n, dv, generator=rng) if dv else k)


def _stored(values: Values, fmt: str, n: int, rows: int, d: int, dv: int) -> torch.Tensor:
    """The bytes of blocks of so many rows; in the last one's others, NaN."""
    more = -n % rows
    parts = []
    for name, fill in (("k_scale", None), ("k", NAN), ("v_scale", NAN), ("v", NAN)):
        each = getattr(values, name)
        if each is None or (name == "v" and dv == 0):
            continue
        if fill is not None:
            padding = each.new_full((more, *each.shape[1:]), 1 if fmt == "int8" and each.dim() > 1
                                    else fill)  # fmt: skip
            each = torch.cat([each, padding]).view(-1, rows, *each.shape[1:])
        else:
            each = each.expand((n + more) // rows, -1)
        dtype = torch.float32 if name.endswith("scale") else ROW_FORMATS[fmt]
        parts.append(each.to(dtype).contiguous().view(torch.uint8).reshape(len(each), -1))
    return torch.cat(parts, dim=1)


def make_case(
    fmt: str, d: int, dv: int, *, n_rows: int, block_rows: int, names: list[str]
) -> tuple[Case, list[Values]]:
    """A sequence for each case; ``dv`` 0: X rows."""
    blocks, all_values = [], []
    for seed, name in enumerate(names):
        values = _values(fmt, n_rows, d, dv, seed)
        cases_of(fmt)[name][0](values)
        # every other time not in V, so that nothing but the case itself asks for care
        if fmt != "int8":
            values.k[HIDDEN] = NAN
        if seed % 2:
            (values.v if values.v_scale is None else values.v_scale)[HIDDEN] = NAN
        bytes_of = _stored(values, fmt, n_rows, block_rows, d, dv)
        if name.startswith("NaN of") and fmt == "fp32":
            place = (n_rows + ROW) % block_rows * d + AT
            block = bytes_of[(n_rows + ROW) // block_rows].view(torch.int32)
            block[place] = -0x7FFFFF
        blocks.append(bytes_of)
        all_values.append(values)
    stored = torch.stack(blocks)
    n_blocks, size = stored.shape[1:]
    assert size % 16 == 0  # or kernels for aligned blocks would not be asked
    table = (torch.arange(len(names) * n_blocks) * size).view(len(names), 1, n_blocks)
    visible = torch.ones(len(names), n_rows, dtype=torch.uint8)
    visible[:, HIDDEN] = 0
    last = (n_rows - QUERIES + torch.arange(QUERIES)).repeat(len(names), 1)
    query = torch.stack([each.q for each in all_values])[:, None]
    counts = torch.full((len(names),), n_rows)
    # bytes at an address that is a multiple of 16, as torch's are
    case = Case(query, stored.flatten(), table, counts, block_rows, fmt, dv, visible, last)
    return case, all_values


def _exact(
    values: Values, fmt: str, seen: np.ndarray, soft_cap: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """o [QUERIES, dv] and lse: products and sums as IEEE has them."""
    if fmt == "int8":
        k_scale, v_scale = (
            np.where(np.isfinite(each), each, np.nan)
            for each in (values.k_scale.double().numpy(), values.v_scale.double().numpy())  # type: ignore[union-attr]
        )
        k = values.k.double().numpy() * k_scale
        v = values.v.double().numpy() * v_scale[:, None]
    else:
        k, v = (each.to(ROW_FORMATS[fmt]).double().numpy() for each in (values.k, values.v))
    q = values.q.double().numpy() * values.q.shape[1] ** -0.5
    o, lse = np.zeros((len(q), v.shape[1])), np.full(len(q), -np.inf)
    with np.errstate(all="ignore"):
        for i in range(len(q)):
            rows = np.flatnonzero(seen[i])
            scores = np.array([np.sum(q[i] * k[row]) for row in rows])
            if soft_cap:
                scores = soft_cap * np.tanh(scores / soft_cap)
            if np.all(scores == -np.inf):
                continue
            weights = np.exp(scores - scores.max())
            o[i] = sum(weights[j] * v[row] for j, row in enumerate(rows)) / weights.sum()
            lse[i] = scores.max() + np.log(weights.sum())
    return o, lse


def kinds_of(values: np.ndarray) -> list[str]:
    """f, n, + or - for each."""
    return [
        "n" if np.isnan(x) else "+" if x == np.inf else "-" if x == -np.inf else "f" for x in values
    ]


def check(
    run: Run,
    fmt: str,
    d: int,
    dv: int,
    *,
    n_rows: int = 37,
    block_rows: int = 16,
    names: list[str] | None = None,
    group: int = 1,
) -> None:
    """Each result of each case of `fmt`: finite and within TOLERANCE, or the same infinity, or
    NaN; for each of `group` query heads, which ask the same."""
    names = list(cases_of(fmt)) if names is None else names
    case, all_values = make_case(fmt, d, dv, n_rows=n_rows, block_rows=block_rows, names=names)
    assert case.visible is not None
    assert case.last_position is not None
    case.query = case.query.repeat(1, group, 1, 1)
    whole = run(case)
    for each in whole:
        assert torch.allclose(each, each[:, :1], rtol=1e-5, atol=1e-6, equal_nan=True)
    o, lse = (each[:, -1].double().cpu().numpy() for each in whole)
    wrong = []
    for i, (name, values) in enumerate(zip(names, all_values, strict=True)):
        seen = case.visible[i].numpy() != 0
        seen = seen & (np.arange(n_rows) <= case.last_position[i].numpy()[:, None])
        expected = _exact(values, fmt, seen)
        kinds = cases_of(fmt)[name][1 if dv or fmt == "int8" else 2]
        last_o, last_lse = expected[0][-1], expected[1][-1]
        wanted = [kinds[2]] * len(last_o)
        wanted[AT], wanted[NEXT] = kinds[:2]
        if kinds == "0000":
            assert not last_o.any()
            assert last_lse == -np.inf
        else:
            assert kinds_of(last_o) == wanted, name
            assert kinds_of(last_lse[None]) == [kinds[3]], name
        for what, found, exact in (("o", o[i], expected[0]), ("lse", lse[i], expected[1])):
            with np.errstate(invalid="ignore"):
                near = np.abs(found - exact) <= TOLERANCE * (1 + np.abs(exact))
            same = near | (found == exact) | (np.isnan(found) & np.isnan(exact))
            if not same.all():
                at = tuple(np.argwhere(~same)[0].tolist())
                wrong.append(f"{name}: {what}{list(at)} is {found[at]}, not {exact[at]}")
    assert not wrong, "\n".join(wrong)


def check_soft_cap(fmt: str, d: int, dv: int) -> None:
    """By CUDA's kernels, on tensors of the CPU: a cap makes a score of -inf finite again."""
    from espnx.ops.attention.cuda import ScoreRules, attention_triton

    cap, n_rows, names = 3.0, 37, ["-inf everywhere", "finite"]
    case, all_values = make_case(fmt, d, dv, n_rows=n_rows, block_rows=16, names=names)
    given = (case.block_rows, fmt, d**-0.5, dv, case.visible, case.last_position)
    o, lse = attention_triton(*case.args, *given, rules=ScoreRules(soft_cap=cap))
    assert case.last_position is not None
    seen = np.arange(n_rows) <= case.last_position[0].numpy()[:, None]
    seen[:, HIDDEN] = False
    for i, values in enumerate(all_values):
        expected_o, expected_lse = _exact(values, fmt, seen, cap)
        assert np.isfinite(expected_o).all()
        assert np.allclose(o[i, 0].numpy(), expected_o, rtol=0, atol=TOLERANCE)
        assert np.allclose(lse[i, 0].numpy(), expected_lse, rtol=0, atol=TOLERANCE)
