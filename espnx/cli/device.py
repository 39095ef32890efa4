"""``espnx device ls|info|verify``: near-storage devices, those of other packages too."""

from __future__ import annotations

import argparse
import tempfile
from typing import TYPE_CHECKING, Any

from ..tables import render_table
from .output import add_json_option, emit, json_document

if TYPE_CHECKING:
    from ..device.interface import NearStorageDevice


def configure_ls(parser: argparse.ArgumentParser) -> None:
    add_json_option(parser)


def run_ls(args: argparse.Namespace) -> int:
    from ..device.registry import described_names

    found = described_names()
    rows = [(each["name"], each["from"], each["what"]) for each in found]
    emit(args, render_table(("device", "from", "what"), rows), json_document("device ls", devices=found))
    return 0


def configure_info(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="of `espnx device ls`, a spec (drive.yaml), or module:Class")
    _path(parser)
    add_json_option(parser)


def _path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--path", metavar="DIR", default=".", help="the directory it is opened in (default: the current one)")


def run_info(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from ..device.registry import open_device

    device = open_device(args.name, args.path)
    try:
        facts: dict[str, Any] = device.describe() | {"capabilities": asdict(device.capabilities)}
    finally:
        device.close()
    emit(args, render_table(("what", "value"), list(_flat(facts))), json_document("device info", device=facts))
    return 0


def _flat(facts: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows = list[tuple[str, str]]()
    for name, value in facts.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{name}.")
        else:
            rows.append((prefix + name, "-" if value is None else str(value)))
    return rows


def configure_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="+", help="of `espnx device ls`, a spec (drive.yaml), or module:Class")
    _path(parser)
    add_json_option(parser)


def run_verify(args: argparse.Namespace) -> int:
    """Every check of every device: one that fails says nothing about the next."""
    from ..device.registry import open_device
    from ..integrations.device_checks import checks_of
    from .progress import ProgressLine

    found = list[dict[str, Any]]()
    with ProgressLine() as line:
        for name in args.name:
            with tempfile.TemporaryDirectory(prefix=".espnx-verify-", dir=args.path) as directory:
                device = open_device(name, directory)
                try:
                    checks = list(checks_of(device))
                    for done, (what, check) in enumerate(checks):
                        line.update(name, done, len(checks))
                        found.append({"device": name, "check": what, **_outcome(check, device)})
                finally:
                    device.close()
    rows = [(each["device"], each["check"], each["outcome"], each["message"]) for each in found]
    failed = sum(each["outcome"] == "failed" for each in found)
    text = render_table(("device", "check", "outcome", "why"), rows) + f"\n{len(found)} checks, {failed} failed"
    emit(args, text, json_document("device verify", checks=found))
    return 1 if failed else 0


def _outcome(check: Any, device: NearStorageDevice) -> dict[str, str]:
    from ..errors import NotConformingError

    try:
        why_not = check(device)
    except NotConformingError as error:
        return {"outcome": "failed", "message": " ".join(str(error).split())}
    except Exception as error:
        return {"outcome": "failed", "message": " ".join(f"{type(error).__name__}: {error}".split())}
    return {"outcome": "not offered" if why_not else "ok", "message": why_not or ""}
