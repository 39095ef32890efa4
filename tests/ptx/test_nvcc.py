"""What is taken out of a build's files is what nvcc makes of the sources."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.ptx import nvcc
from tests.ptx.nvcc import built, by_nvcc, needs_nvcc


def words(ptx: bytes) -> list[str]:
    """Without comments; and a name that nvcc makes of a file's path, without that."""
    text = re.sub(r"//.*", "", ptx.decode())
    return re.sub(r"_GLOBAL__N__[0-9a-f]{8}_", "", text).replace("{", " { ").split()


@needs_nvcc
def test_a_build_holds_what_nvcc_makes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvcc, "KEPT", tmp_path)
    cubin, ptx = built("gather", "cubin", 80), built("gather", "ptx", 90)
    if cubin is None or ptx is None:
        pytest.skip("nothing is built by this nvcc, from setup.py as it is")
    assert cubin == by_nvcc("gather", "cubin", 80)
    assert words(ptx) == words(by_nvcc("gather", "ptx", 90))
    assert built("gather", "ptx", 80) is None  # of PTX, the newest alone


def test_another_nvcc_or_setup_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(nvcc, "nvcc_release", lambda: "1.0.1")
        assert built("gather", "cubin", 80) is None
    setup = tmp_path / "setup.py"
    setup.touch()
    monkeypatch.setattr(nvcc, "SETUP", setup)
    assert built("gather", "cubin", 80) is None
