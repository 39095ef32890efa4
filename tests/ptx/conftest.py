"""The ops' launchers with kernels that are compiled for sm_90 and executed here."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.ptx.launching import Launched

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def launch(triton_cache: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``launch(change)``: from now on the launchers run PTX that has been changed so; at first they
    run it as it is."""
    from espnx.kernels.attention import attention_kernel
    from espnx.kernels.attention_merge import merge_kernel
    from espnx.kernels.crc32c import crc32c_kernel
    from espnx.kernels.int8_attention import int8_attention_kernel
    from espnx.kernels.maxsim import maxsim_kernel
    from espnx.kernels.wide_attention import wide_attention_kernel
    from espnx.ops.attention.cuda import attention_triton
    from espnx.ops.crc32c.cuda import crc32c_triton
    from espnx.ops.maxsim.cuda import maxsim_triton
    from tests.ptx.launching import Launched, module_of

    launchers = {
        attention_triton: (
            attention_kernel,
            wide_attention_kernel,
            int8_attention_kernel,
            merge_kernel,
        ),
        crc32c_triton: (crc32c_kernel,),
        maxsim_triton: (maxsim_kernel,),
    }

    def launch(change: Callable[[str], str] | None = None) -> list[Launched]:
        found = []
        for launcher, kernels in launchers.items():
            launched = [Launched(kernel, change) for kernel in kernels]
            module = module_of(launched)
            monkeypatch.setattr(
                sys.modules[launcher.__module__], "load_kernel", lambda name, m=module: m
            )
            found += launched
        return found

    launch()
    return launch


@pytest.fixture
def device_code(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``device_code(change)``: from now on kernels of csrc/cuda run as PTX that has been changed
    so, on tensors of the CPU; at first they run as they are."""
    from espnx.ops import device_code as code
    from tests.ptx.nvcc import Launcher

    def launch(change: Callable[[str], str] | None = None) -> Launcher:
        launcher = Launcher(change)
        monkeypatch.setattr(code, "launch", launcher)
        return launcher

    monkeypatch.setattr(code, "is_there", lambda *args: True)
    launch()
    return launch
