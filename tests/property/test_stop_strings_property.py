from hypothesis import given
from hypothesis import strategies as st

from triptych.services.tokenizer.stop_strings import StopStrings

letters = st.text(alphabet="ab世", max_size=30)
stop_lists = st.lists(st.text(alphabet="ab世", min_size=1, max_size=4), max_size=4)
pieces_of_text = st.lists(st.tuples(letters, st.booleans()), max_size=12)


def expected(
    pieces: list[tuple[str, bool]], stops: list[str], include: bool
) -> tuple[str, str | None]:
    """The rule, word for word, on the whole text: first character that completes a stop."""
    text = "".join(piece for piece, _ in pieces)
    armed = [flag for piece, flag in pieces for _ in piece]
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if armed[end - 1] and text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(pieces_of_text, stop_lists, st.booleans())
def test_streamed_text_is_the_whole_text_cut_by_the_rule(
    pieces: list[tuple[str, bool]], stops: list[str], include: bool
) -> None:
    strings = StopStrings(stops, include_in_output=include)
    released = [strings.push(piece, armed=armed) for piece, armed in pieces]
    text = "".join(each.text for each in released) + strings.finish()
    stop = next((each.stop for each in released if each.stop), None)
    assert (text, stop) == expected(pieces, stops, include)


@given(letters, st.text(alphabet="ab世", min_size=1, max_size=4))
def test_one_stop_cuts_where_find_finds_it(text: str, stop: str) -> None:
    strings = StopStrings([stop])
    sent = "".join(strings.push(character).text for character in text) + strings.finish()
    at = text.find(stop)
    assert sent == (text if at < 0 else text[:at])
