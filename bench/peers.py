"""Our engine against llama.cpp (and transformers) on the same model, cores and prompts.

    make bench-peers [QUICK=1]

llama.cpp comes from PyPI and is built for this machine in an environment of its own; it runs the
same file (`_same`) and a Q4_0 that its own quantiser wrote (`_best`, its fast path), pinned, with
waits that spin. Everyone gets two threads. Measurements take turns (ours, peer, ours, peer, ...),
who is not measured is stopped; figures are medians.

    decode_N        tokens/s of N sequences: 64 tokens of prompt, then a token each per step
    prefill_N       tokens/s of one prompt of N tokens, logits for the last
    served_*        64 requests, 32 at once: ours through the public gRPC port, with sockets,
                    detokenizing and this client on the same cores; llama.cpp in a continuous
                    batching loop of our own over its library, without any server's cost
    prefix_ttft     seconds to the first token of a prompt of 1,500 tokens the second time, over
                    the first time: ours through the public gRPC port
    prefix_ttft_best    that ratio of ours, over llama.cpp's own, which keeps keys and values in
                    place between two calls of its library; no target
    start_first_token   seconds from starting the service to its first token: ours over gRPC,
                    llama.cpp's over the HTTP of llama-cpp-python's own server
    rss_executor    bytes of the executor after served_mixed; KV caches of the same size
    schema_overhead_N   seconds per output token of N sequences with a JSON schema, over without;
                    ours through the public gRPC port; _text: a schema that forces no text;
                    _best: that ratio of ours over llama.cpp's with its grammar
    schema_first_token_*    seconds to the first token with a schema that is new (cold) and with
                    one that was there before (cached), over without; no target
    spec_quote      tokens/s of summaries that quote, with --speculative-method ngram, over plain
                    decoding; _best: over llama.cpp with its own prompt lookup

Token ids are the same for all. Library figures call each library in a process of its own. Only
prefix_ttft measures prefix caches: libraries are called without one, and no other prompt comes
twice to a service, but where the first token is not counted (schema_overhead, spec_quote).
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests" / "support")]
from lane import Lane
from machine_load import Disturbance, resident_bytes
from peer_quotes import measure_quotes
from peer_schema import measure_schema
from peer_server import seconds_to_first_token
from peer_setup import (
    CONCURRENCY,
    PINNED,
    SEQUENCE,
    THREADS,
    Report,
    Setup,
    our_engine,
    requantize,
    warn,
)
from results import ROOT, Results
from served import ask_in_turn, serve_requests
from workload import Request, Served, Timeline, mixed_workload, random_ids, served_figures

DECODE = (1, 8, 32)
PREFILL = (512, 2048)
PREFIX = 1500  # tokens of the prompt that comes twice
PREFIX_ANSWER = 8  # tokens of both answers
PREFIX_TTFT = 0.15  # what the second time may take at most of the first


def take_turns(
    lanes: Mapping[str, Lane], rounds: int, op: str, tokens: int, inputs: Callable[[int], Any]
) -> dict[str, list[float]]:
    """Tokens per second of every lane and round; `inputs(round)` are an operation's arguments."""
    rates: dict[str, list[float]] = {name: [] for name in lanes}
    shares = []
    for turn in range(-1, rounds):  # the first one warms up
        for name, lane in lanes.items():
            with Disturbance([lane.pid]) as disturbance:
                seconds = lane.ask(op, **inputs(turn))
            if turn >= 0:
                rates[name].append(tokens / seconds)
                shares.append(disturbance.share)
    warn(op, shares)
    for name, values in rates.items():
        Report.spread(f"{op} {tokens} tokens, {name}", values)
    return rates


def decode_inputs(sequences: int, steps: int, turn: int) -> dict[str, Any]:
    generator = random.Random(f"decode {sequences} {turn}")
    return {
        "prompts": [random_ids(generator, 64) for _ in range(sequences)],
        "steps": [random_ids(generator, sequences) for _ in range(steps)],
    }


def prefill_inputs(tokens: int, turn: int) -> dict[str, Any]:
    return {"prompt": random_ids(random.Random(f"prefill {tokens} {turn}"), tokens)}


