"""Alerts and webhooks in a browser, on a platform whose trainer is scripted: seen, understood, gone back from, told."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.alert_news import news
from tests.web.conftest import Platform, Visitor, scripted_platform
from tests.web.test_pages import AXE, VIOLATIONS
from tests.worker.webhook_receiver import Receiver, webhook_receiver

pytestmark = pytest.mark.browser

Visit = Callable[..., Visitor]
STORY = news(
    "story:length_hacking", raised=8, onset=6, severity="critical",
    title="This looks like reward hacking by length: Response length rose from 36.5 to 53.3 tokens, from iteration 6",
    suggestion={"checkpoint": "1:5", "changes": {"kl.coef": 0.1}, "reason": "It answers longer for a higher score."},
)  # fmt: skip
BAND = news("band:response/eos_rate", raised=7, onset=6, metrics=["response/eos_rate"], title="EOS rate fell to 71 %")
CALMED = [{**BAND, "rule": "band:policy/entropy", "id": "al-calm", "title": "Entropy fell"} for _ in range(2)]
CALMED[1] |= {"status": "cleared", "cleared_at": 9}
PREFLIGHT = {
    "findings": [
        {"check": "alignment", "status": "ok", "detail": "one row alone agrees", "remedy": ""},
        {"check": "eos", "status": "warning", "detail": "EOS is rare", "remedy": "raise rollout.max_new_tokens"},
    ],
    "numbers": {"steps": 8},
}


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with webhook_receiver() as found:
        yield found


@pytest.fixture(scope="module")
def alarmed(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[Platform]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PPO_WEBHOOK_HOSTS", "127.0.0.1")
        script = {"iteration_s": 0.05, "alerts": [STORY, BAND, *CALMED], "preflight": PREFLIGHT}
        with scripted_platform(tmp_path_factory, **script) as platform:
            yield platform


def is_accessible(page: Page) -> None:
    page.evaluate(AXE.read_text())
    assert page.evaluate(VIOLATIONS) == []


def test_a_story_is_seen_understood_and_gone_back_from(alarmed: Platform, visit: Visit) -> None:
    run = alarmed.submit(12, "alarmed")
    alarmed.wait_for(run, "succeeded")
    page = visit(alarmed.stack).open("/runs")
    row = page.locator(f"[data-run='{run}']")
    expect(row).to_contain_text("2 alerts")
    row.get_by_role("link", name="alarmed").click()

    line = page.get_by_role("status", name="Alerts")
    expect(line).to_contain_text(re.compile("2 alerts:.*by length.*EOS rate", re.DOTALL))
    expect(page.locator("[data-notice=preflight]")).to_contain_text("2 checks: 1 warning")
    expect(page.locator("[data-panel=kl] [data-alerts]")).not_to_have_attribute("data-alerts", "0")
    marker = page.get_by_role("toolbar").locator("[data-alerts]").first
    expect(marker).to_have_attribute("title", re.compile("iteration 7: EOS rate"))
    marker.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("tab", name="Alerts")).to_have_attribute("aria-selected", "true")
    other = page.locator("[data-alert='band:response/eos_rate']")
    expect(other.get_by_role("button", name="Acknowledge")).to_be_visible()

    line.get_by_role("button", name="by length").click()
    card = page.locator("[data-alert='story:length_hacking']")
    expect(card).to_contain_text("KL 4.1 → 12.4 nats")
    expect(card).to_contain_text("Raise kl.coef.")
    expect(card.get_by_role("img")).not_to_have_count(0)
    expect(page.locator("[data-status=cleared]")).to_contain_text("Entropy fell")
    for theme in ("dark", "light"):
        page.get_by_role("button", name=f"Switch to {theme} colours").click()
        is_accessible(page)
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.set_viewport_size({"width": 1400, "height": 900})

    card.get_by_role("button", name="Acknowledge").click()
    expect(card).to_contain_text("acknowledged by")
    other.get_by_label("Snooze").select_option(label="1 hour")
    expect(line).to_contain_text("1 snoozed")

    card.get_by_role("button", name="Roll back to iteration 5…").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_label("Reason")).to_have_value("It answers longer for a higher score.")
    expect(dialog.locator("[data-change='kl.coef']").get_by_role("cell").nth(2)).to_have_text("0.1")
    dialog.get_by_role("button", name="Roll back", exact=True).click()
    expect(dialog.locator("[data-command=rollback]")).to_have_attribute("data-status", "done", timeout=60_000)
    dialog.get_by_role("button", name="Close").click()
    alarmed.wait_for(run, "succeeded")
    statuses = {(one["segment"], one["status"]) for one in alarmed.get(f"/v1/runs/{run}/alerts")["items"]}
    assert (1, "left") in statuses
    assert (2, "open") in statuses


def test_a_webhook_is_made_tried_and_shown_to_have_arrived(alarmed: Platform, visit: Visit, receiver: Receiver) -> None:
    visitor = visit(alarmed.stack)
    page = visitor.open("/runs")
    page.get_by_role("link", name="Settings").click()
    page.get_by_label("Name").fill("chat")
    page.get_by_label("Address").fill("http://10.0.0.1/")
    page.get_by_role("button", name="Add").click()
    expect(page.get_by_role("alert")).to_contain_text("PPO_WEBHOOK_HOSTS")
    assert ["422" in complaint for complaint in visitor.complaints] == [True]
    visitor.complaints.clear()
    page.get_by_label("Address").fill(receiver.url)
    page.get_by_role("button", name="Add").click()
    receiver.secret = page.locator("[data-secret]").inner_text()
    hook = page.locator("[data-webhook=chat]")
    hook.get_by_role("button", name="Send a test").click()
    expect(hook.locator("[data-delivery=delivered]")).to_contain_text("webhook.test", timeout=60_000)
    assert [(got.message["type"], got.signed) for got in receiver.requests] == [("webhook.test", True)]
    is_accessible(page)
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.get_by_role("button", name="I have kept it").click()
    expect(page.locator("[data-secret]")).to_have_count(0)


def test_a_webhook_gets_another_secret_and_both_sign(alarmed: Platform, visit: Visit, receiver: Receiver) -> None:
    page = visit(alarmed.stack).open("/settings")
    page.get_by_label("Name").fill("rotated")
    page.get_by_label("Address").fill(receiver.url)
    page.get_by_role("button", name="Add").click()
    first = page.locator("[data-secret]").inner_text()
    hook = page.locator("[data-webhook=rotated]")
    hook.get_by_role("button", name="New secret").click()
    expect(page.get_by_label("The present one still signs")).to_have_value("86400")
    is_accessible(page)
    page.get_by_role("button", name="Make it").click()
    expect(page.locator("[data-secret]")).not_to_have_text(first)
    expect(hook).to_contain_text("An earlier secret signs, too, until")
    second = page.locator("[data-secret]").inner_text()
    for secret in (first, second):
        receiver.secret = secret
        before = len(receiver.requests)
        hook.get_by_role("button", name="Send a test").click()
        expect(hook.locator("[data-delivery=delivered]")).to_have_count(1 + (secret == second), timeout=60_000)
        assert [got.signed for got in receiver.requests[before:]] == [True]
