"""The engine that is simulated: a real scheduler over a real batch, as large as asked for."""

from dataclasses import dataclass
from typing import Literal, cast

from triptych.engine_core.admission import Limits
from triptych.engine_core.batch import Batch
from triptych.engine_core.layout import StepLayout
from triptych.engine_core.policy import PolicyName, policy_of
from triptych.engine_core.python_batch import PythonBatch
from triptych.engine_core.sampling import SamplingState
from triptych.engine_core.scheduler import Scheduler
from triptych.services.simulator.prompts import VOCABULARY


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """Names and meanings are those of the scheduler's and the executor's settings.

    Raises ValueError naming what cannot work.
    """

    num_blocks: int = 4096
    block_size: int = 16
    max_model_len: int = 2048
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_num_waiting: int = 1024
    long_prefill_token_threshold: int = 0
    scheduling_policy: PolicyName = "priority"
    enable_prefix_caching: bool = True
    watermark: float = 0.01
    queue_timeout: float = 0.0  # seconds; 0: never
    request_timeout: float = 0.0  # seconds; 0: never
    engine_impl: Literal["native", "python"] = "native"

    def __post_init__(self) -> None:
        _ = self.limits

    @property
    def limits(self) -> Limits:
        """What the scheduler is held to."""
        return Limits(
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_waiting=self.max_num_waiting,
            vocabulary_size=VOCABULARY,
            sampleable_vocabulary=VOCABULARY,
            max_num_logits=self.max_num_seqs,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            watermark_blocks=int(self.watermark * self.num_blocks),
            prefix_caching=self.enable_prefix_caching,
        )

    @property
    def layout(self) -> StepLayout:
        """Of the step slot that the scheduler writes."""
        return StepLayout(
            num_slots=1,
            max_tokens=self.max_num_batched_tokens,
            max_rows=self.max_num_seqs,
            max_blocks_per_row=-(-self.max_model_len // self.block_size),
            max_logits=self.max_num_seqs,
        )

    @property
    def capacity(self) -> int:
        """Requests that may be there at once."""
        return self.max_num_seqs + self.max_num_waiting

    def build(self, sampling: SamplingState) -> Scheduler:
        """An empty scheduler."""
        policy = policy_of(self.scheduling_policy)
        return Scheduler(self.limits, self._batch(), sampling, policy)

    def _batch(self) -> Batch:
        caching = self.enable_prefix_caching
        if self.engine_impl == "python":
            return PythonBatch(self.num_blocks, self.block_size, self.layout, caching)
        from triptych.kernels.core import Batch as NativeBatch

        # Its values are named tuples of its own: kernels do not know engine_core.
        return cast(Batch, NativeBatch(self.num_blocks, self.block_size, self.layout, caching))
