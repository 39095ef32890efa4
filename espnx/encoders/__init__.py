"""Models that make the vectors of documents and queries, one family a file. Nothing here is
imported until it is asked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..checks import check_path
from ..errors import InvalidInputError
from ..suggestions import downloading, suggests_keywords

if TYPE_CHECKING:
    from ..retrieval.encoder import Encoder
    from ..retrieval.sparse_encoder import SparseEncoder

#: Encoders that need no folder.
_NAMED = ("minilm",)
_SPARSE_NAMED = ("splade-tiny",)


@suggests_keywords
def load_encoder(
    spec: str | os.PathLike[str], *, device: str = "cpu", dtype: str = "fp32"
) -> Encoder:
    """An encoder by its description, as on the command line.

    Args:
        spec: ``"minilm"`` (:class:`espnx.encoders.minilm.MiniLM`), or the path of a folder, whose
            kind is recognised:

            - a PyLate model (:class:`espnx.encoders.pylate.PyLateEncoder`),
            - a ColBERT checkpoint (:class:`espnx.encoders.colbert.ColBERTEncoder`),
            - a model of ColBERTer's shape (:class:`espnx.encoders.colberter.ColBERTerEncoder`),
            - a model of sentence-transformers with dense layers or T5 (GTR), which gives one vector
              a text (:class:`espnx.encoders.sentence_transformer.SentenceTransformerEncoder`),
            - Doc2Vec as espnx saves it, likewise (:class:`espnx.encoders.doc2vec.Doc2VecEncoder`),
            - any other Hugging Face encoder
              (:class:`espnx.encoders.huggingface.HuggingFaceEncoder`).
        device: ``"cpu"`` or ``"cuda"``.
        dtype: of the forward pass: ``"fp32"``, on whatever processor, or ``"bf16"``, which differs
            from it and is faster where the hardware multiplies it (docs/encoders.md). The encoder's
            name says so, and with it a store that is built with it.

    Raises:
        InvalidInputError: neither a known name nor a folder, or a dtype that it cannot compute in.
        MissingDependencyError: a package that the encoder needs is not installed.
        FormatError: the folder is damaged.
    """
    if spec in _NAMED:
        from .minilm import MiniLM

        return MiniLM(device=device, dtype=dtype)
    folder = Path(check_path("encoder", spec))
    if not os.path.isdir(folder):  # False, too, for a name that no file can have
        raise InvalidInputError(
            "encoder",
            got=repr(spec),
            expected='"minilm" or the folder of an encoder',
            fix=_fix(str(spec)),
        )
    return _of_folder(folder, device, dtype)


def _fix(spec: str) -> str:
    """What to do about a description that leads to no folder."""
    return "; ".join(filter(None, ["give the folder that holds config.json", downloading(spec)]))


def load_named(name: str, *, device: str = "cpu") -> Encoder:
    """The encoder of that `Encoder.name`, as far as a name alone leads to one, in the dtype that
    the name says.

    Raises:
        InvalidInputError: the encoder comes out of a folder, or is a function; its name does not
            say where that is.
        MissingDependencyError: a package that the encoder needs is not installed.
    """
    from ..retrieval.encoder import dtype_of

    family = name.partition("@")[0]
    if family in _NAMED:
        return load_encoder(family, device=device, dtype=dtype_of(name))
    raise InvalidInputError(
        "the encoder's folder is not known",
        got=f"a store built with {name}",
        fix="name it with encoder=FOLDER (--encoder FOLDER)",
    )


@suggests_keywords
def load_sparse_encoder(
    spec: str | os.PathLike[str] = "splade-tiny", *, device: str = "cpu"
) -> SparseEncoder:
    """An encoder that gives weights of terms, by its description.

    Args:
        spec: ``"splade-tiny"`` (:class:`espnx.encoders.splade.SpladeTiny`, which a package
            carries), or the folder of a SPLADE model
            (:class:`espnx.encoders.splade.SpladeEncoder`).
        device: ``"cpu"`` or ``"cuda"``. The forward pass is in float32: an index keeps weights in 8
            bits, and bf16 is off by several steps.

    Raises:
        InvalidInputError: neither a known name nor the folder of such a model.
        MissingDependencyError: a package that the encoder needs is not installed.
        ChecksumError, FormatError: the model is not the released one, or damaged.
    """
    from .splade import SpladeEncoder, SpladeTiny

    if spec in _SPARSE_NAMED:
        return SpladeTiny(device=device)
    folder = Path(check_path("sparse encoder", spec))
    if not os.path.isdir(folder):  # False, too, for a name that no file can have
        expected = '"splade-tiny" or the folder of a SPLADE model'
        raise InvalidInputError(
            "sparse encoder", got=repr(spec), expected=expected, fix=_fix(str(spec))
        )
    return SpladeEncoder(folder, device=device)


def load_sparse_named(name: str, *, device: str = "cpu") -> SparseEncoder:
    """The sparse encoder of that `SparseEncoder.name`, as far as a name alone leads to one.

    Raises:
        InvalidInputError: the encoder comes out of a folder; its name does not say where that is.
        MissingDependencyError: a package that the encoder needs is not installed.
    """
    family = name.partition("@")[0]
    if family in _SPARSE_NAMED:
        return load_sparse_encoder(family, device=device)
    raise InvalidInputError(
        "the sparse encoder's folder is not known",
        got=f"an index built with {name}",
        fix="give the encoder, or its folder",
    )


def _of_folder(folder: Path, device: str, dtype: str) -> Encoder:
    from . import colbert as colbert_encoder
    from . import colberter as colberter_encoder
    from . import doc2vec, huggingface, sentence_transformer
    from . import pylate as pylate_encoder

    if doc2vec.is_doc2vec(folder):
        if dtype != "fp32":
            raise InvalidInputError(
                f"encoder: dtype of Doc2Vec {folder}", got=repr(dtype), expected='"fp32"'
            )
        return doc2vec.Doc2VecEncoder.load(folder)
    if colberter_encoder.is_colberter(folder):
        return colberter_encoder.ColBERTerEncoder(folder, device=device, dtype=dtype)
    if pylate_encoder.is_pylate(folder):
        return pylate_encoder.PyLateEncoder(folder, device=device, dtype=dtype)
    if colbert_encoder.is_colbert(folder):
        return colbert_encoder.ColBERTEncoder(folder, device=device, dtype=dtype)
    if sentence_transformer.is_sentence_transformer(folder):
        return sentence_transformer.SentenceTransformerEncoder(folder, device=device, dtype=dtype)
    return huggingface.HuggingFaceEncoder(folder, device=device, dtype=dtype)
