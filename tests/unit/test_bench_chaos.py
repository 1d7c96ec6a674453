"""How `make chaos` judges streams and counts pauses, and what it asks."""

import json
from dataclasses import replace
from typing import Any

import pytest

from bench_modules import load_bench_module

ledger = load_bench_module("chaos_ledger")
pauses = load_bench_module("chaos_pauses")
requests = load_bench_module("chaos_requests")

Behaviour, Choice, Heard, Verdict = (
    ledger.Behaviour, ledger.Choice, ledger.Heard, ledger.Verdict,
)  # fmt: skip
IDS = list(range(100, 140))


def choice(ids: list[int], finish: str = "LENGTH") -> Any:
    text = "".join(chr(each) for each in ids)
    return Choice(list(ids), text, [f"{each}:-1.0" for each in ids], finish, int(bool(finish)))


def whole(*answers: list[int], **fields: Any) -> Any:
    """A stream that came to its end."""
    choices = {index: choice(ids) for index, ids in enumerate(answers)}
    return Heard(choices, usage="5+40", ended=True, sent=10.0, over=20.0, **fields)


def cut(ids: list[int], error: str, *, sent: float = 10.0, over: float = 20.0) -> Any:
    """A stream that ended with an error."""
    arrivals = [(sent + 1, len(ids))] if ids else []
    return Heard(
        {0: choice(ids, "")} if ids else {}, error=error, ended=True, sent=sent, over=over,
        arrivals=arrivals,
    )  # fmt: skip


def judge(heard: Any, behaviour: str = "plain", *outages: tuple[float, float]) -> Any:
    met = [ledger.Outage(*each) for each in outages]
    return ledger.judge(whole(IDS), heard, Behaviour(behaviour), met)


@pytest.mark.parametrize(
    ("ids", "verdict"),
    [
        (IDS, "same"),
        (IDS[:20] + IDS[19:], "doubled"),  # one token twice
        (IDS[:20] + IDS[12:], "doubled"),  # a run of eight twice
        (IDS + IDS[-1:], "doubled"),  # behind the end
        (IDS[:20] + IDS[21:], "lost"),  # one is missing
        (IDS[:20] + IDS[30:], "lost"),
        (IDS[:30], "lost"),  # short, and yet ended
        ([*IDS[:20], 7, *IDS[21:]], "changed"),
        (IDS[:20] + [7] * 20, "changed"),
    ],
)
def test_a_whole_answer(ids: list[int], verdict: str) -> None:
    assert judge(whole(ids)).verdict == verdict


def test_everything_of_an_answer_is_compared() -> None:
    for field, value in (("finish", "STOP"), ("logprobs", ["9:-2.0"] * 40), ("text", "x" * 40)):
        other = whole(IDS)
        setattr(other.choices[0], field, value)
        assert judge(other).verdict == "changed", field
    for field, value in (("usage", "5+41"), ("prompt_logprobs", ["1:-1.0"])):
        other = whole(IDS)
        setattr(other, field, value)
        assert judge(other).verdict == "changed", field


def test_ends() -> None:
    twice = whole(IDS)
    twice.choices[0].ends = 2
    assert judge(twice).verdict == "doubled"
    never = whole(IDS)
    never.choices[0].ends = 0
    assert judge(never).verdict == "lost"
    assert judge(whole()).verdict == "lost"  # its choice never came
    assert judge(whole(IDS, IDS)).verdict == "changed"  # one more than was asked for
    assert judge(Heard(sent=0.0, over=150.0)).verdict == "lost"  # no end at all
    assert judge(cut(IDS[:5], "STALLED")).verdict == "lost"


@pytest.mark.parametrize(
    ("behaviour", "error", "verdict"),
    [
        ("cancels", "CANCELLED", "cancelled"),
        ("deadline", "DEADLINE_EXCEEDED", "deadline"),
        ("slow", "SLOW_READER", "slow"),
        ("plain", "CANCELLED", "lost"),
        ("plain", "SLOW_READER", "lost"),
        ("cancels", "DEADLINE_EXCEEDED", "lost"),
        ("plain", "UNAVAILABLE", "lost"),
        ("plain", "CONNECTION", "lost"),
        ("plain", "INTERNAL", "lost"),
    ],
)
def test_errors(behaviour: str, error: str, verdict: str) -> None:
    assert judge(cut(IDS[:5], error), behaviour).verdict == verdict


def test_what_came_before_an_error_is_compared() -> None:
    assert judge(cut([*IDS[:5], 7], "CANCELLED"), "cancels").verdict == "changed"
    assert judge(cut(IDS[:20] + IDS[12:25], "CANCELLED"), "cancels").verdict == "doubled"


def test_a_dead_tokenizer_process_breaks_its_streams_and_no_others() -> None:
    assert judge(cut(IDS[:5], "CONNECTION"), "plain", (15.0, 17.0)).verdict == "broken"
    assert judge(cut(IDS[:5], "UNAVAILABLE"), "slow", (15.0, 17.0)).verdict == "broken"
    assert judge(cut([], "CONNECTION"), "plain", (9.0, 11.0)).verdict == "away"
    assert judge(cut(IDS[:5], "CONNECTION"), "plain", (2.0, 4.0)).verdict == "lost"
    assert judge(cut(IDS[:5], "CONNECTION"), "plain", (21.0, 24.0)).verdict == "lost"
    assert judge(cut(IDS[:5], "INTERNAL"), "plain", (15.0, 17.0)).verdict == "lost"
    assert judge(cut([7], "CONNECTION"), "plain", (15.0, 17.0)).verdict == "changed"


