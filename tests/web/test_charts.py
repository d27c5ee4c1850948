"""The charts in a browser, of a run that has every metric: each is drawn, none before it comes into sight."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Page, Request, expect

from ppo_core.registry import METRICS
from tests.alert_news import news
from tests.web.conftest import Platform, Visitor, scripted_platform
from tests.web.test_alerts import is_accessible

pytestmark = pytest.mark.browser

Visit = Callable[..., Visitor]
ITERATIONS = 110
MEMBERS = {
    "reward/source_mean/*": ["reward/source_mean/0", "reward/source_mean/1"],
    "reward/invalid/*": ["reward/invalid/nan", "reward/invalid/timeout"],
    "policy/approx_kl/epoch_*": [f"policy/approx_kl/epoch_{n}" for n in range(1, 7)],
    "policy/clip_fraction/epoch_*": [f"policy/clip_fraction/epoch_{n}" for n in range(1, 7)],
}
NAMES = [member for name in METRICS for member in MEMBERS.get(name, [name])]
GAP = news(
    "band:rollout/engine_gap_mean", raised=60, onset=58, metrics=["rollout/engine_gap_mean"], title="Gap tripled"
)
# A chart that is drawn has a canvas; the one of a panel that is far away has none.
DRAWN = """() => [...document.querySelectorAll("[data-panel]")].filter((panel) => panel.querySelector("canvas"))
    .map((panel) => panel.dataset.panel)"""


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with scripted_platform(tmp_path_factory, iteration_s=0.01, also=NAMES, alerts=[GAP]) as platform:
        yield platform


@pytest.fixture(scope="module")
def run(full: Platform) -> str:
    run = full.submit(ITERATIONS, "everything")
    full.wait_for(run, "succeeded")
    return run


class Asked:
    """Names of the metrics that a page's queries ask for, one list a query."""

    def __init__(self, page: Page) -> None:
        self.queries: list[list[str]] = []
        page.on("request", self._note)

    def _note(self, request: Request) -> None:
        address = urlsplit(request.url)
        if address.path == "/v1/metrics/query":
            self.queries.append(parse_qs(address.query)["names"][0].split(","))

    def names(self) -> list[str]:
        return [name for query in self.queries for name in query]


def open_folds(page: Page) -> None:
    expect(page.locator("[data-fold=more-system]")).to_be_visible()
    for fold in page.locator("[data-fold] summary").all():
        fold.click()


def test_every_metric_is_drawn_once_it_is_in_sight_and_asked_for_once(full: Platform, run: str, visit: Visit) -> None:
    visitor = visit(full.stack)
    asked = Asked(visitor.page)
    page = visitor.open(f"/runs/{run}")
    expect(page.locator("[data-panel=reward] [data-points]")).to_have_attribute("data-points", str(ITERATIONS))
    folded = {"reward/length_slope", "rollout/engine_gap_mean", "policy/approx_kl/epoch_2", "limit/fraction"}
    assert not folded & set(asked.names())
    open_folds(page)
    for name in NAMES:
        value = page.locator(f"[data-metric='{name}']")
        value.scroll_into_view_if_needed()
        expect(value).to_have_text(re.compile(r"\d"))
    assert sorted(asked.names()) == sorted(NAMES)
    assert sorted(page.evaluate(DRAWN)) == sorted(
        str(panel.get_attribute("data-panel")) for panel in page.locator("[data-panel]").all()
    )


def test_a_panel_out_of_sight_is_neither_asked_for_nor_drawn(full: Platform, run: str, visit: Visit) -> None:
    visitor = visit(full.stack, viewport={"width": 390, "height": 700})
    asked = Asked(visitor.page)
    page = visitor.open(f"/runs/{run}")
    expect(page.locator("[data-panel=reward] [data-points]")).to_have_attribute("data-points", str(ITERATIONS))
    page.wait_for_timeout(300)
    assert "memory/peak_gib" not in asked.names()
    assert "speed" not in page.evaluate(DRAWN)
    page.locator("[data-panel=speed]").scroll_into_view_if_needed()
    expect(page.locator("[data-panel=speed] [data-points]")).to_have_attribute("data-points", str(ITERATIONS))
    assert "memory/peak_gib" in asked.names()
    assert "speed" in page.evaluate(DRAWN)


def test_a_folded_alert_is_told_on_the_fold_and_the_panel_explains_its_metrics(
    full: Platform, run: str, visit: Visit
) -> None:
    page = visit(full.stack).open(f"/runs/{run}")
    fold = page.locator("[data-fold=more-generation]")
    expect(fold.locator("summary")).to_contain_text("1 open alert")
    expect(page.locator("[data-fold=more-kl] summary")).not_to_contain_text("alert")
    fold.locator("summary").click()
    expect(page.locator("[data-panel=engine-gap] [data-alerts]")).to_have_attribute("data-alerts", "1")
    metric = METRICS["rollout/engine_gap_mean"]
    page.locator("[data-panel=engine-gap]").get_by_role("button", name=metric.title, exact=True).focus()
    tip = page.get_by_role("tooltip")
    assert metric.band is not None
    for text in (metric.formula, metric.unit, metric.band.text, metric.meaning, metric.remedy):
        expect(tip).to_contain_text(text)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_panels_are_accessible(full: Platform, run: str, visit: Visit, theme: str) -> None:
    page = visit(full.stack, color_scheme=theme, viewport={"width": 390, "height": 844}).open(f"/runs/{run}")
    open_folds(page)
    page.locator("[data-panel=data]").scroll_into_view_if_needed()
    expect(page.locator("[data-panel=data] [data-points]")).to_have_attribute("data-points", str(ITERATIONS))
    is_accessible(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
