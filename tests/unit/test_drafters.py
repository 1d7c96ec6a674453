"""The scheduler's settings of speculation, and the drafter that they make."""

import pytest

from triptych.engine_core.batch import UNKNOWN_DRAFT
from triptych.engine_core.drafting import Drafter
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.runtime.settings import load_settings
from triptych.services.scheduler.drafters import build_drafter
from triptych.services.scheduler.settings import SchedulerSettings


def settings(*argv: str) -> SchedulerSettings:
    return load_settings(SchedulerSettings, argv, prog="test")


def drafter(*argv: str) -> Drafter:
    built = build_drafter(settings(*argv))
    assert built is not None
    return built


def proposal(built: Drafter, output: list[int]) -> list[int]:
    built.open(1, [1, 2, 3, 4, 5, 6, 7, 8], output, "")
    return list(built.propose(1))


def test_nothing_is_guessed_unless_asked_for() -> None:
    assert build_drafter(settings()) is None


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_lookup_takes_its_bounds_from_the_settings(method: str) -> None:
    argv = [f"--speculative-method={method}", "--num-speculative-tokens=3"]
    assert proposal(drafter(*argv), [9, 2, 3]) == [4, 5, 6]
    assert proposal(drafter(*argv, "--max-num-draft-tokens=2"), [9, 2, 3]) == [4, 5]
    assert proposal(drafter(*argv, "--prompt-lookup-min=3"), [9, 2, 3]) == []
    longer = [*argv, "--prompt-lookup-min=1", "--prompt-lookup-max=1"]
    assert proposal(drafter(*longer), [9, 2, 3, 50, 3]) == [50, 3, 50]


def test_suffix_guesses_from_what_others_said() -> None:
    built = drafter("--speculative-method=suffix")
    built.open(2, [20], [], "")
    built.append([2] * 4, [30, 31, 32, 33])
    built.close(2)
    assert proposal(built, [30, 31]) == [32, 33]


def test_the_draft_model_is_left_to_guess() -> None:
    argv = ["--speculative-method=draft_model", "--num-speculative-tokens=2"]
    assert proposal(drafter(*argv), [9]) == [UNKNOWN_DRAFT] * 2


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--speculative-method=magic"], "speculative_method: 'magic'"),
        (["--num-speculative-tokens=0"], "num_speculative_tokens: '0'"),
        (["--num-speculative-tokens=65"], "num_speculative_tokens: '65'"),
        (["--max-num-draft-tokens=0"], "max_num_draft_tokens: '0'"),
        (["--prompt-lookup-max=17"], "prompt_lookup_max: '17'"),
        (
            ["--prompt-lookup-min=5", "--prompt-lookup-max=4"],
            "prompt_lookup_min: 5 must be at most prompt_lookup_max (4)",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(argv: list[str], told: str) -> None:
    with pytest.raises(StartupError) as refused:
        settings(*argv)
    assert told in str(refused.value)
