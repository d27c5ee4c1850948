"""The pages on a platform whose trainer is scripted: signing in, lists, faults, broken streams, many tabs, access."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from playwright.sync_api import Browser, Page, expect

from tests.web.conftest import ROOT, Platform, Visitor

pytestmark = pytest.mark.browser

Visit = Callable[..., Visitor]
MARKUP = '<img src=x onerror="window.ran=1"> javascript:alert(1)'
AXE = ROOT / "web" / "node_modules" / "axe-core" / "axe.min.js"


def points(page: Page) -> int:
    return int(page.locator("[data-panel=reward] [data-points]").get_attribute("data-points") or 0)


def wait_for_points(page: Page, number: int) -> None:
    """The pages' policy forbids eval, so the page cannot wait by itself."""
    deadline = time.monotonic() + 20
    while points(page) < number:
        assert time.monotonic() < deadline, f"{points(page)} points in 20 s, not {number}"
        page.wait_for_timeout(50)


def test_the_link_signs_in_and_leaves_no_trace_of_its_token(platform: Platform, chromium: Browser) -> None:
    page = chromium.new_page()
    link = platform.stack.login_link()
    page.goto(link)
    expect(page.get_by_role("heading", name="Runs", exact=True)).to_be_visible()
    assert page.url == f"{platform.stack.url}/runs"
    page.go_back()
    assert "token" not in page.url
    page.goto(f"{platform.stack.url}/runs")
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", name="Sign in to PPO Control")).to_be_visible()
    page.get_by_label("Link or token").fill(link)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("used before")
    page.close()


def test_an_empty_list_says_how_to_start(platform: Platform, visit: Visit) -> None:
    page = visit(platform.stack).open("/runs")
    expect(page.get_by_text("ppo submit")).to_be_visible()


def test_the_list_follows_runs_without_a_reload(platform: Platform, visit: Visit) -> None:
    page = visit(platform.stack).open("/runs")
    expect(page.locator("[data-stream=live]")).to_be_visible()
    run = platform.submit(10, "listed")
    row = page.locator(f"[data-run={run}]")
    expect(row.locator("[data-state]")).to_have_text("running", timeout=15_000)
    expect(row.locator("[data-state]")).to_have_text("succeeded", timeout=15_000)
    expect(row.locator(".iteration")).to_contain_text("10 / 10")
    page.get_by_label("State").select_option("failed")
    expect(page.get_by_text("No run is failed.")).to_be_visible()


def test_faults_are_shown_with_their_place_and_nothing_is_queued(platform: Platform, visit: Visit) -> None:
    visitor = visit(platform.stack)
    page = visitor.open("/runs/new")
    before = len(platform.get("/v1/runs")["items"])
    editor = page.get_by_label("Run spec in YAML")
    editor.fill("name: x\nkl:\n  coeff: 0.1\npolicy: {model: nowhere}\n")
    page.get_by_role("button", name="Submit").click()
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("/kl/coeff")
    alert.get_by_role("button", name="line 3").click()
    expect(editor).to_be_focused()
    assert page.evaluate("getSelection().toString()") == "  coeff: 0.1"
    editor.fill("name: [")
    page.get_by_role("button", name="Check").click()
    expect(alert).not_to_contain_text("/kl/coeff")
    assert len(platform.get("/v1/runs")["items"]) == before
    assert all("422" in complaint for complaint in visitor.complaints)
    visitor.complaints.clear()


def test_help_finds_a_field(platform: Platform, visit: Visit) -> None:
    page = visit(platform.stack).open("/runs/new")
    page.get_by_label("Search fields").fill("clip ratio")
    fields = page.get_by_label("List of fields")
    expect(fields).to_contain_text("update.clip_range")
    expect(fields).to_contain_text("default 0.2")
    expect(fields).not_to_contain_text("policy.model")


