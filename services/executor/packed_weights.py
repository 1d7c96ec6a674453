"""A model's weights as the native plan reads them, in one run of memory.

Matrices are repacked into panels in the type that they have in the file, never dequantised; norms
and biases become float32. Where each one lies depends on shapes and types alone.
"""

import contextlib
import itertools
import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from triptych.kernels.cpu import packed_bytes
from triptych.services.executor.column_orders import (
    Order,
    input_orders,
    why_not_ordered,
    with_ordered_producers,
)
from triptych.services.executor.model_config import ModelConfig
from triptych.services.executor.raw_weights import RawWeights, StoredTensor
from triptych.services.executor.weights import Progress
from triptych.services.runtime.gguf_file import TensorType
from triptych.services.runtime.lifecycle import StartupError

_ALIGNMENT = 64
_PANEL = 16
_CHUNK_BYTES = 1 << 22  # of the file at a time: what the process holds of it beside the packed form

Matrix = tuple[int, int, int, npt.NDArray[np.uint8]]
"""Type as the kernels number it, rows, columns, packed bytes."""

_FLOATS = (TensorType.F32, TensorType.F16, TensorType.BF16)


@dataclass(frozen=True, slots=True)
class Part:
    """What the plan calls `name`: a parameter of shape (rows, columns), or (size,)."""

    name: str
    parameter: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A part with its type as the kernels number it, and where its packed bytes lie.

    `column_order`: as `StoredTensor.column_order`.
    """

    part: Part
    type: int
    offset: int
    num_bytes: int
    column_order: Order | None = None

    @property
    def is_matrix(self) -> bool:
        """Whether it is packed; vectors are plain float32."""
        return len(self.part.shape) == 2


def parts_of(config: ModelConfig) -> list[Part]:
    """All weights of a Llama, in the order in which a step reads them."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.query_size, config.kv_size
    parts = []
    if not config.tied_head:
        shape = (config.vocabulary_size, hidden)
        parts.append(Part("embedding", "model.embed_tokens.weight", shape))
    for layer in range(config.num_layers):
        for name, parameter, layer_shape in (
            ("attention_norm", "input_layernorm", (hidden,)),
            ("q", "self_attn.q_proj", (queries, hidden)),
            ("k", "self_attn.k_proj", (keys, hidden)),
            ("v", "self_attn.v_proj", (keys, hidden)),
            ("output", "self_attn.o_proj", (hidden, queries)),
            ("mlp_norm", "post_attention_layernorm", (hidden,)),
            ("gate", "mlp.gate_proj", (inner, hidden)),
            ("up", "mlp.up_proj", (inner, hidden)),
            ("down", "mlp.down_proj", (hidden, inner)),
        ):
            stem = f"model.layers.{layer}.{parameter}"
            parts.append(Part(f"{layer}.{name}", f"{stem}.weight", layer_shape))
            if config.qkv_bias and name in ("q", "k", "v"):
                parts.append(Part(f"{layer}.{name}_bias", f"{stem}.bias", layer_shape[:1]))
    head = "model.embed_tokens" if config.tied_head else "lm_head"
    parts.append(Part("norm", "model.norm.weight", (hidden,)))
    parts.append(Part("head", f"{head}.weight", (config.vocabulary_size, hidden)))
    return parts


def places_of(parts: Sequence[Part], source: RawWeights) -> list[Place]:
    """Lay the parts out. Raises StartupError when the checkpoint has others, or other shapes."""
    source.account([part.parameter for part in parts])
    places = []
    offset = 0
    tensors = _tensors(parts, source)
    for part in parts:
        tensor = tensors[part.name]
        if len(part.shape) == 2:
            size = packed_bytes(tensor.packed_type, *part.shape)
        elif tensor.packed_type in _FLOATS:
            size = 4 * part.shape[0]
        else:
            raise StartupError(f"{tensor.name} is a vector of a quantised type")
        places.append(Place(part, tensor.packed_type, offset, size, tensor.column_order))
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    return places


def why_not_packed(parts: Sequence[Part], source: RawWeights) -> str | None:
    """What the packed formats cannot hold of a checkpoint; None when they can hold all.

    Raises StartupError as places_of does.
    """
    if source.config.quantization is None:
        return None
    source.account([part.parameter for part in parts])
    tensors = _tensors(parts, source)
    obstacles = filter(None, (tensor.obstacle() for tensor in tensors.values()))
    return next(obstacles, None) or why_not_ordered(tensors)


