"""A running sequence: its tokens, its blocks, and how far it is computed."""

from array import array
from collections.abc import Sequence

from triptych.engine_core.batch import (
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_STOP,
    UNKNOWN_DRAFT,
    SequenceRules,
)
from triptych.engine_core.ids import BlockId, SequenceId
from triptych.engine_core.prefix_cache import CachedBlock, chain_digests, whole_block


class RunningSequence:
    """0 <= num_computed <= tokens; `table` covers what is computed.

    `digests`: the root and those of all whole blocks of the tokens, computed or not; kept while it
    is `cached`. `closed`: in flight, nobody wants it any more.
    """

    __slots__ = (
        "cached", "closed", "digests", "num_computed", "rules", "sequence_id", "table", "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        sequence_id: SequenceId,
        token_ids: Sequence[int],
        rules: SequenceRules,
        table: list[BlockId],
        num_computed: int,
        digests: list[bytes],
    ) -> None:
        self.sequence_id = sequence_id
        self.token_ids = array("i", token_ids)
        self.rules = rules
        self.table = table
        self.num_computed = num_computed
        self.digests = digests
        self.cached = bool(digests)
        self.closed = False

    @property
    def num_tokens(self) -> int:
        """Tokens, computed or not."""
        return len(self.token_ids)

    @property
    def num_lacking(self) -> int:
        """Tokens that are to be computed."""
        return len(self.token_ids) - self.num_computed

    @property
    def most_tokens(self) -> int:
        """Tokens at which it ends."""
        return min(self.rules.max_len, self.rules.num_prompt + self.rules.max_tokens)

    def finish(self, token_id: int, num_tokens: int) -> int:
        """FINISH_STOP or FINISH_LENGTH if that token, as the last of so many, ends the sequence,
        else FINISH_NONE. A stop token at the last place is a stop: the text is complete."""
        if token_id in self.rules.stop_token_ids:
            return FINISH_STOP
        return FINISH_LENGTH if num_tokens >= self.most_tokens else FINISH_NONE

    def num_scored(self, num_tokens: int, passed: int = 0) -> int:
        """Prompt tokens whose logits are wanted among the next `num_tokens`, behind `passed` that a
        step in flight computes; the last prompt token's are those of the first output token."""
        if not self.rules.score_prompt:
            return 0
        return max(0, min(num_tokens, self.rules.num_prompt - 1 - self.num_computed - passed))

    def num_logits(self, num_tokens: int, passed: int = 0) -> int:
        """Rows of logits that the next `num_tokens` tokens need, behind `passed`."""
        samples = num_tokens == self.num_lacking - passed
        return self.num_scored(num_tokens, passed) + samples

    def fitting(self, num_tokens: int, num_logits: int, passed: int = 0) -> int:
        """Tokens of the next `num_tokens`, behind `passed`, that need no more than `num_logits`
        rows of logits."""
        num_scored = self.num_scored(num_tokens, passed)
        if num_scored > num_logits:
            return num_logits
        if self.num_logits(num_tokens, passed) > num_logits:
            return num_tokens - 1
        return num_tokens

    def whole_blocks(self, block_size: int) -> list[CachedBlock]:
        """Its whole blocks' texts, if it is cached."""
        return [
            whole_block(self.token_ids, self.digests, index, block_size)
            for index in range(len(self.digests) - 1)
        ]

    def check_guesses(self, guesses: "array[int]") -> None:
        """AssertionError unless it may have drafts, and these are some."""
        name = f"draft: sequence {self.sequence_id}"
        assert not self.rules.held, f"{name} is held"
        assert self.num_tokens > self.rules.num_prompt, f"{name} has no output token"
        assert min(guesses, default=0) >= UNKNOWN_DRAFT, f"{name} has a guess below -1"
        known = guesses.index(UNKNOWN_DRAFT) if UNKNOWN_DRAFT in guesses else len(guesses)
        assert max(guesses[known:], default=UNKNOWN_DRAFT) == UNKNOWN_DRAFT, (
            f"{name} has a known guess behind an unknown one"
        )

    def check(self, block_size: int) -> None:
        """Assert what must hold of one sequence between any two calls."""
        name, num_tokens = f"sequence {self.sequence_id}", self.num_tokens
        assert 0 <= self.num_computed <= num_tokens, f"{name}: {self.num_computed} of {num_tokens}"
        assert self.rules.held or self.closed or self.num_lacking, f"{name} lacks no token"
        assert self.num_computed <= len(self.table) * block_size, f"{name} has too few blocks"
        if self.cached:
            expected = self.digests[:1] + chain_digests(self.digests[0], self.token_ids, block_size)
            assert self.digests == expected, f"{name} has digests of other tokens"
