"""Chat messages to the one text that the model was trained on, by the model's own Jinja template.

Templates come with models from outside, so they run in Jinja's immutable sandbox, with the names
that Hugging Face's `apply_chat_template` gives them: messages, tools, documents (always none),
add_generation_prompt, bos_token and the like, raise_exception, strftime_now, tojson; and with the
variables that a request adds (see template_variables).

Special tokens that the template writes become marks (see special_marks); those spelled inside a
message stay text. Most templates write special tokens as literals, which are marked before the
template is compiled. Some put them together from parts (`'<|' + role + '|>'`): a trial rendering
at start-up finds those out, and for them the spellings in messages, tools and variables are guarded
instead. There, a template that searches a message for a special token does not find it.

The trial also finds out how the template takes turns with tool calls (see TurnForm).

Bounds: those of chat_messages, MAX_RENDERED characters of prompt, RENDER_SECONDS of rendering (see
template_sandbox). Rendering is thread-safe.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

import jinja2
from jinja2 import nodes

from triptych.engine_core.errors import InvalidRequest
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.tokenizer.chat_messages import (
    ChatMessage,
    ChatOptions,
    TurnForm,
    check_messages,
    guarded_json,
    tool_of,
    turn_of,
)
from triptych.services.tokenizer.chat_trials import (
    FORMS,
    TRIALS,
    TRIALS_OF_CALLS,
    Trial,
    shows_the_call,
)
from triptych.services.tokenizer.special_marks import SpecialMarks
from triptych.services.tokenizer.template_sandbox import (
    CLOCK,
    OutOfTime,
    RenderClock,
    TemplateSandbox,
)

MAX_RENDERED = 64 << 20
RENDER_SECONDS = 5.0
_MAX_SOURCE = 1 << 20

# Whatever a template's own operations may raise on messages it did not expect.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError,
    ValueError,
)  # fmt: skip


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, variables: Mapping[str, str], marks: SpecialMarks) -> None:
        """`variables` are bos_token and the like. Raises StartupError for a template that cannot
        be compiled, that does not end, or that reaches for what the sandbox keeps from it."""
        if len(source) > _MAX_SOURCE:
            raise StartupError(f"chat template: {len(source)} characters, more than {_MAX_SOURCE}")
        self._marks = marks
        self._variables = {name: marks.marked(text) for name, text in variables.items()}
        self._template = _compiled(source, marks)
        self._from_parts = False
        self._form = self._form_of_calls()
        self._from_parts = self._writes_tokens_from_parts()

    def render(self, messages: Sequence[ChatMessage], options: ChatOptions) -> str:
        """The prompt, with marks for special tokens.

        Raises InvalidRequest naming `messages` when the template refuses them or a bound is passed.
        """
        check_messages(messages)
        try:
            text = self._run(messages, options, self._form)
        except OutOfTime as error:
            raise InvalidRequest("messages", _too_long()) from error
        except _TEMPLATE_FAULTS as error:
            reason = self._marks.spelled_out(str(error)) or type(error).__name__
            raise InvalidRequest(
                "messages", f"the chat template refuses them: {reason:.500}"
            ) from error
        if options.continue_final_message:
            text = self._left_open(text, messages[-1])
        if self._from_parts:
            text = self._marks.without_guards(self._marks.marked(text))
        return text

    def _run(self, messages: Sequence[ChatMessage], options: ChatOptions, form: TurnForm) -> str:
        guarded = self._marks.guarded if self._from_parts else str
        turns = [turn_of(each, form, guarded) for each in messages]
        if options.continue_final_message:
            # The blank shows whether the template trims.
            turns[-1]["content"] = f"{turns[-1]['content']}{self._marks.end_of_content} "
        variables = {
            name: guarded_json(value, guarded) for name, value in options.variables.items()
        }
        clock = RenderClock(RENDER_SECONDS)
        parts = self._template.generate(
            variables,
            messages=turns,
            tools=[tool_of(each, guarded) for each in options.tools] or None,
            documents=None,
            add_generation_prompt=options.add_generation_prompt,
            **self._variables,
            **{CLOCK: clock},
        )
        return "".join(_bounded(parts, clock))

    def _left_open(self, text: str, last: ChatMessage) -> str:
        """Cut behind the last message's content, as `apply_chat_template` does."""
        mark = self._marks.end_of_content
        content = self._marks.guarded(last.content) if self._from_parts else last.content
        end = text.rfind(mark)
        if end < 0 or content.strip() not in text:
            raise InvalidRequest(
                "continue_final_message",
                "the chat template does not show the last message as it is",
            )
        kept = text[end:].startswith(f"{mark} ")
        opened = text[:end].replace(f"{mark} ", "").replace(mark, "")
        return opened if kept else opened.rstrip()

    def _tried(self, trial: Trial, form: TurnForm) -> str | None:
        """A trial's text; None where the template does not take it. Raises StartupError."""
        try:
            return self._run(trial.messages, trial.options, form)
        except jinja2.exceptions.SecurityError as error:
            raise StartupError(f"the chat template is not safe: {error}") from error
        except OutOfTime as error:
            raise StartupError(_too_long()) from error
        except (InvalidRequest, *_TEMPLATE_FAULTS):
            return None  # not every template takes every order of roles

    def _writes_tokens_from_parts(self) -> bool:
        texts = (self._tried(trial, self._form) for trial in (*TRIALS, *TRIALS_OF_CALLS))
        return any(text is not None and self._marks.spells_any(text) for text in texts)

    def _form_of_calls(self) -> TurnForm:
        """The form in which the template shows a call whole, OpenAI's first."""
        for form in FORMS:
            for trial in TRIALS_OF_CALLS:
                text = self._tried(trial, form)
                if text is not None and shows_the_call(text):
                    return form
        return TurnForm()


def _too_long() -> str:
    return f"the chat template runs for over {RENDER_SECONDS:g} s"


def _bounded(parts: Iterator[str], clock: RenderClock) -> Iterator[str]:
    room = MAX_RENDERED
    for part in parts:
        room -= len(part)
        if room < 0:
            raise InvalidRequest("messages", f"the prompt has more than {MAX_RENDERED} characters")
        clock.check()
        yield part


def _compiled(source: str, marks: SpecialMarks) -> jinja2.Template:
    environment = TemplateSandbox()
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        tree = environment.parse(source)
        for node in tree.find_all(nodes.TemplateData):
            node.data = marks.marked(node.data)
        for constant in tree.find_all(nodes.Const):
            if isinstance(constant.value, str):
                constant.value = marks.marked(constant.value)
        return environment.compiled(tree)
    except jinja2.TemplateSyntaxError as error:
        raise StartupError(f"chat template, line {error.lineno}: {error.message}") from error
    except (jinja2.TemplateError, RecursionError) as error:
        raise StartupError(f"chat template: {error}") from error


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML characters, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
