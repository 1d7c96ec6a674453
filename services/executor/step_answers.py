"""The two answers to a step."""

import numpy as np
import numpy.typing as npt

from triptych.services.executor.backend import DrawnColumns
from triptych.v1 import stage_pb2

_MAX_MESSAGE = 1000  # characters of an exception that cross to the scheduler


def done(
    ready: stage_pb2.StepReady,
    execute_ns: int,
    guesses: bytes = b"",
    drawn: DrawnColumns | None = None,
) -> stage_pb2.ExecutorMessage:
    """The step is computed; `guesses` are the draft model's tokens, `drawn` the device's."""
    answer = stage_pb2.StepDone(
        step_id=ready.step_id,
        slot=ready.slot,
        epoch=ready.epoch,
        execute_ns=execute_ns,
        draft_token_ids=guesses,
    )
    if drawn is not None:
        answer.drawn.CopyFrom(
            stage_pb2.DrawnTokens(
                token_ids=_packed(drawn.token_ids, "<i4"),
                logprobs=_packed(drawn.logprobs, "<f4"),
                ranks=_packed(drawn.ranks, "<u4"),
                top_counts=_packed(drawn.top_counts, "<u4"),
                top_ids=_packed(drawn.top_ids, "<u4"),
                top_logprobs=_packed(drawn.top_logprobs, "<f4"),
            )
        )
    return stage_pb2.ExecutorMessage(done=answer)


def failed(ready: stage_pb2.StepReady, words: str) -> stage_pb2.ExecutorMessage:
    """The step is not computed."""
    return stage_pb2.ExecutorMessage(
        failed=stage_pb2.StepFailed(
            step_id=ready.step_id,
            slot=ready.slot,
            epoch=ready.epoch,
            message=words[:_MAX_MESSAGE],
        )
    )


def words_of(error: BaseException) -> str:
    """An exception, for whoever reads the scheduler's log."""
    return f"{type(error).__name__}: {error}"


def _packed(column: npt.NDArray[np.int32] | npt.NDArray[np.float32], dtype: str) -> bytes:
    return column.astype(dtype, copy=False).tobytes()
