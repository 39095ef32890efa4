"""Bytes and arithmetic of a decoder's layers, in half precision."""

from __future__ import annotations

from dataclasses import dataclass

from ..specs.kinds import ModelSpec

HALF_BYTES = 2


@dataclass(frozen=True)
class Layer:
    """One layer at work for a batch.

    Attributes:
        qkv_bytes, qkv_flops: of the weights of Q, K and V, and of a token's products with them.
        rest_bytes, rest_flops: of all other weights: those that a batch's tokens pass, once each.
    """

    qkv_bytes: float
    qkv_flops: float
    rest_bytes: float
    rest_flops: float

    @property
    def weight_bytes(self) -> float:
        return self.qkv_bytes + self.rest_bytes


@dataclass(frozen=True)
class Shape:
    """A model in whole numbers.

    Attributes:
        layers, hidden, intermediate, heads, kv_heads, head_dim, mlp_matrices: as `ModelShape` has
            them.
        experts, active_experts: 1 and 1 without experts.
        expert_every: of so many layers one has experts.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_matrices: int
    experts: int
    active_experts: int
    expert_every: int

    @classmethod
    def of(cls, spec: ModelSpec) -> Shape:
        known = {name: getattr(spec.model, name) for name in cls.__dataclass_fields__}
        return cls(**{name: 1 if each is None else int(each.value) for name, each in known.items()})

    @property
    def group(self) -> int:
        """Query heads that share K and V."""
        return self.heads // self.kv_heads

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's K, or V, in one layer."""
        return self.kv_heads * self.head_dim * HALF_BYTES

    @property
    def x_bytes(self) -> int:
        """Bytes of what attention takes in of a token, in one layer."""
        return self.hidden * HALF_BYTES

    @property
    def x_ratio(self) -> float:
        """Bytes of X over those of K and V."""
        return self.x_bytes / (2 * self.row_bytes)

    @property
    def attention_flops(self) -> float:
        """Operations of one query token against one token of K and V, in one layer."""
        return 4.0 * self.heads * self.head_dim

    @property
    def regeneration_flops(self) -> float:
        """Operations of a token's K and V from its X, in one layer."""
        return 4.0 * self.hidden * self.kv_heads * self.head_dim

    def kv_bytes(self, tokens: float) -> float:
        """Bytes of K and V of so many tokens, in all layers."""
        return 2.0 * self.row_bytes * tokens * self.layers

    @property
    def parameters(self) -> float:
        """Without embeddings."""
        return self.weight_bytes(None) / HALF_BYTES

    def weight_bytes(self, batch: int | None) -> float:
        """Bytes of the weights of all layers, experts as `layer` has them. The last of every
        `expert_every` layers has experts, and none of those that are left over."""
        with_experts = self.layers // self.expert_every
        last = self.layer(self.expert_every - 1, batch).weight_bytes
        plain = self.layers - with_experts
        others = plain * self.layer(0, batch).weight_bytes if plain else 0.0
        return with_experts * last + others

    def layer(self, number: int, batch: int | None) -> Layer:
        """The layer of that number. Experts are those that `batch` tokens choose, alike and on
        their own; all of them with None."""
        qkv = self.hidden * (self.heads + 2 * self.kv_heads) * self.head_dim
        out = self.heads * self.head_dim * self.hidden
        mlp = self.mlp_matrices * self.hidden * self.intermediate
        has_experts = self.experts > 1 and number % self.expert_every == self.expert_every - 1
        chosen, passed = 1.0, 1
        if has_experts:
            missed = 0.0 if batch is None else (1 - self.active_experts / self.experts) ** batch
            chosen, passed = self.experts * (1 - missed), self.active_experts
        return Layer(
            HALF_BYTES * qkv,
            2.0 * qkv,
            HALF_BYTES * (out + mlp * chosen),
            2.0 * (out + mlp * passed),
        )
