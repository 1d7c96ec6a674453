"""The checker's process: bounded in time and memory, replaced when it ends, gone with its owner."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import psutil
import pytest
import uvloop

from structured import is_gone
from triptych.engine_core.errors import InvalidRequest, QueueFull, Unavailable
from triptych.services.tokenizer import grammar_checker
from triptych.services.tokenizer.grammar_cache import Answer, GrammarCache
from triptych.services.tokenizer.grammar_checker import MAX_MESSAGE_BYTES, GrammarChecker
from triptych.services.tokenizer.grammar_process import CheckLimits
from triptych.v1 import common_pb2

Raw = common_pb2.StructuredOutput
FIELD = "sampling_params.structured_output"
EASY = Raw(json_schema='{"type":"object","properties":{"a":{"type":"string"}}}')
HARD = Raw(
    json_schema=json.dumps(
        {"allOf": [{"type": "string", "pattern": f".*a.{{{count}}}"} for count in range(14)]}
    )
)
"""19 seconds and 2 GB to compile, whatever the library's own limits."""
LARGE = Raw(json_schema='{"type":"integer","multipleOf":123456789}')
"""An automaton with so many states."""


@asynccontextmanager
async def checker(seconds: float = 60.0, memory: int = 512 << 20) -> AsyncIterator[GrammarChecker]:
    made = GrammarChecker(CheckLimits(seconds, memory))
    try:
        yield made
    finally:
        made.close()
        assert made.pid is None


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def body() -> None:
        await scenario()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(body())


def pid_of(made: GrammarChecker) -> int:
    assert made.pid is not None
    return made.pid


async def refusal(made: GrammarChecker, raw: common_pb2.StructuredOutput) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as raised:
        await made.grammar(raw)
    return raised.value


def test_it_starts_with_the_first_request_and_ends_with_its_owner() -> None:
    async def scenario() -> None:
        before = psutil.Process().children()
        async with checker() as made:
            assert psutil.Process().children() == before
            grammar = json.loads(await made.grammar(EASY))
            assert list(grammar) == ["grammars"]
            pid = pid_of(made)
            assert psutil.pid_exists(pid)
            error = await refusal(made, Raw(json_schema='{"not":{}}'))
            assert str(error) == f"{FIELD}.json_schema: not at # is not supported"
            assert pid_of(made) == pid
        assert not psutil.pid_exists(pid)

    run(scenario)


def test_what_takes_too_long_is_refused_and_the_next_is_served() -> None:
    async def scenario() -> None:
        async with checker(seconds=1.0) as made:
            error = await refusal(made, HARD)
            assert str(error) == (
                f"{FIELD}.json_schema: it is too complex: to check it takes more than 1.0 s"
            )
            assert await made.grammar(EASY)

    run(scenario)


def test_what_takes_too_much_memory_is_refused_and_the_next_is_served() -> None:
    async def scenario() -> None:
        async with checker(memory=32 << 20) as made:
            error = await refusal(made, LARGE)
            assert error.field == f"{FIELD}.json_schema"
            assert f"takes more than {32 << 20} bytes of memory" in error.description
            assert await made.grammar(EASY)
            pid = pid_of(made)
            assert str(await refusal(made, LARGE)) == str(error)  # it is remembered
            assert pid_of(made) == pid

    run(scenario)


def test_what_crashes_it_is_refused_and_the_next_is_served() -> None:
    """A chain of references: the library's recursion goes through the end of its stack."""
    chain = {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(4000)}
    schema = {"$defs": {**chain, "d4000": {"type": "string"}}, "$ref": "#/$defs/d0"}

    async def scenario() -> None:
        async with checker() as made:
            error = await refusal(made, Raw(json_schema=json.dumps(schema)))
            assert error.description.endswith("bytes of memory, or cannot be done")
            assert await made.grammar(EASY)

    run(scenario)


def test_the_event_loop_goes_on_meanwhile() -> None:
    async def scenario() -> None:
        async with checker(seconds=2.0) as made:
            loop = asyncio.get_running_loop()
            hard = asyncio.create_task(refusal(made, HARD))
            turns = 0
            while not hard.done():
                await asyncio.sleep(0.01)
                turns += 1
            assert turns > 20
            assert loop.time() > 0
            await hard

    run(scenario)


def test_slow_ones_wait_for_one_another_and_others_pass() -> None:
    async def scenario() -> None:
        async with checker(seconds=4.0) as made:
            await made.grammar(EASY)
            hard = [asyncio.create_task(refusal(made, HARD)) for _ in range(3)]
            await asyncio.sleep(0.1)
            assert await made.grammar(Raw(regex="a"))
            assert not any(task.done() for task in hard)
            pid = pid_of(made)
            hard.append(asyncio.create_task(refusal(made, HARD)))  # is known to be slow by now
            await asyncio.sleep(0.1)
            assert await made.grammar(Raw(regex="b"))
            assert pid_of(made) == pid
            assert not any(task.done() for task in hard)

    run(scenario)


def test_those_who_wait_among_the_slow_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checker, "MAX_WAITING_SLOW", 1)
    counts = [*range(1, 14), 15]
    other = Raw(
        json_schema=json.dumps(
            {"allOf": [{"type": "string", "pattern": f".*a.{{{count}}}"} for count in counts]}
        )
    )

    async def scenario() -> None:
        async with checker(seconds=6.0) as made:
            # Those who ask the same are one.
            hard = [asyncio.create_task(refusal(made, HARD)) for _ in range(20)]
            await asyncio.sleep(0.1)
            with pytest.raises(QueueFull, match="1 complex structured outputs wait"):
                await made.grammar(other)
            hard[0].cancel()
            for task in hard[1:]:
                assert "too complex" in str(await task)

    run(scenario)


