"""``espnx doctor``: is this directory fast, what is missing, and what to do about it."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from ..errors import InvalidInputError
from . import host
from .checks import FAIL, PASS, WARN, Check, disk, gpu, run_checks, software
from .output import add_json_option, emit, json_document, render_table

DESCRIPTION = """First a table: the mount, its file system and device, whether O_DIRECT holds, which engine `auto` becomes there, and the
alignment of reads. Then one line per check: PASS, INFO, WARN (works, slower or with less), FAIL, N-A (no such hardware).

  espnx doctor --path /mnt/nvme       is that disk usable, and how
  espnx doctor --json report.json     the same, for programs"""


def configure(parser: ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("--path", metavar="DIR", default=".", help="the directory to look at (default: the current one)")
    add_json_option(parser)


def run(args: Namespace) -> int:
    if not os.path.isdir(args.path):
        raise InvalidInputError("doctor looks at a directory", got=repr(args.path), expected="an existing directory", fix="--path DIR")
    directory = os.path.abspath(args.path)
    glance = at_a_glance(directory)
    found = run_checks([*software.CHECKS, *disk.checks(directory), *gpu.CHECKS])
    counts = {status: sum(check.status == status for check in found) for status in (PASS, WARN, FAIL)}
    document = json_document(
        "doctor",
        path=directory,
        mount=glance,
        checks=[check.as_dict() for check in found],
        passed=counts[PASS],
        warnings=counts[WARN],
        failed=counts[FAIL],
    )
    summary = f"{counts[PASS]} passed, {counts[WARN]} warning{'s' * (counts[WARN] != 1)}, {counts[FAIL]} failed"
    emit(args, "\n\n".join([glance_table(glance), render_checks(found), summary]), document)
    return 1 if counts[FAIL] else 0


def at_a_glance(directory: str) -> dict[str, object]:
    """The mount and what ``auto`` becomes on it."""
    mount = host.mount_of(directory)
    facts = disk.effective_path(directory)
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
        "reason": facts["reason"],
    }


def glance_table(glance: dict[str, object]) -> str:
    direct = {True: "yes", False: "no", None: "unknown"}[glance["o_direct"]]  # type: ignore[index]
    row = [glance["mount"], glance["file_system"], glance["device"], direct, glance["requested"], glance["effective"] or "none"]
    table = render_table(["MOUNT", "FS", "DEVICE", "O_DIRECT", "REQUESTED", "EFFECTIVE", "ALIGN"], [[*row, glance["alignment_bytes"]]])
    return f"{table}\n(auto: {glance['reason']})" if glance["reason"] else table


def render_checks(found: Sequence[Check]) -> str:
    """One line per check; those that want attention say why, what to do and what was seen."""
    lines = []
    for check in found:
        lines.append(f"{check.status:4s}  {check.name:20s} {check.says}")
        details = {"why": check.why, "fix": check.fix}
        if check.status in (WARN, FAIL):
            details["evidence"] = ", ".join(f"{name}={value}" for name, value in check.evidence.items())
        lines += [f"      {name}: {text}" for name, text in details.items() if text]
    return "\n".join(lines)
