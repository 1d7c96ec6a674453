"""The running sequences: their tokens, blocks and progress, and what the next step computes.

The hot half of the scheduler: everything that is done for each sequence in each step is here, so
that it can be C++ (`kernels.core.Batch`); `python_batch.PythonBatch` means the same, plainly. The
other half (scheduler.py) decides who runs, and is only called for what changes.

    open / fork / close          a sequence begins or ceases to run
    plan, schedule               rows of the next step: running ones, then new ones
      rows, samples, scores        what is in it
      write                        its inputs, for the executor
    plan_ahead                   while that is in flight: rows of the step behind it
      samples_ahead, scores_ahead, write
    then one of
      apply(tokens) -> Outcome     computed
      abandon()                    not computed: nothing has progressed

Blocks are shared: by prefix (a full block of the same tokens after the same tokens, under the same
salt, is computed once) and by fork. Nobody writes to a block that another holds: it is copied first
(`copies` of the step; docs/architecture.md). Whole blocks that the device has no room for are kept
in host memory where there is some, and found there (`stores`, `loads`; transfers.py).
"""

from array import array
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from triptych.engine_core.ids import SequenceId
from triptych.engine_core.step import ScheduledSequence

NOT_FINITE = -1
"""As a drawn token: the row's logits are NaN or infinite, no token was drawn."""

FINISH_NONE = 0
FINISH_STOP = 1
FINISH_LENGTH = 2
UNKNOWN_DRAFT = -1
"""As a drafted token: the executor's draft model is to guess it, and says so when it is done."""

FINISH_NOT_FINITE = 255
"""In Outcome.finishes: the sequence ends with an error, its token is none."""


class SequenceRules(NamedTuple):
    """What a batch must know of a sequence beside its tokens.

    `request_id`: repeated in outcomes. It ends with one of `stop_token_ids`, at `max_tokens` output
    tokens (those beyond `num_prompt`) or at `max_len` tokens in all. `held`: drawn tokens are not
    taken; the sequence waits for `append` (beam search). `score_prompt`: every prompt token's
    logits are wanted (those of tokens 0 to num_prompt - 2; the last one's are a sample's); such a
    sequence takes no prefix hits. `cached`: its blocks may be found by
    others, and it may find theirs.
    """

    request_id: int
    num_prompt: int
    max_tokens: int
    max_len: int
    stop_token_ids: tuple[int, ...] = ()
    held: bool = False
    score_prompt: bool = False
    cached: bool = True


class Match(NamedTuple):
    """What of a prompt is in the cache. `computed`: tokens that `open` would find computed (whole
    blocks, and part of one more by copy), at most all but the last. `pending`: further tokens, in
    whole blocks, that running sequences are about to compute."""

    computed: int
    pending: int


class Score(NamedTuple):
    """Logits rows [logits_row, logits_row + num_positions) of the step in flight are those of the
    tokens at [position, position + num_positions) of the sequence: they predict the tokens one
    further."""

    sequence_id: SequenceId
    logits_row: int
    position: int
    num_positions: int


class Extent(NamedTuple):
    """Of a step ahead; all 0 where there is none."""

    num_rows: int
    num_tokens: int
    num_logits: int


class Outcome(NamedTuple):
    """What a step meant, in columns: an entry for each sample whose token was taken or is nobody's,
    in the order of `samples()`. Without drafts these are all samples.

    `samples` int32: the index of the sample. `request_ids` int64: -1 for a sample that is nobody's
    (closed in flight, or held). `token_ids` int32; `finishes` uint8: FINISH_*. A sequence with a
    finish is closed by then, its blocks given back; `finished` names those, in sample order, and
    `finished_tokens` says how many tokens each had, prompt included. Of a sequence with drafts the
    entries are those of its samples from the first on, up to the first whose token is not the
    draft, or ends the sequence, or is NOT_FINITE; one entry if it is nobody's.
    """

    samples: "array[int]"
    request_ids: "array[int]"
    token_ids: "array[int]"
    finishes: "array[int]"
    finished: list[SequenceId]
    finished_tokens: list[int]


