"""The programs of examples/, built where this machine can: a second build of the same is none."""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from source_tree import REPO

EXAMPLES = REPO / "examples"
BUILD = REPO / "build" / "examples"
RELAYS = REPO / "tests" / "support" / "relays"
PROTOS = REPO / "protos" / "triptych" / "v1"
LAYOUT = (REPO / "engine_core" / "layout.py", REPO / "scripts" / "layout_header.py")
GO_LIBRARIES = Path("/usr/share/gocode")  # where Debian keeps them
BUILD_SECONDS = 540


def python_program(name: str = "example") -> list[str]:
    """Also "own_sampler"."""
    return [sys.executable, str(EXAMPLES / "python" / f"{name}.py")]


def without_numpy(program: list[str]) -> list[str]:
    """The same program of Python, in an environment that has no numpy."""
    python, path = program
    start = (
        "import runpy, sys; sys.modules['numpy'] = None; del sys.argv[0];"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    return [python, "-c", start, path]


def cpp_program(name: str = "example") -> list[str]:
    """Also "own_sampler", "relay". Skips where the tools are missing, saying which."""
    _need("g++", "cmake", "protoc", "grpc_cpp_plugin")
    if not any(Path(each, "grpcpp").is_dir() for each in ("/usr/include", "/usr/local/include")):
        pytest.skip("grpc++ is missing: apt install libgrpc++-dev")
    found = find_spec("google.rpc")
    assert found is not None
    assert found.submodule_search_locations is not None
    protos = Path(next(iter(found.submodule_search_locations))).parents[1]
    folder = BUILD / "cpp"
    configure = [
        "cmake", "-S", str(EXAMPLES / "cpp"), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Debug",
        f"-DGOOGLEAPIS_PROTOS={protos}", "-DCMAKE_CXX_FLAGS=-g0 -Werror",
        f"-DTRIPTYCH_PROGRAM={RELAYS / 'relay.cc'}",
    ]  # fmt: skip
    jobs = str(min(4, len(os.sched_getaffinity(0))))
    compile_it = ["cmake", "--build", str(folder), "-j", jobs]
    _build("cpp", [configure, compile_it])
    return [str(folder / name)]


def go_program(name: str = "example") -> list[str]:
    """Also "relay". Skips where the tools are missing, saying which."""
    _need("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc")
    for needed in ("google.golang.org/grpc", "google.golang.org/genproto"):
        if not (GO_LIBRARIES / "src" / needed).is_dir():
            # Nothing is downloaded by a test: Go's libraries are the distribution's, or not there.
            pytest.skip(f"Go's {needed} is not in {GO_LIBRARIES}: see examples/go/README.md")
    folder = BUILD / "go"
    ours = folder / "gopath" / "src" / "triptych.dev"
    packages = {"example": "examples/go/cmd/example", "relay": "relay"}
    _link(ours / "examples" / "go", EXAMPLES / "go")
    _link(ours / "relay", RELAYS / "go")
    go = [
        "env", "GO111MODULE=off", "GOFLAGS=", f"GOCACHE={folder / 'cache'}",
        f"GOPATH={folder / 'gopath'}:{GO_LIBRARIES}", "go",
    ]  # fmt: skip
    vetted = [f"triptych.dev/{each}" for each in ("examples/go/triptych", *packages.values())]
    commands = [
        [str(EXAMPLES / "go" / "generate.sh"), str(ours / "gen")],
        [*go, "vet", *vetted],
        *(
            [*go, "build", "-o", str(folder / each), f"triptych.dev/{package}"]
            for each, package in packages.items()
        ),
    ]
    _build("go", commands)
    return [str(folder / name)]


def _link(link: Path, folder: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(folder)


def _need(*programs: str) -> None:
    missing = [each for each in programs if shutil.which(each) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (see the examples' README.md)")


def _build(name: str, commands: Sequence[Sequence[str]]) -> None:
    """Run the commands unless they have been run over the same sources, by content."""
    folder = BUILD / name
    folder.mkdir(parents=True, exist_ok=True)
    stamp = folder / "built-from"
    sources = [*(EXAMPLES / name).rglob("*"), *RELAYS.rglob("*"), *PROTOS.glob("*.proto"), *LAYOUT]
    digest = _digest(sources, commands)
    made = (folder / "example", folder / "relay")
    if stamp.exists() and stamp.read_text() == digest and all(each.exists() for each in made):
        return
    for command in commands:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=BUILD_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout
    stamp.write_text(digest)


def _digest(paths: Iterable[Path], commands: Sequence[Sequence[str]]) -> str:
    made = hashlib.sha256(repr(commands).encode())
    for path in sorted(paths):
        if path.is_file():
            made.update(str(path).encode() + b"\0" + path.read_bytes())
    return made.hexdigest()
