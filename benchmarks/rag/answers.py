"""``--show answers``: passages of docstrings, some of them with a line to be recalled, asked for
through `espnx.Rag`: are answers those of memory, and does attention name the right source?"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import espnx
from espnx.errors import InvalidInputError
from espnx.integrations.transformers.passages.cache import PassageCache
from espnx.integrations.transformers.passages.passage_kv import PassageKV
from espnx.rag.answer import Answer
from espnx.rag.calibration import AttentionHeads, KnownSource, PlantedLine
from espnx.rag.markers import parse
from espnx.rag.pieces import IdCounter
from espnx.rag.prompt import Wording, fingerprint, quoted

from ..harness.registry import Say
from ..harness.result import Row
from ..kv.fleet import folder_in
from ..kv_quality.recall import HeldOut
from ..report.render import source_root
from .copied import copied_from
from .intervals import mean_interval, share_interval
from .memory import BlocksInMemory
from .options import Opened, Options

BLOCKS, MEMORY, FULL = "composed", "blocks-in-memory", "full"
PASSAGE_TOKENS, K = 128, 5
#: Of a passage's words: with the line and its quotation no more than so many tokens.
_SLICE_TOKENS = 60
_FIRST_STAGE = "bm25"
#: Exact answers from SSD may differ from memory's by a point.
_POINTS = 0.01
#: Of `Counted`.
_SHARES = (
    "named",
    "named_exact",
    "named_first",
    "from_one",
    "named_origin",
    "origin_first",
    "elsewhere",
    "named_elsewhere",
)
#: As the demo's model was trained to recall a line (docs/demo-model.md).
WORDING = Wording(instructions="", sources="", question="\n\nGET", answer=":")
LINE = PlantedLine("KEY {name}: {value}", " {name}", " {value}")


@dataclass(frozen=True)
class Asked:
    """A question. Attributes: name, value: of the line; passage: that has it."""

    name: str
    value: str
    passage: str


@dataclass
class Counted:
    """What a way to answer came to.

    Attributes:
        texts: the answers. exact: they begin with the line's value. retrieved: its passage stood
            in the prompt. named: of those that did beside others, whether it got more attention
            than any of them; none without attention. named_exact: the same of exact answers.
        from_one: of answers from several passages, where attention is known: their words come from
            one of these alone (`copied_from`). named_origin: of those that do, that one got more
            attention than any other.
        named_first, origin_first: `named` and `named_origin`, by the attention of the answer's
            first token alone.
        elsewhere: of those in `named`, their words come from another passage than the line's.
            named_elsewhere: of those that do, that other one got the most attention.
        sources: passages in each prompt.
        openable: all markers of the answer are numbers of its references, and each of these is a
            passage of the index whose text is still what the answer was made from.
        unknown: numbers of no source that the model wrote, which were taken out.
    """

    texts: list[str] = field(default_factory=list)
    exact: list[bool] = field(default_factory=list)
    retrieved: list[bool] = field(default_factory=list)
    named: list[bool] = field(default_factory=list)
    named_exact: list[bool] = field(default_factory=list)
    from_one: list[bool] = field(default_factory=list)
    named_origin: list[bool] = field(default_factory=list)
    named_first: list[bool] = field(default_factory=list)
    origin_first: list[bool] = field(default_factory=list)
    elsewhere: list[bool] = field(default_factory=list)
    named_elsewhere: list[bool] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    openable: list[bool] = field(default_factory=list)
    unknown: int = 0
    computed: int = 0
    bytes_read: int = 0


def show_answers(options: Options, opened: Opened, say: Say) -> list[Row]:
    """Three rows: composed from SSD, the same blocks in memory, and full attention."""
    if not (opened.folder / "held_out.safetensors").is_file():
        say(f"    answers are left out: {opened.name} was not trained to recall KEY lines")
        return []
    with folder_in(options.path) as folder:
        storage = Path(folder)
        documents, asked = _documents(options, opened)
        espnx.build(
            storage / "index", documents, espnx.load_encoder("minilm"), first_stages=(_FIRST_STAGE,)
        )
        say(f"    {len(documents):,} passages are encoded and indexed")
        with espnx.open(storage / "index") as index:
            return _measure(options, opened, index, documents, asked, storage / "kv", say)


def _measure(
    options: Options,
    opened: Opened,
    index: Any,
    documents: Sequence[tuple[str, str]],
    asked: Sequence[Asked],
    storage: Path,
    say: Say,
) -> list[Row]:
    model, tokenizer = opened.model, opened.tokenizer
    words: dict[str, Any] = {
        "wording": WORDING,
        "passage_tokens": PASSAGE_TOKENS,
        "generate_options": _ends_with_the_line(tokenizer),
        "max_new_tokens": max(
            len(tokenizer(each.value, add_special_tokens=False).input_ids) + 2 for each in asked
        ),
    }
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        full = enter(espnx.Rag(index, model, tokenizer, **words))
        before = _open_files()
        prefix = list(full.frame_ids)
        kv = enter(_Kept(model, storage, prefix=prefix, tokenizer=tokenizer))
        counter = IdCounter(tokenizer)
        for number, (_, text) in enumerate(documents):
            kv.add(counter.data(quoted(text)).cut(PASSAGE_TOKENS).ids)
            if number % 1000 == 999:
                say(f"    {number + 1:,} passages are kept")
        rags = {
            BLOCKS: enter(espnx.Rag(index, model, tokenizer, kv=kv, **words)),
            MEMORY: enter(
                espnx.Rag(index, model, tokenizer, kv=BlocksInMemory(model, prefix), **words)
            ),
            FULL: full,
        }
        heads = rags[BLOCKS].calibrate(
            count=8 if options.quick else 64, k=K, line=LINE, seed=options.seed + 1
        )
        say(
            f"    {len(heads.heads)} heads ({', '.join(f'{a}.{b}' for a, b in heads.heads)}) name "
            f"{heads.right:.0%} of the sources of other questions, the best layer "
            f"{max(heads.layer_right):.0%}, the mean of all {heads.mean_right:.0%}, chance is "
            f"{heads.chance:.0%}"
        )
        found = {name: Counted() for name in rags}
        for number, each in enumerate(asked, 1):
            for name, rag in rags.items():
                answer = rag.ask(each.name, k=K, search=_SEARCH)
                first = kv.first_token(answer) if name == BLOCKS else None
                _note(found[name], index, each, answer, first)
            if number % 50 == 0:
                say(f"    {number} of {len(asked)} questions")
        known = [KnownSource(each.name, each.passage, f" {each.value}") for each in asked]
        fed = [each for each in rags[BLOCKS].judge(known, k=K, search=_SEARCH) if each is not None]
        files = [name for name in os.listdir(storage) if name.endswith(".bin")]
        counts = {
            "data_files": float(len(files)),
            "descriptors": float(_open_files() - before),
            "library_bytes": float(kv.stats()["stored_bytes"]),
        }
    return _rows(options, opened, len(documents), found, heads, fed, counts, say)


def _ends_with_the_line(tokenizer: Any) -> dict[str, Any]:
    """Options of `generate`: a newline ends an answer, as it ends a line's value. What a model that
    was taught so writes behind it answers nothing, and looks anywhere."""
    ends = [
        number for number in range(len(tokenizer)) if tokenizer.decode([number]).startswith("\n")
    ]
    return {"eos_token_id": [tokenizer.eos_token_id, *ends], "pad_token_id": tokenizer.eos_token_id}


#: The best by words, whose order MaxSim makes.
_SEARCH: Any = {"first_stage": _FIRST_STAGE, "candidates": K}


def _open_files() -> int:
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def _documents(options: Options, opened: Opened) -> tuple[list[tuple[str, str]], list[Asked]]:
    """Passages, and the questions about those with a line. Raises InvalidInputError where this
    machine has too few docstrings."""
    known = HeldOut.load(opened.folder)
    rng = np.random.default_rng(options.seed)
    words = ["".join(opened.tokenizer.decode(ids)).strip() for ids in known.words]
    if options.answers > len(words) or options.passages < options.answers:
        raise InvalidInputError(
            "--questions",
            got=options.answers,
            expected=f"at most --passages and the {len(words)} words of {opened.name}",
        )
    made = list(itertools.islice(_docstrings(), options.passages))
    if len(made) < options.passages:
        raise InvalidInputError(
            "--passages", got=options.passages, expected=f"at most {len(made)} docstrings here"
        )
    asked, counter = list[Asked](), IdCounter(opened.tokenizer)
    places = iter(rng.permutation(len(made)).tolist())
    for name in rng.permutation(words)[: options.answers].tolist():
        others = rng.permutation([word for word in words if word != name])[:3]
        value = " ".join(others.tolist())
        for place in places:
            identifier, text = made[place]
            lines = text.splitlines()
            lines.insert(int(rng.integers(len(lines) + 1)), f"KEY {name}: {value}")
            text = "\n".join(lines)
            # what a prompt cuts off nobody can recall
            if counter.data(quoted(text)).size <= PASSAGE_TOKENS:
                made[place] = identifier, text
                asked.append(Asked(f" {name}", value, identifier))
                break
    if len(asked) < options.answers:
        raise InvalidInputError(
            "--questions",
            got=options.answers,
            expected=f"at most {len(asked)}, as many passages have room for a line",
        )
    return made, asked


def _docstrings() -> Iterator[tuple[str, str]]:
    """Passages of the installed libraries' documentation, by scripts/docstrings.py."""
    import importlib.util

    path = source_root() / "scripts" / "docstrings.py"
    spec = importlib.util.spec_from_file_location("docstrings", path)
    if spec is None or spec.loader is None:
        raise InvalidInputError("docstrings", got=str(path), expected="a clone of espnx")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for document in module.documents(slice_tokens=_SLICE_TOKENS):
        yield str(document.get("_id", document.get("id"))), document["text"]


