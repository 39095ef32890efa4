"""The checks of scripts/gpu_check.py that are about KV caches: the attention kernel, and generation
with rows on SSD."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from gpu_timing import Rows, row, time_kernels

_NEW_TOKENS = 24
_TIMED = (
    "decode fp16 d 128, 8 x 4",
    "decode bf16 d 128, 32 x 1",
    "decode int8 d 128, 8 x 4",
    "decode fp32 d 128, 8 x 4",
    "rows as K and V fp16 d 576, 1 x 16",
)
UDEV = Path("/run/udev/data")  # where cuFile looks up a file's device


def check_attention(work: Path, rows: Rows, failures: list[str]) -> None:
    """The attention kernel against float64 over odd shapes, and its bytes per second beside the
    memory's."""
    from espnx.device.row_layout import DTYPES

    for fmt in DTYPES:
        for heads, group, d, dv, n in (
            (2, 1, 64, 64, 70),
            (2, 4, 128, 128, 1000),
            (1, 7, 80, 40, 33),
            (3, 2, 256, 8, 300),
        ):
            error = attention_error(fmt, heads, group, d, dv, n, "cuda")
            if not error <= 1.0:
                failures.append(
                    f"attention {fmt} heads={heads} d={d} rows={n}: {error:.3g} times the error "
                    "that fp32 allows"
                )
    if not failures:
        time_kernels(_TIMED, rows, failures)


def attention_error(
    fmt: str, heads: int, group: int, d: int, dv: int, n: int, device: str
) -> float:
    """Largest error over its bound (docs/tolerances.md): sums of d and of n products in fp32, in
    exponents the largest score counts."""
    from espnx.device.row_layout import RowLayout
    from espnx.ops import attention

    layout = RowLayout(fmt, d, dv)
    k, v, q = (
        torch.randn(1, heads, n, d),
        torch.randn(1, heads, n, dv),
        torch.randn(1, heads * group, 1, d) * d**-0.5,
    )
    blocks = layout.pack(k, v)
    k, v = (each.double()[0] for each in layout.unpack(blocks, n))
    offsets = torch.arange(heads * layout.blocks(n)).view(1, heads, -1) * layout.block_bytes
    o, _ = attention(
        q.to(device),
        blocks.view(-1).to(device),
        offsets,
        torch.tensor([n]),
        block_rows=layout.block_rows,
        format=fmt,
        scale=1.0,
        dv=dv,
    )
    queries = q.double().view(heads, group, d)
    weights = (queries @ k.mT).softmax(-1)
    gamma = (d + n + 64) * 2.0**-22
    largest = (queries.abs() @ k.abs().mT).amax(-1, keepdim=True)
    bound = (torch.expm1(2 * gamma * largest) + 2 * gamma) * (weights @ v.abs())
    worst = ((o.cpu().double().view(heads, group, dv) - weights @ v).abs() / bound).max().item()
    return worst if worst == worst else float("inf")


def check_kv(work: Path, rows: Rows, failures: list[str]) -> None:
    """Generation with a KV cache on SSD: in fp32 the framework's tokens, with K and V or with X;
    times and bytes of each path."""
    from espnx.errors import PathUnavailableError

    for name in ("llama", "opt"):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            points: list[dict[str, Any]] = [{}]
            if dtype == torch.float32:
                points += [
                    {"x_rows": 2},
                    {"x_rows": 1},
                    {"engine": "uring"},
                    {"engine": "gds"},
                    {"engine": "gds-compat"},
                ]
            generate_all(name, dtype, points, work, rows, failures, PathUnavailableError)


def generate_all(
    name: str,
    dtype: torch.dtype,
    points: list[dict[str, Any]],
    work: Path,
    rows: Rows,
    failures: list[str],
    unavailable: Any,
    device: str = "cuda",
) -> None:
    """One model, with the framework's cache and with ours, once for each of `points` (options of
    `KVCache`)."""
    from transformers import DynamicCache

    from espnx.integrations.transformers.cache import KVCache
    from espnx.integrations.transformers.enable import enable_kv_cache
    from tests.integrations.transformers.tiny import make, prompt

    changes: dict[str, Any] = {"max_position_embeddings": 2048}
    if name == "opt":  # X rows that are longer than the attention kernel takes
        changes |= {"hidden_size": 512, "word_embed_proj_dim": 512, "num_attention_heads": 4}
    plain, ours = (make(name, dtype=dtype, **changes).to(device) for _ in range(2))
    plain.set_attn_implementation("eager")
    enable_kv_cache(ours)
    inputs = {key: value.to(device) for key, value in prompt([900, 411]).items()}
    wanted, _ = _generate(plain, inputs, DynamicCache(config=plain.config))
    for options in points:
        requested = options.get("engine", "auto")
        params = {
            "model": name,
            "dtype": str(dtype).removeprefix("torch."),
            "x_rows": options.get("x_rows", 0),
        }
        try:
            with KVCache(ours.config, work / "kv", **{"x_rows": 0} | options) as cache:
                found, seconds = _generate(ours, inputs, cache)
                stats = cache.stats()
        except unavailable as error:
            # An honest refusal is what `gds` promises where it cannot be had; the others must work,
            # `gds-compat` where cuFile finds udev's database.
            rows.append(
                row(
                    "kv-generate",
                    params | {"refused": str(error)},
                    "espnx",
                    [],
                    requested_path=requested,
                )
            )
            if requested != "gds" and not (requested == "gds-compat" and not UDEV.exists()):
                failures.append(str(error))
            continue
        same = float((found == wanted).float().mean())
        is_right = (same == 1.0 or dtype != torch.float32) and stats["bytes_asked"] > 0
        if not is_right:
            failures.append(
                f"{params} by {requested}: {same:.3f} of the framework's tokens, "
                f"{stats['bytes_asked']} bytes read"
            )
        figures = {
            key: float(stats[key]) for key in ("prefill_s", "decode_s", "waiting_s", "computing_s")
        }
        rows.append(
            row(
                "kv-generate",
                params | {"fallback_reason": stats["fallback_reason"]},
                "espnx",
                [seconds],
                requested_path=requested,
                effective_path=stats["effective_path"],
                bytes_asked=stats["bytes_asked"],
                bytes_moved=stats["bytes_moved"],
                correct=is_right,
                metrics=figures
                | {"same_tokens": same, "bytes_written": float(stats["bytes_written"])},
            )
        )


def _generate(
    model: Any, inputs: dict[str, torch.Tensor], cache: Any
) -> tuple[torch.Tensor, float]:
    begun = time.perf_counter()
    found = model.generate(
        **inputs, past_key_values=cache, max_new_tokens=_NEW_TOKENS, do_sample=False
    )
    return found.cpu(), time.perf_counter() - begun
