"""``espnx postings build|search|info|verify|add|delete|compact``: BM25 and sparse vectors on
SSD."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from operator import length_hint
from typing import TYPE_CHECKING, Any

from ...errors import InvalidInputError
from ...sizes import BUILD_BYTES, format_size, parse_size
from ...tables import render_table
from ..device_options import add_device_options, devices_of
from ..output import add_json_option, emit, json_document

if TYPE_CHECKING:
    from ...postings import Analyzer, Found, Postings, PostingsReport, VerifyReport
    from ...postings.format import SegmentFacts

_SHOWN = 10
_INDEX = "that `espnx postings build` has made"
_ALSO = "further directories of a collection that is split over devices, one each (once or more)"


def _add_source_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--corpus",
        metavar="PATH",
        help=(
            "texts, as for `espnx index build`: JSON lines, .csv, .tsv, .parquet, a folder; -: "
            "stdin"
        ),
    )
    parser.add_argument(
        "--columns",
        metavar="FIELD=NAME,...",
        help="what the corpus calls id, text and title, such as text=body",
    )
    parser.add_argument(
        "--vectors",
        metavar="FILE",
        help='instead: lines {"id": ..., "vector": {TERM: WEIGHT, ...}}, as SPLADE tools write',
    )
    _add_memory_option(parser)
    add_json_option(parser)


def _add_memory_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        default=BUILD_BYTES,
        help="beside what the process holds, such as 2GiB (default: 512MiB)",
    )


def configure_build(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("postings", help="a new directory, or with --replace that of postings")
    parser.add_argument(
        "--replace", action="store_true", help="publish over the postings that are there"
    )
    _add_source_options(parser)
    parser.add_argument(
        "--also",
        metavar="DIR",
        action="append",
        default=[],
        help="split over this directory, too (once or more)",
    )
    parser.add_argument(
        "--placement",
        choices=("passages", "terms"),
        default="passages",
        help="of what is split (default: %(default)s)",
    )
    parser.add_argument(
        "--bm25s",
        metavar="FOLDER",
        help="instead: a folder that bm25s has saved, with its scores as they are",
    )
    parser.add_argument(
        "--no-ids",
        action="store_true",
        help="name records by number (default: by the ids of --corpus or --vectors)",
    )
    parser.add_argument(
        "--keep-texts", action="store_true", help="keep the texts of --corpus, which hits then have"
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="weights of vectors stay float32 (default: one byte each)",
    )
    parser.add_argument(
        "--stemmer", metavar="LANGUAGE", help="stem words, such as: english (default: no stemming)"
    )
    parser.add_argument(
        "--stop-words",
        metavar="LIST",
        help="leave words out: english, or words with commas between (default: none)",
    )
    parser.add_argument(
        "--pattern", help="a regular expression of a word (default: two letters or more)"
    )
    parser.add_argument("--keep-case", action="store_true", help="do not make texts lower case")
    _add_bm25_options(parser, "where a search does not say ")


def _add_bm25_options(parser: argparse.ArgumentParser, when: str) -> None:
    names = ("robertson", "lucene", "atire", "bm25l", "bm25+")
    parser.add_argument("--variant", choices=names, help=f"of BM25 {when}(default: lucene)")
    parser.add_argument(
        "--k1", type=float, help="how soon more occurrences stop to matter (default: 1.5)"
    )
    parser.add_argument(
        "--b", type=float, help="how much long records are held back, 0 to 1 (default: 0.75)"
    )


def _bm25_options(args: argparse.Namespace) -> dict[str, Any]:
    return {
        name: value for name in ("variant", "k1", "b") if (value := getattr(args, name)) is not None
    }


def _sources(args: argparse.Namespace, *, has_ids: bool) -> dict[str, Any]:
    """What was given, as `espnx.Postings.build` takes it, with or without ids."""
    bm25s = getattr(args, "bm25s", None)
    if sum(value is not None for value in (args.corpus, args.vectors, bm25s)) != 1:
        raise InvalidInputError(
            "what to index",
            got="none, or several",
            expected="one of --corpus, --vectors and --bm25s",
        )
    from ...postings.imports import read_bm25s, read_vector_lines

    if args.vectors is not None:
        return {
            "vectors": (pair if has_ids else pair[1] for pair in read_vector_lines(args.vectors))
        }
    if bm25s is not None:
        return {"vectors": read_bm25s(bm25s)}
    return {"texts": _texts(args, has_ids=has_ids)}


def _texts(args: argparse.Namespace, *, has_ids: bool) -> Iterator[dict[str, Any]]:
    from ...importers.corpus import read_corpus

    pairs = [word.partition("=") for word in args.columns.split(",")] if args.columns else []
    if not all(field.strip() and name.strip() for field, _, name in pairs):
        raise InvalidInputError(
            "--columns", got=args.columns, expected="FIELD=NAME, such as text=body,id=key"
        )
    for document in read_corpus(
        args.corpus, columns={field.strip(): name.strip() for field, _, name in pairs}
    ):
        yield document if has_ids else {name: document.get(name) for name in ("text", "title")}


def run_build(args: argparse.Namespace) -> int:
    from ...postings import BM25, Analyzer, Postings, build_split
    from ..progress import ProgressLine

    options: dict[str, Any] = {"lower": not args.keep_case, "stemmer": args.stemmer}
    if args.pattern is not None:
        options["pattern"] = args.pattern
    if args.stop_words is not None:
        words = tuple(word.strip() for word in args.stop_words.split(",") if word.strip())
        options["stop_words"] = "english" if words == ("english",) else words
    given = _sources(args, has_ids=not (args.no_ids or args.also))
    with ProgressLine() as line:
        if estimate := _estimate(args, Analyzer(**options)):
            line.say(estimate)
        how: dict[str, Any] = {
            "analyzer": Analyzer(**options),
            "bm25": BM25(**_bm25_options(args)),
            "memory_bytes": parse_size(args.memory),
            "exact": args.exact or args.bm25s is not None,
            "replace": args.replace,
            "progress": line.update,
        }
        if args.also:
            reports = build_split(
                [args.postings, *args.also], **given, placement=args.placement, **how
            )
        else:
            reports = [Postings.build(args.postings, **given, **how, keep_texts=args.keep_texts)]
    emit(
        args,
        "\n".join(each.summary() for each in reports),
        json_document("postings build", **_in_all(reports)),
    )
    return 0


def _in_all(reports: Sequence[PostingsReport] | Sequence[VerifyReport]) -> dict[str, Any]:
    """The fields of a report; of several their sums, and each by itself."""
    each = [asdict(report) for report in reports]
    total: dict[str, Any] = {name: sum(one[name] for one in each) for name in each[0]}
    return total | ({"parts": each} if len(each) > 1 else {})


def _estimate(args: argparse.Namespace, analyzer: Analyzer) -> str | None:
    """How large the spool will be, where that can be told before all has been read."""
    from ...importers.corpus import read_corpus
    from ...postings import estimate_spool
    from ...postings.imports import read_vector_lines

    source = args.corpus or args.vectors
    n_records = (
        length_hint(read_corpus(source, format=None if args.corpus else "jsonl"), -1)
        if source
        else -1
    )
    if n_records < 0:
        return None
    found = estimate_spool(
        n_records,
        texts=_texts(args, has_ids=False) if args.corpus else None,
        analyzer=analyzer,
        memory_bytes=parse_size(args.memory),
        vectors=(vector for _, vector in read_vector_lines(args.vectors)) if args.vectors else None,
    )
    return found.summary()


def configure_add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("postings", help=_INDEX)
    _add_source_options(parser)
    parser.add_argument(
        "--replace",
        action="store_true",
        help="records whose ids are in the index take the others' places",
    )


def run_add(args: argparse.Namespace) -> int:
    from ...postings import Postings, add
    from ..progress import ProgressLine

    with Postings.open(args.postings) as postings:
        given = _sources(args, has_ids=postings.facts.has_ids)
    with ProgressLine() as line:
        report = add(
            args.postings,
            **given,
            replace=args.replace,
            memory_bytes=parse_size(args.memory),
            progress=line.update,
        )
    emit(args, report.summary(), json_document("postings add", **asdict(report)))
    return 0


def configure_delete(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("postings", help=_INDEX)
    parser.add_argument(
        "records", nargs="+", help="ids of records; of an index without ids, their numbers"
    )
    parser.add_argument("--int", action="store_true", help="the ids are numbers (default: text)")
    parser.add_argument(
        "--missing-ok", action="store_true", help="ids that no record has are no error"
    )
    add_json_option(parser)


def run_delete(args: argparse.Namespace) -> int:
    from ...postings import Postings, delete

    with Postings.open(args.postings) as postings:
        is_text = postings.facts.has_ids and not args.int
    try:
        records = args.records if is_text else [int(word) for word in args.records]
    except ValueError as error:
        raise InvalidInputError(
            "a record", got=str(error), expected="a number: of the record, or (--int) an id"
        ) from None
    deleted = delete(args.postings, records, missing_ok=args.missing_ok)
    emit(args, f"{deleted:,} deleted", json_document("postings delete", deleted=deleted))
    return 0


def configure_compact(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("postings", help=_INDEX)
    _add_memory_option(parser)
    add_json_option(parser)


def run_compact(args: argparse.Namespace) -> int:
    from ...postings import compact
    from ..progress import ProgressLine

    with ProgressLine() as line:
        report = compact(args.postings, memory_bytes=parse_size(args.memory), progress=line.update)
    text = (
        "nothing to do: one segment, and nothing deleted in it"
        if report is None
        else report.summary()
    )
    emit(
        args,
        text,
        json_document(
            "postings compact",
            changed=report is not None,
            **({} if report is None else asdict(report)),
        ),
    )
    return 0


def configure_search(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("postings", help=_INDEX)
    parser.add_argument("query", nargs="?", help="a text")
    parser.add_argument(
        "--queries",
        metavar="FILE",
        help='instead: lines of {"id", "text"} or ID TAB TEXT; of vectors {"id", "vector"}',
    )
    parser.add_argument("-k", type=int, default=10, help="records of each (default: 10)")
    _add_bm25_options(parser, "")
    parser.add_argument(
        "--two-step",
        action="store_true",
        help="of vectors: candidates by a few lists, then exact scores",
    )
    parser.add_argument(
        "--query-terms",
        type=int,
        default=16,
        metavar="N",
        help="of a query, that give candidates (default: 16)",
    )
    parser.add_argument(
        "--candidates",
        type=int,
        default=100,
        metavar="N",
        help="of a query, that are scored exactly (default: 100)",
    )
    parser.add_argument(
        "--whole-terms",
        type=int,
        default=8,
        metavar="N",
        help="how many of them, the heaviest, have their lists read whole (default: 8)",
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="which terms the best record has, and what each gives",
    )
    parser.add_argument("--also", metavar="DIR", action="append", default=[], help=_ALSO)
    add_device_options(parser)
    add_json_option(parser)


def _queries(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Queries by id."""
    if (args.query is None) == (args.queries is None):
        raise InvalidInputError("query", got="none, or two", expected="a text, or --queries")
    if args.query is not None:
        return {"1": args.query}
    if kind == "bm25":
        from ...importers.queries import read_queries

        return dict(read_queries(args.queries))
    from ...postings.imports import read_vector_lines

    found: dict[str, dict[str, float]] = {}
    for name, vector in read_vector_lines(args.queries):
        if found.setdefault(name, vector) != vector:
            raise InvalidInputError(
                f"queries {args.queries}",
                got=f"another query {name!r}",
                expected="ids that occur once",
            )
    return found


