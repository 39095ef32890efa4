"""``espnx rag ask``: an answer from an index, with its sources."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict

from ...errors import InvalidInputError
from ...models import model_folder
from ...suggestions import downloading
from ..output import add_json_option, emit, json_document
from ..progress import ProgressLine
from .search import add_index_options, add_search_options, check_store, open_index, search_options


def configure_ask(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("store", help="directory of the index")
    add("question", help="one argument")
    add(
        "--model",
        required=True,
        metavar="DIR",
        help="folder of a Hugging Face model with its tokenizer; demo: the small one of espnx",
    )
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
    add(
        "--passage-tokens",
        type=int,
        default=512,
        metavar="N",
        help="of each passage; longer ones are cut (default: %(default)s)",
    )
    add(
        "--attention-layer",
        type=int,
        metavar="L",
        help="beside --kv: whose attention is shown (default: the mean of all)",
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


def run_ask(args: argparse.Namespace) -> int:
    check_store(args.store)
    folder = model_folder(args.model)
    if not os.path.exists(folder):  # before seconds of imports
        raise InvalidInputError(
            f"model in {folder}",
            got="no such folder",
            expected="a folder with model and tokenizer, or a GGUF file",
            fix=downloading(folder),
        )
    if args.library is not None and args.kv is None:
        raise InvalidInputError("--library", got="no --kv", expected="both", fix="--kv DIR")
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
                prefix=args.prefix,
                max_new_tokens=args.max_new_tokens,
                prompt_tokens=args.prompt_tokens,
                passage_tokens=args.passage_tokens,
                library_bytes=args.library,
                attention_layer=args.attention_layer,
            )
        with rag:
            answer = rag.ask(
                args.question,
                args.k,
                search=search_options(args),  # type: ignore[arg-type]
                deadline_s=args.deadline,
            )
    found = asdict(answer)
    emit(args, answer.summary(), json_document("rag ask", store=args.store, **found))
    return 0
