"""The options of ``espnx bench kv``, read and checked."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espnx.errors import InvalidInputError, MissingDependencyError
from espnx.sizes import parse_size

from ..harness.arguments import choices, positive, words
from ..harness.registry import Say
from ..harness.traces import SUFFIX, trace_folder
from ..machine.throttle import parse_rate
from .fleet import Limit, Spec
from .measure import Plan
from .names import ALONE, BASELINES, SHOWS
from .systems import smollm2
from .systems.models import KVShape, Task, has_random_weights, read_config

QUICK_BATCH, QUICK_CONTEXT, QUICK_SPILL = 2, 512, (1, 16)
DEFAULT_BASELINES = "dynamic,memmap,fio"
FLEXGEN_FIX = "pip install --no-deps flexgen==0.1.8; pip install pulp attrs tqdm"
_WARM_UP = 2


@dataclass(frozen=True)
class Options:
    """See the case's help."""

    path: Path
    shows: list[str]
    name: str
    config: Mapping[str, Any]
    batch: int
    context: int
    new: int | None
    steps: int
    pairs: int
    dtype: str
    formats: list[str]
    x_rows: list[int | None]
    spill: list[int]
    cache: Mapping[str, Any]
    draft_read_ahead: int | None
    baselines: list[Spec]
    with_fio: bool
    limit: Limit
    throttle: int | None
    seed: int
    quick: bool
    record: Path | None = None

    def plan(self, *, new: int | None = None, turns: int | None = None) -> Plan:
        """`new`, `turns`: of a show that needs others than the options say."""
        tokens = new if self.new is None else self.new
        steps, runs = self.steps, self.pairs
        if tokens is not None and turns is not None:
            steps, runs = max(1, tokens // turns), min(turns, tokens)
        elif tokens is not None:
            runs = max(1, tokens // steps)
        warm_up = 1 if self.quick else _WARM_UP
        return Plan(
            runs, steps, warm_up, self.path, self.limit, self.throttle, self.seed, self.with_fio
        )

    def task(self, plan: Plan, *, batch: int | None = None, context: int | None = None) -> Task:
        where = (batch or self.batch, self.context if context is None else context)
        return Task(
            self.name,
            self.config,
            *where,
            plan.all_steps,
            self.dtype,
            self.seed,
            any(rows != 0 for rows in self.x_rows),
        )

    def ours(self, **more: Any) -> list[Spec]:
        """Systems of espnx, one for each format and number of X rows, and a recorded one of each
        where traces are asked for. `more`: options of the cache."""
        found = []
        for name, rows in itertools.product(self.formats, self.x_rows):
            own = {} if name == "same" else {"format": name}
            suffix = ("" if name == "same" else f"-{name}") + (
                "" if rows == 0 else "-auto" if rows is None else f"-x{rows}"
            )
            options, lossy = (
                {**self.cache, **own, "x_rows": rows, **more},
                None if name == "same" else name,
            )
            found.append(Spec(f"espnx{suffix}", "espnx", options, lossy))
            if self.record is not None:
                twin = f"espnx{suffix}{SUFFIX}"
                found.append(
                    Spec(
                        twin,
                        "espnx",
                        options | {"record": str(self.record / f"{twin}.trace")},
                        lossy,
                    )
                )
        return found

    def params(self, show: str, task: Task) -> dict[str, Any]:
        """Parameters of a row."""
        return {
            "show": show,
            "model": task.name,
            "batch": task.batch,
            "context": task.context,
            "dtype": task.dtype,
            "memory": self.limit.words(),
            "throttle_bytes_per_s": self.throttle,
            "prefill": "seeded X, projected" if task.of_x else "seeded rows",
            "weights": "random" if has_random_weights(task) else "its own",
        }


def read_options(args: Namespace, say: Say) -> Options:
    """Raises InvalidInputError, MissingDependencyError (FlexGen or fio was asked for),
    PathUnavailableError."""
    path = Path(args.path)
    quick, name_config, shows = (
        args.quick,
        read_config(args.model),
        choices(args.show, SHOWS, "--show"),
    )
    if name_config[1] == smollm2.CONFIG:
        smollm2.require()
    baselines = (
        choices(args.baseline or DEFAULT_BASELINES, BASELINES, "baseline")
        if set(shows) - set(ALONE)
        else []
    )
    cache = _cache_options(args)
    options = Options(
        path=path.resolve(),
        shows=shows,
        name=name_config[0],
        config=name_config[1],
        batch=positive("batch", min(args.batch, QUICK_BATCH) if quick else args.batch),
        context=positive("context", min(args.context, QUICK_CONTEXT) if quick else args.context),
        new=None if args.new is None else positive("new", args.new),
        steps=positive("steps", args.steps),
        pairs=positive("pairs", args.pairs),
        dtype=args.dtype,
        formats=choices(args.format, ("same", "int8"), "format"),
        x_rows=[
            _x_rows(word, min(args.batch, QUICK_BATCH) if quick else args.batch)
            for word in words(args.x_rows)
        ],
        spill=list(QUICK_SPILL)
        if quick
        else [positive("spill interval", word) for word in words(args.spill)],
        cache=cache,
        draft_read_ahead=parse_size(args.draft_read_ahead) if args.draft_read_ahead else None,
        baselines=[],
        with_fio="fio" in baselines,
        limit=_limit(args.memory, say),
        throttle=parse_rate(args.throttle) if args.throttle else None,
        seed=args.seed,
        quick=quick,
        record=trace_folder(args.record),
    )
    specs = [
        Spec(name, name, {**cache, "x_rows": 0} if name == "host" else {})
        for name in baselines
        if name != "fio"
    ]
    specs = [
        spec
        for spec in specs
        if spec.kind != "flexgen-disk"
        or _flexgen_fits(options, is_asked=args.baseline is not None, say=say)
    ]
    if options.with_fio:
        from ..io.fio import require_fio

        require_fio()
    # a configuration that transformers refuses is told now
    KVShape.of(options.task(options.plan()).hf_config())
    return dataclasses.replace(options, baselines=specs)


def _cache_options(args: Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"engine": args.engine}
    if args.read_ahead:
        found["read_ahead_bytes"] = parse_size(args.read_ahead)
    if args.threads:
        found["threads"] = positive("threads", args.threads)
    return found


def _x_rows(word: str, batch: int) -> int | None:
    """None: the cache decides."""
    if word == "auto":
        return None
    if not word.isdigit() or int(word) > batch:
        raise InvalidInputError(
            "x-rows", got=repr(word), expected=f"auto, or 0 to {batch}, the number of sequences"
        )
    return int(word)


def _limit(text: str, say: Say) -> Limit:
    return (
        Limit.possible(text, 0, say)
        if text in ("auto", "ample")
        else Limit.possible("bytes", parse_size(text), say)
    )


def _flexgen_fits(options: Options, *, is_asked: bool, say: Say) -> bool:
    """FlexGen knows OPT in half precision alone. Raises MissingDependencyError."""
    if options.config.get("model_type") != "opt" or options.dtype != "fp16":
        say(
            "flexgen-disk is left out: it computes OPT in fp16, not "
            f"{options.config.get('model_type')} in {options.dtype}"
        )
        return False
    missing = [
        name
        for name in ("flexgen", "pulp", "attr", "tqdm")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise MissingDependencyError(
            "the baseline flexgen-disk is not installed",
            got=f"no {', '.join(missing)}",
            fix=FLEXGEN_FIX,
        )
    return True
