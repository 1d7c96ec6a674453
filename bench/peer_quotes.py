"""bench-peers: speculation by prompt lookup, on summaries that quote their text."""

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from triptych.services.runtime.model_files import resolve_model
from triptych.services.tokenizer.chat_messages import ChatMessage
from triptych.services.tokenizer.tokenizer import load_tokenizer

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests" / "support")]
from lane import Lane
from machine_load import Disturbance
from passages import ASKED, PASSAGES
from peer_setup import Report, Setup, our_engine, warn
from streams import Streamed, stream_together

from engine import Engine, generate_request

NEW_TOKENS = 160  # at most; most answers end by themselves
LOOKUP = ("--speculative-method", "ngram")
PEER_GUESSES = (
    2,
    10,
)  # its documentation's advice for processors, and its default: the faster counts
SEED = 7


def answers(engine: Engine, prompts: Sequence[Sequence[int]], temperature: float) -> list[Streamed]:
    """One after the other."""
    asked = [
        generate_request(prompt, max_tokens=NEW_TOKENS, temperature=temperature, seed=SEED)
        for prompt in prompts
    ]
    return [stream_together(engine.address, [each])[0] for each in asked]


def check_same(plain: Sequence[Streamed], guessed: Sequence[Streamed], how: str) -> None:
    """Raises RuntimeError unless both are the same answers, token for token."""
    for one, other in zip(plain, guessed, strict=True):
        if one.token_ids != other.token_ids:
            raise RuntimeError(f"{how}: not the same with and without {' '.join(LOOKUP)}")


def rate(streams: Sequence[Streamed]) -> float:
    """Tokens per second behind each answer's first token, over all answers."""
    seconds = sum(stream.arrivals[-1][0] - stream.arrivals[0][0] for stream in streams)
    tokens = sum(len(stream.token_ids) - stream.arrivals[0][1] for stream in streams)
    return tokens / seconds


def peer_rate(
    peer: Lane, prompts: Sequence[Sequence[int]], stop: Sequence[int], guesses: int
) -> float:
    """The same of llama.cpp; `guesses` tokens are looked up for each step."""
    answered = [
        peer.ask("quote", prompt=prompt, new_tokens=NEW_TOKENS, stop=stop, guesses=guesses)
        for prompt in prompts
    ]
    tokens = sum(len(answer["tokens"]) - 1 for answer in answered)
    return float(tokens / sum(answer["rest"] for answer in answered))


def measure_quotes(setup: Setup, report: Report) -> None:
    """spec_quote and spec_quote_best."""
    tokenizer = load_tokenizer(resolve_model(str(setup.model)))
    prompts = [tokenizer.encode_chat([ChatMessage("user", ASKED + text)]) for text in PASSAGES]
    rates: dict[str, list[float]] = {"plain": [], "lookup": [], "best, plain": []}
    rates |= {f"best, lookup of {guesses}": [] for guesses in PEER_GUESSES}
    shares = []
    with (
        setup.peer_text() as peer,
        our_engine(setup) as plain,
        our_engine(setup, *LOOKUP) as lookup,
    ):
        check_same(answers(plain, prompts, 0.8), answers(lookup, prompts, 0.8), "seeded")
        names = ("tokenizer-0", "scheduler", "executor-0")
        pids = [engine.pid(name) for engine in (plain, lookup) for name in names]
        for turn in range(-1, setup.rounds):  # the first one warms up
            with Disturbance([*pids, peer.pid]) as disturbance:
                without = answers(plain, prompts, 0.0)
                guessed = answers(lookup, prompts, 0.0)
                theirs = [
                    peer_rate(peer, prompts, tokenizer.eos_token_ids, guesses)
                    for guesses in (0, *PEER_GUESSES)
                ]
            check_same(without, guessed, "greedy")
            if turn >= 0:
                shares.append(disturbance.share)
                for name, value in zip(rates, [rate(without), rate(guessed), *theirs], strict=True):
                    rates[name].append(value)
        drafted = lookup.stats("scheduler").scheduler
        print(
            f"    lookup: {drafted.accepted_draft_tokens_total} of {drafted.draft_tokens_total} "
            "guesses were right", flush=True,
        )  # fmt: skip
    warn("spec_quote", shares)
    for name, values in rates.items():
        report.spread(f"spec_quote, {name}, tokens/s", values)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    report.add("spec_quote", medians["lookup"], medians["plain"])
    fastest = max(value for name, value in medians.items() if name.startswith("best, lookup"))
    report.add("spec_quote_best", medians["lookup"], fastest)
