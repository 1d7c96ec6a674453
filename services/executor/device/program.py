"""A step as work for a device: how tokens come in, which operations run, how tokens are drawn."""

from dataclasses import dataclass

from triptych.services.executor.device.device import Work
from triptych.services.executor.device.network import Network
from triptych.services.executor.device.results import Request
from triptych.services.executor.device.static_inputs import StepTensors
from triptych.services.executor.device.step_buffers import StepBuffers


@dataclass(frozen=True, slots=True)
class Program:
    """The network over its buffers. Each method gives work that only launches."""

    network: Network
    buffers: StepBuffers

    def forward(self, step: StepTensors) -> Work:
        """Tokens to logits: what a graph captures, and what runs eagerly."""
        network, buffers = self.network, self.buffers

        def work() -> None:
            network.ops.resolve_tokens(step.token_ids, buffers.previous)
            network.forward(
                buffers.activations, step.token_ids, step.positions, step.slots, step.rows
            )
            if len(step.logits_tokens):
                network.logits(buffers.activations, step.logits_tokens)

        return work

    def sampling(self, step: StepTensors, request: Request, vocabulary_size: int) -> Work:
        """Logits to `previous` (and `scores`): rank 0 draws, the others hear what."""
        network, buffers = self.network, self.buffers
        ops, columns = network.ops, step.columns
        logits = buffers.activations.logits
        tokens = buffers.previous[: request.num_samples]
        scores = buffers.top_logprobs(request.num_samples) if request.logprobs else None
        assert columns is not None

        def work() -> None:
            if logits is not None:
                if len(columns.history):
                    ops.resolve_tokens(columns.history, buffers.previous)
                ops.sample(logits, columns, vocabulary_size, tokens)
                if scores is not None:
                    ops.top_logprobs(logits, columns, vocabulary_size, tokens, scores)
            if network.collectives.size > 1:
                network.collectives.broadcast(tokens)

        return work
