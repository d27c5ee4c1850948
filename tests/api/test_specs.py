"""Presets, and what the schema says of a spec."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from starlette.testclient import TestClient

from api.specs import presets, spec_yaml

TEXT = """\
# The reviews example.
# Prepare it first: make demo

name: reviews      # shown in the list
policy: {model: build/policy, dtype: float32}
data:
  prompts: "build/train.jsonl"   # build/train.jsonl holds the opening words
  held_out: build/held_out.jsonl
reward: {sources: [{kind: sequence_classifier, model: build/policy}]}
"""


@pytest.fixture
def examples_root(tmp_path: Path) -> Path:
    folder = tmp_path / "examples" / "reviews"
    folder.mkdir(parents=True)
    (folder / "spec.yaml").write_text(TEXT)
    (tmp_path / "examples" / "broken").mkdir()
    (tmp_path / "examples" / "broken" / "spec.yaml").write_text("name: [")
    return tmp_path


def test_a_preset_keeps_its_comments_and_names_its_files_by_absolute_paths(examples_root: Path) -> None:
    (preset,) = presets([examples_root, examples_root])
    assert (preset.name, preset.title) == ("reviews", "reviews")
    assert preset.description == "The reviews example. Prepare it first: make demo"
    assert "# shown in the list" in preset.spec_yaml
    data = yaml.safe_load(preset.spec_yaml)
    build = examples_root / "examples" / "reviews" / "build"
    assert data["policy"] == {"model": str(build / "policy"), "dtype": "float32"}
    assert data["data"] == {"prompts": str(build / "train.jsonl"), "held_out": str(build / "held_out.jsonl")}
    assert data["reward"]["sources"] == [{"kind": "sequence_classifier", "model": str(build / "policy")}]


def test_paths_that_are_also_other_words_are_still_right(examples_root: Path) -> None:
    text = TEXT.replace("build/policy", "reviews")
    (examples_root / "examples" / "reviews" / "spec.yaml").write_text(text)
    (preset,) = presets([examples_root])
    data = yaml.safe_load(preset.spec_yaml)
    assert data["name"] == "reviews"
    assert data["policy"]["model"] == str(examples_root / "examples" / "reviews" / "reviews")


def test_the_schema_and_presets_are_served(viewer: TestClient) -> None:
    schema = viewer.get("/v1/spec/schema").json()
    assert schema["properties"]["iterations"]["maximum"] == 10_000_000
    assert schema["properties"]["iterations"]["changeable"] == "rollback"
    assert viewer.get("/v1/spec/presets").json() == {"items": [], "next": None}


def test_a_stored_spec_of_another_version_is_shown_as_it_is() -> None:
    assert yaml.safe_load(spec_yaml({"name": "old", "gone": 1})) == {"name": "old", "gone": 1}
