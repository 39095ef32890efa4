"""What a model makes K and V with: the tensors and the settings of each module, as they count now.

Parameters and buffers are not all of it. Adapters are loaded and not used; quantised modules pack
weights that only `state_dict` shows; scalings and epsilons are plain attributes; ropes rewrite
their buffers for the text at hand; hooks and replaced forward passes compute what nobody can know.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as hooks_of_all
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from transformers import GenerationConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .... import errors

_HEAD = "lm_head"  # comes after K and V
#: Attributes of modules that say how they are run, and not what they compute. `training` counts
#: where it does: see `_is_random`.
_IRRELEVANT = frozenset(
    {
        "training",
        "gradient_checkpointing",
        "config",
        "generation_config",
        "peft_config",
        "warnings_issued",
        "name_or_path",
    }
)
#: Packages whose own hooks leave a module's output as it is: they look on, or move tensors.
_ONLOOKERS = ("espnx", "transformers", "accelerate")
#: Packages whose hooks and forward passes are known by their names: what they compute with are
#: tensors and settings of modules.
_KNOWN = (*_ONLOOKERS, "torch", "peft")


@dataclass(frozen=True)
class Part:
    """A module's share.

    Attributes:
        name: of the module. A wrapper that changes nothing (an adapter that is off, a compiled
            module) is passed over, and what it wraps has its name.
        settings: its class, its plain attributes, the hooks that are known by name.
        tensors: by name and, of a parameter or a buffer, the module that owns it.
    """

    name: str
    settings: str
    tensors: Sequence[tuple[str, torch.Tensor, torch.nn.Module]]


def parts_of(model: torch.nn.Module) -> Iterator[Part]:
    """Every module of a model but its output head.

    Raises:
        InvalidInputError: a hook, a forward pass or a packed weight that cannot be known; the
            message names it.
    """
    hooks = [
        *hooks_of_all._global_forward_pre_hooks.values(),
        *hooks_of_all._global_forward_hooks.values(),
    ]
    yield Part("every module", f"hooks {_named(hooks, 'a module')}", [])
    yield from _walk(model, "", (), frozenset())


def _walk(
    module: torch.nn.Module, name: str, above: tuple[torch.nn.Module, ...], off: Container[str]
) -> Iterator[Part]:
    """`off`: the adapters whose entries do not count."""
    if any(module is each for each in above):
        return
    above, children = (*above, module), dict(module._modules.items())
    functions = _functions(module, name)
    # of torch.compile
    if type(module).__qualname__ == "OptimizedModule" and "_orig_mod" in children:
        yield from _walk(children["_orig_mod"], name, above, off)
        return
    own, switches = name, ""
    if adapters := _Adapters.of(module):
        if adapters.base is not None:
            yield from _walk(children.pop(adapters.base), name, above, off)
        if not adapters.count:
            return
        own, off, switches = f"{name} (adapters)", adapters.off, f" {adapters.settings}"
    tensors, settings = list[tuple[str, torch.Tensor, torch.nn.Module]](), list[str]()
    for key, value in _values(module, off):
        if isinstance(value, torch.Tensor):
            tensors.append((_joined(own, key), value, module))
        else:
            settings.append(f"{key}={value}")
    yield Part(own, f"{type(module).__qualname__}{switches} {functions} {settings}", tensors)
    for key, child in children.items():
        if child is not None and key != _HEAD and key not in off:
            yield from _walk(
                child,
                _joined(name, key),
                above,
                off if adapters or _is_table(child) else frozenset(),
            )


def _joined(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


# --- adapters ---


def is_adapter(module: torch.nn.Module) -> bool:
    """Whether a module of PEFT's wraps another (its names, so that PEFT need not be there)."""
    names = (
        "adapter_layer_names",
        "active_adapters",
        "disable_adapters",
        "merged_adapters",
        "_get_available_adapters",
    )
    return all(hasattr(type(module), name) for name in names)


