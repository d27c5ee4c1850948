"""Checkpoints: everything a run needs to go on exactly, in files that run no code when read.

    policy/            a Hugging Face folder that `from_pretrained` and vLLM load as it is
    state/             float32 weights and moments by parameter name, value head included, in safetensors slices
    state/index.json   which slices of which tensor lie in which file
    state.json         counters, cursor, controllers, seeds, spec, versions
    manifest.json      size and SHA-256 of every file; its presence makes the checkpoint whole

One process writes one slice a tensor; the index has room for many ranks, so a checkpoint of any number of ranks
can be read by any other.
"""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ppo_core.errors import CheckpointError
from ppo_core.rundir import MANIFEST, new_checkpoint, verify_checkpoint, write_atomically
from ppo_core.training.engine import TrainEngine

FORMAT = 1


@dataclass(frozen=True)
class TrainerState:
    """What the loop carries from one iteration to the next, besides weights and moments.

    No random state is among it: every draw comes from a stream named by seed, purpose and iteration
    (`ppo_core.seeds`), so a restart has none to restore.
    """

    iteration: int = 0
    cursor: int = 0
    policy_version: int = 0
    optimizer_steps: int = 0
    skipped_in_a_row: int = 0
    kl_coef: float = 0.0
    score_moments: dict[str, Any] | None = None
    prompts_trained: int = 0
    prompts_failed: int = 0
    hours: float = 0.0
    evaluation_owed: bool = True  #: held-out answers of this iteration are due and were not given yet
    gate: dict[str, Any] | None = None

    def after(self, **changes: Any) -> TrainerState:
        return replace(self, **changes)


def write_checkpoint(
    target: Path, trainer: TrainEngine, tokenizer: Any, state: TrainerState, spec: dict[str, Any]
) -> str:
    """Write a whole checkpoint to `target` and return the SHA-256 of its manifest.

    Raises:
        CheckpointError: no space, or anything else that kept it from being written; nothing half-done stays.
    """
    tensors = trainer.export_state()
    bad = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if bad:
        raise CheckpointError(f"{bad[0]} is not finite, so nothing was saved as {target}")
    try:
        with new_checkpoint(target) as folder:
            trainer.weights().save_pretrained(folder / "policy", tokenizer)
            (folder / "state").mkdir()
            name = "rank-0000.safetensors"
            save_file(
                {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, folder / "state" / name
            )
            index = {
                key: {"shape": list(tensor.shape), "slices": [{"file": name, "rows": None}]}
                for key, tensor in tensors.items()
            }
            _write_json(folder / "state" / "index.json", {"format": FORMAT, "tensors": index})
            _write_json(
                folder / "state.json",
                {"format": FORMAT, "trainer": asdict(state), "spec": spec, "versions": versions()},
            )
    except OSError as error:
        raise CheckpointError(
            f"{target} could not be written: {error}",
            hint="Free space on this disk, or lower checkpoints.keep_last; the last good checkpoint is untouched.",
        ) from error
    return hashlib.sha256((target / MANIFEST).read_bytes()).hexdigest()


def load_checkpoint(folder: Path, trainer: TrainEngine) -> TrainerState:
    """Verify a checkpoint's hashes, then take over its weights, moments and counters.

    Raises:
        CheckpointError: damaged, of another model, or of a format this version does not know.
    """
    verify_checkpoint(folder)
    try:
        document = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        index = json.loads((folder / "state" / "index.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    for name, found in (("state.json", document.get("format")), ("state/index.json", index.get("format"))):
        if found != FORMAT:
            raise CheckpointError(f"{folder / name} has format {found}, this version reads format {FORMAT}")
    try:
        state = TrainerState(**document["trainer"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / 'state.json'} has other fields than this version reads: {error}") from error
    trainer.load_state(_read_tensors(folder / "state", index["tensors"]), state.optimizer_steps)
    return state


def spec_of(folder: Path) -> dict[str, Any]:
    """The spec, as plain data, under which a checkpoint that `load_checkpoint` has read was written."""
    spec: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))["spec"]
    return spec


def versions() -> dict[str, str]:
    """The versions that a run's numbers may depend on."""
    packages = ("ppo-control", "torch", "transformers", "tokenizers", "safetensors", "numpy")
    return {
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
        "threads": str(torch.get_num_threads()),
        "machine": platform.machine(),
    }


def _read_tensors(folder: Path, index: dict[str, Any]) -> dict[str, Tensor]:
    files: dict[str, dict[str, Tensor]] = {}
    tensors = {}
    for name, entry in index.items():
        for part in entry["slices"]:
            if part["file"] not in files:
                try:
                    files[part["file"]] = load_file(folder / part["file"])
                except (OSError, SafetensorError) as error:
                    raise CheckpointError(f"{folder / part['file']} cannot be read: {error}") from error
        parts = [files[part["file"]][name] for part in entry["slices"]]
        tensors[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
    return tensors


def _write_json(path: Path, document: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
