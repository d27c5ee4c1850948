"""The table of docs/reliability.md, made from the outcomes that were seen: `python -m tests.faults.report`.

Outcomes are lines of `outcomes.jsonl` beside this file; the matrix (`test_matrix.py`) adds to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.faults.faults import FAULTS, Fault
from tests.faults.record import read_outcomes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
BEGIN = "<!-- made by python -m tests.faults.report: begin -->"
END = "<!-- made by python -m tests.faults.report: end -->"


def _cell(outcomes: Sequence[dict[str, Any]]) -> str:
    """`15 of 15: succeeded` and, where something was found, what."""
    if not outcomes:
        return "not yet seen"
    good = [outcome for outcome in outcomes if not outcome["violations"]]
    ends = Counter(f"{each['state']}, attempt {each['attempts']}" for each in good)
    text = f"{len(good)} of {len(outcomes)}"
    if ends:
        text += ": " + "; ".join(f"{end} ({number})" for end, number in sorted(ends.items()))
    wrong = sorted({sentence for each in outcomes for sentence in each["violations"]})
    return text + "".join(f"<br>**{sentence}**" for sentence in wrong).replace("|", "\\|")


def _rows(outcomes: Sequence[dict[str, Any]]) -> Iterator[str]:
    for fault in FAULTS:
        seen = [outcome for outcome in outcomes if outcome["fault"] == fault.name]
        scripted = [outcome for outcome in seen if outcome["trainer"] == "scripted"]
        real = [outcome for outcome in seen if outcome["trainer"] == "real"]
        worst = f"{max(each['seconds'] for each in scripted):.0f}" if scripted else "-"
        cells = [fault.name, fault.how, _phases(fault, scripted), _cell(scripted), worst]
        cells += [_cell(real) if fault.real else "-", _dates(seen)]
        yield "| " + " | ".join(cells) + " |"


def _phases(fault: Fault, scripted: Sequence[dict[str, Any]]) -> str:
    numbers = Counter(outcome["phase"] for outcome in scripted)
    names = [*fault.phases, *sorted(set(numbers) - set(fault.phases))]
    return ", ".join(f"{name} {numbers[name]}" for name in names)


def _dates(seen: Iterable[dict[str, Any]]) -> str:
    return ", ".join(sorted({outcome["date"] for outcome in seen})) or "-"


def table(outcomes: Sequence[dict[str, Any]]) -> str:
    """The table with its marker lines."""
    head = "| fault | how | struck in (runs) | as expected, scripted trainer | worst s | real trainer | date |"
    return "\n".join([BEGIN, head, "|---|---|---|---|---|---|---|", *_rows(outcomes), END])


def on_page(page: str, made: str, begin: str = BEGIN, end: str = END) -> str:
    """The page with this table in place of the one it has between these lines."""
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return before + made + after


def main() -> None:
    PAGE.write_text(on_page(PAGE.read_text(encoding="utf-8"), table(read_outcomes())), encoding="utf-8")


if __name__ == "__main__":
    main()
