"""FlexGen, imported so that it runs where there is no GPU: what `espnx.integrations.flexgen.disk`
builds on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from ... import errors

try:
    from flexgen import flex_opt, pytorch_backend
    from flexgen.compression import CompressionConfig
    from flexgen.opt_config import OptConfig
    from flexgen.timer import timers
    from flexgen.utils import ExecutionEnv, np_dtype_to_torch_dtype
except ImportError as error:
    raise errors.MissingDependencyError(
        "FlexGen is not installed",
        got=str(error),
        fix="pip install --no-deps flexgen==0.1.8; pip install pulp attrs tqdm",
    ) from error

__all__ = [
    "CompressionConfig", "CpuDevice", "ExecutionEnv", "OptConfig", "flex_opt",
    "np_dtype_to_torch_dtype", "pytorch_backend", "timers",
]  # fmt: skip


class _TorchWithoutCuda:
    """What FlexGen's own modules see as ``torch`` where there is no GPU: streams that do nothing,
    memory that is not pinned."""

    cuda = SimpleNamespace(
        Stream=object,
        stream=lambda stream: contextlib.nullcontext(),
        synchronize=lambda *_: None,
        set_device=lambda *_: None,
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return torch.empty(*args, **kwargs)


if not torch.cuda.is_available():
    flex_opt.torch = pytorch_backend.torch = _TorchWithoutCuda()


class CpuDevice(pytorch_backend.TorchDevice):
    """FlexGen's computing device where there is no GPU."""

    def mha_gen(self, *args: Any, **kwargs: Any) -> Any:
        with _tensors_stay():
            return super().mha_gen(*args, **kwargs)


@contextlib.contextmanager
def _tensors_stay() -> Iterator[None]:
    """FlexGen sends what it computed on the CPU to the GPU with `Tensor.cuda`, a method that no
    module of its own holds."""
    found = vars(torch.Tensor).get("cuda")
    setattr(torch.Tensor, "cuda", lambda self, *_, **__: self)  # noqa: B010 - a method, to mypy
    try:
        yield
    finally:
        if found is None:
            delattr(torch.Tensor, "cuda")
        else:
            setattr(torch.Tensor, "cuda", found)  # noqa: B010
