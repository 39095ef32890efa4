"""Rows on emulated devices: what every device does, the accelerator's bits whatever the number of
devices, and what it costs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from espnx import errors
from espnx.device.conformance.known_rows import assert_right, attend, draw, put, queries
from espnx.device.conformance.row_checks import CHECKS, FAULT_CHECKS, Open, rng
from espnx.device.emulation.device import EmulatedDevice, Emulation
from espnx.device.emulation.rows import EmulatedRowDevice, capabilities_of
from espnx.device.interface import SegmentView
from espnx.device.model.spec import load_spec
from espnx.device.registry import device_names, open_device
from espnx.device.row_layout import RowLayout
from espnx.device.rows.ssd import SsdRowDevice
from espnx.kv.striping import StripedDevices
from espnx.ops.accelerator import DIM, accelerator_bound, accelerator_reference
from espnx.ops.attention import Queries, RowsInMemory
from tests.storage.common import patiently

LAYOUT = RowLayout("fp16", DIM, DIM)
CPU = torch.device("cpu")
HAND_OVERS = pytest.mark.parametrize("hand_over", ["scores", "lse"])


def opened(
    folder: Path, count: int = 1, name: str = "smartssd", **options: Any
) -> list[EmulatedDevice]:
    found = open_device(name, [folder / f"{i}" for i in range(count)], **{"stretch": 0, **options})
    assert all(isinstance(each, EmulatedDevice) for each in found)
    return found  # type: ignore[return-value]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options",
    [{"hand_over": "scores"}, {"hand_over": "lse"}, {"near_storage": False}],
    ids=["scores", "lse", "without"],
)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conforms(folder: Path, options: dict[str, Any], check: Callable[[Open], None]) -> None:
    device = opened(folder, **options)[0]
    check(device.open_rows)
    device.close()


@pytest.mark.parametrize("name", FAULT_CHECKS)
def test_faults(folder: Path, name: str) -> None:
    device = opened(folder)[0]
    assert FAULT_CHECKS[name](device) is None
    device.close()


# --- the same bits, whatever the number of devices ---


def cut(rows: torch.Tensor, *, begin: int, end: int) -> torch.Tensor:
    return rows[:, :, begin:end].contiguous()


class Batch:
    """Three sequences of four KV heads: rows of two runs that are stored, and some that wait."""

    def __init__(self, n: int = 6, waiting: int = 21):
        self.k, self.v = (rows.half() for rows in draw(LAYOUT, 3, range(4), 200 + waiting, rng(1)))  # type: ignore[union-attr]
        q = torch.randn(3, 4, n, DIM, generator=rng(2)).half()
        self.q = Queries(
            q.float() * DIM**-0.5,
            DIM,
            last_position=199 + torch.arange(n) + waiting - n,
            first_visible=torch.tensor([0, 3, 150]),
        )
        self.half = q
        self.tail = RowsInMemory(
            cut(self.k, begin=200, end=200 + waiting),
            cut(self.v, begin=200, end=200 + waiting),
            0,
            waiting,
            200,
        )

    def attend(
        self, devices: list[EmulatedDevice], tail: RowsInMemory | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        striped = StripedDevices(len(devices), lambda number, compute: devices[number].open_rows())
        striped.open(CPU)
        try:
            views: list[list[SegmentView]] = [[] for _ in devices]
            for begin, end in ((0, 160), (160, 200)):
                every = striped.put(
                    LAYOUT, cut(self.k, begin=begin, end=end), cut(self.v, begin=begin, end=end)
                )
                for sequence, parts in enumerate(every):
                    for each in parts:
                        views[each.device].append(
                            SegmentView(each.segment, sequence, end - begin, begin)
                        )
            return striped.attend(striped.ahead(LAYOUT, views), self.q, tail)
        finally:
            striped.close()

    def reference(self, tail: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """By `accelerator_reference`, of all rows in one piece."""
        end = self.k.shape[2] if tail else 200
        blocks = LAYOUT.pack(cut(self.k, begin=0, end=end), cut(self.v, begin=0, end=end))
        size = blocks[0, 0].numel()
        pieces = torch.tensor(
            [[s, h, (4 * s + h) * size, end, 0] for s in range(3) for h in range(4)]
        )
        return accelerator_reference(
            self.half,
            blocks.flatten(),
            pieces,
            block_rows=LAYOUT.block_rows,
            first_visible=self.q.first_visible,
            last_position=self.q.last_position,
        )


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16])
def test_bits_do_not_depend_on_the_number_of_devices(folder: Path, count: int) -> None:
    """And are those of the reference: rows that wait give the bits of rows that are stored."""
    batch = Batch()
    for tail in (None, batch.tail):
        devices = opened(folder, count)
        o, lse = batch.attend(devices, tail)
        wanted_o, wanted_lse = batch.reference(tail is not None)
        assert torch.equal(o, wanted_o.float())
        assert torch.equal(lse, wanted_lse)
        for each in devices:
            each.close()


def test_bits_of_the_other_hand_over(folder: Path) -> None:
    """The same for every number of devices; within both bounds of the first."""
    batch, found = Batch(), []
    for count in (1, 2, 3, 5, 16):
        devices = opened(folder, count, hand_over="lse")
        found.append(batch.attend(devices, batch.tail))
        for each in devices:
            each.close()
    for o, lse in found[1:]:
        assert torch.equal(o, found[0][0])
        assert torch.equal(lse, found[0][1])
    by_scores = batch.reference(True)
    bound_o, bound_lse = merged_bound(batch)
    assert bool(((found[0][0] - by_scores[0].float()).abs() <= bound_o).all())
    assert bool(((found[0][1] - by_scores[1]).abs() <= bound_lse).all())
    assert not torch.equal(found[0][0], by_scores[0].float())  # it is another way


def merged_bound(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """docs/lossless.md: by how much the two ways may differ. What the host computes in fp32 is
    within the accelerator's bound, too, which is as wide in each part of it."""
    parts = [exact(batch, 0, 200), exact(batch, 200, batch.k.shape[2])]
    whole = exact(batch, 0, batch.k.shape[2])
    u, worst = 2.0**-24, torch.maximum(parts[0].bound_lse, parts[1].bound_lse)
    r = torch.expm1(2 * worst + 8 * u * (1 + torch.maximum(parts[0].lse.abs(), parts[1].lse.abs())))
    weights = [(part.lse - whole.lse).exp()[..., None] for part in parts]
    merged = (1 + r)[..., None] * sum(
        w * part.bound_o for w, part in zip(weights, parts, strict=True)
    ) + r[..., None] * whole.mass
    return merged + whole.bound_o, worst + 4 * u * (1 + whole.lse.abs()) + whole.bound_lse


