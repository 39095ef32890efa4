"""Searches of graphs on drives: one by hand, many as SimPy has them read by read, bounds, what does
not fit and what is asked for wrongly."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from espnx.errors import FormatError, InvalidInputError, OutOfMemoryError
from espnx.simulate.figures import draw, middles
from espnx.simulate.graphs import answer as answers
from espnx.simulate.graphs.answer import Answer, answer
from espnx.simulate.graphs.server import Server, load_server
from espnx.simulate.specs.graphs import CollectionSpec, ServerSpec
from espnx.simulate.specs.load import load_preset

SERVER, COLLECTION = "dell-r760xa", "falcon-4.8b"
PRESETS = Path(__file__).resolve().parents[3] / "espnx" / "simulate" / "specs" / "presets"
#: Of a search, in which a vertex has ten new neighbours with two pages for them: no chance in it.
STEADY = {
    "hnsw.more_vectors": 0.0,
    "hnsw.more_ef": 0.0,
    "hnsw.descent": 2.0,
    f"{SERVER}.missed": 0.2,
    f"{SERVER}.beam": 4.0,
}


def server(collection: str = COLLECTION, **more: float) -> Server:
    specs = load_server(SERVER, collection)
    return specs.given({**middles(specs.ranges), **more})


def steady(list_size: int, **more: float) -> Server:
    vertices = list_size + STEADY["hnsw.descent"]
    return server(**STEADY, **{"hnsw.distances": 10 * vertices}, **more)


def test_one_search_by_hand() -> None:
    """One drive, one stream, one cluster: everything waits for the one before."""
    one = {f"{SERVER}.drives.count": 1.0, f"{COLLECTION}.probed": 1.0}
    given = steady(8, **one)
    found = answer(given, 8, 1)
    values = given.values
    compute, lookup = values[f"{SERVER}.compute"], values[f"{SERVER}.lookup"]
    call, read = values[f"{SERVER}.read_call"], values[f"{SERVER}.read"]
    between = 1 / 2e6
    # ten vertices in beams of 4, 4 and 2
    beams_s = sum(n * between + read for n in (4, 4, 2))
    pages_s = 10 * (2 * between + read)
    cores_s = 10 * (call + 1024 * lookup + 10 * 256 * lookup + 2 * call)
    tables_s = 2 * 2 * 256 * 1024 / compute
    query_s = values[f"{SERVER}.call"] + 2 * 320 * 1024 / compute
    network_s = 2 * values["ethernet-100g.latency"]
    whole_s = network_s + query_s + tables_s + beams_s + pages_s + cores_s
    assert found.mean_s == pytest.approx(whole_s, rel=1e-9)
    assert found.p95_s == pytest.approx(whole_s, rel=1e-9)
    assert found.queries_per_s == pytest.approx(1 / whole_s, rel=1e-9)
    assert (found.vertices, found.reads, found.codes) == (10, 30, pytest.approx(100))
    assert found.core_s == pytest.approx(query_s + tables_s + cores_s)
    # of a beam of four the bound has one read only behind another, as if there were four drives
    assert found.bounds_per_s["streams"] == pytest.approx(1 / whole_s, rel=0.02)
    assert found.bound == "streams"
    assert found.residual == pytest.approx(0, abs=1e-9)


def simpy_queries(
    given: Server, list_size: int, streams: int, each: int, seed: int, apart_s: float
) -> list[Any]:
    """(begin, end) of queries, whose searches and reads are processes of their own."""
    simpy = pytest.importorskip("simpy", reason="SimPy is not installed (extra [dev])")
    env, rng = simpy.Environment(), np.random.default_rng(seed)
    value = {
        name.removeprefix("falcon-4.8b").partition(".")[2]: each
        for name, each in given.values.items()
    }
    cores = simpy.Resource(env, int(value["cores"]))
    drives = [simpy.Resource(env, 1) for _ in range(int(value["drives.count"]))]
    took: list[Any] = []
    vertices = list_size + int(value["descent"])
    codes = value["distances"] / vertices

    def core(seconds: float) -> Any:
        with cores.request() as place:
            yield place
            yield env.timeout(seconds)

    def read() -> Any:
        with drives[rng.integers(len(drives))].request() as place:
            yield place
            yield env.timeout(1 / value["flash.random_reads"])
        yield env.timeout(value["read"])

    def reads(n: int) -> Any:
        yield env.all_of([env.process(read()) for _ in range(n)])

    def search() -> Any:
        yield from core(4 * 256 * value["dimensions"] / value["compute"])
        left = 0
        for number in range(vertices):
            if not left:
                left = min(int(value["beam"]), vertices - number)
                yield from reads(left)
            left -= 1
            pages = int(codes * value["missed"] + rng.random())
            yield from reads(pages)
            compared = value["node_code"] + codes * value["code"]
            yield from core((1 + pages) * value["read_call"] + compared * value["lookup"])

    def stream(number: int) -> Any:
        yield env.timeout(number * apart_s)
        for _ in range(each):
            begin = env.now
            yield env.timeout(value["latency"])
            middles_s = 2 * value["segments"] * value["dimensions"] / value["compute"]
            yield from core(value["call"] + middles_s)
            yield env.all_of([env.process(search()) for _ in range(int(value["probed"]))])
            yield env.timeout(value["latency"])
            took.append((begin, env.now))

    for number in range(streams):
        env.process(stream(number))
    env.run()
    return took


@pytest.mark.parametrize(
    ("streams", "cores", "random_reads", "bound"),
    [(1, 64, 2e6, "streams"), (4, 1, 2e6, "cores"), (4, 64, 1e4, "drives")],
)
def test_as_simpy_has_it(streams: int, cores: int, random_reads: float, bound: str) -> None:
    """Read by read, with draws of its own: in which phase streams go beside one another is chance,
    and moves a mean by 3 % from seed to seed, so that several are compared."""
    more = {
        f"{SERVER}.cores": float(cores),
        f"{COLLECTION}.probed": 2.0,
        f"{SERVER}.missed": 0.37,
        "cd8p.flash.random_reads": random_reads,
    }
    given = steady(6)
    given = dataclasses.replace(given, values={**given.values, **more})
    found = [answer(given, 6, streams, window=24, seed=seed) for seed in range(4)]
    means_s, rates = [], []
    apart_s = 1 / found[0].bounds_per_s["streams"]
    for seed in range(2):
        took = simpy_queries(given, 6, streams, 12, seed, apart_s)
        begin_s, end_s = took[2 * streams][1], took[-streams][1]
        inside = [end - begin for begin, end in took if begin_s < end <= end_s]
        means_s.append(np.mean(inside))
        rates.append(len(inside) / (end_s - begin_s))
    assert {each.bound for each in found} == {bound}
    assert np.mean([each.mean_s for each in found]) == pytest.approx(np.mean(means_s), rel=0.04)
    assert np.mean([each.queries_per_s for each in found]) == pytest.approx(
        np.mean(rates), rel=0.04
    )


@pytest.mark.parametrize("seed", range(8))
def test_no_rate_is_above_its_bounds(seed: int) -> None:
    """Of any figures and any number of streams; and Little's law holds."""
    rng = np.random.default_rng(seed)
    specs = load_server(SERVER, COLLECTION)
    values = draw(specs.ranges, rng)
    values[f"{COLLECTION}.probed"] = float(rng.integers(1, 6))
    values[f"{SERVER}.cores"] = float(rng.integers(1, 9))
    values[f"{SERVER}.drives.count"] = float(rng.integers(1, 7))
    values["cd8p.flash.random_reads"] = float(10 ** rng.uniform(4, 6.5))
    streams = int(rng.integers(1, 12))
    found = answer(specs.given(values), int(rng.integers(1, 25)), streams)
    assert found.queries_per_s <= 1.05 * min(found.bounds_per_s.values())
    assert found.queries_per_s * found.mean_s == pytest.approx(streams, rel=0.15)
    assert found.p50_s <= found.p95_s
    assert found.reads == pytest.approx(
        found.vertices + found.codes * values[f"{SERVER}.missed"], rel=0.05
    )
    for name, busy in found.busy.items():
        assert busy == pytest.approx(found.queries_per_s / found.bounds_per_s[name], abs=0.06)


