"""The eager plan: a step as plain torch calls. Any family; the reference for faster plans.

Matrix products, attention and the cache are of the plan's dtype; norms, rotation, softmax and
logits are float32.
"""

import numpy as np
import torch

from triptych.services.executor.backend import Logits
from triptych.services.executor.eager_attention import attention_inputs
from triptych.services.executor.kv_storage import KvStorage
from triptych.services.executor.model_config import ModelConfig
from triptych.services.executor.models import Network
from triptych.services.executor.step_inputs import StepInputs

_HEAD_ROWS = 4096  # of the output matrix, widened at a time: a few MiB of float32


class EagerPlan:
    """A network with its cache. One thread only."""

    def __init__(self, config: ModelConfig, network: Network, storage: KvStorage) -> None:
        self._config = config
        self._network = network
        self._storage = storage
        self._dtype = network.head.dtype

    @torch.inference_mode()
    def run(self, inputs: StepInputs, logits: Logits) -> None:
        """As `Backend.execute`, for inputs that are in range."""
        inputs.check_room(len(logits))
        self._storage.copy(inputs.copy_sources.tolist(), inputs.copy_targets.tolist())
        attention = attention_inputs(inputs, self._config, self._storage.block_size, self._dtype)
        if attention.fresh_blocks.numel():
            self._storage.clear(attention.fresh_blocks)
        hidden = self._network.forward(
            torch.from_numpy(inputs.token_ids.astype(np.int64)),
            torch.from_numpy(inputs.positions.astype(np.int64)),
            attention,
            self._storage,
        )
        if inputs.num_logits == 0:
            return
        wanted = torch.from_numpy(inputs.logits_tokens.astype(np.int64))
        hidden = self._network.final_norm(hidden.index_select(0, wanted))
        self._multiply(hidden.to(torch.float32), torch.from_numpy(logits[: inputs.num_logits]))

    def _multiply(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """out = hidden x head^T in float32, without a copy of a head of less precision; capped."""
        head = self._network.head
        if head.dtype == torch.float32:
            torch.mm(hidden, head.T, out=out)
        else:
            for start in range(0, head.shape[0], _HEAD_ROWS):
                part = head[start : start + _HEAD_ROWS].to(torch.float32)
                torch.mm(hidden, part.T, out=out[:, start : start + _HEAD_ROWS])
        cap = self._config.logits_soft_cap
        if cap is not None:
            out.div_(cap).tanh_().mul_(cap)
