"""What HILOS was measured at, predicted: ratios of its machines, each with a range."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ..figures import Range, draw, middles
from ..predictions import DRAWS, RAISED, SEED, Prediction, check_draws, predictions
from ..specs.kinds import ModelSpec
from ..specs.load import load
from .answer import missing_bytes, power_w, written_bytes
from .machine import MECHANISMS, Machine, Specs, load_system
from .schedule import x_share
from .shape import Shape
from .step import Load, Step, decode, prefill

#: HILOS table 2, and its contexts, batch and output (section 6.1).
MODELS = ("opt-30b", "opt-66b", "opt-175b", "qwen2.5-32b", "mixtral-8x7b", "glam-143b")
SHARED = ("qwen2.5-32b", "mixtral-8x7b", "glam-143b")
CONTEXTS = (16384, 32768, 65536, 131072)
BATCH, OUTPUT = 16, 64
#: The longest that is asked for where the output is what changes.
LONG_OUTPUT = 1024
SYSTEMS = (
    "smartssd-16", "smartssd-8", "smartssd-4", "flexgen-4ssd", "flexgen-16ssd", "flexgen-dram"
)  # fmt: skip
NEAR, BASE, MEMORY = "smartssd-16", "flexgen-4ssd", "flexgen-dram"
#: Figures that are known within bounds only, and are raised one after another: of which specs.
_RAISED_OF = ("hilos", "flexgen", "a100-40gb")

_SPEEDUP = (
    "drives read K and V beside their accelerators at once; FlexGen copies all of them to memory, "
    "and then attends on the CPU"
)
#: By the beginning of the id, the first that fits.
WORDS: Mapping[str, tuple[str, str]] = {
    "hilos.ans_only": (_SPEEDUP, "techniques: none"),
    "hilos.wb_over_ans": (
        "rows of 256 bytes that are written one by one before a layer attends, or not",
        "writeback over no technique",
    ),
    "hilos.xcache_over_ans": (
        "half the bytes from flash, and K and V made again on the GPU meanwhile",
        "x-cache over no technique, its share the best power of two",
    ),
    "hilos.all_over_flex_ssd_where": (_SPEEDUP, "where 512 GiB do not hold K and V of the batch"),
    "hilos.all_over": (_SPEEDUP, "both techniques"),
    "hilos.4dev": (
        "four drives, all of whose rows are X, beside the CPU's attention over memory",
        "smartssd-4 over flexgen-dram, where memory holds the batch",
    ),
    "hilos.16dev": (_SPEEDUP, "smartssd-16 over flexgen-dram, where memory holds the batch"),
    "hilos.16ssd_no_fpga_over_flex_ssd_min": (
        "none: copy threads and CPU, the limit of both, are the same: 1 but for the first pieces",
        "flexgen-16ssd over flexgen-4ssd",
    ),
    "hilos.16ssd": (
        "FlexGen's copy threads are the limit with four drives and with 16",
        "flexgen-16ssd over flexgen-4ssd",
    ),
    "hilos.gqa_moe": (
        "shared K and V are read once near storage, and once for each query head on the CPU",
        "over flexgen-4ssd, and flexgen-dram where memory holds the batch; three models",
    ),
    "hilos.long_output": (
        _SPEEDUP,
        f"contexts and {LONG_OUTPUT} tokens together, over flexgen-4ssd",
    ),
    "hilos.endurance_gain_min": (
        "none: where X is larger than K and V none is kept, and both write the same bytes",
        "bytes to flash of a sequence with FlexGen over those with both techniques",
    ),
    "hilos.endurance": (
        "X is half of K and V; no row is written alone",
        "bytes to flash of a sequence with FlexGen over those with both techniques",
    ),
    "hilos.energy": (
        "power of host, GPU and drives for the time of a token",
        "1 less smartssd-16 over flexgen-4ssd",
    ),
}


@functools.cache
def specs(system: str) -> Specs:
    return load_system(system)


@functools.cache
def shape(model: str) -> Shape:
    return Shape.of(load(ModelSpec, model))


def all_ranges() -> dict[str, Range]:
    """The ranges of all systems; what several are made of is there once."""
    found: dict[str, Range] = {}
    for system in SYSTEMS:
        found |= specs(system).ranges
    return found


@dataclass
class Case:
    """Everything that one set of values says, each computed when it is asked for.

    Attributes:
        values: of figures.
        without: of `MECHANISMS`.
        models: that are asked for.
        walked: steps by all that they depend on; cases may share them.
    """

    values: Mapping[str, float]
    without: str | None = None
    models: tuple[str, ...] = MODELS
    walked: dict[object, Step] = field(default_factory=dict)

    def machine(self, system: str, techniques: tuple[str, ...] | None = None) -> Machine:
        return specs(system).machine(self.values, techniques=techniques, without=self.without)

    def step(
        self, system: str, model: str, context: int, techniques: tuple[str, ...] | None = None
    ) -> Step | None:
        """None: it does not fit."""
        machine, known = self.machine(system, techniques), shape(model)
        share = x_share(machine, known, BATCH, context)
        if missing_bytes(machine, Load(known, BATCH, float(context + OUTPUT), share)):
            return None
        return self.walk(decode, machine, Load(known, BATCH, context + OUTPUT / 2, share))

    def walk(self, kind: Callable[[Machine, Load], Step], machine: Machine, load_: Load) -> Step:
        values = tuple(
            self.values[name]
            for name in specs(machine.system.name).ranges
            if ".power" not in name and ".price" not in name
        )
        key = (kind, machine.system.name, machine.techniques, machine.without, values, load_)
        if key not in self.walked:
            self.walked[key] = kind(machine, load_)
        return self.walked[key]

    def ratios(
        self,
        ours: str,
        others: str,
        techniques: tuple[str, ...] | None = None,
        other_techniques: tuple[str, ...] | None = None,
        where: Callable[[str, int], bool] = lambda model, context: True,
        models: Iterable[str] | None = None,
    ) -> list[float]:
        """Ratios of throughput, over models and contexts; those alone that fit both."""
        found = []
        for model in self.models if models is None else models:
            for context in CONTEXTS:
                if not where(model, context):
                    continue
                one = self.step(ours, model, context, techniques)
                other = self.step(others, model, context, other_techniques)
                if one is not None and other is not None:
                    found.append(other.step_s / one.step_s)
        return found

    def fails_in_memory(self, model: str, context: int) -> bool:
        machine = self.machine(MEMORY)
        return bool(missing_bytes(machine, Load(shape(model), BATCH, float(context + OUTPUT))))

    def values_of_ids(self) -> dict[str, float]:
        """The prediction of each id, in the order in which they are listed."""
        none: tuple[str, ...] = ()
        plain = self.ratios(NEAR, BASE, none)
        both = self.ratios(NEAR, BASE)
        failing = self.ratios(NEAR, BASE, where=self.fails_in_memory)
        few, many = self.ratios("smartssd-4", MEMORY), self.ratios(NEAR, MEMORY)
        no_fpga = self.ratios("flexgen-16ssd", BASE)
        shared = [model for model in self.models if model in SHARED]
        sharing = self.ratios(NEAR, BASE, models=shared) + self.ratios(NEAR, MEMORY, models=shared)
        endurance = self.endurance()
        return {
            "hilos.ans_only_over_flex_ssd_max": max(plain),
            "hilos.wb_over_ans_max": max(self.ratios(NEAR, NEAR, ("writeback",), none)),
            "hilos.xcache_over_ans_max": max(self.ratios(NEAR, NEAR, ("x-cache",), none)),
            "hilos.all_over_flex_ssd_max": max(both),
            "hilos.all_over_flex_ssd_where_dram_fails_min": min(failing),
            "hilos.all_over_flex_ssd_where_dram_fails_max": max(failing),
            "hilos.4dev_over_flex_dram_min": min(few),
            "hilos.4dev_over_flex_dram_max": max(few),
            "hilos.16dev_over_flex_dram_min": min(many),
            "hilos.16dev_over_flex_dram_max": max(many),
            "hilos.16ssd_no_fpga_over_flex_ssd_min": min(no_fpga),
            "hilos.16ssd_no_fpga_over_flex_ssd_max": max(no_fpga),
            **(
                {
                    "hilos.gqa_moe_over_baselines_min": min(sharing),
                    "hilos.gqa_moe_over_baselines_max": max(sharing),
                }
                if sharing
                else {}
            ),
            "hilos.long_output_speedup_max": max(self.long_outputs()),
            "hilos.endurance_gain_min": min(endurance),
            "hilos.endurance_gain_max": max(endurance),
            "hilos.energy_saving_max": max(self.energy_savings()),
        }

    def long_outputs(self) -> list[float]:
        return [
            self._run_s(BASE, model, context) / self._run_s(NEAR, model, context)
            for model in self.models
            for context in CONTEXTS
        ]

    def _run_s(self, system: str, model: str, context: int) -> float:
        """Seconds of contexts and a long output."""
        machine, known = self.machine(system), shape(model)
        share = x_share(machine, known, BATCH, context)
        first = self.walk(prefill, machine, Load(known, BATCH, float(context), share))
        middle = Load(known, BATCH, context + LONG_OUTPUT / 2, share)
        return first.step_s + LONG_OUTPUT * self.walk(decode, machine, middle).step_s

    def endurance(self) -> list[float]:
        found = []
        for model in self.models:
            for context in CONTEXTS:
                near, base = (
                    written_bytes(
                        machine,
                        shape(model),
                        x_share(machine, shape(model), BATCH, context),
                        context,
                        OUTPUT,
                    )
                    for machine in (self.machine(NEAR), self.machine("flexgen-16ssd"))
                )
                found.append(base / near)
        return found

    def energy_savings(self) -> list[float]:
        found = []
        for model in self.models:
            for context in CONTEXTS:
                joules = []
                for system in (NEAR, BASE):
                    step = self.step(system, model, context)
                    if step is not None:
                        watts = power_w(self.machine(system), shape(model), step, [])
                        joules += [] if watts is None else [watts * step.step_s]
                if len(joules) == 2:
                    found.append(1 - joules[0] / joules[1])
        return found


def validate(n_draws: int = DRAWS) -> tuple[Prediction, ...]:
    """All ids of HILOS.

    Raises:
        InvalidInputError: too few draws for a range.
        StateError: a value outside its own range.
    """
    check_draws(n_draws)
    known = all_ranges()
    values = middles(known)
    rng = np.random.default_rng(SEED)
    drawn = [Case(draw(known, rng)).values_of_ids() for _ in range(n_draws)]
    middle = Case(values)
    value = middle.values_of_ids()
    apart = replace(middle, models=MODELS[:3]).values_of_ids()
    moved = {"opt models alone": value | apart}
    for each in MECHANISMS:
        moved[f"without {each}"] = replace(middle, without=each).values_of_ids()
    for name, figure in known.items():
        if figure.low < figure.high and name.split(".")[0] in _RAISED_OF:
            raised = {**values, name: values[name] * RAISED}
            moved[f"{name} 10 % up"] = replace(middle, values=raised).values_of_ids()
    return predictions(value, drawn, moved, _words)


def orders() -> list[dict[str, object]]:
    """The systems that each model and context fits, the fastest first."""
    case = Case(middles(all_ranges()))
    found: list[dict[str, object]] = []
    for model in MODELS:
        for context in CONTEXTS:
            steps = {system: case.step(system, model, context) for system in SYSTEMS}
            rates = {name: BATCH / step.step_s for name, step in steps.items() if step is not None}
            order = sorted(rates, key=lambda name: -rates[name])
            found.append(
                {
                    "model": model,
                    "context": context,
                    "tokens_per_s": {name: rates[name] for name in order},
                }
            )
    return found


def _words(name: str) -> tuple[str, str]:
    return next(words for start, words in WORDS.items() if name.startswith(start))
