"""The networks: one file a family, written in ops, over paged keys and values.

To add a family: a file with a class that fills `Network`, its shape in `hf_config` / `gguf_config`,
its names in `gguf_weights`, a line in `build_network`, and a differential test.
"""

from typing import Protocol

import torch

from triptych.services.executor.eager_attention import AttentionInputs
from triptych.services.executor.kv_storage import KvStorage
from triptych.services.executor.model_config import ModelConfig


class Network(Protocol):
    """A decoder with its weights."""

    def parameters(self) -> dict[str, torch.Tensor]:
        """Name in transformers' state dict -> the place to fill. Places may be views."""

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionInputs,
        storage: KvStorage,
    ) -> torch.Tensor:
        """Tokens int64 [T] -> hidden states [T, hidden], before the final norm.

        Stores the tokens' keys and values.
        """

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] -> what the head multiplies, same shape."""

    @property
    def head(self) -> torch.Tensor:
        """The output matrix [vocabulary, hidden]; the embedding itself when tied."""


def build_network(
    config: ModelConfig, dtype: torch.dtype, rope_factors: torch.Tensor | None
) -> Network:
    """Allocate a network of the family; its weights are undefined until `parameters` are filled."""
    match config.family:
        case "llama":
            from triptych.services.executor.models.llama import Llama

            return Llama(config, dtype, rope_factors)
        case "gpt2":
            from triptych.services.executor.models.gpt2 import Gpt2

            return Gpt2(config, dtype)
