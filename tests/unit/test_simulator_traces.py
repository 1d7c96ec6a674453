"""Traces: generated, saved, replayed; the prompts and quantiles that go with them."""

import contextlib
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from simulations import generated
from triptych.services.simulator.arrivals import NO_GROUP, Arrival
from triptych.services.simulator.generated_trace import GeneratedTrace, TraceShape
from triptych.services.simulator.prompts import VOCABULARY, Prompts
from triptych.services.simulator.quantiles import Quantiles
from triptych.services.simulator.trace_file import BadTrace, SavedTrace, TraceFile, parse_arrival

SHAPE = TraceShape(
    num_requests=6000,
    request_rate=5.0,
    max_len=1000,
    prompt_median=100,
    prompt_sigma=0.5,
    output_median=40,
    num_tenants=3,
    tenant_skew=1.0,
    num_priorities=2,
    prefix_groups=4,
    prefix_tokens=32,
    prefix_share=0.25,
    seed=3,
)


def test_a_generated_trace_has_the_shape_asked_for() -> None:
    found = generated(SHAPE)
    assert len(found) == 6000
    times = np.array([each.at for each in found])
    assert (np.diff(times) >= 0).all()
    assert times[-1] == pytest.approx(6000 / 5.0, rel=0.05)
    # Poisson: the gaps' deviation is their mean.
    assert np.diff(times).std() == pytest.approx(1 / 5.0, rel=0.1)
    own = np.array([each.num_prompt - each.num_prefix for each in found])
    assert np.median(own) == pytest.approx(100, rel=0.05)
    assert np.log(own).std() == pytest.approx(0.5, rel=0.05)
    assert np.median([each.num_output for each in found]) == pytest.approx(40, rel=0.05)
    assert max(each.num_prompt + each.num_output for each in found) <= 1000
    grouped = [each for each in found if each.prefix_group != NO_GROUP]
    assert len(grouped) / 6000 == pytest.approx(0.25, rel=0.1)
    assert {each.prefix_group for each in grouped} == {0, 1, 2, 3}
    assert {each.num_prefix for each in grouped} == {32}
    share = sum(each.tenant == "tenant-1" for each in found) / 6000
    assert share == pytest.approx(1 / (1 + 1 / 2 + 1 / 3), rel=0.05)
    assert sum(each.priority for each in found) / 6000 == pytest.approx(0.5, rel=0.1)


def test_a_seed_is_a_trace_and_a_longer_one_begins_alike() -> None:
    first = generated(SHAPE)
    assert generated(SHAPE) == first
    assert generated(replace(SHAPE, num_requests=6001))[:6000] == first
    assert generated(replace(SHAPE, seed=4))[:100] != first[:100]


def test_lengths_are_cut_to_what_fits() -> None:
    shape = replace(SHAPE, max_len=20, prefix_share=1.0, output_median=1000)
    for each in generated(shape):
        assert (each.num_prefix, each.num_prompt, each.num_output) == (18, 19, 1)


def test_a_trace_tells_how_much_is_given() -> None:
    trace = GeneratedTrace(replace(SHAPE, num_requests=4))
    fractions = [trace.fraction for _ in trace]
    assert fractions == [0.25, 0.5, 0.75, 1.0]


