"""What the parsers of calls have in common: where text is, where a call begins and ends.

The rules, the same for every notation:

* A call is announced (index, id and name) as soon as its name is known and its arguments begin,
  and its arguments follow as they come. Until then everything since its tag is held back. Where
  that turns out not to be a call, or the text ends, all of it is content, tags and all.
* What was announced stays. Arguments that break off, because the text ends there or goes on with
  what JSON cannot have, leave the call incomplete; nothing is added to them. The text goes on as
  content behind the call's closing tag.
* White space between content and a call, between calls, and behind the last one is the notation's,
  and no content. That between a call and content behind it is content.
* Behind a call its closing tag is no content, nor the beginning of one where the text ends.
* The name need not be one of the request's tools where a tag says that this is a call: the client
  is told what the model wrote. Where a notation has no tag, only such a name makes a call.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from triptych.services.tokenizer.chat_output.json_text import json_nested
from triptych.services.tokenizer.chat_output.output import Output
from triptych.services.tokenizer.chat_output.source import SPACE, NoCall, Source, Steps

NAME = re.compile(r"[A-Za-z0-9_.\-]++")
MAX_NAME = 128


@dataclass(frozen=True, slots=True)
class Reading:
    """One answer: where it comes from, where it goes, and the names of the request's tools."""

    source: Source
    output: Output
    declared: frozenset[str]

    def text_until(self, tags: Sequence[str]) -> Steps[str]:
        """Pass on content up to the next of these tags, and read that; "" at the text's end.

        The tag, and the white space in front of it, are held. A tag's first character may not
        stand in it again, so that a tag cannot begin within what only began like one.
        """
        source, output = self.source, self.output
        plain = plain_text(tags)
        while True:
            output.content(source.run(plain))
            if source.all_read:
                if not (yield from source.peek()):
                    return ""
                continue
            source.hold()
            yield from source.spaces()
            tag = yield from source.match(tags)
            if tag:
                return tag
            text = source.release()
            if (yield from source.peek()) or not output.after_call or text.strip(SPACE):
                output.content(text)

    def attempt(self, call: Steps[None]) -> Steps[bool]:
        """Read what may be calls, and is held; false where it is none, and thus content."""
        try:
            yield from call
        except NoCall:
            self.output.content(self.source.release())
            return False
        return True

    def open(self, name: str) -> None:
        """Announce a call: what was held is decided."""
        self.source.release()
        self.output.open(name)

    def arguments(self, name: str) -> Steps[bool]:
        """Announce a call whose arguments begin here, and pass them on; false where they break off.

        Raises NoCall where they do not begin here.
        """
        if (yield from self.source.peek()) != "{":
            raise NoCall
        self.open(name)
        complete = yield from json_nested(self.source, self.output.arguments)
        if complete:
            self.output.close()
        return complete

    def closing(self, tag: str) -> Steps[None]:
        """Read this tag, behind a call, if it stands here."""
        source = self.source
        source.hold()
        yield from source.spaces()
        if (yield from source.match((tag,))) or not (yield from source.peek()):
            source.release()
        else:
            source.rewind()


@cache
def plain_text(tags: Sequence[str]) -> re.Pattern[str]:
    """Text in which no tag begins, nor white space that may stand in front of one."""
    firsts = re.escape("".join(sorted({tag[0] for tag in tags})))
    return re.compile(f"(?:[{SPACE}]*+[^{SPACE}{firsts}]++)++")
