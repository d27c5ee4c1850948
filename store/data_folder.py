"""Which folder is the platform's: the one whose id stands in the database, named by who came first.

A folder is known by an id that lies in it, so it may be mounted anywhere, moved and copied. A process that sees another
one would train without the checkpoints that the others see, and so takes no run.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from store.models import DataFolder

ID_FILE = "folder-id"


def folder_fault(session: Session, data_dir: Path, folder_id: str, seen_by: str) -> str | None:
    """What is wrong with the data folder that `seen_by` sees; None where it is the platform's.

    The first folder that is asked about becomes the platform's.
    """
    named = insert(DataFolder).values(folder_id=folder_id, named_by=seen_by)
    session.execute(named.on_conflict_do_nothing())
    known = session.get_one(DataFolder, 1, populate_existing=True)
    if known.folder_id == folder_id:
        return None
    return (
        f"PPO_DATA_DIR {data_dir} is another folder ({folder_id}) than the platform's ({known.folder_id}, named by "
        f"{known.named_by} on {known.named_at:%Y-%m-%d}): mount that one there, or, if this one replaces it, write "
        f"{known.folder_id} into {data_dir / ID_FILE}."
    )
