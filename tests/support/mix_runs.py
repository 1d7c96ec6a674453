"""Whether what a request gets depends on anything but the request: one mix, run in many ways.

The reference is each choice alone, on a cold cache, with one thread. Every variant of a mix (in
company, in chunks, on a warm cache, preempted, ...) must give the same answers, bit for bit.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from typing import NamedTuple

from oracle_drafter import OracleDrafter
from real_core import Answer, CoreShape, RealCore, choices_of, spoil, total_cached
from request_mixes import PROCESSORS, World, overlapping, random_mix, random_request
from triptych.engine_core.drafting import Drafter
from triptych.engine_core.errors import InvalidRequest
from triptych.engine_core.ids import RequestId
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import NO_LOGPROBS
from triptych.services.executor.backend import Backend

Answers = Mapping[RequestId, Answer]


@dataclass(frozen=True)
class Bench:
    """What mixes are run on: one model, opened with one thread and with two."""

    single: Backend
    double: Backend
    world: World
    sampleable: int | None = None

    def core(
        self, shape: CoreShape, *, threads: int = 1, drafter: Drafter | None = None
    ) -> RealCore:
        backend = self.single if threads == 1 else self.double
        spoil(backend)
        return RealCore(
            backend, shape, sampleable=self.sampleable, processors=PROCESSORS, drafter=drafter
        )


@dataclass(frozen=True)
class Mix:
    """Requests, and the seed of all that is random about how they are run."""

    requests: Sequence[Request]
    seed: int

    def source(self) -> Random:
        """The same for the same mix, also when some of its requests are left out."""
        return Random(self.seed)

    def without(self, index: int) -> "Mix":
        return replace(self, requests=[*self.requests[:index], *self.requests[index + 1 :]])


def seeded_mix(seed: int, world: World) -> Mix:
    return Mix(random_mix(Random(seed), world), seed)


class Difference(NamedTuple):
    """The first one of a variant."""

    variant: str
    request: Request
    choice: int
    what: str


def alone(bench: Bench, mix: Mix) -> dict[RequestId, Answer]:
    """The reference. The choices of a request are requests of their own, each on a cold cache."""
    answers: dict[RequestId, Answer] = {}
    for request in mix.requests:
        for index, choice in enumerate(choices_of(request)):
            if request.params.beam is not None:
                answers |= bench.core(CoreShape()).run([request])
                break
            scored = request.params.prompt_logprobs if index == 0 else NO_LOGPROBS
            params = replace(request.params, n=1, prompt_logprobs=scored)
            single = replace(
                request, request_id=choice, params=params, choice=request.choice + index
            )
            answers |= bench.core(CoreShape()).run([single])
    return answers


# ------------------------------------------------------------------ variants

Variant = Callable[[Bench, Mix, Counter[str]], Iterator[tuple[str, Answers]]]
"""Runs a mix; yields (what was done, answers). Counts in passing what there was of what."""


def together(bench: Bench, mix: Mix, seen: Counter[str]) -> Iterator[tuple[str, Answers]]:
    """All at once, then again in another order: everything is in the cache."""
    core = bench.core(CoreShape())
    yield "batched, 512 tokens a step", core.run(mix.requests)
    core.assert_empty()
    shuffled = list(mix.requests)
    mix.source().shuffle(shuffled)
    warm = core.run(shuffled)
    seen["tokens from a warm cache"] += total_cached(warm.values())
    yield "again, warm cache", warm
    core.assert_empty()


def chunked(bench: Bench, mix: Mix, seen: Counter[str]) -> Iterator[tuple[str, Answers]]:
    """7 and 64 tokens a step; requests come one by one, and some of the others go away."""
    for tokens, sequences, extra in ((7, 7, 2), (64, 16, 5)):
        source = mix.source()
        shape = CoreShape(
            max_num_batched_tokens=tokens,
            max_num_seqs=sequences,
            extra_logits=extra,
            long_prefill_token_threshold=source.choice([0, tokens // 2]),
        )
        arrivals = [source.randint(0, 12) for _ in mix.requests]
        stranger = random_request(source, bench.world, 9)
        leaves = source.randint(1, 20)

        def disturb(
            core: RealCore, step: int, stranger: Request = stranger, leaves: int = leaves
        ) -> None:
            if step == 1:
                core.submit(stranger)
            if step == leaves:
                plan = core.begin()
                for choice in choices_of(stranger):
                    seen["choices aborted in flight"] += core.abort(choice)
                if plan:
                    core.end(plan)

        core = bench.core(shape)
        answers = core.run(mix.requests, arrivals=arrivals, between=disturb)
        for choice in choices_of(stranger):
            core.abort(choice)
        yield f"chunked, {tokens} tokens a step", answers
        core.assert_empty()


def after_overlapping(bench: Bench, mix: Mix, seen: Counter[str]) -> Iterator[tuple[str, Answers]]:
    """The cache has prompts that begin alike and go on differently; the pool is not large."""
    source = mix.source()
    room = least_blocks(mix.requests, bench.single.facts.block_size)
    core = bench.core(CoreShape(num_blocks=4 * room, max_num_batched_tokens=48))
    before = [
        overlapping(source, request, bench.world, index)
        for index, request in enumerate(mix.requests)
    ]
    core.run(before)
    answers = core.run(mix.requests, arrivals=[source.randint(0, 4) for _ in mix.requests])
    seen["tokens from overlapping prompts"] += total_cached(answers.values())
    yield "after overlapping prompts", answers
    core.assert_empty()


def preempted(bench: Bench, mix: Mix, seen: Counter[str]) -> Iterator[tuple[str, Answers]]:
    """A pool that only just holds the largest request."""
    source = mix.source()
    room = least_blocks(mix.requests, bench.single.facts.block_size)
    tokens = source.choice([8, 24, 512])
    core = bench.core(CoreShape(num_blocks=room, max_num_seqs=8, max_num_batched_tokens=tokens))
    answers = core.run(mix.requests, arrivals=[source.randint(0, 3) for _ in mix.requests])
    seen["preemptions"] += core.scheduler.preemptions_total
    yield f"{room} blocks, {core.scheduler.preemptions_total} preemptions", answers
    core.assert_empty()


def threaded(bench: Bench, mix: Mix, seen: Counter[str]) -> Iterator[tuple[str, Answers]]:
    """Two threads compute."""
    core = bench.core(CoreShape(max_num_batched_tokens=100), threads=2)
    yield "two threads", core.run(mix.requests)
    seen["mixes on two threads"] += 1


def plain_twins(bench: Bench, mix: Mix, seen: Counter[str]) -> Iterator[tuple[str, Answers]]:
    """engine_impl python: batch and sampler in Python."""
    core = bench.core(CoreShape(impl="python", max_num_batched_tokens=40, max_num_seqs=8))
    yield "python twins", core.run(mix.requests)
    yield "python twins, warm cache", core.run(mix.requests)
    core.assert_empty()
    seen["mixes by the Python twins"] += 1


def executor_lost(bench: Bench, mix: Mix, seen: Counter[str]) -> Iterator[tuple[str, Answers]]:
    """The executor is gone in the middle of a step, twice, and everything is computed anew."""
    source = mix.source()
    losses = {source.randint(1, 3), source.randint(4, 9)}

    def lose(core: RealCore, step: int) -> None:
        if step in losses:
            seen["executors lost"] += core.lose_executor()

    core = bench.core(CoreShape(max_num_batched_tokens=32, max_num_seqs=8))
    yield "executor lost", core.run(mix.requests, between=lose)
    core.assert_empty()


def resumed(bench: Bench, mix: Mix, seen: Counter[str]) -> Iterator[tuple[str, Answers]]:
    """In the middle another scheduler goes on, with another pool, from the tokens that are out."""
    source = mix.source()
    core = bench.core(CoreShape(max_num_batched_tokens=32, max_num_seqs=8))
    for request in mix.requests:
        core.submit(request)
    for _ in range(source.randint(1, 8)):
        core.step()
    room = least_blocks(mix.requests, bench.single.facts.block_size)
    other = bench.core(CoreShape(num_blocks=2 * room, max_num_batched_tokens=20))
    other.take_over(core)
    seen["choices resumed"] += other.scheduler.num_requests
    yield "resumed elsewhere", other.run([])
    other.assert_empty()


def without_cache(bench: Bench, mix: Mix, seen: Counter[str]) -> Iterator[tuple[str, Answers]]:
    """No prefix caching."""
    core = bench.core(CoreShape(prefix_caching=False, policy="shortest-prefill"))
    yield "no prefix cache", core.run(mix.requests)
    seen["mixes without a cache"] += 1


def speculative(bench: Bench, mix: Mix, seen: Counter[str]) -> Iterator[tuple[str, Answers]]:
    """Drafts, right ones and wrong ones; in a pool with room, in a small one, by either twin."""
    source = mix.source()
    found = bench.core(CoreShape()).run(mix.requests)
    texts = [
        [*request.prompt_token_ids, *found[choice].token_ids]
        for request in mix.requests
        for choice in choices_of(request)
    ]
    room = least_blocks(mix.requests, bench.single.facts.block_size)
    for shape in (
        CoreShape(),
        CoreShape(num_blocks=room, max_num_batched_tokens=24, max_num_seqs=8, extra_logits=9),
        CoreShape(impl="python", max_num_batched_tokens=40, max_num_seqs=8),
    ):
        drafter = OracleDrafter(texts, source, bench.sampleable or bench.world.vocabulary_size)
        core = bench.core(shape, drafter=drafter)
        arrivals = [source.randint(0, 3) for _ in mix.requests]
        yield f"with drafts, {shape.impl}", core.run(mix.requests, arrivals=arrivals)
        seen["drafts computed"] += drafter.drafted
        seen["drafts taken"] += drafter.accepted
        core.assert_empty()


ALWAYS: tuple[Variant, ...] = (together, chunked, after_overlapping, preempted)
SAMPLED: tuple[tuple[int, Variant], ...] = (
    (2, threaded), (2, speculative), (4, executor_lost), (4, resumed), (4, without_cache),
    (6, plain_twins),
)  # fmt: skip
"""Every so many mixes: a variant that would cost too much in each."""


def variants_of(mix: Mix) -> list[Variant]:
    return [*ALWAYS, *(variant for every, variant in SAMPLED if mix.seed % every == 0)]


def least_blocks(requests: Sequence[Request], block_size: int) -> int:
    """The smallest pool that admission takes all of the requests for."""
    most = 1
    for request in requests:
        prompt, output = len(request.prompt_token_ids), request.params.max_tokens
        need = -(-(prompt + output) // block_size)
        if request.params.beam is not None:
            each = -(-output // block_size) + 1
            need = -(-prompt // block_size) + request.params.beam.width * each
        most = max(most, need)
    return most


# ------------------------------------------------------------------ comparison


def check(
    bench: Bench,
    mix: Mix,
    seen: Counter[str],
    variants: Sequence[Variant] | None = None,
) -> Difference | None:
    """Run a mix in every way; the first difference."""
    reference = alone(bench, mix)
    for answer in reference.values():
        seen["choices"] += 1
        seen[f"end: {answer.finish.partition(':')[0]}"] += 1
        seen["output tokens"] += len(answer.token_ids)
        seen["positions with logprobs"] += len(answer.values) + len(answer.prompt_logprobs)
    for variant in variants_of(mix) if variants is None else variants:
        for name, answers in variant(bench, mix, seen):
            seen["runs compared"] += 1
            found = compare(name, mix.requests, reference, answers)
            if found is not None:
                return found
    return None


def compare(
    name: str, requests: Sequence[Request], expected: Answers, got: Answers
) -> Difference | None:
    for request in requests:
        for index, choice in enumerate(choices_of(request)):
            what = first_difference(expected[choice], got[choice])
            if what is not None:
                return Difference(name, request, index, what)
    return None


def first_difference(expected: Answer, got: Answer) -> str | None:
    """In words; None if the answers are equal in every bit."""
    for each in fields(Answer):
        if not each.compare:
            continue
        one, other = getattr(expected, each.name), getattr(got, each.name)
        if one == other:
            continue
        if not isinstance(one, list):
            return f"{each.name}: {one!r} alone, {other!r} here"
        for position, (a, b) in enumerate(zip(one, other, strict=False)):
            if a != b:
                return f"{each.name}[{position}]: {a!r} alone, {b!r} here"
        return f"{each.name}: {len(one)} alone, {len(other)} here"
    return None


def reduced(
    bench: Bench, mix: Mix, found: Difference, variants: Sequence[Variant] | None = None
) -> tuple[Mix, Difference]:
    """Leave out what the difference does not need: other requests, one by one."""
    seen: Counter[str] = Counter()
    index = len(mix.requests) - 1
    while index >= 0 and len(mix.requests) > 1:
        smaller = mix.without(index)
        try:
            again = check(bench, smaller, seen, variants)
        except (AssertionError, InvalidRequest):
            again = None
        if again is not None:
            mix, found = smaller, again
        index -= 1
    return mix, found