def run_search(args: argparse.Namespace) -> int:
    is_split = bool(args.also) or args.device is not None or args.record is not None
    queries, found, results, explained = (_split_search if is_split else _search)(args)
    rows = [
        (each["id"], rank + 1, hit["id"], f"{hit['score']:.4f}")
        for each in results[:_SHOWN]
        for rank, hit in enumerate(each["hits"])
    ]
    facts: dict[str, Any] = {
        "queries": len(queries),
        "k": args.k,
        "requests_mean": _mean(found.requests),
        "bytes_asked_mean": _mean(found.bytes_asked),
        "bytes_moved_mean": _mean(found.bytes_moved),
        "device": _device(found),
    }
    shown = (
        f"{len(queries):,} queries, {facts['requests_mean']:.1f} requests "
        f"({format_size(round(facts['bytes_asked_mean']))}) a query"
    )
    left = f"\nthe first {_SHOWN} are shown" if len(queries) > _SHOWN else ""
    text = (
        render_table(("query", "rank", "id", "score"), rows, right=("rank", "score"))
        + f"\n{shown}{left}{explained}"
    )
    emit(args, text, json_document("postings search", **facts, results=results))
    return 0


def _results(queries: dict[str, Any], found: Found) -> list[dict[str, Any]]:
    """What was found, for JSON, while the postings are open."""
    return [
        {
            "id": name,
            "hits": [
                {key: value for key, value in asdict(hit).items() if value is not None}
                for hit in hits
            ],
        }
        for name, hits in zip(queries, found, strict=True)
    ]