class exact:  # noqa: N801 - a value with several names
    """Exact attention of a batch over some rows, with the accelerator's bound."""

    def __init__(self, batch: Batch, begin: int, end: int):
        k, v, q = (
            rows.double()
            for rows in (
                cut(batch.k, begin=begin, end=end),
                cut(batch.v, begin=begin, end=end),
                batch.half,
            )
        )
        position = torch.arange(begin, end)
        assert batch.q.last_position is not None
        assert batch.q.first_visible is not None
        seen = (position <= batch.q.last_position[:, None])[None, None] & (
            position >= batch.q.first_visible[:, None, None, None]
        )
        scores = (q @ k.transpose(-1, -2) * DIM**-0.5).masked_fill(~seen, -torch.inf)
        self.lse, p = scores.logsumexp(dim=-1), scores.softmax(dim=-1).nan_to_num(0.0)
        self.o, self.mass = p @ v, p @ v.abs()
        peak = (
            (q.abs() @ k.abs().transpose(-1, -2) * DIM**-0.5).masked_fill(~seen, 0.0).amax(dim=-1)
        )
        self.bound_o, self.bound_lse = accelerator_bound(
            peak=peak,
            mass=self.mass,
            o=self.o,
            lse=self.lse,
            n=end - begin,
            score_error=2 * 2.0**-24 * peak,
        )


