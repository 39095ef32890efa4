"""FlexGen (0.1.8) with its disk kept by espnx: FlexGen's models, policies and loop; our storage
under them.

`EspnxDisk` takes the place of FlexGen's ``TorchDisk``: what a policy puts on disk (its percent of
the KV cache, of weights, of activations) goes through io_uring and past the page cache, with
checksums, and a failure of the disk is a typed error in the thread that called ``generate`` instead
of a wait without end. Where there is no GPU, everything runs on the CPU. For example::

    from transformers import OPTConfig, OPTForCausalLM
    from flexgen.flex_opt import OptLM
    from espnx.integrations import flexgen

    sizes = {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 256}
    sizes |= {"num_attention_heads": 2, "num_hidden_layers": 2}
    model = OPTForCausalLM(OPTConfig(vocab_size=96, max_position_embeddings=64, **sizes))
    config = flexgen.convert(model, "weights")
    policy = flexgen.policy(batch=2, cache_disk_percent=100)
    with flexgen.EspnxDisk("cache") as disk:
        model = OptLM(config, flexgen.environment(disk), "weights", policy)
        tokens = model.generate([[2, 10, 11], [2, 20, 21]], max_new_tokens=5)
        stats = disk.stats()

FlexGen is not a dependency of espnx: ``pip install --no-deps flexgen==0.1.8; pip install pulp attrs
tqdm``.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from ... import errors
from ...storage import NativeEngine
from ...storage.files import make_given_directory, write_error
from .cpu import (
    CompressionConfig,
    CpuDevice,
    ExecutionEnv,
    OptConfig,
    flex_opt,
    np_dtype_to_torch_dtype,
    pytorch_backend,
    timers,
)
from .tensor_file import Index, StoredArray, TensorFile


class StoredTensor(pytorch_backend.TorchTensor):
    """A FlexGen tensor on an `EspnxDisk`; `data` is a `StoredArray`."""

    def load_from_np(self, np_array: np.ndarray) -> None:
        self.device.fill(self.data, torch.from_numpy(np_array))

    def load_from_np_file(self, filename: str) -> None:
        # Mapped, so that weights larger than memory pass through; copy-on-write, because torch
        # wants writable memory.
        self.load_from_np(np.load(filename, mmap_mode="c", allow_pickle=False))


class EspnxDisk:
    """A disk for FlexGen's ``ExecutionEnv``, in place of ``TorchDisk``. A context manager.

    Copies run in one thread, in the order in which FlexGen asks for them; while one piece is
    copied, the next is being read.

    Args:
        path: a directory on the SSD. Nothing has a name there, and nothing is left there when the
            process ends.
        engine: ``auto``, ``uring``, ``posix``, or an engine, which stays the caller's.
        reserve_bytes: reserved at once, so that a full disk shows now.
        overlap: that of the policy. False: a copy is over when FlexGen goes on, which then never
            waits for one by itself; activations on disk need this too.
        deadline_s: of each transfer.

    Raises (from `synchronize`, as ``generate`` calls it):
        ReadError, WriteError, ChecksumError, DeadlineExceededError: the disk can be used further;
            ``generate`` begins anew.
        DiskFullError: from ``generate`` before its first token, with the bytes needed and free.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        engine: NativeEngine | str = "auto",
        reserve_bytes: int = 0,
        overlap: bool = True,
        deadline_s: float = 30.0,
    ):
        self._store = TensorFile(
            path, engine=engine, reserve_bytes=reserve_bytes, deadline_s=deadline_s
        )
        self.name = self.path = os.path.abspath(path)
        self.mem_capacity = None
        self.device_type = pytorch_backend.DeviceType.DISK
        self.compressed_device = pytorch_backend.TorchCompressedDevice(self)
        self.links: dict[Any, Any] = {}
        self._overlap = overlap
        # A SimpleQueue may be used by the garbage collector, whenever it runs.
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failures: list[BaseException] = []
        self._thread = threading.Thread(
            target=_work, args=(self._jobs, self._failures), name="espnx-flexgen", daemon=True
        )
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._jobs, self._thread, self._store)
        # copies between unpinned and GPU memory go through its thread
        pytorch_backend.global_disk_device = self

    # --- what FlexGen calls ---

    def add_link(self, link: Any) -> None:
        self.links[link.b if link.a == self else link.a] = link

    def allocate(
        self,
        shape: tuple[int, ...],
        dtype: Any,
        pin_memory: bool | None = None,
        name: str | None = None,
    ) -> StoredTensor:
        """Zeros, of a NumPy type. Raises DiskFullError."""
        kind = np_dtype_to_torch_dtype[dtype]
        try:
            array = self._store.allocate(shape, kind)
        except errors.DiskFullError:
            self._wait()  # tensors that were deleted may still be in line
            with _ending():
                array = self._store.allocate(shape, kind)
        tensor = StoredTensor(shape, kind, array, self, name=name)
        # In line, because copies of a tensor that FlexGen has deleted may still be under way.
        tensor.release = weakref.finalize(tensor, self._jobs.put, _freeing(self._store, array))
        tensor.release.atexit = False
        return tensor

    def delete(self, tensor: StoredTensor) -> None:
        if tensor.delete_file:
            tensor.release()

    init_cache_one_gpu_batch = pytorch_backend.TorchDisk.init_cache_one_gpu_batch

    def submit_copy(self, dst: Any, dst_indices: Index, src: Any, src_indices: Index) -> None:
        """``dst[dst_indices] = src[src_indices]``, at the latest when `synchronize` returns.

        Raises InvalidInputError for sparse attention, which FlexGen would answer by reading
        everything."""
        if torch.is_tensor(src_indices) or torch.is_tensor(dst_indices):
            with _ending():
                raise errors.InvalidInputError(
                    "attention from an EspnxDisk",
                    got="attn_sparsity below 1",
                    expected="attn_sparsity=1.0",
                )
        self._check_open()
        target, source = dst.data, src.data
        if not isinstance(source, StoredArray):
            source = source[tuple(src_indices)] if src_indices else source
        if not isinstance(target, StoredArray):
            target = target[tuple(dst_indices)] if dst_indices else target
        store, failures = self._store, self._failures

        def copy() -> None:
            if not failures:
                _copy(store, target, dst_indices, source, src_indices)

        self._jobs.put(copy)
        if not self._overlap:
            self.synchronize()

    def synchronize(self) -> None:
        """Waits for all copies. Raises what the first of them raised that failed; those after it
        did not begin."""
        self._check_open()
        self._wait()
        if self._failures:
            error = self._failures[0]
            self._failures.clear()
            with _ending():
                raise error

    def close_copy_threads(self) -> None:
        self.close()

    def mem_stats(self) -> tuple[int, int]:
        """Bytes on disk: now, and in all that were written."""
        return self._store.stored_bytes, self._store.bytes_written

    # --- what others call ---

    def fill(self, array: StoredArray, source: torch.Tensor) -> None:
        """Writes all of a tensor, and waits for it."""

        def write() -> None:
            self._store.write(array, None, source)
            self._store.flush(array)

        self._jobs.put(write)
        self.synchronize()

    def stats(self) -> dict[str, Any]:
        """Bytes stored now, written and read so far, and the path they took."""
        store = self._store
        if self._end.alive:
            self._wait()
        return {
            "stored_bytes": store.stored_bytes,
            "bytes_written": store.bytes_written,
            "bytes_asked": store.bytes_asked,
            "effective_path": store.effective_path,
        }

    def close(self) -> None:
        """Ends all I/O; the space returns."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _wait(self) -> None:
        is_done = threading.Event()
        self._jobs.put(is_done.set)
        is_done.wait()

    def _check_open(self) -> None:
        if not self._end.alive:
            raise errors.EngineClosedError("the disk is closed")


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """An error ends `generate`: FlexGen's timer of it, which all models share, would refuse to
    begin another."""
    try:
        yield
    except BaseException:
        timers("generate").reset()
        raise


def _work(
    jobs: queue.SimpleQueue[Callable[[], None] | None], failures: list[BaseException]
) -> None:
    with torch.no_grad():
        while (job := jobs.get()) is not None:
            try:
                job()
            except BaseException as error:  # `synchronize` raises it in the caller's thread
                failures.append(error)
            del job


def _end(jobs: queue.SimpleQueue[Any], thread: threading.Thread, store: TensorFile) -> None:
    jobs.put(None)
    thread.join()
    store.close()


def _freeing(store: TensorFile, array: StoredArray) -> Callable[[], None]:
    return lambda: store.free(array)


def _copy(
    store: TensorFile, target: Any, target_index: Index, source: Any, source_index: Index
) -> None:
    if isinstance(source, StoredArray) and isinstance(target, StoredArray):
        memory = torch.empty(
            [end - begin for begin, end in source.ranges(source_index)], dtype=source.dtype
        )
        store.read(source, source_index, memory)
        store.write(target, target_index, memory)
    elif isinstance(source, StoredArray):
        store.read(source, source_index, target)
    elif isinstance(target, StoredArray):
        store.write(target, target_index, source)
    else:
        target.copy_(source)


def environment(disk: EspnxDisk) -> Any:
    """FlexGen's ``ExecutionEnv``: the first GPU, or the CPU where there is none, with this disk."""
    gpu = pytorch_backend.TorchDevice("cuda:0") if torch.cuda.is_available() else CpuDevice("cpu")
    cpu = pytorch_backend.TorchDevice("cpu")
    return ExecutionEnv(
        gpu=gpu, cpu=cpu, disk=disk, mixed=pytorch_backend.TorchMixedDevice([gpu, cpu, disk])
    )


