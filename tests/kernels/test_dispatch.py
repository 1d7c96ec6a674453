"""The table of instruction sets."""

import subprocess
import sys

import pytest

from sampler_cases import using_isa
from triptych.kernels import cpu


def test_scalar_always_runs_and_comes_last() -> None:
    assert cpu.supported_isas()[-1] == "scalar"
    assert set(cpu.supported_isas()) <= {"avx512vnni", "avx512", "avx2", "scalar"}


def test_the_best_is_active_from_the_start() -> None:
    assert cpu.active_isa() in cpu.supported_isas()


@pytest.mark.parametrize("isa", cpu.supported_isas())
def test_selects_by_name(isa: str) -> None:
    with using_isa(isa):
        assert cpu.active_isa() == isa


@pytest.mark.parametrize("name", ["", "AVX2", "neon", "avx2 "])
def test_refuses_an_unknown_name_and_keeps_what_was(name: str) -> None:
    before = cpu.active_isa()
    with pytest.raises(ValueError, match=f"cannot run CPU kernels for '{name}'"):
        cpu.select_isa(name)
    assert cpu.active_isa() == before


def test_the_module_loads_no_torch() -> None:
    """The scheduler process samples with it and must stay free of torch."""

    program = "import sys, triptych.kernels.cpu.sampler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
