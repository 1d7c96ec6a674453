"""Structured output checked in a process of its own: what a client sends can neither hang nor crash
the tokenizer, nor keep others waiting.

Compiling a grammar may take any time and memory (14 patterns in an `allOf`: 19 s and 2 GB), and a
number can crash the library. So a child does it, with limits; it is replaced when it exceeds them,
and starts with the first request that needs it. What takes longer than QUICK_SECONDS goes on to a
second child, so that slow grammars wait for one another and the others pass.
"""

import asyncio
from collections import OrderedDict
from functools import partial
from hashlib import sha256

from triptych.engine_core.errors import InvalidRequest, QueueFull
from triptych.services.tokenizer.grammar_cache import Answer, GrammarCache
from triptych.services.tokenizer.grammar_lane import GrammarLane
from triptych.services.tokenizer.grammar_process import CheckLimits, ChildGone
from triptych.v1 import common_pb2

MAX_MESSAGE_BYTES = 512 << 10
"""More than any form may have, with what belongs to it."""
MAX_WAITING = 256
MAX_WAITING_SLOW = 16
QUICK_SECONDS = 0.5
"""Hundreds of times what a usual schema takes."""

_FIELD = "sampling_params.structured_output"
_MOST_SLOW_KNOWN = 1024


class _TooSlow(Exception):
    """For the quick child."""


class GrammarChecker:
    """Grammars of requests. `grammar` runs on an event loop; `close` may be called from anywhere,
    once."""

    def __init__(self, limits: CheckLimits) -> None:
        self._limits = limits
        self._cache = GrammarCache()
        quick = CheckLimits(min(limits.seconds, QUICK_SECONDS), limits.memory_bytes)
        self._quick = GrammarLane(quick, "grammars")
        self._slow = GrammarLane(limits, "slow-grammars")
        # Digests of messages; only the quick lane's thread changes it.
        self._known_slow: OrderedDict[bytes, None] = OrderedDict()
        self._pending: dict[bytes, asyncio.Task[Answer]] = {}
        self._waiting = 0
        self._waiting_slow = 0

    @property
    def pid(self) -> int | None:
        """The child that runs now, of those that check what is quick."""
        return self._quick.pid

    async def grammar(self, raw: common_pb2.StructuredOutput) -> str:
        """The grammar that a request asks for.

        Raises InvalidRequest for one that cannot be kept, QueueFull, and Unavailable while closing.
        """
        size = raw.ByteSize()
        if size > MAX_MESSAGE_BYTES:
            raise InvalidRequest(_FIELD, f"{size} bytes, more than {MAX_MESSAGE_BYTES}")
        message = raw.SerializeToString(deterministic=True)
        known = self._cache.get(message)
        if known is not None:
            return known.result()
        if self._waiting >= MAX_WAITING:
            raise QueueFull(f"{self._waiting} structured outputs wait for their check")
        self._waiting += 1
        try:
            answer = await asyncio.shield(self._pending.get(message) or self._begun(message))
        finally:
            self._waiting -= 1
        return answer.result()

    def close(self) -> None:
        """End the children and threads; what still waits fails with Unavailable."""
        for lane in (self._quick, self._slow):
            lane.interrupt()
        for lane in (self._quick, self._slow):
            lane.close()

    def _begun(self, message: bytes) -> "asyncio.Task[Answer]":
        """A check for all who ask the same; a caller that goes leaves it to the others."""

        def end(task: "asyncio.Task[Answer]") -> None:
            del self._pending[message]
            if not task.cancelled():
                task.exception()  # nobody may be left to hear of it

        task = asyncio.create_task(self._answer(message))
        self._pending[message] = task
        task.add_done_callback(end)
        return task

    async def _answer(self, message: bytes) -> Answer:
        if sha256(message).digest() not in self._known_slow:
            answer = await self._quick.run(partial(self._checked_quickly, message))
            if answer is not None:
                return answer
        if self._waiting_slow >= MAX_WAITING_SLOW:
            raise QueueFull(f"{self._waiting_slow} complex structured outputs wait for their check")
        self._waiting_slow += 1
        try:
            return await self._slow.run(partial(self._checked, self._slow, message))
        finally:
            self._waiting_slow -= 1

    # --------------------------------------------------------------------------- on a lane's thread

    def _checked_quickly(self, message: bytes) -> Answer | None:
        """None: it takes more time than there is here."""
        digest = sha256(message).digest()
        if digest in self._known_slow:  # by now another request may have asked the same
            return None
        try:
            return self._checked(self._quick, message)
        except _TooSlow:
            self._known_slow[digest] = None
            if len(self._known_slow) > _MOST_SLOW_KNOWN:
                self._known_slow.popitem(last=False)
            return None

    def _checked(self, lane: GrammarLane, message: bytes) -> Answer:
        known = self._cache.get(message)
        if known is not None:
            return known
        try:
            reply = lane.ask(message)
        except ChildGone as gone:
            if gone.late and lane.limits.seconds < self._limits.seconds:
                raise _TooSlow from gone
            return self._refused_for(message, gone)
        if "bug" in reply:
            raise RuntimeError(f"the grammar checker failed: {reply['bug']}")
        answer = Answer(reply.get("grammar", ""), reply.get("field", ""), reply.get("refusal", ""))
        self._cache.put(message, answer)
        return answer

    def _refused_for(self, message: bytes, gone: ChildGone) -> Answer:
        """What became of the child is the message's doing. Too slow is not for ever: not kept."""
        raw = common_pb2.StructuredOutput.FromString(message)
        field = f"{_FIELD}.{raw.WhichOneof('form')}"
        if gone.late:
            return Answer(
                field=field,
                refusal=f"it is too complex: to check it takes more than {self._limits.seconds} s",
            )
        answer = Answer(
            field=field,
            refusal=f"it is too complex: to check it takes more than {self._limits.memory_bytes}"
            " bytes of memory, or cannot be done",
        )
        self._cache.put(message, answer)
        return answer
