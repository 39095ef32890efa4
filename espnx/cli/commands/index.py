"""``espnx index build | add | delete | compact | postings | detach | ls | verify | info``."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from ...checks import check_given_directory
from ...errors import InvalidInputError
from ...sizes import format_size
from ...tables import render_table
from ..index_options import FORMATS, POOLINGS, first_stages_of
from ..output import add_json_option, add_memory_option, emit, json_document
from ..progress import ProgressLine
from .search import check_store

if TYPE_CHECKING:
    from ...importers.corpus import Corpus

#: Those that are called as the options of `espnx.build` are.
_BUILD_OPTIONS = (
    "format", "pca", "language", "sparse_encoder", "first_stage_code", "coarse", "pooling", "nlist",
    "cls_weight", "memory",
)  # fmt: skip


def configure_build(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "store", help="directory to build in; an interrupted build in it is resumed"
    )
    _add_corpus_options(parser)
    parser.add_argument(
        "--encoder",
        default="minilm",
        help="minilm, or the folder of a Hugging Face encoder (default: %(default)s)",
    )
    parser.add_argument(
        "--encoder-dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help=(
            "what it computes in; bf16 is faster on processors that multiply it, which `espnx "
            "doctor` tells (default: %(default)s)"
        ),
    )
    parser.add_argument(
        "--format",
        default="fp16",
        choices=FORMATS,
        metavar="F",
        help=f"of the stored token vectors: {', '.join(FORMATS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--coarse",
        choices=FORMATS[3:],
        metavar="F",
        help="a second, small record of every document for the cascade, such as bit1",
    )
    parser.add_argument(
        "--pooling",
        choices=POOLINGS,
        metavar="P",
        help="first-stage vectors: cls, mean or muvera (default: cls where the encoder has one)",
    )
    parser.add_argument(
        "--pca", type=int, metavar="DIM", help="project token vectors to fewer dimensions"
    )
    parser.add_argument(
        "--first-stage-code",
        default="sq8",
        metavar="CODE",
        help="flat, sq8, sq6, sq4 or pqM: code of the inverted lists (default: %(default)s)",
    )
    parser.add_argument(
        "--first-stages",
        default="ivf",
        metavar="S,...",
        help=(
            "what finds candidates: ivf (in memory), graph, clusters, bm25, splade (on SSD), those "
            "of installed packages, or several; searches take the first (default: ivf)"
        ),
    )
    parser.add_argument(
        "--stage-option",
        action="append",
        default=[],
        metavar="S.OPTION=VALUE",
        help="an option of a first stage; may be repeated",
    )
    add_text_options(parser)
    parser.add_argument(
        "--nlist", type=int, help="number of inverted lists (default: 4 sqrt(documents))"
    )
    parser.add_argument(
        "--cls-weight",
        type=float,
        default=1.0,
        help="weight of the CLS similarity beside MaxSim (default: %(default)s)",
    )
    add_memory_option(parser)
    parser.add_argument(
        "--directory",
        action="append",
        default=[],
        metavar="DIR",
        help="put data files there, one per SSD; may be repeated",
    )
    parser.add_argument(
        "--replace", action="store_true", help="publish over the store that is there"
    )
    parser.add_argument(
        "--restart", action="store_true", help="discard an interrupted build instead of resuming it"
    )
    add_json_option(parser)


def _add_corpus_options(parser: argparse.ArgumentParser) -> None:
    """Those of `_corpus`."""
    parser.add_argument(
        "--corpus",
        required=True,
        metavar="PATH",
        help=(
            "documents with id (or _id), text and perhaps title: JSON lines, .csv, .tsv (also "
            ".gz), .parquet, .arrow, or a folder of texts; -: JSON lines on standard input"
        ),
    )
    parser.add_argument(
        "--corpus-format",
        metavar="F",
        help="jsonl, csv, tsv, parquet, arrow or folder (default: as the name says)",
    )
    parser.add_argument(
        "--columns",
        metavar="FIELD=NAME,...",
        help="what the corpus calls id, text and title, such as text=body,id=key",
    )


def _corpus(args: argparse.Namespace) -> Corpus:
    """The corpus of a command, opened."""
    from ...importers.corpus import read_corpus

    pairs = [word.partition("=") for word in args.columns.split(",")] if args.columns else []
    if any(not separator or not name for _, separator, name in pairs):
        raise InvalidInputError(
            "--columns", got=args.columns, expected="FIELD=NAME, such as text=body,id=key"
        )
    return read_corpus(
        args.corpus,
        format=args.corpus_format,
        columns={field.strip(): name.strip() for field, _, name in pairs},
    )


def _disk_need(fmt: str, coarse: str | None, pca: int | None, encoder: Any) -> str:
    """What a build takes on disk, said before it starts."""
    from ...retrieval.build.options import BuildOptions
    from ...retrieval.build.training import Recipe

    recipe = Recipe.of(
        BuildOptions(format=fmt, coarse=coarse, pca=pca),
        (encoder.d_cls, encoder.dim),
        None,
        codebook=None,
    )
    stored = sum(schema.row_bytes for schema in recipe.tiers.values())
    return (
        f"while it builds it needs {recipe.spooled.row_bytes:,} bytes a token vector on disk "
        f"beside the store's {stored:,}"
    )


def run_build(args: argparse.Namespace) -> int:
    import warnings
    from dataclasses import asdict

    corpus = _corpus(args)  # what is wrong with it shows before anything takes time
    for directory in (args.store, *args.directory):
        check_given_directory(directory)
    options = {name: getattr(args, name) for name in _BUILD_OPTIONS} | {
        "directories": [os.path.abspath(directory) for directory in args.directory]
    }
    with ProgressLine() as progress, warnings.catch_warnings():
        with progress.loading(f"encoder {args.encoder}"):
            from ... import build, load_encoder
            from ...retrieval.build.options import BuildOptions
            from ...retrieval.build.place import check_place

            options["first_stages"] = first_stages_of(args)
            BuildOptions.given(**options)
            check_place(args.store, options["directories"], replace=args.replace)
            encoder = load_encoder(args.encoder, dtype=args.encoder_dtype)
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, *_: progress.say(str(message))
        progress.say(
            f"building {args.store} from {args.corpus}; "
            f"{_disk_need(args.format, args.coarse, args.pca, encoder)}"
        )
        report = build(
            args.store,
            corpus,
            encoder,
            **options,
            replace=args.replace,
            restart=args.restart,
            progress=progress.update,
        )
    emit(args, report.summary(), json_document("index build", report=asdict(report)))
    return 0


def configure_add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", help="directory of the store")
    _add_corpus_options(parser)
    parser.add_argument(
        "--encoder",
        default="auto",
        help="the one that the store was built with (default: as the store remembers)",
    )
    parser.add_argument(
        "--sparse-encoder",
        metavar="M",
        help="of splade, where it came out of a folder: that folder",
    )
    parser.add_argument(
        "--replace",
        action="store_true",
        help="documents whose ids are in the store take the others' places",
    )
    add_memory_option(parser)
    add_json_option(parser)


def run_add(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    corpus = _corpus(args)
    check_store(args.store)
    with ProgressLine() as progress:
        with progress.loading("PyTorch, and an encoder where one is wanted"):
            from ... import add
        report = add(
            args.store,
            corpus,
            args.encoder,
            sparse_encoder=args.sparse_encoder,
            replace=args.replace,
            memory=args.memory,
            progress=progress.update,
        )
    emit(args, report.summary(), json_document("index add", report=asdict(report)))
    return 0


def configure_delete(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", help="directory of the store")
    parser.add_argument("id", nargs="*", help="ids of documents")
    parser.add_argument("--ids", metavar="FILE", help="more of them, one a line")
    parser.add_argument("--int", action="store_true", help="the ids are numbers (default: text)")
    parser.add_argument(
        "--missing-ok", action="store_true", help="ids that the index does not hold are no error"
    )
    add_json_option(parser)


def run_delete(args: argparse.Namespace) -> int:
    from ... import delete

    words = list(args.id)
    if args.ids:
        try:
            with open(args.ids, encoding="utf-8") as file:
                words += [line.rstrip("\n") for line in file if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInputError(
                f"cannot read ids {args.ids}", got=str(error), expected="a readable text file"
            ) from error
    if not words:
        raise InvalidInputError(
            "espnx index delete", got="no ids", expected="ids after the store, or --ids FILE"
        )
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
    add_memory_option(parser)
    add_json_option(parser)


def run_compact(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from ... import compact

    with ProgressLine() as progress:
        report = compact(args.store, memory=args.memory, progress=progress.update)
    emit(args, report.summary(), json_document("index compact", report=asdict(report)))
    return 0


def configure_postings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", help="directory of the store")
    parser.add_argument(
        "--kind",
        default="bm25",
        choices=("bm25", "splade"),
        help="of the lists (default: %(default)s)",
    )
    add_text_options(parser)
    add_memory_option(parser)
    add_json_option(parser)


def add_text_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of first stages that look words up."""
    parser.add_argument(
        "--language",
        metavar="L",
        help="of bm25: a Snowball stemmer such as german, or none (default: english)",
    )
    parser.add_argument(
        "--sparse-encoder",
        metavar="M",
        help="of splade: splade-tiny, or the folder of a model (default: splade-tiny)",
    )


