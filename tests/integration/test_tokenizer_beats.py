"""The tokenizer's beats: without them the scheduler takes it for dead and drops its requests."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import uvloop

import fake_scheduler
from fake_scheduler import FakeScheduler
from triptych.services.tokenizer import scheduler_connection
from triptych.services.tokenizer.scheduler_client import SchedulerClient
from triptych.services.tokenizer.scheduler_connection import Beats, SchedulerConnection
from triptych.services.tokenizer.stats import Counters
from triptych.services.transport.channel import DealerChannel
from triptych.v1 import stage_pb2


class QuickHandshake(DealerChannel[stage_pb2.TokenizerReply, stage_pb2.TokenizerMessage]):
    """Its handshake is over when the constructor returns, as on a busy machine."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        time.sleep(0.2)


def test_it_beats_although_the_handshake_was_over_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_connection, "DealerChannel", QuickHandshake)

    async def scenario(scheduler: FakeScheduler) -> None:
        hello = stage_pb2.TokenizerHello(fingerprint="print", vocabulary_size=320)
        beats = Beats(interval=0.05, timeout=5.0)
        connection = SchedulerConnection(scheduler.endpoint, hello, beats)
        client = SchedulerClient(connection, Counters(), lambda: None)
        client.start()
        try:
            async with asyncio.timeout(30.0):
                while scheduler.beats < 3:
                    await asyncio.sleep(0.01)
        finally:
            client.stop()

    endpoint = f"ipc://{tmp_path / 'scheduler.zmq'}"
    with fake_scheduler.running(FakeScheduler(endpoint, lambda submit: [])) as scheduler:
        while not (tmp_path / "scheduler.zmq").exists():
            time.sleep(0.01)
        asyncio.run(scenario(scheduler))


def test_a_stall_of_its_own_is_not_the_silence_of_the_scheduler(tmp_path: Path) -> None:
    async def scenario(scheduler: FakeScheduler) -> None:
        hello = stage_pb2.TokenizerHello(fingerprint="print", vocabulary_size=320)
        beats = Beats(interval=0.05, timeout=0.8)
        connection = SchedulerConnection(scheduler.endpoint, hello, beats)
        client = SchedulerClient(connection, Counters(), lambda: None)
        client.start()
        try:
            async with asyncio.timeout(30.0):
                while not client.ready:
                    await asyncio.sleep(0.01)
            for _ in range(3):
                time.sleep(1.0)  # the whole process, as far as the event loop can tell
                assert client.ready
                await asyncio.sleep(0.15)
                assert client.ready
            assert len(scheduler.hellos) == 1
        finally:
            client.stop()

    endpoint = f"ipc://{tmp_path / 'scheduler.zmq'}"
    with (
        fake_scheduler.running(FakeScheduler(endpoint, lambda submit: [])) as scheduler,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(scenario(scheduler))
