"""The native plan against the eager one: the same model file, the same steps."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from step_driver import DrivenSequence, StepDriver
from tiny_models import LLAMA3_ROPE, save, tiny_model, write_gguf
from triptych.services.executor.activation_precision import ActivationDtype, activation_limits
from triptych.services.executor.backend import Backend, BackendOptions, KvCacheDtype, open_backend
from triptych.services.executor.step_inputs import StepInputsError
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.model_files import resolve_model

Floats = NDArray[np.float32]

MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_wide_heads": ("llama", {"head_dim": 20, "num_key_value_heads": 6}),
    "llama_one_key_head": ("llama", {"num_key_value_heads": 1}),
    "llama_biased": ("qwen2", {}),
    "llama3_rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "linear_rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "mistral_window": ("mistral", {"sliding_window": 7}),
    "gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}


def opened(
    path: Path,
    plan: str = "native",
    kv: KvCacheDtype = "auto",
    threads: int = 1,
    activations: ActivationDtype = "int16",
) -> Backend:
    match plan:
        case "native":
            options = BackendOptions(
                plan="native",
                kv_cache_dtype=kv,
                kv_cache_memory=1 << 21,
                threads=threads,
                activation_dtype=activations,
            )
        case _:
            options = BackendOptions(plan="eager", kv_cache_memory=1 << 21, threads=1)
    return open_backend(resolve_model(str(path)), options)


def tokens_of(length: int, vocabulary: int = 96, seed: int = 0) -> list[int]:
    values = np.random.default_rng(seed).integers(0, vocabulary, length)
    return [int(value) for value in values]


def steps(backend: Backend) -> Floats:
    """Logits of prompts and decodes, alone and mixed, [rows of all steps, vocabulary]."""
    driver = StepDriver(backend)
    first, second, third = DrivenSequence(), DrivenSequence(), DrivenSequence()
    tokens = tokens_of(120)
    out = [
        driver.step([(first, tokens[:40])]),
        driver.step([(first, tokens[40:41]), (second, tokens[:17]), (third, tokens[5:6])]),
        driver.step([(first, tokens[41:42]), (second, tokens[17:18]), (third, tokens[6:30])]),
        driver.step([(second, tokens[18:90])]),
        driver.step([(first, tokens[42:43]), (second, tokens[90:91]), (third, tokens[30:31])]),
    ]
    return np.concatenate(out)


def relative(got: Floats, expected: Floats) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("name", MODELS)
def test_near_eager_in_float32(name: str, tmp_path: Path) -> None:
    save(tiny_model(*MODELS[name]), tmp_path)
    expected = steps(opened(tmp_path, "eager"))
    assert relative(steps(opened(tmp_path, kv="float32", threads=2)), expected) < 1e-5
    assert relative(steps(opened(tmp_path)), expected) < 1e-2
    assert relative(steps(opened(tmp_path, kv="int8")), expected) < 3e-2


@pytest.mark.parametrize(
    "kind",
    ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"],
)
def test_near_eager_on_quantised_weights(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(tiny_model("llama", WIDE), path, type_of=lambda name: kind)
    expected = steps(opened(path, "eager"))
    assert relative(steps(opened(path, kv="float32", threads=2)), expected) < 1e-4
    assert relative(steps(opened(path)), expected) < 1e-2


def test_types_that_differ_from_matrix_to_matrix(tmp_path: Path) -> None:
    """As llama.cpp mixes them: v and down larger, the head and one float among them."""
    kinds = {
        "attn_v": "Q6_K",
        "ffn_down": "Q5_1",
        "output": "Q8_0",
        "attn_k": "F16",
        "ffn_up": "F32",
    }

    def type_of(name: str) -> str:
        return next((kind for part, kind in kinds.items() if part in name), "Q4_K")

    path = tmp_path / "model.gguf"
    write_gguf(tiny_model("llama", WIDE), path, type_of=type_of)
    got = steps(opened(path, kv="float32"))
    assert relative(got, steps(opened(path, "eager"))) < 1e-4


def test_rope_factors_of_a_gguf_file(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 4, dtype=np.float32)
    path = tmp_path / "model.gguf"
    write_gguf(tiny_model("llama", {}), path, factors)
    assert relative(steps(opened(path, kv="float32")), steps(opened(path, "eager"))) < 1e-5


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q6_K"])
def test_int8_activations_are_nearly_as_good(kind: str, tmp_path: Path) -> None:
    """And auto's, some of which are int8, lie between."""
    path = tmp_path / "model.gguf"
    write_gguf(tiny_model("llama", WIDE), path, type_of=lambda name: kind)
    expected = steps(opened(path, "eager"))
    errors = {
        dtype: float(
            np.linalg.norm(steps(opened(path, kv="float32", activations=dtype)) - expected)
        )
        / float(np.linalg.norm(expected))
        for dtype in ("int16", "auto", "int8")
    }
    assert errors["int16"] < 1e-4 < errors["auto"] < errors["int8"] < 3e-2