def _tensors(parts: Sequence[Part], source: RawWeights) -> dict[str, StoredTensor]:
    """What is packed as each part, by the parts' names."""
    return with_ordered_producers(
        {part.name: source.tensor(part.parameter, part.shape) for part in parts}
    )


def total_bytes(places: Sequence[Place]) -> int:
    """Size of the memory that the places need."""
    last = places[-1]
    return last.offset + -(-last.num_bytes // _ALIGNMENT) * _ALIGNMENT


def pack_weights(
    places: Sequence[Place],
    source: RawWeights,
    memory: npt.NDArray[np.uint8],
    threads: int,
    progress: Progress,
) -> None:
    """Fill `memory` (uint8, total_bytes) from the checkpoint.

    Pages of the checkpoint are released as they are done with: at no time are more than a few MiB
    of them held, or those of one matrix where its rows lie across them.
    """
    tensors = _tensors([place.part for place in places], source)
    total = sum(tensor.num_bytes for tensor in tensors.values())
    done = 0
    with ThreadPoolExecutor(threads, thread_name_prefix="pack") as pool:
        for place in places:
            tensor = tensors[place.part.name]
            to = memory[place.offset : place.offset + place.num_bytes]
            if not place.is_matrix:
                to.view(np.float32)[:] = tensor.floats()
                done += tensor.num_bytes
                continue
            pack = partial(_pack, place, tensor, to)
            for begin, end in _chunks(tensor, threads):
                list(pool.map(pack, _cut(begin, end, threads)))
                rows = min(end * _PANEL, tensor.rows)
                tensor.release(rows)
                progress(done + tensor.num_bytes * rows // tensor.rows, total)
            done += tensor.num_bytes


def _chunks(tensor: StoredTensor, threads: int) -> Iterator[tuple[int, int]]:
    """Panels [begin, end) whose source is about _CHUNK_BYTES."""
    panels = -(-tensor.rows // _PANEL)
    panel_bytes = tensor.num_bytes // tensor.rows * _PANEL
    step = max(threads, _CHUNK_BYTES // panel_bytes)
    for begin in range(0, panels, step):
        yield begin, min(begin + step, panels)


def _cut(begin: int, end: int, threads: int) -> list[tuple[int, int]]:
    edges = [begin + (end - begin) * i // threads for i in range(threads + 1)]
    return [(a, b) for a, b in itertools.pairwise(edges) if b > a]


def _pack(
    place: Place, tensor: StoredTensor, to: npt.NDArray[np.uint8], panels: tuple[int, int]
) -> None:
    begin, end = panels
    rows = place.part.shape[0]
    first, last = begin * _PANEL, min(end * _PANEL, rows)
    panel_bytes = place.num_bytes // -(-rows // _PANEL)
    tensor.pack(first, last, to[begin * panel_bytes : end * panel_bytes])


def plan_weights(
    places: Sequence[Place], memory: npt.NDArray[np.uint8]
) -> dict[str, Matrix | npt.NDArray[np.float32] | npt.NDArray[np.int32]]:
    """The packed parts by name, as views; "embedding" is "head" where they are one.

    And the orders of the inputs, where those are not straight.
    """
    weights: dict[str, Matrix | npt.NDArray[np.float32] | npt.NDArray[np.int32]] = {}
    for place in places:
        raw = memory[place.offset : place.offset + place.num_bytes]
        if place.is_matrix:
            rows, columns = place.part.shape
            weights[place.part.name] = (place.type, rows, columns, raw)
        else:
            weights[place.part.name] = raw.view(np.float32)
    weights.setdefault("embedding", weights["head"])
    weights.update(input_orders({place.part.name: place.column_order for place in places}))
    return weights


def anonymous_memory(size: int) -> npt.NDArray[np.uint8]:
    """Memory for packed weights that no file backs. Raises OSError."""
    memory = mmap.mmap(-1, size)
    advise(memory, mmap.MADV_HUGEPAGE, 0, size)
    return np.frombuffer(memory, np.uint8)


def advise(memory: mmap.mmap, advice: int, start: int, length: int) -> None:
    """Tell the kernel what would be faster, where it has such a thing: some have no huge pages."""
    with contextlib.suppress(OSError):
        memory.madvise(advice, start, length)
