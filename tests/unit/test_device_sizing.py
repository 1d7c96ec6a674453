"""How much of a device's memory becomes KV cache, and what is said when there is too little."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from device_driver import DeviceDriver, Sample
from step_driver import DrivenSequence, StepDriver
from tiny_models import save, tiny_model
from triptych.kernels.sampler_params import SamplerParams
from triptych.services.executor.backend import BackendOptions
from triptych.services.executor.collectives import ALONE
from triptych.services.executor.device.backend import DeviceBackend
from triptych.services.executor.device.buckets import Buckets
from triptych.services.executor.device.device import DeviceMemoryError, MemoryFacts, Work
from triptych.services.executor.device.emulated_device import EmulatedDevice
from triptych.services.executor.device.graphs import Graphs, bytes_of_all, capture_graphs
from triptych.services.executor.device.loading import DeviceModel, load_device_model
from triptych.services.executor.device.memory_profile import MemoryNeed, blocks_within, measure
from triptych.services.executor.device.sizing import device_blocks, host_blocks
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.model_files import resolve_model

OPTIONS = BackendOptions(device="emulated", block_size=4, max_num_seqs=4, max_num_batched_tokens=32)
KNOBS = ("--gpu-memory-utilization", "--max-num-seqs", "--max-num-batched-tokens",
         "--max-model-len", "--kv-cache-memory")  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model")
    save(tiny_model("llama", {"max_position_embeddings": 4096}), out)
    return out


def loaded(folder: Path, options: BackendOptions, memory: int) -> DeviceModel:
    device = EmulatedDevice(memory=memory)
    return load_device_model(resolve_model(str(folder)), options, lambda *_: None, ALONE, device)


def test_the_cache_takes_what_is_left_of_the_share(folder: Path) -> None:
    """What is taken when all is open is within the share, and another block would not be."""
    memory = 16 << 20
    model = loaded(folder, replace(OPTIONS, gpu_memory_utilization=0.5), memory)
    blocks = device_blocks(model)
    assert model.device.memory().allocated == model.weight_bytes, "the trial is gone"
    backend = DeviceBackend(model, blocks)
    taken = model.device.memory().allocated
    slack = model.kv_form.block_bytes * (1 + -(-32 // 4))  # the trial's own cache, and a part
    assert memory // 2 - slack <= taken <= memory // 2
    assert backend.facts.num_blocks == blocks
    assert backend.facts.kv_cache_bytes == blocks * model.kv_form.block_bytes
    backend.close()


def test_settings_of_the_step_are_made_room_for(folder: Path) -> None:
    memory = 16 << 20
    few = device_blocks(loaded(folder, OPTIONS, memory))
    many = device_blocks(loaded(folder, replace(OPTIONS, max_num_batched_tokens=1024), memory))
    assert many < few


@pytest.mark.parametrize(("seqs", "tokens"), [(8, 48), (64, 512)])
def test_graphs_are_measured_over_inputs_in_range(folder: Path, seqs: int, tokens: int) -> None:
    """Whatever the step that was tried before has left where they read."""
    options = replace(OPTIONS, max_num_seqs=seqs, max_num_batched_tokens=tokens)
    assert device_blocks(loaded(folder, options, 64 << 20)) > 0


def test_kv_cache_memory_wins(folder: Path) -> None:
    model = loaded(folder, replace(OPTIONS, kv_cache_memory=1 << 18), 16 << 20)
    assert device_blocks(model) == (1 << 18) // model.kv_form.block_bytes


def test_swap_space_is_host_blocks(folder: Path) -> None:
    model = loaded(folder, replace(OPTIONS, swap_space=1 << 18), 16 << 20)
    assert host_blocks(model) == (1 << 18) // model.kv_form.block_bytes
    assert host_blocks(loaded(folder, OPTIONS, 16 << 20)) == 0


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_a_smaller_type_has_more_blocks(folder: Path, dtype: str) -> None:
    options = replace(OPTIONS, kv_cache_memory=1 << 20)
    plain = device_blocks(loaded(folder, options, 16 << 20))
    small = replace(options, kv_cache_dtype="int8" if dtype == "int8" else "fp8")
    assert device_blocks(loaded(folder, small, 16 << 20)) > 2 * plain


def test_no_room_for_a_block_names_what_to_turn() -> None:
    facts = MemoryFacts(free=10, total=1000, allocated=0, reserved=0, peak=0)
    assert blocks_within(facts, MemoryNeed(500, 100, 100), 0.9, 50) == 4
    with pytest.raises(StartupError, match="no room for the KV cache: of 1000 bytes") as caught:
        blocks_within(facts, MemoryNeed(500, 300, 100), 0.9, 50)
    for knob in KNOBS:
        assert knob in str(caught.value)


class Scripted(EmulatedDevice):
    """A device whose steps take memory beside tensors: some for good, some for a moment."""

    def __init__(self) -> None:
        super().__init__(memory=1 << 20)
        self.kept = self.most = 1000

    def memory(self) -> MemoryFacts:
        return MemoryFacts(1_000_000 - self.kept, 1_000_000, 0, self.kept, self.most)


def test_what_a_step_takes_for_good_and_for_a_moment() -> None:
    device = Scripted()

    def step() -> None:
        device.kept, device.most = 1200, 5000

    def graphs() -> int:
        device.kept += 900
        return 77

    assert measure(device, step, graphs) == MemoryNeed(taken=1200, step_peak=3800, graphs=77)
    device.close()


def test_graphs_are_measured_by_the_two_largest(caplog: pytest.LogCaptureFixture) -> None:
    """The first takes the pool; the others share it. What was captured is said in the log."""
    device = Scripted()
    captured: list[int] = []

    def work_of(rows: int) -> Work:
        def work() -> None:
            if rows not in captured:
                captured.append(rows)
            device.kept += 100 if captured == [rows] else 10

        return work

    with caplog.at_level("INFO"):
        graphs = capture_graphs(device, Buckets((1, 2, 4)), work_of)
    assert captured == [4, 2, 1]
    assert graphs.bytes_each == (100, 10, 10)
    assert graphs.num_bytes == bytes_of_all(replace(graphs, bytes_each=(100, 10)), 3) == 120
    assert bytes_of_all(Graphs.none(), 0) == 0
    (record,) = caplog.records
    assert record.getMessage() == "graphs captured"
    assert (record.graphs, record.largest, record.bytes) == (3, 4, 120)  # type: ignore[attr-defined] # extras
    device.close()


def test_out_of_memory_while_it_opens_names_what_to_turn(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triptych.services.executor.device import backend as module

    for memory in (1 << 16, 1 << 18):  # too little for weights; for buffers
        monkeypatch.setattr(module, "open_device", lambda *_, m=memory: EmulatedDevice(memory=m))
        with pytest.raises(StartupError, match="out of memory") as caught:
            module.open_device_backend(resolve_model(str(folder)), OPTIONS, lambda *_: None)
        for knob in KNOBS:
            assert knob in str(caught.value)


def test_out_of_memory_in_a_step_names_what_to_turn_and_passes(folder: Path) -> None:
    """A step that no room can be made for fails; the next one, which fits, is computed."""
    model = loaded(folder, replace(OPTIONS, kv_cache_memory=1 << 20), 3 << 20)
    backend = DeviceBackend(model, device_blocks(model))
    driver = StepDriver(backend, max_tokens=4096)
    expected = driver.run([1, 2, 3])
    with pytest.raises(DeviceMemoryError) as caught:
        driver.run([5] * 4000)
    for knob in KNOBS:
        assert knob in str(caught.value)
    torch.testing.assert_close(torch.from_numpy(driver.run([1, 2, 3])), torch.from_numpy(expected))
    drawn = DeviceDriver(backend).draw(
        [(DrivenSequence(), [1, 2, 3])], [Sample(0, SamplerParams(temperature=0.0))]
    )
    assert drawn.token_ids[0] == int(expected.argmax())
    backend.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype bfloat16"),
        ({"max_model_len": 5000}, "max_model_len 5000"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    folder: Path, options: dict[str, object], said: str
) -> None:
    with pytest.raises(StartupError, match=said):
        loaded(folder, replace(OPTIONS, **options), 16 << 20)  # type: ignore[arg-type] # by name


def test_gpt2_is_refused_by_name(tmp_path: Path) -> None:
    save(tiny_model("gpt2", {}), tmp_path)
    with pytest.raises(StartupError, match="GPT2LMHeadModel is not supported on device emulated"):
        loaded(tmp_path, OPTIONS, 16 << 20)
