"""Guesses against a search of the whole text by the rule, and what drafters leave behind."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from triptych.engine_core.draft_lengths import DraftLengths
from triptych.engine_core.drafting import AdaptiveDrafter
from triptych.engine_core.ngram_drafter import NgramDrafter
from triptych.engine_core.output_store import (
    LEAST_SHARE,
    LONGEST_MATCH,
    MOST_OCCURRENCES,
    OutputStore,
)
from triptych.engine_core.suffix_drafter import SuffixDrafter

tokens = st.integers(0, 3)
texts = st.lists(tokens, max_size=60)
sizes = st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted)


def ends(text: list[int], gram: list[int]) -> list[int]:
    """Where an n-gram ends, with a token behind it."""
    size = len(gram)
    return [end for end in range(size, len(text)) if text[end - size : end] == gram]


def looked_up(text: list[int], shortest: int, longest: int, most: int) -> list[int]:
    """The rule of prompt lookup, word for word: repetition goes on."""
    for size in range(min(longest, len(text)), shortest - 1, -1):
        found = ends(text, text[-size:])
        if found:
            whole = list(text)
            while len(whole) < len(text) + most:
                whole.append(whole[found[-1] + len(whole) - len(text)])
            return whole[len(text) :]
    return []


@given(texts, texts, sizes, st.integers(1, 12), st.integers(1, 20))
def test_prompt_lookup_is_a_search_of_the_text_at_every_step(
    prompt: list[int], output: list[int], range_of: list[int], most: int, every: int
) -> None:
    shortest, longest = range_of
    drafter = NgramDrafter(shortest, longest)
    drafter.open(1, prompt, output[:1], "")
    for count in range(1, len(output) + 1):
        if count % every == 0:  # what is not asked for is indexed later, all at once
            text = prompt + output[:count]
            assert list(drafter.guess(1, most)) == looked_up(text, shortest, longest, most)
        drafter.append([2, 1], [0, output[count] if count < len(output) else 0])


@given(texts, texts, st.integers(1, 7), st.integers(1, 8))
def test_while_a_text_is_being_indexed_guesses_still_occurred(
    prompt: list[int], output: list[int], per_step: int, most: int
) -> None:
    drafter = NgramDrafter(2, 4, indexed_per_step=per_step)
    drafter.open(1, prompt, [], "")
    text = list(prompt)
    for token in output:
        drafter.append([1], [token])
        text.append(token)
        before = drafter.num_indexed
        found = list(drafter.guess(1, most))
        assert drafter.num_indexed - before <= per_step
        if found:
            whole = text + found
            assert any(whole[end : end + most] == found for end in ends(text, text[-2:])), (
                "what followed the last two tokens somewhere"
            )
            assert len(found) == most


@given(st.lists(st.lists(tokens, max_size=20), max_size=12), texts, st.integers(1, 3))
def test_the_store_finds_the_longest_match_and_what_follows_it_most_often(
    outputs: list[list[int]], text: list[int], gram: int
) -> None:
    store = OutputStore(gram, 10_000)
    for output in outputs:
        store.add("", output)
    store.work(10_000)
    kept = [output for output in outputs if len(output) > gram]
    places = [(i, end) for i, output in enumerate(kept) for end in ends(output, text[-gram:])]
    places = places[-MOST_OCCURRENCES:] if len(text) >= gram else []
    match = store.find("", text)
    if not places:
        assert match is None
        return
    assert match is not None

    def agrees(place: tuple[int, int], length: int) -> bool:
        output, end = place
        return end >= length and kept[output][end - length : end] == text[-length:]

    length = max(
        size
        for size in range(gram, min(LONGEST_MATCH, len(text)) + 1)
        if any(agrees(place, size) for place in places)
    )
    best = [place for place in reversed(places) if agrees(place, length)]
    assert match.length == length
    assert [(list(ids), end) for ids, end in map(store.text, match.places)] == [
        (kept[output], end) for output, end in best
    ]
    found = store.continuation(match, 6)
    for count in range(1, len(found) + 1):
        nexts = [kept[output][end : end + count] for output, end in best]
        say_so = nexts.count(found[:count])
        assert say_so >= LEAST_SHARE * len(best)
        rivals = [each for each in nexts if each[: count - 1] == found[: count - 1]]
        assert say_so == max(rivals.count(each) for each in rivals if len(each) == count), (
            "no other token follows as often"
        )


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.lists(tokens, max_size=30)),
        max_size=20,
    ),
    st.integers(1, 40),
    texts,
)
def test_salts_never_meet_and_the_store_keeps_its_bound(
    said: list[tuple[str, int, list[int]]], most_tokens: int, text: list[int]
) -> None:
    """Each salt speaks with numbers of its own, so that a guess shows where it is from."""
    store = OutputStore(2, most_tokens)
    for salt, work, output in said:
        store.add(salt, [token + 10 * (salt == "b") for token in output])
        store.work(work * 10)
        assert store.num_waiting <= most_tokens
        assert store.num_tokens <= most_tokens
        assert store.num_grams <= most_tokens
        for asked in ("a", "b"):
            match = store.find(asked, [token + 10 * (asked == "b") for token in text])
            found = store.continuation(match, 5) if match is not None else []
            assert all((token >= 10) == (asked == "b") for token in found)
            assert store.find("c", text) is None


@dataclass
class _Open:
    salt: str
    prompt: list[int]
    output: list[int] = field(default_factory=list)


class DrafterMachine(RuleBasedStateMachine):
    """Requests of two salts come, go on, are preempted, resume and end, in any order."""

    sequences = Bundle("sequences")
    MOST, STEP, STORED = 6, 10, 100

    def __init__(self) -> None:
        super().__init__()
        self.suffix = SuffixDrafter(2, 3, stored_tokens=self.STORED)
        self.ngram = NgramDrafter(2, 3)
        self.drafters = [
            AdaptiveDrafter(guesser, DraftLengths(self.MOST, self.STEP))
            for guesser in (self.suffix, self.ngram)
        ]
        self.open: dict[int, _Open] = {}
        self.next_id = 0
        self.left = [self.STEP, self.STEP]

    @rule(target=sequences, salt=st.sampled_from("ab"), prompt=st.lists(tokens, max_size=10))
    def begin(self, salt: str, prompt: list[int]) -> int:
        """The prompt's and output's tokens tell of which salt they are."""
        self.next_id += 1
        own = [token + 10 * (salt == "b") for token in prompt]
        self.open[self.next_id] = _Open(salt, own)
        for drafter in self.drafters:
            drafter.open(self.next_id, own, [], salt)
        return self.next_id

    @rule(drawn=st.lists(tokens, min_size=1, max_size=4))
    def step(self, drawn: list[int]) -> None:
        ids, news = [], []
        for at, (sequence, open_) in enumerate(self.open.items()):
            for token in drawn[at % len(drawn) :]:
                ids.append(sequence)
                news.append(token + 10 * (open_.salt == "b"))
                open_.output.append(news[-1])
        for drafter in self.drafters:
            drafter.append([*ids, 10_000], [*news, 1])
        self.left = [self.STEP, self.STEP]

    @rule(sequence=sequences, accepted=st.integers(0, 6))
    def propose(self, sequence: int, accepted: int) -> None:
        for at, drafter in enumerate(self.drafters):
            proposal = drafter.propose(sequence)
            assert len(proposal) <= min(self.MOST, self.left[at])
            self.left[at] -= len(proposal)
            if proposal:
                salt = self.open[sequence].salt
                assert all((token >= 10) == (salt == "b") for token in proposal)
            drafter.verified(sequence, len(proposal), min(accepted, len(proposal)))

    @rule(sequence=sequences)
    def preempt_and_resume(self, sequence: int) -> None:
        open_ = self.open[sequence]
        for drafter in self.drafters:
            drafter.close(sequence)
            drafter.open(sequence, open_.prompt, open_.output, open_.salt)

    @rule(sequence=consumes(sequences))
    def end(self, sequence: int) -> None:
        del self.open[sequence]
        for drafter in self.drafters:
            drafter.close(sequence)
            assert list(drafter.propose(sequence)) == []

    @invariant()
    def sizes_are_those_of_what_is_open(self) -> None:
        assert len(self.suffix) == len(self.ngram) == len(self.open)
        text = sum(len(each.prompt) + len(each.output) for each in self.open.values())
        assert max(self.suffix.num_indexed, self.ngram.num_indexed) <= text
        assert self.suffix.store.num_tokens <= self.STORED
        assert self.suffix.store.num_waiting <= self.STORED

    def teardown(self) -> None:
        for sequence in list(self.open):
            for drafter in self.drafters:
                drafter.close(sequence)
        assert (len(self.suffix), len(self.ngram)) == (0, 0)
        assert (self.suffix.num_indexed, self.ngram.num_indexed) == (0, 0)


TestDrafterMachine = DrafterMachine.TestCase
