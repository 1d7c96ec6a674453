"""Who of the waiting sequences begins to run, into what the running ones leave of a step."""

from triptych.engine_core.admission import Limits
from triptych.engine_core.batch import Batch
from triptych.engine_core.choices import Choices
from triptych.engine_core.roster import Roster
from triptych.engine_core.sequence import Sequence
from triptych.engine_core.suspects import Suspects, Trials

_MOST_DEFERRED = 32
"""Waiting sequences that one plan passes over: it looks each of them up."""


class Entrance:
    """Between waiting and running."""

    def __init__(
        self,
        limits: Limits,
        batch: Batch,
        roster: Roster,
        choices: Choices,
        suspects: Suspects,
        trials: Trials,
    ) -> None:
        self._limits = limits
        self._batch = batch
        self._roster = roster
        self._choices = choices
        self._suspects = suspects
        self._trials = trials
        self._shut: tuple[list[Sequence], int] | None = None

    @property
    def is_open(self) -> bool:
        """Whether somebody who waits might enter. Not so while those wait in front who found no
        blocks the last time, and no more blocks are free than there were then; but forks need
        none."""
        roster = self._roster
        if not roster.waiting or roster.full:
            return False
        if self._shut is None or self._choices.any_led:
            return True
        front, num_free = self._shut
        return roster.waiting[: len(front)] != front or self._batch.num_free_blocks > num_free

    def admit(self) -> None:
        """Rows for waiting sequences, in order, while tokens, places and blocks last.

        A sequence gets the blocks of all its tokens at once, though it may take several steps to
        compute them: half a prompt that waits for blocks would hold some and help nobody. The first
        that does not fit stops those behind it, or a long prompt could wait for ever. One whose
        text is just being computed for another is passed over: soon it will be there.

        So is a suspect while another one is on trial. Its place and blocks are kept for it: it ran
        before those behind it did.
        """
        roster, trials, index, deferred = self._roster, self._trials, 0, 0
        kept_places = kept_blocks = 0
        budget = self._limits.max_num_batched_tokens - self._batch.num_tokens
        self._shut = None
        suspicion = bool(self._suspects)
        if suspicion:
            trials.open()
        while index < len(roster.waiting) and budget > 0 and deferred < _MOST_DEFERRED:
            if len(roster.running) + kept_places >= self._limits.max_num_seqs:
                return
            sequence = roster.waiting[index]
            if self._choices.is_led(sequence):  # as many as there are: this costs nothing
                index += 1
                continue
            if suspicion and trials.bars(sequence):
                index += 1
                if not trials.alone:
                    kept_places += 1
                    kept_blocks += -(-len(sequence.tokens) // self._batch.block_size)
                continue
            if self._defers(sequence):
                index, deferred = index + 1, deferred + 1
                continue
            if not self._start(sequence, kept_blocks):
                if not deferred:  # they may enter as soon as what they wait for is computed
                    self._shut = (roster.waiting[: index + 1], self._batch.num_free_blocks)
                return
            if suspicion:
                trials.start(sequence)
            budget -= self._batch.schedule(sequence.sequence_id, budget)

    def _defers(self, sequence: Sequence) -> bool:
        """Whether running sequences are about to compute half of its work or more."""
        if not self._limits.prefix_caching:
            return False
        if sequence.digests is None:
            salt = sequence.request.cache_salt.encode()
            sequence.digests = self._batch.prefix_digests(sequence.tokens, salt)
        if sequence.scores_prompt:
            return False  # every token is computed, whatever others have
        computed, pending = self._batch.match(sequence.tokens, sequence.digests)
        return pending > 0 and 2 * pending >= len(sequence.tokens) - computed

    def _start(self, sequence: Sequence, kept_blocks: int) -> bool:
        spare = self._limits.watermark_blocks if self._roster.running else 0
        cached = self._roster.start(sequence, spare + kept_blocks)
        if cached < 0:
            return False
        self._choices.started(sequence, cached)
        return True
