"""Checks of the disk under one directory and of the ways to its bytes, ending with a real write and
read through the engine."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import ChecksumError, EspnxError, PathUnavailableError
from ...sizes import format_size
from .. import host
from . import FAIL, INFO, NA, PASS, WARN, Check

PROBE_BYTES = 1 << 20
BLOCK_BYTES = 4096
FREE_BYTES_LOW = 1 << 30
_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_LAYERS = ("overlay", "overlayfs", "aufs")
_NETWORK = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "9p",
    "virtiofs",
    "ceph",
    "glusterfs",
    "lustre",
    "gpfs",
    "beegfs",
    "afs",
    "vboxsf",
    "prl_fs",
)


def storage_module() -> Any:
    """espnx.storage. A broken torch fails in many ways; here they are all one: it cannot be
    imported."""
    try:
        return importlib.import_module("espnx.storage")
    except Exception as error:
        raise ImportError(f"{type(error).__name__}: {error}") from error


def effective_path(directory: str) -> dict[str, Any]:
    """What ``auto`` becomes for a file in `directory`: the engine's name, whether O_DIRECT holds,
    and the alignment.

    The values are None where the extension or a writable directory is missing; ``reason`` then says
    which.
    """
    facts: dict[str, Any] = {"engine": None, "direct": None, "alignment_bytes": None, "reason": ""}
    try:
        storage = storage_module()
        with scratch_file(directory) as path, storage.open_engine("auto") as engine:
            file = engine.open(path, "w")
            facts |= {
                "engine": file.effective,
                "direct": file.direct,
                "alignment_bytes": file.alignment_bytes,
            }
            facts["reason"] = engine.fallback_reason
            engine.close_file(file)
    except (EspnxError, ImportError, OSError) as error:
        facts["reason"] = str(error)
    return facts


@contextlib.contextmanager
def scratch_file(directory: str) -> Any:
    """The name of a file in `directory` that is gone afterwards."""
    descriptor, name = tempfile.mkstemp(prefix=".espnx-probe-", dir=directory)
    os.close(descriptor)
    try:
        yield name
    finally:
        Path(name).unlink(missing_ok=True)


def io_uring() -> Check:
    switch = host.read_text("/proc/sys/kernel/io_uring_disabled")
    evidence = {"kernel.io_uring_disabled": switch, "kernel": os.uname().release}
    why = "without it reads go through a pool of threads: the same results, more CPU for each read"
    try:
        storage_module().open_engine("uring").close()
    except PathUnavailableError as error:
        fix = "sysctl -w kernel.io_uring_disabled=0 (as root)" if switch not in (None, "0") else ""
        fix = (
            fix
            or "allow io_uring_setup in the container's seccomp profile, or compile again with "
            "newer kernel headers (make build)"
        )
        return Check(
            WARN,
            "io-uring",
            f"io_uring cannot be used: {error.what}",
            why,
            fix,
            evidence | {"got": str(error.got)},
        )
    except ImportError as error:
        return Check(
            FAIL,
            "io-uring",
            "io_uring cannot be tried without torch and the extension",
            str(error),
            "make setup",
            evidence,
        )
    return Check(PASS, "io-uring", "io_uring works and is compiled in", evidence=evidence)


def liburing() -> Check:
    return Check(
        INFO, "liburing", "io_uring is called through the kernel interface; liburing is not needed"
    )


def locked_memory() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    evidence = {"soft_bytes": soft, "hard_bytes": hard}
    shown = "unlimited" if soft == resource.RLIM_INFINITY else format_size(soft)
    if soft != resource.RLIM_INFINITY and soft < 8 << 20:
        why = "rings and pinned buffers count against it on older kernels"
        return Check(
            WARN,
            "locked-memory",
            f"RLIMIT_MEMLOCK is {shown}",
            why,
            "ulimit -l unlimited (or limits.conf: memlock)",
            evidence,
        )
    return Check(PASS, "locked-memory", f"RLIMIT_MEMLOCK is {shown}", evidence=evidence)


def o_direct(directory: str) -> Check:
    supported, evidence = host.o_direct_support(directory)
    facts = {
        "directory": directory,
        "file_system": host.mount_of(directory).file_system,
        "probe": evidence,
    }
    if supported is None:
        return Check(
            FAIL,
            "o-direct",
            evidence,
            "an index cannot be built here",
            "name a directory that you may write to: --path DIR",
            facts,
        )
    if not supported:
        why = (
            "reads go through the page cache: memory the caller did not grant, and slower at depth"
        )
        return Check(
            WARN,
            "o-direct",
            f"{facts['file_system']} takes no O_DIRECT here",
            why,
            "use a directory on ext4 or xfs",
            facts,
        )
    return Check(PASS, "o-direct", "O_DIRECT works here", evidence=facts)


def file_system(directory: str) -> Check:
    """Is it a disk of this machine at all?"""
    mount = host.mount_of(directory)
    facts = {
        "directory": directory,
        "mount": mount.point,
        "file_system": mount.file_system,
        "source": mount.source,
    }
    fix = "name a directory on an SSD of this machine: --path DIR"
    says = f"{mount.file_system} is {{}}: {mount.point}"
    if mount.file_system in _MEMORY:
        why = "what is kept here takes the memory that it was to spare, and is gone after a restart"
        return Check(WARN, "file-system", says.format("memory"), why, fix, facts)
    if mount.file_system in _LAYERS:
        why = (
            "the layers of a container: slower than the disk below them, and gone with the "
            "container"
        )
        return Check(
            WARN,
            "file-system",
            says.format("a container's own"),
            why,
            "mount a volume (docker run -v), and use that",
            facts,
        )
    if mount.file_system in _NETWORK or mount.file_system.startswith("fuse"):
        why = (
            "each of many small reads waits for the network, and locks may not hold between "
            "machines"
        )
        return Check(
            WARN, "file-system", says.format("not a disk of this machine"), why, fix, facts
        )
    return Check(
        PASS,
        "file-system",
        f"{mount.file_system} on {mount.device or mount.source}",
        evidence=facts,
    )


def rotational(directory: str) -> Check:
    device = host.mount_of(directory).device
    facts = host.disk_of(device) if device else {}
    if facts.get("rotational") is None:
        return Check(
            NA,
            "rotational",
            f"no block device behind {directory}" if device is None else f"{device} does not say",
            evidence=facts,
        )
    if facts["rotational"] == "0":
        return Check(PASS, "rotational", f"{device} is no rotating disk", evidence=facts)
    why = (
        "a hard disk makes about 150 random reads a second; many virtual disks say that they "
        "rotate, too: `speed` tells which it is"
    )
    fix = (
        f"use an SSD; where it is one: echo 0 > /sys/block/{facts['disk']}/queue/rotational (root)"
    )
    return Check(WARN, "rotational", f"{device} says that it rotates", why, fix, facts)


def free_space(directory: str) -> Check:
    usage = shutil.disk_usage(directory)
    evidence = {"free_bytes": usage.free, "total_bytes": usage.total}
    says = f"{format_size(usage.free)} of {format_size(usage.total)} free"
    if usage.free < FREE_BYTES_LOW:
        return Check(
            WARN,
            "free-space",
            says,
            "a build needs about twice the size of its index",
            "free space, or choose another disk",
            evidence,
        )
    return Check(PASS, "free-space", says, evidence=evidence)


def probe(directory: str) -> Check:
    """Writes 1 MiB, flushes it, reads it back as 256 reads of 4 KiB with their CRC32C checked, and
    compares the contents."""
    try:
        with scratch_file(directory) as path:
            evidence = _round_trip(path)
    except ImportError as error:
        return Check(
            FAIL,
            "probe",
            "no bytes can be moved without torch and the extension",
            str(error),
            "make setup",
        )
    except ChecksumError as error:
        return _wrong_bytes(str(error), {})
    except (EspnxError, OSError) as error:
        why = "the engine cannot work in this directory"
        return Check(
            FAIL,
            "probe",
            f"1 MiB could not be written and read: {error}",
            why,
            "look at the message and at dmesg",
        )
    if not evidence["same"]:
        return _wrong_bytes("the contents differ", evidence)
    says = (
        f"1 MiB written, flushed, read as 256 x 4 KiB through {evidence['effective']}, CRC32C "
        f"right, {evidence['read_us']:.0f} us to read"
    )
    return Check(PASS, "probe", says, evidence=evidence)


def _wrong_bytes(how: str, evidence: dict[str, Any]) -> Check:
    why = "the disk, its driver or the engine returned other bytes than were written"
    return Check(
        FAIL,
        "probe",
        f"what was read is not what was written: {how}",
        why,
        "keep no data here; check dmesg and smartctl",
        evidence,
    )


def _round_trip(path: str) -> dict[str, Any]:
    storage, torch = storage_module(), importlib.import_module("torch")
    with storage.open_engine("auto") as engine:
        room = torch.empty(PROBE_BYTES + BLOCK_BYTES, dtype=torch.uint8).random_(256)
        begin = -room.data_ptr() % BLOCK_BYTES  # direct writes want aligned memory
        content = room[begin : begin + PROBE_BYTES]
        offsets = torch.arange(0, PROBE_BYTES, BLOCK_BYTES)
        sizes = torch.full_like(offsets, BLOCK_BYTES)
        checksums = importlib.import_module("espnx.ops").crc32c_ranges(content, offsets, sizes)
        file = engine.open(path, "w")
        engine.write(
            storage.Plan.of(file, [0], [PROBE_BYTES], out_offset_bytes=[0]), content
        ).wait()
        engine.sync(file)
        start = time.perf_counter()
        future = engine.read(storage.Plan.of(file, offsets, sizes, crc32c=checksums))
        memory = future.wait()
        read_us = (time.perf_counter() - start) * 1e6
        back = torch.cat([memory[at : at + BLOCK_BYTES] for at in future.position_bytes.tolist()])
        return {
            "effective": file.effective,
            "direct": file.direct,
            "read_us": read_us,
            "bytes_asked": future.bytes_asked,
            "bytes_moved": future.bytes_moved,
            "requests": future.request_count,
            "same": bool(torch.equal(content, back)),
        }


def checks(directory: str) -> list[Callable[[], Check]]:
    """The checks for one directory, ready to run."""
    bound: list[Callable[[], Check]] = [io_uring, liburing, locked_memory]
    for function in (file_system, rotational, o_direct, free_space, probe):
        bound.append(functools.update_wrapper(functools.partial(function, directory), function))
    return bound
