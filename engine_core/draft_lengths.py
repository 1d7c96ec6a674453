"""How many tokens are worth guessing, for each sequence, by what became of its last guesses."""

FIRST_LENGTH = 4
GROWTH = 2
PRICE_PER_SEQUENCE = 0.1
HIGHEST_PRICE = 0.8
"""The time of a drafted token, in that of a token that is computed anyway: next to nothing while
few sequences run, since a step reads all weights; most of it where they fill it (measured with the
native plan, logits and draws included: 0.1 for 1 sequence, 0.3 for 4, 0.7 to 0.9 for 8 to 32)."""
DEAR = 0.5
"""From this price on the first guess of a sequence is a probe, and pauses are longer."""
MOST_LOST = 2.0
MOST_SAVED = 1.0
"""Bounds of a sequence's balance, in tokens."""
FIRST_PAUSE = 8
FIRST_PAUSE_WHERE_DEAR = 16
LONGEST_PAUSE = 64
REMEMBERED = 0.98
"""Of the balance of all, at each further guess: that of some 50 counts."""


class _Length:
    """`tokens`: the next guess's bound, >= 1. `balance`: tokens that guesses have brought, less
    their price. `pause`: how many steps the last pause took; `resting`: those left of it."""

    __slots__ = ("balance", "pause", "resting", "tokens")

    def __init__(self, tokens: int, balance: float) -> None:
        self.tokens = tokens
        self.balance = balance
        self.pause = 0
        self.resting = 0


class DraftLengths:
    """The guesses' lengths: within `most_per_sequence`, and `most_per_step` for all together.

    A guess that is taken whole makes the next one longer by GROWTH; one that is taken in part makes
    it one longer than that part; of which nothing is taken, half as long (the rule of transformers'
    assisted generation).

    Whether to guess at all is a matter of account: a token that was taken brings 1, every drafted
    one costs a price that grows with the number of sequences. Of what is brought, MOST_SAVED is
    remembered (as in Page's CUSUM test, 1954). A sequence that has lost MOST_LOST rests for
    FIRST_PAUSE steps (more where many run) and is then probed with one token: if it is not taken,
    the next pause is twice as long, up to LONGEST_PAUSE. So guesses that are right too rarely to
    pay end, too. Where many run a new sequence begins with a probe, and rests before if the last
    guesses of all together have lost as much.

    Each sequence has at most an equal share of the step, rounded up, since a token guessed for one
    is time for all. Counts steps, not time. `guess_price`: what it takes to guess a token, in
    tokens.
    """

    def __init__(
        self, most_per_sequence: int, most_per_step: int, guess_price: float = 0.0
    ) -> None:
        self._most_per_sequence = most_per_sequence
        self._most_per_step = most_per_step
        self._guess_price = guess_price
        self._left = most_per_step
        self._lengths: dict[int, _Length] = {}
        self._balance_of_all = 0.0

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def price(self) -> float:
        """Of one drafted token, guessed and computed, in tokens."""
        computing = min(PRICE_PER_SEQUENCE * len(self._lengths), HIGHEST_PRICE)
        return computing + self._guess_price

    def open(self, sequence_id: int) -> None:
        """Nothing is known of a sequence yet."""
        self._lengths[sequence_id] = length = _Length(FIRST_LENGTH, 0.0)
        if self.price >= DEAR:
            length.tokens, length.balance = 1, -MOST_LOST
            if self._balance_of_all < -MOST_LOST:
                self._rest(length)
        length.tokens = min(length.tokens, self._most_per_sequence)

    def close(self, sequence_id: int) -> None:
        """Forget a sequence; nothing if it is not open."""
        self._lengths.pop(sequence_id, None)

    def begin_step(self) -> None:
        """What is proposed from now on is of another step."""
        self._left = self._most_per_step

    def most(self, sequence_id: int) -> int:
        """How many tokens to guess in this step; 0: none. To be asked once a step and sequence."""
        length = self._lengths.get(sequence_id)
        if length is None:
            return 0
        if length.resting:
            length.resting -= 1
            return 0
        share = -(-self._most_per_step // len(self._lengths))
        return min(length.tokens, share, self._left)

    def proposed(self, tokens: int) -> None:
        """So many were guessed after `most`."""
        self._left -= tokens

    def verified(self, sequence_id: int, drafted: int, accepted: int) -> None:
        """Of the last guess `drafted` tokens were computed, the first `accepted` taken."""
        length = self._lengths.get(sequence_id)
        if length is None or drafted == 0:
            return
        if accepted == drafted:
            length.tokens = max(length.tokens, min(drafted + GROWTH, self._most_per_sequence))
        elif accepted:
            length.tokens = accepted + 1
        else:
            length.tokens = max(length.tokens // 2, 1)
        gain = accepted - self.price * drafted
        self._balance_of_all = self._balance_of_all * REMEMBERED + gain
        length.balance = min(length.balance + gain, MOST_SAVED)
        if length.balance > 0:
            length.pause = 0
        elif length.balance < -MOST_LOST:
            self._rest(length)

    def _rest(self, length: _Length) -> None:
        length.tokens, length.balance = 1, -MOST_LOST  # a probe, and it decides
        least = FIRST_PAUSE if self.price < DEAR else FIRST_PAUSE_WHERE_DEAR
        length.pause = min(max(length.pause * 2, least), LONGEST_PAUSE)
        length.resting = length.pause
