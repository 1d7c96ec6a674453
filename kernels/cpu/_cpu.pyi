from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from triptych.kernels.sampler_params import Integers, SamplerParams

_Logprobs = tuple[float, int, NDArray[np.int32], NDArray[np.float32]]

class Sampler:
    def __init__(self, vocabulary_size: int, processed_logprobs: bool) -> None: ...
    def open(
        self, sequence_id: int, params: SamplerParams, prompt_ids: Integers, output_ids: Integers
    ) -> None: ...
    def append(self, sequence_ids: Integers, token_ids: Integers) -> None: ...
    def close(self, sequence_id: int) -> None: ...
    @property
    def open_sequences(self) -> int: ...
    def draw(
        self,
        logits: NDArray[np.float32],
        sequence_ids: Integers,
        logits_rows: Integers,
        allowed_masks: Sequence[NDArray[np.uint32] | None] | None,
    ) -> tuple[NDArray[np.int32], list[tuple[int, _Logprobs]]]: ...
    def score(
        self, logits: NDArray[np.float32], logits_rows: Integers, token_ids: Integers, top: int
    ) -> list[_Logprobs | None]: ...

def philox4x32(counter: Sequence[int], key0: int, key1: int) -> list[int]: ...
def active_isa() -> str: ...
def supported_isas() -> list[str]: ...
def select_isa(name: str) -> None: ...

PACKED_LAYOUT_VERSION: int

_Matrix = tuple[int, int, int, NDArray[np.uint8]]

class Plan:
    def __init__(
        self,
        shape: Mapping[str, object],
        weights: Mapping[str, _Matrix | NDArray[np.float32] | NDArray[np.int32]],
        threads: int,
        affinity: Sequence[int],
    ) -> None: ...
    def reserve(self, tokens: int) -> None: ...
    def pin_caller(self) -> None: ...
    def step(
        self,
        token_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        slots: NDArray[np.int32],
        row_starts: NDArray[np.int32],
        kv_lengths: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        logits_tokens: NDArray[np.int32],
        copy_sources: NDArray[np.int32],
        copy_targets: NDArray[np.int32],
        logits: NDArray[np.float32],
    ) -> None: ...
    @property
    def kv_bytes(self) -> int: ...
    @property
    def cycles(self) -> list[int]: ...

def packed_bytes(ggml_type: int, rows: int, columns: int) -> int: ...
def pack_into(
    ggml_type: int,
    rows: int,
    columns: int,
    source: NDArray[np.uint8],
    destination: NDArray[np.uint8],
) -> None: ...
def pack_groups_into(
    type: int,
    codes: NDArray[np.uint8],
    scales: NDArray[np.uint16],
    zeros: NDArray[np.uint16],
    destination: NDArray[np.uint8],
) -> None: ...
def unpack_matrix(matrix: _Matrix) -> NDArray[np.float32]: ...
def quantize_rows(
    x: NDArray[np.float32], activation_limit: int = 32767
) -> tuple[NDArray[np.int16], NDArray[np.float32], NDArray[np.float32], NDArray[np.int32]]: ...
def matmul(
    matrix: _Matrix,
    x: NDArray[np.float32],
    activation_limit: int = 32767,
    rows_at_once: int = ...,
    parts: int = 1,
    initial: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]: ...
def time_matmul(
    matrices: Sequence[_Matrix],
    x: NDArray[np.float32],
    cores: Sequence[int],
    rounds: int,
    per_round: int,
    activation_limit: int = 32767,
) -> list[float]: ...
def multiply_add_limit(
    cores: Sequence[int], rounds: int, activation_limit: int = 32767
) -> float: ...
def read_limit(
    bytes: NDArray[np.uint8], cores: Sequence[int], rounds: int, per_round: int
) -> float: ...
def panel_shares(rows: Sequence[int], threads: int, gate: bool) -> list[list[tuple[int, int]]]: ...
def checksum(bytes: NDArray[np.uint8]) -> int: ...
def kv_block_bytes(
    layers: int, block_size: int, kv_heads: int, head_dim: int, kv_dtype: str
) -> int: ...
def rms_norm(
    x: NDArray[np.float32], weight: NDArray[np.float32], epsilon: float
) -> NDArray[np.float32]: ...
def gate(
    activation: str, gate: NDArray[np.float32], up: NDArray[np.float32]
) -> NDArray[np.float32]: ...
def soft_cap(x: NDArray[np.float32], cap: float) -> NDArray[np.float32]: ...
def rotate(
    x: NDArray[np.float32],
    cosines: NDArray[np.float32],
    sines: NDArray[np.float32],
    scale: float,
) -> NDArray[np.float32]: ...

class KvCache:
    def __init__(
        self, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: str
    ) -> None: ...
    def store(
        self, slots: NDArray[np.int32], keys: NDArray[np.float32], values: NDArray[np.float32]
    ) -> None: ...
    def attend(
        self,
        q: NDArray[np.float32],
        block_tables: NDArray[np.int32],
        row_starts: NDArray[np.int32],
        kv_lengths: NDArray[np.int32],
        window: int | None,
        threads: int,
        soft_cap: float = 0.0,
    ) -> NDArray[np.float32]: ...
    @property
    def num_bytes(self) -> int: ...
