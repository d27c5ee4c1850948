"""How the run's page lies at the width of a small laptop: nothing hidden, nothing that moves away from the pointer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import expect

from tests.web.conftest import Platform, Visitor, scripted_platform

pytestmark = pytest.mark.browser

Visit = Callable[..., Visitor]
LAPTOP = {"width": 1280, "height": 800}


def test_the_table_of_checkpoints_hides_no_column_at_1280(platform: Platform, visit: Visit) -> None:
    run = platform.submit(10)
    platform.wait_for(run, "succeeded")
    page = visit(platform.stack, viewport=LAPTOP).open(f"/runs/{run}?tab=checkpoints")
    path = page.locator("[data-checkpoint='10'] code")
    expect(path).to_have_text("iter-000010")
    expect(path).to_have_attribute("title", "segment-0001/checkpoints/iter-000010")
    box = page.get_by_role("region", name="Checkpoints")
    assert box.evaluate("box => box.scrollWidth - box.clientWidth") == 0


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """Its trainers save first after 10 s, so that a page is open before."""
    with scripted_platform(tmp_path_factory, iteration_s=2.0) as platform:
        yield platform


@pytest.mark.parametrize("width", [1280, 390])
def test_the_buttons_stay_where_they_are_when_facts_come_up(slow: Platform, visit: Visit, width: int) -> None:
    visitor = visit(slow.stack, viewport={"width": width, "height": 800})
    run = slow.submit(3000, "toy-reviews-length-penalty", resources={"priority": 3})
    page = visitor.open(f"/runs/{run}")
    header = page.locator("header", has=page.get_by_role("heading", level=1))
    expect(header.get_by_text("priority")).to_be_visible()
    stop = header.get_by_role("button", name="Stop")
    expect(header.locator("[data-state]")).to_have_text("running")
    expect(header.get_by_text("saved")).to_have_count(0)
    before = stop.bounding_box()
    expect(header.get_by_text("saved")).to_be_visible(timeout=30_000)
    assert stop.bounding_box() == before
    slow.stop(run)


@pytest.mark.parametrize("width", [1280, 390])
def test_find_stands_beside_its_field(platform: Platform, visit: Visit, width: int) -> None:
    run = platform.submit(2)
    platform.wait_for(run, "succeeded")
    page = visit(platform.stack, viewport={"width": width, "height": 800}).open(f"/runs/{run}?tab=logs")
    # Measured in one go: what is loaded above moves both.
    beside = """form => {
        const [field, find] = ["input", "button"].map((tag) => form.querySelector(tag).getBoundingClientRect());
        return field.right <= find.left && Math.abs(field.top + field.bottom - find.top - find.bottom) <= 2;
    }"""
    assert page.get_by_role("search").evaluate(beside)
