"""Which cores threads are pinned to."""

import pytest

from triptych.services.executor.affinity import cores_to_pin
from triptych.services.runtime.lifecycle import StartupError


def test_auto_pins_when_every_core_has_a_thread() -> None:
    assert cores_to_pin("auto", 2, {4, 2}) == (2, 4)
    assert cores_to_pin("auto", 1, {0, 1}) == ()
    assert cores_to_pin("auto", 3, {0, 1}) == ()
    assert cores_to_pin("auto", 1, {0}) == ()


def test_lists_and_ranges() -> None:
    assert cores_to_pin("none", 2, {0, 1}) == ()
    assert cores_to_pin("3", 1, {0, 3}) == (3,)
    assert cores_to_pin("0-2,5", 4, set(range(8))) == (0, 1, 2, 5)


@pytest.mark.parametrize("setting", ["2", "0-2", "1-0"])
def test_cores_that_are_not_there(setting: str) -> None:
    with pytest.raises(StartupError, match="cpu_affinity"):
        cores_to_pin(setting, 1, {0, 1})
