"""The flags of `generate` and `chat`: every sampling field can be said, and bad ones are named."""

import argparse
import io
from pathlib import Path
from typing import Any

import pytest

from triptych.services.cli.choices import Choices
from triptych.services.cli.client_flags import (
    add_choice_flags,
    choice_params,
    client_parser,
    label_request,
    sampling_params,
)
from triptych.services.runtime.lifecycle import StartupError
from triptych.v1 import common_pb2, inference_pb2

EVERYTHING = (
    "--max-tokens 9 --min-tokens 1 --temperature 0.5 --top-k 3 --top-p 0.5 --min-p 0.25 --seed 7 "
    "--stop x --stop-token-id 4 --ignore-eos --typical-p 0.5 --top-n-sigma 1.5 "
    "--repetition-penalty 1.25 --presence-penalty -1 --frequency-penalty 0.5 "
    "--no-repeat-ngram-size 3 --logit-bias 5=-1.5 --logit-bias 6=2 --allowed-token-id 8 "
    "--bad-word bad --logits-processor plain --logits-processor name={\"a\":1} "
    "--n 2 --best-of 4 --beam-width 3 --length-penalty 0.5 --early-stopping never "
    "--logprobs 2 --prompt-logprobs 0 --json-object"
)  # fmt: skip


def parse(line: str) -> argparse.Namespace:
    parser = client_parser("test", "")
    add_choice_flags(parser)
    return parser.parse(line.split())


def test_every_sampling_field_has_a_flag() -> None:
    params = choice_params(parse(EVERYTHING))
    said = {field.name for field, _ in params.ListFields()}
    every = {field.name for field in common_pb2.SamplingParams.DESCRIPTOR.fields}
    about_text = {"include_stop_str_in_output", "skip_special_tokens", "bad_words_token_ids"}
    of_a_program = {"external_sampler"}  # which draws the tokens: no command does
    assert said == every - about_text - of_a_program
    assert dict(params.logit_bias) == {5: -1.5, 6: 2.0}
    assert list(params.allowed_token_ids.ids) == [8]
    assert [(each.name, each.argument) for each in params.logits_processors] == [
        ("plain", ""), ("name", '{"a":1}')
    ]  # fmt: skip
    assert params.beam == common_pb2.BeamSearch(
        width=3, length_penalty=0.5, early_stopping=common_pb2.EARLY_STOPPING_NEVER
    )
    assert params.HasField("prompt_logprobs")


def test_nothing_given_is_nothing_set() -> None:
    assert choice_params(parse("")) == common_pb2.SamplingParams()


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("--logit-bias 5", "--logit-bias: '5'"),
        ("--logit-bias x=1", "--logit-bias: 'x=1'"),
        ("--logit-bias=-1=1", "--logit-bias: -1"),
        ("--allowed-token-id -1", "--allowed-token-id: -1"),
        ("--n -1", "--n: -1"),
        ("--no-repeat-ngram-size -1", "--no-repeat-ngram-size: -1"),
        ("--beam-width -1", "--beam-width: -1"),
        ("--length-penalty 1", "need --beam-width"),
        ("--early-stopping true", "need --beam-width"),
    ],
)
def test_what_fits_no_field_is_named(line: str, shown: str) -> None:
    with pytest.raises(StartupError, match=shown):
        choice_params(parse(line))


@pytest.mark.parametrize(
    ("flags", "form"),
    [
        (["--json-schema", '{"type":"string"}'], {"json_schema": '{"type":"string"}'}),
        (["--json-object"], {"json_object": True}),
        (["--regex", "[a-z]+"], {"regex": "[a-z]+"}),
        (["--grammar", 'start: "a"'], {"grammar": 'start: "a"'}),
        (["--structural-tag", '{"triggers":[]}'], {"structural_tag": '{"triggers":[]}'}),
    ],
)
def test_forms_of_the_answer(flags: list[str], form: dict[str, Any]) -> None:
    params = sampling_params(client_parser("test", "").parse(flags))
    assert params.structured_output == common_pb2.StructuredOutput(**form)


def test_choices_of_the_answer() -> None:
    params = sampling_params(client_parser("test", "").parse(["--choice", "a", "--choice", "b c"]))
    assert list(params.structured_output.choice.texts) == ["a", "b c"]


@pytest.mark.parametrize("flag", ["--json-schema", "--grammar", "--structural-tag"])
def test_a_form_may_be_in_a_file(flag: str, tmp_path: Path) -> None:
    file = tmp_path / "form"
    file.write_text("{ é }")
    params = sampling_params(client_parser("test", "").parse([flag, str(file)]))
    name = flag.removeprefix("--").replace("-", "_")
    assert getattr(params.structured_output, name) == "{ é }"
    file.write_bytes(b"\xff")
    for path, why in ((file, "no UTF-8"), (tmp_path / "none", "No such file")):
        with pytest.raises(StartupError, match=f"{flag}: .* cannot be read: .*{why}"):
            sampling_params(client_parser("test", "").parse([flag, str(path)]))


def test_one_form_at_most(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StartupError, match="not allowed with"):
        client_parser("test", "").parse(["--json-object", "--regex", "a"])
    assert not capsys.readouterr().out


def test_labels() -> None:
    request = inference_pb2.GenerateRequest()
    label_request(request, parse("--tenant t --cache-salt s --priority -2 --queue-timeout 1.5"))
    assert (request.tenant, request.cache_salt, request.priority) == ("t", "s", -2)
    assert request.queue_timeout_ms == 1500
    plain = inference_pb2.ChatRequest()
    label_request(plain, parse(""))
    assert plain == inference_pb2.ChatRequest()
    with pytest.raises(StartupError, match="--queue-timeout"):
        label_request(request, parse("--queue-timeout -1"))


class FakeCall:
    """A finished stream of two choices."""

    def __iter__(self):  # type: ignore[no-untyped-def]  # two lines of a test
        top = common_pb2.TopLogprob(token_id=1, text="b", logprob=-0.5)
        row = common_pb2.TokenLogprob(token_id=2, text="a", logprob=-1.25, rank=2, top=[top])
        yield inference_pb2.GenerateResponse(
            index=1, text="one", prompt_logprobs=[common_pb2.TokenLogprob(text="p")]
        )
        yield inference_pb2.GenerateResponse(index=0, text="nu", logprobs=[row])
        yield inference_pb2.GenerateResponse(index=0, text="ll\n", score=-0.5)

    def cancel(self) -> bool:
        return True


def test_choices_and_logprobs_as_text() -> None:
    choices = Choices(FakeCall())
    assert len(list(choices)) == 3
    out, err = io.StringIO(), io.StringIO()
    choices.print_texts(out)
    choices.print_logprobs(err)
    assert out.getvalue() == "[choice 0, score -0.5000]\nnull\n[choice 1]\none\n"
    lines = err.getvalue().splitlines()
    assert [line.split() for line in lines] == [
        ["[prompt]"], ["'p'"], ["[choice", "0]"], ["-1.2500", "2", "'a'", "'b'", "-0.5000"],
    ]  # fmt: skip
