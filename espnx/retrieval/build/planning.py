"""What an index will need before anything is encoded: bytes on SSD and in RAM, and what its build
will wait for.

Sizes are computed by the code that builds, for documents of one length. Times are modelled from
speeds that are measured on the spot, as lower bounds, pass by pass: every byte once, every
operation once.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ... import errors
from ...checks import check_whole
from ...device.record_layout import RecordSchema
from ...ops.maxsim import token_format
from ...weights.speed import gemm_speed, read_speed
from ..encoder import Encoder
from ..first_stage.interface import FirstStage
from ..store.part import GROUP_RECORDS
from ..store.part_file import HEADER_BYTES
from ..store.record import MAX_TOKENS
from .builder import segment_bytes
from .codebooks import wanted_centroids
from .documents import DIGEST_BYTES
from .options import BuildOptions, checked_dims
from .training import Recipe

_LAID_OUT = 1 << 20  # records; of more, the rest takes as much for each
_ENCODE_S, _ENCODED_AT_ONCE = 2.0, 32
_WORD = "document"


@dataclass
class IndexPlan:
    """Sizes in bytes, times in seconds.

    Attributes:
        disk: of the store, without texts and ids; `spool_bytes` beside them while it is built.
        memory: of the open index: metadata and first stage.
        build: bytes and operations of each pass.
        speeds: measured; empty without a storage directory.
        seconds: modelled lower bounds by pass (spool, arrange, write); empty without a storage
            directory.
    """

    disk: dict[str, int]
    memory: dict[str, int]
    build: dict[str, int]
    speeds: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def plan_index(
    documents: int,
    tokens: int,
    dims: tuple[int, int],
    options: BuildOptions | None = None,
    *,
    storage: str | os.PathLike[str] | None = None,
    encoder: Encoder | None = None,
) -> IndexPlan:
    """Computes a plan.

    Args:
        documents: how many.
        tokens: of each.
        dims: (d_cls, dim) of the encoder's vectors; d_cls 0: it has no CLS vector.
        options: of the build.
        storage: where the index will lie; measured, with a temporary file of at most 256 MiB.
        encoder: measured too, on words, for about two seconds.

    Raises:
        InvalidInputError: numbers out of range, or options that do not fit together.
        WriteError: `storage` cannot be written.
    """
    check_whole("documents", documents, 1)
    check_whole("tokens", tokens, 1)
    if tokens > MAX_TOKENS:
        raise errors.InvalidInputError(
            "tokens of a document",
            got=tokens,
            expected=f"at most {MAX_TOKENS}",
            fix="split it into passages",
        )
    chosen = options or BuildOptions()
    recipe = Recipe.of(chosen, checked_dims(dims), None, codebook=None)
    tiers = {
        name: records_bytes(schema, documents, tokens) for name, schema in recipe.tiers.items()
    }
    segments = -(
        -sum(tiers.values()) // segment_bytes(sum(tiers.values()), len(chosen.directories))
    )
    disk = {f"{name}_records_bytes": size + HEADER_BYTES * segments for name, size in tiers.items()}
    stage_bytes = recipe.stage.resident_bytes(documents)
    stored_bytes = stored_by(recipe.stage, documents)
    disk |= {"first_stage_bytes": stored_bytes, "total_bytes": sum(disk.values()) + stored_bytes}
    per_document = 4 * recipe.stage.vector_dim + 2 + DIGEST_BYTES
    disk["spool_bytes"] = (
        records_bytes(recipe.spooled, documents, tokens) + documents * per_document
    )
    metadata = (
        2 * documents
        + len(tiers) * (8 * -(-documents // GROUP_RECORDS) + 16 * segments)
        + _trained_bytes(recipe, documents * tokens)
    )
    memory = {
        "metadata_bytes": metadata,
        "first_stage_bytes": stage_bytes,
        "total_bytes": metadata + stage_bytes,
    }
    plan = IndexPlan(disk, memory, _passes(recipe, disk, documents))
    if storage is not None:
        _measure(plan, storage, encoder, documents, tokens)
    return plan


def stored_by(stage: FirstStage, documents: int) -> int:
    """Bytes of a first stage on SSD: what it keeps in memory, unless it says another number
    (``stored_bytes``)."""
    own = getattr(stage, "stored_bytes", stage.resident_bytes)
    return int(own(documents))


def records_bytes(schema: RecordSchema, documents: int, tokens: int) -> int:
    """Records of so many tokens each, one behind the other, as they are laid out in files; whole
    blocks."""
    some = min(documents, _LAID_OUT)
    _, end = schema.lay_out(np.full(some, tokens, dtype=np.uint16), 0)
    return -(-(end * documents // some) // HEADER_BYTES) * HEADER_BYTES


def _trained_bytes(recipe: Recipe, tokens: int) -> int:
    """Projection and codebooks that stay in memory."""
    found = (
        0 if recipe.schema.dim == recipe.spooled.dim else 4 * recipe.schema.dim * recipe.spooled.dim
    )
    for schema in recipe.tiers.values():
        if token_format(schema.format).needs_codebook:
            found += 4 * wanted_centroids(tokens, recipe.centroids) * schema.stored_dim
    return found


def _passes(recipe: Recipe, disk: dict[str, int], documents: int) -> dict[str, int]:
    """What each pass moves and computes; codebooks and projections, which are trained on a sample,
    are left out."""
    vectors = 4 * recipe.stage.vector_dim * documents
    return {
        "spool_written_bytes": disk["spool_bytes"],
        "arrange_read_bytes": vectors,
        "arrange_operations": recipe.stage.build_operations(documents),
        "write_read_bytes": disk["spool_bytes"] - vectors,
        "write_written_bytes": disk["total_bytes"],
    }


def _measure(
    plan: IndexPlan,
    storage: str | os.PathLike[str],
    encoder: Encoder | None,
    documents: int,
    tokens: int,
) -> None:
    """Fills in speeds and seconds."""
    disk, gemm, build = read_speed(storage), gemm_speed(torch.float32, 512), plan.build
    written = disk.written_bytes_per_s or disk.bytes_per_s
    plan.speeds = {
        "read_bytes_per_s": disk.bytes_per_s,
        "written_bytes_per_s": written,
        "path": disk.effective_path,
        "gemm_operations_per_s": gemm,
    }
    spool = build["spool_written_bytes"] / written
    if encoder is not None:
        plan.speeds["encoded_documents_per_s"] = rate = encoding_speed(encoder, tokens)
        spool = max(spool, documents / rate)
    plan.seconds = {
        "spool": spool,
        "arrange": build["arrange_read_bytes"] / disk.bytes_per_s
        + build["arrange_operations"] / gemm,
        "write": build["write_read_bytes"] / disk.bytes_per_s
        + build["write_written_bytes"] / written,
    }


def encoding_speed(encoder: Encoder, tokens: int) -> float:
    """Documents of about so many tokens that an encoder takes in a second, measured."""
    texts = [" ".join([_WORD] * tokens)] * _ENCODED_AT_ONCE
    encoder.encode_documents(texts[:1])
    begun, done = time.perf_counter(), 0
    while not done or time.perf_counter() - begun < _ENCODE_S:
        encoder.encode_documents(texts)
        done += len(texts)
    return done / (time.perf_counter() - begun)
