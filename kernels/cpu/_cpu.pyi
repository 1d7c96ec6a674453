from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

def sample(
    logits: NDArray[np.float32],
    temperature: NDArray[np.float32],
    top_k: NDArray[np.int32],
    top_p: NDArray[np.float32],
    min_p: NDArray[np.float32],
    seed: NDArray[np.uint64],
    choice: NDArray[np.uint32],
    position: NDArray[np.uint32],
    banned_ids: NDArray[np.int32],
    banned_starts: NDArray[np.int32],
    vocabulary_size: int,
) -> NDArray[np.int32]: ...
def philox4x32(counter: Sequence[int], key0: int, key1: int) -> list[int]: ...
def active_isa() -> str: ...
def supported_isas() -> list[str]: ...
def select_isa(name: str) -> None: ...
