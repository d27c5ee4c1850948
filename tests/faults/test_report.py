"""docs/reliability.md shows the outcomes that were written down, in the table that the suite makes."""

from __future__ import annotations

import pytest

from tests.faults.faults import FAULTS, Fault
from tests.faults.record import read_outcomes
from tests.faults.report import BEGIN, END, PAGE, on_page, table

page = PAGE.read_text(encoding="utf-8")


def test_the_page_has_the_table_of_the_outcomes() -> None:
    """After `python -m tests.faults.report` it has."""
    assert (page.count(BEGIN), page.count(END)) == (1, 1)
    assert on_page(page, table(read_outcomes())) == page


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_of_the_list_stands_on_the_page(fault: Fault) -> None:
    assert f"\n| {fault.name} |" in page


def test_a_fault_that_was_found_would_be_shown() -> None:
    seen = {"fault": FAULTS[0].name, "phase": "loading", "trainer": "scripted", "state": "failed", "attempts": 4}
    made = table([{**seen, "seconds": 3.2, "violations": ["is failed"], "date": "2026-11-30"}])
    assert "0 of 1<br>**is failed**" in made
