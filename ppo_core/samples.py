"""Kept responses with their token records: what the page shows of a rollout, number by number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ppo_core.evaluation.held_out import Answers, HeldGate
from ppo_core.iteration import IterationReport, Models


def rollout_records(report: IterationReport, models: Models, num: int) -> list[dict[str, Any]]:
    """The first `num` usable rows of the rollout, with every per-token number of the shifted grid."""
    rollout = report.rollout
    grids = {
        "logprobs": report.old.logprobs,
        "ref_logprobs": report.ref_logprobs,
        "kl": report.kl_to_ref,
        "rewards": report.rewards,
        "values": report.old.values,
        "advantages": report.advantages,
        "returns": report.returns,
    }
    records = []
    for row in range(min(num, rollout.num_rows)):
        ids = rollout.response_ids(row)
        records.append(
            {
                "kind": "train",
                "index": row,
                "prompt": rollout.prompt_texts[row],
                "response": rollout.response_texts[row],
                "score": float(report.scores.raw[row]),
                "penalized_score": float(report.scores.penalized[row]),
                "length": len(ids),
                "finish_reason": rollout.finish_reasons[row],
                "tokens": {
                    "ids": ids,
                    "texts": [models.decode([token]) for token in ids],
                    **{name: _row(grid, rollout.response_mask, row) for name, grid in grids.items()},
                },
            }
        )
    return records


def held_out_records(
    answers: Answers, decode: Callable[[list[int]], str], gate: HeldGate | None = None
) -> list[dict[str, Any]]:
    """All held-out answers: their texts are what an evaluation is made of, and what the judge said of each.

    Args:
        decode: ids to text.
        gate: the gate that was held with them; a judge that compares speaks in it alone.
    """
    num = len(answers.prompts)
    judged = answers.judge_scores or [None] * num
    last, start = (said.preferences for said in gate.asked) if gate is not None and gate.asked else ([], [])
    return [
        {
            "kind": "held_out",
            "index": row,
            "prompt": answers.prompts[row],
            "response": answers.responses[row],
            "score": answers.scores[row],
            "penalized_score": None,
            "judge_score": judged[row],
            "judge_against_last": last[row] if row < len(last) else None,
            "judge_against_start": start[row] if row < len(start) else None,
            "length": len(answers.ids[row]),
            "finish_reason": answers.finish_reasons[row],
            "tokens": {"ids": answers.ids[row], "texts": [decode([token]) for token in answers.ids[row]]},
        }
        for row in range(num)
    ]


def _row(grid: Tensor, mask: Tensor, row: int) -> list[float]:
    values: list[float] = grid[row][mask[row]].tolist()
    return values
