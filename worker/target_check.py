"""Compares the checkpoint that a run shall go back to with what was recorded of it, in a thread: it may take minutes.

Both who can carry a roll back out use it, the supervisor and the reconciler. The answer is in the command's status, so
whoever comes later need not compare again.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from sqlalchemy.orm import Session

from ppo_core.errors import CheckpointError
from ppo_core.rundir import check_stored
from store.commands import mark_finished
from store.rollback import OpenRollback, TargetUnusable, confirm_target, fail_rollback, usable

log = logging.getLogger(__name__)

LATE = "its checkpoint could not be compared with its manifest in time; nothing of the run was changed"
# What stands until a comparison has come to its end: one that breaks off has shown nothing to be whole.
BROKEN_OFF = "comparing it with its manifest broke off, and the log of whoever compared it says why; compare it again"
UNREADABLE = "it could not be read, so nobody knows whether it is whole: {}; ask again when the disk answers"


# Of one process. Others wait: each reads a whole checkpoint, and more at once only make all of them later.
MOST_AT_ONCE = 4


class TargetCheck:
    """One comparison, begun when this is made.

    `fault` says why the checkpoint cannot be used, None once it was found whole; `damaged` whether that is the
    checkpoint's own fault, and not a disk's that did not answer.
    """

    def __init__(self, run_dir: Path, path: str, manifest_sha256: str) -> None:
        self.fault: str | None = BROKEN_OFF
        self.damaged = False
        self._finished = threading.Event()
        arguments = (run_dir, path, manifest_sha256)
        threading.Thread(target=self._compare, args=arguments, name="verify", daemon=True).start()

    @property
    def finished(self) -> bool:
        return self._finished.is_set()

    def _compare(self, run_dir: Path, path: str, manifest_sha256: str) -> None:
        try:
            check_stored(run_dir, path, manifest_sha256)
            self.fault = None
        except CheckpointError as error:
            self.fault, self.damaged = str(error), True
        except OSError as error:
            self.fault = UNREADABLE.format(error)
        finally:
            self._finished.set()


class TargetChecks:
    """The comparisons of this process, by command."""

    def __init__(self) -> None:
        self._checks: dict[str, TargetCheck] = {}

    def begin(self, command_id: str, run_dir: Path, path: str, manifest_sha256: str) -> TargetCheck | None:
        """Begin one; None when too many are under way."""
        if sum(not check.finished for check in self._checks.values()) >= MOST_AT_ONCE:
            return None
        check = self._checks[command_id] = TargetCheck(run_dir, path, manifest_sha256)
        return check

    def settled(self, session: Session, asked: OpenRollback, run_dir: Path, remaining_s: float) -> bool:
        """Whether the checkpoint is known to be whole; called again until it is, or the roll back has failed.

        Writes what was found in the caller's transaction.
        """
        command = asked.command
        if asked.verified:
            return True
        try:
            target = usable(asked.target, command.payload["checkpoint"])
        except TargetUnusable as error:
            fail_rollback(session, asked, str(error), damaged=False)
            return False
        check = self._checks.get(command.id) or self.begin(command.id, run_dir, target.path, target.manifest_sha256)
        if check is None or not check.finished:
            if remaining_s <= 0:
                mark_finished(session, command.id, "timed_out", LATE)
            return False
        del self._checks[command.id]
        if check.fault is not None:
            log.error("run %s does not go back to %s: %s", command.run_id, target.id, check.fault)
            fail_rollback(session, asked, check.fault, damaged=check.damaged)
            return False
        confirm_target(session, asked)
        return True
