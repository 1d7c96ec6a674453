"""The welcome of an executor: the rings' shapes, by what its hello says that it does."""

from triptych.v1 import stage_pb2

_LEAST_HISTORY = 1 << 16
_HISTORY_OF_A_SEQUENCE = 1 << 10
_MOST_HISTORY = 1 << 20
_MOST_TRANSFERS = 256


def welcome_to(
    base: stage_pb2.ExecutorWelcome, hello: stage_pb2.ExecutorHello
) -> stage_pb2.ExecutorWelcome:
    """`base` is what every executor gets.

    One that draws tokens has room for all samples of a step, and for the histories of two sequences
    of full length or of all at a usual one; one with blocks in host memory for some in a step.
    """
    welcome = stage_pb2.ExecutorWelcome()
    welcome.CopyFrom(base)
    if hello.draws_tokens:
        welcome.max_samples = base.max_logits
        wanted = max(2 * hello.model.max_model_len, _HISTORY_OF_A_SEQUENCE * base.max_num_seqs)
        welcome.max_history = min(max(_LEAST_HISTORY, wanted), _MOST_HISTORY)
    welcome.max_transfers = min(hello.model.num_host_blocks, _MOST_TRANSFERS)
    return welcome
