"""A token's way through a decoder: which work of a layer waits for which, walked in the order of
events. The first layers and the last are let pass, those between are accounted, and what they
take is scaled to all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..queues import Outcome, walk
from ..system import System
from .machine import Machine
from .parts import DELAYS, decoder_system, flash_bytes_per_s
from .shape import HALF_BYTES, Layer, Shape

#: What passes several parts goes in so many pieces, so that parts overlap.
PIECES = 16
#: Periods (layers, or layers with and without experts) before those that are accounted, those, and
#: those after them, whose weights are on their way meanwhile.
BEFORE, ACCOUNTED, BEHIND = 2, 2, 1


@dataclass(frozen=True)
class Load:
    """Attributes:
    shape: of the model.
    batch: sequences.
    context: tokens of each that are attended to.
    x_share: of the sequences, for which X is kept in place of K and V.
    """

    shape: Shape
    batch: int
    context: float
    x_share: float = 0.0


@dataclass
class Work:
    """Commands as they are put together: ways, and whom each waits for.

    Attributes:
        system: that they pass.
        seconds: of each group of parts, all commands together.
    """

    system: System
    routes: list[Sequence[object]] = field(default_factory=list)
    numbers: dict[object, int] = field(default_factory=dict)
    route: list[int] = field(default_factory=list)
    after: list[tuple[int, ...]] = field(default_factory=list)

    def add(
        self,
        verb: str,
        sizes: Mapping[str, float],
        after: Sequence[int] = (),
        members: Mapping[str, int] | None = None,
        pieces: int = 1,
        under_way: int | None = None,
    ) -> list[int]:
        """Commands of one verb, `pieces` of the same size, so many of which are under way at a time
        (None: all); the last ones."""
        members = members or {}
        key = (verb, tuple(sizes.values()), tuple(members.values()), pieces)
        if key not in self.numbers:
            self.numbers[key] = len(self.routes)
            part = {name: size / pieces for name, size in sizes.items()}
            self.routes.append(self.system.route(verb, part, members))
        first = len(self.route)
        self.route += [self.numbers[key]] * pieces
        started = min(under_way or pieces, pieces)
        self.after += [tuple(after)] * started
        self.after += [(first + piece,) for piece in range(pieces - started)]
        return list(range(first + pieces - started, first + pieces))

    def walked(self) -> Outcome:
        n = len(self.route)
        return walk(
            self.system.parts(),
            self.routes,  # type: ignore[arg-type]
            np.array(self.route),
            np.arange(n),
            after=self.after,
        )


@dataclass(frozen=True)
class Step:
    """A token of every sequence of a batch.

    Attributes:
        step_s: of it.
        busy_s: of each group of parts that does something, a part of it, in service for it.
        residual: the later half of what was accounted over the earlier, less 1.
    """

    step_s: float
    busy_s: Mapping[str, float]
    residual: float

    @property
    def bound(self) -> str:
        """The group of parts that has most to do."""
        return max(self.busy_s, key=lambda name: self.busy_s[name])


def decode(machine: Machine, load: Load) -> Step:
    """One token of every sequence."""
    return _walked(machine, load, _Layers.add_layer)


def prefill(machine: Machine, load: Load) -> Step:
    """All tokens of the context of every sequence, up to the first one that is made."""
    return _walked(machine, load, _Layers.add_prefill_layer)


def _walked(machine: Machine, load: Load, add: Callable[[_Layers, int], list[int]]) -> Step:
    shape = load.shape
    whole, rest = divmod(shape.layers, shape.expert_every)
    periods = BEFORE + ACCOUNTED + BEHIND
    at_s, served_s = _passed(machine, load, add, periods * shape.expert_every)
    marks_s = [at_s[n * shape.expert_every - 1] for n in range(BEFORE, periods - BEHIND + 1)]
    taken_s = np.diff(marks_s)
    step_s = float(sum(taken_s)) * (whole / ACCOUNTED)
    busy_s = {name: each * (whole / periods) for name, each in served_s.items()}
    if rest:
        # behind the last period: as many layers as begin one
        begun_s = [
            at_s[n * shape.expert_every + rest - 1] - at_s[n * shape.expert_every - 1]
            for n in range(BEFORE, periods - BEHIND)
        ]
        step_s += float(np.mean(begun_s))
        _, more_s = _passed(machine, load, add, periods * shape.expert_every + rest)
        for name, each in more_s.items():
            busy_s[name] = busy_s.get(name, 0.0) + each - served_s.get(name, 0.0)
    half = ACCOUNTED // 2
    residual = float(sum(taken_s[half:]) / sum(taken_s[:half]) - 1)
    return Step(step_s, busy_s, residual)


def _passed(
    machine: Machine, load: Load, add: Callable[[_Layers, int], list[int]], n_layers: int
) -> tuple[list[float], dict[str, float]]:
    """When each of so many layers has ended, and how long a part of each group that does something
    has served all of them."""
    work = Work(decoder_system(machine, load.shape.group))
    layers = (_NearStorage if machine.is_near_storage else _OnTheCpu)(machine, load, work)
    ends = [add(layers, number) for number in range(n_layers)]
    done = work.walked()
    names = np.array(work.system.names())
    served_s = {}
    for name in dict.fromkeys(work.system.names()):
        served = [done.accounts[i].served_s for i in np.flatnonzero(names == name)]
        if name not in DELAYS and any(served):
            served_s[name] = float(np.mean(served))
    return [max(float(done.ended_s[each]) for each in end) for end in ends], served_s


class _Layers:
    """What is alike in all programs: weights ahead of their layer, products on the GPU.

    Attributes:
        under_way: pieces of a stream from a drive; None: all, in one queue of all streams.
    """

    under_way: int | None = None

    def __init__(self, machine: Machine, load: Load, work: Work) -> None:
        self.machine, self.load, self.shape, self.work = machine, load, load.shape, work
        self.on_drives = machine.keeps_on_drives(self.shape.parameters)
        self.flops_per_s = machine.need("gpu.peak") * machine.need("gpu.gemm_share")
        self.weights: list[list[int]] = []
        self.ends: list[list[int]] = []
        self.written: list[list[int]] = []

    def add_layer(self, number: int) -> list[int]:
        """Its last commands."""
        layer = self.shape.layer(number, self.load.batch)
        before = self.ends[-1] if self.ends else []
        self.weights.append(self._load_weights(layer))
        ready = self._product(layer.qkv_bytes, layer.qkv_flops, [*before, *self.weights[-1]])
        attended = self._attend(number, before, ready)
        end = self._product(layer.rest_bytes, layer.rest_flops, attended)
        self.ends.append(end)
        return end

    def add_prefill_layer(self, number: int) -> list[int]:
        """Its last commands. What is kept of a layer is written while the next is computed."""
        shape, load, layer = self.shape, self.load, self.shape.layer(number, None)
        before = self.ends[-1] if self.ends else []
        written = self.written[-2] if len(self.written) > 1 else []
        self.weights.append(self._load_weights(layer))
        tokens = load.context * load.batch
        # a token attends to those before it: half of them in the mean
        attention = shape.attention_flops * tokens * load.context / 2
        flops = (layer.qkv_flops + layer.rest_flops) * tokens + attention
        end = self.work.add(
            "product", {"seconds": flops / self.flops_per_s}, [*before, *written, *self.weights[-1]]
        )
        size_bytes = kept_bytes(load) / shape.layers
        if self.machine.system.kv == "drives":
            self.written.append(self.write(size_bytes, end, PIECES))
        else:
            self.written.append(self.work.add("keep in memory", {"bytes": size_bytes}, end))
        self.ends.append(end)
        return end

    def _attend(self, number: int, before: list[int], ready: list[int]) -> list[int]:
        raise NotImplementedError

    def _load_weights(self, layer: Layer) -> list[int]:
        """While the layer before is at work: two layers' weights are on the GPU."""
        after: list[int] = [*self.ends[-2]] if len(self.ends) > 1 else []
        after += self.weights[-1] if self.weights else []
        if self.machine.without == "weights":
            return []
        if not self.on_drives:
            sizes = {"bytes": layer.weight_bytes}
            return self.work.add("weights from memory", sizes, after, pieces=PIECES, under_way=4)
        return self.from_drives("weights from drives", layer.weight_bytes, after)

    def from_drives(
        self, verb: str, size_bytes: float, after: Sequence[int], **amounts: float
    ) -> list[int]:
        """What lies on all drives alike. `amounts`: of everything together, beside its bytes."""
        n, found = self.machine.n_drives, []
        for drive in range(n):
            sizes = {"bytes": size_bytes / n} | {name: each / n for name, each in amounts.items()}
            found += self.work.add(verb, sizes, after, self.members(drive), PIECES, self.under_way)
        return found

    def members(self, drive: int) -> dict[str, int]:
        per_port = self.machine.device.links.devices_per_port
        port = drive // int(per_port.value) if per_port is not None else 0
        own = dict.fromkeys(("flash", "drive memory", "accelerator", "link out", "link in"), drive)
        return own | {"port out": port, "port in": port}

    def _product(self, weight_bytes: float, token_flops: float, after: list[int]) -> list[int]:
        """The work of a batch's tokens with weights that are on the GPU."""
        seconds = max(
            token_flops * self.load.batch / self.flops_per_s,
            weight_bytes / self.machine.need("gpu.memory_bandwidth"),
        )
        return self.work.add("product", {"seconds": seconds}, after)

    def write(self, size_bytes: float, after: Sequence[int], pieces: int = 1) -> list[int]:
        """Writes from the GPU to all drives alike."""
        n, found = self.machine.n_drives, list[int]()
        slower = flash_bytes_per_s(self.machine) / write_bytes_per_s(self.machine)
        piece_bytes = size_bytes / n / pieces
        sizes = {"bytes": piece_bytes, "flash time": piece_bytes * slower}
        # drives take their pieces in turn: one is written while the next one's are on their way
        for _ in range(pieces):
            for drive in range(n):
                found += self.work.add("write", sizes, after, self.members(drive))
        return found


