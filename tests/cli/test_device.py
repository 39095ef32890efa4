"""``espnx device ls | info | calibrate | verify`` from the outside: what it finds, what it says of
a device that is wrong, exit codes, JSON."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import espnx
from espnx.cli.checks import calibrated
from espnx.cli.main import main
from espnx.device.conformance.verify import Check
from espnx.device.example.ram_device import RamDevice, RamRows
from espnx.device.interface import RowDevice
from espnx.device.kinds import KINDS, ROWS
from espnx.device.model.spec import load_spec
from espnx.device.near_storage import NearStorageDevice
from espnx.device.plain import SsdDevice
from espnx.integrations.device_checks import checks_of
from tests.cli.documents import strict_json
from tests.forks import forking
from tests.retrieval.common import build, toy_encoder

HERE = "tests.cli.test_device"


class _Shifted(RamRows):
    def attend(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = super().attend(*args)
        return o * 1.01, lse


class WrongAttention(RamDevice):
    """Every result a hundredth off."""

    def open_rows(self, directory: str | None = None, **options: Any) -> RowDevice:
        return _Shifted()


class _Unchecked(RamRows):
    def is_written(self, segment: Any) -> bool:
        raise RuntimeError("not one of ours")


class UntypedError(RamDevice):
    def open_rows(self, directory: str | None = None, **options: Any) -> RowDevice:
        return _Unchecked()


class RecordsAlone(SsdDevice):
    kinds = tuple(kind for kind in KINDS if kind is not ROWS)


def run(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    return code, *capsys.readouterr()


def test_ls(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "device", "ls", "--json", "-")
    found = {each["name"]: each for each in strict_json(out)["devices"]}
    assert code == 0
    assert found["ssd"]["from"] == "espnx"
    assert "SSD" in found["ssd"]["what"]
    code, out, _ = run(capsys, "device", "ls")
    assert (code, out.split()[:3]) == (0, ["device", "from", "what"])


def table(out: str) -> dict[str, str]:
    """Rows of three columns by their first."""
    parts = (re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in out.splitlines())
    return {part[0]: re.sub(r"\s{2,}", "  ", part[1]) for part in parts if len(part) == 2}


def test_info(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "device", "info", "ssd", "--path", folder, "--json", "-")
    facts = strict_json(out)["device"]
    assert (code, facts["name"], facts["kind"], facts["path"]) == (0, "ssd", "plain", str(folder))
    assert facts["capabilities"]["attends_window"] is True
    shown = table(run(capsys, "device", "info", "ssd", "--path", folder)[1])
    assert (shown["head dimensions"], shown["rows outlive the process"], shown["path"]) == (
        "all",
        "yes",
        str(folder),
    )
    code, _, err = run(capsys, "device", "info", "sdd")
    assert code == 2
    assert "'ssd'?" in err


def test_info_says_what_paces(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "device", "info", "smartssd", "--path", folder)
    shown = table(out)
    assert shown["read latency"] == "82 us  derived; paces"
    assert shown["page"] == "4 KiB  paper; informs"
    assert shown["rates, 4"] == "46.8 GFLOPS  paper; paces"
    assert shown["device 0 flash read"] == "3.00 GB/s"
    assert shown["uplink in"] == "31.5 GB/s"
    assert shown["memory of each"] == "4 GiB"
    assert shown["head dimensions"] == "128"
    assert not re.search(r"e\+|\(128,|\bTrue\b|_", out.replace(str(folder), "")), (
        "units and words, not Python's own"
    )
    facts = strict_json(
        run(capsys, "device", "info", "smartssd", "--path", folder, "--json", "-")[1]
    )["device"]
    assert facts["links"]["device 0 flash read"] == 3e9


def test_info_draws_a_spec(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys,
        "device",
        "info",
        "smartssd",
        "--devices",
        16,
        "--path",
        folder,
        "--svg",
        folder / "x.svg",
    )
    assert code == 0
    assert "8 switch ports, each 7.88 GB/s, shared by 2" in out
    assert "16 drives, each on a link of 3.94 GB/s" in out
    assert (folder / "x.svg").read_text().startswith("<svg ")
    for words in (
        ["ssd", "--devices", 2],
        ["ssd", "--svg", folder / "y.svg"],
        ["smartssd", "--devices", 0],
    ):
        code, _, err = run(capsys, "device", "info", *words, "--path", folder)
        assert code == 2, err
    assert not (folder / "y.svg").exists()


def outcomes(out: str) -> dict[str, str]:
    return {each["check"]: each["outcome"] for each in strict_json(out)["checks"]}


#: What the tests below look for.
ASKED_FOR = (
    "rows: counts",
    "rows: refuses rows that do not fit",
    "rows: reads that never end",
    "rows: a soak",
    "clusters: bytes that are damaged",
)


def few_checks(device: NearStorageDevice, soak_s: float) -> Iterator[tuple[str, Check]]:
    """The first of every verb, and those that tests ask for: tests/device has them all."""
    begun = set[str]()
    for name, check in checks_of(device, soak_s):
        verb = name.partition(":")[0]
        if verb not in begun or name in ASKED_FOR:
            begun.add(verb)
            yield name, check


@pytest.fixture(autouse=True)
def quick_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """In tests/device they are spawned, as users have them."""
    context = forking()
    monkeypatch.setattr("espnx.device.conformance.verify.get_context", lambda _: context)


@pytest.fixture(params=["few", pytest.param("all", marks=pytest.mark.sweep)])
def few_or_all(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "few":
        monkeypatch.setattr("espnx.integrations.device_checks.checks_of", few_checks)


@pytest.mark.usefixtures("few_or_all")
def test_verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(
        capsys, "device", "verify", "ssd", "--path", folder, "--soak", "0.2", "--json", "-"
    )
    assert code == 0
    assert "warning" not in err
    assert set(outcomes(out).values()) == {"ok"}
    assert {
        "rows: attends",
        "rows: reads that never end",
        "a generation",
        "rows: a soak",
        "clusters: bytes that are damaged",
    } <= set(outcomes(out))
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("few_or_all")
def test_verify_parts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of what a device does not offer nothing is asked; one that offers nothing does not pass."""
    code, out, _ = run(
        capsys,
        "device",
        "verify",
        f"{HERE}:RecordsAlone",
        "--path",
        folder,
        "--soak",
        "0",
        "--json",
        "-",
    )
    assert code == 0
    assert outcomes(out)["rows"] == "not offered"
    assert {outcome for name, outcome in outcomes(out).items() if name != "rows"} == {"ok"}
    code, out, err = run(
        capsys,
        "device",
        "verify",
        "espnx.device.near_storage:NearStorageDevice",
        "--path",
        folder,
        "--json",
        "-",
    )
    assert (code, set(outcomes(out).values())) == (4, {"not offered"})
    assert "nothing could be checked" in err


