"""Every quantised type against arithmetic written here from the format; names, accounting (R52)."""

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gguf_files import RawGguf, RawTensor, scalar, string, strings
from triptych.services.executor import gguf_weights
from triptych.services.executor.gguf_weights import GgufWeights
from triptych.services.executor.models import build_network
from triptych.services.runtime.gguf_file import BLOCKS, TensorType
from triptych.services.runtime.lifecycle import StartupError

H, VOCABULARY = 256, 5
Floats = npt.NDArray[np.float32]


def half(raw: bytes) -> float:
    return float(struct.unpack("<e", raw)[0])


def q4_0(b: bytes) -> list[float]:
    d, q = half(b[:2]), b[2:]
    return [d * ((x & 15) - 8) for x in q] + [d * ((x >> 4) - 8) for x in q]


def q4_1(b: bytes) -> list[float]:
    d, m, q = half(b[:2]), half(b[2:4]), b[4:]
    return [d * (x & 15) + m for x in q] + [d * (x >> 4) + m for x in q]


def fifth_bits(high: int, q: bytes) -> list[int]:
    low = [(x & 15) | ((high >> j & 1) << 4) for j, x in enumerate(q)]
    return low + [(x >> 4) | ((high >> (j + 16) & 1) << 4) for j, x in enumerate(q)]


def q5_0(b: bytes) -> list[float]:
    d, high = half(b[:2]), int.from_bytes(b[2:6], "little")
    return [d * (x - 16) for x in fifth_bits(high, b[6:])]


def q5_1(b: bytes) -> list[float]:
    d, m, high = half(b[:2]), half(b[2:4]), int.from_bytes(b[4:8], "little")
    return [d * x + m for x in fifth_bits(high, b[8:])]


def q8_0(b: bytes) -> list[float]:
    return [half(b[:2]) * x for x in struct.unpack("<32b", b[2:])]


def k_scale(s: bytes, j: int) -> tuple[int, int]:
    """Six-bit scale and minimum of sub-block j (ggml's get_scale_min_k4)."""
    if j < 4:
        return s[j] & 63, s[j + 4] & 63
    return (s[j + 4] & 15) | (s[j - 4] >> 6 << 4), (s[j + 4] >> 4) | (s[j] >> 6 << 4)


