"""What a machine makes of a decoder: tokens a second, what bounds them, energy, price and wear."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...errors import InvalidInputError
from ...sizes import format_size
from .machine import Machine
from .schedule import x_share
from .shape import HALF_BYTES, Shape
from .step import Load, Step, decode, kept_bytes, prefill

BATCH_MAX, TOKENS_MAX = 4096, 1 << 24


@dataclass(frozen=True)
class Stage:
    """A group of parts, over a token of every sequence.

    Attributes:
        name: of the group.
        busy: share of the time in which a part of it serves, their mean.
        busy_s: the same in seconds.
        bound_tokens_per_s: that it would allow if nothing else took time.
    """

    name: str
    busy: float
    busy_s: float
    bound_tokens_per_s: float


@dataclass(frozen=True)
class Answer:
    """Attributes:
    system, workload: by name.
    batch, context, output: sequences, tokens of each before, and tokens of each that are made.
    techniques: of the program.
    x_share: of sequences for which X is kept.
    tokens_per_s: of decoding alone, at the middle of the output.
    step_s, prefill_s: a token of every sequence; the contexts.
    run_tokens_per_s: of contexts and output together.
    bound: the group of parts that has most to do.
    stages: all groups that do something.
    watts, joules_per_token: while it decodes; None: `unknown` says why.
    drives_dollars: drives and their chassis; None: not known.
    tokens_per_s_per_drives_dollar: of decoding; prices of hosts and GPUs are not known.
    written_bytes: to flash, of one sequence.
    sequences_until_worn: of such; None: where no endurance is known (`unknown`), or nothing is
        written.
    residual: of the simulated window.
    unknown: what of it is not known, and why.
    """

    system: str
    workload: str
    batch: int
    context: int
    output: int
    techniques: tuple[str, ...]
    x_share: float
    tokens_per_s: float
    step_s: float
    prefill_s: float
    run_tokens_per_s: float
    bound: str
    stages: tuple[Stage, ...]
    watts: float | None
    joules_per_token: float | None
    drives_dollars: float | None
    tokens_per_s_per_drives_dollar: float | None
    written_bytes: float
    sequences_until_worn: float | None
    residual: float
    unknown: tuple[str, ...]

    def stage(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)


def answer(
    machine: Machine, workload: str, shape: Shape, *, batch: int, context: int, output: int
) -> Answer:
    """Raises InvalidInputError: no such batch or number of tokens; a workload that does not fit, by
    how many bytes."""
    for name, value, most in (
        ("a batch", batch, BATCH_MAX),
        ("a context", context, TOKENS_MAX),
        ("tokens that are made", output, TOKENS_MAX),
    ):
        if not 1 <= value <= most:
            raise InvalidInputError(name, got=value, expected=f"1 to {most}")
    share = x_share(machine, shape, batch, float(context))
    before = Load(shape, batch, float(context), share)
    check_fits(machine, workload, replace(before, context=float(context + output)))
    middle = replace(before, context=context + output / 2)
    step, first = decode(machine, middle), prefill(machine, before)
    unknown: list[str] = []
    watts = power_w(machine, shape, step, unknown)
    unknown += unknown_of_drives(machine)
    written = written_bytes(machine, shape, share, context, output)
    endurance, dollars = machine.get("device.endurance"), drives_dollars(machine)
    return Answer(
        machine.system.name,
        workload,
        batch,
        context,
        output,
        machine.techniques,
        share,
        batch / step.step_s,
        step.step_s,
        first.step_s,
        batch * output / (first.step_s + output * step.step_s),
        step.bound,
        tuple(
            Stage(name, busy_s / step.step_s, busy_s, batch / busy_s)
            for name, busy_s in step.busy_s.items()
        ),
        watts,
        None if watts is None else watts * step.step_s / batch,
        dollars,
        None if dollars is None else batch / step.step_s / dollars,
        written,
        endurance * machine.n_drives / written if endurance and written else None,
        step.residual,
        tuple(unknown),
    )


def missing_bytes(machine: Machine, load: Load) -> dict[str, float]:
    """What keeps a load, and by how much it is too large; nothing where it fits."""
    shape = load.shape
    weights = shape.parameters * HALF_BYTES
    need = {"memory": machine.get("program.working_memory") or 0.0, "drives": 0.0}
    need["drives" if machine.keeps_on_drives(shape.parameters) else "memory"] += weights
    need[machine.system.kv] += kept_bytes(load)
    layers = [shape.layer(number, load.batch) for number in range(shape.expert_every)]
    need["gpu"] = 2 * max(layer.weight_bytes for layer in layers)
    capacity = machine.get("device.capacity")
    has = {"memory": machine.need("host.memory"), "gpu": machine.need("gpu.memory")}
    if capacity is not None:
        has["drives"] = capacity * machine.n_drives
    return {name: need[name] - has[name] for name in has if need[name] > has[name]}


def check_fits(machine: Machine, workload: str, load: Load) -> None:
    """Raises InvalidInputError for a load that does not."""
    for where, size_bytes in missing_bytes(machine, load).items():
        raise InvalidInputError(
            f"{workload}, {load.batch} sequences of {load.context:,.0f} tokens, "
            f"does not fit the {where} of {machine.system.name}",
            got=f"{format_size(int(size_bytes))} too much",
            expected="all of it",
            fix="a smaller batch, a shorter context, or a larger system",
        )


def power_w(machine: Machine, shape: Shape, step: Step, unknown: list[str]) -> float | None:
    """The power of all parts while it decodes; appends to `unknown` whose is not known."""
    total_w = 0.0
    for kind, part in (("gpu", "gpu"), ("host", "cpu")):
        idle_w, busy_w = machine.get(f"{kind}.power.idle"), machine.get(f"{kind}.power.busy")
        if idle_w is None or busy_w is None:
            unknown.append(f"power of {getattr(machine, kind).name}")
            continue
        total_w += idle_w + (busy_w - idle_w) * min(1.0, step.busy_s.get(part, 0.0) / step.step_s)
    drive_w = machine.get("system.drives.power") or machine.get("device.power.device")
    if drive_w is None:
        unknown.append(f"power of {machine.device.name}")
    else:
        total_w += drive_w * machine.n_drives
    if machine.is_near_storage:
        powers = machine.device.power.accelerator
        kernel = min((heads for heads in powers if heads >= shape.group), default=None)
        if kernel is None:
            unknown.append(f"power of {machine.device.name}'s accelerator")
        else:
            total_w += powers[kernel].value * machine.n_drives
    return None if unknown else total_w


def unknown_of_drives(machine: Machine) -> list[str]:
    """What is not known of wear and room; nothing where drives keep no rows."""
    if machine.system.kv != "drives":
        return []
    named = machine.device.name
    return [
        words
        for figure, words in (
            ("endurance", f"endurance of {named}"),
            ("capacity", f"capacity of {named}, so whether it fits the drives"),
        )
        if machine.get(f"device.{figure}") is None
    ]


def drives_dollars(machine: Machine) -> float | None:
    each = machine.get("device.price.device")
    if each is None:
        return None
    return each * machine.n_drives + (machine.get("system.drives.chassis") or 0.0)


def written_bytes(machine: Machine, shape: Shape, share: float, context: int, output: int) -> float:
    """Bytes that go to flash for one sequence, pages that hold less than they could whole."""
    if machine.system.kv != "drives":
        return 0.0
    per_token = 2.0 * shape.row_bytes * (1 - share)
    page = machine.get("device.flash.page")
    alone = machine.is_near_storage and "writeback" not in machine.techniques
    amplified = 1.0
    if alone and page is not None:
        amplified = max(1.0, page / (shape.head_dim * HALF_BYTES))
    made = per_token * amplified + shape.x_bytes * share
    return shape.layers * (context * (per_token + shape.x_bytes * share) + output * made)