@pytest.mark.usefixtures("few_or_all")
def test_verify_finds_what_is_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {
        f"{HERE}:{name}": check
        for name, check in (("WrongAttention", "rows: attends"), ("UntypedError", "rows: counts"))
    }
    code, out, _ = run(
        capsys, "device", "verify", *wrong, "--path", folder, "--soak", "0", "--json", "-"
    )
    assert code == 1
    found = {
        (each["device"], each["check"]): each["outcome"] for each in strict_json(out)["checks"]
    }
    for name, check in wrong.items():
        assert found[name, check] == "failed"
        assert found[name, "rows: refuses rows that do not fit"] == "ok", (
            "one that fails says nothing about the next"
        )


@pytest.mark.usefixtures("few_or_all")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the hardware is there")
def test_verify_without_the_hardware(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(
        capsys, "device", "verify", "gpu", "--path", folder, "--soak", "0.2", "--json", "-"
    )
    assert code == 3
    assert {outcome for name, outcome in outcomes(out).items() if name.startswith("rows")} == {
        "no hardware"
    }
    assert "no CUDA device" in err


def test_verify_of_what_cannot_be_opened(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "device", "verify", "sdd", "--path", folder)
    assert code == 2
    assert "'ssd'?" in err
    assert list(folder.iterdir()) == []


def test_record_and_replay(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that is recorded finds what it finds, and can be replayed on another device, with
    its index alone."""
    monkeypatch.setattr("espnx.encoders.load_encoder", lambda name, **options: toy_encoder())
    build(
        folder / "s",
        [(str(i), f"text of {i}") for i in range(40)],
        encoder=toy_encoder(),
        dims=None,
        nlist=2,
    )
    search = ["search", folder / "s", "text of 3", "--encoder", "toy", "-k", 3, "--json", "-"]
    _, plain, _ = run(capsys, *search)
    code, found, _ = run(capsys, *search, "--record", folder / "trace")
    assert code == 0
    hits = [
        [hit["id"] for hit in strict_json(text)["results"][0]["hits"]] for text in (plain, found)
    ]
    assert hits[0] == hits[1]
    assert "the trace" not in run(capsys, *search, "--record", folder / "trace")[2]
    code, out, _ = run(
        capsys, "device", "replay", folder / "trace", "--index", folder / "s", "--json", "-"
    )
    assert code == 0
    assert strict_json(out)["verbs"]["maxsim"]["count"] >= 1
    code, out, _ = run(
        capsys,
        "device",
        "replay",
        folder / "trace",
        "--index",
        folder / "s",
        "--device",
        "ssd",
        "--no-host",
    )
    assert (code, out.split()[:4]) == (0, ["command", "count", "bytes", "recorded"])
    code, _, err = run(capsys, "device", "replay", folder / "trace", "--path", folder)
    assert code == 2
    assert "--index" in err
    assert not list(folder.glob(".espnx-replay-*"))


def test_record_and_replay_first_stages(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they ask the device is in the trace, and asked again."""
    monkeypatch.setattr("espnx.encoders.load_encoder", lambda name, **options: toy_encoder())
    monkeypatch.setattr("espnx.retrieval.first_stage.graph.stage.FLAT_MAX", 20)
    texts = [(str(i), f"text of {i}, number {i % 7}") for i in range(60)]
    build(folder / "s", texts, encoder=toy_encoder(), dims=None, first_stages=("graph", "bm25"))
    search = ["search", folder / "s", "text of number 3", "--encoder", "toy", "-k", 3]
    search += ["--first-stage", "graph,bm25", "--record", folder / "trace"]
    assert run(capsys, *search, "--device", "smartssd", "--stretch", 0)[0] == 0
    words = ["device", "replay", folder / "trace", "--device", "ssd", "--json", "-"]
    code, out, err = run(capsys, *words, "--index", folder / "s")
    assert code == 0, err
    verbs = strict_json(out)["verbs"]
    assert [verbs[name]["count"] for name in ("walk", "scan")] == [1, 1]
    assert verbs["walk"]["size_bytes"] >= 4096
    code, _, err = run(capsys, *words, "--path", folder)
    assert (code, "--index" in err) == (2, True)


@pytest.fixture
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured for moments."""
    monkeypatch.setattr(calibrated, "FILE_BYTES", 4 << 20)
    monkeypatch.setattr(calibrated, "RUN_S", 0.01)


@pytest.mark.usefixtures("quick_disk")
def test_calibrate(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it writes is a spec, each figure of which says how it was measured, and a device by that
    name can be opened."""
    monkeypatch.chdir(folder)
    code, out, _ = run(capsys, "device", "calibrate", "my-disk", "--path", folder, "--json", "-")
    document = strict_json(out)
    assert (code, document["file"], document["name"]) == (0, "my-disk.yaml", "my-disk")
    spec = load_spec(folder / "my-disk.yaml")
    measured = {
        name: getattr(spec.flash, name)
        for name in ("read_bandwidth", "write_bandwidth", "random_reads", "read_latency")
    }
    for name, figure in measured.items():
        assert figure.confidence == "measured"
        assert figure.source.startswith(f"espnx device calibrate on {datetime.date.today().year}")
        assert figure.value == document["figures"][name]["value"] > 0
    assert document["is_buffered"] == any(
        "buffered" in figure.source for figure in measured.values()
    )
    assert spec.links.device.confidence == "derived"
    device = espnx.device.open("./my-disk.yaml", path=folder / "rows", stretch=0)
    assert device.describe()["spec"] == "my-disk"
    device.close()
    assert [path.name for path in folder.iterdir()] == ["my-disk.yaml"], (
        "what was measured with is gone"
    )


@pytest.mark.usefixtures("quick_disk")
def test_calibrate_refuses(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert run(capsys, "device", "calibrate", "--path", folder)[0] == 0
    before = (folder / "this-disk.yaml").read_bytes()
    code, _, err = run(capsys, "device", "calibrate", "--path", folder)
    assert code == 2
    assert "this-disk.yaml, which is there" in err
    assert (folder / "this-disk.yaml").read_bytes() == before
    for words, says in (
        (("My Disk", "--path", folder), "small letters"),
        (("new", "--path", folder / "none"), "existing directory"),
    ):
        code, _, err = run(capsys, "device", "calibrate", *words)
        assert code == 2
        assert says in err
    assert [path.name for path in folder.iterdir()] == ["this-disk.yaml"]
