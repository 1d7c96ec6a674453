"""What an executor process holds at most while it loads."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from triptych.services.executor.packed_weights import parts_of, places_of, total_bytes
from triptych.services.executor.raw_weights import open_raw_weights
from triptych.services.runtime.model_files import resolve_model


@pytest.mark.smollm
def test_loading_holds_little_more_than_the_packed_weights(smollm: Path, tmp_path: Path) -> None:
    """At most 1.3 times their size, beyond what a process that has loaded nothing holds: with an
    empty cache, with a full one, and without."""
    source = open_raw_weights(resolve_model(str(smollm)))
    packed = total_bytes(places_of(parts_of(source.config), source))
    bare = peak([sys.executable, "-c", BARE])
    for cache in (str(tmp_path / "cache"), str(tmp_path / "cache"), "off"):
        command = [
            sys.executable, "-m", "triptych.services.executor", f"--model={smollm}",
            f"--run-dir={tmp_path / 'run'}", f"--weight-cache={cache}", "--kv-cache-memory=64MiB",
        ]  # fmt: skip
        assert packed < peak(command) - bare < 1.3 * packed
    assert (tmp_path / "cache").is_dir()


BARE = """
import sys, time
import triptych.services.executor.__main__, triptych.services.executor.native_plan
import triptych.services.executor.gguf_raw
print("model loaded", file=sys.stderr, flush=True)
time.sleep(60)
"""


def peak(command: list[str]) -> int:
    """Peak resident bytes of a process until it says that its model is loaded."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if "model loaded" in line:
                break
        else:
            pytest.fail("".join(said))
        status = Path(f"/proc/{process.pid}/status").read_text()
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024
