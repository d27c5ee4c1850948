"""Going back in a browser, on a platform whose trainer is scripted: roll back, undo, fork, and keeping checkpoints."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.web.conftest import Platform, Visitor, scripted_platform
from tests.web.test_pages import AXE, VIOLATIONS

pytestmark = pytest.mark.browser

Visit = Callable[..., Visitor]
KEEP_ALL = {"every": 5, "keep_last": -1}
DONE_MS = 30_000  # a trainer saves and stops, another one starts


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """Its trainers take 0.1 s an iteration and save every fifth."""
    with scripted_platform(tmp_path_factory, iteration_s=0.1) as platform:
        yield platform


@pytest.fixture(scope="module")
def ended(quick: Platform) -> str:
    """A run that succeeded after 15 iterations, with its checkpoints 5, 10 and 15; tests leave it as it is."""
    run = quick.submit(15, "ended", checkpoints=KEEP_ALL)
    quick.wait_for(run, "succeeded")
    return run


def open_rollback(page: Page) -> Locator:
    page.get_by_role("button", name="Roll back…").first.click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("heading", level=2)).to_contain_text("Roll back")
    return dialog


def pick(dialog: Locator, iteration: int, segment: int = 1) -> None:
    options = dialog.get_by_label("Checkpoint", exact=True)
    text = re.compile(rf"iteration {iteration}( · segment {segment})?\b")
    options.select_option(options.locator("option").filter(has_text=text).first.get_attribute("value"))


def change(dialog: Locator, number: int, path: str, value: str) -> None:
    dialog.get_by_role("button", name="Change a setting").click()
    dialog.get_by_label(f"Setting {number}", exact=True).fill(path)
    dialog.get_by_label(f"New value of {path}").fill(value)


def ghosts(page: Page) -> Locator:
    return page.locator("[data-panel=reward] [data-ghosts]")


def follow_to_the_end(dialog: Locator) -> None:
    expect(dialog.locator("[data-command=rollback]")).to_have_attribute("data-status", "done", timeout=DONE_MS)
    dialog.get_by_role("button", name="Close").click()
    expect(dialog).to_have_count(0)


def test_back_with_another_setting_and_back_again_while_it_runs(quick: Platform, visit: Visit) -> None:
    """A stopped run goes back to 5 with another `kl.coef`; then, running, it undoes that: to where it had stopped."""
    run = quick.submit(400, "there and back", checkpoints=KEEP_ALL)
    quick.wait_for_iteration(run, 12)
    quick.stop(run)
    last = int(quick.wait_for(run, "stopped")["iteration"])
    page = visit(quick.stack).open(f"/runs/{run}")
    expect(ghosts(page)).to_have_attribute("data-ghosts", "")

    dialog = open_rollback(page)
    pick(dialog, 5)
    behind = dialog.locator("[data-part=left-behind]")
    expect(behind).to_contain_text(f"Iterations 6 to {last} of segment 1")
    expect(dialog.locator("[data-part=exact]")).to_contain_text("bit for bit")
    change(dialog, 1, "kl.coef", "0.2")
    row = dialog.locator("[data-change='kl.coef']")
    expect(row.get_by_role("cell")).to_have_text(["0.05", "0.05", "0.2", "safe", re.compile("checkpoint's")])
    expect(dialog.locator("[data-part=exact]")).to_have_count(0)
    dialog.get_by_label("Reason").fill("KL ran away")
    dialog.get_by_role("button", name="Roll back", exact=True).click()
    follow_to_the_end(dialog)

    expect(page.locator("header [data-state]")).to_have_text("running", timeout=DONE_MS)
    expect(ghosts(page)).to_have_attribute("data-ghosts", "1")
    expect(page.locator("[data-stretch='1']")).to_have_count(2)
    expect(page.locator("[data-mark=rollback].changed")).to_have_attribute("title", re.compile("kl.coef.*KL ran away"))
    page.get_by_role("checkbox", name="abandoned").uncheck()
    expect(ghosts(page)).to_have_attribute("data-ghosts", "")
    page.locator("[data-mark=rollback]").focus()
    page.keyboard.press("Enter")
    expect(page.locator("[data-diff='kl.coef']").get_by_role("cell")).to_have_text(["0.05", "0.2"])

    page.get_by_role("tab", name="Checkpoints").click()
    stopped_at = page.locator(f"[data-checkpoint='{last}']").filter(has=page.locator("code[title^='segment-0001/']"))
    stopped_at.get_by_role("button", name="Roll back…").click()
    expect(dialog.locator("[data-change='kl.coef']").get_by_role("cell").nth(2)).to_have_text("0.05")
    dialog.get_by_role("button", name="Roll back", exact=True).click()
    follow_to_the_end(dialog)
    page.get_by_role("checkbox", name="abandoned").check()
    expect(ghosts(page)).to_have_attribute("data-ghosts", "2")
    expect(page.locator("header [data-state]")).to_have_text("running", timeout=DONE_MS)
    quick.wait_for_iteration(run, last + 2)
    quick.stop(run)
    quick.wait_for(run, "stopped")
    segments = quick.get(f"/v1/runs/{run}/segments")["items"]
    assert [(item["number"], item["kind"], item["start_iteration"]) for item in segments] == [
        (1, "start", 0), (2, "rollback", 5), (3, "rollback", last),
    ]  # fmt: skip
    assert (segments[1]["reason"], segments[1]["created_by"]) == ("KL ran away", "browser")


def test_what_a_roll_back_may_not_change_is_said_at_the_setting_and_a_fork_takes_it(
    quick: Platform, visit: Visit, ended: str
) -> None:
    visitor = visit(quick.stack)
    page = visitor.open(f"/runs/{ended}")
    dialog = open_rollback(page)
    pick(dialog, 10)
    change(dialog, 1, "seed", "7")
    setting = dialog.locator("[data-setting=seed]")
    expect(setting).to_contain_text("fork only")
    expect(setting.get_by_role("alert")).to_contain_text("fork")
    expect(dialog.get_by_role("button", name="Roll back", exact=True)).to_be_disabled()
    dialog.get_by_role("button", name="Fork instead…").click()
    expect(dialog.get_by_role("heading", level=2)).to_contain_text("Fork ended")
    expect(dialog.locator("[data-change=seed]").get_by_role("cell").nth(2)).to_have_text("7")
    expect(dialog.get_by_label("Checkpoint", exact=True)).to_have_value(
        next(item["id"] for item in quick.get(f"/v1/runs/{ended}/checkpoints")["items"] if item["iteration"] == 10)
    )
    dialog.get_by_label("Name").fill("forked <b>")
    dialog.get_by_role("button", name="Fork", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("forked <b>")
    fork = page.url.rpartition("/")[2]
    assert fork != ended
    quick.wait_for(fork, "succeeded")
    assert quick.get(f"/v1/runs/{fork}")["spec"]["seed"] == 7
    page.get_by_role("tab", name="Lineage").click()
    expect(page.locator("[data-lineage='2']")).to_be_visible()
    page.get_by_text("In words").click()
    expect(page.get_by_text("forked at iteration 10 of segment 1 of ended")).to_be_visible()
    page.get_by_role("link", name="ended").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("ended")
    assert all("422" in complaint for complaint in visitor.complaints)
    visitor.complaints.clear()


def test_a_dialog_keeps_the_focus_and_gives_it_back(quick: Platform, visit: Visit, ended: str) -> None:
    page = visit(quick.stack).open(f"/runs/{ended}")
    button = page.get_by_role("button", name="Roll back…").first
    button.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    for _ in range(12):
        page.keyboard.press("Tab")
        inside = "document.activeElement === document.body || !!document.activeElement.closest('dialog')"
        assert page.evaluate(inside), page.evaluate("document.activeElement.outerHTML")
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(button).to_be_focused()


def test_marks_on_the_ribbon_are_reached_by_arrow_keys(quick: Platform, visit: Visit, ended: str) -> None:
    page = visit(quick.stack).open(f"/runs/{ended}")
    marks = page.get_by_role("toolbar").first.get_by_role("button")
    expect(marks).to_have_count(3)
    marks.first.focus()
    page.keyboard.press("ArrowRight")
    expect(marks.nth(1)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("tab", name="Checkpoints")).to_have_attribute("aria-selected", "true")
    expect(page.locator("tr.target[data-checkpoint='10']")).to_be_visible()


def test_checkpoints_are_pinned_named_verified_sent_and_deleted(quick: Platform, visit: Visit, tmp_path: Path) -> None:
    run = quick.submit(15, "kept", checkpoints=KEEP_ALL)
    quick.wait_for(run, "succeeded")
    visitor = visit(quick.stack)
    page = visitor.open(f"/runs/{run}?tab=checkpoints")
    row = page.locator("[data-checkpoint='10']")

    row.get_by_role("button", name="Label of").click()
    page.keyboard.type("before the jump")
    page.keyboard.press("Enter")
    expect(row.get_by_role("button", name="Label of")).to_have_text("before the jump")
    row.get_by_role("button", name="Pin").click()
    expect(row.get_by_role("button", name="Unpin")).to_be_visible()
    expect(row.locator(".why")).to_contain_text("pinned")
    row.get_by_role("button", name="Verify").click()
    expect(page.get_by_text(re.compile("Whole: .* files"))).to_be_visible()

    with page.expect_download() as sent:
        row.get_by_role("link", name="All files").click()
    sent.value.save_as(tmp_path / "sent.tar")
    with tarfile.open(tmp_path / "sent.tar") as archive:
        assert any(name.endswith("manifest.json") for name in archive.getnames())

    page.get_by_role("button", name="What would go, and why").click()
    page.get_by_label("keep_last").fill("1")
    expect(page.locator("[data-goes]")).to_have_count(1)
    expect(page.locator("[data-goes='5']")).to_contain_text("no rule keeps it")

    row.get_by_role("button", name="Delete…").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Delete it").click()
    expect(dialog.get_by_role("alert")).to_contain_text("pinned")
    dialog.get_by_role("button", name="Close").click()
    page.locator("[data-checkpoint='5']").get_by_role("button", name="Delete…").click()
    dialog.get_by_role("button", name="Delete it").click()
    expect(page.locator("[data-checkpoint='5']")).to_have_count(0)
    kept = {item["iteration"]: item for item in quick.get(f"/v1/runs/{run}/checkpoints")["items"]}
    assert (kept[5]["status"], kept[10]["pinned"], kept[10]["label"]) == ("removed", True, "before the jump")
    assert all("409" in complaint for complaint in visitor.complaints), "the refused deletion"
    visitor.complaints.clear()


def test_a_damaged_checkpoint_is_found_and_marked(quick: Platform, visit: Visit) -> None:
    run = quick.submit(10, "damaged", checkpoints=KEEP_ALL)
    quick.wait_for(run, "succeeded")
    folder = quick.stack.data / "runs" / run / "segment-0001" / "checkpoints" / "iter-000005"
    (folder / "weights").write_bytes(b"x" * 100)
    page = visit(quick.stack).open(f"/runs/{run}?tab=checkpoints")
    row = page.locator("[data-checkpoint='5']")
    row.get_by_role("button", name="Verify").click()
    expect(page.get_by_text(re.compile("Damaged: .*weights"))).to_be_visible()
    expect(row.get_by_text("damaged", exact=True)).to_be_visible()
    expect(row.get_by_role("button", name="Roll back…")).to_be_disabled()
    expect(page.locator(".ribbon button.damaged")).to_have_count(1)


def test_a_run_pauses_saves_and_goes_on(quick: Platform, visit: Visit) -> None:
    run = quick.submit(400, "paused")
    quick.wait_for_iteration(run, 2)
    page = visit(quick.stack).open(f"/runs/{run}")
    header = page.locator("header").last
    header.get_by_role("button", name="Save checkpoint").click()
    expect(page.locator("[data-command=checkpoint]")).to_have_attribute("data-status", "done")
    header.get_by_role("button", name="Pause").click()
    expect(header.locator("[data-state]")).to_have_text("paused")
    header.get_by_role("button", name="Resume").click()
    expect(header.locator("[data-state]")).to_have_text("running", timeout=DONE_MS)
    # Asked for at an iteration that saves anyway, it is the schedule's.
    assert {item["reason"] for item in quick.get(f"/v1/runs/{run}/checkpoints")["items"]} & {"command", "schedule"}
    quick.stop(run)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
def test_dialogs_and_tabs_are_accessible_and_fit(
    quick: Platform, visit: Visit, ended: str, scheme: str, width: int
) -> None:
    visitor = visit(quick.stack, color_scheme=scheme, viewport={"width": width, "height": 844})
    page = visitor.open(f"/runs/{ended}?tab=checkpoints")
    page.locator("[data-checkpoint]").first.wait_for()
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found: list[str] = []

    def look(what: str) -> None:
        page.wait_for_timeout(300)
        found.extend(f"{what}: {line}" for line in page.evaluate(VIOLATIONS))
        wider = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        if wider > 0:
            found.append(f"{what}: {wider} px wider than the screen")

    page.get_by_role("button", name="What would go, and why").click()
    look("checkpoints")
    page.locator("[data-checkpoint]").first.get_by_role("button", name="Delete…").click()
    look("delete dialog")
    page.keyboard.press("Escape")
    for name in ("Roll back", "Fork"):
        page.get_by_role("button", name=f"{name}…").first.click()
        dialog = page.get_by_role("dialog")
        change(dialog, 1, "kl.coef", "0.3")
        expect(dialog.locator("[data-change='kl.coef']")).to_be_visible()
        look(f"{name} dialog")
        page.keyboard.press("Escape")
    page.get_by_role("tab", name="Lineage").click()
    page.locator("[data-lineage]").wait_for()
    page.get_by_text("In words").click()
    look("lineage")
    assert found == []
