"""Indexes of DiskANN: imported, exported, and what is refused. scripts/diskann_check.sh does the
same beside diskannpy itself."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import espnx.graph
from espnx import errors
from espnx.graph import export_diskann, import_diskann
from espnx.storage import FaultRule, FaultyEngine
from espnx.storage.manifest import NAME
from tests.graph import diskann_reference as reference
from tests.graph.conftest import clustered, exact, recall_of

BYTES = np.random.default_rng(3).integers(0, 256, (300, 20)).astype(np.uint8)
CASES = {
    "float32": clustered(300, 20),
    "uint8": BYTES,
    "int8": BYTES.view(np.int8),
    "one dimension": clustered(40, 1),
    "a sector each": np.random.default_rng(1).standard_normal((20, 1000)).astype(np.float32),
    "several sectors each": np.random.default_rng(1).standard_normal((20, 2500)).astype(np.float32),
}


def edges_of(path: Path) -> list[list[int]]:
    """By row, in the order of the pages' neighbours."""
    with espnx.graph.open(path) as index:
        facts = index.facts
        pages = np.fromfile(facts.path("nodes.bin"), np.uint8).reshape(-1, facts.layout.page_bytes)[
            :, 16:
        ]
        layout = facts.layout
        nodes = (
            np.ascontiguousarray(pages[:, : layout.nodes_per_page * layout.node_bytes])
            .view(layout.node_dtype)
            .ravel()[: layout.n]
        )
        found: list[list[int]] = [[] for _ in range(layout.n)]
        for node in nodes:
            found[node["row"]] = nodes["row"][node["neighbours"][: node["n_neighbours"]]].tolist()
        return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("codes", "order"), [("inline", "packed"), ("memory", "given")])
def test_an_import_has_their_vectors_and_edges(
    tmp_path: Path, name: str, codes: str, order: str
) -> None:
    vectors = CASES[name]
    degree = 4 if len(vectors) < 50 else 8
    edges = reference.make(
        tmp_path / "ann", vectors, degree=degree, chunks=min(3, vectors.shape[1])
    )
    report = import_diskann(tmp_path / "ann", tmp_path / "g", codes=codes, order=order)
    assert (report.n, report.dim, report.max_degree, report.repaired) == (*vectors.shape, degree, 0)
    assert edges_of(tmp_path / "g") == edges
    with espnx.graph.open(tmp_path / "g") as index:
        index.verify()
        assert np.array_equal(index.vectors(np.arange(len(vectors))), vectors)
        if order == "given":
            assert np.array_equal(
                np.fromfile(index.facts.path("rows.bin"), "<u4"), np.arange(len(vectors))
            )
        found = index.search(vectors, 1, list_size=len(vectors))
        assert (found.distances == 0).all()
        assert recall_of(found.ids, exact(vectors, vectors, 1)) == 1


@pytest.mark.parametrize("codes", ["inline", "paged", "memory"])
def test_an_export_of_an_import_is_the_same_index(tmp_path: Path, codes: str) -> None:
    vectors = CASES["float32"]
    edges = reference.make(tmp_path / "ann", vectors)
    import_diskann(tmp_path / "ann", tmp_path / "g", codes=codes)
    report = export_diskann(tmp_path / "g", tmp_path / "new")
    again, near, medoid = reference.read_index(tmp_path / "new", np.dtype("<f4"))
    assert np.array_equal(again, vectors)
    assert near == edges
    with espnx.graph.open(tmp_path / "g") as index:
        assert 0 <= medoid < len(vectors)
        book = index.facts.codebook
    for name in ("_pq_compressed.bin", "_metadata.bin"):
        assert (tmp_path / f"new{name}").read_bytes() == (tmp_path / f"ann{name}").read_bytes()
    pivots = (tmp_path / "new_pq_pivots.bin").read_bytes()
    starts = struct.unpack_from("<ii4Q", pivots)[2:]
    assert starts[3] == len(pivots)
    table = np.frombuffer(pivots, "<f4", 256 * 20, starts[0] + 8).reshape(256, 20)
    centre = np.frombuffer(pivots, "<f4", 20, starts[1] + 8)
    assert np.array_equal(table + centre, book.centroids)
    assert (
        np.frombuffer(pivots, "<u4", 4, starts[2] + 8).tolist()
        == book.begin.tolist()
        == [0, 7, 13, 20]
    )
    assert report.files == {each: (tmp_path / f"new{each}").stat().st_size for each in report.files}
    import_diskann(tmp_path / "new", tmp_path / "h", codes=codes)
    assert edges_of(tmp_path / "h") == edges


