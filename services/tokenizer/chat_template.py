"""Chat messages to the one text that the model was trained on, by the model's own Jinja template.

Templates come with models from outside, so they run in Jinja's immutable sandbox, with the names
that Hugging Face's `apply_chat_template` gives them: messages, add_generation_prompt, tools and
documents (always none), bos_token and the like, raise_exception, strftime_now, tojson.

Special tokens that the template writes become marks (see special_marks); those spelled inside a
message stay text. Most templates write special tokens as literals, which are marked before the
template is compiled. Some put them together from parts (`'<|' + role + '|>'`): a trial rendering
at start-up finds those out, and for them the messages' spellings are guarded instead. There, a
template that searches a message for a special token does not find it.

Bounds: MAX_MESSAGES messages, MAX_RENDERED characters of prompt, RENDER_SECONDS of rendering (see
template_sandbox). Rendering is thread-safe.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import jinja2
from jinja2 import nodes

from triptych.engine_core.errors import InvalidRequest
from triptych.services.runtime.lifecycle import StartupError
from triptych.services.tokenizer.special_marks import SpecialMarks
from triptych.services.tokenizer.template_sandbox import (
    CLOCK,
    OutOfTime,
    RenderClock,
    TemplateSandbox,
)

MAX_MESSAGES = 4096
MAX_RENDERED = 64 << 20
RENDER_SECONDS = 5.0
_MAX_SOURCE = 1 << 20
_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")

# Whatever a template's own operations may raise on messages it did not expect.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError,
    ValueError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn. A template sees `name` only when it is not empty."""

    role: str
    content: str
    name: str = ""


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
        self._from_parts = self._writes_tokens_from_parts()

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> str:
        """The prompt, with marks for special tokens.

        Raises InvalidRequest naming `messages` when the template refuses them or a bound is passed.
        """
        _check(messages)
        guarded = self._marks.guarded if self._from_parts else str
        turns = [_turn(each, guarded) for each in messages]
        try:
            text = self._run(turns, add_generation_prompt, RenderClock(RENDER_SECONDS))
        except OutOfTime as error:
            raise InvalidRequest("messages", _too_long()) from error
        except _TEMPLATE_FAULTS as error:
            reason = self._marks.spelled_out(str(error)) or type(error).__name__
            raise InvalidRequest(
                "messages", f"the chat template refuses them: {reason:.500}"
            ) from error
        if self._from_parts:
            text = self._marks.without_guards(self._marks.marked(text))
        return text

    def _run(
        self, turns: Sequence[Mapping[str, str]], add_generation_prompt: bool, clock: RenderClock
    ) -> str:
        parts = self._template.generate(
            messages=turns,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._variables,
            **{CLOCK: clock},
        )
        return "".join(_bounded(parts, clock))

    def _writes_tokens_from_parts(self) -> bool:
        words = {
            role: {"role": role, "content": "words"}
            for role in ("system", "user", "assistant", "tool")
        }
        clock = RenderClock(RENDER_SECONDS)
        for roles in (
            ("user",),
            ("system", "user", "assistant", "user"),
            ("user", "assistant", "tool"),
        ):
            try:
                text = self._run([words[role] for role in roles], True, clock)
            except jinja2.exceptions.SecurityError as error:
                raise StartupError(f"the chat template is not safe: {error}") from error
            except OutOfTime as error:
                raise StartupError(_too_long()) from error
            except (InvalidRequest, *_TEMPLATE_FAULTS):
                continue  # not every template takes every order of roles
            if self._marks.spells_any(text):
                return True
        return False


def _check(messages: Sequence[ChatMessage]) -> None:
    if not messages:
        raise InvalidRequest("messages", "is empty; at least 1 message is needed")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest("messages", f"{len(messages)} messages, at most {MAX_MESSAGES}")
    for index, message in enumerate(messages):
        # Roles may become part of a special token, so they are never free text.
        if not _ROLE.fullmatch(message.role):
            raise InvalidRequest(
                f"messages[{index}].role",
                f"{message.role!r:.80} is not 1 to 64 letters, digits or any of _ . -",
            )


def _turn(message: ChatMessage, guarded: Callable[[str], str]) -> dict[str, str]:
    turn = {"role": message.role, "content": guarded(message.content)}
    if message.name:
        turn["name"] = guarded(message.name)
    return turn


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
