"""FlashInfer compiled from the headers of its package, by a compiler that is played."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from espnx.benchmarks.kernels import flashinfer
from espnx.errors import EspnxError


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A package's folder, as far as its name is made of it."""
    headers = tmp_path / "flashinfer" / "data" / "include" / "flashinfer" / "attention"
    headers.mkdir(parents=True)
    (headers / "decode.cuh").write_text("// decode")
    return tmp_path / "flashinfer" / "data"


def compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "bin" / "nvcc"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")


def test_a_library_is_made_once_for_a_source(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(tmp_path, monkeypatch, 'while [ "$1" != -o ]; do shift; done; echo made > "$2"')
    library = flashinfer.library_path(data, tmp_path / "made")
    process = flashinfer.begin_build(data, library, "90")
    assert flashinfer.end_build(process, library, 30.0) is None
    assert library.read_text() == "made\n"
    words = [str(each) for each in process.args]  # type: ignore[union-attr]
    assert "-gencode=arch=compute_90,code=sm_90" in words
    assert f"-I{data / 'include'}" in words
    header = data / "include" / "flashinfer" / "attention" / "decode.cuh"
    header.write_text("// another version")
    assert flashinfer.library_path(data, tmp_path / "made") != library


@pytest.mark.parametrize(
    ("script", "limit_s", "why"),
    [
        ("echo x.cu: error: no such thing; exit 2", 30.0, "did not compile: x.cu: error: no such"),
        ("exit 3", 30.0, "did not compile: no output"),
        ("exec sleep 60", 0.1, "did not compile within 0 s"),
    ],
)
def test_why_there_is_no_library(
    tmp_path: Path,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    limit_s: float,
    why: str,
) -> None:
    compiler(tmp_path, monkeypatch, script)
    library = flashinfer.library_path(data, tmp_path / "made")
    process = flashinfer.begin_build(data, library, "90")
    found = flashinfer.end_build(process, library, limit_s)
    assert found is not None
    assert found.startswith(why)
    assert not library.exists()
    assert process.poll() is not None


def test_without_a_compiler(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(flashinfer, "_NVCC", tmp_path / "none")
    with pytest.raises(EspnxError, match="no nvcc"):
        flashinfer.begin_build(data, tmp_path / "x.so", "90")


def test_an_installed_package_is_found(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (data.parent / "__init__.py").write_text("raise ImportError")  # it is not imported
    monkeypatch.syspath_prepend(str(tmp_path))
    assert flashinfer.sources() == data


def test_flashinfer_says_what_it_refuses() -> None:
    assert flashinfer.refusal(torch.float16, 128, 4) is None
    assert flashinfer.refusal(torch.float32, 128, 4) == "has no fp32 rows"
    assert flashinfer.refusal(torch.bfloat16, 576, 16) == "not compiled for these rows"