def test_a_value_that_is_not_finite_is_marked_and_the_others_are_drawn(platform: Platform, visit: Visit) -> None:
    run = platform.submit(8)
    page = visit(platform.stack).open(f"/runs/{run}")
    expect(page.locator("header [data-state]")).to_have_text("succeeded")
    expect(page.locator("[data-metric='reward/score_mean']")).to_have_text("8")
    assert points(page) == 8
    page.get_by_role("tab", name="Events").click()
    page.get_by_label("also each iteration's").check()
    expect(page.get_by_text("not finite: reward/score_mean")).to_be_visible()


def test_a_metric_explains_itself(platform: Platform, visit: Visit) -> None:
    run = platform.submit(2)
    page = visit(platform.stack).open(f"/runs/{run}")
    name = page.locator("[data-panel=reward]").get_by_role("button", name="Score", exact=True)
    name.focus()
    expect(page.get_by_role("tooltip")).to_contain_text("Mean of the raw scores")
    page.keyboard.press("Escape")
    expect(page.get_by_role("tooltip")).to_have_count(0)


def test_names_are_text_on_every_page(platform: Platform, visit: Visit) -> None:
    run = platform.submit(2, MARKUP)
    page = visit(platform.stack).open("/runs")
    expect(page.get_by_role("link", name=MARKUP)).to_be_visible()
    page.get_by_role("link", name=MARKUP).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(MARKUP)
    assert page.url.endswith(run)
    for tab in ("Checkpoints", "Metrics", "Events", "Logs", "Spec", "Samples"):
        page.get_by_role("tab", name=tab).click()
        page.wait_for_timeout(200)
    assert page.evaluate("window.ran") is None


def test_after_a_break_of_the_stream_every_point_is_there_once(platform: Platform, visit: Visit) -> None:
    """The api is killed under an open page; what the page drew by the end is what the database has."""
    run = platform.submit(60)
    visitor = visit(platform.stack)
    page = visitor.open(f"/runs/{run}")
    wait_for_points(page, 5)
    assert platform.stack.api is not None
    os.kill(platform.stack.api.pid, signal.SIGKILL)
    expect(page.locator("[data-stream=away]")).to_be_visible()
    expect(page.locator("[data-stream=live]")).to_be_visible(timeout=30_000)
    expect(page.locator("header [data-state]")).to_have_text("succeeded", timeout=60_000)
    stored = platform.scores(run)
    assert sorted(stored) == list(range(1, 61))
    page.wait_for_timeout(300)
    assert points(page) == len(stored)
    expect(page.locator("[data-metric='reward/score_mean']")).to_have_text("60")
    visitor.complaints.clear()  # requests that found the api away


def test_a_stop_that_comes_too_late_is_told_and_no_fault(platform: Platform, visit: Visit) -> None:
    run = platform.submit(500)
    visitor = visit(platform.stack)
    page = visitor.open(f"/runs/{run}")
    expect(page.locator("header [data-state]")).to_have_text("running")
    page.locator("header").get_by_role("button", name="Stop").click()
    platform.stop(run)
    expect(page.locator("header [data-state]")).to_have_text("stopped")
    page.get_by_role("button", name="Stop the run").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("status")).to_contain_text("has already stopped at iteration")
    expect(dialog.get_by_role("alert")).to_have_count(0)
    expect(dialog).not_to_contain_text("queued")
    assert all("409" in complaint for complaint in visitor.complaints)
    visitor.complaints.clear()


def test_kill_asks_first_and_ends_the_run(platform: Platform, visit: Visit) -> None:
    run = platform.submit(2000)
    page = visit(platform.stack).open(f"/runs/{run}")
    expect(page.locator("header [data-state]")).to_have_text("running")
    kill = page.locator("header").get_by_role("button", name="Kill")
    kill.click()
    expect(page.get_by_role("dialog")).to_contain_text("nothing is saved")
    page.get_by_role("button", name="Keep running").click()
    kill.click()
    page.get_by_role("button", name="Kill the run").click()
    expect(page.locator("header [data-state]")).to_have_text("cancelled", timeout=60_000)
    expect(page.locator("[data-notice=reason]")).to_contain_text("killed by")
    expect(kill).to_be_disabled()


