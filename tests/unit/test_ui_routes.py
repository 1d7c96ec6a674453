"""The page's files: how they are served, and what they may not contain."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from triptych.services.tokenizer.openai_http import ui_routes

FOLDER = Path(ui_routes.__file__).parent / "ui"
FILES = sorted(FOLDER.iterdir())


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    app = FastAPI()
    app.include_router(ui_routes.ui_routes())
    with TestClient(app, follow_redirects=False) as client:
        yield client


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_is_served_as_what_it_is(client: TestClient, path: Path) -> None:
    answer = client.get("/ui" if path.name == "index.html" else f"/ui/{path.name}")
    assert answer.status_code == 200
    assert answer.content == path.read_bytes()
    kind = {
        ".html": "text/html",
        ".js": "text/javascript",
        ".css": "text/css",
        ".svg": "image/svg+xml",
    }
    assert answer.headers["content-type"].startswith(kind[path.suffix])
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_who_has_a_file_does_not_get_it_again(client: TestClient) -> None:
    tag = client.get("/ui").headers["etag"]
    for known in (tag, f'"other", W/{tag}'):
        answer = client.get("/ui", headers={"if-none-match": known})
        assert (answer.status_code, answer.content) == (304, b"")
        assert answer.headers["etag"] == tag
    assert client.get("/ui", headers={"if-none-match": '"other"'}).status_code == 200


def test_head_has_no_body(client: TestClient) -> None:
    answer = client.head("/ui")
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-length"] == str((FOLDER / "index.html").stat().st_size)


def test_the_slash_leads_back(client: TestClient) -> None:
    answer = client.get("/ui/")
    assert (answer.status_code, answer.headers["location"]) == (308, "../ui")


@pytest.mark.parametrize(
    "name", ["nothing.js", "index.html", "..%2fui_routes.py", "%2e%2e", "a/b.js"]
)
def test_nothing_else_is_served(client: TestClient, name: str) -> None:
    assert client.get(f"/ui/{name}").status_code in {307, 308, 404}
    assert b"def ui_routes" not in client.get(f"/ui/{name}").content


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_file_reaches_outside_or_makes_markup_from_text(path: Path) -> None:
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|//[a-z0-9]+\.", text)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text
    )
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon[a-z]+=\"", text)


def test_every_file_that_is_named_is_there() -> None:
    names = {path.name for path in FILES}
    for path in FILES:
        for named in re.findall(r'(?:from "\./|(?:src|href)="ui/)([^"]+)"', path.read_text()):
            assert named in names, f"{path.name} names {named}"