def test_their_centroids_are_read_with_their_centre(tmp_path: Path) -> None:
    vectors = CASES["float32"] + np.float32(5)
    reference.make(tmp_path / "ann", vectors, chunks=7)
    import_diskann(tmp_path / "ann", tmp_path / "g", codes="memory")
    with espnx.graph.open(tmp_path / "g") as index:
        codes = np.frombuffer(
            (tmp_path / "ann_pq_compressed.bin").read_bytes(), np.uint8, offset=8
        ).reshape(-1, 7)
        decoded = index.facts.codebook.decode(codes)
    assert (
        np.square(decoded - vectors).mean() < 0.6 * np.square(vectors - vectors.mean(axis=0)).mean()
    )


ROTATION = "_pq_pivots.bin_rotation_matrix.bin"


@pytest.mark.parametrize("codes", ["inline", "memory"])
def test_codes_of_rotated_vectors(tmp_path: Path, codes: str) -> None:
    """What a code stands for is near its vector, in their index and in the graph, and the export is
    theirs again."""
    vectors = CASES["float32"] + np.float32(3)
    reference.make(tmp_path / "ann", vectors, chunks=10, is_rotated=True)
    import_diskann(tmp_path / "ann", tmp_path / "g", codes=codes)
    held = np.frombuffer(
        (tmp_path / "ann_pq_compressed.bin").read_bytes(), np.uint8, offset=8
    ).reshape(-1, 10)
    with espnx.graph.open(tmp_path / "g") as index:
        index.verify()
        book = index.facts.codebook
        assert book.rotation is not None
        assert (
            np.square(book.decode(held) - vectors).mean()
            < 0.5 * np.square(vectors - vectors.mean(axis=0)).mean()
        )
        assert (book.encode(vectors) == held).mean() > 0.99
        assert (
            recall_of(index.search(vectors, 1, list_size=80).ids, exact(vectors, vectors, 1)) == 1
        )
    report = export_diskann(tmp_path / "g", tmp_path / "new")
    assert ROTATION in report.files
    for name in (ROTATION, "_pq_compressed.bin"):
        assert (tmp_path / f"new{name}").read_bytes() == (tmp_path / f"ann{name}").read_bytes()
    import_diskann(tmp_path / "new", tmp_path / "h", codes=codes)
    with espnx.graph.open(tmp_path / "h") as again:
        assert np.array_equal(again.facts.codebook.packed(), book.packed())


@pytest.mark.parametrize(
    "change",
    [
        "empty",
        "cut",
        "long",
        "another shape",
        "no rotation",
        "not finite",
        "infinite",
        "a directory",
    ],
)
def test_a_rotation_that_cannot_be(tmp_path: Path, change: str) -> None:
    reference.make(tmp_path / "ann", CASES["float32"], is_rotated=True)
    path = tmp_path / f"ann{ROTATION}"
    data = path.read_bytes()
    values = np.frombuffer(data, "<f4", offset=8).copy()
    if change in ("not finite", "infinite"):
        values[5] = {"not finite": np.nan, "infinite": np.inf}[change]
    changed = {
        "empty": b"",
        "cut": data[:-4],
        "long": data + bytes(4),
        "another shape": struct.pack("<ii", 10, 40) + data[8:],
        "no rotation": data[:8] + (values * np.float32(1.1)).tobytes(),
        "not finite": data[:8] + values.tobytes(),
        "infinite": data[:8] + values.tobytes(),
    }
    path.unlink()
    path.mkdir() if change == "a directory" else path.write_bytes(changed[change])
    with pytest.raises((errors.FormatError, errors.TruncatedFileError)):
        import_diskann(tmp_path / "ann", tmp_path / "g")
    assert not (tmp_path / "g" / NAME).exists()


