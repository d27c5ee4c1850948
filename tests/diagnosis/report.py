"""The tables of docs/diagnosis.md, made of what runs told: `python -m tests.diagnosis.report`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.diagnosis.detection import FAULTS, HEALTHY, Planted, Told, read_seen
from tests.faults.report import on_page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "diagnosis.md"
BEGIN = "<!-- made by python -m tests.diagnosis.report: begin -->"
END = "<!-- made by python -m tests.diagnosis.report: end -->"

Seen = Sequence[tuple[Told, str]]


def table(seen: Seen) -> str:
    """Both tables, with their marker lines."""
    faults = "| fault | story | first, of seeds | by iteration | at iterations | others first | date |"
    healthy = "| healthy run | seeds | iterations | stories | gates (tripped) | alerts of bands | date |"
    rows = [faults, "|---|---|---|---|---|---|---|", *(_of_fault(fault, seen) for fault in FAULTS), ""]
    rows += [healthy, "|---|---|---|---|---|---|---|", *(_of_healthy(kind, how, seen) for kind, how in HEALTHY.items())]
    return "\n".join([BEGIN, *rows, END])


def _of_fault(fault: Planted, seen: Seen) -> str:
    told = [each for each, _ in seen if each.kind == fault.fault]
    found = [each for each in told if each.finds(fault)]
    others = Counter(each.stories[0][0] if each.stories else "none" for each in told if not each.finds(fault))
    cells = [fault.how, f"`{fault.fault}`", f"{len(found)} of {len(told)}", str(fault.within)]
    cells += [", ".join(str(at) for at in sorted(each.stories[0][1] for each in found)) or "-", _counted(others)]
    return _row(cells, fault.fault, seen)


def _of_healthy(kind: str, how: str, seen: Seen) -> str:
    told = [each for each, _ in seen if each.kind == kind]
    stories = Counter(name for each in told for name, _ in each.stories)
    bands = Counter(rule.removeprefix("band:") for each in told for rule, _ in each.raised if rule.startswith("band:"))
    cells = [f"{kind}: {how}", str(len(told)), str(sum(each.iterations for each in told)), _counted(stories)]
    gates = f"{sum(each.gates for each in told)} ({sum(each.gate_tripped for each in told)})"
    cells += [gates, _counted(bands)]
    return _row(cells, kind, seen)


def _counted(numbers: Counter[str]) -> str:
    return ", ".join(f"`{name}` {number}" for name, number in sorted(numbers.items())) or "none"


def _row(cells: list[str], kind: str, seen: Seen) -> str:
    dates: Iterator[str] = (date for told, date in seen if told.kind == kind)
    return "| " + " | ".join([*cells, ", ".join(sorted(set(dates))) or "not yet seen"]) + " |"


def main() -> None:
    PAGE.write_text(on_page(PAGE.read_text(encoding="utf-8"), table(read_seen()), BEGIN, END), encoding="utf-8")


if __name__ == "__main__":
    main()
