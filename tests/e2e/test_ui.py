"""The page at /ui in a headless Chromium, against a running engine."""

import re
import shutil
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, ViewportSize, expect, sync_playwright

from engine import Engine, running_engine
from small_engines import tiny_model
from ui_visit import Visit, stream

pytestmark = pytest.mark.e2e

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
PHONE: ViewportSize = {"width": 360, "height": 740}
DESKTOP: ViewportSize = {"width": 1280, "height": 800}
EXPECT_MS = 20_000
PRESS_ESCAPE_AT_TOKEN_4 = """() => {
  const watch = new MutationObserver(() => {
    if (document.querySelectorAll(".assistant .t").length < 4) return;
    watch.disconnect();
    window.stopShownAtToken4 = !document.getElementById("stop").hidden;
    document.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
  });
  watch.observe(document.body, { childList: true, subtree: true });
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on PATH (on Debian: apt-get install chromium)")
    expect.set_options(timeout=EXPECT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def engine(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("ui")
    model = tiny_model(folder, max_position_embeddings=2048)
    flags = ("--kv-cache-memory", "16MiB", "--cpu-threads", "1", "--served-model-name", "tiny")
    with running_engine(model, folder / "run", *flags) as engine:
        assert httpx.get(f"http://{engine.http_address}/health", timeout=20).status_code == 200
        yield engine
        engine.wait_idle()


@pytest.fixture
def visit(browser: Browser, engine: Engine, request: pytest.FixtureRequest) -> Iterator[Visit]:
    """Every visit ends with the same two questions: did it ask others, did the browser complain."""
    size: ViewportSize = getattr(request, "param", DESKTOP)
    with browser.new_context(viewport=size) as context:
        visit = Visit(context.new_page(), f"http://{engine.http_address}/")
        visit.page.set_default_timeout(EXPECT_MS)
        visit.page.on("request", visit.asked)
        visit.page.on("pageerror", lambda error: visit.complaints.append(str(error)))
        visit.page.on(
            "console",
            lambda said: visit.complaints.append(said.text) if said.type == "error" else None,
        )
        visit.page.goto(f"{visit.origin}ui")
        yield visit
        assert [r.url for r in visit.requests if not r.url.startswith(visit.origin)] == []
        expected = re.compile("Failed to load resource")  # answers that are errors, on purpose
        assert [said for said in visit.complaints if not expected.search(said)] == []


def test_an_answer_is_that_of_the_api(visit: Visit, engine: Engine) -> None:
    visit.set(temperature="0", max_tokens="40", system_prompt="Be brief.")
    visit.send("one two")
    visit.answered()
    body = visit.bodies()[-1] | {"stream": False, "stream_options": None}
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one two"},
    ]
    api = httpx.post(f"{visit.origin}v1/chat/completions", json=body, timeout=30).json()
    assert visit.text() == api["choices"][0]["message"]["content"]
    assert visit.text()
    footer = visit.page.locator(".assistant footer")
    expect(footer).to_contain_text(f"{api['usage']['completion_tokens']} tokens")
    expect(visit.page.get_by_role("status").last).to_contain_text("The answer:")
    expect(visit.page.locator("#model")).to_have_text("tiny")

    visit.send("three")
    visit.answered()
    messages = visit.bodies()[-1]["messages"]
    assert isinstance(messages, list)
    assert [each["role"] for each in messages] == ["system", "user", "assistant", "user"]
    visit.page.get_by_role("button", name="New chat").click()
    expect(visit.page.locator(".turn")).to_have_count(0)
    expect(visit.page.get_by_text("What shall it write?")).to_be_visible()


def test_alternatives_of_a_token(visit: Visit) -> None:
    visit.set(temperature="0", max_tokens="20")
    visit.send("one two")
    visit.answered()
    body = visit.bodies()[-1] | {"stream": False, "stream_options": None}
    api = httpx.post(f"{visit.origin}v1/chat/completions", json=body, timeout=30).json()
    rows = api["choices"][0]["logprobs"]["content"]
    table = visit.page.get_by_role("tooltip")
    tokens = visit.page.locator(".assistant .t")
    expect(table).to_be_hidden()

    tokens.first.hover()
    expect(table).to_be_visible()
    assert table.locator("li").count() >= 5
    drawn = table.locator("ul").first.locator("li.drawn")
    expect(drawn).to_have_count(1)
    expect(drawn).to_contain_text(rows[0]["token"].strip())
    first = table.text_content()

    tokens.first.focus()  # Tab reaches the first, arrows the others
    assert visit.page.evaluate("document.querySelectorAll('.t[tabindex=\"0\"]').length") == 1
    visit.page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    expect(tokens.nth(1)).to_have_attribute("aria-describedby", "alternatives")
    assert table.text_content() != first
    visit.page.keyboard.press("Escape")
    expect(table).to_be_hidden()


def test_stop(visit: Visit, engine: Engine) -> None:
    visit.set(temperature="0", max_tokens="1900")
    visit.ask_also(ignore_eos=True)
    # In the page itself: on a busy machine the answer may end before a call from here gets there.
    visit.page.evaluate(PRESS_ESCAPE_AT_TOKEN_4)
    visit.send("one two")
    visit.answered()
    assert visit.page.evaluate("window.stopShownAtToken4") is True
    expect(visit.page.locator(".assistant footer")).to_contain_text("stopped")
    expect(visit.page.get_by_role("button", name="Send")).to_be_visible()
    engine.wait_idle()


def test_an_error_names_the_field(visit: Visit) -> None:
    visit.set(temperature="-1", max_tokens="5")
    visit.send("one")
    visit.answered()
    expect(visit.page.get_by_role("alert")).to_contain_text("temperature")
    wrong = visit.page.get_by_label("Temperature", exact=True)
    expect(wrong).to_have_attribute("aria-invalid", "true")
    wrong.fill("0")
    visit.page.get_by_role("button", name="Try again").click()
    expect(visit.page.get_by_role("alert")).to_be_hidden()
    visit.answered()
    assert visit.text()
    assert visit.bodies()[-1]["messages"] == [{"role": "user", "content": "one"}]


def test_tools_that_are_no_json_are_not_sent(visit: Visit) -> None:
    visit.page.get_by_text("Tools", exact=True).click()
    visit.page.locator("#tools").fill("[")
    visit.send("one")
    expect(visit.page.get_by_role("alert")).to_contain_text("no JSON")
    assert visit.bodies() == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (stream({"content": "half"}, done=False), "ended before the answer did"),
        ('data: {"error": {"message": "no more room", "code": "queue_full"}}\n\n', "no more room"),
    ],
)
def test_a_broken_stream_never_looks_whole(visit: Visit, body: str, said: str) -> None:
    visit.answer_with(body)
    visit.send("one")
    expect(visit.page.get_by_role("alert")).to_contain_text(said)


def test_thoughts_are_folded(visit: Visit) -> None:
    visit.answer_with(
        stream({"reasoning_content": "hmm, "}, {"reasoning_content": "so"}, {"content": "Yes."})
    )
    visit.send("one")
    visit.answered()
    assert visit.text() == "Yes."
    thought = visit.page.get_by_text("hmm, so")
    expect(thought).to_be_hidden()
    visit.page.get_by_text("Thought", exact=True).click()
    expect(thought).to_be_visible()


def test_calls_are_shown_and_answered(visit: Visit) -> None:
    def piece(index: int, arguments: str, **head: str) -> dict[str, object]:
        call: dict[str, object] = {"index": index, "function": {"arguments": arguments}}
        if head:
            call = {
                "index": index,
                "id": head["id"],
                "function": {"name": head["name"], "arguments": arguments},
            }
        return {"tool_calls": [call]}

    visit.answer_with(
        stream(
            piece(0, "", id="a", name="weather"), piece(0, '{"city": '), piece(0, '"Oslo"}'),
            piece(1, "{}", id="b", name="time"), finish="tool_calls",
        ),
        stream({"content": "Cold."}),
    )  # fmt: skip
    visit.send("How cold is it?")
    visit.answered()
    expect(visit.page.locator(".call").first).to_contain_text("weather")
    expect(visit.page.locator(".call pre").first).to_have_text('{\n  "city": "Oslo"\n}')
    visit.page.get_by_label("Result of weather").fill("-3")
    visit.page.get_by_label("Result of time").fill("noon")
    visit.page.get_by_role("button", name="Send results").click()
    expect(visit.page.locator(".assistant").last).to_contain_text("Cold.")
    messages = visit.bodies()[-1]["messages"]
    assert isinstance(messages, list)
    assert messages[1]["tool_calls"][0]["function"] == {
        "name": "weather",
        "arguments": '{"city": "Oslo"}',
    }
    assert messages[2:] == [
        {"role": "tool", "tool_call_id": "a", "content": "-3"},
        {"role": "tool", "tool_call_id": "b", "content": "noon"},
    ]


def test_what_the_model_writes_stays_text(visit: Visit) -> None:
    text = "<img src=x onerror=\"document.title='got you'\"><script>1</script> & <b>bold</b>"
    visit.answer_with(stream({"content": text}))
    visit.send("<i>one</i>")
    visit.answered()
    assert visit.text() == text
    expect(visit.page.locator(".user p")).to_have_text("<i>one</i>")
    assert visit.page.locator("#log :is(img, script, b, i)").count() == 0
    assert visit.page.title() == "Triptych"


FORBIDDEN = """async () => {
  const refused = [];
  document.addEventListener("securitypolicyviolation", (e) => refused.push(e.effectiveDirective));
  try { document.body.innerHTML = "<b>made</b>"; } catch { }
  await fetch("http://127.0.0.1:1/").catch(() => {});
  const picture = new Image();
  picture.src = "http://127.0.0.1:1/x.png";
  const style = document.createElement("style");
  style.textContent = "body { color: red }";
  document.head.append(style);
  for (let tries = 0; tries < 200 && refused.length < 4; tries++)
    await new Promise((resolve) => setTimeout(resolve, 100));
  return refused.sort();
}"""


def test_the_browser_keeps_the_policy(visit: Visit) -> None:
    assert visit.page.evaluate(FORBIDDEN) == [
        "connect-src", "img-src", "require-trusted-types-for", "style-src-elem",
    ]  # fmt: skip
    visit.requests.clear()
    visit.complaints.clear()


def test_the_engine_panel(visit: Visit) -> None:
    for stage in ("Tokenizer", "Scheduler", "Executor"):
        expect(visit.page.get_by_role("listitem").filter(has_text=stage)).to_contain_text("up")
    visit.set(temperature="0", max_tokens="30")
    visit.send("one two")
    visit.answered()
    expect(visit.page.locator("#totals")).to_contain_text(re.compile(r"[1-9]\d* finished"))
    charts = visit.page.locator("#charts svg")
    expect(charts.nth(0)).to_have_attribute("aria-label", re.compile("Tokens/s: .*highest [1-9]"))
    expect(charts.nth(0).locator(".line")).to_have_attribute("d", re.compile("^M.*L"))
    expect(charts.nth(4)).to_have_attribute("aria-label", re.compile("KV cache in use: .* %;"))

    visit.page.context.set_offline(True)
    expect(visit.page.get_by_text("The engine does not answer.")).to_be_visible()
    visit.send("three")
    expect(visit.page.get_by_role("alert")).to_contain_text("Nothing answers")
    visit.page.context.set_offline(False)
    expect(visit.page.get_by_text("The engine does not answer.")).to_be_hidden()


def test_settings_are_kept(visit: Visit) -> None:
    visit.set(temperature="0.5", system_prompt="Be brief.")
    visit.page.reload()
    expect(visit.page.get_by_label("Temperature", exact=True)).to_have_value("0.5")
    expect(visit.page.get_by_label("System prompt")).to_have_value("Be brief.")
    visit.page.get_by_role("button", name="Reset").click()
    expect(visit.page.get_by_label("Temperature", exact=True)).to_have_value("")


def test_the_message_field(visit: Visit) -> None:
    prompt = visit.page.get_by_label("Message", exact=True)
    expect(prompt).to_be_focused()
    low = prompt.bounding_box()
    prompt.press_sequentially("one")
    visit.page.keyboard.press("Shift+Enter")
    visit.page.keyboard.type("two")
    expect(prompt).to_have_value("one\ntwo")
    high = prompt.bounding_box()
    assert low is not None
    assert high is not None
    assert high["height"] > low["height"]
    visit.set(max_tokens="3")
    prompt.focus()
    visit.page.keyboard.press("Enter")
    expect(prompt).to_have_value("")
    visit.answered()


@pytest.mark.parametrize("visit", [PHONE], indirect=True, ids=["360x740"])
def test_a_phone(visit: Visit) -> None:
    def fits() -> bool:
        return bool(visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth"))

    assert fits()
    panel = visit.page.get_by_role("complementary")
    expect(panel).to_be_hidden()
    button = visit.page.get_by_role("button", name="Engine")
    button.click()
    expect(panel).to_be_visible()
    expect(visit.page.get_by_role("button", name="Close")).to_be_focused()
    visit.set(temperature="0", max_tokens="60")
    assert fits()
    visit.page.keyboard.press("Escape")
    expect(panel).to_be_hidden()
    expect(button).to_be_focused()
    visit.send("W" * 200)
    visit.answered()
    visit.page.locator(".assistant .t").last.click()
    table = visit.page.get_by_role("tooltip")
    expect(table).to_be_visible()
    box = table.bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= PHONE["width"]
    assert fits()


def test_dark_and_light(visit: Visit) -> None:
    def lightness() -> int:
        colour = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3]))

    visit.page.emulate_media(color_scheme="light")
    light = lightness()
    visit.page.emulate_media(color_scheme="dark")
    assert light > 600
    assert lightness() < 150


ALIGN = """async ([module, rows, cuts]) => {
  const { Aligner } = await import(module);
  const aligner = new Aligner();
  const parts = [];
  for (const [count, text] of cuts) {
    aligner.add(rows.splice(0, count));
    parts.push(...aligner.take(text));
  }
  return parts.map(({ text, rows }) => [text, rows === null ? null : rows.map((row) => row.id)]);
}"""


@pytest.mark.parametrize(
    ("tokens", "cuts", "parts"),
    [
        (["one", " two"], [(2, "one two")], [["one", [0]], [" two", [1]]]),
        # A character of four bytes over three tokens, text held back until it is whole.
        ([b"a\xf0\x9f", b"\x99", b"\x82!"], [(1, "a"), (2, "\U0001f642!")],
         [["a", [0]], ["\U0001f642!", [1, 2]]]),
        # Held back: the text of a token comes in two pieces.
        (["stop", " it"], [(1, "st"), (1, "op it")], [["st", [0]], ["op", [0]], [" it", [1]]]),
        # Tags are tokens that never become text; white space at them is left out.
        (["<think>", "\n", "hm", "</think>", "\n\nYes"], [(3, "hm"), (2, "Yes")],
         [["hm", [2]], ["Yes", [4]]]),
        # Special tokens have no bytes; text without tokens is still shown.
        (["", "end"], [(2, "end"), (0, "?")], [["end", [1]], ["?", None]]),
    ],
)  # fmt: skip
def test_tokens_find_their_text(
    visit: Visit,
    tokens: list[str | bytes],
    cuts: list[tuple[int, str]],
    parts: list[list[object]],
) -> None:
    whole = [each.encode() if isinstance(each, str) else each for each in tokens]
    rows = [{"id": index, "token": "", "bytes": list(each)} for index, each in enumerate(whole)]
    asked = [f"{visit.origin}ui/align.js", rows, [list(each) for each in cuts]]
    assert visit.page.evaluate(ALIGN, asked) == parts
