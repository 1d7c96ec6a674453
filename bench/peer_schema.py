"""bench-peers: what a schema costs, per output token and before the first one."""

import json
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from triptych.services.runtime.model_files import resolve_model
from triptych.services.tokenizer.chat_messages import ChatMessage
from triptych.services.tokenizer.tokenizer import load_tokenizer
from triptych.v1 import common_pb2, inference_pb2

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests" / "support")]
from lane import Lane
from machine_load import Disturbance
from peer_setup import CONCURRENCY, Report, Setup, our_engine, warn
from schemas import ITEMS, is_person, is_text, records_schema, texts_schema, whole_items
from streams import Streamed, seconds_per_token, stream_together
from workload import random_ids

from engine import Engine, generate_request

TEMPERATURE = 0.8
FIRST_PROMPT = 64  # tokens
ASKED = (
    "Invent {count} people who live in a small harbour town. For each give a name, an age, the "
    "kind of work (land or sea), and tags. Answer in JSON."
)


@dataclass(frozen=True, slots=True)
class Case:
    """A schema, the start of its figures' names, and what an item must be."""

    name: str
    schema: dict[str, object]
    valid: Callable[[object], bool]


CASES = (
    Case("schema_overhead", records_schema(), is_person),
    Case("schema_overhead_text", texts_schema(), is_text),
)


def request(
    prompt: Sequence[int], tokens: int, seed: int, schema: dict[str, object] | None
) -> inference_pb2.GenerateRequest:
    """Exactly `tokens` sampled tokens, with or without a schema."""
    asked = generate_request(
        prompt, max_tokens=tokens, temperature=TEMPERATURE, seed=seed, ignore_eos=True
    )
    if schema is not None:
        output = common_pb2.StructuredOutput(json_schema=json.dumps(schema))
        asked.sampling_params.structured_output.CopyFrom(output)
    return asked


def measure_schema(setup: Setup, report: Report) -> None:
    """schema_overhead_* and schema_first_token_*."""
    tokenizer = load_tokenizer(resolve_model(str(setup.model)))
    prompts = [
        tokenizer.encode_chat([ChatMessage("user", ASKED.format(count=count))])
        for count in range(ITEMS, ITEMS + CONCURRENCY)
    ]
    with setup.peer_text() as peer, our_engine(setup) as engine:
        measure_first_tokens(setup, report, peer, engine)
        for case in CASES:
            ours = 1.0
            for count in (CONCURRENCY, 1):
                ours = our_overhead(setup, report, engine, case, prompts[:count])
            theirs = their_overhead(setup, peer, case, prompts[0])
            report.results.beside(f"{case.name}_1_best", ours, theirs)
        engine.wait_idle()


def our_overhead(
    setup: Setup, report: Report, engine: Engine, case: Case, prompts: Sequence[Sequence[int]]
) -> float:
    """Seconds per token with the schema over without, prompts and lengths the same."""
    tokens = 64 if setup.quick else 160
    pids = [engine.pid(name) for name in ("tokenizer-0", "scheduler", "executor-0")]
    times: dict[bool, list[float]] = {False: [], True: []}
    shares = []
    for turn in range(-1, setup.rounds):  # the first one warms up
        for constrained in (False, True):
            schema = case.schema if constrained else None
            asked = [request(prompt, tokens, turn + 1, schema) for prompt in prompts]
            with Disturbance(pids) as disturbance:
                streams = stream_together(engine.address, asked)
            check(streams, tokens, case if constrained else None)
            if turn >= 0:
                times[constrained].append(seconds_per_token(streams))
                shares.append(disturbance.share)
    name = f"{case.name}_{len(prompts)}"
    warn(name, shares)
    report.spread(f"{name}, seconds per token, without", times[False])
    report.spread(f"{name}, seconds per token, with", times[True])
    ours, peer = statistics.median(times[True]), statistics.median(times[False])
    report.add(name, ours, peer)
    return ours / peer


def check(streams: Sequence[Streamed], tokens: int, case: Case | None) -> None:
    """Every answer has its tokens, and what it has of the document is right."""
    for stream in streams:
        if len(stream.token_ids) != tokens:
            raise RuntimeError(f"{len(stream.token_ids)} tokens came, {tokens} were asked for")
        if case is not None:
            items = whole_items(stream.text)
            wrong = [item for item in items if not case.valid(item)]
            if wrong:
                raise RuntimeError(f"{case.name}: not of the schema: {wrong[0]!r}")


def their_overhead(setup: Setup, peer: Lane, case: Case, prompt: Sequence[int]) -> float:
    """llama.cpp's seconds per token with its grammar over without, one sequence."""
    tokens = 64 if setup.quick else 160
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(-1, setup.rounds):
        for constrained in (False, True):
            schema = json.dumps(case.schema) if constrained else None
            answer = peer.ask(
                "schema", prompt=prompt, new_tokens=tokens, schema=schema,
                temperature=TEMPERATURE, seed=turn + 1,
            )  # fmt: skip
            if turn >= 0:
                times[constrained].append(answer["rest"] / max(len(answer["tokens"]) - 1, 1))
    Report.spread(f"{case.name}_1, seconds per token, llama.cpp, without", times[False])
    Report.spread(f"{case.name}_1, seconds per token, llama.cpp, with", times[True])
    return statistics.median(times[True]) / statistics.median(times[False])


def measure_first_tokens(setup: Setup, report: Report, peer: Lane, engine: Engine) -> None:
    """schema_first_token_*: seconds to the first token, every prompt and every cold schema new."""
    times: dict[str, list[float]] = {"without": [], "cold": [], "cached": []}
    theirs: dict[str, list[float]] = {"without": [], "cold": []}
    generator = random.Random("first tokens")
    once = first_token(engine, generator, None), first_token(engine, generator, records_schema())
    for turn in range(setup.rounds * 3):
        new = records_schema(f"_{turn}")
        for name, schema in (("without", None), ("cold", new), ("cached", new)):
            times[name].append(first_token(engine, generator, schema))
        for name, schema in (("without", None), ("cold", new)):
            answer = peer.ask(
                "schema", prompt=random_ids(generator, FIRST_PROMPT), new_tokens=2,
                schema=schema and json.dumps(schema), temperature=TEMPERATURE, seed=turn,
            )  # fmt: skip
            theirs[name].append(answer["first"])
    print(f"    the engine's first schema: {once[1]:.3g} s to the first token", flush=True)
    for name, values in times.items():
        report.spread(f"schema_first_token, {name}", values)
    for name, values in theirs.items():
        report.spread(f"schema_first_token, llama.cpp, {name}", values)
    without = statistics.median(times["without"])
    cold, cached = statistics.median(times["cold"]), statistics.median(times["cached"])
    report.results.beside("schema_first_token_cold", cold, without)
    report.results.beside("schema_first_token_cached", cached, without)
    their_ratio = statistics.median(theirs["cold"]) / statistics.median(theirs["without"])
    report.results.beside("schema_first_token_cold_best", cold / without, their_ratio)


def first_token(
    engine: Engine, generator: random.Random, schema: dict[str, object] | None
) -> float:
    """Seconds to the first token of a prompt that was never there before."""
    asked = request(random_ids(generator, FIRST_PROMPT), 2, 1, schema)
    return stream_together(engine.address, [asked])[0].seconds_to_first
