"""paged_attention: both launchers against float64, over caches full of NaN where nobody owns."""

from dataclasses import replace

import pytest
import torch

from attention_cases import Shape, make_case
from attention_launches import check, decoded, prefilled
from triptych.kernels.triton import attention_call, attention_forms
from triptych.kernels.triton.paged_attention import decode_attention

torch.set_num_threads(1)

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
INT8, FP8 = torch.int8, torch.float8_e4m3fn
# (queries, tokens): decode, whole prompts, chunks; partition, tile and block borders and beyond.
BORDERS = [(1, 1), (3, 256), (20, 20), (1, 64), (1, 17), (1, 513)]
ROWS = [(1, 1), (20, 20), (2, 300)]


@pytest.mark.parametrize(
    "shape",
    [
        Shape(heads=3, head_dim=80, dtype=BF16),
        Shape(heads=4, kv_heads=2, head_dim=96, dtype=F16, block_size=32),
        Shape(heads=7, head_dim=128, dtype=BF16),
        Shape(heads=1, head_dim=256, dtype=BF16, block_size=128),
        Shape(heads=2, head_dim=256),
        Shape(heads=2, head_dim=40, block_size=4),
        Shape(window=1),
        Shape(window=70, dtype=BF16),
        Shape(window=1000, cap=3.0),
        Shape(cap=0.7, dtype=BF16, window=257),
        Shape(cache=INT8),
        Shape(cache=INT8, dtype=BF16, head_dim=128, window=100),
        Shape(cache=INT8, dtype=F16, kv_heads=2),
        Shape(cache=FP8),
        Shape(cache=FP8, dtype=BF16, head_dim=80, cap=2.0),
        Shape(cache=FP8, dtype=F16),
        Shape(cache=F32, dtype=BF16),
        Shape(cache=BF16, dtype=F32),
        Shape(cache=F16, dtype=BF16),
    ],
    ids=repr,
)
def test_as_in_float64(shape: Shape) -> None:
    check(make_case(shape, ROWS))


@pytest.mark.parametrize("shape", [Shape(kv_heads=2), Shape(dtype=BF16, window=256)], ids=repr)
def test_borders(shape: Shape) -> None:
    check(make_case(shape, BORDERS))


def test_more_heads_than_a_tile_has_rows() -> None:
    check(make_case(Shape(heads=65, head_dim=16, dtype=F16, block_size=8), [(2, 70)]))


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_codes_as_hopper_converts_them(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By float8e4nv instead of by bits: the same."""
    case = make_case(Shape(cache=FP8, dtype=dtype), ROWS[:2])
    by_bits = decoded(case), prefilled(case)
    kind = replace(attention_forms.device_kind(torch.device("cpu")), e4m3=True)
    monkeypatch.setattr(attention_call, "device_kind", lambda _: kind)
    assert torch.equal(decoded(case), by_bits[0])
    assert torch.equal(prefilled(case), by_bits[1])


@pytest.mark.parametrize("changes", [{"roomy": False}, {"hopper": False}])
def test_tiles_of_other_devices(changes: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    kind = replace(attention_forms.device_kind(torch.device("cpu")), **changes)
    monkeypatch.setattr(attention_call, "device_kind", lambda _: kind)
    check(make_case(Shape(cache=INT8, dtype=BF16), ROWS))


def test_strided_tensors() -> None:
    """q of qkv, a layer of a cache of several, heads of out."""
    case = make_case(Shape(dtype=BF16, kv_heads=2), ROWS)
    tokens = len(case.q)
    qkv = torch.full((tokens, 8 * 64), torch.nan, dtype=BF16)
    q = qkv[:, : 4 * 64].view(tokens, 4, 64)
    q.copy_(case.q)
    layers = torch.full((case.k_cache.shape[0], 3, 2, 16, 2, 64), torch.nan, dtype=BF16)
    layers[:, 1, 0], layers[:, 1, 1] = case.k_cache, case.v_cache
    check(replace(case, q=q, k_cache=layers[:, 1, 0], v_cache=layers[:, 1, 1]))


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (Shape(block_size=12), "block_size 12"),
        (Shape(heads=3, kv_heads=2), "3 heads are no multiple of 2"),
        (Shape(head_dim=264), "head_dim 264 is above 256"),
    ],
)
def test_refused(shape: Shape, words: str) -> None:
    case = make_case(shape, [(1, 3)])
    with pytest.raises(ValueError, match=words):
        prefilled(case)
    with pytest.raises(ValueError, match=words):
        decoded(case)


def test_refused_tensors() -> None:
    case = make_case(Shape(), [(1, 3)])
    with pytest.raises(ValueError, match="scales are for"):
        prefilled(replace(case, scales=(case.k_cache[..., 0], case.k_cache[..., 0])))
    with pytest.raises(ValueError, match="scales are for"):
        prefilled(replace(make_case(Shape(cache=INT8), [(1, 3)]), scales=None))
    with pytest.raises(ValueError, match="the same strides"):
        prefilled(replace(case, v_cache=case.v_cache.transpose(0, 1)))
    with pytest.raises(ValueError, match=r"a cache of torch\.int32"):
        prefilled(replace(case, k_cache=case.k_cache.int(), v_cache=case.v_cache.int()))
    with pytest.raises(ValueError, match="a workspace of 5 elements"):
        decode_attention(
            case.q, case.k_cache, case.v_cache, case.block_tables, case.kv_lengths, case.q,
            torch.empty(5), 1.0,
        )  # fmt: skip
