"""The drafter that the settings ask for."""

from typing import assert_never

from triptych.engine_core.draft_lengths import DraftLengths
from triptych.engine_core.drafting import AdaptiveDrafter, Drafter, Guesser, ModelGuesser
from triptych.engine_core.ngram_drafter import NgramDrafter
from triptych.engine_core.suffix_drafter import SuffixDrafter
from triptych.services.scheduler.settings import SchedulerSettings

_DRAFT_MODEL_PRICE = 0.15
"""Of a token that a draft model guesses: as if it had a seventh of the served model's size. Looking
one up costs next to nothing."""


def build_drafter(settings: SchedulerSettings) -> Drafter | None:
    """A drafter with nothing open; None where nothing is to be guessed.

    One of method draft_model proposes UNKNOWN_DRAFT alone, which only an executor with a draft
    model understands.
    """
    guesser = _guesser(settings)
    if guesser is None:
        return None
    price = _DRAFT_MODEL_PRICE if settings.speculative_method == "draft_model" else 0.0
    lengths = DraftLengths(settings.num_speculative_tokens, settings.max_num_draft_tokens, price)
    return AdaptiveDrafter(guesser, lengths)


def _guesser(settings: SchedulerSettings) -> Guesser | None:
    shortest, longest = settings.prompt_lookup_min, settings.prompt_lookup_max
    match settings.speculative_method:
        case "off":
            return None
        case "ngram":
            return NgramDrafter(shortest, longest)
        case "suffix":
            return SuffixDrafter(shortest, longest)
        case "draft_model":
            return ModelGuesser()
        case method:
            assert_never(method)
