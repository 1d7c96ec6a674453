"""Random requests on the fake model, as a tokenizer process plays them: whole, or from a cut on."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from fake_tokenizer import FakeTokenizer
from request_mixes import World, random_mix
from triptych.engine_core.request import Request
from triptych.engine_core.sampling_params import NO_LOGPROBS, SamplingParams
from triptych.services.transport import wire
from triptych.services.transport.vocabulary import Vocabulary, vocabulary_message
from triptych.v1 import stage_pb2

VOCABULARY = 93
"""The tokens that do the fake executor no harm."""
_EOS = VOCABULARY - 1
_PATTERNS = ["[a-p]{2,30}", "(ab|cd|[e-z]{3}){1,6}", '"[^"]{4,20}"', "[!-~]{0,40}"]


def vocabulary() -> stage_pb2.Vocabulary:
    """A printable character a token, and the end."""
    pieces = [bytes([ord("!") + token]) for token in range(_EOS)]
    return vocabulary_message(Vocabulary((*pieces, b"<eos>"), (_EOS,), (_EOS,)))


def mix(source: Random, requests: int, max_output: int = 24) -> list[Request]:
    """Requests with every field of sampling in use, some with a grammar."""
    texts = [[source.randrange(VOCABULARY) for _ in range(60)] for _ in range(4)]
    world = World(
        texts,
        VOCABULARY,
        stop_ids=[5, 23, 41, 67, _EOS],
        block_size=4,
        prompt_tokens=(2, 30),
        max_output=max_output,
        requests=(requests, requests),
        usual=0.3,
        fields={"logprobs": 0.7, "allowed_token_ids": 0.1},
    )
    return [_perhaps_structured(source, request) for request in random_mix(source, world)]


def _perhaps_structured(source: Random, request: Request) -> Request:
    params = request.params
    if params.beam is not None or source.random() < 0.7:
        return request
    grammar = json.dumps({"grammars": [{"lark_grammar": f"start: /{source.choice(_PATTERNS)}/"}]})
    plain = replace(params, grammar=grammar, bad_words=(), allowed_token_ids=None)
    return replace(request, params=replace(plain, stop_token_ids=(_EOS,)))


@dataclass
class Played:
    """What came of one choice: tokens, logprobs in plain values, and how it ended."""

    tokens: list[int]
    logprobs: list[tuple[object, ...]]
    prompt_logprobs: dict[int, tuple[object, ...]]
    score: float | None
    end: str

    def after(self, cut: int) -> "Played":
        """What comes when so many tokens had come before."""
        return replace(
            self,
            tokens=self.tokens[cut:],
            logprobs=self.logprobs[cut:],
            prompt_logprobs=self.prompt_logprobs if cut == 0 else {},
        )


@dataclass
class Playing:
    """Choices that were submitted, by their number in the mix."""

    tokenizer: FakeTokenizer
    slots: dict[tuple[int, int], int] = field(default_factory=dict)

    def whole(self, requests: Sequence[Request], **fields: object) -> None:
        """As they are when they come."""
        for index, request in enumerate(requests):
            self._submit(index, 0, request, request.params, **fields)

    def resumed(
        self, requests: Sequence[Request], cuts: Callable[[int, int], list[int]], **fields: object
    ) -> None:
        """As they are for the next scheduler. `cuts(request, choice)`: tokens that had come."""
        for index, request in enumerate(requests):
            count = request.params.n
            sent = [cuts(index, choice) for choice in range(count)]
            if request.params.beam is not None or not any(sent):
                self._submit(index, 0, request, request.params, accepted=True, **fields)
                continue
            for choice in range(count):
                params = replace(request.params, n=1)
                if choice or sent[choice]:
                    params = replace(params, prompt_logprobs=NO_LOGPROBS)
                past = {"output_token_ids": wire.pack_u32(sent[choice]), **fields}
                self._submit(index, choice, request, params, accepted=True, **past)

    def _submit(
        self, index: int, choice: int, request: Request, params: SamplingParams, **fields: object
    ) -> None:
        slot = self.tokenizer.submit_with(
            request.prompt_token_ids,
            params,
            choice=request.choice + choice,
            priority=request.priority,
            cache_salt=request.cache_salt,
            tenant=request.tenant,
            **fields,
        )
        for offset in range(params.n):
            self.slots[index, choice + offset] = slot + offset

    @property
    def over(self) -> bool:
        """Whether all have ended."""
        return self.tokenizer.ended(*self.slots.values())

    def played(self) -> dict[tuple[int, int], Played]:
        """What came, by (request, choice)."""
        self.tokenizer.until(lambda: self.over, timeout=60)
        return {key: self._played(slot) for key, slot in self.slots.items()}

    def _played(self, slot: int) -> Played:
        said = self.tokenizer
        rows: dict[int, tuple[object, ...]] = {}
        for part in said.prompt_logprobs.get(slot, []):
            for offset, row in enumerate(part.rows):
                rows[part.position + offset] = _plain(row)
        end = said.finished.get(slot)
        return Played(
            said.tokens[slot],
            [_plain(each) for each in said.logprobs.get(slot, [])],
            rows,
            said.scores.get(slot),
            end.name if end is not None else repr(said.failed[slot]),
        )


def _plain(row: object) -> tuple[object, ...]:
    return tuple(
        value if isinstance(value, int | float) else tuple(value)
        for value in (getattr(row, name) for name in ("logprob", "rank", "top_ids", "top_logprobs"))
    )
