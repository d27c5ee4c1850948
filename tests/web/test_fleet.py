"""The fleet page, the Logs panel and Delete on a platform whose trainer is scripted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from tests.web.conftest import Platform, Visitor

pytestmark = pytest.mark.browser

Visit = Callable[..., Visitor]
WAIT_MS = 60_000


def test_a_worker_is_drained_and_enabled_by_keyboard_and_the_run_says_why_it_waits(
    platform: Platform, visit: Visit
) -> None:
    run = platform.submit(3000, "on the fleet")
    platform.wait_for_iteration(run, 1)
    page = visit(platform.stack).open("/runs")
    page.get_by_role("navigation", name="Pages").get_by_role("link", name="Fleet").click()
    card = page.locator("[data-worker]")
    expect(card.locator("[data-worker-state]")).to_have_text("active")
    expect(card.get_by_role("link", name="on the fleet")).to_be_visible()
    expect(page.get_by_text("1 worker · 1 of 4 slots held")).to_be_visible()
    card.get_by_role("button", name="Drain").press("Enter")
    expect(card.locator("[data-worker-state]")).to_have_text("draining")
    expect(card).to_contain_text("Drained by")
    expect(page.get_by_text("1 worker · 0 of 4 slots held")).to_be_visible(timeout=WAIT_MS)
    other = visit(platform.stack).open(f"/runs/{run}")
    expect(other.locator("[data-notice=waiting]")).to_contain_text("is draining")
    card.get_by_role("button", name="Enable").press("Enter")
    expect(card.locator("[data-worker-state]")).to_have_text("active")
    expect(other.locator("header [data-state]")).to_have_text("running", timeout=WAIT_MS)
    platform.stop(run)
    platform.wait_for(run, "stopped")


def test_a_worker_that_sees_another_data_folder_says_so_and_so_does_the_run_that_waits(
    platform: Platform, visit: Visit
) -> None:
    id_file = platform.stack.data / "folder-id"
    right = id_file.read_text()
    page = visit(platform.stack).open("/fleet")
    told = page.locator("[data-folder-fault]")
    expect(told).to_have_count(0)
    id_file.write_text("another")
    try:
        expect(told).to_contain_text("another folder (another) than the platform's", timeout=WAIT_MS)
        run = platform.submit(2, "nowhere to go")
        page.goto(f"{platform.stack.url}/runs/{run}")
        expect(page.locator("[data-notice=waiting]")).to_contain_text("takes no run: PPO_DATA_DIR")
    finally:
        id_file.write_text(right)
    platform.wait_for(run, "succeeded")


def test_a_run_is_renamed_annotated_and_moved_up_the_queue(platform: Platform, visit: Visit) -> None:
    run = platform.submit(2, "first name")
    platform.wait_for(run, "succeeded")
    page = visit(platform.stack).open(f"/runs/{run}")
    page.get_by_role("button", name="Edit…").click()
    dialog = page.get_by_role("dialog", name="Edit first name")
    save = dialog.get_by_role("button", name="Save")
    expect(save).to_be_disabled()
    dialog.get_by_label("Name").fill("second name")
    dialog.get_by_label("Notes").fill("after the tokenizer's fix")
    dialog.get_by_label("Priority").fill("10")
    dialog.get_by_label("Priority").press("Enter")
    expect(dialog).to_have_count(0)
    expect(page.get_by_role("heading", name="second name")).to_be_visible()
    expect(page.locator("[data-notice=notes]")).to_contain_text("after the tokenizer's fix")
    told = platform.get(f"/v1/runs/{run}")
    assert (told["name"], told["notes"], told["priority"]) == ("second name", "after the tokenizer's fix", 10)


def test_logs_are_chosen_searched_and_loaded_back_and_the_run_deleted(platform: Platform, visit: Visit) -> None:
    run = platform.submit(2, "to be deleted")
    platform.wait_for(run, "succeeded")
    log = platform.stack.data / "runs" / run / "segment-0001" / "logs" / "attempt-01-rank-0.log"
    lines = [f"line {number:06d} {'needle' if number % 5000 == 0 else 'hay'}" for number in range(12_000)]
    log.write_text("\n".join(lines) + "\nthe end\n")
    page = visit(platform.stack).open(f"/runs/{run}?tab=logs")
    text = page.get_by_role("region", name="Log")
    expect(text).to_contain_text("the end")
    assert "line 000000" not in text.inner_text()
    for _ in range(3):
        page.get_by_role("button", name="Load earlier").click()
        page.wait_for_timeout(200)
        if page.get_by_role("button", name="Load earlier").count() == 0:
            break
    expect(text).to_contain_text("line 000000")
    assert text.inner_text().count("line 006000") == 1
    page.get_by_label("Search this log").fill("NEEDLE")
    page.get_by_label("Search this log").press("Enter")
    found = page.locator("[data-match]")
    expect(found).to_contain_text("line 000000 needle")
    expect(page.get_by_text("1 of 3 lines")).to_be_visible()
    page.get_by_role("button", name="Next").click()
    expect(found).to_contain_text("line 005000 needle")
    page.get_by_role("button", name="Previous").click()
    page.get_by_role("button", name="Previous").click()
    expect(found).to_contain_text("line 010000 needle")
    with page.expect_download() as download:
        page.get_by_role("link", name="Download").click()
    assert download.value.path().read_text() == log.read_text()
    page.get_by_label("Which log").select_option(label="supervisor")
    expect(text).to_contain_text("attempt 1: trainer")
    page.locator("header").get_by_role("button", name="Delete…").click()
    page.get_by_role("button", name="Delete the run").click()
    expect(page.get_by_role("heading", name="Runs", exact=True)).to_be_visible()
    expect(page.locator(f"[data-run={run}]")).to_have_count(0)
