"""DeviceBackend on the emulated device: what is drawn, what goes to the host, what is refused."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from device_driver import DeviceDriver, Sample, reference_draw
from step_driver import DrivenSequence
from tiny_models import save, tiny_model
from triptych.engine_core.layout import PREVIOUS_SAMPLE
from triptych.kernels.sampler_params import NO_LOGPROBS, NO_TOKEN, SamplerParams
from triptych.services.executor.backend import (
    BackendOptions,
    DrawnColumns,
    KvCacheDtype,
    MeasuredBackend,
    PipelinedBackend,
    open_backend,
)
from triptych.services.executor.device import host_storage
from triptych.services.executor.device.backend import DeviceBackend
from triptych.services.executor.device.device import DeviceMemoryError
from triptych.services.executor.device.emulated_device import EmulatedDevice
from triptych.services.executor.step_inputs import StepInputsError
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.model_files import resolve_model

OPTIONS = BackendOptions(
    device="emulated", block_size=4, kv_cache_memory=1 << 19, threads=1,
    max_num_seqs=8, max_num_batched_tokens=64, swap_space=1 << 17,
)  # fmt: skip
GREEDY = SamplerParams(temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model")
    save(tiny_model("llama", {}), out)
    return out


@pytest.fixture(scope="module")
def backend(folder: Path) -> Iterator[DeviceBackend]:
    backend = opened(folder, OPTIONS)
    yield backend
    backend.close()


def opened(folder: Path, options: BackendOptions) -> DeviceBackend:
    backend = open_backend(resolve_model(str(folder)), options)
    assert isinstance(backend, DeviceBackend)
    return backend


def test_it_is_a_pipelined_and_measured_backend(backend: DeviceBackend) -> None:
    assert isinstance(backend, PipelinedBackend)
    assert isinstance(backend, MeasuredBackend)
    assert backend.facts.plan == "cudagraph"
    assert backend.facts.num_host_blocks > 0
    assert backend.device_facts().num_graphs == 4  # 1, 2, 4, 8


def random_params(rng: np.random.Generator) -> SamplerParams:
    """Any that a device draws by."""
    return SamplerParams(
        temperature=float(rng.choice([0.0, 0.3, 1.0, 2.5])),
        top_k=int(rng.choice([-1, 0, 1, 5, 40])),
        top_p=float(rng.choice([1.0, 0.9, 0.3, 0.0])),
        min_p=float(rng.choice([0.0, 0.02, 0.5])),
        repetition_penalty=float(rng.choice([1.0, 1.3, 0.7])),
        presence_penalty=float(rng.choice([0.0, 0.8])),
        frequency_penalty=float(rng.choice([0.0, -0.4])),
        seed=int(rng.integers(0, 1 << 63)) * 2 + 1,
        choice=int(rng.integers(0, 3)),
        logprobs=int(rng.choice([NO_LOGPROBS, 0, 3, 20])),
    )


@pytest.mark.parametrize("seed", range(6))
def test_tokens_and_logprobs_are_the_reference_samplers(backend: DeviceBackend, seed: int) -> None:
    rng = np.random.default_rng(seed)
    driver = DeviceDriver(backend)
    rows = [
        (DrivenSequence(), rng.integers(0, 96, int(rng.integers(1, 9))).tolist()) for _ in range(5)
    ]
    samples = []
    for _ in range(9):  # several may draw from one row
        output = rng.integers(0, 96, int(rng.integers(0, 6))).tolist()
        samples.append(
            Sample(
                row=int(rng.integers(-1, 5)),
                params=random_params(rng),
                position=len(output),
                prompt=sorted(set(rng.integers(0, 96, 4).tolist())),
                output=output,
            )
        )
    check(driver, driver.draw(rows, samples), samples)


def check(driver: DeviceDriver, drawn: DrawnColumns, samples: list[Sample]) -> None:
    at = top = 0
    for sample, token in zip(samples, drawn.token_ids.tolist(), strict=True):
        if sample.row < 0:
            assert token == NO_TOKEN
            continue
        expected, of_token = reference_draw(driver.logits[sample.row], sample)
        assert token == expected
        if of_token is None:
            continue
        count = len(of_token.top_ids)
        assert drawn.logprobs[at] == np.float32(of_token.logprob)
        assert drawn.ranks[at] == of_token.rank
        assert drawn.top_counts[at] == count
        np.testing.assert_array_equal(drawn.top_ids[top : top + count], of_token.top_ids)
        np.testing.assert_array_equal(drawn.top_logprobs[top : top + count], of_token.top_logprobs)
        at, top = at + 1, top + count
    assert len(drawn.logprobs) == len(drawn.ranks) == len(drawn.top_counts) == at
    assert len(drawn.top_ids) == len(drawn.top_logprobs) == top


@pytest.mark.parametrize("plan", ["cudagraph", "eager"])
def test_a_step_ahead_of_the_host(folder: Path, plan: str) -> None:
    """Two steps in flight: the second's tokens, and its penalties' history, are those that the
    first draws. The same tokens as one step after the other."""
    options = replace(OPTIONS, plan="eager" if plan == "eager" else "cudagraph")
    backend = opened(folder, options)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 96, length).tolist() for length in (3, 9, 1)]
    params = SamplerParams(temperature=1.0, repetition_penalty=1.5, seed=11)

    def samples(outputs: list[list[int]]) -> list[Sample]:
        return [
            Sample(row, params._replace(choice=row), len(output), (), output)
            for row, output in enumerate(outputs)
        ]

    one, plain = DeviceDriver(backend), [DrivenSequence() for _ in prompts]
    outputs: list[list[int]] = [[] for _ in prompts]
    rows = list(zip(plain, prompts, strict=True))
    for _ in range(8):
        drawn = one.draw(rows, samples(outputs)).token_ids.tolist()
        for output, token in zip(outputs, drawn, strict=True):
            output.append(token)
        rows = [(sequence, [token]) for sequence, token in zip(plain, drawn, strict=True)]

    driver, ahead = DeviceDriver(backend), [DrivenSequence() for _ in prompts]
    known: list[list[int]] = [[] for _ in prompts]
    flying = driver.launch(list(zip(ahead, prompts, strict=True)), samples(known))
    for step in range(8):
        following = None
        if step < 7:
            # In another order than the samples were: which sample it was is what counts.
            order = [2, 0, 1] if step == 0 else [0, 1, 2]
            guessed = [[*output, PREVIOUS_SAMPLE - i] for i, output in enumerate(known)]
            following = driver.launch(
                [(ahead[i], [PREVIOUS_SAMPLE - i]) for i in order],
                [replace(samples(guessed)[i], row=row) for row, i in sorted(
                    enumerate(order), key=lambda pair: pair[1])],
            )  # fmt: skip
        drawn_now = flying.wait()
        assert drawn_now is not None
        for output, token in zip(known, drawn_now.token_ids.tolist(), strict=True):
            output.append(token)
        if following is not None:
            flying = following
    assert known == outputs
    backend.close()


def test_only_the_rows_that_the_host_wants_are_copied(backend: DeviceBackend) -> None:
    driver = DeviceDriver(backend)
    rows = [(DrivenSequence(), [1, 2, 3 + row]) for row in range(6)]
    driver.draw(rows, [Sample(0, GREEDY)])
    everything = driver.logits.copy()
    driver.logits[:] = 7.0
    again = [(DrivenSequence(), [1, 2, 3 + row]) for row in range(6)]
    samples = [Sample(row if row not in (1, 2, 5) else -1, GREEDY) for row in range(6)]
    driver.launch(again, samples, [1, 2, 5]).wait()
    for row in range(6):
        expected = everything[row] if row in (1, 2, 5) else np.full(96, 7.0, np.float32)
        np.testing.assert_array_equal(driver.logits[row], expected)


def test_a_step_without_samples_gives_all_logits_and_draws_nothing(backend: DeviceBackend) -> None:
    driver = DeviceDriver(backend)
    rows = [(DrivenSequence(), [5, 6]), (DrivenSequence(), [7])]
    assert driver.launch(rows, []).wait() is None
    assert np.isfinite(driver.logits[:2]).all()
    assert (driver.logits[:2] != 7.0).any()


def test_logits_that_are_not_finite_draw_no_token(tmp_path: Path) -> None:
    model = tiny_model("llama", {})
    with torch.no_grad():
        model.get_parameter("model.embed_tokens.weight")[5] = float("nan")
    save(model, tmp_path)
    backend = opened(tmp_path, OPTIONS)
    driver = DeviceDriver(backend)
    params = SamplerParams(temperature=1.0, logprobs=2)
    bad, good = DrivenSequence(), DrivenSequence()
    drawn = driver.draw([(bad, [5]), (good, [4])], [Sample(0, params), Sample(1, params)])
    assert drawn.token_ids[0] == NO_TOKEN
    assert drawn.token_ids[1] >= 0
    assert len(drawn.logprobs) == 1
    # A step that was made ahead refers to it all the same: it computes something, for nobody.
    step = driver.launch(
        [(bad, [PREVIOUS_SAMPLE]), (good, [PREVIOUS_SAMPLE - 1])],
        [Sample(0, params), Sample(1, params, 1)],
        [1],
    )
    ahead = step.wait()
    assert ahead is not None
    assert ahead.token_ids[1] == reference_draw(driver.logits[1], Sample(1, params, 1))[0]
    backend.close()


def test_steps_larger_than_expected_find_room(folder: Path) -> None:
    """More tokens, rows, logits, samples and history than the settings said: the same tokens."""
    small = opened(folder, replace(OPTIONS, max_num_seqs=1, max_num_batched_tokens=4))
    large = opened(folder, OPTIONS)
    tokens = []
    for backend in (small, large):
        driver = DeviceDriver(backend)
        sequences = [DrivenSequence() for _ in range(6)]
        params = SamplerParams(temperature=1.0, seed=3, presence_penalty=0.5)
        samples = [Sample(row, params._replace(choice=row)) for row in range(6)]
        first = driver.launch([(each, [1, 2, 3]) for each in sequences[:1]], samples[:1])
        # The step behind refers to one that is in flight while room is made.
        rows = [(sequences[0], [PREVIOUS_SAMPLE]), *((each, [4, 5]) for each in sequences[1:])]
        history = list(range(90)) * 40
        wide = [
            replace(sample, position=3600, output=history) if sample.row == 5 else sample
            for sample in samples
        ]
        drawn = [first.wait(), driver.launch(rows, wide).wait()]
        tokens.append([each.token_ids.tolist() for each in drawn if each is not None])
        backend.close()
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 2


def test_reserve_makes_room(folder: Path) -> None:
    backend = opened(folder, replace(OPTIONS, max_num_batched_tokens=8))
    backend.reserve(100)
    driver = DeviceDriver(backend)
    assert np.isfinite(driver.run(list(range(90)))).all()
    backend.close()


@pytest.mark.parametrize(("cache", "chunk"), [("auto", 1 << 30), ("auto", 1), ("int8", 5000)])
def test_blocks_go_to_host_memory_and_come_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cache: KvCacheDtype, chunk: int
) -> None:
    """A sequence's blocks are stored, overwritten, and loaded elsewhere: it goes on as it was.
    Host blocks lie in one piece of memory, or in several."""
    monkeypatch.setattr(host_storage, "_CHUNK_BYTES", chunk)
    backend = opened(folder, replace(OPTIONS, kv_cache_dtype=cache))
    driver = DeviceDriver(backend)
    tokens = list(range(10, 22))  # three blocks
    sequence = DrivenSequence()
    driver.step([(sequence, tokens)])
    expected = driver.step([(sequence, [30])])[0]
    sequence.computed = 12
    old = sequence.blocks[:3]
    intruder = DrivenSequence(blocks=list(old))
    stored = driver.launch(
        [(intruder, list(range(50, 62)))],
        [Sample(0, GREEDY)],
        stores=[(block, host) for host, block in enumerate(old)],
    )
    new = [driver.free.pop(0) for _ in range(3)]
    sequence.blocks = [*new, *sequence.blocks[3:]]
    loaded = driver.launch(
        [(sequence, [30])], [Sample(0, GREEDY)], [0],
        loads=[(host, block) for host, block in enumerate(new)],
    )  # fmt: skip
    stored.wait()
    loaded.wait()
    np.testing.assert_array_equal(driver.logits[0], expected)
    facts = backend.device_facts()
    assert (facts.blocks_stored, facts.blocks_loaded) == (3, 3)
    backend.close()


def test_host_memory_that_cannot_be_pinned_is_told_with_its_setting(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise DeviceMemoryError("out of memory")

    monkeypatch.setattr(EmulatedDevice, "pinned", refuse)
    with pytest.raises(StartupError, match=r"swap_space: the host does not pin .* --swap-space"):
        opened(folder, OPTIONS)


def test_a_block_that_is_stored_and_loaded_in_one_step(backend: DeviceBackend) -> None:
    """Stores come first: what is loaded into a block does not reach the host block that its former
    content goes to."""
    driver = DeviceDriver(backend)
    first, second = DrivenSequence(), DrivenSequence()
    driver.step([(first, [1, 2, 3, 4]), (second, [5, 6, 7, 8])])
    expected = driver.step([(first, [9]), (second, [9])]).copy()
    driver.launch(
        [(DrivenSequence(), [1])], [Sample(0, GREEDY)], stores=[(first.blocks[0], 4)]
    ).wait()
    # second's block goes out and first's comes in its place; then second's is back elsewhere.
    place = second.blocks[0]
    driver.launch(
        [(DrivenSequence(), [1])], [Sample(0, GREEDY)], stores=[(place, 5)], loads=[(4, place)]
    ).wait()
    elsewhere = driver.free.pop(0)
    driver.launch([(DrivenSequence(), [1])], [Sample(0, GREEDY)], loads=[(5, elsewhere)]).wait()
    first.blocks[0], second.blocks[0] = place, elsewhere
    first.computed = second.computed = 4
    got = driver.step([(first, [9]), (second, [9])])
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_a_forked_sequence_copies_its_last_block(folder: Path, kv: str) -> None:
    """Two go on behind the same tokens, the second over a copy of the block that both write to;
    and a block that is copied after it was loaded in the same step has what was loaded."""
    backend = opened(folder, replace(OPTIONS, kv_cache_dtype="auto" if kv == "auto" else "fp8"))
    driver = DeviceDriver(backend)
    first = DrivenSequence()
    driver.step([(first, [1, 2, 3, 4, 5, 6])])
    copied, again = driver.free.pop(0), driver.free.pop(0)
    second = DrivenSequence(6, [first.blocks[0], copied])
    third = DrivenSequence(6, [first.blocks[0], again])
    source = first.blocks[1]
    driver.launch(
        [(first, [7]), (second, [8])], [Sample(0, GREEDY)], [0, 1],
        stores=[(source, 2)], copies=[(source, copied)],
    ).wait()  # fmt: skip
    got = driver.logits[:2].copy()
    # The stored block is the one before 7 was written to it.
    scratch = driver.free.pop(0)
    driver.launch(
        [(third, [8])], [Sample(0, GREEDY)], [0], loads=[(2, scratch)], copies=[(scratch, again)]
    ).wait()
    np.testing.assert_array_equal(driver.logits[0], got[1])
    for tokens, expected in (([1, 2, 3, 4, 5, 6, 7], got[0]), ([1, 2, 3, 4, 5, 6, 8], got[1])):
        np.testing.assert_array_equal(driver.run(tokens), expected)
    backend.close()


def test_ids_out_of_range_are_refused_and_nothing_is_queued(backend: DeviceBackend) -> None:
    driver = DeviceDriver(backend)
    sequence = DrivenSequence()
    driver.draw([(sequence, [1, 2])], [Sample(0, GREEDY)])
    before = backend.cache_on_the_host()
    with pytest.raises(StepInputsError, match="token id -3"):
        driver.launch([(DrivenSequence(), [PREVIOUS_SAMPLE - 1])], [Sample(0, GREEDY)])
    assert torch.equal(torch.nan_to_num(before), torch.nan_to_num(backend.cache_on_the_host()))
    driver.launch([(DrivenSequence(), [1])], [Sample(0, GREEDY)]).wait()
    with pytest.raises(StepInputsError, match="history of sample 1"):
        driver.launch([(DrivenSequence(), [1])], [Sample(0, GREEDY, output=[PREVIOUS_SAMPLE - 1])])
    hosts = backend.facts.num_host_blocks
    for stores, loads in (([(0, hosts)], []), ([], [(hosts, 0)]), ([], [(0, 1 << 20)])):
        with pytest.raises(StepInputsError, match="not within"):
            driver.launch(
                [(DrivenSequence(), [1])], [Sample(0, GREEDY)], stores=stores, loads=loads
            )


def test_rings_are_registered_for_a_session(backend: DeviceBackend) -> None:
    ring = memoryview(bytearray(4096))
    backend.register(memoryview(bytearray(4096)), ring)
    backend.unregister()
    backend.register(memoryview(bytearray(4096)), ring)
    backend.unregister()
