"""Structured output of requests: their grammars, and the vocabulary that the scheduler compiles
them for."""

import asyncio

from triptych.engine_core.errors import InvalidRequest, NotSupported
from triptych.services.tokenizer.grammar_checker import GrammarChecker
from triptych.services.tokenizer.tokenizer import Tokenizer
from triptych.services.transport.vocabulary import Vocabulary, vocabulary_message
from triptych.v1 import common_pb2, stage_pb2

_FIELD = "sampling_params.structured_output"


class StructuredOutputs:
    """What the process knows of grammars. Runs on the event loop."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        checker: GrammarChecker,
        matched: frozenset[int] = frozenset(),
    ) -> None:
        """`matched`: special tokens whose text grammars may match."""
        self._tokenizer = tokenizer
        self._matched = matched
        self._checker = checker
        self._vocabulary: stage_pb2.Vocabulary | None = None

    async def grammar(self, raw: common_pb2.SamplingParams) -> str:
        """The grammar that a request asks for, "" for none.

        Raises InvalidRequest, NotSupported, and NoRoom when too many are being checked.
        """
        if not raw.HasField("structured_output"):
            return ""
        if raw.HasField("beam"):
            raise InvalidRequest(_FIELD, "beside beam: hypotheses are not masked by it")
        if raw.HasField("external_sampler"):
            raise InvalidRequest(_FIELD, "beside external_sampler: its draws are not masked by it")
        return await self.grammar_of(raw.structured_output)

    async def grammar_of(self, form: common_pb2.StructuredOutput) -> str:
        """The grammar of a form. Raises what `grammar` raises."""
        if self._tokenizer.piece_table is None:
            raise NotSupported(
                f"{_FIELD}: the tokenizer of this model has no text of single tokens to match"
            )
        grammar = await self._checker.grammar(form)
        if self._vocabulary is None:
            # Hundreds of thousands of tokens: the loop has other things to do meanwhile.
            await asyncio.to_thread(self.vocabulary)
        return grammar

    def vocabulary(self) -> stage_pb2.Vocabulary:
        """The bytes of every token, made once. Raises InvalidRequest when they are too many."""
        if self._vocabulary is None:
            self._vocabulary = vocabulary_message(vocabulary_of(self._tokenizer, self._matched))
        return self._vocabulary

    def close(self) -> None:
        """End the process that checks."""
        self._checker.close()


def vocabulary_of(tokenizer: Tokenizer, matched: frozenset[int] = frozenset()) -> Vocabulary:
    """Of a tokenizer that has a piece table. `matched`: special tokens that are text here."""
    ends = sorted(tokenizer.eos_token_ids)
    special = tokenizer.special_token_ids - matched
    return Vocabulary(
        tokens=tuple(map(tokenizer.token_bytes, range(tokenizer.vocabulary_size))),
        special_token_ids=tuple(sorted({*special, *ends})),
        eos_token_ids=tuple(ends),
    )
