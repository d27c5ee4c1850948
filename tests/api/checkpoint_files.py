"""A stored run with checkpoints on disk, for tests of whoever reads or removes them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.orm import Session, sessionmaker

from ppo_core.rundir import MANIFEST, checkpoint_bytes, new_checkpoint, segment_dir, write_atomically
from store.models import Checkpoint

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "vocab_size": 64}


@dataclass
class SavedRun:
    """A run whose checkpoints `save` writes as a trainer does, row and all."""

    sessions: sessionmaker[Session]
    run_dir: Path
    run_id: str

    def save(self, iteration: int, segment: int = 1, **columns: object) -> str:
        """A checkpoint; returns its id."""
        folder = segment_dir(self.run_dir, segment)
        if not folder.spec.exists():
            folder.checkpoints.mkdir(parents=True)
            write_atomically(folder.spec, "{}")
        with new_checkpoint(folder.checkpoint(iteration)) as made:
            (made / "policy").mkdir()
            (made / "policy" / "config.json").write_text(json.dumps(CONFIG))
            (made / "policy" / "model.safetensors").write_bytes(bytes([iteration % 256]) * 70_000)
            (made / "state").mkdir()
            (made / "state" / f"{'a' * 120}.safetensors").write_bytes(b"s" * 1000)
            (made / "state.json").write_text(json.dumps({"iteration": iteration}))
        target = folder.checkpoint(iteration)
        row = Checkpoint(
            id=f"k-{self.run_id}-{segment}-{iteration}",
            run_id=self.run_id,
            segment=segment,
            iteration=iteration,
            path=target.relative_to(self.run_dir).as_posix(),
            bytes=checkpoint_bytes(target),
            manifest_sha256=hashlib.sha256((target / MANIFEST).read_bytes()).hexdigest(),
            reason="schedule",
            lease_token=0,
        )
        for name, value in columns.items():
            setattr(row, name, value)
        with self.sessions.begin() as session:
            session.add(row)
        return row.id

    def folder(self, iteration: int, segment: int = 1) -> Path:
        return segment_dir(self.run_dir, segment).checkpoint(iteration)
