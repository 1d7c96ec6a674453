"""A visit to the page at /ui, as a person makes it, and canned answers to show there."""

import json
from dataclasses import dataclass, field

from playwright.sync_api import Page, Request, Route, expect


@dataclass
class Visit:
    """A page that is open at /ui, and what it did."""

    page: Page
    origin: str
    requests: list[Request] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def asked(self, request: Request) -> None:
        self.requests.append(request)

    def send(self, text: str) -> None:
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    def set(self, **settings: str) -> None:
        for label, value in settings.items():
            self.page.get_by_label(label.replace("_", " ").capitalize(), exact=True).fill(value)

    def answered(self) -> None:
        expect(self.page.locator(".assistant").last).to_have_attribute("aria-busy", "false")

    def text(self) -> str:
        text = self.page.locator(".assistant > .tokens").last.text_content()
        assert text is not None
        return text

    def bodies(self) -> list[dict[str, object]]:
        """What was asked of /v1/chat/completions."""
        return [json.loads(each.post_data or "") for each in self.requests if each.method == "POST"]

    def ask_also(self, **fields: object) -> None:
        """Add fields to what the page asks of the engine, which it has no control for."""

        def go_on(route: Route) -> None:
            body = json.loads(route.request.post_data or "")
            route.continue_(post_data=json.dumps({**body, **fields}))

        self.page.route("**/v1/chat/completions", go_on)

    def answer_with(self, *streams: str) -> None:
        """Answer chats in the engine's place: with these streams, one after the other."""
        left = list(streams)

        def fulfill(route: Route) -> None:
            route.fulfill(status=200, content_type="text/event-stream", body=left.pop(0))

        self.page.route("**/v1/chat/completions", fulfill)


def stream(*deltas: dict[str, object], finish: str = "stop", done: bool = True) -> str:
    """A canned answer."""
    choices: list[dict[str, object]] = [
        {"index": 0, "delta": delta, "finish_reason": None} for delta in deltas
    ]
    choices.append({"index": 0, "delta": {}, "finish_reason": finish})
    events = [json.dumps({"choices": [choice]}) for choice in choices]
    return "".join(f"data: {event}\n\n" for event in [*events, *(["[DONE]"] if done else [])])
