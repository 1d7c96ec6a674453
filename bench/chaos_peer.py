"""The same kill, of ours and of llama.cpp's server: what their clients saw.

    make chaos-peer [QUICK=1]

A few clients stream completions over OpenAI's HTTP, one request after the other, while a process is
killed (SIGKILL) again and again, each time after tokens have come since the last time: the one
of llama-cpp-python's server, which is started again at once, and each of our three, under
`triptych serve`. Prompts, lengths and clients are the same. An answer that broke is not asked
again: what had come of it is what its client has.

    broken_STAGE        streams that ended with an error, of ours; beside those of the peer
    tokens_lost_STAGE   tokens that those had had, and that have to be asked for again
    changed_STAGE       whole answers that differ from those of before the first kill
    pause_STAGE_s       from the kill to the next token at any client, median
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests" / "support")]
from chaos_killer import STAGES
from chaos_pauses import ON_THE_WAY, pause_of
from chaos_targets import Target, ours, peer
from own_children import exit_on_sigterm
from results import Results

CLIENTS, PROMPTS, TOKENS = 4, 12, 64
PEER = "llama.cpp"
_PATIENCE = 60.0
_WORDS = ["lighthouse", "keeper", "ships", "storm", "harbour", "bread", "songs", "rivers", "clocks"]


@dataclass(slots=True)
class Answer:
    """One stream. `arrivals`: when each piece came, and how many had by then."""

    prompt: str
    text: str = ""
    whole: bool = False
    error: str = ""
    arrivals: list[tuple[float, int]] = field(default_factory=list)


@dataclass(slots=True)
class Watched:
    """What the clients of one engine saw, and when its process was killed."""

    target: Target
    answers: list[Answer] = field(default_factory=list)
    running: dict[int, Answer] = field(default_factory=dict)
    kills: list[float] = field(default_factory=list)

    async def undisturbed(self, prompts: Sequence[str]) -> dict[str, str]:
        """What each prompt is answered, asked alone."""
        texts = {}
        async with _client(self.target.url) as client:
            for prompt in prompts:
                answer = Answer(prompt)
                await _stream(client, answer)
                if not answer.whole:
                    raise RuntimeError(f"undisturbed: {answer.error}")
                texts[prompt] = answer.text
        return texts

    async def disturbed(self, prompts: Sequence[str], kills: int, dice: random.Random) -> None:
        """Stream and kill."""
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(self._ask(number, prompts, stop))
            for _ in range(kills):
                await self._until_flowing()
                await asyncio.sleep(dice.uniform(0.3, 1.5))
                pid = self.target.pid()
                assert pid is not None
                self.kills.append(time.perf_counter())
                os.kill(pid, signal.SIGKILL)
            await self._until_flowing()
            stop.set()

    async def _until_flowing(self) -> None:
        """Until a token has come since the last kill, to anybody: a server that answers one at a
        time brings the others none before that one is done."""
        since = self.kills[-1] + ON_THE_WAY if self.kills else 0.0
        until = time.perf_counter() + _PATIENCE
        while not any(when > since for each in self._all() for when, _ in each.arrivals[-1:]):
            if time.perf_counter() > until:
                raise RuntimeError(f"no token within {_PATIENCE:.0f} s of the kill")
            await asyncio.sleep(0.02)

    def _all(self) -> list[Answer]:
        return self.answers[-2 * CLIENTS :] + list(self.running.values())

    async def _ask(self, number: int, prompts: Sequence[str], stop: asyncio.Event) -> None:
        turn = number
        async with _client(self.target.url) as client:
            while not stop.is_set():
                answer = self.running[number] = Answer(prompts[turn % len(prompts)])
                turn += CLIENTS
                await _stream(client, answer)
                del self.running[number]
                if answer.error == "ConnectError":
                    turn -= CLIENTS
                    await asyncio.sleep(0.05)  # nobody is there: no stream began
                    continue
                self.answers.append(answer)

    @property
    def pause(self) -> float:
        """From a kill to the next token at any client, median."""
        merged = sorted(arrival for each in self.answers for arrival in each.arrivals)
        found = [pause_of(kill, merged) for kill in self.kills]
        return statistics.median(each for each in found if each is not None)


def _client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=url, timeout=_PATIENCE, limits=limits, trust_env=False)


async def _stream(client: httpx.AsyncClient, answer: Answer) -> None:
    body = {
        "prompt": answer.prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True,
        "ignore_eos": True,
    }  # fmt: skip
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                answer.error = f"{response.status_code} {(await response.aread())[:200]!r}"
                return
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    answer.whole = True
                elif line.startswith("data: "):
                    _take(json.loads(line[6:]), answer)
    except httpx.TransportError as error:
        answer.error = type(error).__name__
    if not answer.whole and not answer.error:
        answer.error = "the stream ended without [DONE]"


def _take(event: dict[str, list[dict[str, str]]], answer: Answer) -> None:
    if "error" in event:
        answer.error = str(event["error"])
        return
    text = "".join(choice["text"] for choice in event["choices"])
    if text:
        answer.text += text
        answer.arrivals.append((time.perf_counter(), len(answer.arrivals) + 1))


def prompts() -> list[str]:
    """Of some 60 tokens each."""
    dice = random.Random("chaos peer")
    return [" ".join(dice.choice(_WORDS) for _ in range(40)) for _ in range(PROMPTS)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the clients of one engine saw."""

    streams: int
    broken: int
    tokens_lost: int
    changed: int
    pause: float
    errors: list[str]

    def line(self, name: str) -> str:
        """For people."""
        errors = ", ".join(sorted(set(self.errors))) or "none"
        return (
            f"    {name}: {self.streams} streams, {self.broken} broken, {self.tokens_lost} tokens"
            f" lost, {self.changed} changed, pause {self.pause:.2f} s; errors: {errors}"
        )