@pytest.mark.parametrize(
    ("dtype", "metric"), [("float16", "l2"), ("float32", "cosine"), ("uint8", "l2")]
)
def test_a_graph_of_ours_is_exported(tmp_path: Path, dtype: str, metric: str) -> None:
    base = BYTES if dtype == "uint8" else CASES["float32"]
    espnx.graph.build(
        base, tmp_path / "g", max_degree=10, vector_dtype=dtype, metric=metric, num_entry_points=5
    )
    report = export_diskann(tmp_path / "g", tmp_path / "ann")
    assert report.dtype == ("uint8" if dtype == "uint8" else "float32")
    vectors, near, medoid = reference.read_index(tmp_path / "ann", np.dtype(report.dtype))
    with espnx.graph.open(tmp_path / "g") as index:
        assert np.array_equal(vectors, index.vectors(np.arange(300)).astype(report.dtype))
        rows = np.fromfile(index.facts.path("rows.bin"), "<u4")
        assert medoid in np.flatnonzero(np.isin(rows, index.facts.entries))
        codes = np.frombuffer(
            (tmp_path / "ann_pq_compressed.bin").read_bytes(), np.uint8, offset=8
        ).reshape(300, -1)
        assert np.array_equal(codes, index.facts.codebook.encode(index.vectors(np.arange(300))))
    assert near == edges_of(tmp_path / "g")


def test_an_index_by_inner_product(tmp_path: Path) -> None:
    base = clustered(200, 9)
    norm = float(np.linalg.norm(base, axis=1).max())
    scaled = base / np.float32(norm)
    added = np.sqrt(np.maximum(1 - np.square(scaled).sum(axis=1), 0))
    reference.make(
        tmp_path / "ann",
        np.concatenate([scaled, added[:, None]], axis=1).astype(np.float32),
        chunks=10,
        metric=1,
    )
    (tmp_path / "ann_disk.index_max_base_norm.bin").write_bytes(struct.pack("<iif", 1, 1, norm))
    report = import_diskann(tmp_path / "ann", tmp_path / "g")
    assert (report.metric, report.dim, report.pq_bytes) == ("ip", 9, 9)
    queries = clustered(20, 9, seed=2)
    with espnx.graph.open(tmp_path / "g") as index:
        assert np.abs(index.vectors(np.arange(200)) - base).max() < 1e-4
        assert (
            recall_of(index.search(queries, 5, list_size=100).ids, exact(base, queries, 5, "ip"))
            > 0.95
        )
    (tmp_path / f"ann{ROTATION}").write_bytes(reference.packed(np.eye(10, dtype="<f4")))
    with pytest.raises(errors.FormatError, match="rotated"):
        import_diskann(tmp_path / "ann", tmp_path / "h")
    (tmp_path / f"ann{ROTATION}").unlink()
    (tmp_path / "ann_disk.index_max_base_norm.bin").unlink()
    with pytest.raises(errors.FileMissingError):
        import_diskann(tmp_path / "ann", tmp_path / "h")
    with pytest.raises(errors.InvalidInputError, match="metric"):
        export_diskann(tmp_path / "g", tmp_path / "new")


def test_an_index_with_codes_in_its_nodes_and_its_vectors(tmp_path: Path) -> None:
    vectors = CASES["float32"]
    edges = reference.make(tmp_path / "ann", vectors)
    codes = np.random.default_rng(0).integers(0, 256, (300, 5)).astype(np.uint8)
    reference.write_index(tmp_path / "ann", codes, edges, degree=8)
    (tmp_path / "ann_disk.index_pq_pivots.bin").write_bytes(b"")
    np.save(tmp_path / "x.npy", vectors)
    for wrong in (vectors[:-1], vectors.astype(np.float16), np.full_like(vectors, np.nan), BYTES):
        with pytest.raises(errors.InvalidInputError):
            import_diskann(tmp_path / "ann", tmp_path / "g", vectors=wrong)
    import_diskann(tmp_path / "ann", tmp_path / "g", vectors=tmp_path / "x.npy")
    assert edges_of(tmp_path / "g") == edges
    with espnx.graph.open(tmp_path / "g") as index:
        assert np.array_equal(index.vectors([0, 299]), vectors[[0, 299]])


