"""``espnx rag``: an answer from an index, with its sources; and which heads' attention names
them."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from ...errors import InvalidInputError
from ...models import model_folder
from ...suggestions import downloading
from ...tables import render_table
from ..output import add_json_option, emit, json_document
from ..progress import ProgressLine
from .search import add_index_options, add_search_options, check_store, open_index, search_options

if TYPE_CHECKING:
    from ...rag.rag import Rag


def configure_ask(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("store", help="directory of the index")
    add("question", help="one argument")
    _add_model(parser)
    add(
        "--kv",
        metavar="DIR",
        help="where K and V of passages are kept and read from (default: they are computed)",
    )
    add("--library", metavar="SIZE", help="beside --kv: the most that is kept there")
    add(
        "-k",
        type=int,
        default=5,
        help="passages; 0: the model answers by itself (default: %(default)s)",
    )
    add("--prefix", default="", metavar="TEXT", help="the system prompt (default: none)")
    add(
        "--max-new-tokens",
        type=int,
        default=256,
        metavar="N",
        help="of the answer (default: %(default)s)",
    )
    add(
        "--prompt-tokens",
        type=int,
        metavar="N",
        help="of the prompt, at most (default: what the model's positions leave)",
    )
    _add_passage_tokens(parser)
    _add_lossy(parser)
    add(
        "--attention-heads",
        metavar="L.H,...",
        help="beside --kv: whose attention is shown: layer and head, from 0, such as 3.1,5.0; "
        "mean; or calibrated (default: those of `espnx rag calibrate` where it has chosen some, "
        "else the mean of all)",
    )
    add(
        "--deadline",
        type=float,
        metavar="S",
        help="seconds for the answer, the model loaded (default: none)",
    )
    add_search_options(parser)
    add_index_options(parser)
    add_json_option(parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        required=True,
        metavar="DIR",
        help="folder of a Hugging Face model with its tokenizer; demo: the small one of espnx",
    )


def _add_passage_tokens(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--passage-tokens",
        type=int,
        default=512,
        metavar="N",
        help="of each passage; longer ones are cut (default: %(default)s)",
    )


def _add_lossy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--repair",
        type=int,
        metavar="N",
        help="beside --kv: the first N tokens of each passage are computed anew at their place",
    )
    parser.add_argument(
        "--blend",
        type=float,
        metavar="SHARE",
        help="beside --kv: so is this share of the passages' tokens, those that differ most from "
        "full attention (0 to 1)",
    )


def configure_calibrate(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("store", help="directory of the index, in whose passages lines are planted")
    _add_model(parser)
    add("--kv", required=True, metavar="DIR", help="of `rag ask`; the heads are kept there")
    add(
        "--count",
        type=int,
        default=64,
        metavar="N",
        help="questions, of which half choose and half judge (default: %(default)s)",
    )
    add("-k", type=int, default=5, help="passages in each prompt (default: %(default)s)")
    for name, what in (("line", "a planted line"), ("question", "its question")):
        add(f"--{name}", metavar="TEXT", help=f"{what}, with {{name}} in it (default: English)")
    add("--answer", metavar="TEXT", help="what the model is made to say, with {value} in it")
    add("--seed", type=int, default=0, metavar="N", help="of what is made up (default: 0)")
    _add_passage_tokens(parser)
    _add_lossy(parser)
    add_index_options(parser)
    add_json_option(parser)


@contextmanager
def _opened(args: argparse.Namespace, **options: object) -> Iterator[Rag]:
    """The index of a command with its model. Raises InvalidInputError."""
    check_store(args.store)
    folder = model_folder(args.model)
    if not os.path.exists(folder):  # before seconds of imports
        raise InvalidInputError(
            f"model in {folder}",
            got="no such folder",
            expected="a folder with model and tokenizer, or a GGUF file",
            fix=downloading(folder),
        )
    with ProgressLine(is_terse=True) as progress, open_index(args, progress) as index:
        with progress.loading(f"model {folder}"):
            from ...integrations.generate.model_folder import load_model
            from ...rag.rag import Rag

            model, tokenizer = load_model(folder, None, None)
            rag = Rag(
                index,
                model,
                tokenizer,
                kv=args.kv,
                passage_tokens=args.passage_tokens,
                repair=args.repair,
                blend=args.blend,
                **options,  # type: ignore[arg-type]
            )
        with rag:
            yield rag


def run_ask(args: argparse.Namespace) -> int:
    for name in ("library", "repair", "blend", "attention_heads"):
        if getattr(args, name) is not None and args.kv is None:
            option = f"--{name.replace('_', '-')}"
            raise InvalidInputError(option, got="no --kv", expected="both", fix="--kv DIR")
    with _opened(
        args,
        prefix=args.prefix,
        max_new_tokens=args.max_new_tokens,
        prompt_tokens=args.prompt_tokens,
        library_bytes=args.library,
        attention_heads=_heads(args.attention_heads),
    ) as rag:
        answer = rag.ask(
            args.question,
            args.k,
            search=search_options(args),  # type: ignore[arg-type]
            deadline_s=args.deadline,
        )
    found = asdict(answer)
    emit(args, answer.summary(), json_document("rag ask", store=args.store, **found))
    return 0


def _heads(said: str | None) -> str | list[tuple[int, int]] | None:
    """``3.1,5.0`` -> [(3, 1), (5, 0)]; words stay. Raises InvalidInputError."""
    if said is None or said in ("mean", "calibrated"):
        return said
    found = [re.fullmatch(r"(\d+)\.(\d+)", each.strip()) for each in said.split(",")]
    if None in found:
        raise InvalidInputError(
            "--attention-heads",
            got=repr(said),
            expected="layer and head, such as 3.1,5.0; mean; or calibrated",
        )
    return [(int(each[1]), int(each[2])) for each in found if each]


def run_calibrate(args: argparse.Namespace) -> int:
    from ...rag.calibration import PlantedLine

    given = {name: getattr(args, name) for name in ("line", "question", "answer")}
    line = PlantedLine(**{name: text for name, text in given.items() if text is not None})
    # heads that were kept before, of whatever version, are replaced
    with _opened(args, max_new_tokens=16, attention_heads="mean") as rag:
        found = rag.calibrate(count=args.count, k=args.k, line=line, seed=args.seed)
    chosen = ", ".join(f"{layer}.{head}" for layer, head in found.heads)
    rows = [
        (f"heads {chosen} *", f"{found.right:.0%}"),
        *((f"layer {number}", f"{right:.0%}") for number, right in enumerate(found.layer_right)),
        ("mean of all", f"{found.mean_right:.0%}"),
        ("by chance", f"{found.chance:.0%}"),
    ]
    said = f"* chosen by half of {found.questions} questions, and kept in {args.kv}"
    heads = ("attention of", "names the source")
    text = f"{render_table(heads, rows, right=heads[1:])}\n{said}"
    emit(args, text, json_document("rag calibrate", store=args.store, kv=args.kv, **asdict(found)))
    return 0