class _Kept(PassageKV):
    """Knows the last cache that was composed, whose attention outlives it."""

    _last: PassageCache

    def compose(self, passages: Any, **options: Any) -> PassageCache:
        self._last = super().compose(passages, **options)
        return self._last

    def first_token(self, answer: Answer) -> list[float]:
        """The share of attention that each reference got from the answer's first token, by the
        heads that `Reference.attention` is of; none without references."""
        if not answer.references:
            return []
        cache = self._last
        begin = answer.prompt_tokens - cache.composed_tokens - 1  # it comes of the prompt's last
        if answer.attention_heads:
            mass = cache.head_mass(begin, begin + 1)[0].mean(dim=(0, 1))
        else:
            mass = cache.passage_mass(begin, begin + 1)[0].mean(dim=0)
        return [float(each) for each in mass[1::2]]  # labels are passages, too


def _note(
    to: Counted, index: Any, asked: Asked, answer: Answer, first: Sequence[float] | None = None
) -> None:
    """`first`: see `_Kept.first_token`; None: not known."""
    to.texts.append(answer.text)
    to.exact.append(answer.text.split()[: len(asked.value.split())] == asked.value.split())
    shares = {each.passage: each.attention for each in answer.references}
    to.retrieved.append(asked.passage in shares)
    to.sources.append(len(shares))
    if len(shares) > 1 and None not in shares.values():
        _note_attention(to, asked, answer, first or [0.0] * len(shares))
    texts = index.get([each.passage for each in answer.references])
    to.openable.append(
        not parse(answer.text, len(answer.references)).unknown
        and all(
            text is not None
            and fingerprint(text) == each.fingerprint
            and (each.is_cut or each.text == text)
            for each, text in zip(answer.references, texts, strict=True)
        )
    )
    to.unknown += len(answer.unknown_references)
    to.computed += int((answer.reused or {}).get("computed", 0))
    to.bytes_read += int((answer.reused or {}).get("bytes", 0))


