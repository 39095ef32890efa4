"""Services: phases by hand, what moves them, drives beside one another, what does not fit."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from espnx.errors import FormatError, InvalidInputError
from espnx.simulate.figures import middles
from espnx.simulate.retrieval.answer import PHASES, Answer, answer, encoding_s, generation_s
from espnx.simulate.retrieval.service import FITTED, Service, load_service
from espnx.simulate.retrieval.walks import distances_of, ef_of, hop_read_s
from espnx.simulate.specs.load import load, load_preset, presets
from espnx.simulate.specs.rag import RetrieverSpec, ServiceSpec

TIMES = {FITTED[0]: 5e-5, FITTED[1]: 4e-8}
PRESETS = Path(__file__).resolve().parents[3] / "espnx" / "simulate" / "specs" / "presets"


def service(system: str, retriever: str, without: str | None = None, **more: float) -> Service:
    specs = load_service(system, retriever)
    return specs.given({**middles(specs.ranges), **TIMES, **more}, without)


def ask(system: str, retriever: str, passages: int = 5_000_000, batch: int = 1) -> Answer:
    return answer(service(system, retriever), passages, batch)


def test_a_walk_by_hand() -> None:
    """One read of 155 us for each vector that a walk compares."""
    found, given = ask("cpu-nvme", "gtr"), service("cpu-nvme", "gtr")
    assert set(found.phases_s) == set(PHASES)
    ef = 750
    assert ef_of(5_000_000) == pytest.approx(ef)
    grown = (5e6 / 1e5) ** given.get("walk.more_vectors") * 0.75 ** given.get("walk.more_ef")
    distances = given.get("walk.distances") * grown
    assert found.distances == pytest.approx(distances)
    assert found.hops == pytest.approx(ef + given.get("walk.descent"))
    bandwidth = given.get("device.flash.read_bandwidth")
    assert found.phases_s["reads"] == pytest.approx(distances * (155e-6 + 3072 / bandwidth))
    assert found.queries_per_s == pytest.approx(1 / sum(found.phases_s.values()))
    assert found.bound == "reads"


def test_ef_is_what_the_paper_gives() -> None:
    assert [round(ef_of(n)) for n in (500_000, 5_000_000, 50_000_000, 500_000_000)] == [
        375,
        750,
        1500,
        3000,
    ]


def test_a_walk_compares_no_more_than_there_is() -> None:
    assert distances_of(service("cpu-nvme", "gtr"), 100, 3000) == 100


def test_clusters_by_hand() -> None:
    """Of sqrt(N) clusters a thousandth, and one at least."""
    found, given = ask("cpu-ivf-nvme", "gtr"), service("cpu-ivf-nvme", "gtr")
    n = math.sqrt(5_000_000)
    assert math.ceil(n / 1000) == 3
    each_s = 155e-6 + 3072 / given.get("device.flash.read_bandwidth")
    assert found.phases_s["reads"] == pytest.approx(3 * n * each_s)
    assert found.distances is None
    assert not found.is_extrapolated


def test_hops_in_a_drive() -> None:
    """With one read to a hop: a cell, then the bus. With as many as there are dies and more, no
    faster than the bus, no slower than all behind one another."""
    one_s = hop_read_s(64, 1, 50e-6, 4096, 2.5e9)
    assert one_s == pytest.approx(50e-6 + 4096 / 2.5e9)
    many_s = hop_read_s(8, 32, 50e-6, 4096, 2.5e9)
    assert 32 / 8 * 50e-6 < many_s < 32 * (50e-6 + 4096 / 2.5e9)
    assert hop_read_s(64, 32, 50e-6, 4096, 2.5e9) < many_s
    assert hop_read_s(64, 32, 1e-9, 4096, 2.5e9) == pytest.approx(32 * 4096 / 2.5e9, rel=0.01)


def test_the_model_by_hand() -> None:
    """Each token reads all weights; a large batch is bound by products."""
    given = service("ragx-1", "gtr")
    bytes_per_s = 2 * given.get("gpu.memory_bandwidth") * given.get("generation.bandwidth_share")
    found_s = generation_s(given, 1)
    weights_s = 54 * 34e9 * 2 / bytes_per_s
    assert weights_s < found_s < 1.2 * weights_s
    assert found_s < generation_s(given, 8) < 8 * found_s


def test_encoding() -> None:
    assert encoding_s(service("cpu-nvme", "bm25")) == 0
    assert encoding_s(service("cpu-nvme", "gtr")) > encoding_s(service("disag-nvme", "gtr"))
    assert ask("disag-nvme", "gtr").phases_s["to the searcher"] == pytest.approx(0.086)
    assert ask("cpu-nvme", "gtr").phases_s["to the searcher"] == 0


@pytest.mark.parametrize("retriever", ["bm25", "gtr"])
def test_eight_drives(retriever: str) -> None:
    one, eight = (ask(f"ragx-{n}", retriever, 50_000_000) for n in (1, 8))
    assert eight.phases_s["reads"] < one.phases_s["reads"]
    assert eight.phases_s["model"] == one.phases_s["model"]


def test_lists_by_hand() -> None:
    found, given = ask("cpu-nvme", "bm25"), service("cpu-nvme", "bm25")
    touched = 5_000_000 * given.get("retriever.touched")
    size = touched * given.get("retriever.lists")
    bandwidth = given.get("device.flash.read_bandwidth")
    reads = size / given.get("service.read_ahead")
    assert found.phases_s["reads"] == pytest.approx(reads * 155e-6 + size / bandwidth)
    comparing_s = touched * given.get("retriever.postings") * TIMES[FITTED[1]]
    assert found.phases_s["comparing"] == pytest.approx(comparing_s)
    assert found.phases_s["encoding"] == 0


def test_a_networked_drive_and_memory() -> None:
    near, far, memory = (ask(name, "colbert") for name in ("cpu-nvme", "cpu-ebs", "cpu-dram"))
    assert far.phases_s["reads"] > 5 * near.phases_s["reads"] > 0
    assert memory.phases_s["reads"] == 0
    assert memory.phases_s["comparing"] == near.phases_s["comparing"]


def test_what_is_switched_off() -> None:
    whole = answer(service("cpu-nvme", "gtr"), 5_000_000)
    for what, phase in (("reads", "reads"), ("comparing", "comparing"), ("generation", "model")):
        without = answer(service("cpu-nvme", "gtr", what), 5_000_000)
        assert without.phases_s[phase] == 0
        assert without.serial_s == pytest.approx(whole.serial_s - whole.phases_s[phase])
    with pytest.raises(InvalidInputError, match="a mechanism; got magic"):
        service("cpu-nvme", "gtr", "magic")


def test_what_does_not_fit() -> None:
    with pytest.raises(InvalidInputError, match=r"does not fit cpu-nvme; got .* too much"):
        ask("cpu-nvme", "gtr", 500_000_000)
    with pytest.raises(InvalidInputError, match=r"does not fit a100-80gb; got .* too much"):
        ask("ragx-1", "gtr", 5_000_000, batch=1000)
    specs = load_service("cpu-nvme", "gtr")
    with pytest.raises(InvalidInputError, match=r"got no searcher\.distance"):
        answer(specs.given(middles(specs.ranges)), 5_000_000)


def test_what_a_service_must_say(tmp_path: Path) -> None:
    text = (PRESETS / "service" / "ragx-1.yaml").read_text()
    both = text + "read: {value: 155, unit: us, source: it, confidence: paper}\n"
    both += "read_ahead: {value: 4, unit: KiB, source: it, confidence: paper}\n"
    for name, wrong, said in (
        ("none", text.split("flash:")[0], "flash"),
        ("both", both, "drives that are read twice"),
        ("memory", text.replace("kept: drives", "kept: tape"), "an unknown word"),
    ):
        (tmp_path / f"{name}.yaml").write_text(wrong)
        with pytest.raises(FormatError, match=said):
            load(ServiceSpec, str(tmp_path / f"{name}.yaml"))
    text = (PRESETS / "retriever" / "gtr.yaml").read_text()
    (tmp_path / "gtr.yaml").write_text("\n".join(text.splitlines()[:-1]) + "\n")
    with pytest.raises(FormatError, match="vector"):
        load(RetrieverSpec, str(tmp_path / "gtr.yaml"))
    assert all(load_preset(ServiceSpec, name).name == name for name in presets(ServiceSpec))
