"""Finds the compiled part, ``espnx._C``.

It lies beside this file where espnx was installed, or built in a clone. After ``pip install .`` a Python that is started in the clone
imports the clone's own folder, in which nothing was compiled: then the installation lends its compiled part, if it was built from the same
sources.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

from .errors import MissingDependencyError
from .origin import read_record, sources_digest

_NAME = "espnx._C"
_WHAT = "espnx's compiled part cannot be loaded"
_PACKAGE = Path(__file__).resolve().parent
_IN_CLONE = "run `pip install .` (or `make setup`) in the clone"


def load_compiled() -> ModuleType:
    """The compiled extension.

    Raises:
        MissingDependencyError: it is not built, does not load, or is of other sources than this clone.
    """
    lent = None if _is_beside(_PACKAGE) else _file_of_installation(_PACKAGE)
    try:
        return importlib.import_module(_NAME) if lent is None else _load_file(lent)
    except ImportError as error:
        raise MissingDependencyError(_WHAT, got=str(error), fix=_IN_CLONE) from error


def _is_beside(package: Path) -> bool:
    return _NAME in sys.modules or any(package.glob("_C*.so"))


def _file_of_installation(package: Path) -> Path | None:
    """The compiled part of the installation that the clone with this package stands in front of; None where there is no clone, or no
    installation. Raises MissingDependencyError where the two are of different sources."""
    ours = sources_digest(package.parent)
    name = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    for entry in sys.path if ours else ():
        file = Path(entry, package.name, name).resolve()
        if file.parent != package and file.is_file():
            if read_record(file.parent).get("sources") != ours:
                raise MissingDependencyError(
                    _WHAT, got=f"the folder {package}, with nothing compiled in it, and {file}, which was built from other sources",
                    expected="an installation of this clone as it is now", fix=f"{_IN_CLONE} again, or start Python in another folder",
                )  # fmt: skip
            return file
    return None


def _load_file(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_NAME, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no extension module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[_NAME]
        raise
    return module
