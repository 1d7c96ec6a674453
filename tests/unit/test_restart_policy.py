"""When a process is started again: the rules over any life that it may have."""

from hypothesis import given
from hypothesis import strategies as st

from triptych.services.cli.restart_policy import RestartPolicy, RestartRules, Verdict

_RULES = RestartRules(max_restarts=5, window=10.0, first_delay=0.2, longest_delay=1.0)

# Lives: seconds until ready (None: never), and seconds from then (or from the start) to the end.
_LIVES = st.lists(
    st.tuples(st.none() | st.floats(0, 100), st.floats(0, 100)), min_size=1, max_size=40
)


def ends(rules: RestartRules, lives: list[tuple[float | None, float]]) -> list[Verdict]:
    policy, now, verdicts = RestartPolicy(rules), 1000.0, []
    for until_ready, rest in lives:
        if until_ready is not None:
            now += until_ready
            policy.ready(now)
        now += rest
        verdicts.append(policy.ended(now))
        now += verdicts[-1].delay
    return verdicts


def test_the_first_restart_is_at_once_and_the_next_ones_wait_longer() -> None:
    verdicts = ends(_RULES, [(None, 1.0)] * 7)
    assert [verdict.delay for verdict in verdicts] == [0.0, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    assert [verdict.crash_loop for verdict in verdicts] == [False] * 4 + [True] * 3
    assert [verdict.in_a_row for verdict in verdicts] == [1, 2, 3, 4, 5, 6, 7]


def test_a_life_that_was_well_for_the_window_ends_a_row() -> None:
    verdicts = ends(_RULES, [(None, 1.0)] * 6 + [(5.0, 10.0), (5.0, 9.9)])
    assert [verdict.in_a_row for verdict in verdicts] == [1, 2, 3, 4, 5, 6, 1, 2]
    assert verdicts[-2] == Verdict(0.0, 1, crash_loop=False)


def test_what_was_forgotten_is_not_held_against_it() -> None:
    policy = RestartPolicy(_RULES)
    for _ in range(4):
        policy.ended(0.0)
    policy.forget()
    assert policy.ended(0.0) == Verdict(0.0, 1, crash_loop=False)


@given(_LIVES)
def test_a_crash_loop_is_so_many_bad_lives_in_a_row(
    lives: list[tuple[float | None, float]],
) -> None:
    bad = 0
    for (until_ready, rest), verdict in zip(lives, ends(_RULES, lives), strict=True):
        well = until_ready is not None and rest >= _RULES.window + 1e-6
        unclear = until_ready is not None and abs(rest - _RULES.window) < 1e-6
        if unclear:
            return
        bad = 1 if well else bad + 1
        assert verdict.in_a_row == bad
        assert verdict.crash_loop == (bad >= _RULES.max_restarts)


@given(_LIVES, st.integers(1, 2000), st.floats(0.001, 100))
def test_delays_never_shrink_in_a_row_and_are_bounded(
    lives: list[tuple[float | None, float]], max_restarts: int, longest: float
) -> None:
    rules = RestartRules(max_restarts=max_restarts, longest_delay=longest)
    before = 0.0
    for verdict in ends(rules, lives):
        assert 0 <= verdict.delay <= longest
        assert verdict.in_a_row == 1 or verdict.delay >= before
        before = verdict.delay


def test_a_row_of_any_length_has_a_delay() -> None:
    policy = RestartPolicy(RestartRules(max_restarts=10_000))
    assert [policy.ended(0.0).delay for _ in range(5000)][-1] == 30.0


def test_without_a_window_whoever_was_ready_was_well() -> None:
    rules = RestartRules(max_restarts=2, window=0.0)
    assert not any(verdict.crash_loop for verdict in ends(rules, [(0.0, 0.0)] * 20))