def test_an_index_with_codes_in_its_nodes(tmp_path: Path) -> None:
    vectors = CASES["float32"]
    dim = vectors.shape[1]
    edges = reference.make(tmp_path / "ann", vectors)
    random = np.random.default_rng(3)
    begin = np.array([0, 2, dim])
    table = vectors[random.integers(0, 300, 256)]
    codes = random.integers(0, 256, (300, 2)).astype(np.uint8)
    reference.write_index(tmp_path / "ann", codes, edges, degree=8)
    reference.write_codes(tmp_path / "held", codes, table, np.zeros(dim), begin)
    (tmp_path / "held_pq_pivots.bin").rename(tmp_path / "ann_disk.index_pq_pivots.bin")
    report = import_diskann(tmp_path / "ann", tmp_path / "g")
    assert (report.format, report.dim) == ("pq", dim)
    assert edges_of(tmp_path / "g") == edges
    held = np.concatenate([table[codes[:, 0], :2], table[codes[:, 1], 2:]], axis=1)
    with espnx.graph.open(tmp_path / "g") as index:
        assert np.array_equal(index.vectors(np.arange(300)), held)
        assert index.facts.recall_ceiling is None
        assert index.search(held[5], 1, list_size=300).distances[0, 0] == pytest.approx(0, abs=1e-4)
    turn = np.linalg.qr(random.standard_normal((dim, dim)))[0].astype("<f4")
    (tmp_path / "ann_disk.index_pq_pivots.bin_rotation_matrix.bin").write_bytes(
        reference.packed(turn)
    )
    import_diskann(tmp_path / "ann", tmp_path / "turned")
    with espnx.graph.open(tmp_path / "turned") as index:
        assert index.facts.rotated == ["disk_codebook.bin"]
        assert index.vectors(np.arange(300)) == pytest.approx(held @ turn.T, abs=1e-5)
        assert index.search(held[5] @ turn.T, 1, list_size=300).distances[0, 0] == pytest.approx(
            0, abs=1e-4
        )
    whole = (tmp_path / "ann_disk.index_pq_pivots.bin").read_bytes()
    (tmp_path / "ann_disk.index_pq_pivots.bin").write_bytes(whole[:-9])
    with pytest.raises(errors.TruncatedFileError):
        import_diskann(tmp_path / "ann", tmp_path / "h")
    pivots = (tmp_path / "ann_pq_pivots.bin").read_bytes()
    for wrong in (
        pivots[:20],
        pivots[:4096] + struct.pack("<ii", 255, dim) + pivots[4104:],
        pivots[:8] + b"\xff" * 8 + pivots[16:],
    ):
        (tmp_path / "ann_pq_pivots.bin").write_bytes(wrong)
        with pytest.raises((errors.TruncatedFileError, errors.FormatError)):
            import_diskann(tmp_path / "ann", tmp_path / "h")


def test_nodes_that_cannot_be_reached_are_given_edges(tmp_path: Path) -> None:
    vectors = CASES["float32"]
    edges = reference.make(tmp_path / "ann", vectors)
    alone = [[each for each in near if each != 7] for near in edges]
    reference.write_index(tmp_path / "ann", vectors, alone, degree=8)
    assert import_diskann(tmp_path / "ann", tmp_path / "g").repaired >= 1
    with espnx.graph.open(tmp_path / "g") as index:
        assert index.search(vectors[7], 1, list_size=300).ids.tolist() == [[7]]