class Batch(Protocol):
    """One step in flight at a time: from the first `plan` that finds rows until apply or abandon.
    While it is, one more may be planned ahead; all else is about the older one, until it is over.

    A sequence stands in the order of the policy: the caller says at which place it is put in.
    AssertionError for calls out of turn; KeyError for a sequence that is not open.
    """

    # ------------------------------------------------------------------ sequences

    def prefix_digests(self, token_ids: Sequence[int], salt: bytes) -> bytes:
        """The root of a text and the digests of its whole blocks, 16 bytes each, in order.

        Chained BLAKE2b-128 (RFC 7693): the root is of the salt, each further one of the digest
        before it and the block's tokens as u32 little-endian. Empty without prefix caching.
        """
        ...

    def match(self, token_ids: Sequence[int], digests: bytes) -> Match:
        """Look a text up; nothing changes. ValueError if the digests are not of its length."""
        ...

    def open(
        self,
        sequence_id: SequenceId,
        token_ids: Sequence[int],
        digests: bytes,
        rules: SequenceRules,
        place: int,
        spare_blocks: int,
    ) -> int:
        """Begin to run as `place`-th sequence, with blocks for all its tokens.

        Cached blocks are taken as they are; one that is cached in part is copied at the next step.
        Returns how many tokens are computed already; -1, and nothing taken, where fewer than
        `spare_blocks` blocks would be left free.
        """
        ...

    def fork(
        self, sequence_id: SequenceId, new_id: SequenceId, rules: SequenceRules, place: int
    ) -> None:
        """Begin to run with the tokens and blocks of another, which goes on.

        While a step is planned in which the other one samples: it samples too, from the same
        logits, and will be as far as the other one when the step is done. Its sample stands behind
        those of the rows.
        """
        ...

    def append(self, sequence_id: SequenceId, token_id: int) -> None:
        """The next token of a held sequence, between steps."""
        ...

    def close(self, sequence_id: SequenceId) -> None:
        """Cease to run. What is computed stays in the cache until its blocks are needed.

        In flight: its samples are nobody's from now on, and its blocks are given back when the
        last step that has it is over, because the executor may still write to them.
        """
        ...

    def draft(self, sequence_id: SequenceId, token_ids: Sequence[int]) -> None:
        """Guesses of the tokens that follow a sequence's own, for the next `plan` alone.

        The last call counts. A guess may be UNKNOWN_DRAFT, then all behind it are too. Held
        sequences and those without an output token have none (AssertionError).
        """
        ...

    # ------------------------------------------------------------------ a step

    def plan(self, budget: int, most_per_sequence: int, logits_budget: int) -> bool:
        """Rows for the running sequences, in order; at least one token for each that lacks any.

        Each gets 1 token; what is left of `budget` tokens goes to the first in order that lack
        more, none above `most_per_sequence` tokens. `logits_budget` bounds the logits rows: 1 kept
        for each running sequence, what is left goes to those that score their prompt.
        False, with no rows planned, if blocks lack: close somebody (the last in order) and ask
        again. May be called again while nothing is written: it plans anew, with the same drafts.

        Then, when all have theirs, drafts: a row that samples is followed by as many of its
        sequence's guesses, first ones first and sequences in order, as tokens and logits rows are
        left for, as the sequence may still get output tokens beside the one drawn without them
        (max_tokens, max_len), and as blocks can be had: all that fit, never at the cost of a
        sequence. Each drafted token is one more token and one more logits row.
        """
        ...

    def plan_ahead(
        self,
        host_drawn: Collection[int],
        budget: int,
        most_per_sequence: int,
        logits_budget: int,
    ) -> Extent:
        """While a written step is in flight, rows of the one behind it: what each running sequence
        would get then, the token that it samples now being known to the executor alone.

        None for those that sample now and are in `host_drawn`, have drafts now, or end with their
        token whatever it is (max_tokens, max_len), nor for held ones, nor drafts. No step, and
        nothing changed, where nobody gets a row or blocks lack. To be written before the older one
        is over. If that one is abandoned, all its sequences are to be closed before anything is
        done with the step ahead but to abandon it (AssertionError).
        """
        ...

    def rows_ahead(self) -> list[ScheduledSequence]:
        """The rows of the step ahead: for tests and logs."""
        ...

    def samples_ahead(self) -> tuple["array[int]", "array[int]", "array[int]"]:
        """Of the step ahead: sequence ids (int64), logits rows (int32), and for each the index
        (int32) in `samples()` of what draws the last token of its text; -1 where that is known."""
        ...

    def scores_ahead(self) -> list[Score]:
        """Of the step ahead: the logits rows that are for prompt logprobs."""
        ...

    def schedule(self, sequence_id: SequenceId, most: int) -> int:
        """A row for a sequence opened after `plan`: at most `most` tokens, and within
        `most_per_sequence` and the logits budget. Returns how many it got."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens of the planned step."""
        ...

    @property
    def num_rows(self) -> int:
        """Rows of the planned step."""
        ...

    @property
    def num_logits(self) -> int:
        """Logits rows of the planned step: one for each of `samples()` but forks, which share one,
        and those of `scores()`."""
        ...

    def rows(self) -> list[ScheduledSequence]:
        """The planned step's rows, drafted tokens included: for tests and logs."""
        ...

    def copies(self) -> list[tuple[int, int]]:
        """Blocks (from, to) to be copied before the planned step computes: for tests and logs."""
        ...

    def stores(self) -> list[tuple[int, int]]:
        """Blocks (of the device, of host memory) to be stored by the next step that is written,
        before its loads: for tests and logs."""
        ...

    def loads(self) -> list[tuple[int, int]]:
        """Blocks (of host memory, of the device) to be loaded by it, before its copies."""
        ...

    def samples(self) -> tuple["array[int]", "array[int]"]:
        """Sequence ids (int64) and logits rows (int32) of the tokens to be drawn.

        A sequence with d drafts has d + 1 samples, one behind the other: its next token, and what
        follows if that is the first draft, and so on.
        """
        ...

    def drafts(self) -> "array[int]":
        """For each of `samples()` the drafted token behind it (int32): the next sample counts only
        if that is what is drawn here. UNKNOWN_DRAFT - 1, which is no token, behind the last."""
        ...

    def fill_drafts(self, token_ids: Sequence[int]) -> None:
        """The unknown drafts of the step in flight, in the order of `samples()`.

        Raises ValueError, with nothing filled, unless these are as many token ids >= 0.
        """
        ...

    def scores(self) -> list[Score]:
        """The logits rows that are for prompt logprobs."""
        ...

    def write(self, slot: memoryview, step_id: int) -> None:
        """Fill a step slot in the layout of layout.StepLayout; the step is in flight. The one ahead
        where there is one; unknown tokens are layout.PREVIOUS_SAMPLE - i.

        Entries beyond the step's extents keep what they had. Raises ValueError, with nothing
        written, when it exceeds the layout.
        """
        ...

    def apply(self, token_ids: Sequence[int], complete: Sequence[int] = ()) -> Outcome:
        """The step was computed: progress, newly full blocks into the cache, tokens appended.

        `token_ids`: one for each of `samples()`, NOT_FINITE where none was drawn, or none counts
        because an earlier token of the sequence was not its draft. A drafted token is taken only
        where it is what was drawn; of the others nothing stays, and blocks that only they needed
        are given back. `complete`, ascending: samples whose token, when it is taken,
        ends the sequence (FINISH_STOP), whatever it is. Unknown drafts must be filled. Of two steps
        it is the older one; a sequence that ends and has a row in the one ahead keeps its blocks
        until that is over.
        """
        ...

    def abandon(self) -> None:
        """The planned step was not computed."""
        ...

    def forget_cache(self) -> None:
        """No block is found by prefix any more; what runs goes on."""
        ...

    # ------------------------------------------------------------------ facts

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds, cached ones included."""
        ...

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found by prefix, held or free."""
        ...

    @property
    def num_host_blocks(self) -> int:
        """Blocks of host memory."""
        ...

    @property
    def num_host_blocks_used(self) -> int:
        """Those whose text can be found."""
        ...

    @property
    def num_unused_slots(self) -> int:
        """Token slots of held blocks that no token has: what is wasted. O(sequences)."""
        ...

    @property
    def prefix_queries_total(self) -> int:
        """Tokens that were looked up at `open`."""
        ...

    @property
    def prefix_hits_total(self) -> int:
        """Tokens among them that were found computed."""
        ...

    @property
    def host_hits_total(self) -> int:
        """Tokens among those that were found in host memory."""
        ...

    def sequence_ids(self) -> list[int]:
        """The open sequences, in order."""
        ...

    def token_ids(self, sequence_id: SequenceId) -> list[int]:
        """The tokens of an open sequence."""
        ...

    def num_computed(self, sequence_id: SequenceId) -> int:
        """How many of them are computed."""
        ...

    def table(self, sequence_id: SequenceId) -> list[int]:
        """Its blocks in token order."""
        ...

    def check(self) -> None:
        """Assert every invariant of pool, tables and cache; each names itself. O(everything)."""
        ...
