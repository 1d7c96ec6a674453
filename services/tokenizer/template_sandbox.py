"""Jinja's immutable sandbox, in which a template also ends.

The clock is looked at in every step of a loop and at every call, macros among them: all that can
make a template run long. What would keep a single operation busy is refused: powers and products
without measure, and the two built-ins that count as far as they are told to.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Sized
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import sync_do_slice
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

CLOCK = "render clock"  # a name, like that of the filter, that no template can spell
_STEPS = "loop steps"
_MAX_BITS = 4096  # of a product or a power of integers
_MAX_COPIES = 1 << 24  # items of a repeated string or list
_MAX_SLICES = 1 << 16


class OutOfTime(Exception):
    """A template ran for longer than it may."""


class RenderClock:
    """The CPU time that one rendering has on its thread, which makes this; a variable of the
    template, under the name CLOCK."""

    def __init__(self, seconds: float) -> None:
        self._end = time.thread_time() + seconds

    def check(self) -> None:
        """Raises OutOfTime."""
        if time.thread_time() > self._end:
            raise OutOfTime


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Templates compiled here must be rendered with a RenderClock."""

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        self.filters[_STEPS] = _steps
        self.filters["slice"] = _slice
        del self.globals["lipsum"]

    def compiled(self, tree: nodes.Template) -> jinja2.Template:
        """The template, its loops under the clock. Raises jinja2.TemplateError."""
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _STEPS, [], [], None, None, lineno=loop.lineno)
        return self.from_string(tree)

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call from a template."""
        context[CLOCK].check()
        return super().call(context, called, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """A product or power. Raises SecurityError for one without measure."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else _bits(left) + _bits(right)
            if bits > _MAX_BITS:
                _refuse(f"{operator} makes a number of over {_MAX_BITS} bits")
        elif isinstance(left, Sized) or isinstance(right, Sized):
            some, times = (left, right) if isinstance(left, Sized) else (right, left)
            if isinstance(times, int) and len(some) * times > _MAX_COPIES:
                _refuse(f"{operator} makes more than {_MAX_COPIES} items")
        return super().call_binop(context, operator, left, right)


@pass_context
def _steps(context: Context, iterable: Iterable[object]) -> Iterator[object]:
    check = context[CLOCK].check
    for item in iterable:
        check()
        yield item


def _slice(value: Collection[object], slices: int, fill_with: object = None) -> Iterator[object]:
    if slices > _MAX_SLICES:
        _refuse(f"slice makes more than {_MAX_SLICES} lists")
    return sync_do_slice(value, slices, fill_with)


def _bits(number: int) -> int:
    return number.bit_length()


def _refuse(what: str) -> NoReturn:
    raise SecurityError(what)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012 (as the base class declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        """Read up to `{% endgeneration %}`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)
