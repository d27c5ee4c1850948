"""Does the database hold exactly what a run's journals say? Every segment, iteration and metric is looked at."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from ppo_core.rundir import all_events, segments
from store.models import MetricDef, MetricPoint

Key = tuple[int, int, str]  # segment, iteration, metric
SHOWN = 5


@dataclass(frozen=True)
class Comparison:
    """How many values both have, and the first differences, as lines."""

    num_equal: int
    differences: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        if self.equal:
            return f"all {self.num_equal} metric values of the journal are in Postgres, and no others"
        shown = "\n  ".join(self.differences[:SHOWN])
        return f"{len(self.differences)} metric values differ between journal and Postgres:\n  {shown}"


def journal_values(run_dir: Path) -> dict[Key, float | None]:
    """Every metric value of a run's journals; None where it is undefined."""
    values: dict[Key, float | None] = {}
    for segment in segments(run_dir):
        number = segment.read_start().segment
        for event in all_events(segment.journal):
            if event.type == "metrics":
                for name, value in event.payload.items():
                    values[number, event.iteration, name] = value
    return values


def stored_values(session: Session, run_id: str) -> dict[Key, float | None]:
    """Every metric value of a run in the database."""
    statement = (
        select(MetricPoint.segment, MetricPoint.iteration, MetricDef.name, MetricPoint.value)
        .join(MetricDef, MetricDef.id == MetricPoint.metric_id)
        .where(MetricPoint.run_id == run_id)
    )
    return {(segment, iteration, name): value for segment, iteration, name, value in session.execute(statement)}


def compare_metrics(session: Session, run_id: str, run_dir: Path) -> Comparison:
    """Compare the journals of a run with its rows, bit for bit; NaN equals NaN."""
    journal, stored = journal_values(run_dir), stored_values(session, run_id)
    differences = []
    num_equal = 0
    for key in sorted(journal.keys() | stored.keys()):
        if key not in stored:
            differences.append(f"{_name(key)}: {journal[key]!r} in the journal, missing in Postgres")
        elif key not in journal:
            differences.append(f"{_name(key)}: {stored[key]!r} in Postgres, missing in the journal")
        elif not _same(journal[key], stored[key]):
            differences.append(f"{_name(key)}: {journal[key]!r} in the journal, {stored[key]!r} in Postgres")
        else:
            num_equal += 1
    return Comparison(num_equal, tuple(differences))


def _name(key: Key) -> str:
    segment, iteration, metric = key
    return f"segment {segment}, iteration {iteration}, {metric}"


def _same(left: float | None, right: float | None) -> bool:
    if left is None or right is None:
        return left is right
    return float(left) == float(right) or (math.isnan(left) and math.isnan(right))
