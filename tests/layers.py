"""Reads the imports of Python files and judges them: against the table of layers below, and by
whether they run in a circle. Used by test_layering.py and test_style.py."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Imports point down: a package may import itself and packages of a lower rank, never one of its own
# rank.
RANK = {
    "errors": 0,
    "streams": 0,
    "threads": 0,
    "models": 1,
    "storage": 1,
    "ops": 1,
    "weights": 2,
    "device": 2,
    "graph": 3,
    "postings": 3,
    "simulate": 3,
    "clusters": 4,
    "retrieval": 5,
    "kv": 5,
    "encoders": 6,
    "importers": 7,
    "integrations": 8,
    "rag": 9,
    "benchmarks": 10,
    "cli": 11,  # `espnx bench` runs the registered benchmarks
}
# Modules directly under espnx/ that know nothing of the rest.
BASE_MODULES = {
    "errors",
    "_version",
    "sizes",
    "checks",
    "compiled",
    "forks",
    "log",
    "origin",
    "suggestions",
    "tables",
}
# The package's front page and `python -m espnx` only pass on what is below.
FACADES = {"", "__main__"}
NATIVE_USERS = {"storage", "ops", "device", "graph", "postings", "simulate", "cli"}
KERNEL_USERS = {"ops"}
# What a layer may see of `device`: the interface, the registry and what is told of rows, not the
# devices behind them. Layers that are not here may import any of it.
DEVICE_SEEN_BY = {
    "kv": {"workers", "interface", "near_storage", "registry", "row_layout", "several"}
}
# Rooms of one layer that know nothing of one another: what both need lies beside them.
STRANGERS = {"espnx.retrieval.build", "espnx.retrieval.search"}

# Third-party packages by layer, beyond the standard library.
THIRD_PARTY = {
    "errors": set(),
    "streams": {"torch"},
    "models": set(),
    "storage": {"torch", "numpy"},
    "ops": {"torch", "numpy", "triton", "faiss"},
    "weights": {"torch", "numpy"},
    "device": {"torch", "numpy", "yaml"},
    "graph": {"torch", "numpy", "pyarrow"},
    "postings": {"torch", "numpy"},
    "simulate": {"torch", "numpy"},
    "clusters": {"torch", "numpy"},
    "retrieval": {"torch", "numpy", "faiss", "safetensors", "ir_measures"},
    "kv": {"torch", "numpy", "safetensors"},
    "encoders": {"torch", "numpy", "safetensors", "tokenizers", "transformers", "gensim"},
    "importers": {
        "torch",
        "numpy",
        "safetensors",
        "pyarrow",
        "tokenizers",
        "semantic_text_splitter",
    },
    "integrations": {
        "torch",
        "numpy",
        "safetensors",
        "tokenizers",
        "transformers",
        "flexgen",
        "lm_eval",
    },
    "rag": {"torch", "numpy"},
    "cli": {"torch", "numpy", "rich", "shtab"},
    "benchmarks": {
        "torch",
        "numpy",
        "rich",
        "matplotlib",
        "faiss",
        "safetensors",
        "transformers",
        "flexgen",
        "bm25s",
        "tantivy",
        "lancedb",
        "pyarrow",
        "pyvsag",
        "seismic",
        "triton",
        "flash_maxsim",
        "late_interaction_kernels",
    },
    "kernels": {"triton"},
}
#: Where statements hold others.
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
# GPUDirect Storage stays behind one door.
GDS_ONLY = {"cuda", "cupy"}
# FAISS is loaded in one place; what takes it from there beside that are the files of inverted
# lists, HNSW graphs that it has built, heads of lists, and benchmarks that compare with it.
FAISS_LOADER = "espnx.ops.quantise"
FAISS_USERS = (
    "espnx.retrieval.first_stage.ivf",
    "espnx.graph.hnsw.",
    "espnx.clusters.",
    "espnx.benchmarks.",
)


def modules() -> list[tuple[Path, str, bool]]:
    """Every Python file of espnx, kernels and benchmarks with its module name and whether it is a
    package's ``__init__``."""
    found = []
    for folder, prefix in (
        ("espnx", "espnx"),
        ("kernels", "espnx.kernels"),
        ("benchmarks", "espnx.benchmarks"),
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            # links to folders that are walked themselves
            if folder == "espnx" and parts[0] in ("kernels", "benchmarks"):
                continue
            is_package = parts[-1] == "__init__"
            found.append(
                (path, ".".join([prefix, *(parts[:-1] if is_package else parts)]), is_package)
            )
    return found


@dataclass(frozen=True)
class Import:
    """One imported module, absolute, and the line it stands on."""

    module: str
    line: int


def imports_of(source: str, module: str, *, is_package: bool) -> list[Import]:
    """Every import in ``source``, inside functions too; relative ones are resolved against
    ``module``."""
    # `from espnx import storage` imports espnx.storage: judge each name, not only the package.
    halls = {"espnx"} | {room.rpartition(".")[0] for room in STRANGERS}
    found = {
        Import(f"{base}.{name}" if base in halls and name else base, line)
        for base, name, line in imported(source, module, is_package=is_package)
    }
    return sorted(found, key=lambda item: (item.line, item.module))


@functools.lru_cache(1)
def parsed(source: str) -> ast.Module:
    """The tree of a file, for whoever asks for it again at once."""
    return ast.parse(source)


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Every statement, handler of exceptions and case of a file, whatever it stands in. No
    expression is looked into, which is most of what `ast.walk` does."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for field in BLOCKS:
            if isinstance(block := getattr(node, field, None), list):
                waiting += block


@functools.cache
def imported(source: str, module: str, *, is_package: bool) -> list[tuple[str, str, int]]:
    """(the module, the name that is taken from it or "", the line) of every import statement."""
    found: list[tuple[str, str, int]] = []
    for node in statements(parsed(source)):
        if isinstance(node, ast.Import):
            found += ((alias.name, "", node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                parents = package[: len(package) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            found += ((base, alias.name, node.lineno) for alias in node.names)
    return found


#: Modules, or rooms, and what each of them imports.
Graph = Mapping[str, set[str]]


def module_graph(files: Mapping[str, tuple[str, bool]]) -> dict[str, set[str]]:
    """Which modules import which, inside functions and for type checkers too.

    Args:
        files: source of each module, and whether it is a package's ``__init__``. The front page
            ``espnx`` itself passes on what is below and counts for nothing.
    """
    graph = {}
    for module, (source, is_package) in files.items():
        names = imported(source, module, is_package=is_package)
        targets = {
            f"{base}.{name}" if f"{base}.{name}" in files else base for base, name, _ in names
        }
        graph[module] = (targets & files.keys()) - {module, "espnx"}
    return graph


@functools.cache
def own_graph() -> dict[str, set[str]]:
    """The `module_graph` of this tree."""
    return module_graph(
        {module: (path.read_text(), is_package) for path, module, is_package in modules()}
    )


def room_graph(graph: Graph, packages: set[str]) -> dict[str, set[str]]:
    """Which rooms import which. A room is a folder; a module beside other folders, and a package's
    front page, are rooms of their own."""
    halls = {package.rpartition(".")[0] for package in packages}
    rooms = {
        module: module
        if module in packages or (up := module.rpartition(".")[0]) in halls
        else f"{up}.*"
        for module in graph
    }
    found: dict[str, set[str]] = {room: set() for room in rooms.values()}
    for module, targets in graph.items():
        found[rooms[module]] |= {rooms[target] for target in targets} - {rooms[module]}
    return found


def circles(graph: Graph) -> list[list[str]]:
    """The groups of nodes that reach one another, each sorted. One that nothing else in its group
    needs is in none."""
    reach = {node: set(targets) for node, targets in graph.items()}
    for middle in graph:  # Warshall
        for targets in reach.values():
            if middle in targets:
                targets |= reach[middle]
    groups = {
        frozenset(other for other in reach[node] if node in reach.get(other, ()))
        for node in graph
        if node in reach[node]
    }
    return sorted(sorted(group) for group in groups)


def layer_of(module: str) -> str:
    """``espnx.storage.engine`` -> ``storage``; ``espnx`` -> ``''``. kernels/ and benchmarks/ are
    espnx.kernels and espnx.benchmarks."""
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
            problem = (
                _own(layer, item.module)
                or _stranger(module, item.module)
                or _faiss(module, item.module)
            )
        elif top in sys.stdlib_module_names:
            problem = (
                None
                if layer != "kernels" or top in ("typing", "__future__")
                else "kernels import triton and typing alone"
            )
        else:
            problem = _foreign(layer, module, top)
        if problem:
            found.append(f"{module}:{item.line}: imports {item.module}: {problem}")
    loads = [
        line
        for _, name, line in imported(source, module, is_package=is_package)
        if name in ("load_native", "load_compiled")
    ]
    if layer not in NATIVE_USERS and layer not in FACADES:
        found += [
            f"{module}:{line}: imports the loader of the extension: it is for "
            f"{sorted(NATIVE_USERS)}"
            for line in loads
        ]
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
    if (
        target == "device"
        and layer in DEVICE_SEEN_BY
        and imported.split(".")[2:3]
        and imported.split(".")[2] not in DEVICE_SEEN_BY[layer]
    ):
        return f"{layer} sees {sorted(DEVICE_SEEN_BY[layer])} of device alone"
    if target not in RANK:  # espnx itself, or a name that its front page offers
        return (
            None
            if RANK[layer] >= RANK["benchmarks"]
            else "the front page is for users; import the module that defines it"
        )
    return (
        None
        if RANK[target] < RANK[layer]
        else f"{layer} (rank {RANK[layer]}) must not know {target} (rank {RANK[target]})"
    )


def _stranger(module: str, imported: str) -> str | None:
    own, other = (
        {room for room in STRANGERS if f"{name}.".startswith(f"{room}.")}
        for name in (module, imported)
    )
    return (
        f"{own.pop()} and {other.pop()} know nothing of one another"
        if own and other and own != other
        else None
    )


def _faiss(module: str, imported: str) -> str | None:
    is_user = module == FAISS_LOADER or module.startswith(FAISS_USERS)
    return f"FAISS is for {FAISS_USERS} alone" if imported == FAISS_LOADER and not is_user else None


def _foreign(layer: str, module: str, top: str) -> str | None:
    if top in GDS_ONLY:
        return (
            None
            if module.startswith("espnx.storage.gds.engine")
            else f"{top} is for espnx/storage/gds* alone"
        )
    if top == "faiss" and module != FAISS_LOADER:
        return f"FAISS is loaded by {FAISS_LOADER} alone"
    allowed = THIRD_PARTY.get(layer, set())
    return (
        None
        if top in allowed
        else (
            f"{layer or 'espnx/__init__.py'} may use "
            f"{sorted(allowed) or 'the standard library alone'}"
        )
    )
