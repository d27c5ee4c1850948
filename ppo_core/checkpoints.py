"""Checkpoints: everything a run needs to go on exactly, in files that run no code when read.

    policy/            a Hugging Face folder that `from_pretrained` and vLLM load as it is
    state/             float32 weights and moments by parameter name, value head included, in safetensors slices
    state/index.json   which slices of which tensor lie in which file
    state.json         counters, cursor, controllers, what stands for random states, spec, versions
    manifest.json      size and SHA-256 of every file; its presence makes the checkpoint whole

Each rank writes the slices that it holds, one file a rank. A slice is a run of a tensor's elements in row-major order,
so a checkpoint of any engine and any number of ranks can be read by any other.
"""

from __future__ import annotations

import contextlib
import json
import math
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ppo_core.errors import CheckpointError, DiskFullError
from ppo_core.ranks import ALONE, Ranks
from ppo_core.rollout.weights import save_policy
from ppo_core.rundir import (
    journalled_digest,
    manifest_digest,
    new_checkpoint,
    no_space_left,
    verify_checkpoint,
    write_atomically,
)
from ppo_core.spec import RunSpec, misfits_with_checkpoint
from ppo_core.training.engine import StateSlice, TrainEngine

T = TypeVar("T")

FORMAT = 3
READABLE = (1, 2, 3)  # In format 1 every tensor was one slice, whole; up to 2 `random` was not written.
# No state of a generator is kept, since none is carried from one draw to the next (`ppo_core.seeds`).
RANDOM_SCHEME = "streams"


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
    prompts_filtered: int = 0
    prompts_failed: int = 0
    hours: float = 0.0
    evaluation_owed: bool = True  #: held-out answers of this iteration are due and were not given yet
    gate: dict[str, Any] | None = None
    alerts: dict[str, Any] | None = None  #: what the watch over the run remembers; brought up to date when it is saved

    def after(self, **changes: Any) -> TrainerState:
        return replace(self, **changes)


def write_checkpoint(
    target: Path,
    trainer: TrainEngine,
    tokenizer: Any,
    state: TrainerState,
    spec: RunSpec,
    ranks: Ranks = ALONE,
) -> str:
    """Write a whole checkpoint to `target` and return the SHA-256 of its manifest. All ranks call it together.

    Raises:
        DiskFullError: there was no space left for it; nothing half-done stays.
        CheckpointError: anything else that kept it from being written; nothing half-done stays.
    """
    slices = trainer.export_state()
    bad = ranks.gather(next((key for key, part in slices.items() if not bool(part.values.isfinite().all())), None))
    if any(bad):
        name = next(key for key in bad if key)
        raise CheckpointError(f"{name} is not finite, so nothing was saved as {target}")
    weights = trainer.weights().held(ranks.is_first)
    with contextlib.ExitStack() as stack:
        folder = ranks.first(lambda: _write(target, lambda: stack.enter_context(new_checkpoint(target))))
        parts = ranks.together(lambda: _write(target, lambda: _write_slices(folder, ranks.rank, slices)))
        ranks.first(lambda: _write(target, lambda: save_policy(trainer.policy, weights, folder / "policy", tokenizer)))
        ranks.first(lambda: _write(target, lambda: _write_rest(folder, state, spec, parts)))
        ranks.first(lambda: _write(target, stack.close))
        return ranks.first(lambda: manifest_digest(target))


def _write(target: Path, work: Callable[[], T]) -> T:
    try:
        return work()
    except (OSError, SafetensorError) as error:  # Of a full disk, what writes tensors says so by its own error.
        if no_space_left(error):
            free = shutil.disk_usage(target.parent).free / 2**20
            raise DiskFullError(f"no space left to write {target}, {free:.0f} MiB are free: {error}") from error
        raise CheckpointError(
            f"{target} could not be written: {error}",
            hint="See to the disk that it lies on; the last good checkpoint is untouched.",
        ) from error


def _write_slices(folder: Path, rank: int, slices: dict[str, StateSlice]) -> dict[str, Any]:
    """Write this rank's file; returns its part of the index."""
    if not slices:
        return {}
    (folder / "state").mkdir(exist_ok=True)
    name = f"rank-{rank:04d}.safetensors"
    save_file({key: part.values.detach().cpu().contiguous() for key, part in slices.items()}, folder / "state" / name)
    return {
        key: {"shape": list(part.shape), "slices": [{"file": name, "start": part.start}]}
        for key, part in slices.items()
    }


