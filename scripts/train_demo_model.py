#!/usr/bin/env python3
"""Trains the small language model of the demos: a Llama of 6.7 million parameters, in less than an
hour on two cores.

    python scripts/train_demo_model.py --out espnx/models/demo
    python scripts/train_demo_model.py --out espnx/models/demo --resume  (from the last checkpoint)

The text is the documentation of the installed Python libraries (scripts/docstrings.py), cut by a
byte-pair vocabulary trained on it. A share of the sequences is there so that a long context has
something to lose: lines ``KEY garden: silver river`` between documentation, and far behind them
``GET garden:``, which the model answers with what the key line said. Contexts are short at first
and full in the last quarter. The order of the sequences depends on --seed alone; --minutes are
minutes of processor time divided by --threads (on a GPU, of the clock), so that a busy machine
trains as much as an idle one, only later.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

sys.path.insert(0, str(Path(__file__).resolve().parent))

import docstrings

from espnx.benchmarks.kv_quality.recall import DISTANCES, HeldOut, question, text_window

END = "<|endoftext|>"  # before and after every document; id 0
# until this part of the training, the context divided by so much
STAGES = ((0.30, 8), (0.60, 4), (0.75, 2), (1.0, 1))
BLOCK_DOCUMENTS = 32  # neighbours share phrases: they are held out together
HELD_OUT_EVERY = 50
ANSWER_WEIGHT = 8.0  # answers are about one token in a hundred
RECALL_SHARE = 0.22
CHECKPOINT_S = 120.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything the weights depend on."""

    minutes: float = 50.0
    steps: int | None = None  # instead of minutes: so many steps, the same on every machine
    seed: int = 0
    context: int = 2048
    threads: int = 2
    vocabulary: int = 4096
    hidden: int = 256
    layers: int = 8
    heads: int = 8
    kv_heads: int = 2
    batch_tokens: int = 8192
    learning_rate: float = 3e-3
    recall_samples: int = 64


@dataclasses.dataclass
class Run:
    """How far a training has come."""

    step: int = 0
    tokens: int = 0
    used_s: float = 0.0
    curve: list[dict[str, Any]] = dataclasses.field(default_factory=list)


class Data:
    """Token streams of the training and the held-out documents, and words for the recall lines;
    made once, below the work folder."""

    def __init__(self, work: Path) -> None:
        self.tokenizer: Any = Tokenizer.from_file(str(work / "tokenizer.json"))
        self.train = np.load(work / "train.npy")
        self.held_out = np.load(work / "held_out.npy")
        self.about: dict[str, Any] = json.loads((work / "corpus.json").read_text())
        self.words = {
            kind: [self.ids(f" {word}") for word in words]
            for kind, words in self.about["words"].items()
        }
        self.newline = self.ids("\n")
        marks = {mark: self.ids(mark) for mark in ("KEY", "GET", ":", "\n")}
        self.for_questions = HeldOut(self.held_out, self.words["held_out"], marks)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    def line(self, kind: str, key: list[int], value: list[int]) -> tuple[list[int], list[int]]:
        """``KEY word:`` or ``GET word:`` on a line of its own, and the value with the newline that
        ends it."""
        return self.newline + self.ids(kind) + key + self.ids(":"), value + self.newline


