"""Fixtures and settings that every suite shares."""

import gc
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A shell starts what runs in its background with SIGINT ignored, and the processes under test would
# inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

SMOLLM = Path(__file__).parents[1] / ".models" / "SmolLM2-135M-Instruct.Q4_1.gguf"

# "ci" (the default): the same examples every time, and no clock: a shared machine may be slow.
# "nightly": fresh and many; run it with `--hypothesis-profile=nightly`.
settings.register_profile(
    "ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("nightly", deadline=None, max_examples=2000)
settings.load_profile("ci")


def pytest_collection_finish() -> None:
    """All tests and what they import stay to the end: the garbage collector need not walk them.

    It took two seconds to walk them, and tests that count descriptors collect first.
    """
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rounds", type=int, default=1, help="how often tests/faults disturbs at random"
    )


@pytest.fixture(scope="session")
def rounds(request: pytest.FixtureRequest) -> range:
    """Repetitions of what is random."""
    return range(request.config.getoption("--rounds"))


@pytest.fixture(scope="session")
def smollm() -> Path:
    """The GGUF of SmolLM2-135M-Instruct."""
    if not SMOLLM.is_file():
        pytest.skip(f"{SMOLLM.name} is not in {SMOLLM.parent.name}/: run `make model`")
    return SMOLLM


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what carries the `smollm` mark, with one reason, where the model is not in place."""
    if not SMOLLM.is_file():
        skip = pytest.mark.skip(reason="the small model is missing: run `make model`")
        for item in items:
            if item.get_closest_marker("smollm"):
                item.add_marker(skip)
