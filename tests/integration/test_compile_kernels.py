"""scripts/compile_kernels.py: kernels become machine code of GPUs that are not here."""

import json
import subprocess
import sys
from pathlib import Path

from source_tree import REPO


def compile_kernels(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "scripts/compile_kernels.py", "--jobs", "1", *arguments],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_kernel_is_compiled_for_both_devices(tmp_path: Path) -> None:
    report = tmp_path / "kernels.json"
    done = compile_kernels("--only", "token_sources", "--json", str(report))
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert [each["device"] for each in found] == ["sm_80", "sm_90a"]
    for each in found:
        assert each["kernel"] == "_resolve_kernel"
        assert each["registers"] > 0
        assert each["cubin_bytes"] > 0
        assert each["fault"] == ""
        assert f"| token_sources._resolve_kernel | {each['device']} | 1 |" in done.stdout