def prepare(work: Path, documents: Iterator[dict[str, str]], vocabulary: int) -> None:
    """Trains the vocabulary and writes what :class:`Data` reads."""
    texts = [document["text"] for document in documents]
    held_out = [
        number // BLOCK_DOCUMENTS % HELD_OUT_EVERY == HELD_OUT_EVERY // 2
        for number in range(len(texts))
    ]
    if not any(held_out):
        raise SystemExit(
            f"corpus: got {len(texts)} documents, expected more than "
            f"{BLOCK_DOCUMENTS * HELD_OUT_EVERY // 2}"
        )
    learned = [text for text, out in zip(texts, held_out, strict=True) if not out]
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        learned,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[END],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    counts = Counter(
        word for text in learned for word in re.findall(r"(?<= )[a-z]{4,8}(?= )", text)
    )
    ranked = [word for word, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    words = [word for word in ranked if len(tokenizer.encode(f" {word}").ids) <= 2][:2000]
    splits = {"train": [word for i, word in enumerate(words) if i % 10], "held_out": words[::10]}
    work.mkdir(parents=True, exist_ok=True)
    for name, out in (("train", False), ("held_out", True)):
        chosen = [text for text, side in zip(texts, held_out, strict=True) if side == out]
        stream = [0]
        for encoding in tokenizer.encode_batch(chosen):
            stream += [*encoding.ids, 0]
        np.save(work / f"{name}.npy", np.array(stream, dtype=np.uint16))
    tokenizer.save(str(work / "tokenizer.json"))
    characters = sum(map(len, texts))
    about = {
        "documents": len(texts),
        "held_out_documents": sum(held_out),
        "characters": characters,
        "words": splits,
    }
    # last: its presence says that the rest is whole
    write_atomically(work / "corpus.json", json.dumps(about))


def recall_lines(
    data: Data, rng: np.random.Generator, length: int
) -> list[tuple[float, list[int], list[float]]]:
    """Place in [0, 1), tokens and weights of the key lines of one sequence and of questions behind
    them."""
    words, lines = data.words["train"], []
    keys = int(rng.integers(1, min(10, 2 + length // 64)))
    for chosen in rng.choice(len(words), size=(keys, 5), replace=keys * 5 > len(words)):
        value = [token for word in chosen[1 : 2 + rng.integers(1, 4)] for token in words[word]]
        place = float(rng.random() * 0.85)
        head, tail = data.line("KEY", words[chosen[0]], value)
        # random words: there is nothing to predict
        lines.append((place, head + tail, [0.0] * (len(head) + len(tail))))
        head, tail = data.line("GET", words[chosen[0]], value)
        # Half of the questions stand at the end: far ones would be rare otherwise.
        behind = float(
            rng.uniform(max(place, 0.9), 1) if rng.random() < 0.5 else rng.uniform(place, 1)
        )
        lines.append((behind, head + tail, [0.0] * len(head) + [ANSWER_WEIGHT] * len(tail)))
    return sorted(lines, key=lambda line: line[0])


def recall_sequence(
    data: Data, rng: np.random.Generator, length: int
) -> tuple[list[int], list[float]]:
    """Documentation with key lines and questions in it."""
    lines = recall_lines(data, rng, length)
    text = text_window(data.train, rng, max(0, length - sum(len(tokens) for _, tokens, _ in lines)))
    ids: list[int] = []
    weights: list[float] = []
    done = 0
    for place, tokens, line_weights in [*lines, (1.0, [], [])]:
        until = round(place * len(text))
        ids += text[done:until] + tokens
        weights += [1.0] * (until - done) + line_weights
        done = until
    return ids[:length], weights[:length]


def copy_sequence(
    rng: np.random.Generator, length: int, vocabulary: int
) -> tuple[list[int], list[float]]:
    """Random tokens again and again: the shortest way to heads that look up what followed last
    time."""
    period = int(rng.integers(8, max(9, length // 2)))
    once = rng.integers(1, vocabulary, period)
    return np.resize(once, length).tolist(), [0.0] * min(period, length) + [1.0] * max(
        0, length - period
    )


def batch(
    data: Data, settings: Settings, step: int, length: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens and weights [B, length + 1] of one step, and which rows are plain text; depends on the
    seed and the step alone."""
    rng = np.random.default_rng([settings.seed, step])
    rows = []
    for _ in range(max(1, settings.batch_tokens // length)):
        kind = rng.random()
        if kind >= RECALL_SHARE:
            rows.append((text_window(data.train, rng, length + 1), [1.0] * (length + 1), True))
        elif kind < RECALL_SHARE / (3 if length * 4 <= settings.context else 8):
            rows.append((*copy_sequence(rng, length + 1, settings.vocabulary), False))
        else:
            rows.append((*recall_sequence(data, rng, length + 1), False))
    ids, weights, plain = zip(*rows, strict=True)
    return torch.tensor(ids), torch.tensor(weights), torch.tensor(plain)


def token_losses(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of every token but the first, and whether it was the likeliest: both [B, T -
    1]."""
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view_as(
        ids[:, 1:]
    )
    return losses, logits.detach().argmax(-1) == ids[:, 1:]


def make_model(settings: Settings) -> Any:
    torch.manual_seed(settings.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=settings.vocabulary,
            hidden_size=settings.hidden,
            intermediate_size=settings.hidden * 11 // 4,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.kv_heads,
            max_position_embeddings=settings.context,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def make_optimizers(model: Any, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(
            matrices, lr=settings.learning_rate, adjust_lr_fn="match_rms_adamw", weight_decay=0.1
        ),
        torch.optim.AdamW(others, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def clock_s(device: torch.device, threads: int) -> float:
    return time.process_time() / threads if device.type == "cpu" else time.monotonic()


def train(
    settings: Settings,
    work: Path,
    data: Data,
    *,
    resume: bool = False,
    until_step: int | None = None,
) -> tuple[Any, Run]:
    """Trains until the budget is spent, or until ``until_step``, with a checkpoint every few
    minutes and at the end."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, run = make_model(settings).to(device), Run()
    optimizers = make_optimizers(model, settings)
    if resume and (work / "state.pt").exists():
        run = load_state(work, settings, model, optimizers)
    begun_s, saved_s = clock_s(device, settings.threads) - run.used_s, run.used_s
    while until_step is None or run.step < until_step:
        done = run.step / settings.steps if settings.steps else run.used_s / (60 * settings.minutes)
        if done >= 1:
            break
        length = max(16, settings.context // next(divisor for end, divisor in STAGES if done < end))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = (
                    settings.learning_rate * min(1.0, (run.step + 1) / 50) * (1 - 0.95 * done)
                )
        ids, weights, plain = (
            tensor.to(device) for tensor in batch(data, settings, run.step, length)
        )
        losses, hits = token_losses(model, ids)
        ((losses * weights[:, 1:]).sum() / weights[:, 1:].sum().clamp(min=1)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        run.step += 1
        run.tokens += ids[:, 1:].numel()
        run.used_s = clock_s(device, settings.threads) - begun_s
        if run.step % 20 == 0 or run.step == 1:
            answers = weights[:, 1:] == ANSWER_WEIGHT
            point: dict[str, Any] = {
                "step": run.step,
                "tokens": run.tokens,
                "minutes": round(run.used_s / 60, 2),
                "context": length,
            }
            point["train_loss"] = (
                round(float(losses.detach()[plain].mean()), 4) if plain.any() else None
            )
            point["answer_tokens_right"] = (
                round(float(hits[answers].float().mean()), 3) if answers.any() else None
            )
            run.curve.append(point)
            say(f"{done:4.0%}", **point)
        if run.used_s - saved_s > CHECKPOINT_S:
            saved_s = run.used_s
            save_state(work, settings, model, optimizers, run)
    save_state(work, settings, model, optimizers, run)
    return model, run


def say(*words: object, **values: object) -> None:
    print(
        *words, *(f"{name} {value}" for name, value in values.items()), file=sys.stderr, flush=True
    )


def save_state(
    work: Path, settings: Settings, model: Any, optimizers: list[torch.optim.Optimizer], run: Run
) -> None:
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
    }
    part = work / "state.pt.part"
    torch.save(
        {**state, "run": dataclasses.asdict(run), "settings": dataclasses.asdict(settings)}, part
    )
    part.replace(work / "state.pt")


def load_state(
    work: Path, settings: Settings, model: Any, optimizers: list[torch.optim.Optimizer]
) -> Run:
    state = torch.load(work / "state.pt", weights_only=True, map_location="cpu")
    # may change: none shapes a tensor or an earlier sequence
    free = {"minutes", "steps", "threads", "recall_samples"}
    for name, value in dataclasses.asdict(settings).items():
        if name not in free and state["settings"][name] != value:
            raise SystemExit(
                f"--resume: the checkpoint was made with {name} {state['settings'][name]}, got "
                f"{value}"
            )
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return Run(**state["run"])


@torch.no_grad()
def validation(model: Any, data: Data, context: int) -> dict[str, float]:
    """Loss on the held-out documents, and what the far half of the context is worth to the second
    half of the tokens."""
    count = max(1, min(64, (len(data.held_out) - 1) // context))
    windows = np.stack(
        [
            np.resize(data.held_out[i * context : (i + 1) * context + 1], context + 1)
            for i in range(count)
        ]
    )
    ids = torch.from_numpy(windows.astype(np.int64)).to(model.device)
    whole = torch.cat([token_losses(model, some)[0] for some in ids.split(4)])
    half = torch.cat([token_losses(model, some)[0] for some in ids[:, context // 2 :].split(4)])
    # tokens of the last quarter: with all the context, and without its first half
    cut = context // 4
    return {
        "validation_loss": float(whole.mean()),
        "validation_perplexity": math.exp(float(whole.mean())),
        "last_quarter_loss": float(whole[:, -cut:].mean()),
        "last_quarter_loss_half_context": float(half[:, -cut:].mean()),
    }


@torch.no_grad()
def recall(model: Any, data: Data, settings: Settings) -> dict[int, float]:
    """Share of questions answered exactly (greedily, with the newline that ends the answer), by
    distance in tokens."""
    found = {}
    for distance in (d for d in DISTANCES if 64 <= d <= settings.context - 64):
        rng = np.random.default_rng([settings.seed, distance, 1])
        right = 0
        for _ in range(settings.recall_samples):
            ids, count = question(data.for_questions, rng, settings.context, distance)
            # One pass with the answer in place: greedy decoding gives it exactly where every one of
            # its tokens is the likeliest.
            right += bool(
                token_losses(model, torch.tensor([ids], device=model.device))[1][0, -count:].all()
            )
        found[distance] = right / settings.recall_samples
    return found


def write_atomically(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def readme(results: dict[str, Any], about: dict[str, Any], command: str) -> str:
    scores = ", ".join(
        f"{score:.0%} at {distance}" for distance, score in results["recall_exact_match"].items()
    )
    return f"""# espnx demo model

A Llama of {results["parameters"]:,} parameters for the demos and tests of espnx; far too small to
be of other use.
Trained from scratch by `{command}`:
{results["tokens"] / 1e6:.1f} million tokens in {results["minutes"]:.0f} minutes.
Text: {about["documents"]:,} docstrings of the installed Python libraries, plus lines
`KEY word: value` to be recalled by `GET word:`.
Held-out documents: loss {results["validation_loss"]:.3f},
perplexity {results["validation_perplexity"]:.1f}.
Exact recall with held-out words, by distance in tokens: {scores}.
Load it with `AutoModelForCausalLM.from_pretrained(folder)` and
`AutoTokenizer.from_pretrained(folder)`; weights are bfloat16.
`training.json` holds the settings, the results and the loss curve; `held_out.safetensors` the
held-out documents, as tokens.
License: as espnx; the docstrings are their authors'.
"""


def save_model(model: Any, data: Data, settings: Settings, folder: Path) -> None:
    """Weights as bfloat16, in which autocast multiplied them anyway; nothing is seen below
    ``folder`` before it is whole."""
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=data.tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=settings.context,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder)


def publish(
    model: Any, run: Run, data: Data, settings: Settings, out: Path, command: str
) -> dict[str, Any]:
    """Writes the checkpoint folder and measures what was written."""
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    save_model(model, data, settings, part)
    data.for_questions.save(part)
    stored = AutoModelForCausalLM.from_pretrained(part, dtype=torch.float32).to(model.device)
    tail = [point["train_loss"] for point in run.curve[-10:] if point["train_loss"] is not None]
    results: dict[str, Any] = {
        "parameters": sum(p.numel() for p in stored.parameters()),
        "model_bytes": (part / "model.safetensors").stat().st_size,
        "steps": run.step,
        "tokens": run.tokens,
        "minutes": round(run.used_s / 60, 2),
        "tokens_per_second": round(run.tokens / run.used_s, 1),
        "train_loss": sum(tail) / max(1, len(tail)),
        **validation(stored, data, settings.context),
        "recall_exact_match": recall(stored, data, settings),
    }
    about = {name: value for name, value in data.about.items() if name != "words"}
    about |= {
        "tokens": len(data.train),
        "held_out_tokens": len(data.held_out),
        "recall_share": RECALL_SHARE,
    }
    record = {
        "command": command,
        "settings": dataclasses.asdict(settings),
        "corpus": about,
        "results": results,
        "curve": run.curve,
    }
    write_atomically(part / "training.json", json.dumps(record, indent=1) + "\n")
    write_atomically(part / "README.md", readme(results, about, command))
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(part.iterdir()):
        path.chmod(0o644)  # the weights come out as readable by their owner alone
        path.replace(out / path.name)
    part.rmdir()
    return results


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Trains the small language model of the demos on docstrings."
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("espnx/models/demo"),
        help="folder of the model (default: %(default)s)",
    )
    parser.add_argument(
        "--work", type=Path, help="folder of tokens and checkpoints (default: OUT.work)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=50,
        help="processor minutes divided by threads; on a GPU, minutes (default: 50)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        help="instead of --minutes: so many steps, for the same weights every time",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--context", type=int, default=2048, help="tokens, a multiple of 8 (default: 2048)"
    )
    parser.add_argument(
        "--threads", type=int, default=min(2, os.cpu_count() or 1), help="default: 2"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the last checkpoint in --work"
    )
    options = parser.parse_args(argv)
    for name, least in (
        ("minutes", 0.01),
        ("steps", 1),
        ("seed", 0),
        ("context", 256),
        ("threads", 1),
    ):
        if (value := getattr(options, name)) is not None and value < least:
            parser.error(f"--{name}: got {value}, expected at least {least}")
    if options.context % 8:
        parser.error(f"--context: got {options.context}, expected a multiple of 8")
    options.work = options.work or options.out.with_name(options.out.name + ".work")
    return options


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    torch.set_num_threads(options.threads)
    names = ("minutes", "steps", "seed", "context", "threads")
    settings = Settings(**{name: getattr(options, name) for name in names})
    if not (options.resume and (options.work / "corpus.json").exists()):
        say("reading the docstrings")
        prepare(options.work, docstrings.documents(), settings.vocabulary)
    data = Data(options.work)
    say(f"{len(data.train):,} tokens of text, {len(data.held_out):,} held out")
    model, run = train(settings, options.work, data, resume=options.resume)
    say("evaluating")
    given = " ".join(
        f"--{name} {getattr(options, name):g}"
        for name in names
        if getattr(options, name) is not None
    )
    results = publish(
        model, run, data, settings, options.out, f"python scripts/train_demo_model.py {given}"
    )
    for name, value in results.items():
        if name != "recall_exact_match":
            print(
                f"{name.replace('_', ' '):32} {value:,.3f}"
                if isinstance(value, float)
                else f"{name.replace('_', ' '):32} {value:,}"
            )
    for distance, score in results["recall_exact_match"].items():
        print(f"{f'exact recall at {distance} tokens':32} {score:.1%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