def test_what_cannot_be_asked_for(tmp_path: Path) -> None:
    reference.make(tmp_path / "ann", CASES["float32"])
    for wrong in (
        {"codes": "nowhere"},
        {"order": "random"},
        {"metric": "cosine"},
        {"metric": "ip"},
        {"data_type": "float64"},
        {"data_type": "uint8"},
        {"num_entry_points": 0},
        {"threads": 0},
        {"seed": -1},
        {"vectors": CASES["float32"]},
    ):
        options: dict[str, Any] = wrong
        with pytest.raises(errors.InvalidInputError):
            import_diskann(tmp_path / "ann", tmp_path / "g", **options)
    (tmp_path / "ann_metadata.bin").unlink()
    with pytest.raises(errors.InvalidInputError, match="data_type"):
        import_diskann(tmp_path / "ann", tmp_path / "g")
    # the bytes of a node are not of that dtype, or its count is no count
    with pytest.raises(errors.FormatError):
        import_diskann(tmp_path / "ann", tmp_path / "g", data_type="uint8")
    assert not (tmp_path / "g" / NAME).exists()
    import_diskann(tmp_path / "ann", tmp_path / "g", data_type="float32")
    with pytest.raises(errors.InvalidInputError, match="a graph"):
        import_diskann(tmp_path / "ann", tmp_path / "g", data_type="float32")
    for prefix in (tmp_path / "ann", tmp_path / "nowhere" / "deep" / "ann"):
        with pytest.raises(errors.InvalidInputError):
            export_diskann(tmp_path / "g", prefix)
    espnx.graph.build(np.empty((0, 4), np.float32), tmp_path / "empty")
    with pytest.raises(errors.InvalidInputError):
        export_diskann(tmp_path / "empty", tmp_path / "new")


INDEX, PIVOTS, CODES, METADATA = (
    "_disk.index",
    "_pq_pivots.bin",
    "_pq_compressed.bin",
    "_metadata.bin",
)
NODE = reference.SECTOR  # where node 0 begins: 20 values, a count, 8 neighbours
TABLE, CENTRE = 4096 + 8, 4096 + 8 + 4 * 256 * 20 + 8


@pytest.mark.parametrize(
    ("name", "at", "value"),
    [
        (INDEX, 0, struct.pack("<i", 10)),
        (INDEX, 4, struct.pack("<i", 2)),
        (INDEX, 8, struct.pack("<Q", 0)),
        (INDEX, 8, struct.pack("<Q", 2**63)),
        (INDEX, 8, struct.pack("<Q", 301)),
        (INDEX, 8, struct.pack("<Q", 30)),
        (INDEX, 16, struct.pack("<Q", 0)),
        (INDEX, 16, struct.pack("<Q", 2**40)),
        (INDEX, 16, struct.pack("<Q", 19)),
        (INDEX, 16, struct.pack("<Q", 28)),
        (INDEX, 24, struct.pack("<Q", 300)),
        (INDEX, 32, struct.pack("<Q", 0)),
        (INDEX, 32, struct.pack("<Q", 115)),
        (INDEX, 32, struct.pack("<Q", 2**62)),
        (INDEX, 40, struct.pack("<Q", 1)),
        (INDEX, 48, struct.pack("<Q", 1)),
        (INDEX, 64, struct.pack("<Q", 1)),
        (INDEX, 72, struct.pack("<Q", 1)),
        (INDEX, NODE + 4, struct.pack("<f", np.nan)),
        (INDEX, NODE + 116 + 4, struct.pack("<f", -np.inf)),
        (INDEX, NODE + 80, struct.pack("<I", 9)),
        (INDEX, NODE + 80, struct.pack("<I", 2**32 - 1)),
        (INDEX, NODE + 84, struct.pack("<I", 300)),
        (INDEX, NODE + 84, struct.pack("<I", 2**32 - 1)),
        (PIVOTS, 0, struct.pack("<i", 5)),
        (PIVOTS, 8, struct.pack("<Q", 2**63)),
        (PIVOTS, 16, struct.pack("<Q", 0)),
        (PIVOTS, 4096, struct.pack("<i", 255)),
        (PIVOTS, 4100, struct.pack("<i", 21)),
        (PIVOTS, TABLE, struct.pack("<f", np.nan)),
        (PIVOTS, CENTRE, struct.pack("<f", np.inf)),
        (PIVOTS, CENTRE + 80 + 8, struct.pack("<I", 1)),
        (PIVOTS, CENTRE + 80 + 12, struct.pack("<I", 13)),
        (PIVOTS, CENTRE + 80 + 20, struct.pack("<I", 21)),
        (CODES, 0, struct.pack("<i", 299)),
        (CODES, 0, struct.pack("<i", -1)),
        (CODES, 4, struct.pack("<i", 0)),
        (CODES, 4, struct.pack("<i", 2)),
        (CODES, 4, struct.pack("<i", 2**31 - 1)),
        (METADATA, 0, struct.pack("<Q", 3)),
        (METADATA, 8, struct.pack("<Q", 3)),
        (METADATA, 8, struct.pack("<Q", 2)),
    ],
)
def test_hostile_values(tmp_path: Path, name: str, at: int, value: bytes) -> None:
    reference.make(tmp_path / "ann", CASES["float32"])
    path = tmp_path / f"ann{name}"
    data = bytearray(path.read_bytes())
    assert data[at : at + len(value)] != value
    data[at : at + len(value)] = value
    path.write_bytes(data)
    with pytest.raises((errors.FormatError, errors.TruncatedFileError)) as caught:
        import_diskann(tmp_path / "ann", tmp_path / "g")
    assert str(tmp_path / "ann_") in str(caught.value)
    assert not (tmp_path / "g" / NAME).exists()


