"""Which subcommands there are and where they live; nothing is imported until a command is asked for."""

from __future__ import annotations

import importlib
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import MissingDependencyError


@dataclass(frozen=True)
class Command:
    """One subcommand.

    Attributes:
        target: ``module`` with functions ``configure(parser)`` and ``run(args) -> int``, or ``module:name`` with ``configure_name`` and
            ``run_name`` (several commands of a group in one file).
        help: one line for the list of commands.
    """

    target: str
    help: str

    def load(self) -> tuple[Callable[[ArgumentParser], None], Callable[[Namespace], int]]:
        """Imports the module and returns its two functions."""
        module_name, _, name = self.target.partition(":")
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name != module_name:
                raise
            raise MissingDependencyError("this installation of espnx lacks the command", got=f"no module {module_name}") from error
        suffix = f"_{name}" if name else ""
        return getattr(module, f"configure{suffix}"), getattr(module, f"run{suffix}")


#: A key of two words is a command of a group; the group's own line is in `GROUPS`.
COMMANDS = {
    "doctor": Command("espnx.cli.doctor", "check this machine and a directory: what works, what is slow, and what to do about it"),
    "env": Command("espnx.cli.env", "everything a bug report needs to say about this machine"),
    "index build": Command("espnx.cli.index:build", "build an index whose token embeddings live on SSD"),
    "index add": Command("espnx.cli.index:add", "add documents to an index"),
    "index delete": Command("espnx.cli.index:delete", "delete documents of an index by id"),
    "index compact": Command("espnx.cli.index:compact", "write an index anew: without what was deleted, in list order"),
    "index detach": Command("espnx.cli.index:detach", "give a copy of an index that shares data with the original data of its own"),
    "index import": Command("espnx.cli.import_", "make a store of an index of ColBERT, fast-plaid or PyLate"),
    "index verify": Command("espnx.cli.index:verify", "read a whole index and check every record's checksum"),
    "index info": Command("espnx.cli.index:info", "show what an index holds, and its sizes on disk and in memory"),
    "search": Command("espnx.cli.search", "search an index"),
    "evaluate": Command("espnx.cli.evaluate", "retrieval quality of an index against judged queries"),
    "generate": Command("espnx.cli.generate", "generate for a file of prompts, the KV cache on SSD"),
    "cache ls": Command("espnx.cli.cache:ls", "list kept KV caches"),
    "cache verify": Command("espnx.cli.cache:verify", "read a kept KV cache whole and check every block's checksum"),
    "cache rm": Command("espnx.cli.cache:rm", "remove kept KV caches, by name or the least recently used"),
    "plan": Command("espnx.cli.plan", "what a model needs on SSD and in memory, and what its decoding will wait for"),
    "bench": Command("espnx.cli.bench", "measure, beside baselines, in the same run"),
}
GROUPS = {"index": "build, change, import, verify and inspect an index", "cache": "list, verify and remove kept KV caches"}