def policy(batch: int, *, batches: int = 1, cache_disk_percent: float = 100, **changes: Any) -> Any:
    """FlexGen's ``Policy``: weights and activations where it computes, a share of the KV cache on
    disk and the rest in CPU memory.

    Args:
        batch, batches: sequences in one GPU batch, and how many of these; their product is the
            number of prompts.
        **changes: other fields of ``Policy``.
    """
    fields: dict[str, Any] = {
        "gpu_batch_size": batch,
        "num_gpu_batches": batches,
        "w_gpu_percent": 100,
        "w_cpu_percent": 0,
        "cache_gpu_percent": 0,
        "cache_cpu_percent": 100 - cache_disk_percent,
        "act_gpu_percent": 100,
        "act_cpu_percent": 0,
        "overlap": True,
        "sep_layer": True,
        "pin_weight": torch.cuda.is_available(),
        "cpu_cache_compute": False,
        "attn_sparsity": 1.0,
        "compress_weight": False,
        "comp_weight_config": CompressionConfig(
            num_bits=4, group_size=64, group_dim=0, symmetric=False
        ),
        "compress_cache": False,
        "comp_cache_config": CompressionConfig(
            num_bits=4, group_size=64, group_dim=2, symmetric=False
        ),
    }
    unknown = sorted(set(changes) - set(fields))
    if unknown:
        raise errors.InvalidInputError(
            "FlexGen's policy", got=", ".join(unknown), expected=", ".join(fields)
        )
    return flex_opt.Policy(**fields | changes)


