"""FlexGen 0.1.8 with its KV cache on disk, on a machine without a GPU: patched when it is imported,
its files as they were released.

The flags are ``--gpu-batch-size B --num-gpu-batches 1 --overlap true --percent 100 0 0 0 100 0``.
Its own generation loop runs in a thread and waits before each token until it is told to go on. Its
prefill is replaced: every attention layer returns the benchmark's rows, which FlexGen then stores
in its own way, and the layers between do nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from espnx.errors import EspnxError, MissingDependencyError

from .models import Rows, Task, load_model

FIX = "pip install --no-deps flexgen==0.1.8; pip install pulp attrs tqdm"
_STEP_DEADLINE_S, _END_S = 900.0, 5.0
# FlexGen treats this token as padding.
_PAD, _ANY_TOKEN = 1, 5


class _EndedError(BaseException):
    """Unwinds FlexGen's loop when nobody wants more tokens."""


class Gate:
    """FlexGen's timer of a step: `start` waits for `go`, and `stop` lets it return."""

    def __init__(self) -> None:
        self._may_go, self._is_done = threading.Semaphore(0), threading.Semaphore(0)
        self.costs: list[float] = []
        self.failure: BaseException | None = None
        self._is_over = False
        self._is_prefill = True

    def start(self, sync_func: Any = None) -> None:
        if self._is_prefill:
            return
        self._may_go.acquire()
        if self._is_over:
            raise _EndedError

    def stop(self, sync_func: Any = None) -> None:
        self._is_prefill = False
        self._is_done.release()

    def go(self) -> None:
        self._may_go.release()
        self.wait()

    def wait(self) -> None:
        """Raises EspnxError where FlexGen failed or hangs (it waits forever for a copy thread that
        has died)."""
        if not self._is_done.acquire(timeout=_STEP_DEADLINE_S) or self.failure is not None:
            raise EspnxError(
                "FlexGen did not finish a step",
                got=repr(self.failure) if self.failure else f"{_STEP_DEADLINE_S:g} s",
            )

    def fail(self, error: BaseException) -> None:
        self.failure = error
        self._is_done.release()

    def end(self) -> None:
        self._is_over = True
        self._may_go.release()


def import_flexgen() -> tuple[Any, Any]:
    """(flex_opt, pytorch_backend), with what needs a GPU replaced. For a process of its own: it
    changes torch for good.

    Raises MissingDependencyError.
    """
    try:
        flex_opt, backend = (
            importlib.import_module(f"flexgen.{name}") for name in ("flex_opt", "pytorch_backend")
        )
    except ImportError as error:
        raise MissingDependencyError(
            "the baseline flexgen-disk is not installed", got=str(error), fix=FIX
        ) from error
    patches: Mapping[str, Any] = {
        "Stream": type("Stream", (), {}),
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda *_: None,
        "set_device": lambda *_: None,
    }
    for name, value in patches.items():
        setattr(torch.cuda, name, value)
    setattr(torch.Tensor, "cuda", lambda self, *_, **__: self)  # noqa: B010 - a method, to mypy
    setattr(torch.Tensor, "pin_memory", lambda self, *_, **__: self)  # noqa: B010
    setattr(torch, "empty", _without_pinning(torch.empty))  # noqa: B010
    return flex_opt, backend