def outcome(watched: Watched, expected: dict[str, str]) -> Outcome:
    """Count."""
    broken = [each for each in watched.answers if not each.whole]
    changed = [
        each for each in watched.answers if each.whole and each.text != expected[each.prompt]
    ]
    return Outcome(
        len(watched.answers), len(broken), sum(len(each.arrivals) for each in broken),
        len(changed), watched.pause, [each.error for each in broken],
    )  # fmt: skip


def measure(engine: contextlib.AbstractContextManager[Target], kills: int, name: str) -> Outcome:
    """One engine, its process killed so often."""
    asked = prompts()
    with engine as target:
        watched = Watched(target)

        async def run() -> Outcome:
            expected = await watched.undisturbed(asked)
            await watched.disturbed(asked, kills, random.Random(f"chaos peer {name}"))
            return outcome(watched, expected)

        found = asyncio.run(run())
    print(found.line(f"{name}, {kills} kills"), flush=True)
    return found


def main() -> int:
    """Run it; exit code 0 when it ran."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--peer-python", required=True, type=Path, help="has llama-cpp-python")
    parser.add_argument("--kills", type=int, default=10, help="of each process")
    parser.add_argument("--quick", action="store_true", help="3 kills of each")
    args = parser.parse_args()
    exit_on_sigterm()
    kills = 3 if args.quick else args.kills
    results = Results("chaos-peer")
    theirs = measure(peer(args.model, args.peer_python), kills, PEER)
    for stage in STAGES:
        mine = measure(ours(args.model, stage), kills, stage)
        name = stage.partition("-")[0]
        for what in ("broken", "tokens_lost", "changed"):
            own, other = getattr(mine, what), getattr(theirs, what)
            met = name == "tokenizer" or not own
            target = None if name == "tokenizer" else 0.0
            results.figure(f"{what}_{name}", own, other, own / max(1, other), target, met)
        results.beside(f"pause_{name}_s", mine.pause, theirs.pause)
    results.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
