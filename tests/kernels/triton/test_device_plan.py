"""A whole model by the Triton kernels, on the emulated device, against the reference operations:
prefill, decode, graphs, samples, logprobs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from device_driver import DeviceDriver, Sample, reference_draw
from step_driver import DrivenSequence
from tiny_models import reference_logits, save, tiny_model
from triptych.engine_core.layout import PREVIOUS_SAMPLE
from triptych.kernels.sampler_params import SamplerParams
from triptych.services.executor.backend import BackendOptions
from triptych.services.executor.collectives import ALONE
from triptych.services.executor.device.backend import DeviceBackend
from triptych.services.executor.device.emulated_device import EmulatedDevice
from triptych.services.executor.device.loading import load_device_model
from triptych.services.executor.device.triton_ops import TritonOps
from triptych.services.runtime.model_files import resolve_model

OPTIONS = BackendOptions(
    device="emulated", block_size=16, kv_cache_memory=1 << 17, threads=1,
    max_num_seqs=3, max_num_batched_tokens=48, capture_sizes=(1, 3), max_model_len=64,
)  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, object], BackendOptions, float]] = {
    "float32": ("llama", {"num_hidden_layers": 2}, OPTIONS, 2e-4),
    "qwen2 window bfloat16": (
        "qwen2",
        {"num_hidden_layers": 1, "sliding_window": 7, "use_sliding_window": False},
        replace(OPTIONS, dtype="bfloat16"),
        0.15,
    ),
    "mistral int8 cache": (
        "mistral",
        {"num_hidden_layers": 1, "sliding_window": 7, "hidden_act": "gelu_pytorch_tanh"},
        replace(OPTIONS, kv_cache_dtype="int8"),
        0.1,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model(name: str, tmp_path: Path) -> None:
    family, sizes, options, tolerance = MODELS[name]
    model = tiny_model(family, {"head_dim": 16, "num_attention_heads": 4, **sizes})
    save(model, tmp_path)
    device = EmulatedDevice()
    loaded = load_device_model(
        resolve_model(str(tmp_path)), options, lambda *_: None, ALONE, device
    )
    backend = DeviceBackend(replace(loaded, ops=TritonOps(device, deterministic=True)), 20)
    assert backend.device_facts().num_graphs == 2
    driver = DeviceDriver(backend, max_rows=4)
    rng = np.random.default_rng()
    texts = [rng.integers(0, 96, length).tolist() for length in (21, 5)]
    sequences = [DrivenSequence(), DrivenSequence()]
    samples = [
        Sample(0, SamplerParams(temperature=0.0, logprobs=2)),
        Sample(1, SamplerParams(temperature=0.8, top_p=0.9, top_k=30, seed=3, logprobs=0)),
        Sample(1, SamplerParams(temperature=1.0, repetition_penalty=1.2), 0, texts[1], []),
    ]
    # A chunk of the first, then the rest of it beside the whole second.
    driver.launch([(sequences[0], texts[0][:13])], []).wait()
    first = driver.launch(
        [(sequences[0], texts[0][13:]), (sequences[1], texts[1])], samples, [0, 1]
    )
    drawn = first.wait()
    assert drawn is not None
    for row, text in enumerate(texts):
        expected = reference_logits(model, text)[-1]
        np.testing.assert_allclose(driver.logits[row], expected, atol=tolerance)
    for index, sample in enumerate(samples):
        token, of_token = reference_draw(driver.logits[sample.row], sample)
        assert drawn.token_ids[index] == token
        if of_token is not None:
            np.testing.assert_allclose(drawn.logprobs[index], of_token.logprob, rtol=1e-6)
            assert drawn.ranks[index] == of_token.rank
    # Two rows: a graph of three, whose tokens are those that were drawn.
    step = driver.launch(
        [(sequences[0], [PREVIOUS_SAMPLE]), (sequences[1], [PREVIOUS_SAMPLE - 1])],
        [Sample(0, samples[0].params, 1)],
        [0, 1],
    )
    step.wait()
    for row, text in enumerate(texts):
        longer = [*text, int(drawn.token_ids[row])]
        expected = reference_logits(model, longer)[-1]
        np.testing.assert_allclose(driver.logits[row], expected, atol=tolerance)
    backend.close()


def test_a_row_does_not_depend_on_company_chunks_or_graphs(tmp_path: Path) -> None:
    """Bit for bit, as --deterministic promises."""
    save(tiny_model("llama", {"head_dim": 16, "num_hidden_layers": 1}), tmp_path)
    device = EmulatedDevice()
    loaded = load_device_model(
        resolve_model(str(tmp_path)), OPTIONS, lambda *_: None, ALONE, device
    )
    backend = DeviceBackend(replace(loaded, ops=TritonOps(device, deterministic=True)), 24)
    tokens = np.random.default_rng().integers(0, 96, 20).tolist()
    driver = DeviceDriver(backend, max_rows=4)
    alone = driver.run(tokens)
    for cuts in ((19,), (7, 18)):
        sequence, other = DrivenSequence(), DrivenSequence()
        start = 0
        for stop in (*cuts, 20):
            company = [(other, [3, 4, 5] if other.computed == 0 else [6])]
            got = driver.step([*company, (sequence, tokens[start:stop])])[1]
            start = stop
        np.testing.assert_array_equal(got.view(np.uint32), alone.view(np.uint32))
    backend.close()