def test_what_moves_it() -> None:
    """Each figure does what its name says."""
    few = {f"{COLLECTION}.probed": 2.0, "cd8p.flash.random_reads": 1e5}
    base = answer(server(**few), 10, 1)

    def with_(name: str, factor: float) -> Answer:
        values = server(**few).values
        return answer(server(**{**few, name: factor * values[name]}), 10, 1)

    for name in (f"{SERVER}.read", f"{SERVER}.missed", f"{SERVER}.read_call", f"{SERVER}.lookup"):
        assert with_(name, 1.5).mean_s > base.mean_s, name
    for name in (f"{SERVER}.compute", "cd8p.flash.random_reads"):
        assert with_(name, 1.5).mean_s < base.mean_s, name
    assert with_(f"{COLLECTION}.probed", 2).reads == pytest.approx(2 * base.reads, rel=0.02)
    assert answer(server(**few), 20, 1).p95_s > base.p95_s
    assert answer(server(**few), 10, 3).queries_per_s > base.queries_per_s
    assert answer(server(**few), 10, 1) == base
    assert answer(server(**few), 10, 1, seed=2) != base


def test_the_smallest_there_is() -> None:
    """A vector, a core, a drive, a stream; a vertex without neighbours to read."""
    one = {
        f"{COLLECTION}.vectors": 1.0,
        f"{COLLECTION}.segments": 1.0,
        f"{COLLECTION}.probed": 1.0,
        f"{SERVER}.cores": 1.0,
        f"{SERVER}.drives.count": 1.0,
        f"{SERVER}.missed": 1e-12,
    }
    found = answer(server(**one), 1, 1)
    assert (found.vertices, found.reads, found.codes) == (1, 1, 1)
    assert found.queries_per_s == pytest.approx(1 / found.mean_s)
    assert not found.is_extrapolated


