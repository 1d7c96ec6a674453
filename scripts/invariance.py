"""What a request gets depends on nothing but the request: random mixes, run in many ways.

    python scripts/invariance.py --model .models/SmolLM2-135M-Instruct.Q4_1.gguf --mixes 300

Each mix (a few requests with random prompts and every sampling parameter) runs alone, batched, in
chunks of 7 and 64 tokens, on warm caches, preempted, with drafts, with two threads, ...
Token ids, logprobs, finish reasons and scores must be the same in every bit. The native plan only:
torch's sums depend on the batch. The first difference ends the run, with exit code 1 and the
smallest part of its mix that shows it; `--seed N --mixes 1` runs that mix again.
"""

import argparse
import dataclasses
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from mix_runs import Bench, Difference, Mix, check, reduced, seeded_mix
from prompts import PROMPTS
from request_mixes import World
from triptych.services.executor.backend import Backend, BackendOptions, open_backend
from triptych.services.runtime.model_files import ModelFiles, resolve_model
from triptych.services.tokenizer.tokenizer import Tokenizer, load_tokenizer

TEXT = Path(__file__).parents[1] / "bench" / "data" / "text.txt"
KV_CACHE_BYTES = 40 << 20
SYSTEM = "You are a helpful assistant. Answer in one sentence. "


def main() -> int:
    """Run the mixes; 0 when nothing differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--mixes", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first mix; the next has 1 more")
    args = parser.parse_args()
    bench = open_bench(resolve_model(str(args.model)))
    seen: Counter[str] = Counter()
    began = time.monotonic()
    for done, seed in enumerate(range(args.seed, args.seed + args.mixes), 1):
        mix = seeded_mix(seed, bench.world)
        try:
            found = check(bench, mix, seen)
        except AssertionError:
            print(f"\nmix {seed}: the engine broke an invariant of its own", file=sys.stderr)
            raise
        if found is not None:
            report(*reduced(bench, mix, found))
            return 1
        progress(done, args.mixes, time.monotonic() - began)
    print()
    return summary(seen, args.mixes)


def open_bench(files: ModelFiles) -> Bench:
    """The model twice: with one thread and with two."""
    single, double = (_backend(files, threads) for threads in (1, 2))
    tokenizer = load_tokenizer(files)
    return Bench(single, double, world_of(tokenizer), tokenizer.vocabulary_size)


def _backend(files: ModelFiles, threads: int) -> Backend:
    options = BackendOptions(plan="native", kv_cache_memory=KV_CACHE_BYTES, threads=threads)
    backend = open_backend(files, options)
    backend.reserve(512)
    return backend


def world_of(tokenizer: Tokenizer) -> World:
    """Questions after a system prompt, and stretches of a story."""
    story = tokenizer.encode(TEXT.read_text())
    texts = [tokenizer.encode(SYSTEM + prompt) + story[:64] for prompt in PROMPTS]
    texts += [story[at : at + 128] for at in range(0, 1280, 128)]
    common = [token_id for token_id, _ in Counter(story).most_common(40)]
    return World(
        texts=texts,
        vocabulary_size=tokenizer.vocabulary_size,
        stop_ids=sorted({*common, *tokenizer.eos_token_ids}),
        fields={"stop_token_ids": 0.4, "logprobs": 0.4},
    )


def progress(done: int, mixes: int, seconds: float) -> None:
    """One line, rewritten."""
    left = seconds / done * (mixes - done)
    print(f"\r{done}/{mixes} mixes, {seconds:.0f} s, {left:.0f} s to go ", end="", flush=True)


def report(mix: Mix, found: Difference) -> None:
    """What differs, and how to see it again."""
    print(f"\nmix {mix.seed}, {found.variant}: choice {found.choice} differs: {found.what}")
    print(f"run again: --seed {mix.seed} --mixes 1; of its requests these are needed:")
    for request in mix.requests:
        mark = "*" if request.request_id == found.request.request_id else " "
        params = {
            field.name: value
            for field in dataclasses.fields(request.params)
            if (value := getattr(request.params, field.name)) != field.default
        }
        print(f" {mark} {request.request_id}: prompt {list(request.prompt_token_ids)}")
        print(f"     choice {request.choice}, salt {request.cache_salt!r}, {params}")


def summary(seen: Counter[str], mixes: int) -> int:
    """What the mixes were made of; 1 when something that was to happen never did."""
    for what, count in sorted(seen.items()):
        print(f"  {count:8} {what}")
    needed = [
        "preemptions",
        "tokens from a warm cache",
        "tokens from overlapping prompts",
        "drafts taken",
    ]
    never = [what for what in needed if not seen[what]]
    if never and mixes >= 20:
        print(f"nothing differs, but there were no {' and no '.join(never)}")
        return 1
    print(f"{mixes} mixes, {seen['runs compared']} runs: every bit as alone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
