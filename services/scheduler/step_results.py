"""What a step brought: its samples drawn here or taken from the executor, its prompt scored."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

from triptych.engine_core.scheduler import Scheduler
from triptych.engine_core.step import Logprobs
from triptych.kernels.sampler_params import TokenLogprobs
from triptych.services.scheduler.device_sampling import DeviceSamples
from triptych.services.scheduler.sampler import StepSampler
from triptych.services.scheduler.verification import DrawnStep
from triptych.services.transport.rings import LogitsView


@dataclass(frozen=True, slots=True)
class DeviceDraws:
    """A token for each sample of the step, NO_TOKEN for those that are the scheduler's; logprobs by
    sample, of those that ask for them."""

    asked: DeviceSamples
    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs]


def prepare_masks(core: Scheduler, sampler: StepSampler, asked: DeviceSamples | None) -> None:
    """Compute the masks of the samples that will be drawn here."""
    if asked is None:
        sampler.prepare(core.samples()[0], core.drafts())
        return
    mine = ~asked.drawn
    if mine.any():
        sampler.prepare(
            list(compress(core.samples()[0], mine)), list(compress(core.drafts(), mine))
        )


def score_prompts(
    core: Scheduler, sampler: StepSampler, logits: LogitsView | None
) -> list[Sequence[Logprobs | None]]:
    """For each of the step's scores, the logprobs of its positions."""
    wanted = core.scores()
    if not wanted:
        return []
    assert logits is not None, "rows that are scored come to the ring"
    return [
        sampler.score(
            logits, range(score.logits_row, score.logits_row + score.num_positions), targets, top
        )
        for score, targets, top in wanted
    ]


def draw(
    core: Scheduler,
    sampler: StepSampler,
    drafts: Sequence[int],
    logits: LogitsView | None,
    device: DeviceDraws | None,
) -> DrawnStep:
    """A token for each sample of the step in flight. `drafts`: the core's; `logits` is None where
    no row came."""
    ids, rows = core.samples()
    if device is None:
        assert logits is not None, "all rows come to the ring"
        return sampler.draw(logits, ids, rows, drafts)
    drawn = DrawnStep(device.token_ids, device.logprobs)
    host = device.asked.host()
    if not host:
        return drawn
    assert logits is not None, "rows that are drawn here come to the ring"
    part = sampler.draw(
        logits, [ids[i] for i in host], [rows[i] for i in host], [drafts[i] for i in host]
    )
    for sample, token_id in zip(host, part.token_ids, strict=True):
        drawn.token_ids[sample] = token_id
    for at, logprobs in part.logprobs.items():
        drawn.logprobs[host[at]] = logprobs
    for at, error in part.errors.items():
        drawn.errors[host[at]] = error
    drawn.complete.extend(host[at] for at in part.complete)
    return drawn
