"""What the command line adds to a refusal of a spec whose files were never made."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo.client import RequestError
from ppo.spec_file import read_spec_file, told_how_to_prepare

PROBLEM = {"code": "bad_spec", "errors": [{"pointer": "/policy/model", "message": "there is none"}]}


def refused(spec: Path, problem: dict[str, object] = PROBLEM) -> list[str]:
    with pytest.raises(RequestError) as error, told_how_to_prepare(spec, read_spec_file(spec)):
        raise RequestError(422, problem)
    return [fault["message"] for fault in error.value.errors]


def test_an_example_that_was_not_prepared_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "examples" / "toy"
    folder.mkdir(parents=True)
    spec = folder / "spec.yaml"
    spec.write_text("policy: {model: made/policy}\n")
    assert refused(spec) == ["there is none"], "nothing beside it would make anything"
    (folder / "prepare.py").touch()
    assert refused(spec)[1:] == [f"make what it names first: python {folder / 'prepare.py'}"]
    monkeypatch.chdir(tmp_path)
    assert refused(spec)[1:] == ["make what it names first: python -m examples.toy.prepare"]
    assert refused(spec, {"code": "database_unavailable"}) == []
    (folder / "made" / "policy").mkdir(parents=True)
    assert refused(spec) == ["there is none"], "its files are there: something else is wrong with it"