def measure_libraries(setup: Setup, report: Report) -> None:
    """decode_N and prefill_N: the backend's library against libllama."""
    arguments = [str(setup.model), "--threads", str(THREADS)]
    with (
        Lane(Path(sys.executable), "triptych_lane.py", arguments) as ours,
        setup.peer(setup.model) as same,
        setup.peer(setup.best) as best,
    ):
        print(f"    ours: {ours.ask('info')}\n    peer: {same.ask('info')}", flush=True)
        every, fast = {"ours": ours, "same": same, "best": best}, {"ours": ours, "best": best}
        for count in DECODE:
            rates = take_turns(
                every if count == 1 else fast, setup.rounds, "decode", count * setup.steps,
                partial(decode_inputs, count, setup.steps),
            )  # fmt: skip
            add_rates(report, f"decode_{count}", rates)
        for tokens in PREFILL:
            rates = take_turns(
                every if tokens == 512 else fast, setup.rounds, "prefill", tokens,
                partial(prefill_inputs, tokens),
            )  # fmt: skip
            add_rates(report, f"prefill_{tokens}", rates)
        if not setup.quick:
            measure_transformers(setup, report, ours)


def add_rates(report: Report, name: str, rates: Mapping[str, list[float]]) -> None:
    """One figure for each peer; the peer's name is part of the figure's when there are two."""
    peers = [peer for peer in rates if peer != "ours"]
    for peer in peers:
        full = name if peers == ["best"] else f"{name}_{peer}"
        report.add(full, statistics.median(rates["ours"]), statistics.median(rates[peer]))


def measure_transformers(setup: Setup, report: Report, ours: Lane) -> None:
    """The same two figures against Hugging Face's own code."""
    arguments = [str(setup.model), "--threads", str(THREADS)]
    with Lane(Path(sys.executable), "transformers_lane.py", arguments, PINNED) as peer:
        lanes, rounds = {"ours": ours, "transformers": peer}, 3
        rates = take_turns(lanes, rounds, "decode", 32, partial(decode_inputs, 1, 32))
        add_rates(report, "decode_1", rates)
        rates = take_turns(lanes, rounds, "prefill", 512, partial(prefill_inputs, 512))
        add_rates(report, "prefill_512", rates)


def measure_served(setup: Setup, report: Report) -> None:
    """served_* and rss_executor."""
    count, concurrency = (12, 12) if setup.quick else (64, CONCURRENCY)
    ours: list[Served] = []
    theirs: list[Served] = []
    shares = []
    with setup.peer(setup.best) as peer, our_engine(setup) as engine:
        peer.ask("serve", requests=[[[300] * 32, 2]], concurrency=CONCURRENCY, length=SEQUENCE)
        serve_requests(engine.address, [mixed_workload(99, 1)[0]], 1)  # warm up
        pids = [engine.pid(name) for name in ("tokenizer-0", "scheduler", "executor-0")]
        for turn in range(setup.served_rounds):
            requests = mixed_workload(turn, count)
            total = sum(request.new_tokens for request in requests)
            with Disturbance(pids) as disturbance:
                timelines = serve_requests(engine.address, requests, concurrency)
            ours.append(served_figures(timelines, total))
            shares.append(disturbance.share)
            asked = [[request.prompt, request.new_tokens] for request in requests]
            with Disturbance([peer.pid]) as disturbance:
                answered = peer.ask(
                    "serve", requests=asked, concurrency=CONCURRENCY, length=SEQUENCE
                )
            theirs.append(served_figures([Timeline(*each) for each in answered], total))
            shares.append(disturbance.share)
        memory = resident_bytes(engine.pid("executor-0")), resident_bytes(peer.pid)
        engine.wait_idle()
    warn("served", shares)
    for name, attribute in (
        ("served_mixed", "tokens_per_second"),
        ("served_ttft_p99", "ttft_p99"),
        ("served_itl_p99", "itl_p99"),
    ):
        mine = [float(getattr(each, attribute)) for each in ours]
        other = [float(getattr(each, attribute)) for each in theirs]
        Report.spread(f"{name}, ours", mine)
        Report.spread(f"{name}, best", other)
        report.add(name, statistics.median(mine), statistics.median(other))
    report.add("rss_executor", *memory)