def kept_bytes(load: Load) -> float:
    """Bytes of a batch's contexts, in all layers: K and V, or X."""
    shape = load.shape
    token = 2 * shape.row_bytes * (1 - load.x_share) + shape.x_bytes * load.x_share
    return token * shape.layers * load.context * load.batch


def write_bytes_per_s(machine: Machine) -> float:
    """The rate at which one drive is written; as it is read where nobody says."""
    found = machine.get("device.flash.write_bandwidth")
    return flash_bytes_per_s(machine) if found is None else found


class _OnTheCpu(_Layers):
    """FlexGen: K and V of a layer come to memory if they are not there, then the CPU attends, and
    neither goes on while the other does. Its copy threads share one queue."""

    def _attend(self, number: int, before: list[int], ready: list[int]) -> list[int]:
        load, shape, machine = self.load, self.shape, self.machine
        rows_bytes = 2.0 * shape.row_bytes * load.context * load.batch
        heads = 1 if machine.without == "repeated heads" else shape.group
        loaded: list[int] = []
        if machine.system.kv == "drives":
            early = self.ends[-2] if len(self.ends) > 1 else []
            after = early if machine.without == "in turn" else before
            loaded = self.from_drives("rows to memory", rows_bytes, after)
        attended = self.work.add(
            "attend on the cpu", {"bytes": rows_bytes * heads}, [*ready, *loaded]
        )
        if machine.system.kv == "drives":
            self.write(2.0 * shape.row_bytes * load.batch, attended)
        return self.work.add(
            "weights from memory",
            {"bytes": shape.heads * shape.head_dim * HALF_BYTES * load.batch},
            attended,
        )