def _write_rest(folder: Path, state: TrainerState, spec: RunSpec, parts: list[dict[str, Any]]) -> None:
    """The index of all ranks' slices, and the counters."""
    index: dict[str, Any] = {}
    for part in parts:
        for key, entry in part.items():
            whole = index.setdefault(key, {"shape": entry["shape"], "slices": []})
            whole["slices"] = sorted([*whole["slices"], *entry["slices"]], key=lambda one: one["start"])
    _write_json(folder / "state" / "index.json", {"format": FORMAT, "tensors": index})
    document = {
        "format": FORMAT,
        "trainer": asdict(state),
        "random": {
            "scheme": RANDOM_SCHEME,
            "seed": spec.seed,
            "data_seed": spec.data_seed,
            "next_iteration": state.iteration + 1,
        },
        "spec": spec.model_dump(mode="json"),
        "versions": versions(),
    }
    _write_json(folder / "state.json", document)


def load_checkpoint(
    folder: Path, trainer: TrainEngine, spec: RunSpec, ranks: Ranks = ALONE
) -> tuple[TrainerState, dict[str, Any]]:
    """Verify a checkpoint's hashes, then take over its weights and moments. All ranks call it together.

    Returns:
        The counters that go on, and the spec, as plain data, under which the checkpoint was written.

    Raises:
        CheckpointError: damaged, of another model or other trained parameters than `spec` has, or of a format this
            version does not know.
    """
    ranks.first(lambda: verify_checkpoint(folder, journalled_digest(folder)))
    try:
        document = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        index = json.loads((folder / "state" / "index.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    for name, found in (("state.json", document.get("format")), ("state/index.json", index.get("format"))):
        if found not in READABLE:
            raise CheckpointError(f"{folder / name} has format {found}, this version reads formats up to {FORMAT}")
    try:
        state = TrainerState(**document["trainer"])
        kept_spec: dict[str, Any] = document["spec"]
        if document["format"] > 2:
            _check_random(folder, document["random"], state, kept_spec)
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / 'state.json'} has other fields than this version reads: {error}") from error
    misfits = misfits_with_checkpoint(spec, kept_spec)
    if misfits:
        raise CheckpointError(
            f"{folder} holds other parameters than the spec trains: " + "; ".join(misfits.values()),
            hint="Give the fields named the checkpoint's values, or start a new run.",
        )
    trainer.load_state(SavedTensors(folder / "state", index["tensors"]), state.optimizer_steps)
    return state, kept_spec


def _check_random(folder: Path, random: dict[str, Any], state: TrainerState, spec: dict[str, Any]) -> None:
    """Whether what is drawn after this checkpoint is what would have been drawn if the run had gone straight on."""
    own = spec["data"]["seed"]
    expected = {
        "scheme": RANDOM_SCHEME,
        "seed": spec["seed"],
        "data_seed": spec["seed"] if own is None else own,
        "next_iteration": state.iteration + 1,
    }
    for name, value in expected.items():
        if random[name] != value:
            raise CheckpointError(
                f"{folder / 'state.json'}: random.{name} is {random[name]!r}, {value!r} belongs to the rest of it",
                hint="Take another checkpoint; this one was changed, or written by another version.",
            )


def versions() -> dict[str, str]:
    """The versions that a run's numbers may depend on."""
    packages = ("ppo-control", "torch", "transformers", "tokenizers", "safetensors", "numpy")
    return {
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
        "threads": str(torch.get_num_threads()),
        "machine": platform.machine(),
    }


class SavedTensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint by name, each read when it is asked for: all may be more than a rank can hold."""

    def __init__(self, folder: Path, index: dict[str, Any]) -> None:
        self._folder = folder
        self._index = index
        self._files: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        entry = self._index[name]
        parts: list[Tensor] = []
        end = 0
        for part in entry["slices"]:
            parts.append(self._file(part["file"]).get_tensor(name).flatten())
            if part.get("start", 0) != end:
                raise CheckpointError(f"{self._folder}: {name} has a slice at {part['start']} where {end} belongs")
            end += parts[-1].numel()
        if end != math.prod(entry["shape"]):
            raise CheckpointError(f"{self._folder}: {name} has {end} of its {math.prod(entry['shape'])} elements")
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(entry["shape"])

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def _file(self, name: str) -> Any:
        if name not in self._files:
            try:
                self._files[name] = safe_open(self._folder / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{self._folder / name} cannot be read: {error}") from error
        return self._files[name]


def _write_json(path: Path, document: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
