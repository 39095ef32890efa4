"""Finds the compiled part, ``espnx._C``.

It lies beside this file where espnx was installed, or built in a clone. After ``pip install .`` a
Python that is started in the clone imports the clone's own folder, in which nothing was compiled:
then the installation lends its compiled part, if it was built from the same sources.
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
_FILE = f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
_WHAT = "espnx's compiled part cannot be loaded"
_PACKAGE = Path(__file__).resolve().parent
_IN_CLONE = "run `pip install .` (or `make setup`) in the clone"


def load_compiled() -> ModuleType:
    """The compiled extension.

    Raises:
        MissingDependencyError: it is not built, does not load, or is of other sources than this
            clone.
    """
    try:
        # Asked for by name only where it is: the finder of an editable installation would offer
        # that of another clone.
        if _NAME in sys.modules or (_PACKAGE / _FILE).is_file():
            return importlib.import_module(_NAME)
        return _load_file(_file_of_installation(_PACKAGE))
    except ImportError as error:
        if isinstance(error, MissingDependencyError):
            raise
        raise MissingDependencyError(_WHAT, got=str(error), fix=_IN_CLONE) from error


def _file_of_installation(package: Path) -> Path:
    """The compiled part of the installation that the clone with this package stands in front of.
    Raises MissingDependencyError where there is none, or one of other sources."""
    ours = sources_digest(package.parent)
    for entry in sys.path if ours else ():
        folder = Path(entry, package.name).resolve()
        if folder != package and (folder / _FILE).is_file():
            if read_record(folder).get("sources") == ours:
                return folder / _FILE
            raise MissingDependencyError(
                _WHAT,
                got=(
                    f"{package}, where nothing is compiled, and {folder}, which was built from "
                    "other sources"
                ),
                expected="an installation of this clone as it is now",
                fix=f"{_IN_CLONE}, or start Python in another folder",
            )
    raise MissingDependencyError(_WHAT, got=f"no {_FILE} in {package}", fix=_IN_CLONE)


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
