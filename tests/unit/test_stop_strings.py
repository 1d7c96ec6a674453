import pytest

from triptych.services.tokenizer.stop_strings import Released, StopStrings


def run(
    pieces: list[str], stops: list[str], *, include: bool = False
) -> tuple[list[str], str, str | None]:
    """Pushes the pieces; returns what each released, the whole text, and the stop."""
    strings = StopStrings(stops, include_in_output=include)
    released = [strings.push(piece) for piece in pieces]
    stop = next((each.stop for each in released if each.stop), None)
    sent = [each.text for each in released]
    return sent, "".join(sent) + strings.finish(), stop


def test_nothing_of_a_stop_string_is_sent_before_it_is_decided() -> None:
    sent, text, stop = run(["DEF", "G", "HI", "J"], ["DEFGHIJ"])
    assert sent == ["", "", "", ""]
    assert (text, stop) == ("", "DEFGHIJ")


def test_text_that_turns_out_not_to_be_a_stop_is_delivered_in_full() -> None:
    sent, text, stop = run(["DEF", "G", "HI", "X"], ["DEFGHIJ"])
    assert sent == ["", "", "", "DEFGHIX"]
    assert (text, stop) == ("DEFGHIX", None)


def test_held_text_comes_out_at_the_end() -> None:
    assert run(["abcDEF"], ["DEFG"]) == (["abc"], "abcDEF", None)


def test_the_flag_leaves_the_stop_string_in() -> None:
    sent, text, stop = run(["abcD", "EFG tail"], ["DEFG"], include=True)
    assert (text, stop) == ("abcDEFG", "DEFG")
    assert sent == ["abcD", "EFG"]


def test_stop_at_the_first_token() -> None:
    assert run(["\n"], ["\n"]) == ([""], "", "\n")


@pytest.mark.parametrize("pieces", [["xabcd"], ["x", "a", "b", "c", "d"], ["xa", "bcd"]])
def test_of_stops_that_begin_together_the_first_complete_one_wins(pieces: list[str]) -> None:
    _, text, stop = run(pieces, ["abc", "ab"])
    assert (text, stop) == ("x", "ab")


def test_of_stops_that_end_together_the_longest_wins() -> None:
    _, text, stop = run(["xabc"], ["c", "bc", "zbc"])
    assert (text, stop) == ("xa", "bc")


def test_a_stop_completed_inside_a_longer_one_ends_the_text_at_once() -> None:
    _, text, stop = run(["xabcd"], ["abcd", "c"])
    assert (text, stop) == ("xab", "c")


def test_repeated_beginnings_do_not_hide_a_stop() -> None:
    assert run(["aa", "aab"], ["aab"])[1:] == ("aa", "aab")


def test_stop_next_to_characters_of_several_bytes() -> None:
    assert run(["世", "界", "🙂", "!"], ["界🙂"])[1:] == ("世", "界🙂")


def test_a_stop_completed_before_min_tokens_stays_in_the_text_and_never_fires() -> None:
    strings = StopStrings(["\n"])
    assert strings.push("a\nb", armed=False) == Released("a\nb")
    assert strings.push("c") == Released("c")
    assert strings.push("d\ne") == Released("d", "\n")


def test_a_stop_begun_before_min_tokens_fires_when_it_is_completed_after() -> None:
    strings = StopStrings(["END"])
    assert strings.push("xEN", armed=False) == Released("x")
    assert strings.push("D") == Released("", "END")


def test_overlap_with_a_forgotten_stop_counts() -> None:
    strings = StopStrings(["aa"])
    assert strings.push("aa", armed=False) == Released("a")
    assert strings.push("a") == Released("", "aa")


def test_nothing_comes_after_a_stop() -> None:
    strings = StopStrings(["."])
    assert strings.push("a.b") == Released("a", ".")
    assert strings.push("c") == Released("")
    assert strings.finish() == ""


def test_without_stops_text_passes() -> None:
    assert run(["a", "b"], []) == (["a", "b"], "ab", None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings([""])


def test_cost_does_not_grow_with_the_square_of_the_stop() -> None:
    strings = StopStrings(["a" * 1023 + "b"] * 16)
    for _ in range(20_000):
        strings.push("a")
    assert strings.finish() == "a" * 1023