@dataclass(frozen=True)
class _Adapters:
    """What a module of PEFT's, which wraps another, adds to it.

    Attributes:
        base: the name of what it wraps.
        count: whether it changes what is computed. It does not while it is off, nor once its
            adapters are merged into the weights.
        off: adapters that are loaded and not active.
        settings: which are active.
    """

    base: str | None
    count: bool
    off: frozenset[str]
    settings: str

    @classmethod
    def of(cls, module: torch.nn.Module) -> _Adapters | None:
        if not is_adapter(module):
            return None
        layer: Any = module
        loaded = {str(name) for name in layer._get_available_adapters()}
        active, is_off, merged = (
            [str(name) for name in layer.active_adapters],
            bool(layer.disable_adapters),
            list(layer.merged_adapters),
        )
        used = [name for name in active if name in loaded]
        base = next(
            (
                name
                for name in ("base_layer", "original_module")
                if module._modules.get(name) is not None
            ),
            None,
        )
        # it passes all on to another adapter
        if base is None and "token_adapter" in module._modules:
            return cls("token_adapter", False, frozenset(), "")
        # the next forward pass takes them out of the weights: all that it may do so with counts
        if is_off and merged:
            return cls(base, True, frozenset(), f"off, merged {merged}")
        return cls(
            base,
            bool(used) and not is_off and not merged,
            frozenset(loaded - set(used)),
            f"active {used}",
        )


def active_adapters(model: torch.nn.Module) -> list[str]:
    """Those of PEFT's adapters that some module uses."""
    found = (
        each
        for module in model.modules()
        if (each := _Adapters.of(module)) is not None and each.count
    )
    return sorted({each.settings for each in found})


def _is_table(module: torch.nn.Module) -> bool:
    """Whether its entries are named by somebody else: by adapters, where one holds it."""
    return (
        isinstance(module, (torch.nn.ModuleDict, torch.nn.ParameterDict))
        or type(module).__name__ == "BufferDict"
    )


# --- values ---


def _values(module: torch.nn.Module, off: Container[str]) -> Iterator[tuple[str, Any]]:
    """(name, tensor or description) of what a module holds itself."""
    held = {**dict(module._parameters.items()), **dict(module._buffers.items())}
    made = _made_by_ropes(module)
    for key, tensor in held.items():
        if tensor is not None and key not in off and key not in made:
            yield from _leaves(tensor, key)
    methods = _replaced(module)
    for key, value in vars(module).items():
        if key in methods:
            continue  # see `_functions`
        if (
            key[:1] != "_"
            and key not in _IRRELEVANT
            and not key.startswith("espnx_")
            and key not in made
            and key not in held
        ):
            yield from _leaves(value, key, off)
    if module.training and _is_random(module):
        yield "training", "True"
    if type(module)._save_to_state_dict is not torch.nn.Module._save_to_state_dict:
        packed = dict[str, Any]()
        module._save_to_state_dict(packed, "", keep_vars=True)
        for key, value in packed.items():
            if key not in held and not key.endswith("_extra_state"):
                yield from _packed(value, key, module)
    if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
        yield from _packed(module.get_extra_state(), "_extra_state", module)