@pytest.mark.parametrize("threads", [1, 3])
def test_a_role_whose_weights_are_floats_does_not_mind_int8(threads: int, tmp_path: Path) -> None:
    """Matrices of one role may differ: floats among them, which have no codes at all."""
    path = tmp_path / "model.gguf"
    floats = ("attn_k", "ffn_up", "attn_output", "output.weight")
    write_gguf(
        tiny_model("llama", WIDE),
        path,
        type_of=lambda name: "F32" if any(part in name for part in floats) else "Q8_0",
    )
    got = steps(opened(path, kv="float32", threads=threads, activations="int8"))
    assert relative(got, steps(opened(path, "eager"))) < 3e-2


def test_roles_have_one_limit_each() -> None:
    auto, wide, narrow = (activation_limits(dtype) for dtype in ("auto", "int16", "int8"))
    assert set(wide.values()) == {32767}
    assert set(narrow.values()) == {127}
    assert set(auto) == set(wide) == set(narrow)
    assert set(auto.values()) == {127, 32767}


@pytest.mark.smollm
@pytest.mark.parametrize(("kv", "bound"), [("float32", 2e-4), ("bfloat16", 5e-3)])
def test_the_real_model(smollm: Path, kv: KvCacheDtype, bound: float) -> None:
    options = BackendOptions(
        plan="native",
        max_model_len=512,
        kv_cache_memory=64 << 20,
        kv_cache_dtype=kv,
        activation_dtype="int16",
        threads=1,
    )
    files = resolve_model(str(smollm))
    native = open_backend(files, options)
    eager = open_backend(files, replace(options, plan="eager", kv_cache_dtype="auto"))
    tokens = tokens_of(100, 49152)
    assert relative(StepDriver(native).run(tokens), StepDriver(eager).run(tokens)) < bound


