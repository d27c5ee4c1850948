"""What lies in a checkpoint: all that a run goes on from, in files that can run no code."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppo_core.checkpoints import TrainerState
from ppo_core.main import run_segment
from ppo_core.models.policy import PolicyModel
from ppo_core.rollout.weights import probe_of
from ppo_core.rundir import ExitCode, read_manifest
from tests.ppo_core.toy_run import make_toy, toy_segment

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("ppo_core", "worker", "store", "api", "ppo")
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "adapters": {"policy": {"lora": {"rank": 2}}},
    "critic": {"policy": {"value_head": "separate"}},
}
# Readers and writers of formats that can hold code, and the words that switch a safe reader over.
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "_pickle"}
CALLS = {("torch", "load"), ("torch", "save"), ("np", "load"), ("numpy", "load"), ("yaml", "load")}
ALLOWED = {
    # Ranks of one run tell each other their faults in memory; nothing of it comes from a file or from another machine.
    "ppo_core/ranks.py": {"pickle"},
    # With a loader of its own that knows fewer types than yaml's safe one.
    "ppo_core/spec/loading.py": {"yaml.load"},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, torch.Tensor]]:
    """A checkpoint of each variant after an iteration, and what the trained policy said of the probe then."""
    found = {}
    toy = make_toy(tmp_path_factory.mktemp("toy"))
    for name, change in VARIANTS.items():
        spec = {**toy, "iterations": 1, **{group: {**toy[group], **part} for group, part in change.items()}}
        spec["kl"] = {"controller": "adaptive", "target": 0.1, "horizon": 100}
        spec["reward"] = {**toy["reward"], "normalize": True}
        segment = toy_segment(tmp_path_factory.mktemp(name), spec)
        said: list[torch.Tensor] = []

        def change_it(trainer: Any, said: list[torch.Tensor] = said) -> None:
            save = trainer._save

            def told(reason: str) -> None:
                said.append(trainer.models.trainer.probe().logprobs)
                save(reason)

            trainer._save = told

        assert run_segment(segment, token=0, attempt=1, change=change_it) == ExitCode.DONE
        found[name] = (segment.checkpoint(1), said[-1])
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_policy_folder_is_the_trained_policy_as_it_is(
    saved: dict[str, tuple[Path, torch.Tensor]], variant: str
) -> None:
    """Plain transformers finds every weight and no other, tied embeddings as one, adapters merged in."""
    folder, said = saved[variant]
    model, told = AutoModelForCausalLM.from_pretrained(folder / "policy", output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    with safe_open(folder / "policy" / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - it is no mapping
        assert not [key for key in file.keys() if "lora" in key or "value_head" in key]  # noqa: SIM118
    found = probe_of(PolicyModel(model, "separate").eval()).logprobs
    assert torch.allclose(found, said, atol=1e-5)
    assert AutoTokenizer.from_pretrained(folder / "policy")("the film").input_ids


@pytest.mark.parametrize(
    ("variant", "trained"),
    [
        ("plain", ("model.model.embed_tokens.weight", "value_head.weight")),
        ("adapters", ("lora_A", "lora_B", "value_head.weight")),
        ("critic", ("model.model.embed_tokens.weight", "critic.value_head.weight")),
    ],
)
def test_every_trained_parameter_has_its_master_and_its_moments(
    saved: dict[str, tuple[Path, torch.Tensor]], variant: str, trained: tuple[str, ...]
) -> None:
    """Value head, critic and adapters among them, of both optimizers; and nothing that is not trained."""
    folder, _ = saved[variant]
    names = set(json.loads((folder / "state" / "index.json").read_text())["tensors"])
    masters = {name.removeprefix("master/") for name in names if name.startswith("master/")}
    for part in trained:
        assert any(part in name for name in masters), (part, sorted(masters))
    assert names == {f"{kind}/{name}" for kind in ("master", "exp_avg", "exp_avg_sq", "step") for name in masters}
    if variant == "adapters":
        assert all("lora" in name or "value_head" in name for name in masters)


def test_counters_controllers_and_what_made_them_are_there(saved: dict[str, tuple[Path, torch.Tensor]]) -> None:
    document = json.loads((saved["plain"][0] / "state.json").read_text())
    trainer = document["trainer"]
    assert set(trainer) == {field.name for field in fields(TrainerState)}
    assert (trainer["iteration"], trainer["cursor"], trainer["policy_version"]) == (1, 8, 1)
    assert trainer["optimizer_steps"] == 4
    assert trainer["kl_coef"] != 0.05
    assert trainer["score_moments"]["count"] == 8
    assert document["spec"]["reward"]["normalize"] is True
    assert {"python", "torch", "transformers", "ppo-control", "threads"} <= set(document["versions"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_file_is_text_or_safetensors_and_in_the_manifest(
    saved: dict[str, tuple[Path, torch.Tensor]], variant: str
) -> None:
    """P34: by what is in it, whatever its name: no pickle, no archive of pickles, nothing that is not understood."""
    folder, _ = saved[variant]
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {*read_manifest(folder), "manifest.json"}
    assert len(files) >= 8
    for name in files:
        if name.endswith(".safetensors"):
            with safe_open(folder / name, framework="pt") as file:
                assert list(file.keys())
        elif name.endswith(".json"):
            json.loads((folder / name).read_text(encoding="utf-8"))
        else:
            assert name.endswith((".jinja", ".txt")), name
            assert "\0" not in (folder / name).read_text(encoding="utf-8")


def sources() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def unsafe(tree: ast.Module, allowed: set[str] = frozenset()) -> list[str]:  # type: ignore[assignment]
    """What this module could run code by, when it reads a file."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found += [name.name for name in names if name.name.split(".")[0] in MODULES]
            case ast.ImportFrom(module=str(module)):
                found += [module] if module.split(".")[0] in MODULES else []
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=attr)) if (owner, attr) in CALLS:
                found.append(f"{owner}.{attr}")
            case ast.keyword(arg="allow_pickle" | "trust_remote_code", value=ast.Constant(value=True)):
                found.append(str(node.arg))
            case ast.keyword(arg="use_safetensors" | "weights_only", value=ast.Constant(value=False)):
                found.append(str(node.arg))
    return [name for name in found if name not in allowed]


def test_no_way_of_reading_runs_code() -> None:
    """P34: no module reads or writes a format that can hold code."""
    seen = {path: unsafe(tree, ALLOWED.get(path, set())) for path, tree in sources()}
    assert len(seen) > 150
    assert {path: found for path, found in seen.items() if found} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from dill import loads",
        "torch.load(path)",
        "np.load(path, mmap_mode='r')",
        "load(path, allow_pickle=True)",
        "kind.from_pretrained(path, trust_remote_code=True)",
        "kind.from_pretrained(path, use_safetensors=False)",
    ],
)
def test_the_check_sees_them(line: str) -> None:
    assert unsafe(ast.parse(line))
