"""Judge gates in a browser, on a platform whose trainer is scripted: seen with interval, pairs and what followed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.web.conftest import Platform, Visitor, scripted_platform
from tests.web.test_pages import AXE, VIOLATIONS

pytestmark = pytest.mark.browser

JUDGED: dict[str, Any] = {
    "data": {"prompts": "prompts.jsonl", "held_out": "prompts.jsonl"},
    "gate": {"judge": {"kind": "python", "name": "vader"}},
}


def gate(wins: int, ties: int, losses: int, low: float, high: float, **more: Any) -> dict[str, Any]:
    against = {"wins": wins, "ties": ties, "losses": losses, "rate": (wins + ties / 2) / 128, "low": low, "high": high}
    said = {"asked": 120, "swayed": 7, "unreadable": 0}
    rise = {"mean": 0.5, "standard_error": 0.1}
    told = {"against_last": {**against, **said}, "against_start": against, "rise": rise, "num_suspect": 0}
    return {**told, "tripped": False, "explanation": "The gate is passed: all is well.", **more}


GATES = [
    [4, gate(74, 0, 54, 0.4915, 0.6602)],
    [8, gate(40, 20, 68, 0.3105, 0.4772, tripped=True, explanation="The gate has tripped: the score rose.")],
]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with scripted_platform(tmp_path_factory, iteration_s=0.05, gates=GATES) as platform:
        yield platform


@pytest.mark.parametrize("width", [1400, 390])
def test_the_gates_of_a_run_are_shown_with_their_evidence(
    judged: Platform, visit: Callable[..., Visitor], width: int
) -> None:
    run = judged.submit(10, "judged", **JUDGED)
    judged.wait_for(run, "succeeded")
    page = visit(judged.stack, viewport={"width": width, "height": 900}).open(f"/runs/{run}?tab=alerts")
    section = page.locator("[data-gates='2']")
    rows = section.locator("[data-gate]")
    expect(rows).to_have_count(2)
    expect(rows.nth(0)).to_contain_text("tripped")
    expect(rows.nth(0)).to_contain_text("39 %")
    expect(rows.nth(0)).to_contain_text("0.310 to 0.477")
    expect(rows.nth(0)).to_contain_text("40 won, 20 tied, 68 lost")
    expect(rows.nth(1)).to_contain_text("passed")
    expect(rows.nth(1)).to_contain_text("58 %")
    expect(rows.nth(1)).to_contain_text("+0.500 ± 0.200")
    expect(section).to_contain_text("The gate has tripped: the score rose.")
    asked = rows.nth(1).locator("[title*='asked about in both orders']")
    expect(asked).to_have_attribute("title", "120 pairs asked about in both orders; 7 decided by their place, so tied")
    page.evaluate(AXE.read_text())
    assert page.evaluate(VIOLATIONS) == []


def test_a_run_before_its_first_gate_says_so_and_one_without_a_judge_shows_none(
    judged: Platform, visit: Callable[..., Visitor]
) -> None:
    early, without = judged.submit(2, "early", **JUDGED), judged.submit(2, "without")
    visitor = visit(judged.stack)
    for run in (early, without):
        judged.wait_for(run, "succeeded")
    expect(visitor.open(f"/runs/{early}?tab=alerts").get_by_text("No gate has been held yet.")).to_be_visible()
    page = visitor.open(f"/runs/{without}?tab=alerts")
    expect(page.get_by_text("No alert is open.")).to_be_visible()
    expect(page.locator("[data-gates]")).to_have_count(0)