def q4_k(b: bytes) -> list[float]:
    d, dmin, scales, q = half(b[:2]), half(b[2:4]), b[4:16], b[16:]
    out = []
    for j in range(8):
        scale, least = k_scale(scales, j)
        for x in q[j // 2 * 32 : j // 2 * 32 + 32]:
            out.append(d * scale * (x >> 4 if j % 2 else x & 15) - dmin * least)
    return out


def q5_k(b: bytes) -> list[float]:
    d, dmin, scales, high, q = half(b[:2]), half(b[2:4]), b[4:16], b[16:48], b[48:]
    out = []
    for j in range(8):
        scale, least = k_scale(scales, j)
        for i, x in enumerate(q[j // 2 * 32 : j // 2 * 32 + 32]):
            value = (x >> 4 if j % 2 else x & 15) + (16 if high[i] >> j & 1 else 0)
            out.append(d * scale * value - dmin * least)
    return out


def q6_k(b: bytes) -> list[float]:
    low, high, scales, d = b[:128], b[128:192], struct.unpack("<16b", b[192:208]), half(b[208:])
    out = [0.0] * 256
    for n in range(2):
        for i in range(32):
            l0, l1, h = low[64 * n + i], low[64 * n + 32 + i], high[32 * n + i]
            values = (l0 & 15, l1 & 15, l0 >> 4, l1 >> 4)
            for part, value in enumerate(values):
                q = (value | (h >> 2 * part & 3) << 4) - 32
                out[128 * n + 32 * part + i] = d * scales[8 * n + 2 * part + i // 16] * q
    return out


def plain(code: str) -> Callable[[bytes], list[float]]:
    return lambda b: [float(struct.unpack(code, b)[0])]


DEQUANTISE: dict[TensorType, Callable[[bytes], list[float]]] = {
    TensorType.F32: plain("<f"),
    TensorType.F16: plain("<e"),
    TensorType.BF16: lambda b: plain("<f")(b"\0\0" + b),
    TensorType.Q4_0: q4_0,
    TensorType.Q4_1: q4_1,
    TensorType.Q5_0: q5_0,
    TensorType.Q5_1: q5_1,
    TensorType.Q8_0: q8_0,
    TensorType.Q4_K: q4_k,
    TensorType.Q5_K: q5_k,
    TensorType.Q6_K: q6_k,
}
# Where a block's float16 scales stand: they are made finite, the other bytes are random.
SCALES = {
    TensorType.Q4_0: (0,), TensorType.Q4_1: (0, 2), TensorType.Q5_0: (0,),
    TensorType.Q5_1: (0, 2), TensorType.Q8_0: (0,), TensorType.Q4_K: (0, 2),
    TensorType.Q5_K: (0, 2), TensorType.Q6_K: (208,),
}  # fmt: skip


def random_blocks(kind: TensorType, rows: int, columns: int, seed: int) -> tuple[bytes, Floats]:
    """Bytes of a matrix and its values by the arithmetic above."""
    elements, size = BLOCKS[kind]
    random = np.random.default_rng(seed)
    count = rows * columns // elements
    if kind not in SCALES:
        values = random.standard_normal(count).astype(np.float32)
        raw = values.astype(np.float16).tobytes() if kind == TensorType.F16 else values.tobytes()
        if kind == TensorType.BF16:
            raw = values.view(np.uint16).reshape(-1, 2)[:, 1].tobytes()
    else:
        blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
        for at in SCALES[kind]:
            scales = (random.standard_normal(count) * 0.1).astype(np.float16)
            blocks[:, at : at + 2] = scales.view(np.uint8).reshape(count, 2)
        raw = blocks.tobytes()
    out = [x for i in range(count) for x in DEQUANTISE[kind](raw[i * size : (i + 1) * size])]
    return raw, np.array(out, dtype=np.float32).reshape(rows, columns)


def llama(
    kind: TensorType = TensorType.F32, *, untied: bool = False
) -> tuple[RawGguf, dict[str, Floats]]:
    """One layer, two heads over one key-value head; every matrix of one type."""
    parts = {"attn_q": H, "attn_k": H // 2, "attn_v": H // 2, "attn_output": H}
    parts |= {"ffn_gate": H, "ffn_up": H, "ffn_down": H}
    shapes = {"token_embd": VOCABULARY, **{f"blk.0.{name}": rows for name, rows in parts.items()}}
    if untied:
        shapes["output"] = VOCABULARY
    values, tensors = {}, []
    for seed, (name, rows) in enumerate(shapes.items()):
        raw, values[name] = random_blocks(kind, rows, H, seed)
        tensors.append(RawTensor(name + ".weight", (H, rows), int(kind), raw))
    for seed, name in enumerate(("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")):
        norm = np.random.default_rng(seed).standard_normal(H).astype(np.float32)
        values[name] = norm
        tensors.append(RawTensor(name + ".weight", (H,), 0, norm.tobytes()))
    metadata = {
        "general.architecture": string("llama"),
        "llama.block_count": scalar("u32", 1),
        "llama.context_length": scalar("u32", 32),
        "llama.embedding_length": scalar("u32", H),
        "llama.feed_forward_length": scalar("u32", H),
        "llama.attention.head_count": scalar("u32", 2),
        "llama.attention.head_count_kv": scalar("u32", 1),
        "llama.attention.layer_norm_rms_epsilon": scalar("f32", 1e-5),
        "tokenizer.ggml.tokens": strings(["a"] * VOCABULARY),
    }
    return RawGguf(metadata, tensors), values


def load(path: Path, file: RawGguf, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    path.write_bytes(file.write())
    source = GgufWeights(path)
    network = build_network(source.config, dtype, source.rope_factors())
    parameters = network.parameters()
    seen: list[tuple[int, int]] = []
    source.load(parameters, lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    return parameters


@pytest.mark.parametrize("kind", TensorType)
def test_every_type(kind: TensorType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_weights, "_CHUNK_ELEMENTS", 3 * H)  # chunks that divide nothing
    file, values = llama(kind)
    loaded = load(tmp_path / "m.gguf", file)
    layer = "model.layers.0."
    for name, theirs in (
        ("model.embed_tokens", "token_embd"),
        (layer + "self_attn.v_proj", "blk.0.attn_v"),
        (layer + "self_attn.o_proj", "blk.0.attn_output"),
        (layer + "mlp.gate_proj", "blk.0.ffn_gate"),
        (layer + "mlp.up_proj", "blk.0.ffn_up"),
        (layer + "mlp.down_proj", "blk.0.ffn_down"),
        (layer + "input_layernorm", "blk.0.attn_norm"),
        ("model.norm", "output_norm"),
    ):
        np.testing.assert_allclose(
            loaded[name + ".weight"].numpy(), values[theirs], rtol=1e-6, atol=1e-6
        )
    for name, heads in (("q", 2), ("k", 1)):
        got = loaded[f"{layer}self_attn.{name}_proj.weight"].numpy()
        stored = values[f"blk.0.attn_{name}"].reshape(heads, H // 4, 2, H)
        # Neighbours (2i, 2i + 1) of the file are row i of the first and of the second half.
        wanted = np.concatenate((stored[:, :, 0], stored[:, :, 1]), axis=1).reshape(-1, H)
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


def test_to_bfloat16(tmp_path: Path) -> None:
    file, values = llama(TensorType.Q4_1)
    loaded = load(tmp_path / "m.gguf", file, torch.bfloat16)
    weight = loaded["model.layers.0.mlp.up_proj.weight"]
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight, torch.from_numpy(values["blk.0.ffn_up"]).to(torch.bfloat16))
    assert loaded["model.norm.weight"].dtype == torch.float32


def test_untied_head(tmp_path: Path) -> None:
    file, values = llama(untied=True)
    loaded = load(tmp_path / "m.gguf", file)
    assert np.array_equal(loaded["lm_head.weight"].numpy(), values["output"])
    assert "lm_head.weight" not in load(tmp_path / "m.gguf", llama()[0])


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    file, _ = llama()
    path = tmp_path / "m.gguf"
    without = [each for each in file.tensors if each.name != "blk.0.ffn_up.weight"]
    with pytest.raises(StartupError, match=r"tensor blk\.0\.ffn_up\.weight missing"):
        load(path, replace(file, tensors=without))
    extra = RawTensor("blk.0.attn_q_norm.weight", (8,), 0, bytes(32))
    with pytest.raises(StartupError, match=r"blk\.0\.attn_q_norm\.weight in the weights, but not"):
        load(path, replace(file, tensors=[*file.tensors, extra]))
    wrong = [
        replace(each, dims=(H // 2,), data=bytes(2 * H))
        if each.name == "output_norm.weight"
        else each
        for each in file.tensors
    ]
    with pytest.raises(StartupError, match=r"output_norm\.weight has shape \[128\], .* \[256\]"):
        load(path, replace(file, tensors=wrong))


def test_rope_factors_are_checked(tmp_path: Path) -> None:
    file, _ = llama()
    path = tmp_path / "m.gguf"

    def factors(values: Floats) -> RawGguf:
        tensor = RawTensor("rope_freqs.weight", values.shape, 0, values.tobytes())
        return replace(file, tensors=[*file.tensors, tensor])

    load(path, factors(np.ones(H // 4, dtype=np.float32)))
    with pytest.raises(StartupError, match="not positive"):
        load(path, factors(np.zeros(H // 4, dtype=np.float32)))
    with pytest.raises(StartupError, match=r"rope_freqs\.weight has shape"):
        load(path, factors(np.ones(3, dtype=np.float32)))
