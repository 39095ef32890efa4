"""Small models and texts for the tests of late-interaction encoders and imports, the same on every
machine.

The folders under ``data/`` are what ColBERT and PyLate really wrote, without the weights: those are
made here, from their names and shapes, by ``scripts/make_late_interaction_fixtures.py`` before it
encodes and by the tests before they compare.
"""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path

import numpy as np

DATA = Path(__file__).resolve().parents[1] / "data"
SHAPES = "shapes.json"  # {file of weights: {name: shape}}

# ruff: noqa: SIM905 (a list of words reads better as text)
WORDS = """the of and in to a is for with on by from at as wing flow heat shock wave jet plate layer
speed sound body nose cone drag lift theory test data method results pressure supersonic boundary
temperature measured angle attack transfer ratio number mach""".split()
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
# neither ` nor ~: they are [UNK], as some signs are in real vocabularies
PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_{|}"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = [
    *SPECIAL,
    "[unused0]",
    "[unused1]",
    *PUNCTUATION,
    *LETTERS,
    *(f"##{letter}" for letter in LETTERS),
    *(word for word in WORDS if len(word) > 1),
]

DOCUMENTS = [
    "The lift of a wing in supersonic flow.",
    "heat transfer, to a flat plate: measured data (with a boundary layer)!",
    "",
    "zeta ~ drag of bodies; 0.5 to 5 mach ... [SEP] and [MASK]",
    " ".join(WORDS),
    "Pressure",
]
QUERIES = ["what is the drag of a cone?", "", "shock wave", " ".join(reversed(WORDS))]


def collection(n: int = 50) -> list[str]:
    """Short texts of the vocabulary's words; the first of them twice, so that scores tie."""
    random = np.random.PCG64(7)
    texts = []
    for _ in range(n - 1):
        length = 3 + int(random.random_raw() % 6)
        texts.append(" ".join(WORDS[int(random.random_raw() % len(WORDS))] for _ in range(length)))
    return [*texts, texts[0]]


def clouds(n: int = 40, dim: int = 32) -> list[np.ndarray]:
    """Token vectors of n documents, float32 [3 to 12, dim] of length 1, in 30 clusters."""
    random = np.random.PCG64(11)

    def uniform(*shape: int) -> np.ndarray:
        raw = random.random_raw(int(np.prod(shape)))
        return ((raw >> np.uint64(11)).astype(np.float64) / 2.0**53 * 2 - 1).reshape(shape)

    centres = uniform(30, dim)
    made = []
    for _ in range(n):
        members = [int(random.random_raw() % 30) for _ in range(3 + int(random.random_raw() % 10))]
        values = centres[members] + 0.5 * uniform(len(members), dim)
        made.append((values / np.linalg.norm(values, axis=1, keepdims=True)).astype(np.float32))
    return made


def weight(name: str, shape: list[int]) -> np.ndarray:
    """The values of the weight of that name: uniform, wide enough that tokens of a random network
    differ."""
    # some versions of transformers save LayerNorm under its old names
    name = name.replace("gamma", "weight").replace("beta", "bias")
    raw = np.random.PCG64(zlib.crc32(name.encode())).random_raw(int(np.prod(shape)))
    uniform = ((raw >> np.uint64(11)).astype(np.float64) / 2.0**53 * 2 - 1).reshape(shape)
    if name.endswith("LayerNorm.weight"):
        return (1 + 0.2 * uniform).astype(np.float32)
    return ((0.05 if name.endswith("bias") else 0.4) * uniform).astype(np.float32)


def restore(name: str, target: Path, **changes: dict) -> Path:
    """A copy of the folder ``data/name`` with its weights. ``changes``: keys to set in its JSON
    files, by name without the dots."""
    from safetensors.numpy import save_file

    shutil.copytree(DATA / name, target)
    for file, shapes in json.loads((target / SHAPES).read_text()).items():
        save_file(
            {key: weight(key, shape) for key, shape in shapes.items()},
            target / file,
            metadata={"format": "pt"},
        )
    (target / SHAPES).unlink()
    for path in [*target.glob("*.json"), *target.glob("*.metadata")]:
        if changed := changes.get(path.name.partition(".")[0]):
            path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    return target


def base_bert(folder: Path, hidden: int = 32) -> Path:
    """An encoder of two layers over the vocabulary, as transformers would write it."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    config = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": len(VOCABULARY),
        "hidden_size": hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 2 * hidden,
        "max_position_embeddings": 64,
        "type_vocab_size": 2,
        "pad_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer(folder)
    shapes = bert_shapes(config)
    save_file(
        {key: weight(key, shape) for key, shape in shapes.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def bert_shapes(config: dict) -> dict[str, list[int]]:
    """Names and shapes of the weights of ``BertModel`` without a pooler."""
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    rows = {
        "word": config["vocab_size"],
        "position": config["max_position_embeddings"],
        "token_type": config["type_vocab_size"],
    }
    shapes = {
        f"embeddings.{name}_embeddings.weight": [count, hidden] for name, count in rows.items()
    }
    dense = {f"attention.self.{part}": [hidden, hidden] for part in ("query", "key", "value")}
    dense |= {
        "attention.output.dense": [hidden, hidden],
        "intermediate.dense": [wide, hidden],
        "output.dense": [hidden, wide],
    }
    norms = ["embeddings.LayerNorm"]
    for number in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{number}"
        shapes |= {f"{layer}.{name}.weight": shape for name, shape in dense.items()}
        shapes |= {f"{layer}.{name}.bias": shape[:1] for name, shape in dense.items()}
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    return shapes | {f"{norm}.{part}": [hidden] for norm in norms for part in ("weight", "bias")}


def tokenizer(folder: Path) -> None:
    """An uncased WordPiece tokenizer's files."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    vocabulary = {token: number for number, token in enumerate(VOCABULARY)}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = (
        normalizers.BertNormalizer(lowercase=True),
        pre_tokenizers.BertPreTokenizer(),
    )
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(SPECIAL)
    made.save(str(folder / "tokenizer.json"))
    names = ("pad", "unk", "cls", "sep", "mask")
    settings = {f"{name}_token": token for name, token in zip(names, SPECIAL, strict=True)}
    settings |= {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 64}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