def _note_attention(to: Counted, asked: Asked, answer: Answer, first: Sequence[float]) -> None:
    """Whether the passage that got the most attention is the question's, and the answer's."""
    references = answer.references
    most = max(references, key=lambda each: each.attention or 0.0).passage
    most_first = references[max(range(len(first)), key=lambda at: first[at])].passage
    at = copied_from(answer.text, asked.name, [each.text for each in references])
    origin = None if at is None else references[at].passage
    to.from_one.append(origin is not None)
    if origin is not None:
        to.named_origin.append(most == origin)
        to.origin_first.append(most_first == origin)
    if all(each.passage != asked.passage for each in references):
        return
    to.named.append(most == asked.passage)
    to.named_first.append(most_first == asked.passage)
    if to.exact[-1]:
        to.named_exact.append(to.named[-1])
    to.elsewhere.append(origin not in (None, asked.passage))
    if to.elsewhere[-1]:
        to.named_elsewhere.append(most == origin)


def _rows(
    options: Options,
    opened: Opened,
    passages: int,
    all_found: dict[str, Counted],
    heads: AttentionHeads,
    fed: Sequence[bool],
    counts: dict[str, float],
    say: Say,
) -> list[Row]:
    params = {
        "show": "answers",
        "model": opened.name,
        "dtype": "fp32",
        "passages": passages,
        "questions": options.answers,
        "k": K,
        "passage_tokens": PASSAGE_TOKENS,
    }
    rows = list[Row]()
    for name, found in all_found.items():
        n = len(found.exact)
        metrics = {"exact": sum(found.exact) / n}
        metrics["exact_low"], metrics["exact_high"] = share_interval(sum(found.exact), n)
        metrics["retrieved"] = sum(found.retrieved) / n
        metrics["sources"] = sum(found.sources) / n
        metrics["openable"] = sum(found.openable) / n
        metrics["unknown_markers"] = float(found.unknown)
        if name != FULL:
            less = np.subtract(all_found[FULL].exact, found.exact, dtype=np.float64)
            metrics["exact_below_full"] = float(less.mean())
            low, high = mean_interval(less)
            metrics |= {"exact_below_full_low": low, "exact_below_full_high": high}
        memory = all_found[MEMORY]
        same = sum(a == b for a, b in zip(found.texts, memory.texts, strict=True))
        metrics["same_as_in_memory"] = same / n
        correct = True
        if name == BLOCKS:
            ways: dict[str, Sequence[bool]] = {"named_fed": fed} | {
                key: getattr(found, key) for key in _SHARES
            }
            for key, named in ways.items():
                metrics[key] = sum(named) / max(len(named), 1)
                low, high = share_interval(sum(named), len(named))
                metrics |= {f"{key}_low": low, f"{key}_high": high}
            metrics |= {
                "heads": float(len(heads.heads)),
                "calibrated_right": heads.right,
                "calibrated_layer_right": max(heads.layer_right),
                "calibrated_mean_right": heads.mean_right,
                "read_bytes": found.bytes_read / n,
                "computed_tokens": float(found.computed),
                **counts,
            }
            apart = abs(sum(memory.exact) / n - metrics["exact"])
            correct = apart <= _POINTS and metrics["openable"] == 1
        rows.append(
            Row(
                case="rag",
                params=params,
                system=name,
                kind="measured",
                requested_path="auto" if name == BLOCKS else "memory",
                effective_path="auto" if name == BLOCKS else "memory",
                cache="warm",
                n=0,  # counted, not timed
                median_s=None,
                p99_s=None,
                iqr_s=None,
                bytes_asked=found.bytes_read // n,
                bytes_moved=found.bytes_read // n,
                correct=correct,
                metrics=metrics,
            )
        )
        more = (
            f", right reference {metrics['named']:.1%}, of exact answers "
            f"{metrics['named_exact']:.1%}, with the right answer fed {metrics['named_fed']:.1%}, "
            f"the one with its words {metrics['named_origin']:.1%}"
            if "named" in metrics
            else ""
        )
        say(f"    {name}: exact {metrics['exact']:.1%}{more}")
    return rows
