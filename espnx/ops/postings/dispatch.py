"""Defines the postings op and registers its versions. Imported once, by `load_ops`."""

from __future__ import annotations

import torch

from .cpu import postings_cpu

torch.library.define(
    "espnx::postings",
    "(Tensor buffer, Tensor lists, Tensor weights, Tensor? lengths, Tensor? norms, Tensor? "
    "allowed, int salt, int kind, int n_records, int k, int variant, float k1, float delta, float "
    "constant) -> (Tensor, Tensor)",
)


@torch.library.impl("espnx::postings", "CPU")
def _(
    buffer: torch.Tensor,
    lists: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor | None,
    norms: torch.Tensor | None,
    allowed: torch.Tensor | None,
    salt: int,
    kind: int,
    n_records: int,
    k: int,
    variant: int,
    k1: float,
    delta: float,
    constant: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    numbers, scores = postings_cpu(
        buffer,
        lists,
        weights,
        lengths,
        norms,
        allowed,
        salt,
        kind,
        n_records,
        k,
        variant,
        k1,
        delta,
        constant,
    )
    return numbers.clone(), scores.clone()  # an op's results share no memory with anything


@torch.library.register_fake("espnx::postings")
def _(
    buffer: torch.Tensor,
    lists: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor | None,
    norms: torch.Tensor | None,
    allowed: torch.Tensor | None,
    salt: int,
    kind: int,
    n_records: int,
    k: int,
    variant: int,
    k1: float,
    delta: float,
    constant: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return weights.new_empty(k, dtype=torch.int64), weights.new_empty(k, dtype=torch.float32)
