"""One engine for all tests whose stages are killed again and again."""

from collections.abc import Iterator

import pytest

from faults import KILLED_OFTEN, Bench, running_bench


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory, rounds: range) -> Iterator[Bench]:
    """Modules whose engines have other settings have a bench of their own."""
    with running_bench(tmp_path_factory.mktemp("killed"), *KILLED_OFTEN, seed=11) as bench:
        bench.mixes *= len(rounds)
        yield bench
