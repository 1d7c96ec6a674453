"""Forked children, each test in an interpreter of its own: pytest's has threads."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

_PRELUDE = """
import os, random, sys, threading, time
from pathlib import Path
from triptych.services.cli.fork import fork_child, single_threaded
def code_of(pid): return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def run(program: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", _PRELUDE + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=cwd,
        input="words for the parent",
    )


def test_a_child_has_its_own_session_name_and_input_and_no_descriptor_too_many(
    tmp_path: Path,
) -> None:
    done = run(
        """
        lock = os.open("lock", os.O_RDWR | os.O_CREAT)
        kept = os.open("kept", os.O_RDWR | os.O_CREAT)
        parent = os.getpid()
        def body():
            assert os.getppid() == parent and os.getsid(0) == os.getpid() == os.getpgrp()
            assert Path("/proc/self/comm").read_text() == "executor-0\\n"
            assert sys.stdin.read() == ""
            names = {os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2, kept)}
            assert os.devnull in names
            try:
                os.fstat(lock)
            except OSError:
                pass
            else:
                raise AssertionError("the lock is open")
            assert single_threaded() and threading.current_thread() is threading.main_thread()
            print("seen by the child")
            return 7
        print("buffered by the parent")
        pid = fork_child("executor-0", body, close=(lock,))
        assert code_of(pid) == 7
        os.fstat(lock)
        assert sys.stdin.read() == "words for the parent"
        """,
        tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["buffered by the parent", "seen by the child"]


def test_children_draw_other_random_numbers_than_their_parent(tmp_path: Path) -> None:
    done = run(
        """
        random.seed(1)
        def body():
            print(random.random())
            return 0
        for _ in range(2):
            assert code_of(fork_child("child", body)) == 0
        print(random.random())
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert len(set(done.stdout.split())) == 3


def test_a_child_leaves_without_its_parents_frames_and_exit_handlers(tmp_path: Path) -> None:
    done = run(
        """
        import atexit
        atexit.register(print, "exit handler")
        def fail():
            raise RuntimeError("told to")
        try:
            assert code_of(fork_child("child", fail)) == 1
            assert code_of(fork_child("child", lambda: 0)) == 0
        finally:
            print("frame")
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["frame", "exit handler"]
    assert done.stderr.count("RuntimeError: told to") == 1


def test_ctrl_c_in_the_middle_of_a_fork_ends_the_child_alone(tmp_path: Path) -> None:
    """It must not come out of fork_child as a second parent."""
    done = run(
        """
        import signal
        def blocked(): return signal.pthread_sigmask(signal.SIG_BLOCK, ())
        fork = os.fork
        def interrupted():
            pid = fork()
            if pid == 0:
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(1000):
                    pass  # where the interpreter would notice
            return pid
        os.fork = interrupted
        try:
            pid = fork_child("child", lambda: 0)
            assert code_of(pid) == 130
            os.fork = fork
            assert code_of(fork_child("child", lambda: len(blocked()))) == 0
            assert not blocked()
        finally:
            print("parent")
        """,
        tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "parent\n"


def test_a_process_with_threads_is_not_forked(tmp_path: Path) -> None:
    done = run(
        """
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
        assert not single_threaded()
        try:
            fork_child("child", lambda: 0)
        except AssertionError as error:
            print(error)
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "fork_child needs a process with one thread\n"


@pytest.mark.parametrize("variable", [None, "3"])
def test_what_forked_processes_share_starts_no_thread(variable: str | None, tmp_path: Path) -> None:
    """All of it is imported as `triptych serve` does, numpy among it; the environment is left."""
    done = run(
        f"""
        import importlib
        name, variable = "OPENBLAS_NUM_THREADS", {variable!r}
        os.environ.pop(name, None)
        if variable:
            os.environ[name] = variable
        from triptych.services.cli import common_imports, serve
        common_imports.import_what_all_need()
        assert "numpy" not in sys.modules
        common_imports.import_what_steps_need()
        assert "numpy" in sys.modules and single_threaded()
        assert os.environ.get(name) == variable
        own = tuple(f"triptych.services.{{one}}." for one in ("tokenizer", "scheduler", "executor"))
        print(*[m for m in sys.modules if m.startswith(own) and not m.endswith(".settings")])
        print(*[m for m in ("torch", "tokenizers", "jinja2", "rich", "yaml") if m in sys.modules])
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "\n\n"


# argv: folder. Supervises two forked stubs, as `triptych serve` does; the first is killed once.
_SUPERVISED = """
import asyncio, signal
from triptych.services.cli.child import ChildSpec
from triptych.services.cli.patience import Limits
from triptych.services.cli.stage import StageLinks
from triptych.services.cli.supervisor import Supervisor

def stub(name):
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    Path(f"{name}.ready").touch()
    while True:
        time.sleep(60)

forked = {name: fork_child(name, lambda name=name: stub(name)) for name in ("a", "b")}
AGAIN = "import pathlib, time; pathlib.Path('a.again').touch(); time.sleep(60)"
specs = [ChildSpec(name, (sys.executable, "-c", AGAIN)) for name in forked]
class Contact:
    def __init__(self, name): self.name = name
    async def ready(self): return Path(f"{self.name}.ready").exists()
    async def until_serving(self):
        while not await self.ready(): await asyncio.sleep(0.01)
    async def answers(self): return True
    async def close(self): pass

async def main():
    stop = asyncio.Event()
    limits = Limits(probe_interval=0.02)
    supervisor = Supervisor(specs, ("b", "a"), StageLinks(Contact), limits, forked=forked)
    async def ready():
        assert supervisor.pids == forked
        os.kill(forked["a"], signal.SIGKILL)
        while not Path("a.again").exists():
            await asyncio.sleep(0.02)
        pids = supervisor.pids
        assert pids["b"] == forked["b"] and pids["a"] != forked["a"]
        stop.set()
    return await supervisor.run(stop, ready)

assert asyncio.run(main()) == 0
for pid in forked.values():
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        print("reaped")
"""


def test_forked_children_are_supervised_and_started_again_as_programs(tmp_path: Path) -> None:
    done = run(_SUPERVISED, tmp_path)
    assert (done.returncode, done.stdout.split()) == (0, ["reaped", "reaped"]), done.stderr


def test_a_child_that_has_no_session_yet_is_killed_all_the_same(tmp_path: Path) -> None:
    done = run(
        """
        import asyncio
        from triptych.services.cli.child import Child, ChildSpec
        pid = os.fork()  # as between the fork and the child's first line
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        async def main():
            child = Child(ChildSpec("child", ("false",)), pid)
            await child.kill()
            return str(await child.exited())
        print(asyncio.run(main()))
        """,
        tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, "child was killed by SIGKILL\n"), done.stderr
