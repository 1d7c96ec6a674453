"""Beam search as transformers does it: the reference of the engine's."""

import torch
import transformers

from triptych.engine_core.sampling_params import BeamParams, EarlyStopping

_STOPPING: dict[EarlyStopping, bool | str] = {"true": True, "false": False, "never": "never"}
PADDING = 0


def transformers_beams(
    model: torch.nn.Module,
    prompt: list[int],
    params: BeamParams,
    most: int,
    stops: list[int],
    least: int = 0,
) -> list[tuple[list[int], float]]:
    """The best hypotheses of `generate`, best first: padded output tokens, score.

    The model's config must name no end of sequence, and PADDING as padding.
    """
    assert isinstance(model, transformers.GenerationMixin)
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=params.width,
        num_return_sequences=params.width,
        max_new_tokens=most,
        min_new_tokens=least or None,
        length_penalty=params.length_penalty,
        early_stopping=_STOPPING[params.early_stopping],
        do_sample=False,
        eos_token_id=stops or None,
        pad_token_id=PADDING,
        return_dict_in_generate=True,
        output_scores=True,
    )
    return [
        (row[len(prompt) :].tolist(), score)
        for row, score in zip(found.sequences, found.sequences_scores.tolist(), strict=True)
        if score > -1e8  # transformers fills up with hypotheses that do not exist
    ]


def assert_same_beams(
    ours: list[tuple[list[int], float]],
    reference: list[tuple[list[int], float]],
    stops: list[int],
    tolerance: float = 1e-4,
) -> None:
    """The same hypotheses in the same order; scores within `tolerance`, relative or absolute."""
    assert len(ours) == len(reference)
    for (tokens, score), (padded, reference_score) in zip(ours, reference, strict=True):
        assert abs(score - reference_score) <= tolerance * max(1.0, abs(reference_score))
        assert padded[: len(tokens)] == tokens
        assert set(padded[len(tokens) :]) <= {PADDING, *stops[:1]}
