"""Checks of what a spec points at, without loading a model: folders, contexts, prompt files, registered functions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from itertools import islice
from pathlib import Path
from typing import Any

from ppo_core.spec.loading import Fault, spec_paths
from ppo_core.spec.run_spec import RunSpec

MAX_PROMPT_CHARACTERS = 1_000_000
MAX_FAULTS_A_FILE = 10
REWARD_FUNCTIONS = "ppo_core.rewards"
JUDGE_FUNCTIONS = "ppo_core.judges"


def check_files(spec: RunSpec, roots: Sequence[Path] | None = None) -> list[Fault]:
    """Every fault of the files that a spec names; empty when all is well.

    Args:
        spec: a checked spec, with absolute paths.
        roots: folders that files must lie under, links resolved; None allows any.
    """
    faults = []
    for pointer, text in spec_paths(spec):
        fault = _place(pointer, text, roots)
        if fault is not None:
            faults.append(fault)
        elif pointer.startswith("/data/"):
            faults.extend(_prompt_file(pointer, Path(text)))
        else:
            faults.extend(_model_folder(pointer, Path(text)))
    faults.extend(_functions(spec))
    for pointer, model in (("/policy/model", spec.policy.model), ("/policy/critic_model", spec.policy.critic_model)):
        if model is not None and not any(fault.pointer == pointer for fault in faults):
            faults.extend(_context(spec, model))
    faults.extend(_enough_prompts(spec, faults))
    return faults


def model_config(folder: str | Path) -> dict[str, Any]:
    """A model folder's `config.json`.

    Raises:
        OSError, ValueError, RecursionError: there is none, or it is no JSON object.
    """
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError("it holds no JSON object")
    return config


def context_length(config: dict[str, Any]) -> int | None:
    """Most positions that a model of this config can hold; None when it does not say."""
    for key in ("max_position_embeddings", "n_positions", "n_ctx"):
        if isinstance(config.get(key), int):
            return int(config[key])
    return None


def _place(pointer: str, text: str, roots: Sequence[Path] | None) -> Fault | None:
    path = Path(text)
    try:
        exists = path.is_absolute() and path.exists()
        resolved = path.resolve()
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a loop of links
        return Fault(pointer, f"{text!r} is not a usable path: {error}")
    if roots is not None and path.is_absolute() and not any(resolved.is_relative_to(root.resolve()) for root in roots):
        allowed = ", ".join(str(root) for root in roots)
        return Fault(pointer, f"{text!r} lies outside the allowed folders ({allowed}); move it there")
    if not exists:
        return Fault(pointer, f"{text!r} does not exist; give the path of an existing file or folder")
    return None


def _model_folder(pointer: str, folder: Path) -> Iterator[Fault]:
    try:
        config = model_config(folder)
    except (OSError, ValueError, RecursionError) as error:
        yield Fault(pointer, f"{str(folder)!r} has no readable config.json, so it is no model folder: {error}")
        return
    if config.get("auto_map"):
        yield Fault(pointer, f"{str(folder)!r} brings its own code (auto_map in config.json), which is never run")
    if not any(folder.glob("*.safetensors")):
        yield Fault(pointer, f"{str(folder)!r} has no .safetensors file; save the model with safe serialization")


def _prompt_file(pointer: str, path: Path) -> Iterator[Fault]:
    if not path.is_file():
        yield Fault(pointer, f"{str(path)!r} is no file; give a JSON Lines file with a `prompt` in each row")
        return
    try:
        bad = list(islice(_bad_rows(path), MAX_FAULTS_A_FILE + 1))
    except OSError as error:
        yield Fault(pointer, f"{str(path)!r} cannot be read: {error}")
        return
    for number, problem in bad[:MAX_FAULTS_A_FILE]:
        yield Fault(pointer, f"{path.name}, row {number}: {problem}")
    if len(bad) > MAX_FAULTS_A_FILE:
        yield Fault(pointer, f"more than {MAX_FAULTS_A_FILE} bad rows in {path.name}; correct these first")


def read_prompt(line: bytes) -> str:
    """The prompt of one row of a JSON Lines file: the one rule for submit, preflight and training.

    Raises:
        ValueError: the row is unfit; the message says why.
    """
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON ({error})") from error
    problem = _prompt_problem(row)
    if problem:
        raise ValueError(problem)
    prompt: str = row["prompt"]
    return prompt


def _bad_rows(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                read_prompt(line)
            except ValueError as problem:
                yield number, str(problem)


def _prompt_problem(row: Any) -> str | None:
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        return 'expected an object with a text under "prompt"'
    prompt = row["prompt"]
    if not prompt.strip():
        return "the prompt is empty"
    if len(prompt) > MAX_PROMPT_CHARACTERS:
        return f"the prompt has {len(prompt)} characters, more than {MAX_PROMPT_CHARACTERS}"
    if any(0xD800 <= ord(character) <= 0xDFFF for character in prompt):
        return "the prompt holds half of a surrogate pair, which no encoding can carry"
    return None


def _enough_prompts(spec: RunSpec, faults: Sequence[Fault]) -> Iterator[Fault]:
    faulty = {fault.pointer for fault in faults}
    if "/data/prompts" not in faulty:
        num_prompts = _num_prompts(Path(spec.data.prompts))
        if num_prompts < spec.rollout.batch_size:
            yield Fault(
                "/data/prompts",
                f"{num_prompts} prompts are fewer than rollout.batch_size {spec.rollout.batch_size}; "
                "add prompts or lower the batch size",
            )
    if spec.data.held_out is not None and "/data/held_out" not in faulty and not _num_prompts(Path(spec.data.held_out)):
        yield Fault("/data/held_out", f"{spec.data.held_out!r} holds no prompt; add some or leave the field out")


def _num_prompts(path: Path) -> int:
    with path.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def _context(spec: RunSpec, model: str) -> Iterator[Fault]:
    context = context_length(model_config(model))
    needed = spec.data.max_prompt_tokens + spec.rollout.max_new_tokens
    if context is not None and needed > context:
        yield Fault(
            "/rollout/max_new_tokens",
            f"data.max_prompt_tokens {spec.data.max_prompt_tokens} + rollout.max_new_tokens "
            f"{spec.rollout.max_new_tokens} = {needed} exceed the context of {context} of {model!r}; lower one of them",
        )


def _functions(spec: RunSpec) -> Iterator[Fault]:
    rewards = {entry.name for entry in entry_points(group=REWARD_FUNCTIONS)}
    for index, source in enumerate(spec.reward.sources):
        if source.name is not None and source.name not in rewards:
            known = ", ".join(sorted(rewards)) or "none"
            yield Fault(
                f"/reward/sources/{index}/name", f"no reward function {source.name!r} is registered (known: {known})"
            )
    judges = {entry.name for entry in entry_points(group=JUDGE_FUNCTIONS)}
    judge = spec.gate.judge
    if judge is not None and judge.name is not None and judge.name not in judges:
        known = ", ".join(sorted(judges)) or "none"
        yield Fault("/gate/judge/name", f"no judge {judge.name!r} is registered (known: {known})")