def test_a_saved_trace_is_replayed_as_it_was(tmp_path: Path) -> None:
    arrivals = [
        *generated(replace(SHAPE, num_requests=50)),
        Arrival(1e6, 2, 1, -3, "ü", -1, 0, (7, 8)),
    ]
    out = io.StringIO()
    assert list(SavedTrace(iter(arrivals), out)) == arrivals
    path = tmp_path / "trace.jsonl"
    path.write_text(out.getvalue(), encoding="utf-8")
    trace = TraceFile(path)
    assert trace.fraction == 0.0
    assert list(trace) == arrivals
    assert trace.fraction == 1.0
    trace.close()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("", "no JSON"),
        ("[1]", "not a JSON object"),
        ("[" * 100_000, "no JSON"),
        ('{"prompt_tokens": 1, "output_tokens": 1}', "arrival: None is not a number"),
        ('{"arrival": true}', "arrival: True is not a number"),
        ('{"arrival": -1, "prompt_tokens": 1, "output_tokens": 1}', "arrival: -1 is not within 0"),
        ('{"arrival": NaN, "prompt_tokens": 1, "output_tokens": 1}', "arrival: nan is not within"),
        ('{"arrival": 1' + "0" * 400 + ', "prompt_tokens": 1, "output_tokens": 1}', "arrival: 1"),
        ('{"arrival": 0, "output_tokens": 1}', "prompt_tokens: None is not a whole number"),
        (
            '{"arrival": 0, "prompt_tokens": 0, "output_tokens": 1}',
            "prompt_tokens: 0 is not within",
        ),
        ('{"arrival": 0, "prompt_tokens": 1.5, "output_tokens": 1}', "prompt_tokens: 1.5 is not a"),
        (
            '{"arrival": 0, "prompt_tokens": 1, "output_tokens": 0}',
            "output_tokens: 0 is not within",
        ),
        ('{"arrival": 0, "prompt_tokens": 1}', "output_tokens: None"),
        ('{"arrival": 0, "prompt": 1}', "prompt: no key of a trace"),
        (
            '{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1, "priority": 1e3}',
            "priority: 1000.0 is not a whole number",
        ),
        ('{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1, "tenant": 3}', "tenant: 3 is not"),
        (
            '{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1, "tenant": "\\ud800"}',
            "is not Unicode text",
        ),
        (
            '{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1, "tenant": "%s"}' % ("x" * 129),
            "tenant: 129 bytes, more than 128",
        ),
        (
            '{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1, "prefix_group": 1}',
            "prefix_group: it goes together with prefix_tokens",
        ),
        (
            '{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1, "prompt_token_ids": [1]}',
            "prompt_token_ids: not together with prompt_tokens",
        ),
        ('{"arrival": 0, "output_tokens": 1, "prompt_token_ids": []}', "not a list of token ids"),
        (
            '{"arrival": 0, "output_tokens": 1, "prompt_token_ids": [0, 49152]}',
            "prompt_token_ids: 49152 at index 1 is not within 0 and 49151",
        ),
    ],
)
def test_a_line_that_is_not_right_is_named(line: str, told: str) -> None:
    with pytest.raises(BadTrace) as caught:
        parse_arrival(line.encode("utf-8"))
    assert told in str(caught.value)


def test_arrivals_do_not_go_back_in_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = '{"arrival": %d, "prompt_tokens": 1, "output_tokens": 1}\n'
    path.write_text(line % 2 + line % 1, encoding="utf-8")
    with (
        contextlib.closing(TraceFile(path)) as trace,
        pytest.raises(BadTrace, match="line 2: arrival: 1 is before the 2 above it"),
    ):
        list(trace)


def test_prompts_are_as_long_as_asked_and_alike_only_where_asked() -> None:
    prompts = Prompts(0, 100)
    for length in (1, 2, 3, 100):
        assert len(prompts.of(5, Arrival(0.0, length, 1))) == length
    own = [prompts.of(serial, Arrival(0.0, 12, 1)) for serial in range(2000)]
    assert len({each[0] for each in own}) == 2000
    grouped = [
        [prompts.of(serial, Arrival(0.0, 12, 1, 0, "", group, 8)) for serial in (1, 2)]
        for group in range(3)
    ]
    for one, other in grouped:
        assert one[:8] == other[:8]
        assert one[8:] != other[8:]
    assert len({one[0] for one, _ in grouped}) == 3
    assert not {one[0] for one, _ in grouped} & {each[0] for each in own}
    assert all(0 <= token_id < VOCABULARY for each in own for token_id in each)
    # Equal in the next run, other tokens with another seed.
    assert Prompts(0, 100).of(7, Arrival(0.0, 12, 1)) == own[7]
    assert Prompts(1, 100).of(7, Arrival(0.0, 12, 1)) != own[7]


def test_a_prompt_longer_than_any_is_still_too_long() -> None:
    assert len(Prompts(0, 100).of(0, Arrival(0.0, 10**9, 1))) > 100


def test_quantiles_are_right_to_half_a_percent() -> None:
    values = np.random.default_rng(1).lognormal(0.0, 3.0, 20_000)
    found = Quantiles()
    for value in values:
        found.add(float(value))
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        exact = float(np.quantile(values, share, method="inverted_cdf"))
        assert found.at(share) == pytest.approx(exact, rel=0.0051)
    assert found.count == 20_000
    assert found.mean == pytest.approx(float(values.mean()))
    assert found.max == values.max()


def test_quantiles_of_nothing_of_zero_and_of_too_much() -> None:
    found = Quantiles()
    assert (found.at(0.5), found.mean, found.max) == (0.0, 0.0, 0.0)
    found.add(0.0)
    assert found.at(0.99) == 0.0
    found.add(1e300)
    assert found.at(0.5) == 0.0
    assert found.max == 1e300