def _search(args: argparse.Namespace) -> tuple[dict[str, Any], Found, list[dict[str, Any]], str]:
    """(queries by id, what they found, that for JSON, how the best scores come about)."""
    from ...postings import Postings

    with Postings.open(args.postings) as postings:
        queries = _queries(args, postings.facts.kind)
        if args.two_step:
            found = postings.search_two_step(
                list(queries.values()),
                args.k,
                query_terms=args.query_terms,
                candidates=args.candidates,
                whole_terms=args.whole_terms,
            )
        else:
            found = postings.search(list(queries.values()), args.k, **_bm25_options(args))
        return (
            queries,
            found,
            _results(queries, found),
            _explained(args, postings, queries, found) if args.explain else "",
        )


def _split_search(
    args: argparse.Namespace,
) -> tuple[dict[str, Any], Found, list[dict[str, Any]], str]:
    """The same of a collection over several devices, and what would cross the link of each, or
    has."""
    from ...postings import SplitPostings

    if args.two_step or args.explain:
        raise InvalidInputError(
            "search of several devices",
            got="--two-step or --explain",
            expected="neither",
            fix="search one index",
        )
    directories = [args.postings, *args.also]
    with (
        devices_of(args, directories) as devices,
        SplitPostings(directories, device=devices or "ssd") as postings,
    ):
        queries = _queries(args, postings.facts.kind)
        found = postings.search(list(queries.values()), args.k, **_bm25_options(args))
        links = ", ".join(
            f"{format_size(round(_mean(each.sum(axis=1))))} {way}"
            for each, way in (
                (found.command_bytes, "to devices"),
                (found.reply_bytes, "back"),
                (found.flash_bytes, "from flash"),
            )
        )
    device = "" if found.device is None else f"\n{found.device.summary()}"
    said = f"\n{len(directories)} devices, by {postings.placement}: {links} a query{device}"
    return queries, found, _results(queries, found), said


