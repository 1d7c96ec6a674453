"""What a step meant, as StepOutputs messages, one for each tokenizer process.

Columns are cut with numpy, whatever the number of tokens: RequestId = peer << 32 | slot. Only what
few entries have (logprobs, scores, starts, failures) is looped over. step_outputs reads them.
"""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from triptych.engine_core.step import Logprobs, PromptLogprobs, StepOutput
from triptych.services.transport.step_outputs import SLOT_BITS, peer_of, slot_of
from triptych.services.transport.wire import failure_from_error
from triptych.v1 import stage_pb2

MAX_LOGPROB_BYTES = 8 << 20
"""Logprobs in one message; a frame may have four times as much (channel.MAX_FRAME_BYTES)."""

_SLOT_MASK = (1 << SLOT_BITS) - 1


def outputs_by_peer(output: StepOutput) -> dict[int, list[stage_pb2.StepOutputs]]:
    """The messages for each connection, in order; nearly always one."""
    ids = np.asarray(output.request_ids, np.int64)
    token_ids = np.asarray(output.token_ids, np.int32)
    finishes = np.asarray(output.finishes, np.uint8)
    messages: dict[int, stage_pb2.StepOutputs] = {}
    entries_of: dict[int, npt.NDArray[np.intp] | None] = {}
    for peer, entries in _entries_by_peer(ids >> SLOT_BITS):
        mine = slice(None) if entries is None else entries
        entries_of[peer] = entries
        messages[peer] = stage_pb2.StepOutputs(
            step_id=output.step_id,
            slots=(ids[mine] & _SLOT_MASK).astype("<u4").tobytes(),
            token_ids=token_ids[mine].astype("<u4").tobytes(),
            finish_reasons=finishes[mine].tobytes(),
        )

    def message_of(request_id: int) -> stage_pb2.StepOutputs:
        peer = peer_of(request_id)
        if peer not in messages:
            messages[peer] = stage_pb2.StepOutputs(step_id=output.step_id)
        return messages[peer]

    def place(entry: int) -> tuple[stage_pb2.StepOutputs, int]:
        peer = peer_of(int(ids[entry]))
        entries = entries_of[peer]
        at = entry if entries is None else int(np.searchsorted(entries, entry))
        return messages[peer], at

    _add_sparse(output, message_of)
    for entry, row in sorted(output.logprobs.items()):
        message, at = place(entry)
        message.logprobs.append(_entry_logprobs(at, row))
    for entry, score in sorted(output.scores.items()):
        message, at = place(entry)
        message.scores.add(entry=at, score=score)
    return {peer: list(_split(message)) for peer, message in messages.items()}


def _entries_by_peer(
    peers: npt.NDArray[np.int64],
) -> Iterator[tuple[int, npt.NDArray[np.intp] | None]]:
    """Each connection with the entries that are its own; None for all."""
    if not peers.size:
        return
    first = int(peers[0])
    if bool((peers == first).all()):
        yield first, None
        return
    for peer in np.unique(peers).tolist():
        yield peer, np.flatnonzero(peers == peer)


def _add_sparse(output: StepOutput, message_of: Callable[[int], stage_pb2.StepOutputs]) -> None:
    for started in output.started:
        message_of(started.request_id).started.add(
            slot=slot_of(started.request_id), cached_tokens=started.cached_tokens
        )
    for rows in output.prompt_logprobs:
        message_of(rows.request_id).prompt_logprobs.extend(_prompt_logprobs(rows))
    for failed in output.failed:
        message_of(failed.request_id).failures.append(
            failure_from_error(slot_of(failed.request_id), failed.error)
        )


def _entry_logprobs(entry: int, row: Logprobs) -> stage_pb2.EntryLogprobs:
    return stage_pb2.EntryLogprobs(
        entry=entry,
        logprob=row.logprob,
        rank=row.rank,
        top_ids=np.asarray(row.top_ids).astype("<u4").tobytes(),
        top_logprobs=np.asarray(row.top_logprobs).astype("<f4").tobytes(),
    )


def _prompt_logprobs(rows: PromptLogprobs) -> Iterator[stage_pb2.PromptLogprobs]:
    """As many messages as keep each within MAX_LOGPROB_BYTES, at least one row each."""
    begin, size = 0, 0
    for at, row in enumerate(rows.logprobs):
        more = 8 * len(row.top_ids)
        if at > begin and size + more > MAX_LOGPROB_BYTES:
            yield _prompt_rows(rows, begin, at)
            begin, size = at, 0
        size += more
    if begin < len(rows.logprobs):
        yield _prompt_rows(rows, begin, len(rows.logprobs))


def _prompt_rows(rows: PromptLogprobs, begin: int, end: int) -> stage_pb2.PromptLogprobs:
    mine = rows.logprobs[begin:end]
    return stage_pb2.PromptLogprobs(
        slot=slot_of(rows.request_id),
        position=rows.position + begin,
        logprobs=np.array([row.logprob for row in mine], "<f4").tobytes(),
        ranks=np.array([row.rank for row in mine], "<u4").tobytes(),
        top_counts=np.array([len(row.top_ids) for row in mine], "<u4").tobytes(),
        top_ids=b"".join(np.asarray(row.top_ids).astype("<u4").tobytes() for row in mine),
        top_logprobs=b"".join(np.asarray(row.top_logprobs).astype("<f4").tobytes() for row in mine),
    )


def _split(message: stage_pb2.StepOutputs) -> Iterator[stage_pb2.StepOutputs]:
    """The message, or several in its order where its logprobs are too large for one."""
    size = sum(len(row.top_ids) * 2 for row in message.logprobs)
    size += sum(len(rows.top_ids) * 2 for rows in message.prompt_logprobs)
    if size <= MAX_LOGPROB_BYTES:
        yield message
        return
    for rows in message.prompt_logprobs:
        yield stage_pb2.StepOutputs(step_id=message.step_id, prompt_logprobs=[rows])
    begin, size = 0, 0
    for row in message.logprobs:
        more = len(row.top_ids) * 2
        if row.entry > begin and size + more > MAX_LOGPROB_BYTES:
            yield _entries(message, begin, row.entry)
            begin, size = row.entry, 0
        size += more
    last = _entries(message, begin, len(message.finish_reasons))
    last.failures.extend(message.failures)
    yield last


def _entries(message: stage_pb2.StepOutputs, begin: int, end: int) -> stage_pb2.StepOutputs:
    """Entries [begin, end) as a message of their own; the first one brings what began."""
    part = stage_pb2.StepOutputs(
        step_id=message.step_id,
        slots=message.slots[4 * begin : 4 * end],
        token_ids=message.token_ids[4 * begin : 4 * end],
        finish_reasons=message.finish_reasons[begin:end],
        started=message.started if begin == 0 else (),
    )
    for row in message.logprobs:
        if begin <= row.entry < end:
            part.logprobs.append(row)
            part.logprobs[-1].entry -= begin
    for score in message.scores:
        if begin <= score.entry < end:
            part.scores.add(entry=score.entry - begin, score=score.score)
    return part
