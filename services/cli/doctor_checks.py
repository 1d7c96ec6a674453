"""What `triptych doctor` looks at, one function a thing. None of them starts a process."""

import fcntl
import importlib
import importlib.metadata
import mmap
import os
import platform
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import Requirement

from triptych.services.cli.panel import size
from triptych.services.cli.stage_table import state_and_reason
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.model_files import resolve_model
from triptych.services.runtime.run_dir import RunDir
from triptych.services.runtime.stage_states import read_states
from triptych.services.tokenizer.tokenizer import load_tokenizer
from triptych.v1 import control_pb2

_MIN_PYTHON = (3, 11)
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_PROBE_BYTES = 1 << 20
_MIN_MEMORY = 1 << 30
_CPU_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "asimddp")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check. `remedy` says what to do about it, unless it is well."""

    what: str
    state: Literal["ok", "warn", "fail"]
    detail: str
    remedy: str = ""


def python() -> Finding:
    """The interpreter."""
    detail = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < _MIN_PYTHON:
        return Finding("python", "fail", detail, "use Python 3.11 or later")
    return Finding("python", "ok", detail)


def dependencies() -> Finding:
    """Every package that the distribution asks for, torch first among them, within its range."""
    wrong: list[str] = []
    torch = "not installed"
    for line in importlib.metadata.requires("triptych") or []:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement} is missing")
            continue
        if requirement.name == "torch":
            torch = version
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} is not {requirement.specifier}")
    if wrong:
        return Finding("packages", "fail", "; ".join(wrong), "pip install -e . in a fresh venv")
    return Finding("packages", "ok", f"torch {torch}, all others in range")


def native_modules() -> Finding:
    """The two C++ modules."""
    names = ("triptych.kernels.core._core", "triptych.kernels.cpu._cpu")
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            return Finding(
                "native modules",
                "fail",
                f"{name}: {error}",
                "build them: pip install -e . (needs a C++17 compiler)",
            )
    return Finding("native modules", "ok", ", ".join(names))


def instruction_sets(cpuinfo: Path = Path("/proc/cpuinfo")) -> Finding:
    """What the CPU can do beyond its baseline."""
    flags: set[str] = set()
    for line in cpuinfo.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            flags = set(value.split())
            break
    found = [name for name in _CPU_FLAGS if name in flags]
    detail = f"{platform.machine()}: {' '.join(found) or 'baseline only'}"
    if platform.machine() == "x86_64" and "avx2" not in flags:
        return Finding("instructions", "warn", detail, "expect slow steps: this CPU has no AVX2")
    return Finding("instructions", "ok", detail)


def shared_memory() -> Finding:
    """A sealed memfd that a second descriptor, passed over a socket, maps."""
    try:
        _pass_a_region()
    except OSError as error:
        return Finding(
            "shared memory",
            "fail",
            f"memfd with seals over a unix socket: {error.strerror}",
            "allow memfd_create and SCM_RIGHTS in this sandbox or container",
        )
    return Finding("shared memory", "ok", "memfd, seals, descriptor passing")


def _pass_a_region() -> None:
    fd = os.memfd_create("triptych-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    passed: list[int] = []
    try:
        os.ftruncate(fd, _PROBE_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        socket.send_fds(left, [b"r"], [fd])
        _, passed, _, _ = socket.recv_fds(right, 1, 1)
        with mmap.mmap(fd, _PROBE_BYTES) as ours, mmap.mmap(passed[0], _PROBE_BYTES) as theirs:
            ours[-1:] = b"!"
            if theirs[-1:] != b"!":
                raise OSError(0, "two maps of one region differ")
    finally:
        left.close()
        right.close()
        for each in (fd, *passed):
            os.close(each)


def port(host: str, number: int) -> Finding:
    """Whether the public port is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except OSError as error:
            detail = f"{host}:{number}: {error.strerror}"
            return Finding("port", "warn", detail, "serve with another --port (0 takes a free one)")
    return Finding("port", "ok", f"{host}:{number} is free")


def run_directory(path: str) -> Finding:
    """Whether the run directory can be used, and is not in use. One that is not there stays so."""
    folder = Path(path).absolute()
    if not folder.exists():
        parent = next(each for each in folder.parents if each.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            remedy = "give another one with --run-dir"
            return Finding("run directory", "fail", f"{parent} is not writable", remedy)
        return Finding("run directory", "ok", f"{folder} can be made")
    try:
        run_dir = RunDir.open(path)
    except StartupError as error:
        return Finding("run directory", "fail", str(error), "give another one with --run-dir")
    try:
        os.close(run_dir.lock("supervisor"))
    except StartupError as error:
        return Finding("run directory", "warn", str(error), "a second engine needs a --run-dir")
    return Finding("run directory", "ok", str(run_dir.path))


def engine(path: str) -> Finding:
    """What the engine of the run directory says of its processes."""
    folder = Path(path).absolute()
    try:
        run_dir = RunDir.open(folder, create=False)
    except StartupError:
        return Finding("engine", "ok", f"none runs in {folder}")
    stages = read_states(run_dir).stages
    if not stages:
        return Finding("engine", "ok", f"none runs in {folder}")
    detail = "; ".join(f"{stage.name} {state_and_reason(stage)}" for stage in stages)
    if all(stage.state == control_pb2.StageState.STATE_READY for stage in stages):
        return Finding("engine", "ok", detail)
    return Finding("engine", "warn", detail, "see its log, and triptych control status")


def memory_and_cores() -> Finding:
    """What there is to compute with."""
    available = psutil.virtual_memory().available
    cores = len(os.sched_getaffinity(0))
    detail = f"{size(available)} available, {cores} cores"
    if available < _MIN_MEMORY:
        return Finding("memory", "warn", detail, "free some, or lower --kv-cache-memory")
    return Finding("memory", "ok", detail)


def model_files(model: str) -> Finding:
    """Whether the model resolves to files of a known form, and its tokenizer loads."""
    try:
        files = resolve_model(model)
        tokenizer = load_tokenizer(files)
    except StartupError as error:
        return Finding("model files", "fail", str(error), "give --model a GGUF file or a folder")
    chat = "with" if tokenizer.has_chat_template else "without"
    detail = f"{files.name}: {files.kind}, tokenizer {chat} chat template, at {files.path}"
    return Finding("model files", "ok", detail)


def guarded(what: str, check: Callable[[], Finding]) -> Finding:
    """Run a check; an operating-system error that it did not expect is a failure of its own."""
    try:
        return check()
    except OSError as error:
        remedy = "mend what the system says, then run doctor again"
        return Finding(what, "fail", str(error), remedy)
