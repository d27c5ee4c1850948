"""The platform's alert rules in a browser: set by an admin, filled into a spec that leaves them out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import yaml
from playwright.sync_api import expect

from tests.web.conftest import Platform, Visitor

pytestmark = pytest.mark.browser

Visit = Callable[..., Visitor]
KL = "kl/ref_token"


def test_a_band_is_set_shown_before_and_stored_with_a_run(platform: Platform, visit: Visit) -> None:
    visitor = visit(platform.stack)
    page = visitor.open("/settings")
    row = page.locator(f"[data-rule='{KL}']")
    row.get_by_role("combobox").select_option("own")
    bound = row.get_by_role("textbox", name="healthy to")
    bound.fill("high")
    page.get_by_role("button", name="Save the rules").click()
    expect(row).to_contain_text("'high'")
    assert all("422" in complaint for complaint in visitor.complaints)
    visitor.complaints.clear()
    for name in ("red below", "healthy from", "red above"):
        row.get_by_role("textbox", name=name).fill("")
    bound.fill("0.75")
    page.get_by_label("A metric in the red").select_option("pause")
    page.get_by_role("button", name="Save the rules").click()
    expect(page.get_by_text("Saved.")).to_be_visible()
    page.reload()
    expect(row.get_by_role("textbox", name="healthy to")).to_have_value("0.75")
    page.goto(f"{platform.stack.url}/runs/new")
    spec = platform.spec(2, "ruled", alerts={"on_story": "note"})
    page.get_by_label("Run spec in YAML").fill(yaml.safe_dump(spec))
    page.get_by_role("button", name="Check", exact=True).click()
    expect(page.get_by_text("From the platform's alert rules:")).to_contain_text(f"alerts.bands.{KL}")
    page.get_by_role("button", name="Submit").click()
    page.wait_for_url("**/runs/r-*")
    alerts = platform.get(f"/v1/runs/{page.url.rstrip('/').split('/')[-1].split('?')[0]}")["spec"]["alerts"]
    assert (alerts["on_critical"], alerts["bands"][KL]["high"]) == ("pause", 0.75)
    own = platform.submit(2, "own", alerts={"on_critical": "note", "bands": {KL: None}})
    alerts = platform.get(f"/v1/runs/{own}")["spec"]["alerts"]
    assert (alerts["on_critical"], alerts["bands"][KL]) == ("note", None)