def test_within_the_bound_of_the_plain_device(folder: Path) -> None:
    """Both are within their bounds of exact results; so they are of one another."""
    batch = Batch()
    devices = opened(folder)
    o, lse = batch.attend(devices, batch.tail)
    whole = exact(batch, 0, batch.k.shape[2])
    assert bool(((o - whole.o).abs() <= whole.bound_o).all())
    assert bool(((lse - whole.lse).abs() <= whole.bound_lse).all())
    devices[0].close()


def test_other_dtypes_of_queries_are_rounded(folder: Path) -> None:
    device = opened(folder)[0]
    rows = device.open_rows()
    seen = [each.use(i) for i, each in enumerate(put(rows, LAYOUT, 2, range(2), 77, rng()))]
    look = queries(LAYOUT, 2, 2, 3, rng())
    assert_right(attend(rows, LAYOUT, seen, look), seen, look, exchanges="fp16")
    with pytest.raises(errors.InvalidInputError, match="65504"):
        attend(rows, LAYOUT, seen, replace(look, q=look.q * 1e5))
    assert rows.front() == -1
    assert_right(attend(rows, LAYOUT, seen, look), seen, look, exchanges="fp16")
    rows.close()
    device.close()


def test_scores_that_the_mask_is_not_below(folder: Path) -> None:
    """An error, and no mean over padding."""
    device = opened(folder)[0]
    rows = device.open_rows()
    low = rows.put(LAYOUT, torch.full((1, 2, 40, DIM), -30.0), torch.ones(1, 2, 40, DIM), range(2))[
        0
    ]
    look = Queries(torch.full((1, 2, 1, DIM), 60 * DIM**-0.5), DIM)
    with pytest.raises(errors.InvalidInputError, match="log-sum-exp of -9996"):
        rows.attend(rows.ahead(LAYOUT, [SegmentView(low, 0, 40, 0)]), look)
    assert rows.front() == -1
    o, _ = rows.attend(
        rows.ahead(LAYOUT, [SegmentView(low, 0, 40, 0)]), replace(look, q=look.q / 10)
    )
    assert bool((o == 1).all())
    rows.close()
    device.close()


# --- what it costs ---


@pytest.fixture
def stored(
    folder: Path,
) -> Iterator[Callable[..., tuple[EmulatedDevice, EmulatedRowDevice, list[Any]]]]:
    devices = list[EmulatedDevice]()

    def make(
        n_rows: int = 4096, heads: int = 2, **options: Any
    ) -> tuple[EmulatedDevice, EmulatedRowDevice, list[Any]]:
        (folder / f"place {len(devices)}").mkdir()
        device = opened(folder / f"place {len(devices)}", **options)[0]
        devices.append(device)
        rows = device.open_rows()
        assert isinstance(rows, EmulatedRowDevice)
        seen = [put(rows, LAYOUT, 1, range(heads), n_rows, rng())[0].use(0)]
        rows.flush()
        return device, rows, seen

    yield make
    for each in devices:
        each.close()


def amounts(device: EmulatedDevice) -> dict[str, float]:
    return {name: use.amount for name, use in device.topology.traffic().items()}


def test_traffic(stored: Any) -> None:
    """Rows cross the uplink once, when they are put; then queries and results do."""
    device, rows, seen = stored()
    size = 2 * 4096 * 4 * DIM
    before = amounts(device)
    assert (before["uplink in"], before["device 0 flash write"], before["uplink out"]) == (
        size,
        size,
        0,
    )
    attend(rows, LAYOUT, seen, queries(LAYOUT, 1, 2, 4, rng()))
    after = amounts(device)
    given = {name: after[name] - before[name] for name in after}
    assert given["device 0 flash read"] == size
    assert given["uplink in"] == given["uplink out"] == 2 * 4 * 2 * DIM  # q in, o out, fp16
    assert given["device 0 accelerator"] == 2 * 4 * 4 * 4096 * DIM  # 4 n d FLOP a query head
    # rows in and out again; q and o
    assert given["device 0 memory"] == 2 * size + 2 * (2 * 4 * 2 * DIM)