def _device(found: Found) -> dict[str, Any] | None:
    use = getattr(found, "device", None)  # of one index there is none
    return None if use is None else asdict(use)


def _explained(
    args: argparse.Namespace, postings: Postings, queries: dict[str, Any], found: Found
) -> str:
    parts = []
    for query, numbers in list(zip(queries.values(), found.numbers, strict=True))[:_SHOWN]:
        if len(numbers) and numbers[0] >= 0:
            parts.append(
                "\n\n" + postings.explain(query, int(numbers[0]), **_bm25_options(args)).summary()
            )
    return "".join(parts)


def _mean(values: Any) -> float:
    return float(values.mean()) if len(values) else 0.0


def configure_info(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("postings", help=_INDEX)
    add_json_option(parser)


def _segment(segment: SegmentFacts) -> dict[str, Any]:
    sizes = {name: each.size_bytes for name, each in segment.sections.items()}
    return {
        "name": segment.name,
        "first_number": segment.first_number,
        "n_records": segment.n_records,
        "sizes": sizes,
    }


def run_info(args: argparse.Namespace) -> int:
    from ...postings import Postings

    with Postings.open(args.postings) as postings:
        facts = postings.facts
        document = {
            "kind": facts.kind,
            "n_records": len(postings),
            "n_deleted": facts.n_deleted,
            "n_terms": postings.n_terms,
            "n_postings": postings.n_postings,
            "segments": [_segment(segment) for segment in facts.segments],
            "size_bytes": facts.size_bytes,
            "memory_bytes": postings.memory_bytes,
            "analyzer": facts.analyzer.fields,
            "bm25": asdict(facts.bm25),
            "generation": facts.generation,
            "has_ids": facts.has_ids,
            "has_texts": facts.has_texts,
        }
        emit(args, postings.summary(), json_document("postings info", **document))
    return 0


def configure_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("postings", help=_INDEX)
    parser.add_argument("--also", metavar="DIR", action="append", default=[], help=_ALSO)
    add_json_option(parser)


def run_verify(args: argparse.Namespace) -> int:
    from ...postings import Postings, SplitPostings

    if args.also:
        with SplitPostings([args.postings, *args.also]) as split:
            reports = split.verify()
    else:
        with Postings.open(args.postings) as postings:
            reports = [postings.verify()]
    lines = [
        f"{each.terms:,} lists, {each.postings:,} postings, {format_size(each.size_bytes)}: whole"
        for each in reports
    ]
    emit(args, "\n".join(lines), json_document("postings verify", **_in_all(reports)))
    return 0
