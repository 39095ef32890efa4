"""A KV cache as one would write it first: every row in memory, attention in float64. And how far a
correct one may be from it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import torch

from espnx.kv.attention import Step
from espnx.kv.cache import SsdCache
from espnx.kv.scores import PLAIN, ScoreRules
from espnx.kv.visibility import Visibility
from espnx.kv.x_rows import Projection

U = 2.0**-24  # unit roundoff of fp32
# of the model's dtype, where it is not fp32
UNITS = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@dataclass
class Shape:
    """Of a model and its batch."""

    n_layers: int = 2
    n_sequences: int = 2
    n_heads: int = 2
    group: int = 2
    d: int = 16
    dv: int = 16
    dtype: torch.dtype = torch.float32
    # 0: K and V are drawn; otherwise they are projected from an input of that width
    hidden: int = 0
    rotates: bool = False
    has_bias: bool = False
    rules: ScoreRules = PLAIN


@dataclass
class Weights:
    """Of a layer's projections."""

    k: torch.Tensor
    v: torch.Tensor
    k_bias: torch.Tensor | None
    v_bias: torch.Tensor | None


@dataclass
class Layer:
    """All rows of a layer so far, and their sizes: of K and V, or (where they were projected) the
    sums of absolute products."""

    k: torch.Tensor
    v: torch.Tensor
    k_size: torch.Tensor
    v_size: torch.Tensor


