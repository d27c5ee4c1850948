"""What becomes of a run whose trainer or supervisor was lost: back to the queue while the budget lasts, else failed.

A kill, a stop or a roll back that was asked is carried out instead.

Only infrastructure counts against the budget: a trainer that says why it ended is not retried.
"""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import func
from sqlalchemy.orm import Session

from store.commands import carry_out_kill, finish_open, open_commands
from store.models import Run
from store.rollback import go_back, open_rollback
from store.runs import locked_run, transition

# The first loss is mended at once, most are a machine's passing trouble; later ones wait for the trouble to pass.
WAITS_S = (0, 15, 60)


def settle(session: Session, run_id: str, *, expect_token: int, code: str, detail: str, hint: str | None = None) -> Run:
    """Decide about a `recovering` run whose processes are proved gone. Its lease ends and its slots are free.

    Raises:
        LeaseLost, RunNotFound
        IllegalMove: the run is not recovering.
    """
    run = locked_run(session, run_id, expect_token=expect_token)
    killed = carry_out_kill(session, run, detail)
    if killed is not None:
        return killed
    if any(command.kind == "stop" for command in open_commands(session, run_id)):
        lost = f"{detail}; what it had not saved is lost"
        run = transition(session, run_id, "stopped", reason_code=code, reason_detail=lost, hint=hint)
        finish_open(session, run_id, {"stop": ("done", lost)})
        return run
    back = open_rollback(session, run_id)
    if back is not None and back.verified:
        went = go_back(session, run_id, back, f"{detail}; what it had not saved is lost")
        if went is not None:
            return went
    failures = run.infrastructure_failures + 1
    if failures > len(WAITS_S):
        times = f"{detail} (lost {failures} times, {len(WAITS_S)} are mended)"
        run = transition(
            session,
            run_id,
            "failed",
            reason_code=code,
            reason_detail=times,
            hint=hint,
            infrastructure_failures=failures,
        )
        finish_open(session, run_id, {})
        return run
    wait_s = WAITS_S[failures - 1]
    return transition(
        session,
        run_id,
        "queued",
        reason_code=code,
        reason_detail=detail,
        hint=hint,
        infrastructure_failures=failures,
        not_before=func.now() + timedelta(seconds=wait_s) if wait_s else None,
    )