def test_a_refusal_is_compared_with_the_one_before() -> None:
    refused = Heard(error="INVALID_ARGUMENT", ended=True)

    def verdict(heard: Any) -> str:
        return str(ledger.judge(refused, heard, Behaviour.PLAIN, []).verdict)

    assert verdict(Heard(error="INVALID_ARGUMENT", ended=True)) == "same"
    assert verdict(Heard(error="INTERNAL", ended=True)) == "lost"
    assert verdict(whole(IDS)) == "changed"


def test_the_ledger_counts_streams_that_could_begin() -> None:
    book = ledger.Ledger()
    book.add(whole(IDS, IDS), ledger.Judgement(Verdict.SAME))
    book.add(cut(IDS[:5], "CONNECTION"), ledger.Judgement(Verdict.BROKEN))
    book.add(cut([], "CONNECTION"), ledger.Judgement(Verdict.AWAY))
    assert (book.streams, book.tokens) == (2, 85)
    assert book.line() == "1 same, 1 broken, 1 away"


def test_a_pause_ends_with_the_first_token_that_was_not_on_its_way() -> None:
    arrivals = [(1.0, 1), (2.0, 2), (2.1, 3), (2.15, 4), (3.5, 5), (3.6, 6)]
    assert pauses.pause_of(2.05, arrivals) == pytest.approx(1.45)
    assert pauses.pause_of(0.5, arrivals) is None  # nothing had come yet
    assert pauses.pause_of(3.6, arrivals) is None  # nothing came any more
    assert pauses.pause_of(1.5, [(1.0, 1), (4.0, 2)]) == pytest.approx(2.5)


def kill(when: float, stage: str = "executor-0", what: str = "kill") -> Any:
    return pauses.Kill(when, stage, 1, what)


def test_pauses_are_of_kills_that_came_alone() -> None:
    one = [(1.0, 1), (2.0, 2), (3.5, 3), (4.0, 4), (9.0, 5)]
    late = [(2.1, 1), (9.0, 2)]

    def found(*kills: Any) -> Any:
        return pauses.pauses(kills, [one, late], "executor-0")

    assert found(kill(2.05)) == [[pytest.approx(1.45)]]
    assert found(kill(2.05), kill(3.0)) == []  # two recoveries at once, for both
    assert found(kill(2.05, "scheduler"), kill(2.05, what="freeze")) == []
    assert found(kill(2.05), kill(3.9)) == [[pytest.approx(1.45)], [pytest.approx(5.1)]]


def test_health_in_silence() -> None:
    def silence(said: str, arrivals: list[float], *waited: tuple[float, float]) -> float:
        samples = [(float(i), each == "S") for i, each in enumerate(said)]
        return float(pauses.serving_in_silence(samples, arrivals, waited))

    assert silence("SSSSSS", [], (0.0, 9.0)) == 5.0
    assert silence("SSNNSS", [], (0.0, 9.0)) == 2.0
    assert silence("SSSSSS", [2.5], (0.0, 9.0)) == 2.0
    assert silence("SSSSSS", []) == 0.0  # nobody waited
    assert silence("SSSSSS", [], (1.5, 4.0)) == 2.0


def test_a_pool_is_its_seeds_and_has_every_kind() -> None:
    pool = requests.draw_pool(3, 300)
    assert pool == requests.draw_pool(3, 300)
    assert pool != requests.draw_pool(4, 300)
    assert len({each.line().partition(" ")[2] for each in pool}) > 280
    fields = {name for each in pool for name in each.fields}
    assert fields >= {
        "seed", "n", "logprobs", "stop", "schema", "regex", "prompt_logprobs", "beam", "best_of",
    }  # fmt: skip
    assert {each.door for each in pool} == set(requests.DOORS)
    assert any(each.refused for each in pool)
    assert any(each.token_ids for each in pool)
    assert max(len(each.prompt) for each in pool) > 2000


def test_every_answer_is_determined() -> None:
    for ask in requests.draw_pool(5, 300):
        if not ask.refused and "beam" not in ask.fields:
            assert ask.fields["temperature"] == 0.0 or "seed" in ask.fields, ask.line()


def test_both_doors_are_asked_the_same() -> None:
    ask = requests.Ask(
        1, "http", True, "Hi", {"temperature": 0.5, "seed": 7, "logprobs": 2, "schema": True}
    )
    chat, body = requests.chat_request(ask), requests.http_body(ask)
    params = chat.sampling_params
    assert (params.temperature, params.seed, params.logprobs) == (0.5, 7, 2)
    assert (body["temperature"], body["seed"], body["logprobs"], body["top_logprobs"]) == (
        0.5, 7, True, 2,
    )  # fmt: skip
    form = body["response_format"]
    assert form["json_schema"]["schema"] == json.loads(params.structured_output.json_schema)
    assert requests.http_path(ask) == "/v1/chat/completions"
    assert requests.http_path(replace(ask, chat=False)) == "/v1/completions"


def test_text_and_ids() -> None:
    ask = requests.Ask(1, "grpc", False, "Hi", {"beam": 4, "n": 2, "regex": "a+"}, (5, 6))
    request = requests.generate_request(ask)
    assert list(request.token_ids.ids) == [5, 6]
    assert request.sampling_params.beam.width == 4
    assert request.sampling_params.structured_output.regex == "a+"
    assert ask.choices == 2
    assert requests.http_body(ask)["prompt"] == [5, 6]
