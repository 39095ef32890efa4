"""``espnx device ls|info|calibrate|verify|skeleton|replay``: near-storage devices, those of other
packages too."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ...errors import InvalidInputError
from ...sizes import format_size
from ...tables import render_table
from ..device_info import rows_of
from ..device_options import at_least_0
from ..failures import FAILED, MISSING_HARDWARE, NOT_WHOLE, OK
from ..output import add_json_option, emit, json_document, write_whole

if TYPE_CHECKING:
    from ...device.emulation.topology import Topology
    from ...device.kinds import PartKind
    from ...device.near_storage import NearStorageDevice
    from ...device.trace.reader import Trace

#: Of the example package.
_SKELETON = ("pyproject.toml", "ram_device.py")


def configure_ls(parser: argparse.ArgumentParser) -> None:
    add_json_option(parser)


def run_ls(args: argparse.Namespace) -> int:
    from ...device.registry import described_names

    found = described_names()
    rows = [(each["name"], each["from"], each["what"]) for each in found]
    emit(
        args,
        render_table(("device", "from", "what"), rows),
        json_document("device ls", devices=found),
    )
    return 0


def configure_info(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="of `espnx device ls`, a spec (drive.yaml), or module:Class")
    _path(parser)
    parser.add_argument(
        "--devices",
        type=int,
        default=1,
        metavar="N",
        help="of a spec: draw so many behind their links (default: 1)",
    )
    parser.add_argument(
        "--svg", metavar="FILE", help="of a spec: also write the drawing as a picture"
    )
    add_json_option(parser)


def _path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--path",
        metavar="DIR",
        default=".",
        help="the directory it is opened in (default: the current one)",
    )


def run_info(args: argparse.Namespace) -> int:
    from ...device.registry import open_device

    device = open_device(args.name, args.path)
    try:
        facts: dict[str, Any] = device.describe() | {"capabilities": asdict(device.capabilities)}
        drawn = _drawn(args, getattr(device, "topology", None))
    finally:
        device.close()
    emit(
        args,
        render_table(("", "", ""), rows_of(facts)) + drawn,
        json_document("device info", device=facts),
    )
    return 0


def _drawn(args: argparse.Namespace, topology: Topology | None) -> str:
    """The way from host to flash; empty of a device that has no spec. Raises InvalidInputError,
    WriteError."""
    from ...device.model.picture import topology_svg, topology_text

    if topology is None:
        if args.svg or args.devices != 1:
            raise InvalidInputError(
                f"a drawing of device {args.name!r}",
                got="a device without a spec",
                expected="smartssd, or drive.yaml",
            )
        return ""
    text = topology_text(topology.spec, args.devices)
    if args.svg:
        write_whole(
            args.svg,
            topology_svg(topology.spec, args.devices),
            "cannot write the drawing",
            "name another file after --svg",
        )
    return f"\n\n{text}"


def configure_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        nargs="?",
        default="this-disk",
        help="of the spec, or the file to write: NAME.yaml, a new one (default: this-disk.yaml)",
    )
    _path(parser)
    add_json_option(parser)


def run_calibrate(args: argparse.Namespace) -> int:
    """The disk of a directory as a spec: what it can be emulated by, and what a plan can count
    with."""
    from ...device.model.reader import NAME, NAME_WORDS, SUFFIXES
    from ...device.model.write import write_spec
    from ..checks.calibrated import spec_of
    from ..progress import ProgressLine

    path = args.name if args.name.endswith(SUFFIXES) else f"{args.name}.yaml"
    name = os.path.splitext(os.path.basename(path))[0]
    # Before seconds of measuring.
    if os.path.lexists(path):
        raise InvalidInputError(
            "a device spec",
            got=f"{path}, which is there",
            expected="a new file",
            fix="another name, or remove it",
        )
    if not NAME.fullmatch(name):
        raise InvalidInputError("the name of a device spec", got=repr(name), expected=NAME_WORDS)
    with ProgressLine(is_terse=True) as line, line.loading(f"the disk of {args.path}"):
        spec, is_buffered = spec_of(name, args.path)
    write_spec(path, spec)
    figures = {
        "read_bandwidth": spec.flash.read_bandwidth,
        "write_bandwidth": spec.flash.write_bandwidth,
        "random_reads": spec.flash.random_reads,
        "read_latency": spec.flash.read_latency,
        "capacity": spec.capacity,
    }
    text = render_table(
        ("figure", "measured"), [(name, str(each)) for name, each in figures.items()]
    )
    text += f"\n{path}: espnx.device.open({os.path.join('.', path)!r}, path=DIR) emulates it"
    if is_buffered:
        text += "\nO_DIRECT is refused there: these are speeds of the page cache"
    known = {
        name: None if each is None else {"value": each.value, **asdict(each)}
        for name, each in figures.items()
    }
    emit(
        args,
        text,
        json_document(
            "device calibrate",
            file=path,
            name=spec.name,
            title=spec.title,
            is_buffered=is_buffered,
            figures=known,
        ),
    )
    return 0


def configure_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="+", help="of `espnx device ls`, a spec (drive.yaml), or module:Class"
    )
    _path(parser)
    parser.add_argument(
        "--soak",
        type=at_least_0,
        default=10.0,
        metavar="SECONDS",
        help="of random calls, beside the other checks (default: 10)",
    )
    parser.add_argument(
        "--deadline",
        type=at_least_0,
        default=120.0,
        metavar="SECONDS",
        help="a check that stands still for so long has failed (default: 120)",
    )
    add_json_option(parser)


def run_verify(args: argparse.Namespace) -> int:
    """Every check of every device: one that fails says nothing about the next."""
    from ...device.conformance.verify import verify
    from ...integrations.device_checks import checks_of
    from ..progress import ProgressLine

    found = list[dict[str, Any]]()
    with ProgressLine() as line:
        for name in args.name:
            said = partial(line.update, name)
            for each in verify(
                name, args.path, checks_of, soak_s=args.soak, deadline_s=args.deadline, said=said
            ):
                found.append({"device": name, **asdict(each)})
    rows = [(each["device"], each["check"], each["outcome"], each["message"]) for each in found]
    counts = Counter(each["outcome"] for each in found)
    text = (
        render_table(("device", "check", "outcome", "why"), rows)
        + f"\n{len(found)} checks, {counts['failed']} failed"
    )
    emit(args, text, json_document("device verify", checks=found))
    warning = _not_whole(
        counts, [each for each in found if each["outcome"] in ("not made", "no hardware")]
    )
    if warning:
        print(f"espnx: warning: {warning}", file=sys.stderr)
    return (
        FAILED
        if counts["failed"]
        else MISSING_HARDWARE
        if counts["no hardware"]
        else NOT_WHOLE
        if warning
        else OK
    )


def _not_whole(counts: Counter[str], not_made: list[dict[str, Any]]) -> str:
    """Why what did not fail is less than a pass; empty if it is one."""
    if not_made:
        what = ", ".join(dict.fromkeys(each["check"] for each in not_made))
        return f"{len(not_made)} checks could not be made ({what}): {not_made[0]['message']}"
    return (
        ""
        if counts["ok"] or counts["failed"]
        else "nothing could be checked: the device offers nothing"
    )


def configure_skeleton(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="a new directory, or an empty one")
    add_json_option(parser)


def run_skeleton(args: argparse.Namespace) -> int:
    """The files of the example package, as they are installed."""
    directory = args.directory
    if os.path.lexists(directory) and not (os.path.isdir(directory) and not os.listdir(directory)):
        raise InvalidInputError(
            "a directory for a new package",
            got=f"{directory}, which is there",
            expected="a new or empty one",
        )
    os.makedirs(directory, exist_ok=True)
    example, written = files("espnx.device.example"), list[str]()
    for name in _SKELETON:
        written.append(os.path.join(directory, name))
        write_whole(
            written[-1],
            example.joinpath(name).read_text(encoding="utf-8"),
            "cannot write a file of the package",
            "another DIR",
        )
    text = "\n".join([*written, f"pip install -e {directory}; espnx device verify ram"])
    emit(args, text, json_document("device skeleton", files=written))
    return OK


def configure_replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="FILE", help="that `--record` wrote")
    parser.add_argument(
        "--device", metavar="NAME", help="ask this one instead of the recorded ones"
    )
    parser.add_argument(
        "--path",
        metavar="DIR",
        default=".",
        help="rows are kept below it meanwhile (default: the current directory)",
    )
    parser.add_argument("--index", metavar="STORE", help="that a recorded search asked")
    parser.add_argument(
        "--postings",
        metavar="DIR",
        action="append",
        default=[],
        help="that a recorded search scanned, one for each device, in their order",
    )
    parser.add_argument(
        "--graph", metavar="DIR", help="that a recorded `espnx graph search` walked"
    )
    parser.add_argument(
        "--no-host",
        action="store_true",
        help="do not wait as long as the host worked between commands",
    )
    add_json_option(parser)


def run_replay(args: argparse.Namespace) -> int:
    from ...device.kinds import POSTINGS
    from ...device.trace.reader import read_trace
    from ...device.trace.replay import replay
    from ...postings.split.parts import read_parts
    from ..progress import ProgressLine

    trace = read_trace(args.trace)
    with (
        ProgressLine(is_terse=True) as line,
        line.loading(f"{len(trace.commands):,} commands"),
        ExitStack() as opened,
    ):
        devices, there = _replayed_on(args, trace, opened)
        if args.postings:
            there[POSTINGS] = read_parts(args.postings)[0]
        found = replay(trace, devices, there, with_host=not args.no_host)
    rows = [
        (
            verb,
            times.count,
            format_size(times.size_bytes),
            f"{times.recorded_s:.4f}",
            f"{times.replayed_s:.4f}",
        )
        for verb, times in sorted(found.verbs.items(), key=lambda each: -each[1].recorded_s)
    ]
    rows.append(
        (
            "in all",
            sum(row[1] for row in rows),
            "",
            f"{found.recorded_s:.4f}",
            f"{found.replayed_s:.4f}",
        )
    )
    headers = ("command", "count", "bytes", "recorded s", "replayed s")
    names = ", ".join(dict.fromkeys(each.name for each in devices))
    text = (
        render_table(headers, rows, right=headers[1:])
        + f"\nrecorded: {trace.program}\nreplayed on {names}, {devices[0].kind} times"
    )
    if not trace.is_whole:
        text += "\na trace of version 1, which does not say where it ends: it may have been cut off"
    document = {
        "trace": args.trace,
        "program": trace.program,
        "is_whole": trace.is_whole,
        "devices": [each.describe() for each in devices],
        "recorded_s": found.recorded_s,
        "replayed_s": found.replayed_s,
        "host_s": found.host_s,
        "verbs": {verb: asdict(times) for verb, times in found.verbs.items()},
    }
    emit(args, text, json_document("device replay", **document))
    return 0


def _replayed_on(
    args: argparse.Namespace, trace: Trace, opened: ExitStack
) -> tuple[list[NearStorageDevice], dict[PartKind, list[Any]]]:
    """(a device for each of the trace's, what the search of an index asks of them)."""
    from ...device.kinds import RECORDS
    from ...device.registry import open_together
    from ...graph.devices.walks import WALKS

    names = [args.device or each["name"] for each in trace.devices]
    if len(set(names)) > 1:
        raise InvalidInputError(
            "a trace of devices of several kinds",
            got=", ".join(sorted(set(names))),
            fix="--device NAME, for all of them",
        )
    if args.postings:
        places = list(args.postings)
        if args.index is not None or len(places) != len(trace.devices):
            expected = f"{len(trace.devices)}, as many as were recorded, and no --index"
            raise InvalidInputError("directories of postings", got=len(places), expected=expected)
    elif args.index is not None:
        from ...retrieval.store.manifest import data_directories

        places = data_directories(args.index)
        if len(places) != len(trace.devices):
            raise InvalidInputError(
                "directories of the index",
                got=len(places),
                expected=f"{len(trace.devices)}, as many as were recorded",
            )
    else:
        scratch = opened.enter_context(
            tempfile.TemporaryDirectory(prefix=".espnx-replay-", dir=args.path)
        )
        places = [os.path.join(scratch, str(number)) for number in range(len(trace.devices))]
    devices = open_together(names[0], places)
    for each in devices:
        opened.callback(each.close)
    if args.index is None:
        return devices, {WALKS: [] if args.graph is None else [args.graph]}
    from ...retrieval.first_stage.devices import asked_of_devices
    from ...retrieval.search.index import Index

    store = opened.enter_context(Index(args.index, None, device=devices)).store
    tiers = [tier for tier in (store.full, store.coarse) if tier is not None]
    asked = asked_of_devices(store.first_stage, store.parts)
    return devices, {WALKS: [], **asked, RECORDS: tiers}
