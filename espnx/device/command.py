"""A verb is a value: what a part of a device is asked for is a `Command`, and `submit` is the door
through which it comes.

A part has a call for each verb (`distances`, `scan`, `put`); a command is such a call, with its
arguments. Whatever stands in front of parts (emulation, traces, several devices as one) sees
commands alone, and is written once for all verbs; its own calls make commands again
(`espnx.device.kinds.PartKind.wrap`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar

import numpy as np

from ..storage.parse import Fields
from .interface import DeviceStats

#: Is told of each step of a command whose work comes in steps (the rounds of a walk), in any
#: thread.
Watch = Callable[[Any], None]


class Command:
    """What a part is asked for. A dataclass derives for each verb: its fields are the arguments of
    the call of that name.

    Attributes:
        verb: its name, in traces, faults and the verbs of an accelerator
            (`espnx.device.model.spec`).
        is_done: its call returns the result, and no ticket.
        comes_in_steps: its call has a ``watch``, which is told of each step.
        takes_more: its ticket may be asked for more (`add`) until it is finished: its line in a
            trace is written then.
    """

    verb: ClassVar[str]
    is_done: ClassVar[bool] = False
    comes_in_steps: ClassVar[bool] = False
    takes_more: ClassVar[bool] = False
    deadline_s: float = 30.0

    def ask(self, part: Any, watch: Watch | None = None) -> Any:
        """Asks a part, by the call of the verb's name with the command's fields, and returns its
        ticket: `finish` waits for the result, `cancel` ends it, `stats` says what it took. Raises
        what the part does."""
        own: dict[str, bool] = (
            {each.name: each.kw_only for each in fields(self)} if is_dataclass(self) else {}
        )
        options = {name: getattr(self, name) for name, is_option in own.items() if is_option}
        if watch is not None and self.comes_in_steps:
            options["watch"] = watch
        found = getattr(part, self.verb)(
            *(getattr(self, name) for name, is_option in own.items() if not is_option), **options
        )
        return Done(found) if self.is_done else found

    # --- results ---

    def values(self, found: Any) -> np.ndarray:
        """The numbers of a result, which are looked at before anybody gets it."""
        values: np.ndarray = found
        return values

    def can_be(self, values: np.ndarray) -> np.ndarray:
        """Which of them can be: infinite they may be, and none is NaN."""
        found: np.ndarray = ~np.isnan(values)
        return found

    # --- on several devices (`espnx.device.several`) ---

    #: Of results that are put together.
    result_dtype: ClassVar[Any] = np.float32

    @property
    def items(self) -> np.ndarray | None:
        """Numbers of what is asked for, of a command of which each device can do its own items;
        None: of any other."""
        return None

    @property
    def n_results(self) -> int:
        """Results of all items together."""
        return 0 if self.items is None else len(self.items)

    def share(self, places: np.ndarray) -> tuple[Command, np.ndarray]:
        """(the same of some of its items, which places its results have among all). Args: places:
        of the items, ascending."""
        raise NotImplementedError

    # --- in a trace (docs/trace-format.md) ---

    def begin_line(self, stored: Any, memo: dict[Any, Any]) -> dict[str, Any]:
        """What its line says before it is done. A ``waited_s`` of 0 is counted up meanwhile.

        Args:
            stored: what the part keeps (`espnx.device.kinds.PartKind.stored`).
            memo: for commands of one part, between them: how a trace calls what the part has handed
                out.
        """
        return {}

    def end_line(self, line: dict[str, Any], ticket: Any, found: Any, memo: dict[Any, Any]) -> None:
        """Adds what its line says of a result; `ticket` and `found` are None where it has
        failed."""

    @classmethod
    def of_line(cls, said: Fields, stored: Any, memo: dict[Any, Any]) -> Command:
        """The command of a line, with values of the same shapes where it does not say them. Raises
        FormatError."""
        said.refuse("verb", "one that can be replayed")

    def replayed(self, said: Fields, found: Any, memo: dict[Any, Any]) -> None:
        """A replay has this result of the command of that line."""


class Done:
    """The ticket of a command that was done when it was asked for."""

    stats = DeviceStats()

    def __init__(self, found: Any = None):
        self._found = found

    def finish(self) -> Any:
        return self._found

    def cancel(self) -> None: ...


class Part:
    """A part of a device: it has a call for each verb, and one door for all of them."""

    def submit(self, command: Command, watch: Watch | None = None) -> Any:
        """Starts what a command asks for, and returns its ticket. Raises what the command's call
        does."""
        return command.ask(self, watch)