def run_postings(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    with ProgressLine() as progress:
        with progress.loading("PyTorch, and the model where one is wanted"):
            from ... import add_first_stage
        report = add_first_stage(
            args.store,
            args.kind,
            language=args.language,
            sparse_encoder=args.sparse_encoder,
            memory=args.memory,
            progress=progress.update,
        )
    text = (
        f"{report.summary()}\n{args.store} has posting lists now: espnx search {args.store} ... "
        f"--first-stage {args.kind}"
    )
    emit(args, text, json_document("index postings", report=asdict(report)))
    return 0


def configure_detach(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", help="directory of the store")
    parser.add_argument(
        "--directory",
        action="append",
        default=[],
        metavar="DIR",
        help="where the copies go (default: into the store)",
    )
    parser.add_argument(
        "--adopt",
        action="store_true",
        help="copy nothing: the original is gone, and its data are this store's now",
    )
    add_json_option(parser)


def run_detach(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from ... import detach

    report = detach(args.store, directories=args.directory, adopt=args.adopt)
    emit(args, report.summary(), json_document("index detach", report=asdict(report)))
    return 0


def configure_ls(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory",
        metavar="DIR",
        nargs="?",
        default=".",
        help="where indexes lie (default: the current one)",
    )
    add_json_option(parser)


def run_ls(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from ...retrieval.store.listing import entries

    found = entries(args.directory)
    headers = ("index", "documents", "token vectors", "size", "format", "encoder", "state")
    rows = [
        (
            each.path,
            f"{each.documents:,}",
            f"{each.tokens:,}",
            format_size(each.size_bytes),
            each.format,
            each.encoder,
            each.state,
        )
        if each.state == "published"
        else (each.path, None, None, None, None, None, each.state)
        for each in found
    ]
    text = (
        render_table(headers, rows, right=headers[1:4]) if rows else f"no index in {args.directory}"
    )
    emit(args, text, json_document("index ls", indexes=[asdict(each) for each in found]))
    return 0


def configure_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", help="directory of the store")
    add_json_option(parser)


def run_verify(args: argparse.Namespace) -> int:
    from ...retrieval.store.store import EmbeddingStore
    from ...storage import NativeEngine

    with (
        NativeEngine() as engine,
        EmbeddingStore(args.store, engine) as store,
        ProgressLine() as progress,
    ):
        count = store.verify(lambda done, total: progress.update("verify", done, total))
        document = json_document(
            "index verify",
            store=args.store,
            records=count,
            bytes_moved=engine.stats().bytes_moved,
            ok=True,
        )
    emit(args, f"{args.store}: {count:,} records and all metadata are intact", document)
    return 0


def configure_info(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", help="directory of the store")
    add_json_option(parser)


def run_info(args: argparse.Namespace) -> int:
    from ...retrieval.store.store import EmbeddingStore
    from ...storage import NativeEngine

    with NativeEngine() as engine, EmbeddingStore(args.store, engine) as store:
        manifest = store.manifest
        text = render_table(("", ""), store.facts())
        document = json_document(
            "index info",
            manifest=manifest.fields(),
            shared_homes=store.shared_homes,
            data_bytes=sum(segment.size_bytes for segment in store.segments),
            resident_bytes=store.resident_bytes,
            resident_bytes_per_document=store.resident_bytes / max(1, store.count),
            first_stage_bytes=store.first_stage_bytes,
            parts=len(store.parts),
            added_share=manifest.added_share,
            dead_share=manifest.dead_share,
            compacting_pays=manifest.compacting_pays,
            effective_path=store.effective_path,
        )
    emit(args, text, document)
    return 0
