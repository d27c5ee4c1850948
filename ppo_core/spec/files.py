"""Checks of what a spec points at, without loading a model: folders, contexts, prompt files, functions, hosts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from ppo_core.errors import DataError
from ppo_core.spec.hosts import AllowedHosts, EngineHosts, RewardHosts, parse_endpoint
from ppo_core.spec.hub import hub_dataset, is_hub
from ppo_core.spec.loading import Fault, spec_paths
from ppo_core.spec.prompt_files import Unfit, read_rows
from ppo_core.spec.run_spec import RunSpec
from ppo_core.spec.same_scorer import UNREADABLE, same_scorer_faults, tensor_places
from ppo_core.spec.scorers import JUDGE_FUNCTIONS, REWARD_FUNCTIONS, Scorer

MAX_FAULTS_A_FILE = 10


def check_files(
    spec: RunSpec,
    roots: Sequence[Path] | None = None,
    hosts: RewardHosts | None = None,
    engine_hosts: EngineHosts | None = None,
) -> list[Fault]:
    """Every fault of the files and hosts that a spec names; empty when all is well.

    Args:
        spec: a checked spec, with absolute paths.
        roots: folders that files must lie under, links resolved; None allows any.
        hosts: what scorers may be asked of over HTTP; None: the hosts of this process's environment.
        engine_hosts: the same of servers that generate.
    """
    faults: list[Fault] = []
    for pointer, text in spec_paths(spec):
        if pointer.startswith("/data/") and is_hub(text):
            faults.extend(_hub_dataset(pointer, text))
            continue
        fault = _place(pointer, text, roots)
        if fault is not None:
            faults.append(fault)
        elif pointer.startswith("/data/"):
            needed = spec.rollout.batch_size if pointer == "/data/prompts" else 1
            faults.extend(_prompts(spec, pointer, Path(text), needed))
        else:
            faults.extend(_model_folder(pointer, Path(text)))
    faults.extend(_functions(spec))
    faults.extend(_hosts([(f"{pointer}/url", scorer.url) for pointer, scorer in _scorers(spec)], hosts, RewardHosts))
    servers = spec.rollout.vllm.servers
    places = [(f"/rollout/vllm/servers/{index}", url) for index, url in enumerate(servers)]
    faults.extend(_hosts(places, engine_hosts, EngineHosts))
    faults.extend(_chat_templates(spec, faults))
    if not any(fault.pointer.startswith(("/gate/judge", "/reward/sources")) for fault in faults):
        faults.extend(same_scorer_faults(spec))
    for pointer, model in (("/policy/model", spec.policy.model), ("/policy/critic_model", spec.policy.critic_model)):
        if model is not None and not any(fault.pointer == pointer for fault in faults):
            faults.extend(_context(spec, model))
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
    elif pointer.startswith(("/reward/", "/gate/")) and _is_without_head(folder, config):
        yield Fault(
            pointer,
            f"{str(folder)!r} is a language model ({config['architectures'][0]}) without a trained score head: it "
            "gives no score; name a sequence classifier with one output",
        )


def _is_without_head(folder: Path, config: dict[str, Any]) -> bool:
    """Whether a folder says that it is a causal language model, and holds no head to score with either.

    What cannot be told from the files alone is told as the trainer loads the model.
    """
    named = config.get("architectures")
    if not isinstance(named, list) or not named or not str(named[0]).endswith(("ForCausalLM", "LMHeadModel")):
        return False
    try:
        return not any(name.startswith("score.") for name in tensor_places(folder))
    except UNREADABLE:
        return False


def _hub_dataset(pointer: str, text: str) -> Iterator[Fault]:
    """Whether it may be fetched. Its rows are checked before the first iteration, by whoever fetches it."""
    try:
        hub_dataset(text)
    except ValueError as error:
        yield Fault(pointer, str(error))


def _prompts(spec: RunSpec, pointer: str, path: Path, min_prompts: int) -> Iterator[Fault]:
    """Faults of one prompt file, in one pass over it."""
    num_prompts, num_bad, conversation = 0, 0, None
    try:
        for number, prompt in read_rows(path):
            if isinstance(prompt, Unfit):
                num_bad += 1
                if num_bad > MAX_FAULTS_A_FILE:
                    yield Fault(pointer, f"more than {MAX_FAULTS_A_FILE} bad rows in {path.name}; correct these first")
                    return
                yield Fault(pointer, f"{path.name}, row {number}: {prompt.problem}")
                continue
            num_prompts += 1
            if conversation is None and not isinstance(prompt, str):
                conversation = number
    except DataError as error:
        yield Fault(pointer, f"{path.name}: {error}")
        return
    if conversation is not None and not _has_chat_template(Path(spec.policy.model)):
        yield Fault(
            pointer,
            f"{path.name}, row {conversation}: it holds `messages`, but the tokenizer of policy.model "
            f"{spec.policy.model!r} has no chat template; save one with it (chat_template.jinja), or give texts",
        )
    if num_bad:
        return
    if pointer == "/data/held_out" and num_prompts < min_prompts:
        yield Fault(pointer, f"{str(path)!r} holds no prompt; add some or leave the field out")
    elif num_prompts < min_prompts:
        yield Fault(
            pointer,
            f"{num_prompts} prompts are fewer than rollout.batch_size {min_prompts}; "
            "add prompts or lower the batch size",
        )


def _has_chat_template(folder: Path) -> bool:
    """Whether the tokenizer of a folder has a chat template in one of the places that a tokenizer reads."""
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and bool(config.get("chat_template"))


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


def _scorers(spec: RunSpec) -> Iterator[tuple[str, Scorer]]:
    for index, source in enumerate(spec.reward.sources):
        yield f"/reward/sources/{index}", source
    if spec.gate.judge is not None:
        yield "/gate/judge", spec.gate.judge


def _hosts(
    places: Sequence[tuple[str, str | None]], hosts: AllowedHosts | None, listed: type[AllowedHosts]
) -> Iterator[Fault]:
    """Names are not looked up here: what they stand for is checked at each connection, and may change until then."""
    for pointer, url in places:
        if url is None:
            continue
        try:
            allowed = hosts if hosts is not None else listed.of_environment(os.environ)
            problem = allowed.problem(parse_endpoint(url))
        except ValueError as error:
            problem = f"no host can be allowed: {error}"
        if problem is not None:
            yield Fault(pointer, problem)


def _chat_templates(spec: RunSpec, faults: Sequence[Fault]) -> Iterator[Fault]:
    faulty = {fault.pointer for fault in faults}
    for pointer, scorer in _scorers(spec):
        if scorer.chat_template and scorer.model is not None and f"{pointer}/model" not in faulty:
            folder = Path(scorer.model)
            if not _has_chat_template(folder):
                yield Fault(
                    f"{pointer}/chat_template",
                    f"the tokenizer in {scorer.model!r} has no chat template; give `template` instead, such as "
                    "{prompt}{response}",
                )