@HAND_OVERS
def test_traffic_of_rows_that_wait(stored: Any, hand_over: str) -> None:
    device, rows, seen = stored(n_rows=64, hand_over=hand_over)
    before = amounts(device)
    tail = RowsInMemory(
        *(torch.randn(1, 2, 10, DIM, generator=rng()).half() for _ in range(2)), 0, 10, 64
    )
    attend(rows, LAYOUT, seen, queries(LAYOUT, 1, 2, 4, rng()), tail)
    after, q = amounts(device), 2 * 4 * 2 * DIM
    scores_and_v = 2 * 10 * (4 * 4 + 2 * DIM)
    assert after["uplink in"] - before["uplink in"] == q + (
        scores_and_v if hand_over == "scores" else 0
    )
    assert after["uplink out"] - before["uplink out"] == q + (
        2 * 4 * 4 if hand_over == "lse" else 0
    )


def test_more_queries_take_more_passes(stored: Any) -> None:
    device, rows, seen = stored()
    read = []
    for n in (5, 6, 11):
        before = amounts(device)["device 0 memory"]
        attend(rows, LAYOUT, seen, queries(LAYOUT, 1, 2, n, rng()))
        read.append(amounts(device)["device 0 memory"] - before - 2 * (2 * n * 2 * DIM))
    size = 2 * 4096 * 4 * DIM
    assert read == [2 * size, 3 * size, 4 * size]  # from flash once, then once a pass


def test_time(stored: Any) -> None:
    """Flash is the slowest: what the accelerator does is hidden behind it, but for its last piece
    and the values of the last head."""
    device, rows, seen = stored(n_rows=16384)
    spec, size = device.topology.spec, 2 * 16384 * 4 * DIM
    begun = device.topology.now()
    attend(rows, LAYOUT, seen, queries(LAYOUT, 1, 2, 1, rng()))
    took_s = device.topology.now() - begun
    flash_s = size / spec.flash.read_bandwidth.value
    assert spec.accelerator is not None
    values_s = 2 * 16384 * DIM / spec.accelerator.flops_per_s(1)
    assert flash_s + values_s < took_s < 1.03 * flash_s + 1.3 * values_s + 1e-3


def test_the_same_disk_without_its_accelerator(stored: Any) -> None:
    """Rows pass the links, and the host attends as beside a plain SSD: in fp32, over whatever that
    one takes."""
    device, rows, seen = stored(near_storage=False)
    look = queries(LAYOUT, 1, 2, 1, rng())
    before = amounts(device)
    assert_right(attend(rows, LAYOUT, seen, look), seen, look, exchanges="fp32")
    size = 2 * 4096 * 4 * DIM
    after = amounts(device)
    assert after["uplink out"] - before["uplink out"] == after["device 0 flash read"] == size
    assert after["uplink in"] == before["uplink in"]
    assert after["device 0 accelerator"] == 0
    shown = list[int]()
    rows.visit(
        rows.ahead(LAYOUT, [each.use for each in seen]),
        lambda memory, pieces: shown.append(int(pieces["n_rows"].sum())),
    )
    assert sum(shown) == 2 * 4096
    assert amounts(device)["uplink out"] - after["uplink out"] == size


def test_a_disk_takes_as_long_as_its_narrowest_link(stored: Any) -> None:
    device, rows, seen = stored(near_storage=False, n_rows=16384)
    spec, size = device.topology.spec, 2 * 16384 * 4 * DIM
    begun = device.topology.now()
    attend(rows, LAYOUT, seen, queries(LAYOUT, 1, 2, 1, rng()))
    least_s = size / spec.flash.read_bandwidth.value
    assert least_s <= device.topology.now() - begun < 1.03 * least_s + 1e-3