class _NearStorage(_Layers):
    """HILOS: drives attend over their own rows, the GPU over what it makes of X. Streams go on at
    once and share what they meet on."""

    under_way = 4

    def _attend(self, number: int, before: list[int], ready: list[int]) -> list[int]:
        load, shape, machine = self.load, self.shape, self.machine
        kv_batch, x_batch = load.batch * (1 - load.x_share), load.batch * load.x_share
        query_bytes = shape.heads * shape.head_dim * HALF_BYTES
        if "writeback" in machine.techniques:
            waiting = machine.need("program.spill_tokens") / 2
            scores_bytes = shape.heads * waiting * HALF_BYTES
            to_drives = query_bytes + shape.row_bytes * waiting + scores_bytes
            written = ready
            self.write(2.0 * shape.row_bytes * kv_batch + shape.x_bytes * x_batch, ready)
        else:
            to_drives = query_bytes
            rows = 2.0 * shape.kv_heads * kv_batch + x_batch
            written = self.work.add("lone rows", {"rows": rows}, ready)
        found: list[int] = []
        if load.x_share > 0:
            found += self._regenerated(x_batch, written)
        if load.x_share < 1:
            found += self._near(kv_batch, to_drives * kv_batch, query_bytes * kv_batch, written)
        return found

    def _near(
        self, batch: float, to_drives: float, from_drives: float, after: list[int]
    ) -> list[int]:
        shape, n, found = self.shape, self.machine.n_drives, list[int]()
        tokens = batch * self.load.context / n
        rows_bytes, flops = 2.0 * shape.row_bytes * tokens, shape.attention_flops * tokens
        sizes = {"bytes": rows_bytes, "twice": 2 * rows_bytes, "flops": flops}
        for drive in range(n):
            members = self.members(drive)
            called = self.work.add("hand over", {"bytes": to_drives / n}, after, members)
            done = self.work.add("attend", sizes, called, members, PIECES, self.under_way)
            found += self.work.add("collect", {"bytes": from_drives / n}, done, members)
        return found

    def _regenerated(self, batch: float, after: list[int]) -> list[int]:
        shape, tokens = self.shape, batch * self.load.context
        made_bytes = 2.0 * shape.row_bytes * tokens
        seconds = 0.0
        if self.machine.without != "regeneration":
            # K and V are written to the GPU's memory and read again to be attended to
            seconds = shape.regeneration_flops * tokens / self.flops_per_s
            seconds += 2 * made_bytes / self.machine.need("gpu.memory_bandwidth")
        return self.from_drives("regenerate", shape.x_bytes * tokens, after, seconds=seconds)