SMALL = BackendOptions(kv_cache_memory=1 << 20, threads=1)
REFUSED: dict[str, tuple[str, dict[str, object], BackendOptions, str]] = {
    "gpt2": ("gpt2", {}, SMALL, "family gpt2"),
    "block size": ("llama", {}, replace(SMALL, block_size=8), "block_size 8 is not a multiple"),
    "bfloat16": ("llama", {}, replace(SMALL, dtype="bfloat16"), "dtype bfloat16"),
    "biases": ("llama", {"mlp_bias": True}, SMALL, "biases of the output"),
    "relu": ("llama", {"hidden_act": "relu"}, SMALL, "activation relu"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_plan_cannot_express_is_computed_eagerly(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family, overrides, options, why = REFUSED[name]
    save(tiny_model(family, overrides), tmp_path)
    files = resolve_model(str(tmp_path))
    with caplog.at_level("INFO"):
        backend = open_backend(files, replace(options, plan="auto"))
    assert backend.facts.plan == "eager"
    assert why in caplog.text
    with pytest.raises(StartupError, match="native plan cannot compute this: .*" + why):
        open_backend(files, replace(options, plan="native"))


def test_auto_is_native_where_it_can(tmp_path: Path) -> None:
    save(tiny_model("llama", {}), tmp_path)
    files = resolve_model(str(tmp_path))
    facts = open_backend(files, replace(SMALL, plan="auto")).facts
    assert (facts.plan, facts.dtype, facts.kv_cache_dtype) == ("native", "float32", "bfloat16")
    eager = open_backend(files, replace(SMALL, plan="eager")).facts
    assert (eager.plan, eager.kv_cache_dtype) == ("eager", "float32")
    assert facts.parameters == eager.parameters
    with pytest.raises(StartupError, match="kv_cache_dtype int8 is not supported by the eager"):
        open_backend(files, replace(SMALL, kv_cache_dtype="int8", plan="eager"))
    with pytest.raises(StartupError, match="cpu_isa 'neon': this machine runs"):
        open_backend(files, replace(SMALL, isa="neon", plan="auto"))


def test_torch_is_not_loaded(tmp_path: Path) -> None:
    """It takes more than a second and 200 MiB."""
    save(tiny_model("llama", {}), tmp_path / "folder")
    write_gguf(tiny_model("llama", {}), tmp_path / "model.gguf")
    program = (
        "import sys\n"
        "import triptych.services.executor.__main__\n"
        "from triptych.services.executor.backend import BackendOptions, open_backend\n"
        "from triptych.services.runtime.model_files import resolve_model\n"
        "for path in sys.argv[1:]:\n"
        "    options = BackendOptions(kv_cache_memory=1 << 20)\n"
        "    assert open_backend(resolve_model(path), options).facts.plan == 'native'\n"
        "assert 'torch' not in sys.modules\n"
    )
    paths = [str(tmp_path / "folder"), str(tmp_path / "model.gguf")]
    done = subprocess.run(
        [sys.executable, "-c", program, *paths], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_nan_stays_in_its_row(kind: str, tmp_path: Path) -> None:
    model = tiny_model("llama", WIDE)
    weights = dict(model.named_parameters())
    weights["model.embed_tokens.weight"].data[5] = float("nan")
    path = tmp_path / "model.gguf"
    write_gguf(model, path, type_of=lambda name: "F32" if name.startswith("token") else kind)
    driver = StepDriver(opened(path, threads=2))
    bad, good, late = DrivenSequence(), DrivenSequence(), DrivenSequence()
    logits = driver.step([(good, [1, 2, 3]), (bad, [1, 5, 2]), (late, [4] * 20)])
    assert np.isnan(logits[1]).all()
    assert np.isfinite(logits[[0, 2]]).all()
    # The blocks of the broken sequence go to another one.
    driver.release(bad)
    heir = DrivenSequence()
    got = driver.step([(heir, [1, 2, 3]), (good, [9])])
    np.testing.assert_array_equal(got[0], logits[0])
    assert np.isfinite(got).all()


def test_logits_are_those_of_the_tokens_that_are_wanted(tmp_path: Path) -> None:
    save(tiny_model("llama", {}), tmp_path)
    backend = opened(tmp_path, threads=2)
    driver = StepDriver(backend)
    prompts = [tokens_of(5 + 3 * i, seed=i) for i in range(3)]
    inputs = driver.inputs([(DrivenSequence(), prompt) for prompt in prompts])
    wanted = np.array([0, 1, 3, 4, 9, 12, 13, 20], np.int32)
    driver.logits[:] = 7
    backend.execute(replace(inputs, logits_tokens=wanted), driver.logits)
    got, starts = driver.logits.copy(), inputs.row_starts.copy()  # the slot is used again
    for row, token in enumerate(wanted):
        prompt = int(np.searchsorted(starts, token, "right")) - 1
        text = prompts[prompt][: token - starts[prompt] + 1]
        np.testing.assert_array_equal(got[row], driver.run(text))
    driver.logits[:] = 7
    backend.execute(replace(inputs, logits_tokens=wanted[:0]), driver.logits)
    assert (driver.logits == 7).all()
    inputs = driver.inputs([(DrivenSequence(), prompt) for prompt in prompts])
    with pytest.raises(StepInputsError, match="3 rows of logits, there is room for 2"):
        backend.execute(inputs, driver.logits[:2])


@pytest.mark.parametrize(
    ("plan", "kv_dtype"),  # the eager plan's cache has its dtype
    [("native", "float32"), ("native", "bfloat16"), ("native", "int8"), ("eager", "float32")],
)
def test_copied_blocks_are_what_their_source_was(
    plan: Literal["native", "eager"], kv_dtype: KvCacheDtype, tmp_path: Path
) -> None:
    """A sequence goes on from another's text, by copy: one block after another, in order."""
    save(tiny_model("llama", {}), tmp_path)
    options = BackendOptions(plan=plan, kv_cache_dtype=kv_dtype, kv_cache_memory=1 << 20, threads=1)
    backend = open_backend(resolve_model(str(tmp_path)), options)
    driver = StepDriver(backend)
    size = backend.facts.block_size
    text = tokens_of(2 * size - 3, seed=1)
    first = DrivenSequence()
    driver.step([(first, text)])
    expected = driver.step([(first, [7])])[0]
    spare = driver.free[:3]
    second = DrivenSequence(computed=len(text), blocks=[first.blocks[0], spare[2]])
    inputs = driver.inputs([(second, [7])])
    # By way of a block in between, and in order: 1 to spare 0, that to spare 2.
    inputs = replace(
        inputs,
        copy_sources=np.array([first.blocks[1], spare[0]], np.int32),
        copy_targets=np.array([spare[0], spare[2]], np.int32),
    )
    backend.execute(inputs, driver.logits)
    np.testing.assert_array_equal(driver.logits[0], expected)


def test_what_is_out_of_range_is_refused(tmp_path: Path) -> None:
    save(tiny_model("llama", {}), tmp_path)
    backend = opened(tmp_path, threads=2)
    driver = StepDriver(backend)
    inputs = driver.inputs([(DrivenSequence(), tokens_of(5, seed=1))])
    inputs.token_ids[3] = 96
    with pytest.raises(StepInputsError, match="token id 96 is not within"):
        backend.execute(inputs, driver.logits)
