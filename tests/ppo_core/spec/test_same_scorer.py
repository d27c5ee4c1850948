"""A judge that is one of the reward's sources is refused by its content, whatever its name is and wherever it lies."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForSequenceClassification

import ppo_core.spec.same_scorer as same_scorer
from ppo_core.spec import SpecFaults, check_files, parse_spec
from ppo_core.spec.same_scorer import same_weights
from ppo_core.spec.scorers import JUDGE_FUNCTIONS, REWARD_FUNCTIONS
from tests.ppo_core.scoring.registered import register
from tests.ppo_core.tiny_models import tiny_config
from tests.ppo_core.toy_run import TOKENS, make_toy, other_classifier


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("toy")
    return folder, make_toy(folder)


@pytest.fixture
def reward(toys: tuple[Path, dict[str, Any]]) -> Path:
    return toys[0] / "reward_model"


def model_faults(spec: dict[str, Any], judge: Path, *sources: dict[str, Any]) -> list[tuple[str, str]]:
    """Faults of the toy's spec with this judge, and with more reward sources before its own."""
    own = {"kind": "sequence_classifier", "model": str(judge)}
    data = {**spec, "gate": {"judge": own}, "reward": {"sources": [*sources, *spec["reward"]["sources"]]}}
    return [(fault.pointer, fault.message) for fault in check_files(parse_spec(data))]


