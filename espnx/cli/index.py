"""``espnx index build | add | delete | compact | detach | verify | info``."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import sys
import zlib
from collections.abc import Iterable, Iterator
from io import BufferedReader
from typing import TYPE_CHECKING, Any, cast

from ..errors import InvalidInputError
from .output import add_json_option, emit, json_document, render_table, stage_in_words
from .progress import ProgressLine

if TYPE_CHECKING:
    from ..retrieval.store.manifest import Manifest

_EXPECTED = "a JSON object with id (or _id), text and perhaps title"


def configure_build(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", help="directory to build in; an interrupted build in it is resumed")
    parser.add_argument(
        "--corpus",
        required=True,
        metavar="FILE",
        help="JSON lines with id (or _id), text and optionally title; also .gz; -: standard input",
    )
    parser.add_argument("--encoder", default="minilm", help="minilm, or the folder of a Hugging Face encoder (default: %(default)s)")
    parser.add_argument(
        "--format", default="fp16", metavar="F",
        help="of the stored token vectors: fp32, fp16, bf16, int8, bit1, residual1, residual2, residual4 (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--coarse", metavar="F", help="a second, small record of every document for the cascade, such as bit1")
    parser.add_argument("--pooling", metavar="P", help="first-stage vectors: cls, mean or muvera (default: cls where the encoder has one)")
    parser.add_argument("--pca", type=int, metavar="DIM", help="project token vectors to fewer dimensions")
    parser.add_argument(
        "--first-stage-code",
        default="sq8",
        metavar="CODE",
        help="flat, sq8, sq6, sq4 or pqM: code of the inverted lists (default: %(default)s)",
    )
    parser.add_argument("--nlist", type=int, help="number of inverted lists (default: 4 sqrt(documents))")
    parser.add_argument("--cls-weight", type=float, default=1.0, help="weight of the CLS similarity beside MaxSim (default: %(default)s)")
    parser.add_argument("--memory", metavar="SIZE", help="what the process may use (default: 1GiB)")
    parser.add_argument(
        "--directory", action="append", default=[], metavar="DIR", help="put data files there, one per SSD; may be repeated"
    )
    parser.add_argument("--replace", action="store_true", help="publish over the store that is there")
    parser.add_argument("--restart", action="store_true", help="discard an interrupted build instead of resuming it")
    add_json_option(parser)


def read_corpus(path: str) -> Iterator[dict[str, Any]]:
    """Documents of a JSON-lines file, compressed by gzip or not; ``-``: of standard input. Raises InvalidInputError naming the line."""
    name = "standard input" if path == "-" else path
    try:
        with contextlib.nullcontext(cast(BufferedReader, sys.stdin.buffer)) if path == "-" else open(path, "rb") as file:
            is_gzip = file.peek(2)[:2] == b"\x1f\x8b"
            yield from _parse(name, gzip.GzipFile(fileobj=file) if is_gzip else file)
    except (OSError, EOFError, zlib.error) as error:  # also gzip's own, for a file that is cut short or damaged
        got = getattr(error, "strerror", None) or str(error)
        raise InvalidInputError(f"cannot read corpus {name}", got=got, expected="a readable file") from error


def _parse(path: str, lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
            raise InvalidInputError(f"line {number} of {path}", got=str(error), expected="a JSON object") from error
        if not isinstance(item, dict):
            raise InvalidInputError(f"line {number} of {path}", got=type(item).__name__, expected=_EXPECTED)
        _check_line(f"line {number} of {path}", item)
        yield item


def _check_line(where: str, item: dict[str, Any]) -> None:
    """Raises InvalidInputError where a line has not the keys of a document, or other values than one may have."""
    identifier = item.get("id", item.get("_id"))
    if identifier is None or "text" not in item:
        found = ", ".join(list(item)[:8]) or "no key"
        raise InvalidInputError(where, got=f"an object with {found}", expected=_EXPECTED)
    if not isinstance(item["text"], str):
        raise InvalidInputError(f"{where}: text", got=type(item["text"]).__name__, expected="text")
    if not isinstance(identifier, str) and (not isinstance(identifier, int) or isinstance(identifier, bool)):
        raise InvalidInputError(f"{where}: id", got=repr(identifier), expected="text or a whole number")


def _disk_need(fmt: str, coarse: str | None, pca: int | None, encoder: Any) -> str:
    """What a build takes on disk, said before it starts."""
    from ..retrieval.build.options import BuildOptions
    from ..retrieval.build.training import Recipe

    recipe = Recipe.of(BuildOptions(format=fmt, coarse=coarse, pca=pca), (encoder.d_cls, encoder.dim), None, codebook=None)
    stored = sum(schema.row_bytes for schema in recipe.tiers.values())
    return f"while it builds it needs {recipe.spooled.row_bytes:,} bytes a token vector on disk beside the store's {stored:,}"


def run_build(args: argparse.Namespace) -> int:
    import warnings
    from dataclasses import asdict

    from .. import build, load_encoder
    from ..sizes import format_size

    encoder = load_encoder(args.encoder)
    with ProgressLine() as progress, warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, *_: progress.say(str(message))
        progress.say(f"building {args.store} from {args.corpus}; {_disk_need(args.format, args.coarse, args.pca, encoder)}")
        report = build(
            args.store,
            read_corpus(args.corpus),
            encoder,
            format=args.format,
            pca=args.pca,
            first_stage_code=args.first_stage_code,
            coarse=args.coarse,
            pooling=args.pooling,
            nlist=args.nlist,
            cls_weight=args.cls_weight,
            memory=args.memory,
            directories=[os.path.abspath(directory) for directory in args.directory],
            replace=args.replace,
            restart=args.restart,
            progress=progress.update,
        )
    rows = [
        (
            "documents",
            f"{report.documents:,}" + (f" ({report.resumed_documents:,} from the interrupted build)" if report.resumed_documents else ""),
        ),
        ("token vectors", f"{report.tokens:,}"),
        ("records on disk", format_size(report.record_bytes)),
        ("resident metadata", f"{report.resident_bytes_per_document:.3f} bytes a document"),
        ("first stage", stage_in_words(report.first_stage)),
        *([("began anew", report.restarted_because)] if report.restarted_because else []),
        ("time", f"{report.spool_s:.1f} s encode and spool, {report.arrange_s:.1f} s arrange, {report.write_s:.1f} s write"),
    ]
    text = render_table(("", ""), rows)
    if not report.documents:
        text += f"\n{args.corpus} holds no document: the store is empty; the first addition trains its lists"
    emit(args, text, json_document("index build", report=asdict(report)))
    return 0


def configure_add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", help="directory of the store")
    parser.add_argument("--corpus", required=True, metavar="FILE", help="JSON lines with id (or _id), text and optionally title")
    parser.add_argument("--encoder", default="minilm", help="the one the store was built with (default: %(default)s)")
    parser.add_argument("--replace", action="store_true", help="documents whose ids are in the store take the others' places")
    parser.add_argument("--memory", metavar="SIZE", help="what the process may use (default: 1GiB)")
    add_json_option(parser)


def run_add(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from .. import add, load_encoder

    with ProgressLine() as progress:
        report = add(
            args.store,
            read_corpus(args.corpus),
            load_encoder(args.encoder),
            replace=args.replace,
            memory=args.memory,
            progress=progress.update,
        )
    text = f"{args.store}: {report.documents:,} documents added, generation {report.generation}, {report.parts} parts"
    if report.compacting_pays:
        text += "; `espnx index compact` pays now"
    emit(args, text, json_document("index add", report=asdict(report)))
    return 0


def configure_delete(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", help="directory of the store")
    parser.add_argument("id", nargs="*", help="ids of documents")
    parser.add_argument("--ids", metavar="FILE", help="more of them, one a line")
    parser.add_argument("--int", action="store_true", help="the ids are numbers (default: text)")
    parser.add_argument("--missing-ok", action="store_true", help="ids that the index does not hold are no error")
    add_json_option(parser)


def run_delete(args: argparse.Namespace) -> int:
    from .. import delete

    words = list(args.id)
    if args.ids:
        try:
            with open(args.ids, encoding="utf-8") as file:
                words += [line.rstrip("\n") for line in file if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInputError(f"cannot read ids {args.ids}", got=str(error), expected="a readable text file") from error
    try:
        ids: list[int | str] = [int(word) for word in words] if args.int else list(words)
    except ValueError as error:
        raise InvalidInputError("an id", got=str(error), expected="a number (--int)") from None
    count = delete(args.store, ids, missing_ok=args.missing_ok)
    text = f"{args.store}: {count:,} documents deleted; `espnx index compact` frees their space"
    emit(args, text, json_document("index delete", store=args.store, deleted=count))
    return 0


def configure_compact(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", help="directory of the store")
    parser.add_argument("--memory", metavar="SIZE", help="what the process may use (default: 1GiB)")
    add_json_option(parser)


def run_compact(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from .. import compact
    from ..sizes import format_size

    with ProgressLine() as progress:
        report = compact(args.store, memory=args.memory, progress=progress.update)
    sizes = f"{format_size(report.size_bytes_before)} to {format_size(report.size_bytes)}"
    text = f"{args.store}: {report.documents:,} documents in one part ({report.parts} before), {report.dropped:,} dropped, {sizes}"
    emit(args, text, json_document("index compact", report=asdict(report)))
    return 0


def configure_detach(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", help="directory of the store")
    parser.add_argument("--directory", action="append", default=[], metavar="DIR", help="where the copies go (default: into the store)")
    parser.add_argument("--adopt", action="store_true", help="copy nothing: the original is gone, and its data are this store's now")
    add_json_option(parser)


def run_detach(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from .. import detach
    from ..sizes import format_size

    report = detach(args.store, directories=args.directory, adopt=args.adopt)
    done = "the data directories are its own" if args.adopt else f"{report.files} data files copied, {format_size(report.size_bytes)}"
    emit(args, f"{args.store}: {done}", json_document("index detach", report=asdict(report)))
    return 0


def configure_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", help="directory of the store")
    add_json_option(parser)


def run_verify(args: argparse.Namespace) -> int:
    from ..retrieval.store.store import EmbeddingStore
    from ..storage import NativeEngine

    with NativeEngine() as engine, EmbeddingStore(args.store, engine) as store, ProgressLine() as progress:
        count = store.verify(lambda done, total: progress.update("verify", done, total))
        document = json_document("index verify", store=args.store, records=count, bytes_moved=engine.stats().bytes_moved, ok=True)
    emit(args, f"{args.store}: {count:,} records and all metadata are intact", document)
    return 0


def configure_info(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", help="directory of the store")
    add_json_option(parser)


def _parts_in_words(manifest: Manifest) -> str:
    text = f"{len(manifest.parts)}; {manifest.added_share:.1%} of the records added since the base, {manifest.dead_share:.1%} deleted"
    return text + ("; `espnx index compact` pays" if manifest.compacting_pays else "")


def run_info(args: argparse.Namespace) -> int:
    from ..retrieval.first_stage.registry import described
    from ..retrieval.store.store import EmbeddingStore
    from ..sizes import format_size
    from ..storage import NativeEngine

    with NativeEngine() as engine, EmbeddingStore(args.store, engine) as store:
        manifest, schema, encoder = store.manifest, store.manifest.schema, store.manifest.encoder
        data_bytes = sum(segment.size_bytes for segment in store.segments)
        stage_bytes = store.first_stage_bytes
        coarse = "none" if store.coarse is None else f"{store.coarse.schema.format}, {format_size(store.coarse.size_bytes)}"
        deleted = sum(part.count for part in store.parts) - store.count
        per_document = store.resident_bytes / max(1, store.count)
        rows = [
            ("documents", f"{manifest.count:,}" + (f" ({deleted:,} deleted ones wait for compact)" if deleted else "")),
            ("token vectors", f"{manifest.tokens:,} x {schema.dim} {schema.format}"),
            ("CLS vectors", f"{schema.d_cls} dimensions, weight {manifest.cls_weight}" if schema.d_cls else "none"),
            ("encoder", encoder.name or "none: documents brought their vectors"),
            ("projection", f"{encoder.dim} to {schema.dim} dimensions" if store.projection else "none"),
            ("first stage", stage_in_words(described(manifest.first_stage))),
            ("on disk", f"{format_size(data_bytes)} in {len(store.segments)} data files, path {store.effective_path}"),
            ("in memory: metadata", f"{format_size(store.resident_bytes)}, {per_document:.3f} bytes a document"),
            ("in memory: first stage", format_size(stage_bytes)),
            ("coarse tier", coarse),
            ("generation", str(manifest.generation)),
            ("parts", _parts_in_words(manifest)),
            *(("shares data", f"{home}: `espnx index detach` before it can be changed") for home in store.shared_homes),
        ]
        document = json_document(
            "index info",
            manifest=manifest.fields(),
            shared_homes=store.shared_homes,
            data_bytes=data_bytes,
            resident_bytes=store.resident_bytes,
            resident_bytes_per_document=per_document,
            first_stage_bytes=stage_bytes,
            parts=len(store.parts),
            added_share=manifest.added_share,
            dead_share=manifest.dead_share,
            compacting_pays=manifest.compacting_pays,
            effective_path=store.effective_path,
        )
    emit(args, render_table(("", ""), rows), document)
    return 0