def test_what_is_asked_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    for list_size, streams, said in (
        (0, 1, "a list; got 0"),
        (10_001, 1, "a list; got 10001"),
        (10, 0, "streams of queries; got 0"),
        (10, 4097, "streams of queries; got 4097"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            answer(server(), list_size, streams)
    with pytest.raises(OutOfMemoryError, match="a shorter list, or fewer streams"):
        answer(server(), 10_000, 4096)
    with pytest.raises(InvalidInputError, match=r"does not fit the drives.*too much"):
        answer(server(**{f"{COLLECTION}.vectors": 1e12 / 320}), 10)
    least = 2 + 14 * (1 + 17 * 5 + 4 * 4)
    monkeypatch.setattr(answers, "COMMANDS_MAX", 4 * least)
    assert answer(server(), 10, 1).n_queries == 1  # the window that is left
    monkeypatch.setattr(answers, "COMMANDS_MAX", 4 * least - 1)
    with pytest.raises(OutOfMemoryError, match=f"{4 * least:,} commands"):
        answer(server(), 10, 1)


def test_an_index_by_hand() -> None:
    """Three vertices of 1,284 bytes to a page, sixteen codes of 256."""
    n = 320 * 15_000_000
    assert server().node_bytes == 1284
    assert server().stored_bytes == pytest.approx(n / 3 * 4096 + n / 16 * 4096)
    large = {f"{COLLECTION}.node_code": 8192.0}
    assert server(**large).stored_bytes == pytest.approx(n * 3 * 4096 + n / 16 * 4096)


@pytest.mark.parametrize(
    ("kind", "old", "new", "said"),
    [
        (ServerSpec, "drives:", "drive:", "no such field: drive"),
        (ServerSpec, "cores: {value: 64", "cores: {value: 0", "out of range"),
        (ServerSpec, "read: {value: 85", "read: {value: -85", "out of range"),
        (ServerSpec, "count: {value: 4", "count: {value: 65", "1 to 64"),
        (ServerSpec, "expanded: {value: 1", "expanded: {value: 9", "which it reads at a time"),
        (ServerSpec, "device: cd8p", "device: hilos-isp", "no flash.random_reads"),
        (ServerSpec, "network: ethernet-100g", "network: ethernet", "did you mean ethernet-100g?"),
        (CollectionSpec, "probed: {value: 14", "probed: {value: 321", "at most 320"),
        (CollectionSpec, "vectors:", "#", "lacks a field: vectors"),
    ],
)
def test_files_that_are_wrong(kind: type, old: str, new: str, said: str, tmp_path: Path) -> None:
    word, name = {ServerSpec: ("server", SERVER), CollectionSpec: ("collection", COLLECTION)}[kind]
    text = (PRESETS / word / f"{name}.yaml").read_text()
    assert old in text
    path = tmp_path / "own.yaml"
    path.write_text(text.replace(old, new, 1))
    names = (str(path), COLLECTION) if kind is ServerSpec else (SERVER, str(path))
    with pytest.raises((FormatError, InvalidInputError)) as raised:
        load_server(*names)
    assert said in str(raised.value)


def test_figures_of_the_publication() -> None:
    collection = load_preset(CollectionSpec, COLLECTION)
    assert collection.segments.value * collection.vectors.value == 4.8e9
    blind = load_preset(CollectionSpec, f"{COLLECTION}-blind")
    assert blind.segments.value * blind.vectors.value == 4.8e9
    assert blind.probed.value == blind.segments.value
