"""What a build has to train before it can write a record, and the training, on what is spooled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ... import errors
from ...device.record_layout import RecordSchema
from ...ops.maxsim import Codebook, token_format
from ..first_stage.interface import FirstStage
from ..first_stage.registry import kinds_of, new_stage
from ..store.projection import Projection
from ..store.rows import format_until_coded, tokens_of
from ..versions.segments import pieces
from .budget import MemoryBudget
from .codebooks import TokenSource, codebook_tensors, train_codebooks
from .options import BuildOptions
from .spool import Spool
from .trained import Trained

_PCA_DOCUMENTS = 4096
# Of what the budget leaves. Decoded, projected and multiplied, records of a sixteenth take a
# quarter of it; a sample of tokens is held together with its parts, so an eighth takes a quarter
# too. The rest is the encoder's and the allocator's.
_PCA_SHARE, _CODEBOOK_SHARE = 16, 8


@dataclass(frozen=True, eq=False)
class Recipe:
    """What is to be built, of which vectors.

    Attributes:
        spooled: schema of the spooled records: the encoder's dimensions, as it delivers them.
        schema: of the records. coarse: of the coarse tier, or None.
        stage: first stage, untrained unless it was trained before.
        encoder: name of the one that makes the vectors; None: documents bring them.
        centroids: of codebooks, see `BuildOptions`.
        codebook: of rows that documents bring; not trained then.
    """

    spooled: RecordSchema
    schema: RecordSchema
    coarse: RecordSchema | None
    stage: FirstStage
    encoder: str | None
    centroids: int | None = None
    codebook: Codebook | None = None

    @classmethod
    def of(
        cls,
        options: BuildOptions,
        dims: tuple[int, int],
        encoder: str | None,
        *,
        codebook: Codebook | None,
        stage: FirstStage | None = None,
    ) -> Recipe:
        """`stage`: instead of the one that the options name. Raises InvalidInputError for what does
        not fit together."""
        if codebook is not None:
            token_format(options.format).check_codebook(dims[1], codebook)
            if options.pca is not None:
                raise errors.InvalidInputError(
                    "pca beside codebook=",
                    got=options.pca,
                    expected="None: rows are kept bit for bit",
                )
            kept = options.format
        else:
            kept = format_until_coded(
                options.format, options.coarse is not None, options.pca not in (None, dims[1])
            )
        dim = dims[1] if options.pca is None else options.pca
        if dim > dims[1]:
            raise errors.InvalidInputError(
                "dimensions to project to", got=dim, expected=f"at most {dims[1]}"
            )
        return cls(
            spooled=RecordSchema(kept, *dims),
            schema=RecordSchema(options.format, dims[0], dim),
            coarse=None if options.coarse is None else RecordSchema(options.coarse, 0, dim),
            stage=new_stage(options.stages, options.pooling, *dims) if stage is None else stage,
            encoder=encoder,
            centroids=options.centroids,
            codebook=codebook,
        )

    @property
    def tiers(self) -> dict[str, RecordSchema]:
        """The schemas of the records by name, the full one first."""
        return (
            {"full": self.schema}
            if self.coarse is None
            else {"full": self.schema, "coarse": self.coarse}
        )


#: Options that decide on what is trained.
TRAINED_OPTIONS = (
    "format",
    "coarse",
    "pca",
    "pooling",
    "nlist",
    "centroids",
    "first_stages",
    "language",
    "sparse_encoder",
    "first_stage_code",
)


def options_of(trained: Trained, given: dict[str, Any]) -> BuildOptions:
    """Options of a build that trains nothing. Raises InvalidInputError for one that was decided on
    when it was trained."""
    for name in TRAINED_OPTIONS:
        if name in given:
            raise errors.InvalidInputError(
                f"option {name!r} beside trained=",
                got=given[name],
                fix="leave it out: it was decided on when that was trained",
            )
    return BuildOptions.given(
        **given,
        format=trained.schema.format,
        first_stages=kinds_of(trained.first_stage),
        pca=None if trained.schema.dim == trained.dim else trained.schema.dim,
        coarse=None if trained.coarse is None else trained.coarse.format,
    )


def check_trained(trained: Trained, recipe: Recipe) -> None:
    """Raises InvalidInputError where it was trained for other vectors than those that are to be
    built."""
    if recipe.codebook is not None:
        raise errors.InvalidInputError("codebook= beside trained=", expected="one of them")
    got, expected = (recipe.spooled.d_cls, recipe.spooled.dim), (trained.schema.d_cls, trained.dim)
    if got != expected:
        raise errors.InvalidInputError("dims beside trained=", got=got, expected=expected)
    if recipe.encoder != trained.encoder and None not in (recipe.encoder, trained.encoder):
        raise errors.InvalidInputError(
            "encoder beside trained=", got=recipe.encoder, expected=trained.encoder
        )


def train_recipe(recipe: Recipe, spool: Spool, budget: MemoryBudget) -> Trained:
    """Trains the first stage, the projection and the codebooks on spooled documents, of which there
    is one at least."""
    stage = recipe.stage.train(spool, budget.left())
    tensors = {} if recipe.codebook is None else codebook_tensors("full", recipe.codebook)
    projection = _fit_projection(recipe, spool, budget)
    if projection is not None:
        tensors["projection"] = projection.components.numpy()
    names = {
        name: schema.format
        for name, schema in recipe.tiers.items()
        if token_format(schema.format).needs_codebook
    }
    if recipe.codebook is not None:
        names.pop("full", None)
    if names:
        source = TokenSource(spool, projection, recipe.schema.dim)
        tensors |= train_codebooks(
            source, names, recipe.centroids, budget.left() // _CODEBOOK_SHARE
        )
    is_normalised = projection is not None and projection.is_normalised
    return Trained(
        recipe.schema,
        recipe.coarse,
        recipe.encoder,
        recipe.spooled.dim,
        stage,
        tensors,
        is_normalised,
    )


def _fit_projection(recipe: Recipe, spool: Spool, budget: MemoryBudget) -> Projection | None:
    if recipe.schema.dim == recipe.spooled.dim:
        return None
    chosen = np.random.default_rng(2).choice(
        len(spool), size=min(len(spool), _PCA_DOCUMENTS), replace=False
    )
    return Projection.fit(
        _tokens(spool, np.sort(chosen).astype(np.int64), budget),
        recipe.spooled.dim,
        recipe.schema.dim,
    )


def _tokens(spool: Spool, chosen: np.ndarray, budget: MemoryBudget) -> Iterator[torch.Tensor]:
    """Token vectors of some documents, float32 [n, dim] each."""
    limit_bytes = budget.left() // _PCA_SHARE
    for part in pieces(
        iter([chosen]),
        lambda arrivals: spool.schema.sizes(spool.n_tokens[arrivals]),
        limit_bytes,
        lambda: len(chosen),
    ):
        yield from tokens_of(spool, part, None)