def _without_pinning(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return empty(*args, **kwargs)

    return unpinned


def seeded_device(backend: Any, rows: Rows) -> Any:
    """FlexGen's compute device on the CPU, whose prefill gives `rows`."""

    class SeededDevice(backend.TorchDevice):
        is_prefill = True
        layer = 0

        def mha(self, inputs: Any, *_: Any) -> tuple[Any, Any, Any]:
            """FlexGen's rows are [context, batch * heads, d]."""
            found = [
                part.permute(2, 0, 1, 3).flatten(1, 2).contiguous() for part in rows.kv(self.layer)
            ]
            self.layer += 1
            return inputs, *(backend.TorchTensor.create_from_torch(part, self) for part in found)

        def mlp(self, inputs: Any, *args: Any) -> Any:
            return inputs if self.is_prefill else super().mlp(inputs, *args)

        def opt_output_embed(self, inputs: Any, *args: Any) -> Any:
            if not self.is_prefill:
                return super().opt_output_embed(inputs, *args)
            self.is_prefill = False
            return backend.TorchTensor.create_from_torch(
                torch.full((inputs.shape[0], 1), _ANY_TOKEN), self
            )

    return SeededDevice("cpu")


def write_weights(model: Any, folder: Path) -> None:
    """A transformers model's weights as FlexGen reads them."""
    folder.mkdir(parents=True)
    for name, value in model.state_dict().items():
        short = name.removeprefix("model.").replace(
            "decoder.final_layer_norm", "decoder.layer_norm"
        )
        with open(folder / short, "wb") as file:
            np.save(file, value.numpy())


class FlexGenDecoder:
    """See `kv_systems.Decoder`. It shows no logits, only tokens."""

    effective_path = "mmap"

    def __init__(self, task: Task, weights: Path, storage: Path):
        self.task, self.storage = task, storage
        flex_opt, backend = import_flexgen()
        model = load_model(weights, task.dtype)
        config = _config(model.config)
        folder = weights.parent / "flexgen"
        write_weights(model, folder / f"{config.name}-np")
        device, cpu = seeded_device(backend, Rows(task, model)), backend.TorchDevice("cpu")
        self._disk = backend.TorchDisk(str(storage))
        env = importlib.import_module("flexgen.utils").ExecutionEnv(
            gpu=device,
            cpu=cpu,
            disk=self._disk,
            mixed=backend.TorchMixedDevice([device, cpu, self._disk]),
        )
        self._lm = flex_opt.OptLM(config, env, str(folder), _policy(flex_opt, task.batch))
        for path in (folder / f"{config.name}-np").iterdir():  # in memory now
            path.unlink()
        self._gate = Gate()
        importlib.import_module("flexgen.timer").timers.timers["generate"] = self._gate
        # A copy thread that dies leaves the loop waiting forever.
        threading.excepthook = lambda died: self._gate.fail(died.exc_value or died.exc_type())
        self._thread = threading.Thread(target=self._generate, daemon=True)
        self._done = 0

    def _generate(self) -> None:
        task = self.task
        prompt = np.full((task.batch, task.context), _ANY_TOKEN, dtype=np.int32)
        try:
            # The prefill gives one token; the last one is not stored, so that one more is asked for
            # than will be.
            with torch.no_grad():
                self._lm.generate(prompt, max_new_tokens=task.steps + 2)
        except _EndedError:
            pass
        except BaseException as error:
            self._gate.fail(error)

    def seed(self) -> None:
        self._thread.start()
        self._gate.wait()

    def step(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        place = self.task.context + self._done
        self._lm.output_ids[:, place] = tokens.numpy()
        self._gate.go()
        self._done += 1
        return torch.from_numpy(self._lm.output_ids[:, place + 1].copy()).long(), None

    def rest(self) -> None:
        pass

    def counters(self) -> dict[str, float]:
        return {}

    def files(self) -> list[Path]:
        return sorted(path for path in self.storage.iterdir() if path.is_file())

    def predicted_s(self) -> tuple[float, ...]:
        return ()

    def close(self) -> None:
        self._gate.end()
        if self._thread.is_alive():
            self._thread.join(timeout=_END_S)
        # Its own way to end the copy threads waits forever for copies that a dead one has left.
        queue, self._disk.copy_queue = self._disk.copy_queue, None
        for _ in self._disk.copy_threads:
            queue.put_nowait(None)
        for thread in self._disk.copy_threads:
            thread.join(timeout=_END_S)


def _config(config: Any) -> Any:
    h = config.hidden_size
    return importlib.import_module("flexgen.opt_config").OptConfig(
        name="model",
        num_hidden_layers=config.num_hidden_layers,
        max_seq_len=config.max_position_embeddings,
        hidden_size=h,
        input_dim=h,
        n_head=config.num_attention_heads,
        ffn_embed_dim=config.ffn_dim,
        vocab_size=config.vocab_size,
        pad_token_id=_PAD,
    )


def _policy(flex_opt: Any, batch: int) -> Any:
    """What ``--percent 100 0 0 0 100 0`` and the other flags above say: weights and activations on
    the device, K and V on disk."""
    compression = importlib.import_module("flexgen.compression").CompressionConfig
    unused = [
        compression(num_bits=4, group_size=64, group_dim=dim, symmetric=False) for dim in (0, 2)
    ]
    return flex_opt.Policy(
        batch,
        1,
        100,
        0,
        0,
        0,
        100,
        0,
        True,
        True,
        True,
        False,
        1.0,
        False,
        unused[0],
        False,
        unused[1],
    )
