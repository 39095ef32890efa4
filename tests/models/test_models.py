"""The model that comes with the package: by name, from any folder, and never from a network."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

import espnx
from espnx import models
from espnx.errors import FileMissingError


def test_a_name_of_the_command_line() -> None:
    assert models.model_folder("demo") == str(espnx.demo_model())
    assert models.model_folder(os.path.join(".", "demo")) == "./demo"
    assert models.model_folder(Path("/a/b")) == "/a/b"


def test_an_installation_without_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(models, "_FOLDER", tmp_path)
    with pytest.raises(FileMissingError, match="install espnx again"):
        espnx.demo_model()


def test_no_network_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    def refuse(*arguments: Any, **named: Any) -> None:
        raise AssertionError("a network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.chdir(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(espnx.demo_model())
    model = transformers.AutoModelForCausalLM.from_pretrained(espnx.demo_model())
    assert model.config.vocab_size == len(tokenizer) == 4096
