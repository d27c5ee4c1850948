"""Kept responses with their token records: what the page shows of a rollout, number by number."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ppo_core.evaluation.held_out import Answers
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


def held_out_records(answers: Answers) -> list[dict[str, Any]]:
    """All held-out answers: their texts are what an evaluation is made of."""
    return [
        {
            "kind": "held_out",
            "index": row,
            "prompt": answers.prompts[row],
            "response": answers.responses[row],
            "score": answers.scores[row],
            "penalized_score": None,
            "length": len(answers.ids[row]),
            "finish_reason": answers.finish_reasons[row],
            "tokens": {"ids": answers.ids[row]},
        }
        for row in range(len(answers.prompts))
    ]


def _row(grid: Tensor, mask: Tensor, row: int) -> list[float]:
    values: list[float] = grid[row][mask[row]].tolist()
    return values