def test_reads_ahead_are_bounded_by_the_device_s_memory(folder: Path) -> None:
    spec = load_spec("smartssd")
    assert spec.memory.size is not None
    size = 4096 * 4 * DIM
    small = replace(
        spec, memory=replace(spec.memory, size=replace(spec.memory.size, value=2.5 * size))
    )
    emulation = Emulation("smartssd")
    emulation.spec = small
    device = emulation.together([folder], stretch=0)[0]
    rows = device.open_rows()
    seen = [put(rows, LAYOUT, 1, range(1), 4096, rng())[0].use(0)]
    rows.flush()
    tickets = [rows.ahead(LAYOUT, [each.use for each in seen]) for _ in range(4)]
    device.topology.advance(device.topology.now() + 10)
    assert amounts(device)["device 0 flash read"] == 2 * size
    for ticket in tickets:
        rows.attend(ticket, queries(LAYOUT, 1, 1, 1, rng()))
    assert amounts(device)["device 0 flash read"] == 4 * size
    rows.close()
    device.close()


def test_rows_that_do_not_fit_the_device_s_memory(folder: Path) -> None:
    """How much is missing, and the next ticket is served."""
    emulation = Emulation("smartssd")
    assert emulation.spec.memory.size is not None
    emulation.spec = replace(
        emulation.spec,
        memory=replace(
            emulation.spec.memory,
            size=replace(emulation.spec.memory.size, value=float(64 * 4 * DIM + 1000)),
        ),
    )
    device = emulation.together([folder], stretch=0)[0]
    rows = device.open_rows()
    few, many = ([put(rows, LAYOUT, 1, range(1), n, rng())[0].use(0)] for n in (32, 65))
    look = queries(LAYOUT, 1, 1, 2, rng())
    needed = 96 * (4 * DIM + 2 * 4) + 2 * 2 * 2 * DIM
    with pytest.raises(
        errors.OutOfMemoryError, match=f"{needed - 64 * 4 * DIM - 1000} bytes are missing"
    ) as caught:
        attend(rows, LAYOUT, many, look)
    assert caught.value.needed_bytes == needed
    assert rows.front() == -1
    assert_right(attend(rows, LAYOUT, few, look), few, look, exchanges="fp16")
    rows.close()
    device.close()


def test_written_when_the_flash_of_the_device_has_it(folder: Path) -> None:
    device = opened(folder)[0]
    rows = device.open_rows()
    segment = put(rows, LAYOUT, 1, range(2), 4096, rng())[0].segment
    assert patiently(lambda deadline_s: not rows.is_written(segment), 1.0)
    device.topology.advance(device.topology.now() + 1.0)
    rows.flush()
    assert rows.is_written(segment)
    rows.close()
    device.close()


# --- names and specs ---


def test_names(folder: Path) -> None:
    assert {"smartssd", "pm9a3", "hilos-isp"} <= set(device_names())
    file = folder / "mine.yaml"
    text = (Path(load_spec.__code__.co_filename).parent / "presets" / "smartssd.yaml").read_text()
    file.write_text(text.replace("name: smartssd", "name: mine"))
    device = open_device(str(file), folder, stretch=0)
    assert isinstance(device, EmulatedDevice)
    assert device.describe()["spec"] == "mine"
    assert device.kind == "emulated"
    device.close()
    plain = opened(folder, name="pm9a3")[0]
    assert plain.capabilities == SsdRowDevice.capabilities
    plain.close()
    for options, match in (
        ({"hand_over": "both"}, "hand_over"),
        ({"near_storage": 1}, "near_storage"),
        ({"stretch": -1}, "stretch"),
    ):
        with pytest.raises(errors.InvalidInputError, match=match):
            open_device("smartssd", folder, **options)


def test_an_accelerator_that_is_not_emulated(folder: Path) -> None:
    spec = load_spec("smartssd")
    assert spec.accelerator is not None
    assert spec.accelerator.head_dim is not None
    other = replace(
        spec,
        accelerator=replace(
            spec.accelerator, head_dim=replace(spec.accelerator.head_dim, value=64.0)
        ),
    )
    with pytest.raises(errors.InvalidInputError, match="head_dim"):
        capabilities_of(other, near_storage=True)
    assert capabilities_of(other, near_storage=False) == SsdRowDevice.capabilities
