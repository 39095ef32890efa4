"""What nodes hold of their vectors: bfloat16, and codes of product quantisation, with what these
cost in recall."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import espnx.graph
from espnx import errors
from espnx.cli.main import main
from espnx.graph.codes.coding import VectorCoding, from_bfloat16, to_bfloat16
from espnx.graph.format import DISK_CODEBOOK
from espnx.graph.planning import plan_graph
from espnx.storage.manifest import NAME
from tests.graph.conftest import clustered, exact, recall_of
from tests.graph.test_search import codes_of, plain_walk

SMALL: dict[str, Any] = {
    "max_degree": 16,
    "list_size": 40,
    "num_entry_points": 20,
    "threads": 1,
    "pq_bytes": 12,
}


def decoded(index: espnx.graph.GraphIndex, rows: np.ndarray) -> np.ndarray:
    """float32 [n, dim]: what the nodes hold of these vectors, by loops over the codebook."""
    book = index.facts.disk_codebook
    assert book is not None
    turned = np.eye(rows.shape[1], dtype=np.float32) if book.rotation is None else book.rotation
    rows = rows @ turned
    found = np.empty(rows.shape, np.float32)
    for part in range(book.code_bytes):
        here = slice(book.begin[part], book.begin[part + 1])
        far = np.square(rows[:, None, here].astype(np.float64) - book.centroids[None, :, here]).sum(
            axis=2
        )
        found[:, here] = book.centroids[far.argmin(axis=1)][:, here]
    return found @ turned.T


# --- bfloat16 ---


def test_bfloat16_rounds_as_torch_does() -> None:
    values = np.array(
        [0, -0.0, 1, 1 + 2**-8, 1 + 3 * 2**-8, 255, 256, 257, 1e30, -1e-30, 2**-130], np.float32
    )
    found = from_bfloat16(to_bfloat16(values))
    assert found.tolist() == torch.from_numpy(values).bfloat16().float().tolist()
    assert found[3:5].tolist() == [1.0, 1 + 2**-6], "of two equally near ones the even one"
    assert np.signbit(found[1])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("codes", ["inline", "paged", "memory"])
@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
def test_bfloat16(
    base: np.ndarray, queries: np.ndarray, tmp_path: Path, codes: str, metric: str
) -> None:
    report = espnx.graph.build(
        base, tmp_path / "g", vector_dtype="bfloat16", codes=codes, metric=metric, **SMALL
    )
    other = espnx.graph.build(
        base[:50], tmp_path / "half", vector_dtype="float16", codes=codes, metric=metric, **SMALL
    )
    assert (report.format, report.page_bytes, report.nodes_per_page) == (
        "bf16",
        other.page_bytes,
        other.nodes_per_page,
    )
    assert report.recall_ceiling is None
    with espnx.graph.open(tmp_path / "g") as index:
        index.verify()
        stored = base / np.linalg.norm(base, axis=1, keepdims=True) if metric == "cosine" else base
        rounded = torch.from_numpy(stored).bfloat16().float().numpy()
        assert np.allclose(
            index.vectors(np.arange(len(base))), rounded, rtol=2**-7 if metric == "cosine" else 0
        )
        found = index.search(queries, 5, list_size=60, beam_width=1)
        held = index.vectors(np.arange(len(base)))
        assert recall_of(found.ids, exact(held, queries, 5, metric)) > 0.95
        wide = (
            queries / np.linalg.norm(queries, axis=1, keepdims=True)
            if metric == "cosine"
            else queries
        )
        near = held[found.ids].astype(np.float64)
        products = np.einsum("qkd,qd->qk", near, wide.astype(np.float64))
        squared = np.square(near - wide[:, None]).sum(axis=-1)
        expected = {"l2": squared, "ip": -products, "cosine": squared / 2}[metric]
        assert found.distances == pytest.approx(expected, rel=1e-4, abs=1e-5)
        if metric == "l2":
            rows, pages = plain_walk(index.facts, codes_of(index.facts), queries[0], 5, 60)
            assert (found.ids[0].tolist(), found.pages[0]) == (rows, pages)


def test_bfloat16_holds_what_float16_does_not(tmp_path: Path) -> None:
    vectors = (clustered(80, 6) * 1e6).astype(np.float32)
    with pytest.raises(errors.InvalidInputError, match="bfloat16"):
        espnx.graph.build(vectors, tmp_path / "half", vector_dtype="float16")
    espnx.graph.build(vectors, tmp_path / "g", vector_dtype="bfloat16", **SMALL | {"pq_bytes": 6})
    with espnx.graph.open(tmp_path / "g") as index:
        assert index.search(vectors[7], 1, list_size=40).ids.tolist() == [[7]]


# --- codes in place of vectors ---


@pytest.mark.sampled(1)
@pytest.mark.parametrize("codes", ["inline", "paged", "memory"])
@pytest.mark.parametrize("memory", [None, "8GiB"])
def test_codes_in_place_of_vectors(
    base: np.ndarray, queries: np.ndarray, tmp_path: Path, codes: str, memory: str | None
) -> None:
    report = espnx.graph.build(
        base, tmp_path / "g", disk_pq_bytes=7, codes=codes, memory=memory, **SMALL
    )
    assert (report.format, report.dim) == ("pq", 24)
    with espnx.graph.open(tmp_path / "g") as index:
        index.verify()
        assert index.facts.disk_codebook.rotation is not None
        held = decoded(index, base)
        assert index.vectors(np.arange(len(base))) == pytest.approx(held, abs=1e-5)
        found = index.search(queries, 5, list_size=60, beam_width=1)
        far = np.square(held[found.ids].astype(np.float64) - queries[:, None]).sum(axis=-1)
        assert found.distances == pytest.approx(far, rel=1e-5)
        for i, query in enumerate(queries[:12]):
            rows, pages = plain_walk(index.facts, codes_of(index.facts), query, 5, 60)
            assert (found.ids[i].tolist(), found.pages[i]) == (rows, pages)
        assert recall_of(found.ids, exact(held, queries, 5)) > 0.95, "of what the codes say"
        # Of what the vectors say: limited by the codes, and the longer list comes near that limit.
        ceiling = recall_of(exact(held, queries, 5), exact(base, queries, 5))
        assert ceiling < 0.95
        assert recall_of(found.ids, exact(base, queries, 5)) == pytest.approx(ceiling, abs=0.05)


@pytest.mark.parametrize("memory", [None, "8GiB"])
def test_the_recall_ceiling(base: np.ndarray, tmp_path: Path, memory: str | None) -> None:
    """Beside a search of all codes for the same 200 vectors, each but itself, in NumPy."""
    coarse, fine = (
        espnx.graph.build(base, tmp_path / str(size), disk_pq_bytes=size, memory=memory, **SMALL)
        for size in (4, 24)
    )
    assert coarse.recall_ceiling is not None
    assert fine.recall_ceiling is not None
    assert coarse.recall_ceiling < fine.recall_ceiling
    assert fine.recall_ceiling > 0.9, "a byte a dimension"
    assert f"{coarse.recall_ceiling:.3f}" in coarse.summary().splitlines()[2]
    for report in (coarse, fine):
        with espnx.graph.open(report.path) as index:
            held = decoded(index, base)
            assert index.facts.recall_ceiling == report.recall_ceiling
            assert f"{report.recall_ceiling:.3f}" in index.summary()
            chosen = np.sort(np.random.default_rng(1).permutation(len(base))[:200])
            hits = total = 0
            for row, ours, true in zip(
                chosen, exact(held, base[chosen], 11), exact(base, base[chosen], 11), strict=True
            ):
                wanted = set(true.tolist()) - {int(row)}
                hits, total = hits + len(set(ours.tolist()) & wanted), total + len(wanted)
            assert report.recall_ceiling == pytest.approx(hits / total, abs=2 / total)
            assert index.facts.recall[-1].recall == pytest.approx(
                report.recall_ceiling, abs=0.03
            ), "what searches find is held against it"


@pytest.mark.parametrize("metric", ["ip", "cosine"])
def test_codes_by_other_metrics(
    base: np.ndarray, queries: np.ndarray, tmp_path: Path, metric: str
) -> None:
    espnx.graph.build(
        base, tmp_path / "g", metric=metric, vector_dtype="pq", disk_pq_bytes=12, **SMALL
    )
    with espnx.graph.open(tmp_path / "g") as index:
        found = index.search(queries, 5, list_size=100)
        near = index.vectors(found.ids.ravel()).reshape(*found.ids.shape, -1).astype(np.float64)
        wide = (
            queries / np.linalg.norm(queries, axis=1, keepdims=True)
            if metric == "cosine"
            else queries
        )
        expected = (
            -np.einsum("qkd,qd->qk", near, wide)
            if metric == "ip"
            else np.square(near - wide[:, None]).sum(axis=-1) / 2
        )
        assert found.distances == pytest.approx(expected, rel=1e-4, abs=1e-4)
        ceiling = recall_of(
            exact(index.vectors(np.arange(len(base))), wide, 5, "ip" if metric == "ip" else "l2"),
            exact(base, queries, 5, metric),
        )
        assert recall_of(found.ids, exact(base, queries, 5, metric)) == pytest.approx(
            ceiling, abs=0.08
        )


@pytest.mark.parametrize("n", [0, 1, 2, 17])
def test_few_vectors(tmp_path: Path, n: int) -> None:
    vectors = clustered(max(n, 1), 6)[:n]
    report = espnx.graph.build(vectors, tmp_path / "g", disk_pq_bytes=3, **SMALL | {"pq_bytes": 6})
    assert report.recall_ceiling is None or report.recall_ceiling == 1.0, (
        "fewer than 256 are centroids of their own"
    )
    with espnx.graph.open(tmp_path / "g") as index:
        found = index.search(np.zeros((2, 6), np.float32), 3)
        assert [sorted(each[each >= 0].tolist()) for each in found.ids] == [
            sorted(exact(vectors, np.zeros((1, 6)), 3)[0].tolist())
        ] * 2


def test_whole_numbers_as_codes(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).integers(0, 255, (500, 8), dtype=np.uint8)
    espnx.graph.build(vectors, tmp_path / "g", disk_pq_bytes=8, **SMALL | {"pq_bytes": 8})
    with espnx.graph.open(tmp_path / "g") as index:
        found = index.search(vectors[:50].astype(np.float32) + 0.25, 1, list_size=60)
        assert (found.ids[:, 0] == np.arange(50)).mean() > 0.9
        few = index.search(vectors[:3], 2, include=np.arange(3))
        assert few.ids[:, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vector_dtype": "pq"}, "disk_pq_bytes"),
        ({"disk_pq_bytes": 0}, "disk_pq_bytes"),
        ({"disk_pq_bytes": 25}, "disk_pq_bytes.*24"),
        ({"disk_pq_bytes": 4, "vector_dtype": "float16"}, "vector_dtype; got 'float16'"),
        ({"vector_dtype": "bfloat"}, "vector_dtype; got 'bfloat'"),
    ],
)
def test_options_that_make_no_sense(
    base: np.ndarray, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(errors.InvalidInputError, match=message):
        espnx.graph.build(base, tmp_path / "g", **options)
    assert not (tmp_path / "g").exists()


def test_damage(base: np.ndarray, tmp_path: Path) -> None:
    espnx.graph.build(base[:300], tmp_path / "g", disk_pq_bytes=4, **SMALL)
    book = tmp_path / "g" / DISK_CODEBOOK
    whole = book.read_bytes()
    book.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    with pytest.raises(errors.ChecksumError):
        espnx.graph.open(tmp_path / "g")
    book.write_bytes(whole[:-4])
    with pytest.raises(errors.TruncatedFileError):
        espnx.graph.open(tmp_path / "g")
    book.unlink()
    with pytest.raises(errors.FileMissingError):
        espnx.graph.open(tmp_path / "g")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("disk_pq_bytes", 0),
        ("disk_pq_bytes", 25),
        ("disk_parts", [0, 5, 24]),
        ("recall_ceiling", "all"),
        ("format", "pq8"),
    ],
)
def test_a_manifest_that_cannot_be(base: np.ndarray, tmp_path: Path, name: str, value: Any) -> None:
    espnx.graph.build(base[:300], tmp_path / "g", disk_pq_bytes=4, **SMALL)
    from espnx.graph.format import MAGIC, VERSION
    from espnx.graph.pages.directory import read_graph
    from espnx.storage import NativeEngine
    from espnx.storage.manifest import read_manifest, write_manifest

    with NativeEngine("posix") as engine:
        said = read_manifest(engine, tmp_path / "g", MAGIC, VERSION)
        (tmp_path / "g" / NAME).unlink()
        write_manifest(engine, tmp_path / "g", MAGIC, VERSION, {**said, name: value})
        with pytest.raises(errors.FormatError, match=name):
            read_graph(engine, tmp_path / "g")


def test_what_takes_vectors_refuses_codes(base: np.ndarray, tmp_path: Path) -> None:
    espnx.graph.build(base[:300], tmp_path / "g", disk_pq_bytes=4, **SMALL)
    with pytest.raises(errors.InvalidInputError, match="codes in place of vectors"):
        espnx.graph.StoredGraph(tmp_path / "g")
    with pytest.raises(errors.InvalidInputError, match="hold"):
        espnx.graph.export_diskann(tmp_path / "g", tmp_path / "theirs")
    assert not list(tmp_path.glob("theirs*"))


def test_a_bfloat16_graph_goes_to_devices_and_diskann(
    base: np.ndarray, queries: np.ndarray, tmp_path: Path
) -> None:
    import espnx.device

    espnx.graph.build(base[:600], tmp_path / "g", vector_dtype="bfloat16", **SMALL)
    with espnx.graph.open(tmp_path / "g") as index:
        expected = index.search(queries, 5, list_size=40, beam_width=1)
    device = espnx.device.open("ssd", path=tmp_path)
    with device.open_graph(espnx.graph.StoredGraph(tmp_path / "g")) as graph:
        for query, ids in zip(queries[:5], expected.ids, strict=False):
            assert (
                graph.search(torch.from_numpy(query), list_size=40, k=5).finish()[0].tolist()
                == ids.tolist()
            )
    device.close()
    assert espnx.graph.export_diskann(tmp_path / "g", tmp_path / "theirs").dtype == "float32"
    espnx.graph.import_diskann(tmp_path / "theirs", tmp_path / "again", threads=1)
    with espnx.graph.open(tmp_path / "again") as index:
        assert np.array_equal(index.vectors(np.arange(600)), from_bfloat16(to_bfloat16(base[:600])))


def test_plan(base: np.ndarray, tmp_path: Path) -> None:
    for codes in ("inline", "memory"):
        for options in ({"vector_dtype": "bfloat16"}, {"vector_dtype": "pq", "disk_pq_bytes": 7}):
            report = espnx.graph.build(
                base, tmp_path / f"{codes}{len(options)}", codes=codes, **options, **SMALL
            )
            plan = plan_graph(
                len(base),
                24,
                codes=codes,
                max_degree=16,
                pq_bytes=12,
                num_entry_points=20,
                **options,
            )
            manifest_bytes = (Path(report.path) / NAME).stat().st_size
            assert plan.disk["total_bytes"] == report.folder_bytes - manifest_bytes
            assert plan.memory["total_bytes"] == report.memory_bytes
    with pytest.raises(errors.InvalidInputError, match="disk_pq_bytes"):
        plan_graph(10, 24, vector_dtype="pq")


def test_command_line(base: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "base.npy", base[:500])
    assert (
        main(
            [
                "graph",
                "build",
                str(tmp_path / "base.npy"),
                str(tmp_path / "g"),
                "--disk-pq-bytes",
                "6",
                "--json",
                str(tmp_path / "said"),
            ]
        )
        == 0
    )
    said = json.loads((tmp_path / "said").read_text())
    assert 0 < said["recall_ceiling"] < 1
    assert main(["graph", "info", str(tmp_path / "g")]) == 0
    assert f"in place of vectors: {said['recall_ceiling']:.3f}" in capsys.readouterr().out
    assert main(["plan", "--vectors", "1000", "--dim", "128", "--disk-pq-bytes", "32"]) == 0
    assert "as codes of 32 bytes" in capsys.readouterr().out


def test_encoding_is_undone() -> None:
    rows = clustered(30, 9)
    assert VectorCoding("fp32").decode(VectorCoding("fp32").encode(rows)) is rows
    bits = VectorCoding("bf16").encode(rows)
    assert bits.dtype == np.uint16
    assert np.array_equal(to_bfloat16(VectorCoding("bf16").decode(bits)), bits)
