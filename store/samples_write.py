"""Kept responses on their way in: a samples file of the run directory becomes rows. Text is data, by one rule."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from store.models import Sample
from store.storable import storable_json, storable_text

# What else is known of a whole response, each a number or null.
BESIDE_THE_SCORE = ("penalized_score", "judge_score", "judge_against_last", "judge_against_start")


class SamplesUnreadable(Exception):
    """A samples file that the journal names is missing, outside its segment, or not what it should be."""


def write_samples(session: Session, run_id: str, segment: int, iteration: int, folder: Path, path: str) -> None:
    """Store the samples of the file `path` below the segment's `folder`; those that are stored already stay.

    Raises:
        SamplesUnreadable
    """
    file = (folder / path).resolve()
    if not file.is_relative_to(folder.resolve()):
        raise SamplesUnreadable(f"{path} lies outside the segment's folder")
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        rows = [_row(json.loads(line)) for line in lines if line.strip()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SamplesUnreadable(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    for row in rows:
        row |= {"run_id": run_id, "segment": segment, "iteration": iteration}
    if rows:
        session.execute(insert(Sample).on_conflict_do_nothing(), rows)


def _row(sample: dict[str, Any]) -> dict[str, Any]:
    score = sample.get("score")
    return {
        "kind": storable_text(str(sample["kind"])),
        "index": int(sample["index"]),
        "prompt": storable_text(sample["prompt"]),
        "response": storable_text(sample["response"]),
        "score": float(score) if score is not None and math.isfinite(score) else None,
        "length": int(sample["length"]),
        "finish_reason": storable_text(str(sample["finish_reason"])),
        # What has no column of its own goes with the token record.
        "tokens": storable_json({**sample.get("tokens", {}), **{name: sample.get(name) for name in BESIDE_THE_SCORE}}),
    }