def test_ten_tabs_share_one_stream_and_the_tenth_can_still_stop(platform: Platform, visit: Visit) -> None:
    """Browsers allow six connections to a host; ten streams would freeze the tenth tab."""
    runs = [platform.submit(2) for _ in range(9)] + [platform.submit(2000)]
    visitor = visit(platform.stack)
    tabs = [visitor.page, *(visitor.new_page() for _ in range(9))]
    for tab, run in zip(tabs, runs, strict=True):
        tab.goto(f"{platform.stack.url}/runs/{run}")
    for tab in tabs:
        expect(tab.locator("[data-stream=live]")).to_be_visible(timeout=3_000)
        expect(tab.locator("header [data-state]")).to_be_visible()
    assert platform.stack.api is not None
    tabs[0].close()
    last = tabs[-1]
    wait_for_points(last, 2)
    last.locator("header").get_by_role("button", name="Stop").click()
    last.get_by_role("button", name="Stop the run").click()
    expect(last.locator("header [data-state]")).to_have_text("stopped")
    open_connections = [
        connection
        for connection in psutil.Process(platform.stack.api.pid).net_connections("tcp")
        if connection.status == psutil.CONN_ESTABLISHED and connection.laddr.port == int(platform.stack.url[-5:])
    ]
    assert len(open_connections) <= 8, "one stream for all tabs, and what the browser and this test keep open"


@pytest.fixture(scope="module")
def shown(platform: Platform) -> list[str]:
    """Addresses of every page, in the states that look different."""
    ended = platform.submit(12, "a run with a rather long name that has to wrap somewhere on a telephone")
    live = platform.submit(3000, "live")
    tabs = [f"/runs/{ended}?tab={tab}" for tab in ("alerts", "checkpoints", "metrics", "events", "logs", "spec")]
    return ["/runs", "/runs/new", "/fleet", "/settings", f"/runs/{live}", f"/runs/{ended}", *tabs, "/nowhere"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
def test_every_page_is_accessible_and_fits(
    platform: Platform, visit: Visit, shown: list[str], scheme: str, width: int
) -> None:
    visitor = visit(platform.stack, color_scheme=scheme, viewport={"width": width, "height": 844})
    source = AXE.read_text(encoding="utf-8")
    found: list[str] = []
    for path in shown:
        page = visitor.open(path)
        page.locator("h1, h2").first.wait_for()
        page.wait_for_timeout(600)
        page.evaluate(source)
        found += [f"{path}: {line}" for line in page.evaluate(VIOLATIONS)]
        wider = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        if wider > 0:
            found.append(f"{path}: {wider} px wider than the screen")
    assert found == []
    assert ["404" in complaint for complaint in visitor.complaints] == [True], "the true status of /nowhere, no more"
    visitor.complaints.clear()


VIOLATIONS = """async () => {
  const { violations } = await axe.run(document, { resultTypes: ["violations"] });
  return violations.flatMap(({ id, nodes }) => nodes.map((node) => `${id} ${node.target} ${node.failureSummary}`));
}"""


def test_the_theme_can_be_chosen_and_is_kept(platform: Platform, visit: Visit) -> None:
    page = visit(platform.stack, color_scheme="light").open("/runs")
    ground = "getComputedStyle(document.body).backgroundColor"
    light: Any = page.evaluate(ground)
    page.get_by_role("button", name="Switch to dark colours").click()
    dark: Any = page.evaluate(ground)
    assert dark != light
    page.reload()
    expect(page.get_by_role("button", name="Switch to light colours")).to_be_visible()
    assert page.evaluate(ground) == dark


def test_a_preset_fills_the_editor(platform: Platform, visit: Visit) -> None:
    folder: Path = platform.inputs / "examples" / "small"
    folder.mkdir(parents=True)
    (folder / "spec.yaml").write_text("# A small one.\n" + yaml.safe_dump(platform.spec(3, "small one")))
    page = visit(platform.stack).open("/runs/new")
    page.get_by_role("button", name="small one").click()
    expect(page.get_by_label("Run spec in YAML")).to_have_value(re.compile("name: small one"))
