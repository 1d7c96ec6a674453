"""core_engine.Engine with somebody outside who draws the tokens of some requests, late."""

from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from core_engine import Engine, Shape, requests
from triptych.engine_core.ids import RequestId
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import ExternalSampler, SamplingParams
from triptych.engine_core.step import PromptLogprobs, StepOutput

LEASE = 77


@dataclass
class ExternalEngine(Engine):
    """`pending`: (position, token) that somebody outside has drawn for a choice and not yet told;
    drawn by the same hash, so what must come out is what comes out of a request drawn here. `anew`:
    choices of a core before this one, whose prompt logprobs may come again."""

    pending: dict[RequestId, tuple[int, int]] = field(default_factory=dict)
    anew: set[RequestId] = field(default_factory=set)

    def record(self, output: StepOutput) -> None:
        """As Engine.record; what comes again must be the same."""
        found = []
        for each in output.prompt_logprobs:
            known = self.prompt_logprobs.get(each.request_id, [])[each.position - 1 :]
            again = len(known) if each.request_id in self.anew else 0
            assert each.logprobs[:again] == known[: len(each.logprobs)] or not again
            if rest := each.logprobs[again:]:
                found.append(PromptLogprobs(each.request_id, each.position + again, rest))
        super().record(replace(output, prompt_logprobs=found))

    def end(self, broken: frozenset[int] = frozenset()) -> StepOutput:
        """As Engine.end; what is drawn for external samples waits in `pending`."""
        scheduler = self.scheduler
        samples = scheduler.external_samples()
        ids, _ = scheduler.samples()
        for each in samples:
            assert scheduler.lives(each.request_id)
            assert (each.lease, each.tag) == (LEASE, each.request_id)
            assert each.position == len(self.outputs[each.request_id])
            if each.sample not in broken:
                opened = self.sampler.opened[ids[each.sample]]
                drawn = each.position, opened.next(opened.tokens)
                assert self.pending.setdefault(each.request_id, drawn) == drawn
        output = super().end(broken)
        told = {each.request_id for each in samples} & set(output.request_ids)
        assert not told, "no token of an external sequence comes out of a step"
        return output

    def tell(self, request_ids: list[RequestId]) -> StepOutput:
        """Tokens come from outside."""
        drawn = [(each, self.pending.pop(each)[1]) for each in request_ids]
        output = self.scheduler.take_tokens(drawn)
        self.record(output)
        return output

    def run_to_empty(self, max_steps: int = 10_000) -> int:
        """As Engine.run_to_empty; everything that is pending is told before each step."""
        steps = 0
        if self.plan is not None:
            self.end()
        self.tell(list(self.pending))
        while self.begin():
            self.scheduler.check()
            self.end()
            self.tell(list(self.pending))
            self.scheduler.check()
            steps += 1
            assert steps <= max_steps, "the engine makes no progress"
        return steps


def made_external(request: Request) -> Request:
    """The same request, drawn outside."""
    params = SamplingParams(
        max_tokens=request.params.max_tokens,
        stop_token_ids=request.params.stop_token_ids,
        prompt_logprobs=request.params.prompt_logprobs,
        external=ExternalSampler(lease=LEASE, tag=request.request_id),
    )
    return replace(request, params=params)


@st.composite
def mixed_requests(draw: st.DrawFn, number: int, shape: Shape) -> Request:
    """As core_engine.requests; about half of them are drawn outside."""
    request = draw(requests(number, shape))
    if request.params.beam is None and draw(st.booleans()):
        return made_external(request)
    return request