@dataclass
class Naive:
    """The cache. `hidden` [sequences, positions] says what is padding; `angles` where each token's
    K is rotated to."""

    shape: Shape
    rng: torch.Generator
    layers: list[Layer] = field(default_factory=list)
    weights: list[Weights] = field(default_factory=list)
    hidden: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    angles: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def __post_init__(self) -> None:
        s = self.shape
        for _ in range(s.n_layers if s.hidden else 0):
            wide = [
                self.normal(s.n_heads * width, s.hidden) / s.hidden**0.5 for width in (s.d, s.dv)
            ]
            biases = [
                self.normal(s.n_heads * width).to(s.dtype) if s.has_bias else None
                for width in (s.d, s.dv)
            ]
            self.weights.append(Weights(wide[0].to(s.dtype), wide[1].to(s.dtype), *biases))
        self.clear(s.n_sequences)

    def normal(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.rng)

    @property
    def count(self) -> int:
        return self.hidden.shape[1]

    @property
    def n_sequences(self) -> int:
        return self.hidden.shape[0]

    def clear(self, n_sequences: int) -> None:
        s = self.shape
        empty = [
            torch.empty(n_sequences, s.n_heads, 0, width, dtype=torch.float64)
            for width in (s.d, s.dv, s.d, s.dv)
        ]
        self.layers = [Layer(*empty) for _ in range(s.n_layers)]
        self.hidden = torch.empty(n_sequences, 0, dtype=torch.bool)
        self.angles = torch.empty(n_sequences, 0)

    def crop(self, count: int) -> None:
        for layer in self.layers:
            layer.k, layer.v, layer.k_size, layer.v_size = (
                t[:, :, :count] for t in (layer.k, layer.v, layer.k_size, layer.v_size)
            )
        self.hidden, self.angles = self.hidden[:, :count], self.angles[:, :count]

    def select(self, sequences: list[int]) -> None:
        for layer in self.layers:
            layer.k, layer.v, layer.k_size, layer.v_size = (
                t[sequences] for t in (layer.k, layer.v, layer.k_size, layer.v_size)
            )
        self.hidden, self.angles = self.hidden[sequences], self.angles[sequences]

    # --- a forward pass ---

    def step(
        self, n: int, hides: torch.Tensor | None = None
    ) -> list[tuple[Step, torch.Tensor, torch.Tensor]]:
        """n new tokens for every layer, as the model would make them: what the cache is given, and
        q and the allowed error's parts.

        `hides` bool [sequences, n]: which of them are padding. The rows are added here; `crop`
        takes them back.
        """
        new = torch.zeros(self.n_sequences, n, dtype=torch.bool) if hides is None else hides
        self.hidden = torch.cat([self.hidden, new], dim=1)
        self.angles = torch.cat(
            [self.angles, 6.28 * torch.rand(self.n_sequences, n, generator=self.rng)], dim=1
        )
        mask = None if not bool(self.hidden.any()) else ~self.hidden
        visibility = Visibility.of(mask, self.n_sequences, self.count)
        return [self._layer_step(number, n, visibility) for number in range(self.shape.n_layers)]

    def _layer_step(
        self, number: int, n: int, visibility: Visibility
    ) -> tuple[Step, torch.Tensor, torch.Tensor]:
        s, layer = self.shape, self.layers[number]
        q = self.normal(self.n_sequences, s.n_heads * s.group, n, s.d).to(s.dtype)
        x, projection = None, None
        if s.hidden:
            x = self.normal(self.n_sequences, n, s.hidden).to(s.dtype)
            projection = self.projection(number)
            past = self.count - n
            made = [projection.rows(x[i], i, past) for i in range(self.n_sequences)]
            k, v = torch.cat([k for k, _ in made]), torch.cat([v for _, v in made])
            k_size, v_size = self._sizes(number, x)
        else:
            k, v = (
                self.normal(self.n_sequences, s.n_heads, n, width).to(s.dtype)
                for width in (s.d, s.dv)
            )
            k_size, v_size = k.double().abs(), v.double().abs()
        for name, rows in (
            ("k", k.double()),
            ("v", v.double()),
            ("k_size", k_size),
            ("v_size", v_size),
        ):
            setattr(layer, name, torch.cat([getattr(layer, name), rows], dim=2))
        step = Step(q, k, v, s.d**-0.5, visibility, x, projection, s.rules)
        return step, *self.answer(number, q)

    def _sizes(self, number: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums of absolute products, [sequences, heads, n, width]; a rotation adds two of K's
        values."""
        weights, found = self.weights[number], []
        for weight, bias in ((weights.k, weights.k_bias), (weights.v, weights.v_bias)):
            size = x.double().abs() @ weight.double().abs().T + (
                0.0 if bias is None else bias.double().abs()
            )
            found.append(size.view(*size.shape[:2], self.shape.n_heads, -1).transpose(1, 2))
        if self.shape.rotates:
            found[0] = found[0] + found[0].roll(self.shape.d // 2, dims=-1)
        return found[0], found[1]

    def projection(self, number: int) -> Projection:
        weights = self.weights[number]

        def finish(k: torch.Tensor, sequence: int, first: int) -> torch.Tensor:
            angle = self.angles[sequence, first : first + k.shape[2]][:, None]
            a, b = k.chunk(2, dim=-1)
            return (k * angle.cos() + torch.cat([-b, a], dim=-1) * angle.sin()).to(k.dtype)

        return Projection(
            weights.k,
            weights.v,
            weights.k_bias,
            weights.v_bias,
            self.shape.n_heads,
            finish if self.shape.rotates else None,
        )

    def answer(self, number: int, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(o, the largest error allowed), float64 [sequences, heads, n, dv], of queries at the last
        n positions.

        fp32 throughout costs `gamma` of the sums that scores and outputs are (docs/tolerances.md).
        A model in another dtype rounds scores' factors, weights and results to it: a few units
        each, which is what `products` counts. Rows made again from X round like the sums of
        absolute products that `k_size` and `v_size` hold.
        """
        s, layer, n = self.shape, self.layers[number], q.shape[2]
        b, heads, past = self.n_sequences, s.n_heads * s.group, self.count - n
        grouped = (q.double() * s.d**-0.5).view(b, s.n_heads, s.group * n, s.d)
        v, v_size = layer.v, layer.v_size
        seen = torch.ones(n, self.count, dtype=torch.bool).tril(past).repeat(s.group, 1)[None, None]
        if bool(self.hidden.any()):
            seen = seen & ~self.hidden[:, None, None, :]
            v, v_size = (
                rows.masked_fill(self.hidden[:, None, :, None], 0.0) for rows in (v, v_size)
            )
        scores, changed = self._changed(grouped @ layer.k.transpose(-1, -2), n)
        scores = scores.masked_fill_(~seen, -math.inf)
        if s.rules.sinks is not None:  # a column that nobody can hide, whose V is zero
            sinks = (
                s.rules.sinks.double()
                .view(s.n_heads, s.group, 1)
                .expand(-1, -1, n)
                .reshape(1, s.n_heads, -1, 1)
            )
            scores = torch.cat([scores, sinks.expand(b, -1, -1, -1)], dim=-1)
        weights = torch.nan_to_num(scores.softmax(dim=-1), nan=0.0)[..., : self.count]
        largest = (grouped.abs() @ layer.k_size.transpose(-1, -2)).mul_(seen).amax(dim=-1)
        roundings, unit = 2 * s.d + s.hidden + self.count + 64, UNITS[s.dtype]
        gamma = roundings * U / (1 - roundings * U)
        relative = torch.expm1(2 * (gamma + 4 * unit) * largest + changed) + 2 * gamma + 4 * unit
        bound = relative[..., None] * (weights @ v_size) + 1e-30
        # nobody looks at what a token that sees nothing gets; it must be finite
        if s.has_bias and s.hidden and not s.rotates:
            bound = bound.masked_fill(~seen.any(dim=-1)[..., None], torch.finfo(torch.float64).max)
        return (weights @ v).view(b, heads, n, s.dv), bound.view(b, heads, n, s.dv)

    def _changed(self, scores: torch.Tensor, n: int) -> tuple[torch.Tensor, float]:
        """Scores [b, KV heads, group * n, positions] after the model's rules, and how far fp32 may
        be off in that: 8 units of a cap; of what slopes add, where that is not so far below the
        rest that it weighs nothing, 4 units of 100; of sinks, a few of their size."""
        s, rules = self.shape, self.shape.rules
        distance = (torch.arange(self.count) - (self.count - n + torch.arange(n))[:, None]).repeat(
            s.group, 1
        )
        off = 0.0
        if rules.soft_cap is not None:
            scores, off = (
                rules.soft_cap * torch.tanh(scores / rules.soft_cap),
                8 * U * rules.soft_cap,
            )
        if rules.slopes is not None:
            slopes = (
                rules.slopes.double()
                .view(s.n_heads, s.group, 1)
                .expand(-1, -1, n)
                .reshape(s.n_heads, -1, 1)
            )
            scores, off = scores + slopes * distance, off + 4 * U * 100
        if rules.window is not None:
            scores = scores.masked_fill(distance <= -rules.window, -math.inf)
        return scores, off if rules.sinks is None else off + 8 * U * (
            1 + float(rules.sinks.abs().max())
        )


def forward(
    cache: SsdCache, steps: list[tuple[Step, torch.Tensor, torch.Tensor]], before: int
) -> list[torch.Tensor]:
    """The pass, layer by layer, as a model runs it. Raises what the cache raises."""
    cache.begin(before)
    found = [cache.attend(number, step) for number, (step, _, _) in enumerate(steps)]
    cache.end()
    return found


def assert_right(
    outputs: list[torch.Tensor],
    steps: list[tuple[Step, torch.Tensor, torch.Tensor]],
    what: Any = "",
) -> None:
    for number, (o, (step, wanted, bound)) in enumerate(zip(outputs, steps, strict=True)):
        assert o.shape == wanted.shape, (
            f"{what} layer {number}: {list(o.shape)}, expected {list(wanted.shape)}"
        )
        assert o.dtype == step.q.dtype
        apart = (o.double() - wanted).abs()
        # NaN is never within a bound.
        assert bool((apart <= bound).all()), (
            f"{what} layer {number}: {float((apart / bound).nan_to_num(nan=1e9).max()):.3g} times "
            "the bound"
        )


def random_shape(
    rng: random.Random, *, dtypes: tuple[torch.dtype, ...] = (torch.float32,), with_x: bool = False
) -> Shape:
    hidden = rng.choice([8, 16, 48, 64]) if with_x else 0
    d = rng.choice([8, 16, 40, 64, 80, 96, 128])
    return Shape(
        n_layers=rng.randint(1, 3),
        n_sequences=rng.randint(1, 4),
        n_heads=rng.randint(1, 3),
        group=rng.randint(1, 3),
        d=d,
        dv=d if rng.random() < 0.7 else rng.choice([8, 48, 128]),
        dtype=rng.choice(dtypes),
        hidden=hidden,
        rotates=rng.random() < 0.5,
        has_bias=rng.random() < 0.5,
    )