def changed(folder: Path, target: Path, name: str, change: float) -> Path:
    """A copy of a model folder in which one number of one tensor is another."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    tensors[name].view(-1)[-1] += change
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def test_a_copied_folder_is_refused_with_field_value_and_remedy(
    toys: tuple[Path, dict[str, Any]], reward: Path, tmp_path: Path
) -> None:
    """Another path, other times, another config and a README change nothing of what the model is."""
    copy = Path(shutil.copytree(reward, tmp_path / "judge"))
    for file in copy.iterdir():
        os.utime(file, (1, 1))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "_name_or_path": "judge", "transformers_version": "0"}))
    (copy / "README.md").write_text("# Another model")
    ((pointer, message),) = model_faults(toys[1], copy)
    assert pointer == "/gate/judge/model"
    assert f"'{copy}' holds the very weights of reward.sources.0.model '{reward}'" in message
    assert "name a judge that shares nothing with the reward" in message


def test_a_copy_is_found_inside_a_weighted_sum(toys: tuple[Path, dict[str, Any]], reward: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(reward, tmp_path / "judge"))
    other = {"kind": "sequence_classifier", "model": str(other_classifier(tmp_path / "other")), "weight": 5.0}
    ((pointer, message),) = model_faults(toys[1], copy, other)
    assert pointer == "/gate/judge/model"
    assert "reward.sources.1.model" in message


def test_a_link_is_what_it_leads_to(toys: tuple[Path, dict[str, Any]], reward: Path, tmp_path: Path) -> None:
    (tmp_path / "judge").symlink_to(reward)
    assert [pointer for pointer, _ in model_faults(toys[1], tmp_path / "judge")] == ["/gate/judge/model"]


def test_shards_and_names_of_files_say_nothing(reward: Path, tmp_path: Path) -> None:
    model = LlamaForSequenceClassification.from_pretrained(reward)
    model.save_pretrained(tmp_path / "shards", max_shard_size="30KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert same_weights(reward, tmp_path / "shards")
    (tmp_path / "named").mkdir()
    shutil.copy(reward / "model.safetensors", tmp_path / "named" / "weights.safetensors")
    assert same_weights(tmp_path / "named", reward)


def test_another_model_of_the_same_shape_is_another_judge(toys: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    assert model_faults(toys[1], other_classifier(tmp_path / "judge")) == []


@pytest.mark.parametrize("name", ["score.weight", "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"])
def test_one_other_number_is_another_model(reward: Path, tmp_path: Path, name: str) -> None:
    """A head trained on the same trunk differs in the head alone; wherever the difference lies, it is found."""
    assert same_weights(reward, changed(reward, tmp_path / "same", name, 0.0))
    assert not same_weights(reward, changed(reward, tmp_path / "other", name, 0.5))


def test_models_that_differ_in_their_head_are_told_apart_by_little_reading(
    reward: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = changed(reward, tmp_path / "other", "score.weight", 0.5)
    compared: list[int] = []
    same_bytes = same_scorer._same_bytes
    monkeypatch.setattr(
        same_scorer, "_same_bytes", lambda one, two: (compared.append(one.num_bytes), same_bytes(one, two))[1]
    )
    assert not same_weights(reward, other)
    largest = max(place.num_bytes for place in same_scorer.tensor_places(reward).values())
    assert sum(compared) < largest / 2


def test_another_shape_or_an_unreadable_file_is_not_the_same(reward: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = tiny_config("llama", vocab_size=TOKENS + 1, num_labels=1)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "wider")
    assert not same_weights(reward, tmp_path / "wider")
    for name, content in (
        ("empty", b""),
        ("short", b"\x10"),
        ("junk", b"\xff" * 100),
        ("list", b"\x02" + b"\0" * 7 + b"[]"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
        assert not same_weights(reward, tmp_path / name)
        assert not same_weights(tmp_path / name, tmp_path / name)


# Functions and services


def spec_with(spec: dict[str, Any], source: dict[str, Any], judge: dict[str, Any]) -> dict[str, Any]:
    return {
        **spec,
        "reward": {"sources": [{"kind": "http", "url": "http://127.0.0.1:9/"}, source]},
        "gate": {"judge": judge},
    }


def test_two_names_of_one_function_are_refused(
    toys: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PPO_REWARD_HOSTS", "127.0.0.1")
    register(tmp_path, monkeypatch, REWARD_FUNCTIONS)
    entries = next(tmp_path.glob("*.dist-info")) / "entry_points.txt"
    judges = f"[{JUDGE_FUNCTIONS}]\nfair = scoring_for_tests:length\nother = scoring_for_tests:by_text\n"
    entries.write_text(entries.read_text() + judges)
    source = {"kind": "python", "name": "length"}
    (fault,) = check_files(parse_spec(spec_with(toys[1], source, {"kind": "python", "name": "fair"})))
    assert fault.pointer == "/gate/judge/name"
    assert "'fair' is the function scoring_for_tests:length of reward.sources.1.name 'length'" in fault.message
    assert check_files(parse_spec(spec_with(toys[1], source, {"kind": "python", "name": "other"}))) == []


@pytest.mark.parametrize(
    ("source", "judge"),
    [
        ({"kind": "python", "name": "length"}, {"kind": "python", "name": "length"}),
        (
            {"kind": "http", "url": "http://127.0.0.1:8000/score"},
            {"kind": "http", "url": "http://localhost:8000/score"},
        ),
        ({"kind": "http", "url": "http://[::1]:8000/score"}, {"kind": "http", "url": "http://127.0.0.1:8000/score/"}),
        ({"kind": "http", "url": "https://rm.example/score"}, {"kind": "http", "url": "http://RM.example./%73core"}),
        (
            {"kind": "http", "url": "https://rm.example/score"},
            {"kind": "http", "url": "https://rm.example//a/.././score/"},
        ),
        ({"kind": "http", "url": "http://127.0.0.1:8000/score"}, {"kind": "http", "url": "http://0.0.0.0:8000/score"}),
        (
            {"kind": "sequence_classifier", "model": "/m/a"},
            {"kind": "sequence_classifier", "model": "/m/a", "template": "{response}"},
        ),
    ],
)
def test_one_scorer_in_two_spellings_is_refused_before_any_file_is_looked_at(
    toys: tuple[Path, dict[str, Any]], source: dict[str, Any], judge: dict[str, Any]
) -> None:
    with pytest.raises(SpecFaults) as told:
        parse_spec(spec_with(toys[1], source, judge))
    (fault,) = told.value.faults
    assert fault.pointer == "/gate/judge"
    assert "is one of reward.sources (1): it cannot see that one being hacked; name another judge" in fault.message
    assert repr(judge.get("url") or judge.get("model") or judge.get("name")) in fault.message


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:8001/score", "http://127.0.0.1:8000/judge", "http://127.0.0.2:8000/score", "https://j.example"],
)
def test_another_place_is_another_judge(toys: tuple[Path, dict[str, Any]], url: str) -> None:
    source = {"kind": "http", "url": "http://localhost:8000/score"}
    parse_spec(spec_with(toys[1], source, {"kind": "http", "url": url}))


def test_a_served_model_is_no_reward_source(toys: tuple[Path, dict[str, Any]]) -> None:
    source = {"kind": "openai", "url": "http://127.0.0.1:8000/v1", "served_model": "m"}
    with pytest.raises(SpecFaults) as told:
        parse_spec(spec_with(toys[1], source, {"kind": "python", "name": "j"}))
    assert "/reward/sources/1/kind" in {fault.pointer for fault in told.value.faults}


def test_a_served_model_needs_its_address_and_its_name(toys: tuple[Path, dict[str, Any]]) -> None:
    source = {"kind": "python", "name": "length"}
    with pytest.raises(SpecFaults) as told:
        parse_spec(spec_with(toys[1], source, {"kind": "openai", "batch_size": 2}))
    assert [(fault.pointer, fault.message) for fault in told.value.faults] == [
        ("/gate/judge", "a scorer of kind openai takes `served_model`, which is missing"),
        ("/gate/judge", "a scorer of kind openai takes `url`, which is missing"),
        ("/gate/judge/batch_size", "`batch_size` is for kind http, and this is openai; leave it out"),
    ]
