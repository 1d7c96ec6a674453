"""Texts that come back after the device's blocks had to go: what is loaded is what was stored.

`kv_memory.KvMemory` moves the contents, so that each row is seen to attend to its own text.
"""

from hypothesis import given
from hypothesis import strategies as st

from batch_driver import BatchDriver
from batch_model import BatchShape
from batch_twins import TWINS
from triptych.engine_core.batch import SequenceRules

TEXTS = ([0] * 9, [0, 1, 2, 0, 1, 2, 1, 1], [1] * 10, [2, 0, 2, 0, 2, 0, 2], [0, 1, 2, 0, 2, 2])
SHAPES = st.builds(
    BatchShape,
    num_blocks=st.integers(6, 9),
    block_size=st.integers(1, 3),
    num_host_blocks=st.sampled_from((1, 4, 20)),
    max_transfers=st.sampled_from((1, 3, 20)),
)


def _open(driver: BatchDriver, number: int, tokens: list[int], max_tokens: int) -> bool:
    most = min(driver.shape.max_len, driver.shape.num_blocks * driver.shape.block_size)
    tokens = tokens[: most - 1]
    rules = SequenceRules(1000 + number, len(tokens), max_tokens, most)
    return driver.open(number, tokens, "", rules, len(driver.order), 0) >= 0


@given(data=st.data(), shape=SHAPES)
def test_what_is_loaded_is_what_was_stored(data: st.DataObject, shape: BatchShape) -> None:
    driver = BatchDriver(shape, TWINS)
    for number in range(data.draw(st.integers(5, 25))):
        tokens = [*data.draw(st.sampled_from(TEXTS)), *data.draw(st.lists(st.integers(0, 2)))]
        opened = _open(driver, number, tokens, data.draw(st.integers(1, 3)))
        match data.draw(st.integers(0, 9)) if opened else 9:
            case 0:  # not computed, and nobody knows how far it came
                while not driver.plan(20, 20, 20):
                    driver.close(driver.order[-1])
                if driver.rows:
                    driver.write()
                    if data.draw(st.booleans()):
                        driver.execute()
                    driver.abandon()
            case 1:
                driver.close(number)
            case 2:
                driver.step(broken=frozenset({0}))
            case 3:
                driver.forget_cache()
            case _:
                for _ in range(data.draw(st.integers(1, 3))):
                    driver.step()
        while len(driver.order) > 2:
            driver.close(driver.order[data.draw(st.integers(0, 1))])
    driver.close_all()


def test_texts_that_take_turns_are_stored_once_and_loaded_each_time() -> None:
    shape = BatchShape(num_blocks=6, block_size=2, num_host_blocks=20, max_transfers=20)
    driver = BatchDriver(shape, TWINS)
    for number in range(12):
        assert _open(driver, number, list(TEXTS[number % 3]), 1)
        driver.step()
    assert driver.memory.num_loads > 20
    assert driver.memory.num_stores <= 13, "each whole block once"
    driver.close_all()
