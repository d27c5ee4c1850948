"""The script from its case to its files, with the real trainer and the real vLLM, and what needs CUDA replaced."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.gpu import __main__ as script
from bench.gpu.observations import GIB
from tests.bench.test_gpu import ABOUT, TINY

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


@pytest.mark.parametrize("engine", script.ENGINES)
def test_every_promise_is_kept(tmp_path: Path, engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = script.run(TINY, tmp_path, ABOUT, "tests.bench.gpu_like_run", [engine])
    assert code == 0, capsys.readouterr().err
    (run,) = json.loads((tmp_path / "gpu.json").read_text())["runs"]
    assert run["engine"] == engine
    assert (run["transfer"], run["num_iterations"], len(run["sleeps"])) == ("ipc", 2, 2)
    assert run["share_bytes"] == 30 * GIB
    assert all(metrics["limit/fraction"] > 0 for metrics in run["metrics"])


def test_the_device_and_the_engines_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="a card", total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: card)
    about = script.about_here()
    assert about["device"] == "a card, 80 GiB"
    assert (about["vllm"], about["deepspeed"]) == ("0.32.0", "0.19.8")
    assert about["torch"].startswith("2.13.0")
