"""Devices that are opened by themselves, one or several, and given to KV caches and to indexes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import espnx
from espnx import errors
from espnx.device.clusters import write_clusters
from espnx.device.clusters.commands import DistancesCommand
from espnx.device.interface import RecordDevice, RecordQuery
from espnx.device.near_storage import NearStorageDevice
from espnx.device.rows.commands import FlushCommand
from espnx.device.several import SeveralRecordDevices
from espnx.device.trace.recording import recorded
from espnx.device.trace.writer import TraceWriter
from espnx.device.vectors.interface import SearchCommand
from tests.device.graph.made import query_of, random_graph
from tests.integrations.transformers.tiny import enabled, prompt
from tests.retrieval.common import build, corpus, queries

RAM = "espnx.device.example.ram_device:RamDevice"


def generated(device: Any, *storage: Any, **options: Any) -> list[int]:
    model = enabled("llama")
    with espnx.KVCache(model.config, *storage, device=device, **options) as cache:
        found = model.generate(
            **prompt([9, 9, 4]), past_key_values=cache, max_new_tokens=6, do_sample=False
        )
        assert cache.stats()["bytes_written"] > 0
    return found.flatten().tolist()  # type: ignore[no-any-return]


def test_a_cache_on_devices_that_are_given(tmp_path: Path) -> None:
    wanted = generated(None, tmp_path / "plain")
    devices = espnx.device.open("ssd", [tmp_path / "a", tmp_path / "b"])
    assert [(each.name, each.kind) for each in devices] == [("ssd", "plain")] * 2
    for _ in range(2):  # they stay the caller's
        assert generated(devices, spill_interval=2) == wanted
    one = espnx.device.open("ssd", tmp_path / "a")
    assert (
        generated(one, spill_interval=2)
        == generated(one, tmp_path / "a" / "below", spill_interval=2)
        == wanted
    )
    assert generated(RAM, [tmp_path / "c", tmp_path / "d"], spill_interval=2) == wanted


def test_devices_that_do_not_fit(tmp_path: Path) -> None:
    config, devices = (
        enabled("llama").config,
        espnx.device.open("ssd", [tmp_path / "a", tmp_path / "b"]),
    )
    for storage, device in (
        ([tmp_path / "a"], devices),
        ([tmp_path / "a", tmp_path / "c"], devices),
        ([tmp_path], devices[0]),
    ):
        with pytest.raises(errors.InvalidInputError, match="leave the directories out"):
            espnx.KVCache(config, storage, device=device)
    for device in (None, "ssd"):
        with pytest.raises(errors.InvalidInputError, match="storage"):
            espnx.KVCache(config, device=device)
    for wrong in ([], 3, ["ssd"]):
        with pytest.raises(errors.InvalidInputError, match=r"a name, a device or several"):
            espnx.KVCache(config, tmp_path, device=wrong)  # type: ignore[arg-type]


def test_names_options_and_what_is_no_device(tmp_path: Path) -> None:
    assert {"gpu", "ssd"} <= set(espnx.device.names())
    with pytest.raises(errors.InvalidInputError, match=r"'ssd'\? Or install"):
        espnx.device.open("sdd", tmp_path)
    with pytest.raises(errors.InvalidInputError, match=r"options of device 'ssd'.*stretch"):
        espnx.device.open("ssd", tmp_path, stretch=3)
    with pytest.raises(
        errors.InvalidInputError, match=r"derived from espnx\.device\.NearStorageDevice"
    ):
        espnx.device.open("espnx.device.example.ram_device:RamRows", tmp_path)


def test_what_a_device_does_not_do(tmp_path: Path) -> None:
    class Nothing(NearStorageDevice):
        name = "nothing"

    device = Nothing(tmp_path)
    with pytest.raises(errors.InvalidInputError, match=r"rows of KV caches on device 'nothing'"):
        device.open_rows()
    build(tmp_path / "s", corpus(20))
    with pytest.raises(errors.InvalidInputError, match=r"embedding records on device 'nothing'"):
        espnx.open(tmp_path / "s", device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the hardware is there")
def test_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    """What was named is not replaced by the CPU."""
    build(tmp_path / "s", corpus(20))
    with pytest.raises(errors.PathUnavailableError, match=r"embedding records.*device='ssd'"):
        espnx.open(tmp_path / "s", device="gpu")
    with pytest.raises(errors.PathUnavailableError, match="no CUDA device"):
        espnx.device.open("gpu", tmp_path).open_rows()


def test_a_search_over_several_devices(spread: tuple[Path, list[Path]]) -> None:
    """Each scores what lies on it; the hits are those of one device, to the bit."""
    path, directories = spread
    devices = espnx.device.open("ssd", [path, *directories])
    with (
        espnx.open(path) as plain,
        espnx.open(path, device=devices) as index,
        espnx.open(path, device="ssd") as named,
    ):
        assert isinstance(index.device, SeveralRecordDevices)
        for options in (
            {},
            {"rerank": 20},
            {"prefetch_step": (0.1, 0.5)},
            {"exclude": ["doc-3"]},
            {"explain": True},
            {"cascade": 20},
        ):
            wanted, found, also = (
                each.search(queries(5), k=30, candidates=80, **options)
                for each in (plain, index, named)
            )
            assert (
                [result.hits for result in found]
                == [result.hits for result in wanted]
                == [result.hits for result in also]
            )
            assert (
                plain.search(queries(1)[0], **options).hits
                == index.search(queries(1)[0], **options).hits
            )
        assert index.store.verify() == 300
        stats = index.device.stats()
        assert stats.bytes_moved > 0
        used = {
            each
            for file in index.device.path_report()
            for each in (path, *directories)
            if file.path.startswith(str(each))
        }
        assert len(used) >= 2, "records in one directory alone say nothing"


def test_a_device_too_few(spread: tuple[Path, list[Path]]) -> None:
    path, directories = spread
    with pytest.raises(errors.InvalidInputError, match="a data file on none of the devices"):
        espnx.open(path, device=espnx.device.open("ssd", directories[0]))


def test_damage_on_one_device_is_named_and_the_others_go_on(
    spread: tuple[Path, list[Path]],
) -> None:
    path, directories = spread
    devices = espnx.device.open("ssd", [path, *directories])
    with espnx.open(path) as index:
        segment, offset, _ = index.store.full.locate(np.arange(300))
        number = int(np.flatnonzero(segment.numpy() == int(segment.max()))[0])
        file = Path(index.store.full.files[int(segment[number])].path)
        fine = np.flatnonzero(segment.numpy() != int(segment[number]))
    data = bytearray(file.read_bytes())
    data[int(offset[number]) + 20] ^= 4
    file.write_bytes(data)
    with espnx.open(path, device=devices) as index:
        query = queries(1)[0]
        asked = RecordQuery(query.cls.reshape(1, -1), query.tokens, 2.0)
        ticket = index.store.full.maxsim(np.arange(300), [asked])
        with pytest.raises(
            errors.ChecksumError, match=f"record {number} is not what was written.*{file.name}"
        ):
            ticket.finish()
        assert len(index.store.full.maxsim(fine, [asked]).finish()) == len(fine)


def test_a_record_device_is_a_device_too(tmp_path: Path) -> None:
    build(tmp_path / "s", corpus(20))
    with espnx.open(tmp_path / "s", device="ssd") as index:
        device: RecordDevice = index.device
        assert device.compute == torch.device("cpu")
    with pytest.raises(errors.EspnxError):
        espnx.open(tmp_path / "s", device=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["ssd", "smartssd", "recorded"])
def test_a_command_is_its_call(tmp_path: Path, name: str) -> None:
    """By the one door or by the call: the same bits, of every sort of device."""
    write_clusters(
        tmp_path / "clusters",
        np.arange(90),
        np.arange(90 * 8, dtype=np.uint8).reshape(90, 8),
        np.arange(90) % 3,
    )
    graph, query = random_graph(tmp_path, 60, 8), torch.arange(8, dtype=torch.uint8)
    device = espnx.device.open(
        "ssd" if name == "recorded" else name,
        tmp_path,
        **({"stretch": 0} if name == "smartssd" else {}),
    )
    with TraceWriter(tmp_path / "trace", "a test", [device]) as writer:
        asked = recorded([device], writer)[0] if name == "recorded" else device
        clusters, walked = asked.open_clusters(tmp_path / "clusters"), asked.open_graph(graph)
        by_door = clusters.submit(DistancesCommand(query, [2, 0], metric="ip")).finish()  # type: ignore[attr-defined]
        assert np.array_equal(by_door, clusters.distances(query, [2, 0], metric="ip").finish())
        found = walked.submit(SearchCommand(query_of(1), 20, 5, beam_width=2)).finish()  # type: ignore[attr-defined]
        assert [each.tolist() for each in found] == [
            each.tolist() for each in walked.search(query_of(1), 20, 5, beam_width=2).finish()
        ]
        rows = asked.open_rows()
        rows.submit(FlushCommand()).finish()  # type: ignore[attr-defined]
        rows.close()
        with pytest.raises(errors.EngineClosedError):
            rows.submit(FlushCommand())  # type: ignore[attr-defined]
        walked.close()
        clusters.close()
    device.close()
