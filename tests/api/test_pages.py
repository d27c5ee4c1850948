"""The built pages: files as they are, the one page for its own addresses, nothing from outside."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from api.main import create_app
from api.settings import ApiSettings
from tests.api.conftest import ADDRESS

ADDRESSES = json.loads((Path(__file__).parents[2] / "web" / "tests" / "addresses.json").read_text())


@pytest.fixture(scope="module")
def site(settings: ApiSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("site")
    build = folder / "dist"
    (build / "assets").mkdir(parents=True)
    (build / "index.html").write_text("<!doctype html><p>the page</p>")
    (build / "assets" / "app-1a2b.js").write_text("run()")
    (folder / "secret.txt").write_text("secret")
    (build / "link.txt").symlink_to(folder / "secret.txt")
    with TestClient(create_app(settings.model_copy(update={"web_build": build})), base_url=ADDRESS) as client:
        yield client


@pytest.mark.parametrize("path", [*ADDRESSES["pages"], "/index.html"])
def test_pages_are_open_and_never_kept_stale(path: str, site: TestClient) -> None:
    answer = site.get(path)
    assert answer.status_code == 200
    assert "the page" in answer.text
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("path", ADDRESSES["missing"])
def test_other_addresses_are_404_in_the_words_of_who_asks(path: str, site: TestClient) -> None:
    program = site.get(path)
    assert (program.status_code, program.json()["code"]) == (404, "not_found")
    assert program.headers["content-type"] == "application/problem+json"
    browser = site.get(path, headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert browser.status_code == 404
    assert "the page" in browser.text, "its own words for an address that names nothing"


def test_assets_are_kept_for_good(site: TestClient) -> None:
    answer = site.get("/assets/app-1a2b.js")
    assert answer.text == "run()"
    assert "javascript" in answer.headers["content-type"]
    assert "immutable" in answer.headers["cache-control"]
    assert site.get("/assets/app-old.js").status_code == 404
    assert site.get("/favicon.ico").status_code == 404


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/..%2fsecret.txt",
        "/%2e%2e/secret.txt",
        "/assets/..%2f..%2fsecret.txt",
        "/assets/%252e%252e%252fsecret.txt",
        "//etc/passwd",
        "/%2fetc%2fpasswd",
        "/....//secret.txt",
        "/link.txt",
        "/a%00b.txt",
        "/" + "x" * 5000 + ".txt",
    ],
)
def test_nothing_from_outside_the_build_is_served(path: str, site: TestClient) -> None:
    answer = site.get(path)
    assert answer.status_code < 500
    assert "secret" not in answer.text
    assert "root:" not in answer.text


def test_without_a_build_the_page_says_how_to_make_one(running: TestClient) -> None:
    answer = running.get("/runs/r-abc")
    assert answer.status_code == 503
    assert "not built" in answer.text
    assert answer.headers["content-type"].startswith("text/html")