def test_a_caller_that_goes_leaves_it_usable() -> None:
    async def scenario() -> None:
        async with checker(seconds=1.0) as made:
            await made.grammar(EASY)
            hard = asyncio.create_task(made.grammar(HARD))
            waiting = asyncio.create_task(made.grammar(Raw(regex="a")))
            await asyncio.sleep(0.1)
            hard.cancel()
            waiting.cancel()
            await asyncio.wait((hard, waiting))
            assert hard.cancelled()
            assert waiting.cancelled()
            assert "start: /b/" in await made.grammar(Raw(regex="b"))

    run(scenario)


def test_one_that_was_killed_is_replaced() -> None:
    async def scenario() -> None:
        async with checker() as made:
            await made.grammar(EASY)
            first = pid_of(made)
            os.kill(first, signal.SIGKILL)
            while not is_gone(psutil.Process(first)):
                await asyncio.sleep(0.01)
            assert await made.grammar(Raw(regex="a"))
            assert pid_of(made) != first

    run(scenario)


def test_those_who_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checker, "MAX_WAITING", 2)

    async def scenario() -> None:
        async with checker(seconds=1.0) as made:
            await made.grammar(EASY)
            asked = [HARD, Raw(regex="a")]
            waiting = [asyncio.create_task(made.grammar(each)) for each in asked]
            await asyncio.sleep(0.1)
            with pytest.raises(QueueFull, match="2 structured outputs wait"):
                await made.grammar(Raw(regex="b"))
            assert await made.grammar(EASY)  # what is known waits for nothing
            assert "too complex" in str((await asyncio.gather(*waiting, return_exceptions=True))[0])
            assert await made.grammar(Raw(regex="b"))

    run(scenario)


def test_closing_ends_what_is_in_progress() -> None:
    async def scenario() -> None:
        async with checker() as made:
            await made.grammar(EASY)
            hard = asyncio.create_task(made.grammar(HARD))
            waiting = asyncio.create_task(made.grammar(Raw(regex="a")))
            await asyncio.sleep(0.2)
            made.close()
            for task in (hard, waiting):
                with pytest.raises(Unavailable, match="stopping"):
                    await task

    run(scenario)


def test_large_messages_are_refused_unread() -> None:
    async def scenario() -> None:
        async with checker() as made:
            error = await refusal(made, Raw(regex="a" * MAX_MESSAGE_BYTES))
            assert error.field == FIELD
            assert made.pid is None
            error = await refusal(made, Raw(json_schema="[" * 300_000))
            assert "300000 bytes, more than 262144" in error.description

    run(scenario)


def test_a_thousand_schemas_leave_it_as_large() -> None:
    async def scenario() -> None:
        async with checker() as made:
            sizes: list[int] = []
            for index in range(600):
                schema = {"properties": {f"p{index}": {"type": "string", "maxLength": index + 1}}}
                await made.grammar(Raw(json_schema=json.dumps(schema)))
                if index in (299, 599):
                    sizes.append(psutil.Process(pid_of(made)).memory_info().rss)
            assert sizes[1] - sizes[0] < 8 << 20

    run(scenario)


def test_the_child_ends_with_its_input() -> None:
    module = "triptych.services.tokenizer.grammar_checker_child"
    command = [sys.executable, "-m", module, "60", str(512 << 20)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.read(4) == bytes(4)  # it is ready
    child.send_signal(signal.SIGINT)  # Ctrl-C reaches the whole session; it is its owner's
    message = EASY.SerializeToString()
    child.stdin.write(len(message).to_bytes(4, "little") + message)
    child.stdin.flush()
    size = int.from_bytes(child.stdout.read(4), "little")
    assert "grammar" in json.loads(child.stdout.read(size))
    child.stdin.close()
    assert child.wait(30) == 0
    child.stdout.close()


def test_the_child_ends_itself_when_nobody_is_left() -> None:
    """Its owner was killed while it computed: its own timer ends it."""
    module = "triptych.services.tokenizer.grammar_checker_child"
    command = [sys.executable, "-m", module, "0.5", str(1 << 30)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.read(4) == bytes(4)
    message = HARD.SerializeToString()
    child.stdin.write(len(message).to_bytes(4, "little") + message)
    child.stdin.close()
    assert child.wait(30) == -signal.SIGALRM
    child.stdout.close()


def test_the_tokenizer_process_does_not_load_the_library() -> None:
    code = (
        "import sys, triptych.services.tokenizer.__main__;"
        "print([name for name in sys.modules if name.startswith('llguidance')])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert shown.stdout.strip() == "[]"


def test_the_cache_is_bounded_by_bytes() -> None:
    cache = GrammarCache(most_bytes=20_000)
    for index in range(100):
        cache.put(b"%d" % index, Answer(grammar="x" * 250))
        cache.get(b"0")  # in use: it stays
    assert len(cache) == 20_000 // (512 + 1000 + 2)
    assert cache.size_bytes <= 20_000
    assert cache.get(b"0") == Answer(grammar="x" * 250)
    assert cache.get(b"1") is None
    cache.put(b"large", Answer(refusal="y" * 20_000))
    assert cache.get(b"large") is None
    assert cache.size_bytes == 0
