"""A scheduler process that is always done: every open request's next token, the same for all.

    python -P bench/instant_scheduler.py --run-dir DIR --counters FILE --token ID

It speaks the protocol of the scheduler to any number of tokenizer processes, with no model and no
executor behind it. A step goes out as soon as the clients are less than `window` steps behind, as
FILE says (stream_counters): so no answer is ever made of a heap of old tokens, and a frontend that
is slow is asked for less instead of being buried. A step's bytes are made once and sent again until
a request begins or ends.

Why not an executor: the real scheduler between would draw a token for each of 128 rows of logits at
every step, on cores that it shares with what is measured here; its cost is bench-core's figure, and
it does not know when a client has its token.
"""

import argparse
import signal
import sys
import time
from pathlib import Path

import zmq

from triptych.services.runtime.run_dir import RunDir
from triptych.services.transport.channel import RouterChannel
from triptych.v1 import stage_pb2

sys.path.insert(0, str(Path(__file__).parent))
from instant_steps import InstantSteps
from stream_counters import StreamCounters

EPOCH = 1
MAX_LEN = 1 << 24  # no stream ends by itself while it is measured
_BEAT_SECONDS = 0.5
_NAP_SECONDS = 50e-6


class InstantScheduler:
    """Answers until `stop`. One thread."""

    def __init__(self, endpoint: str, counters: StreamCounters, token: int) -> None:
        self._channel: RouterChannel[stage_pb2.TokenizerMessage, stage_pb2.TokenizerReply] = (
            RouterChannel(zmq.Context(), endpoint, stage_pb2.TokenizerMessage)
        )
        self._counters = counters
        self._token = token
        self._peers: dict[bytes, InstantSteps] = {}
        self._sent = self._read_before = 0
        self._stopping = False

    def stop(self) -> None:
        """End after the current step."""
        self._stopping = True

    def run(self) -> None:
        """Serve."""
        next_beat = 0.0
        while not self._stopping:
            for received in self._channel.receive():
                if received.message is not None:
                    self._take(received.peer, received.message)
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + _BEAT_SECONDS
                beat = stage_pb2.SchedulerBeat(epoch=EPOCH, executor_ready=True)
                self._send_all(stage_pb2.TokenizerReply(beat=beat).SerializeToString())
            self._advance()
        self._channel.close()

    def _advance(self) -> None:
        """One step, or a nap."""
        running = sum(len(peer.left) for peer in self._peers.values())
        if not running:
            self._sent, self._read_before = 0, self._counters.tokens()
            self._channel.socket.poll(20)
            return
        read = self._counters.tokens() - self._read_before
        if self._sent - read > (self._counters.window - 1) * running:
            time.sleep(_NAP_SECONDS)
            return
        self._sent += running
        for name, peer in list(self._peers.items()):
            if peer.left:
                self._send(name, peer.next_step())

    def _take(self, name: bytes, message: stage_pb2.TokenizerMessage) -> None:
        if message.HasField("hello"):
            self._peers[name] = InstantSteps(self._token)
            self._welcome(name, message.hello)
            return
        peer = self._peers.get(name)
        if peer is None:
            return
        if message.HasField("submit"):
            first, params = message.submit.slot, message.submit.params
            peer.begin(range(first, first + params.n), params.max_tokens)
        elif message.HasField("abort"):
            peer.abort(message.abort.slots)

    def _welcome(self, name: bytes, hello: stage_pb2.TokenizerHello) -> None:
        model = stage_pb2.ModelFacts(
            fingerprint=hello.fingerprint,
            architecture="none",
            vocabulary_size=hello.vocabulary_size,
            max_model_len=MAX_LEN,
        )
        welcome = stage_pb2.TokenizerWelcome(epoch=EPOCH, model=model, max_sequence_len=MAX_LEN)
        self._send(name, stage_pb2.TokenizerReply(welcome=welcome).SerializeToString())

    def _send_all(self, reply: bytes) -> None:
        for name in list(self._peers):
            self._send(name, reply)

    def _send(self, name: bytes, reply: bytes) -> None:
        try:
            self._channel.socket.send_multipart([name, reply], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            del self._peers[name]  # it has gone; its clients say so


def main() -> int:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--counters", required=True, type=Path)
    parser.add_argument("--token", required=True, type=int)
    args = parser.parse_args()
    run_dir = RunDir.open(args.run_dir)
    run_dir.lock("scheduler")
    scheduler = InstantScheduler(
        run_dir.scheduler_endpoint, StreamCounters(args.counters), args.token
    )
    signal.signal(signal.SIGTERM, lambda *_: scheduler.stop())
    scheduler.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