def _packed(value: Any, name: str, module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for key, leaf in _leaves(value, name):
        if isinstance(leaf, _Unknown):
            raise errors.InvalidInputError(
                f"fingerprint of {type(module).__name__}, for a kept cache",
                got=f"{key} of type {leaf} in its state_dict",
                expected="tensors, numbers, strings",
                fix="a cache without a name",
            )
        yield key, leaf


class _Unknown(str):
    """The type of something that nothing more is known of."""


def _leaves(value: Any, name: str, off: Container[str] = ()) -> Iterator[tuple[str, Any]]:
    """(name, tensor or description) of what a value consists of; `off`: entries of a dict at the
    top that do not count."""
    if isinstance(value, torch.Tensor):
        yield from _plain_tensors(value, name)
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield f"{name}.dtype", f"{value.dtype} {value.shape}"
        yield name, torch.from_numpy(np.frombuffer(value.tobytes(), np.uint8).copy())
    elif isinstance(value, Mapping):
        counting = sorted(
            (item for item in value.items() if str(item[0]) not in off),
            key=lambda item: str(item[0]),
        )
        for key, each in counting:
            yield from _leaves(each, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        yield name, f"{len(value)} values"
        for number, each in enumerate(value):
            yield from _leaves(each, f"{name}.{number}")
    elif isinstance(value, (set, frozenset)):
        yield name, str(sorted(map(repr, value)))
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _leaves(getattr(value, field.name), f"{name}.{field.name}")
    elif not isinstance(value, (torch.nn.Module, PreTrainedConfig, GenerationConfig, torch.device)):
        yield name, _described(value)


def _described(value: Any) -> str:
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype)):
        return repr(value)
    if isinstance(value, np.generic):
        return repr(value.item())
    if isinstance(value, functools.partial):
        return (
            f"{_described(value.func)} of {_described(value.args)} "
            f"{_described(sorted(value.keywords.items()))}"
        )
    if isinstance(value, (list, tuple)):
        return str([_described(each) for each in value])
    name = getattr(value, "__qualname__", None)
    return f"{value.__module__}.{name}" if name else _Unknown(type(value).__qualname__)


def _plain_tensors(tensor: torch.Tensor, name: str) -> Iterator[tuple[str, Any]]:
    """The bytes of a tensor, as tensors that are nothing but bytes; what else it is made of, in
    words."""
    kind: Any = type(tensor)
    if hasattr(kind, "__tensor_flatten__"):  # torchao, quanto, DTensor
        inner, rest = tensor.__tensor_flatten__()
        yield name, kind.__qualname__
        for key in inner:
            yield from _leaves(getattr(tensor, key), f"{name}.{key}")
        yield from _leaves(rest, f"{name}.settings")
    elif isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin) or _is_wrapper(tensor):
        raise errors.InvalidInputError(
            "fingerprint of a model, for a kept cache",
            got=f"{name}, a {kind.__qualname__}",
            expected="tensors whose bytes can be read",
            fix="a cache without a name",
        )
    elif tensor.is_quantized:
        yield f"{name}.codes", tensor.int_repr()
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            yield name, f"{tensor.dtype} {tensor.q_scale()} {tensor.q_zero_point()}"
        else:
            yield name, f"{tensor.dtype} {tensor.qscheme()} {tensor.q_per_channel_axis()}"
            yield f"{name}.scales", tensor.q_per_channel_scales()
            yield f"{name}.zero_points", tensor.q_per_channel_zero_points()
    elif tensor.layout != torch.strided:
        yield f"{name}.layout", str(tensor.layout)
        yield name, tensor.to_dense()
    else:
        yield name, tensor


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether its operations are its own, and its bytes not there to be read."""
    kind: Any = type(tensor)
    return kind.__torch_dispatch__ not in (
        torch.Tensor.__torch_dispatch__,
        torch.nn.Parameter.__torch_dispatch__,
    )


def _is_random(module: torch.nn.Module) -> bool:
    """Whether a module computes something else in training."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    chances = (
        value
        for key, value in vars(module).items()
        if any(word in key for word in ("drop", "jitter", "noise"))
    )
    return isinstance(module, _NormBase) or any(
        isinstance(value, float) and value > 0 for value in chances
    )


# --- ropes ---


