"""Grammars over a real vocabulary: the masks behind drafts are llguidance's own, drafts change no
token, what is finished is valid JSON of the schema, and forced text saves steps."""

import json
from collections.abc import Sequence
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from llguidance import LLExecutor
from numpy.typing import NDArray

from drafted_draws import LogitsOf, Wish, run
from grammar_sources import TokenGrammars, Tokens, schema
from triptych.engine_core.sampling_params import SamplingParams
from triptych.services.runtime.model_files import ModelFiles
from triptych.services.scheduler.running_grammars import LAST, RunningGrammars
from triptych.services.scheduler.sampler import StepSampler, new_sampler
from triptych.services.tokenizer.tokenizer import load_tokenizer

SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
    },
    "required": ["customer_name", "age", "tags", "zip"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def source(smollm: Path) -> TokenGrammars:
    tokenizer = load_tokenizer(ModelFiles("gguf", smollm, "smollm"))
    table = tokenizer.piece_table
    assert table is not None
    pieces = [table.pieces[token] for token in range(len(table.pieces))]
    special = sorted(tokenizer.special_token_ids)
    ends = tokenizer.eos_token_ids
    return TokenGrammars(Tokens(pieces, special, ends[0]), ends, forcing=False)


def params(source: TokenGrammars, **fields: object) -> SamplingParams:
    values: dict[str, object] = {
        "max_tokens": 120,
        "grammar": schema(SCHEMA),
        "stop_token_ids": source.eos_token_ids,
        "logprobs": 2,
    }
    return SamplingParams(**{**values, **fields})  # type: ignore[arg-type]  # test's shorthand


def wants(source: TokenGrammars, text: bytes, seed: int) -> LogitsOf:
    """A model that would like to say something, and says something else now and then."""
    liked = source.greedy_tokens(text)

    def logits_of(sequence_id: int, tokens: Sequence[int]) -> NDArray[np.float32]:
        rng = np.random.default_rng([seed, sequence_id, len(tokens), tokens[-1]])
        row = rng.standard_normal(source.vocabulary_size).astype(np.float32)
        row[liked] += 3.0
        place = len(tokens) - 2
        if place < len(liked):
            row[liked[place]] += 8.0
        return row

    return logits_of


@pytest.mark.smollm
def test_masks_behind_drafts_are_llguidances(source: TokenGrammars) -> None:
    text = b'{"customer_name":"Ann Lee","age":31,"tags":["red","blue"],"zip":"12345"}'
    tokens = source.greedy_tokens(text)
    words = -(-source.vocabulary_size // 32)
    executor, rng = LLExecutor(2), np.random.default_rng(0)
    running = RunningGrammars(source)
    wanted = params(source)
    running.open(1, wanted, [])
    for count, token in enumerate(tokens):
        drafts = tokens[count : count + 4]
        if rng.random() < 0.3:
            drafts[-1] = int(rng.integers(source.vocabulary_size))
        theirs = np.zeros((5, words), np.uint32)
        matcher = source.matcher(wanted.grammar)
        assert matcher.consume_tokens(tokens[:count])
        executor.unsafe_compute_mask_ptr_with_draft_token(
            [(matcher, 0, drafts)], theirs.ctypes.data, 4 * words, 5
        )
        running.prepare([1] * (len(drafts) + 1), [*drafts, LAST])
        assert running._prepared
        for sample, prepared in running._prepared.items():
            np.testing.assert_array_equal(prepared.mask.words, theirs[sample])
        assert running.take(1, token) == (count == len(tokens) - 1)


@pytest.mark.smollm
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_nothing_and_outputs_are_valid(
    source: TokenGrammars, temperature: float
) -> None:
    def sampler() -> StepSampler:
        inner = new_sampler("native", source.vocabulary_size, processed_logprobs=False)
        return StepSampler(inner, {}, source)

    logits_of = wants(source, b'{"name": "Bob Brown", "age": -7, "tags": ["blue"]} Sure, here', 5)
    wishes = [
        Wish(1, params(source, temperature=temperature, seed=7, repetition_penalty=1.1)),
        Wish(2, params(source, temperature=temperature, seed=8, top_p=0.9, min_tokens=119)),
        Wish(3, params(source, temperature=temperature, seed=9, top_k=40, stop_token_ids=())),
    ]
    plain = run(sampler(), wishes, logits_of)
    mine = sampler()

    def drafts_of(sequence_id: int, output: Sequence[int]) -> Sequence[int]:
        forced = dict(mine.drafts()).get(sequence_id, ())
        return forced or plain[sequence_id].token_ids[len(output) :][:3]

    drafted = run(mine, wishes, logits_of, drafts_of)
    assert drafted == plain
    for result in plain.values():
        assert result.finish == "stop"
        jsonschema.validate(json.loads(source.text(result.token_ids)), SCHEMA)
    assert sum(each.steps for each in drafted.values()) < sum(each.steps for each in plain.values())
