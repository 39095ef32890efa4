"""What an encoder is, and your own function as one.

An encoder turns a text into what late interaction needs: one ``cls`` vector, by which the first
stage finds candidates, and one vector per token, which MaxSim scores. Models without a vector of
the first kind have ``d_cls`` 0, and the first stage takes one that is made from the tokens
(first_stage/pooling.py). espnx never asks how; anything with the five members of :class:`Encoder`
will do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from espnx.errors import InvalidInputError
from espnx.forks import compute_alone
from espnx.suggestions import suggests_keywords

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Encoded:
    """One text, document or query, as vectors. Both tensors are float32, contiguous, on the CPU,
    and the receiver's to keep and change.

    Results of one call may be slices of one block, which lives as long as any of them: clone one to
    keep it for long without the others.

    Attributes:
        cls: ``[d_cls]``, one vector for the whole text; ``[0]`` where the model has none.
        tokens: ``[n, dim]``, one vector per token, n >= 0. A text without tokens has ``[0, dim]``.
    """

    cls: Tensor
    tokens: Tensor

    def __repr__(self) -> str:
        shapes = (list(getattr(part, "shape", ())) for part in (self.cls, self.tokens))
        return "<Encoded: cls {}, tokens {}>".format(*shapes)


@runtime_checkable
class Encoder(Protocol):
    """What building and searching a store ask of an encoder.

    Attributes:
        name: who it is, the same on every machine and in every process, different for every model
            or setting whose vectors do not belong in one store (``"minilm@53aa5117"``). A store
            keeps it, and a query encoded under another name is refused. The name of a model that
            computes in bf16 ends in ``"/bf16"``; queries alone may be encoded by the one or the
            other.
        d_cls: length of a ``cls`` vector, 0 where the model has none.
        dim: length of a token vector.
    """

    @property
    def name(self) -> str: ...

    @property
    def d_cls(self) -> int: ...

    @property
    def dim(self) -> int: ...

    def encode_documents(self, texts: list[str]) -> list[Encoded]:
        """One :class:`Encoded` per text, in the order of ``texts``."""
        ...

    def encode_queries(self, texts: list[str]) -> list[Encoded]:
        """One :class:`Encoded` per text, in the order of ``texts``."""
        ...


#: What callers may give for one: itself, or a description as `espnx.load_encoder` takes it.
EncoderLike = Encoder | str | os.PathLike[str]

#: Stands for the encoder that a store remembers.
AUTO = "auto"

#: How the name of a model ends that computes in bf16; without it, it computes in fp32.
BF16 = "/bf16"

# The families of encoders lie in a room above this one; what is named by a string is looked up
# there when it is wanted.
_FAMILIES = "espnx.encoders"
_BY_DESCRIPTION = EntryPoint("by description", f"{_FAMILIES}:load_encoder", _FAMILIES)
_BY_NAME = EntryPoint("by name", f"{_FAMILIES}:load_named", _FAMILIES)


def encoder_of(
    given: object, device: str = "cpu", *, built_with: str | None = None
) -> Encoder | None:
    """An encoder, or None, as a caller gave it; one that was described is loaded to that device.

    Args:
        built_with: name of the encoder of a store, which says in which dtype one is loaded; None:
            fp32.

    Raises InvalidInputError for what can be none, and what `espnx.load_encoder` raises.
    """
    if given is None:
        return None
    if isinstance(given, (str, os.PathLike)):
        loaded: Encoder = _BY_DESCRIPTION.load()(
            os.fspath(given), device=device, dtype=dtype_of(built_with)
        )
        return loaded
    if not isinstance(given, Encoder) or isinstance(given, type):
        raise InvalidInputError(
            "encoder",
            got=f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__,
            expected=(
                'a description such as "minilm", a folder, or an object with name, d_cls, dim, '
                "encode_documents and encode_queries"
            ),
            fix="espnx.load_encoder(...), or FunctionEncoder(function, name, d_cls=..., dim=...)",
        )
    return given


def remembered_encoder(name: str | None, device: str = "cpu") -> Encoder | None:
    """The encoder that a store was built with, by the name that it keeps (`Encoder.name`); None
    where it keeps none.

    Raises InvalidInputError for an encoder that came out of a folder: a store does not know where
    on which machine that lies.
    """
    if name is None:
        return None
    loaded: Encoder = _BY_NAME.load()(name, device=device)
    check_same_encoder(loaded, name)
    return loaded


def dtype_of(name: str | None) -> str:
    """What an encoder of that name computes in, as `espnx.load_encoder` takes it."""
    return "bf16" if name is not None and name.endswith(BF16) else "fp32"


def check_same_encoder(encoder: Encoder, built_with: str | None) -> None:
    """Raises InvalidInputError unless a store was built with it, or with none that had a name."""
    if built_with is None or encoder.name == built_with:
        return
    fix = None
    if encoder.name.removesuffix(BF16) == built_with.removesuffix(BF16):
        fix = (
            f'load_encoder(..., dtype="{dtype_of(built_with)}"), in which its documents were '
            "encoded"
        )
    raise InvalidInputError(
        "the store was built with another encoder", got=encoder.name, expected=built_with, fix=fix
    )


def check_query_encoder(encoder: Encoder, built_with: str | None) -> None:
    """Raises InvalidInputError unless a store was built with it, with the same in another dtype, or
    with none that had a name."""
    if built_with is None or encoder.name.removesuffix(BF16) != built_with.removesuffix(BF16):
        check_same_encoder(encoder, built_with)


def check_texts(texts: object) -> list[str]:
    """``texts`` as a list of encodable strings.

    Raises:
        InvalidInputError: it is one string, or holds something that is no string or has no UTF-8
            form; says which.
    """
    if isinstance(texts, (str, bytes)) or not isinstance(texts, Sequence):
        raise InvalidInputError(
            "encode",
            got=type(texts).__name__,
            expected="a list of str",
            fix="pass [text] to encode one text",
        )
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidInputError(
                f"encode text {number}", got=type(text).__name__, expected="str"
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidInputError(
                f"encode text {number}",
                got=f"a lone surrogate at character {error.start}",
                expected="text that UTF-8 can hold",
                fix='text.encode("utf-8", "replace").decode()',
            ) from None
    return list(texts)


class FunctionEncoder:
    """Your own function as an encoder.

    Args:
        fn: takes a list of str, returns for each, in order, a pair ``(cls, tokens)`` of shapes
            ``[d_cls]`` and ``[n, dim]``, n >= 0: numpy arrays, tensors on any device, nested lists
            of numbers, or :class:`Encoded`. Values are copied and converted to float32, so ``fn``
            may reuse its buffers. What ``fn`` raises reaches the caller unchanged. With ``d_cls``
            0, ``cls`` may be None.
        name: see :attr:`Encoder.name`; change it when the function's vectors change.
        d_cls: length of a ``cls`` vector; 0 if there is none.
        dim: length of a token vector.
        query_fn: the same for queries, where they are encoded differently. Default: ``fn``.

    Every result is checked: InvalidInputError, naming the text, for a wrong count, shape, dimension
    or kind of number, and for NaN or infinity (also where a float64 is too large for float32).

    >>> import numpy as np
    >>> def encode(texts):
    ...     return [([1.0, 0.0], np.ones((len(text.split()), 2))) for text in texts]
    >>> encoder = FunctionEncoder(encode, "toy@1", d_cls=2, dim=2)
    >>> two, none = encoder.encode_documents(["two words", ""])
    >>> tuple(two.tokens.shape), tuple(none.tokens.shape)
    ((2, 2), (0, 2))
    """

    @suggests_keywords
    def __init__(
        self,
        fn: Callable[[list[str]], Iterable[Any]],
        name: str,
        *,
        d_cls: int,
        dim: int,
        query_fn: Callable[[list[str]], Iterable[Any]] | None = None,
    ):
        for label, function in (("fn", fn), ("query_fn", fn if query_fn is None else query_fn)):
            if not callable(function):
                raise InvalidInputError(
                    f"FunctionEncoder: {label}",
                    got=type(function).__name__,
                    expected="a function of a list of str",
                )
        if not isinstance(name, str) or not name:
            raise InvalidInputError(
                "FunctionEncoder: name",
                got=repr(name),
                expected="a name that tells this encoder from others",
            )
        for label, size, least in (("d_cls", d_cls, 0), ("dim", dim, 1)):
            if not isinstance(size, int) or isinstance(size, bool) or size < least:
                raise InvalidInputError(
                    f"FunctionEncoder: {label}",
                    got=repr(size),
                    expected=f"an int of at least {least}",
                )
        self.name, self.d_cls, self.dim = name, d_cls, dim
        self._fn, self._query_fn = fn, fn if query_fn is None else query_fn

    def __repr__(self) -> str:
        return f"<FunctionEncoder {self.name!r}: cls [{self.d_cls}], tokens [n, {self.dim}]>"

    def encode_documents(self, texts: list[str]) -> list[Encoded]:
        return self._encode(self._fn, texts)

    def encode_queries(self, texts: list[str]) -> list[Encoded]:
        return self._encode(self._query_fn, texts)

    def _encode(self, fn: Callable[[list[str]], Iterable[Any]], texts: list[str]) -> list[Encoded]:
        compute_alone()  # the function is likely to do so with PyTorch
        texts = check_texts(texts)
        if not texts:
            return []
        returned = fn(list(texts))
        if not isinstance(returned, Iterable):
            raise InvalidInputError(
                f"{self.name}: encode",
                got=type(returned).__name__,
                expected="a list of pairs (cls, tokens)",
            )
        results = list(returned)
        if len(results) != len(texts):
            raise InvalidInputError(
                f"{self.name}: encode {len(texts)} texts",
                got=f"{len(results)} results",
                expected="one per text",
            )
        return [
            self._checked(number, text, result)
            for number, (text, result) in enumerate(zip(texts, results, strict=True))
        ]

    def _checked(self, number: int, text: str, result: Any) -> Encoded:
        what = f"{self.name}: text {number} ({text[:40]!r})"
        if isinstance(result, Encoded):
            result = (result.cls, result.tokens)
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise InvalidInputError(
                what, got=type(result).__name__, expected="a pair (cls, tokens)"
            )
        if self.d_cls == 0 and result[0] is None:
            result = ((), result[1])
        cls, tokens = (
            _owned_float32(f"{what}: {label}", value)
            for label, value in zip(("cls", "tokens"), result, strict=True)
        )
        if cls.shape != (self.d_cls,):
            raise InvalidInputError(
                f"{what}: cls", got=f"shape {list(cls.shape)}", expected=f"[{self.d_cls}]"
            )
        if tokens.ndim != 2 or tokens.shape[1] != self.dim:
            raise InvalidInputError(
                f"{what}: tokens",
                got=f"shape {list(tokens.shape)}",
                expected=f"[n, {self.dim}]",
                fix=f"a text without tokens has shape [0, {self.dim}]"
                if tokens.numel() == 0
                else None,
            )
        _check_finite(f"{what}: cls", cls)
        _check_finite(f"{what}: tokens", tokens)
        return Encoded(cls, tokens)


def check_count(encoder: Encoder | None, texts: int, results: int) -> None:
    """Raises InvalidInputError where an encoder returned too few or too many: pairing them off
    would give texts the wrong vectors."""
    if results != texts:
        raise InvalidInputError(
            f"{encoder.name if encoder else ''}: encode {texts} texts",
            got=f"{results} results",
            expected="one per text",
        )


def _owned_float32(what: str, value: Any) -> Tensor:
    """A float32 copy of ``value`` on the CPU."""
    import numpy
    import torch

    if isinstance(value, torch.Tensor):
        if value.is_complex() or value.dtype == torch.bool:
            raise InvalidInputError(what, got=str(value.dtype), expected="real numbers")
        copy = value.detach().to("cpu", torch.float32, copy=True).contiguous()
    else:
        try:
            array = numpy.asarray(value)
        except ValueError as error:
            raise InvalidInputError(
                what, got=str(error), expected="an array with one shape"
            ) from None
        if array.dtype.kind not in "fiu":
            raise InvalidInputError(what, got=f"dtype {array.dtype}", expected="real numbers")
        with numpy.errstate(over="ignore"):  # becomes infinity, which the caller refuses
            copy = torch.from_numpy(numpy.array(array, numpy.float32, order="C"))
    return copy


def _check_finite(what: str, values: Tensor) -> None:
    """Says where the first NaN or infinity of ``values`` (one or two dimensions) is."""
    bad = (~values.isfinite()).nonzero()
    if len(bad):
        place = bad[0].tolist()
        raise InvalidInputError(
            what, got=f"{values[tuple(place)].item()} at {place}", expected="finite numbers"
        )