def _made_by_ropes(module: torch.nn.Module) -> set[str]:
    """The names of what a rotary embedding made of its config for the text that it saw last:
    frequencies that are exactly what transformers makes, and how long that text was. What the
    config makes counts, as `original_inv_freq` and by the config."""
    kinds = getattr(module, "rope_type", None)
    found = set[str]()
    for prefix, layer_type, kind in (
        [(f"{key}_", key, value) for key, value in kinds.items()]
        if isinstance(kinds, dict)
        else [("", None, kinds)]
    ):
        if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
            found |= {f"{prefix}max_seq_len_cached", "max_seq_len_cached"}
            known = _frequencies(module, prefix, layer_type, kind)
            for name in (f"{prefix}inv_freq", f"{prefix}long_inv_freq"):
                held = getattr(module, name, None)
                if held is None or any(_is_equal(held, each) for each in known):
                    found.add(name)
    return found


def _frequencies(module: Any, prefix: str, layer_type: str | None, kind: str) -> list[torch.Tensor]:
    """Those that a rope's buffer holds after a text."""
    original, now = (
        getattr(module, f"{prefix}original_inv_freq", None),
        getattr(module, f"{prefix}inv_freq", None),
    )
    if original is None or now is None or kind not in ROPE_INIT_FUNCTIONS:
        return []
    length = getattr(
        module, f"{prefix}max_seq_len_cached", getattr(module, "max_seq_len_cached", None)
    )
    if kind == "longrope":
        parameters = module.config.rope_parameters
        length = (parameters if layer_type is None else parameters[layer_type])[
            "original_max_position_embeddings"
        ] + 1
    made, _ = ROPE_INIT_FUNCTIONS[kind](
        module.config, now.device, seq_len=length, layer_type=layer_type
    )
    return [original, made]


def _is_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b.to(a.device))


# --- functions ---


def _functions(module: torch.nn.Module, name: str) -> str:
    """The names of a module's forward pass, of methods that were replaced, of its hooks. Raises
    InvalidInputError for what is not known."""
    kind: Any = type(module)
    replaced = list[str]()
    for key in _replaced(module):
        own, function = getattr(kind, key), vars(module)[key]
        function = _peeled(function, own)
        is_own = _unbound(function) is own and getattr(function, "__self__", module) is module
        if not is_own and _package(function) != "espnx":
            _named([function], name, "a forward pass" if key == "forward" else f"a method, {key},")
            replaced.append(f"{key}={_described(function)}")
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return f"{getattr(kind.forward, '__qualname__', kind.forward)} {replaced} {_named(hooks, name)}"


def _replaced(module: torch.nn.Module) -> list[str]:
    """Public methods that a module has of its own, in place of its class's."""
    return [
        key
        for key, value in vars(module).items()
        if key[:1] != "_" and callable(value) and callable(getattr(type(module), key, None))
    ]


def _unbound(function: Any) -> Any:
    return getattr(function, "__func__", function)


def _peeled(function: Any, own: Any = None) -> Any:
    """What a wrapper calls in the end: torch.compile's and accelerate's forward passes lead to the
    module's own."""
    while function is not None and _unbound(function) is not own and _package(function) in _KNOWN:
        inner = getattr(function, "_torchdynamo_orig_callable", None) or getattr(
            function, "__wrapped__", None
        )
        if inner is None:
            break
        function = inner
    return function


def _named(functions: Sequence[Callable[..., Any]], name: str, what: str = "a hook") -> list[str]:
    """Those that may change what a module computes."""
    found = list[str]()
    for each in (_peeled(function) for function in functions):
        package = _package(each)
        if package not in _KNOWN:
            raise errors.InvalidInputError(
                f"fingerprint of a model, for a kept cache: {name or 'the model'} has {what} whose "
                "effect cannot be known",
                got=_described(each),
                expected=f"hooks and forward passes of {', '.join(_KNOWN)}, or none",
                fix="remove it, or use a cache without a name",
            )
        if package not in _ONLOOKERS:
            found.append(_described(each))
    return found


def _package(function: Any) -> str:
    """The package in which a function's code was written; `functools.wraps` hides that."""
    while isinstance(function, functools.partial):
        function = function.func
    function = _unbound(function)
    if inspect.isfunction(function):
        return str(function.__globals__.get("__name__", "")).split(".")[0]
    return str(type(function).__module__).split(".")[0]