def convert(model: Any, folder: str | os.PathLike[str], name: str = "model") -> Any:
    """Writes an OPT of transformers as FlexGen reads it, float16 in ``folder/name-np``. Returns
    FlexGen's configuration of it.

    Raises:
        InvalidInputError: FlexGen has no such model.
        WriteError, DiskFullError: it could not be written.
    """
    config = model.config
    h = config.hidden_size
    wanted = {
        "model_type": "opt",
        "word_embed_proj_dim": h,
        "ffn_dim": 4 * h,
        "do_layer_norm_before": True,
        "enable_bias": True,
        "activation_function": "relu",
    }
    for key, value in wanted.items():
        if getattr(config, key, None) != value:
            raise errors.InvalidInputError(
                f"FlexGen's OPT: {key}", got=getattr(config, key, None), expected=value
            )
    directory = Path(folder, f"{name}-np")
    make_given_directory(directory)
    for key, value in model.state_dict().items():
        short = key.removeprefix("model.").replace("decoder.final_layer_norm", "decoder.layer_norm")
        try:
            with open(directory / short, "wb") as file:
                np.save(file, value.detach().cpu().half().numpy())
        except OSError as error:
            raise write_error("cannot write weights", directory / short, error) from error
    return OptConfig(
        name=name,
        num_hidden_layers=config.num_hidden_layers,
        max_seq_len=config.max_position_embeddings,
        hidden_size=h,
        input_dim=h,
        n_head=config.num_attention_heads,
        ffn_embed_dim=config.ffn_dim,
        vocab_size=config.vocab_size,
        pad_token_id=config.pad_token_id,
    )
