"""A plan of an index beside what a build of such documents really makes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import espnx
from espnx import errors
from espnx.retrieval.build import planning
from espnx.retrieval.build.options import BuildOptions
from espnx.retrieval.build.planning import encoding_speed, plan_index
from espnx.weights import speed as weights_speed
from tests.retrieval.common import D_CLS, DIM, build, corpus


@pytest.mark.parametrize(
    ("count", "tokens", "options"),
    [
        (1, 1, {}),
        (65, 7, {"format": "fp32", "nlist": None}),
        (700, 9, {"format": "int8", "coarse": "bit1", "first_stage_code": "sq8"}),
        (700, 11, {"format": "residual2", "first_stage_code": "pq4"}),
        (700, 40, {"pca": 4, "pooling": "muvera", "directories": ["other"]}),
    ],
)
def test_it_is_what_a_build_makes(
    folder: Path, count: int, tokens: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "directories" in options:
        (folder / "other").mkdir()
        options = options | {"directories": [folder / "other"]}
    spooled = dict[str, int]()
    finish = espnx.retrieval.build.builder.Builder._check_disk

    def look(self: Any, spool: Any) -> None:
        names = ("records.bin", "vectors.f32", "n_tokens.u16", "documents.b16")
        spooled.update({name: os.path.getsize(Path(self.building) / name) for name in names})
        finish(self, spool)

    monkeypatch.setattr(espnx.retrieval.build.builder.Builder, "_check_disk", look)
    report = build(folder / "s", corpus(count, tokens=(tokens, tokens)), **options)
    chosen = BuildOptions.given(**{"first_stage_code": "flat", "nlist": 4, **options})
    plan = plan_index(count, tokens, (D_CLS, DIM), chosen)
    with espnx.open(folder / "s") as index:
        store = index.store
        assert plan.memory["metadata_bytes"] == pytest.approx(
            store.resident_bytes, abs=4096 if "residual2" in options.values() else 0
        )
        assert plan.memory["first_stage_bytes"] == store.first_stage_bytes
    records = sum(size for name, size in plan.disk.items() if name.endswith("_records_bytes"))
    assert records == report.record_bytes
    assert plan.disk["total_bytes"] == records + plan.disk["first_stage_bytes"]
    # in whole blocks
    assert plan.disk["spool_bytes"] == pytest.approx(sum(spooled.values()), abs=4096)


def test_more_than_are_laid_out_take_as_much_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """And sizes of an index far larger than anything here need no memory."""
    whole = plan_index(6400, 9, (0, 24)).disk["full_records_bytes"]
    monkeypatch.setattr(planning, "_LAID_OUT", 640)
    assert plan_index(6400, 9, (0, 24)).disk["full_records_bytes"] == pytest.approx(whole, rel=0.01)
    large = plan_index(10**9, 80, (0, 128))
    assert large.disk["full_records_bytes"] == pytest.approx(10**9 * (16 + 80 * 256), rel=0.01)
    assert large.memory["metadata_bytes"] == pytest.approx(2.125 * 10**9, rel=0.01)


def test_times_follow_from_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        planning,
        "read_speed",
        lambda path: weights_speed.ReadSpeed(1e6, 1, "posix", written_bytes_per_s=5e5),
    )
    monkeypatch.setattr(planning, "gemm_speed", lambda dtype, rows: 1e9)
    plan = plan_index(5000, 20, (0, 32), storage=tmp_path)
    build, seconds = plan.build, plan.seconds
    assert seconds["spool"] == pytest.approx(plan.disk["spool_bytes"] / 5e5)
    lists = round(4 * 5000**0.5)
    lists = min(lists, 5000 // 39)
    assert build["arrange_operations"] == 2 * 32 * lists * (5000 + 10 * min(5000, 64 * lists))
    assert seconds["arrange"] == pytest.approx(
        4 * 32 * 5000 / 1e6 + build["arrange_operations"] / 1e9
    )
    assert seconds["write"] == pytest.approx(
        build["write_read_bytes"] / 1e6 + plan.disk["total_bytes"] / 5e5
    )
    monkeypatch.setattr(planning, "encoding_speed", lambda encoder, tokens: 10.0)
    encoder = espnx.FunctionEncoder(
        lambda texts: [(None, [[0.0] * 32])] * len(texts), "toy@1", d_cls=0, dim=32
    )
    timed = plan_index(5000, 20, (0, 32), storage=tmp_path, encoder=encoder)
    assert timed.seconds == seconds | {"spool": 500.0}
    assert timed.speeds["encoded_documents_per_s"] == 10.0


def test_the_probe_says_how_fast_it_wrote_and_is_gone(tmp_path: Path) -> None:
    speed = weights_speed.read_speed(tmp_path, 1 << 20)
    assert speed.written_bytes_per_s is not None
    assert speed.written_bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []


def test_an_encoder_is_measured_on_texts_of_that_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_ENCODE_S", 0.0)
    met = list[str]()

    def encode(texts: list[str]) -> Any:
        met.extend(texts)
        return [(None, [[0.0]])] * len(texts)

    assert encoding_speed(espnx.FunctionEncoder(encode, "toy@1", d_cls=0, dim=1), 7) > 0
    assert {len(text.split()) for text in met} == {7}


@pytest.mark.parametrize(
    "wrong",
    [{"documents": 0}, {"tokens": 0}, {"tokens": 65536}, {"dims": (0, 0)}, {"documents": 1.5}],
)
def test_numbers_out_of_range(wrong: dict[str, Any]) -> None:
    given = {"documents": 10, "tokens": 10, "dims": (0, 8), **wrong}
    with pytest.raises(errors.InvalidInputError):
        plan_index(**given)
