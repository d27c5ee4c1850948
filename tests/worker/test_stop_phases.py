"""Stop in every phase of a real run of the demo's size: within 5 s and the checkpoint's own time, everything proved.

The time counts from the api's 202 to `stopped`, which is written once every process is gone. The slow repetitions want
a machine that does nothing else; here other tests run beside, so what counts is that the trainer begins nothing new.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from sqlalchemy import select
from sqlalchemy.engine import make_url
from transformers import GenerationConfig, LlamaForCausalLM, LlamaForSequenceClassification

from api.settings import ApiSettings
from examples.reviews.policy import llama_config
from examples.reviews.settings import ModelShape, TokenizerSettings
from examples.reviews.tokenizer import EOS_ID, PAD_ID, save_reading_copy, train_tokenizer
from ppo_core.rundir import Event, all_events, verify_checkpoint
from store import keys
from store.models import Checkpoint, Run
from store.states import TERMINAL
from tests.api.live_server import in_thread
from tests.worker.platform import Platform
from worker.processes import marked_processes

pytestmark = [pytest.mark.stack, pytest.mark.timeout(900)]

STOP_S = 5.0
BUSY_MACHINE_S = 40.0
# What is to be seen in the journal as a phase begins: its name, and in which iteration at the earliest.
PHASES = {
    "queued": None,
    "loading": ("loading", 0),
    "evaluation": ("evaluation", 0),
    "rollout": ("rollout", 1),
    "scoring": ("scoring", 1),
    "logprobs": ("logprobs", 1),
    "update": ("update", 1),
    "sync": ("sync", 1),
    "gate": ("evaluation", 1),
    "saving": ("saving", 1),
}
NOTHING_SAVED = ("queued", "loading")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The reviews example with random weights of its own shape, and prompts of made-up words."""
    folder = tmp_path_factory.mktemp("demo-sized")
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(3000)]
    texts = [" ".join(rng.choices(words, k=20)) for _ in range(1500)]
    train_tokenizer(texts, TokenizerSettings(), folder / "policy")
    save_reading_copy(folder / "policy", folder / "reward")
    vocab_size = len(json.loads((folder / "policy" / "tokenizer.json").read_text())["model"]["vocab"])
    torch.manual_seed(1)
    config = llama_config(ModelShape(), vocab_size)
    policy = LlamaForCausalLM(config)
    policy.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    policy.save_pretrained(folder / "policy")
    config.num_labels = 1
    LlamaForSequenceClassification(config).save_pretrained(folder / "reward")
    save_reading_copy(folder / "policy", folder / "judge")
    LlamaForSequenceClassification(config).save_pretrained(folder / "judge")
    for name, count in (("train", 512), ("held_out", 256)):
        rows = [{"prompt": " ".join(rng.choices(words, k=4))} for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = {"kind": "sequence_classifier", "model": str(folder / "reward")}
    return {
        "name": "demo-sized",
        "seed": 1,
        "iterations": 110,
        "policy": {"model": str(folder / "policy"), "dtype": "float32", "value_head": "shared"},
        "data": {
            "prompts": str(folder / "train.jsonl"),
            "held_out": str(folder / "held_out.jsonl"),
            "max_prompt_tokens": 24,
        },
        "rollout": {"engine": "transformers", "batch_size": 64, "max_new_tokens": 24},
        "reward": {"sources": [reward]},
        "update": {"epochs": 2, "minibatches": 4, "learning_rate": 1.5e-4},
        "evaluation": {"every": 10, "prompts": 256},
        "checkpoints": {"every": 110},
    }


@dataclass
class Running:
    """A platform with one worker, and its api as people reach it."""

    platform: Platform
    api: httpx.Client


@pytest.fixture(scope="module")
def running(postgres: Any, _template_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    url = postgres.create_database(make_url(_template_url).database)
    data = tmp_path_factory.mktemp("data")
    with Platform(url, data, {"PPO_TRAINER_COMMAND": "", "OMP_NUM_THREADS": "1"}) as platform:
        platform.start("worker.loop")
        with platform.sessions.begin() as session:
            key = keys.create_key(session, "test", "operator")[1]
        settings = ApiSettings(DATABASE_URL=url, REDIS_URL=None, data_dir=data, roots=(data,))
        headers = {"Authorization": f"Bearer {key}"}
        with in_thread(settings) as (address, _), httpx.Client(base_url=address, headers=headers) as api:
            yield Running(platform, api)
    postgres.drop_database(url)


@pytest.mark.parametrize("phase", ["queued", "loading", "rollout", "update"])
def test_stop_in(running: Running, spec: dict[str, Any], phase: str) -> None:
    took_s, saving_s = stop_in(running, spec, phase)
    assert took_s <= BUSY_MACHINE_S + saving_s


@pytest.mark.slow
@pytest.mark.parametrize("repetition", range(3))
@pytest.mark.parametrize("phase", PHASES)
def test_stop_again_and_again_in(running: Running, spec: dict[str, Any], phase: str, repetition: int) -> None:
    took_s, saving_s = stop_in(running, spec, phase)
    assert took_s <= STOP_S + saving_s, f"{took_s:.1f} s, of which the checkpoint took {saving_s:.1f} s"


def stop_in(running: Running, spec: dict[str, Any], phase: str) -> tuple[float, float]:
    """Seconds from the answer to `stopped`, and of them those that the checkpoint took."""
    platform = running.platform
    if phase == "queued":
        ahead = platform.submit_spec(_spec_for(spec, "loading"))
        platform.wait(ahead, lambda run: run.state != "queued")
    run_id = platform.submit_spec(_spec_for(spec, phase))
    _wait_for(platform, run_id, phase)
    answer = running.api.post(f"/v1/runs/{run_id}/stop")
    asked = time.monotonic()
    assert answer.status_code == 202, answer.text
    twice = running.api.post(f"/v1/runs/{run_id}/stop")  # harmless: the same command, or a run that has stopped
    assert twice.status_code == 409 or twice.json()["id"] == answer.json()["id"]
    run = platform.wait_state(run_id, *TERMINAL)
    took_s = time.monotonic() - asked
    left = [Path(f"/proc/{one.pid}/cmdline").read_bytes() for one in marked_processes(run_id, 10**6)]
    assert [line for line in left if b"worker.supervise" not in line] == []
    assert (run.state, run.reason_code) == ("stopped", "stopped"), platform.logs(run_id)
    command = running.api.get(f"/v1/runs/{run_id}/commands/{answer.json()['id']}").json()
    assert command["status"] == "done"
    saving_s = _saved(platform, run)
    assert (saving_s is None) == (phase in NOTHING_SAVED)
    _begins_nothing_new(platform, run_id, command["id"])
    _report(phase, took_s, saving_s)
    if phase == "queued":
        assert running.api.post(f"/v1/runs/{ahead}/stop").status_code == 202
        platform.wait_state(ahead, *TERMINAL)
    assert platform.busy_slots() == 0
    return took_s, saving_s or 0.0


def _begins_nothing_new(platform: Platform, run_id: str, command_id: str) -> None:
    """After the trainer has taken the stop up it only saves."""
    told = list(all_events(platform.segment(run_id).journal))
    taken_up = [n for n, event in enumerate(told) if event.type == "ack" and event.payload["command"] == command_id]
    if taken_up:
        begun = [event.payload["phase"] for event in told[taken_up[0] :] if event.type == "phase"]
        assert begun in ([], ["saving"])


def _spec_for(spec: dict[str, Any], phase: str) -> dict[str, Any]:
    """What brings a run to the phase soon; the phase itself has the demo's size."""
    if phase == "gate":
        judge_model = Path(spec["policy"]["model"]).with_name("judge")
        judge = {"kind": "sequence_classifier", "model": str(judge_model)}
        gate = {"judge": judge, "every": 1, "prompts": 128}
        return {**spec, "gate": gate, "evaluation": {"every": 100, "prompts": 256}}
    if phase == "saving":
        return {**spec, "checkpoints": {"every": 1}, "evaluation": {"every": 100, "prompts": 4}}
    return spec if phase == "evaluation" else {**spec, "evaluation": {"every": 100, "prompts": 4}}


def _wait_for(platform: Platform, run_id: str, phase: str) -> None:
    wanted = PHASES[phase]
    if wanted is None:
        return
    name, iteration = wanted
    deadline = time.monotonic() + 120
    journal = platform.segment(run_id).journal

    def reached() -> bool:
        events = all_events(journal) if journal.exists() else iter(())
        return any(
            event.type == "phase" and event.payload["phase"] == name and event.iteration >= iteration
            for event in events
        )

    while not reached():
        assert time.monotonic() < deadline, platform.logs(run_id)
        time.sleep(0.01)


def _saved(platform: Platform, run: Run) -> float | None:
    """How long the newest checkpoint took, verified against its manifest; None where nothing was saved."""
    with platform.sessions() as session:
        rows = session.scalars(select(Checkpoint).where(Checkpoint.run_id == run.id).order_by(Checkpoint.iteration))
        newest = rows.all()[-1:]
    if not newest:
        return None
    assert newest[0].iteration == run.iteration
    verify_checkpoint(platform.data / "runs" / run.id / newest[0].path, newest[0].manifest_sha256)
    events: list[Event] = list(all_events(platform.segment(run.id).journal))
    began = [event for event in events if event.type == "phase" and event.payload["phase"] == "saving"][-1]
    ended = [event for event in events if event.type == "checkpoint"][-1]
    return (datetime.fromisoformat(ended.time) - datetime.fromisoformat(began.time)).total_seconds()


def _report(phase: str, took_s: float, saving_s: float | None) -> None:
    """One line a stop, for the table of docs/reliability.md, where PPO_STOP_TIMES names a file."""
    path = os.environ.get("PPO_STOP_TIMES")
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"phase": phase, "took_s": took_s, "saving_s": saving_s}) + "\n")
