"""What a run's rows of checkpoints and its files say differently."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from ppo_core.errors import CheckpointError
from ppo_core.rundir import check_stored, segments
from store.models import Checkpoint


def disagreements(sessions: sessionmaker[Session], run_dir: Path) -> Iterator[str]:
    """A sentence for each; none when every good row is whole on disk and nothing else lies there."""
    with sessions() as session:
        found = session.scalars(select(Checkpoint).where(Checkpoint.run_id == run_dir.name))
        rows = {row.path: row for row in found}
    on_disk = {
        path.relative_to(run_dir).as_posix() for segment in segments(run_dir) for path in segment.checkpoints.iterdir()
    }
    for path, row in rows.items():
        if row.status == "good":
            try:
                check_stored(run_dir, path, row.manifest_sha256)
            except CheckpointError as error:
                yield f"{path} is good, but {error}"
        elif row.status == "removed" and (path in on_disk or not row.files_gone):
            yield f"{path} is removed and has files"
    yield from (f"{path} has no row" for path in on_disk - rows.keys())