def measure_prefix(setup: Setup, report: Report) -> None:
    """prefix_ttft: each round a new prompt, and the same one again right after."""
    times: dict[str, list[tuple[float, float]]] = {"ours": [], "best": []}
    shares = []
    with setup.peer(setup.best) as peer, our_engine(setup) as engine:
        pids = [engine.pid(name) for name in ("tokenizer-0", "scheduler", "executor-0")]
        for turn in range(-1, setup.rounds):  # the first one warms up
            prompt = random_ids(random.Random(f"prefix {turn}"), PREFIX)
            with Disturbance(pids) as mine:
                ours = first_and_again(engine.address, prompt)
            with Disturbance([peer.pid]) as other:
                first, again = peer.ask("first_and_again", prompt=prompt, new_tokens=PREFIX_ANSWER)
            if turn >= 0:
                times["ours"].append(ours)
                times["best"].append((first, again))
                shares += [mine.share, other.share]
        engine.wait_idle()
    warn("prefix", shares)
    medians = {}
    for name, pairs in times.items():
        firsts, agains = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        Report.spread(f"prefix_ttft, {name}, first", firsts)
        Report.spread(f"prefix_ttft, {name}, again", agains)
        medians[name] = statistics.median(firsts), statistics.median(agains)
    first, again = medians["ours"]
    ratio = again / first
    report.results.figure("prefix_ttft", again, first, ratio, PREFIX_TTFT, ratio <= PREFIX_TTFT)
    first, again = medians["best"]
    report.results.beside("prefix_ttft_best", ratio, again / first)


def first_and_again(address: str, prompt: list[int]) -> tuple[float, float]:
    """Seconds to our first token both times.

    Raises RuntimeError unless the first met a cold cache, the second a warm one, and both answers
    are the same.
    """
    cold, warm = ask_in_turn(address, [Request(prompt, PREFIX_ANSWER)] * 2)
    if cold.cached_tokens or not warm.cached_tokens or cold.token_ids != warm.token_ids:
        raise RuntimeError(f"a prompt and the same again: {cold}, {warm}")
    return cold.seconds, warm.seconds


def measure_start(setup: Setup, report: Report) -> None:
    """start_first_token: service against service, files and caches warm from an earlier start."""
    prompt = random_ids(random.Random("start"), 32)
    ours: list[float] = []
    servers: list[float] = []
    libraries: list[float] = []
    for turn in range(-1, setup.served_rounds):  # the first start fills the caches
        start = time.perf_counter()
        with our_engine(setup) as engine:
            engine.generate(prompt, max_tokens=1, temperature=0.0, ignore_eos=True)
            seconds = time.perf_counter() - start
        server = seconds_to_first_token(setup.peer_python, setup.best, THREADS, PINNED)
        start = time.perf_counter()
        with setup.peer(setup.best) as peer:
            peer.ask("first_token", prompt=prompt)
            library = time.perf_counter() - start
        if turn >= 0:
            ours.append(seconds)
            servers.append(server)
            libraries.append(library)
    Report.spread("start_first_token, ours", ours)
    Report.spread("start_first_token, best, its HTTP server", servers)
    Report.spread("start_first_token, best, its library in a bare process", libraries)
    report.add("start_first_token", statistics.median(ours), statistics.median(servers))


def main() -> int:
    """Run the benchmark; exit code 0 when it ran, whether or not a target is met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parts = {
        "library": measure_libraries, "served": measure_served, "prefix": measure_prefix,
        "start": measure_start, "schema": measure_schema, "quotes": measure_quotes,
    }  # fmt: skip
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--peer-python", required=True, type=Path, help="has llama-cpp-python")
    parser.add_argument("--quick", action="store_true", help="fewer repeats and requests")
    parser.add_argument("--only", choices=parts, help="one part of the figures")
    parser.add_argument(
        "--peer-unified", action="store_true", help="one KV buffer for the peer's sequences"
    )
    args = parser.parse_args()
    best = ROOT / "build" / "peers" / f"{args.model.stem.rpartition('.')[0]}.Q4_0.gguf"
    setup = Setup(args.model, best, args.peer_python, args.quick, args.peer_unified)
    requantize(setup)
    report = Report(Results(f"bench-peers-{args.only}" if args.only else "bench-peers"))
    for name, part in parts.items():
        if args.only in (None, name):
            part(setup, report)
    report.results.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
