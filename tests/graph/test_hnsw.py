"""An HNSW with its vectors on SSD: what FAISS's own search finds, to the bit; damaged files; what
it cannot be made of."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import espnx.device
from espnx import errors
from espnx.device.graph import SsdGraphDevice
from espnx.device.vectors.interface import LayeredGraph
from espnx.graph.hnsw import HnswGraph, Links, build_hnsw, links_of, write_hnsw
from espnx.storage import FaultRule, FaultyEngine, NativeEngine
from espnx.storage.manifest import read_manifest, write_manifest
from tests.graph.conftest import exact, recall_of

faiss = pytest.importorskip("faiss")
M, EF_CONSTRUCTION = 8, 40


def whole_numbers(n: int, dim: int, seed: int = 0) -> np.ndarray:
    """uint8 [n, dim]: their distances are exact in any order of adding."""
    return np.random.default_rng(seed).integers(0, 256, (n, dim)).astype(np.uint8)


def faiss_index(vectors: np.ndarray, metric: str = "l2", m: int = M) -> object:
    index = faiss.IndexHNSWFlat(
        vectors.shape[1], m, faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT
    )
    index.hnsw.efConstruction = EF_CONSTRUCTION
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    index.add(vectors.astype(np.float32))
    faiss.omp_set_num_threads(threads)
    return index


def searched(
    graph: HnswGraph, queries: np.ndarray, ef: int, k: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """(ids, distances, distances measured): by a device, one node expanded at a time, as FAISS
    does."""
    with SsdGraphDevice(graph) as device:
        tickets = [device.search(torch.from_numpy(query), ef, k, beam_width=1) for query in queries]
        found = [ticket.finish() for ticket in tickets]
        for ticket in tickets:
            assert len(ticket.rounds) == ticket.walk.hops
            assert (
                sum(each.distances for each in ticket.rounds)
                == ticket.walk.distances
                == ticket.walk.nodes
            )
            read = np.concatenate([each.nodes for each in ticket.rounds])
            assert len(set(read.tolist())) == len(read), "no vector is read twice"
    return (
        np.stack([ids for ids, _ in found]),
        np.stack([far for _, far in found]),
        sum(ticket.walk.distances for ticket in tickets),
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("metric", ["l2", "ip"])
@pytest.mark.parametrize("dim", [16, 128])
def test_finds_what_faiss_finds(tmp_path: Path, metric: str, dim: int) -> None:
    """At equal efSearch, ids and distances alike; and for no more distances: FAISS measures nodes
    of layers above again below."""
    base, queries = whole_numbers(2000, dim), whole_numbers(30, dim, seed=1)
    build_hnsw(base, tmp_path / "hnsw", m=M, ef_construction=EF_CONSTRUCTION, metric=metric)
    index, graph = faiss_index(base, metric), HnswGraph(tmp_path / "hnsw")
    assert isinstance(graph, LayeredGraph)
    assert graph.n_upper_layers >= 2
    for ef in (10, 50):
        index.hnsw.efSearch = ef
        faiss.cvar.hnsw_stats.reset()
        far, ids = index.search(queries.astype(np.float32), 10)
        found, measured, count = searched(graph, queries, ef, 10)
        assert np.array_equal(found, ids)
        assert np.array_equal(measured, far if metric == "l2" else -far)
        assert count <= faiss.cvar.hnsw_stats.ndis


def test_floats_agree_but_for_rounding(
    tmp_path: Path, base: np.ndarray, queries: np.ndarray
) -> None:
    """FAISS adds up floats in another order, so of two that are all but equally far another may be
    the nearer."""
    build_hnsw(base, tmp_path / "hnsw", m=M, ef_construction=EF_CONSTRUCTION)
    index = faiss_index(base)
    index.hnsw.efSearch = 40
    far, ids = index.search(queries, 10)
    found, measured, _ = searched(HnswGraph(tmp_path / "hnsw"), queries, 40, 10)
    assert (found == ids).mean() > 0.99
    assert np.allclose(measured, far, rtol=1e-5)
    true = exact(base, queries, 10)
    assert abs(recall_of(found, true) - recall_of(ids, true)) < 0.005


def test_a_wider_beam_takes_fewer_rounds(
    tmp_path: Path, base: np.ndarray, queries: np.ndarray
) -> None:
    build_hnsw(base, tmp_path / "hnsw", m=M, ef_construction=EF_CONSTRUCTION)
    true = exact(base, queries, 10)
    hops, recall = dict[int, int](), dict[int, float]()
    with SsdGraphDevice(HnswGraph(tmp_path / "hnsw")) as device:
        for beam in (1, 4):
            tickets = [
                device.search(torch.from_numpy(query), 40, 10, beam_width=beam) for query in queries
            ]
            recall[beam] = recall_of(np.stack([ticket.finish()[0] for ticket in tickets]), true)
            hops[beam] = sum(ticket.walk.hops for ticket in tickets)
    assert hops[4] < hops[1] / 2
    assert recall[4] >= recall[1] - 0.01


@pytest.mark.parametrize(
    ("n", "dim", "dtype"),
    [
        (0, 8, np.float32),
        (1, 8, np.float32),
        (2, 3, np.int8),
        (33, 127, np.float16),
        (70, 1, np.uint8),
        (9, 1024, np.float32),
        (9, 1025, np.float32),
        (5, 3000, np.float32),
    ],
)
def test_sizes_and_formats(tmp_path: Path, n: int, dim: int, dtype: type) -> None:
    """None and one; vectors that fill a page, and that take two and three."""
    base = (
        np.random.default_rng(n)
        .integers(-100 if dtype != np.uint8 else 0, 100, (n, dim))
        .astype(dtype)
    )
    build_hnsw(base, tmp_path / "hnsw", m=4)
    graph = HnswGraph(tmp_path / "hnsw")
    assert (tmp_path / "hnsw" / "vectors.bin").stat().st_size == graph.verify() * -(
        -dim * base.itemsize // 4096
    ) * 4096
    wanted = exact(base, base[:3], 2)[:, : min(n, 2)]
    own = base[:3] if base.dtype.kind in "iu" else base[:3].astype(np.float32)
    with SsdGraphDevice(graph) as device:
        for query, true in zip(own, wanted, strict=True):
            ids, far = device.search(torch.from_numpy(query), max(n, 2), 2).finish()
            assert far[0] == 0
            assert ids.tolist() == true.tolist() or dim == 1, (
                "of one dimension, many are equally far"
            )
        if not n:
            assert len(device.search(torch.zeros(dim), 5, 2).finish()[0]) == 0


def test_links_of_ones_own(tmp_path: Path) -> None:
    """No FAISS in it: a ring below, and one node above that knows the far side."""
    base = np.arange(8, dtype=np.uint8)[:, None] * np.array([[10, 0]], np.uint8)
    ring = np.array([[(i - 1) % 8, (i + 1) % 8] for i in range(8)], "<i4")
    links = Links(
        np.array([2, 1, 1, 1, 2, 1, 1, 1], np.uint8), ring, np.array([[4], [0]], "<i4"), 0
    )
    write_hnsw(tmp_path / "hnsw", base, links)
    with SsdGraphDevice(HnswGraph(tmp_path / "hnsw")) as device:
        ticket = device.search(torch.tensor([41, 0], dtype=torch.uint8), 2, 1, beam_width=1)
        ids, far = ticket.finish()
    assert (ids.tolist(), far.tolist()) == ([4], [1.0])
    assert [each.nodes.tolist() for each in ticket.rounds] == [[0], [4], [3, 5], [6]]


def test_each_read_fails_in_turn(tmp_path: Path) -> None:
    base = whole_numbers(200, 16)
    build_hnsw(base, tmp_path / "hnsw", m=4, ef_construction=20)
    query = torch.from_numpy(whole_numbers(1, 16, seed=5)[0])
    with SsdGraphDevice(HnswGraph(tmp_path / "hnsw")) as device:
        expected = device.search(query, 10, 3).finish()[0].tolist()
    for nth in range(1, 200):
        rule = FaultRule(operation="read", nth=nth, count=1)
        with (
            FaultyEngine([rule], poison=True) as engine,
            SsdGraphDevice(HnswGraph(tmp_path / "hnsw"), engine=engine) as device,
        ):
            try:
                assert device.search(query, 10, 3).finish()[0].tolist() == expected
            except errors.ReadError:
                continue
            assert engine.stats().fault_hits == 0
            break
    assert nth > 3


@pytest.mark.parametrize("name", ["vectors.bin", "pages.crc", "links.bin"])
def test_damaged_files(tmp_path: Path, name: str) -> None:
    base = whole_numbers(200, 16)
    build_hnsw(base, tmp_path / "hnsw", m=4, ef_construction=20)
    file = tmp_path / "hnsw" / name
    content = file.read_bytes()

    def opened_and_read() -> None:
        graph = HnswGraph(tmp_path / "hnsw")
        with SsdGraphDevice(graph) as device:
            device.search(torch.from_numpy(base[0]), 200, 1).finish()

    for at in range(0, len(content), max(1, len(content) // 40)):
        file.write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
        with pytest.raises(errors.ChecksumError) as caught:
            opened_and_read()
        assert caught.value.path == str(file)
    file.write_bytes(content[:-1])
    with pytest.raises(errors.TruncatedFileError):
        opened_and_read()
    file.write_bytes(content + b"\0")
    with pytest.raises(errors.FormatError):
        opened_and_read()
    file.unlink()
    with pytest.raises(errors.FileMissingError):
        opened_and_read()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 201),
        ("n", -1),
        ("m", 0),
        ("m", 2000),
        ("n_upper", 10**9),
        ("entry", 200),
        ("entry", -1),
        ("dim", 400),
        ("dim", 0),
        ("format", "fp64"),
        ("metric", "cosine"),
        ("entry", None),
        ("links_crc32c", "x"),
    ],
)
def test_a_manifest_that_says_something_else(tmp_path: Path, field: str, value: object) -> None:
    """Its own checksum is right: somebody wrote it so."""
    folder = tmp_path / "hnsw"
    build_hnsw(whole_numbers(200, 16), folder, m=4, ef_construction=20)
    with NativeEngine() as engine:
        fields = read_manifest(engine, folder, "espnx-hnsw", 1)
        own = {
            name: given
            for name, given in fields.items()
            if name not in ("magic", "version", "byte_order")
        }
        write_manifest(engine, folder, "espnx-hnsw", 1, own | {field: value})
    with pytest.raises((errors.FormatError, errors.TruncatedFileError)):
        HnswGraph(folder)


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    base = whole_numbers(100, 4)
    links = links_of(faiss_index(base, m=4))
    above = int(np.flatnonzero(links.layers > 1)[0])
    flat = int(np.flatnonzero(links.layers == 1)[0])
    lowest, upper = links.lowest.copy(), links.upper.copy()
    lowest[7, 0] = 100
    upper[0, 0] = flat
    hole = links.lowest.copy()
    hole[3, 0], hole[3, 1] = -1, 5
    for wrong, message in [
        (
            dataclasses.replace(links, lowest=lowest),
            "lowest layer; got .* to 100; expected 0 to 99",
        ),
        (
            dataclasses.replace(links, lowest=np.where(lowest == 100, -2, lowest)),
            "lowest layer; got -2",
        ),
        (dataclasses.replace(links, lowest=hole), "one behind the end"),
        (
            dataclasses.replace(links, upper=upper),
            f"got {flat}; expected nodes that reach that layer",
        ),
        (dataclasses.replace(links, entry=flat), "entry point"),
        (dataclasses.replace(links, entry=100), "entry point"),
        (dataclasses.replace(links, upper=upper[:-1]), "rows above"),
        (
            dataclasses.replace(links, layers=np.where(np.arange(100) == above, 0, links.layers)),
            "layers|rows",
        ),
    ]:
        with pytest.raises(errors.FormatError, match=message):
            write_hnsw(tmp_path / "wrong", base, wrong)
        assert not (tmp_path / "wrong" / "MANIFEST.json").exists()
    with pytest.raises(errors.InvalidInputError, match="100 nodes; expected 99"):
        write_hnsw(tmp_path / "wrong", base[:99], links)
    with pytest.raises(errors.FormatError, match="layer 3 of node"):
        links.near_above(3, flat)


def test_what_is_refused(tmp_path: Path) -> None:
    base = whole_numbers(20, 4)
    for wrong in (
        base[0],
        base.astype(np.float64),
        np.full((3, 2), np.nan, np.float32),
        np.empty((3, 0), np.float32),
    ):
        with pytest.raises(errors.InvalidInputError):
            build_hnsw(wrong, tmp_path / "hnsw")
    for options in (
        {"m": 1},
        {"m": 2000},
        {"ef_construction": 0},
        {"metric": "cosine"},
        {"threads": 0},
    ):
        with pytest.raises(errors.InvalidInputError):
            build_hnsw(base, tmp_path / "hnsw", **options)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidInputError, match=r"expected a faiss\.IndexHNSW"):
        links_of(faiss.IndexFlatL2(4))
    with pytest.raises(errors.StoreNotFoundError):
        HnswGraph(tmp_path / "nowhere")
    build_hnsw(base, tmp_path / "hnsw")
    before = json.loads((tmp_path / "hnsw" / "MANIFEST.json").read_text())
    with pytest.raises(errors.InvalidInputError, match="already holds an HNSW"):
        build_hnsw(base, tmp_path / "hnsw")
    assert json.loads((tmp_path / "hnsw" / "MANIFEST.json").read_text()) == before
    with pytest.raises(errors.StateError):
        HnswGraph(tmp_path / "hnsw").plan(np.array([0]))


def test_files_of_others_stay(tmp_path: Path) -> None:
    """Even one of a name that an HNSW has, of which its vectors come."""
    base = whole_numbers(20, 4)
    mine = np.lib.format.open_memmap(tmp_path / "vectors.bin", "w+", np.uint8, base.shape)
    mine[:] = base
    with pytest.raises(errors.InvalidInputError, match=r"vectors\.bin"):
        build_hnsw(mine, tmp_path)
    assert np.array_equal(np.load(tmp_path / "vectors.bin"), base)


def test_what_an_interrupted_build_has_left_is_written_over(tmp_path: Path) -> None:
    base = whole_numbers(20, 4)
    (tmp_path / "vectors.bin.new").write_bytes(b"half")
    build_hnsw(base, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "LOCK",
        "MANIFEST.json",
        "links.bin",
        "pages.crc",
        "vectors.bin",
    ]


def test_through_the_device_interface(tmp_path: Path) -> None:
    base = whole_numbers(300, 16)
    build_hnsw(base, tmp_path / "hnsw", m=M)
    device = espnx.device.open("ssd", tmp_path)
    with device.open_graph(HnswGraph(tmp_path / "hnsw")) as walked:
        assert walked.search(torch.from_numpy(base[17]), 20, 1).finish()[0].tolist() == [17]
    device.close()
