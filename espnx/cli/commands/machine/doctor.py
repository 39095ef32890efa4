"""``espnx doctor``: is this directory fast, what is missing, and what to do about it."""

from __future__ import annotations

import functools
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict

from ....errors import EspnxError, InvalidInputError
from ....tables import render_table
from ... import host
from ...checks import FAIL, PASS, WARN, Check, disk, gpu, run_checks, software, speed
from ...output import add_json_option, emit, json_document

_SPEEDS = {"read_bytes_per_s": 1e6, "reads_4k_per_s": 1.0}

DESCRIPTION = """First a table: the mount, its file system and device, whether O_DIRECT holds, which
engine `auto` becomes there, the alignment of reads, and how fast they are (measured for half a
second, on a file of 64 MiB that is removed). Then one line per check: PASS, INFO, WARN (works,
slower or with less), FAIL, N-A (no such hardware)."""


def configure(parser: ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument(
        "--path",
        metavar="DIR",
        default=".",
        help="the directory to look at (default: the current one)",
    )
    add_json_option(parser)


def run(args: Namespace) -> int:
    if not os.path.isdir(args.path):
        raise InvalidInputError(
            "doctor looks at a directory",
            got=repr(args.path),
            expected="an existing directory",
            fix="--path DIR",
        )
    directory = os.path.abspath(args.path)
    glance = at_a_glance(directory)
    found = run_checks(
        [
            *software.CHECKS,
            *disk.checks(directory),
            functools.update_wrapper(functools.partial(speed.speed, directory), speed.speed),
            *gpu.CHECKS,
        ]
    )
    counts = {
        status: sum(check.status == status for check in found) for status in (PASS, WARN, FAIL)
    }
    document = json_document(
        "doctor",
        path=directory,
        mount=glance,
        checks=[asdict(check) for check in found],
        passed=counts[PASS],
        warnings=counts[WARN],
        failed=counts[FAIL],
    )
    summary = (
        f"{counts[PASS]} passed, {counts[WARN]} warning{'s' * (counts[WARN] != 1)}, {counts[FAIL]} "
        "failed"
    )
    emit(args, "\n\n".join([glance_table(glance), render_checks(found), summary]), document)
    return 1 if counts[FAIL] else 0


def at_a_glance(directory: str) -> dict[str, object]:
    """The mount, what ``auto`` becomes on it, and how fast that is."""
    mount = host.mount_of(directory)
    facts = disk.effective_path(directory)
    try:
        measured = speed.measure(directory)
    except (EspnxError, OSError, ImportError):
        measured = None  # the check says why
    direct = facts["direct"]
    if direct is None:
        direct = host.o_direct_support(directory)[0]
    return {
        "mount": mount.point,
        "file_system": mount.file_system,
        "device": mount.device or mount.source,
        "o_direct": direct,
        "requested": "auto",
        "effective": facts["engine"],
        "alignment_bytes": facts["alignment_bytes"],
        "read_bytes_per_s": None if measured is None else round(measured.read_bytes_per_s),
        "reads_4k_per_s": None if measured is None else round(measured.reads_4k_per_s),
        "reason": facts["reason"],
    }


def glance_table(glance: dict[str, object]) -> str:
    direct = {True: "yes", False: "no", None: "unknown"}[glance["o_direct"]]  # type: ignore[index]
    row = [
        glance["mount"],
        glance["file_system"],
        glance["device"],
        direct,
        glance["requested"],
        glance["effective"] or "none",
    ]
    fast = [
        None if glance[name] is None else f"{float(str(glance[name])) / unit:,.0f}"
        for name, unit in _SPEEDS.items()
    ]
    headers = [
        "MOUNT",
        "FS",
        "DEVICE",
        "O_DIRECT",
        "REQUESTED",
        "EFFECTIVE",
        "ALIGN",
        "READ MB/s",
        "4K READS/s",
    ]
    table = render_table(headers, [[*row, glance["alignment_bytes"], *fast]])
    return f"{table}\n(auto: {glance['reason']})" if glance["reason"] else table


def render_checks(found: Sequence[Check]) -> str:
    """One line per check; those that want attention say why, what to do and what was seen."""
    lines = []
    for check in found:
        lines.append(f"{check.status:4s}  {check.name:20s} {check.says}")
        details = {"why": check.why, "fix": check.fix}
        if check.status in (WARN, FAIL):
            details["evidence"] = ", ".join(
                f"{name}={value}" for name, value in check.evidence.items()
            )
        lines += [f"      {name}: {text}" for name, text in details.items() if text]
    return "\n".join(lines)
