"""Fixtures of the unit tests."""

from collections.abc import Iterator

import pytest

from batch_calls import build
from batch_twins import TWINS
from triptych.engine_core.batch import Batch


@pytest.fixture(params=TWINS, ids=["python", "native"])
def batch(request: pytest.FixtureRequest) -> Iterator[Batch]:
    """Either twin, with 8 blocks of 4 tokens."""
    made = build(request.param)
    yield made
    made.check()