@pytest.mark.parametrize("name", [INDEX, PIVOTS, CODES, METADATA])
@pytest.mark.parametrize("change", ["missing", "empty", "cut", "long", "a link", "a directory"])
def test_files_that_are_not_whole(tmp_path: Path, name: str, change: str) -> None:
    reference.make(tmp_path / "ann", CASES["float32"])
    path = tmp_path / f"ann{name}"
    data = path.read_bytes()
    path.unlink()
    if change == "a link":
        (tmp_path / "other").write_bytes(data)
        path.symlink_to(tmp_path / "other")
    elif change == "a directory":
        path.mkdir()
    elif change != "missing":
        path.write_bytes({"empty": b"", "cut": data[:-3], "long": data + bytes(1 << 16)}[change])
    kinds = (errors.FormatError, errors.TruncatedFileError, errors.FileMissingError)
    with pytest.raises(
        errors.InvalidInputError if (name, change) == (METADATA, "missing") else kinds
    ):
        import_diskann(tmp_path / "ann", tmp_path / "g")
    assert not (tmp_path / "g" / NAME).exists()


def test_indexes_of_other_kinds(tmp_path: Path) -> None:
    reference.make(tmp_path / "ann", CASES["float32"])
    (tmp_path / "ann_disk.index_dummy_map.txt").write_bytes(b"1")
    with pytest.raises(errors.FormatError, match="not an index that can be read"):
        import_diskann(tmp_path / "ann", tmp_path / "g")


@pytest.mark.parametrize("operation", ["open_write", "write", "sync"])
@pytest.mark.parametrize("nth", [1, 2, 3, 4, 5])
def test_a_failed_export_leaves_nothing(tmp_path: Path, operation: str, nth: int) -> None:
    espnx.graph.build(CASES["float32"], tmp_path / "g", max_degree=6, pq_bytes=5)
    with espnx.graph.open(tmp_path / "g") as index:
        assert index.facts.codebook.rotation is not None
    before = sorted(tmp_path.iterdir())
    rules = [FaultRule("error", operation=operation, nth=nth, count=1, value=28)]
    with FaultyEngine(rules, path="posix") as engine, pytest.raises(errors.WriteError):
        export_diskann(tmp_path / "g", tmp_path / "ann", engine=engine)
    assert sorted(tmp_path.iterdir()) == before
    export_diskann(tmp_path / "g", tmp_path / "ann")


def test_vectors_that_are_not_the_indexs(tmp_path: Path) -> None:
    base = np.random.default_rng(0).standard_normal((300, 12)).astype(np.float32)
    edges = reference.make(tmp_path / "ann", base)
    held = np.random.default_rng(0).integers(0, 256, (300, 5)).astype(np.uint8)
    reference.write_index(tmp_path / "ann", held, edges, degree=8)
    (tmp_path / "ann_disk.index_pq_pivots.bin").write_bytes(b"")
    with pytest.raises(errors.InvalidInputError, match="of the codes that they should have"):
        import_diskann(tmp_path / "ann", tmp_path / "g", vectors=np.ascontiguousarray(base[::-1]))
    import_diskann(tmp_path / "ann", tmp_path / "g", vectors=base)
