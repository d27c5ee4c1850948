"""Runs whose every number is compared: specs with all that has a state, and a kill in the middle of an update."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil

from ppo_core.rundir import checkpoints, read_journal, read_manifest, segments
from tests.ppo_core.toy_run import make_toy, other_classifier, timeless
from tests.worker.platform import Platform
from worker.processes import marked_processes

STEP_S = 0.004
HALF = 3  # iterations up to the checkpoint that is gone on from; as many follow


def stateful_spec(folder: Path) -> dict[str, Any]:
    """Adaptive KL, running moments of scores, a length baseline, critic warm-up, a learning-rate schedule, held-out
    scores and a gate with a judge."""
    toy = make_toy(folder)
    judge = other_classifier(folder / "judge")
    toy["rollout"] |= {"temperature": 1.0, "stop_ids": list(range(10, 50))}  # answers of one to eight tokens
    toy["reward"] |= {"normalize": True, "length_baseline": "linear", "clip": 3.0, "missing_eos_penalty": -0.5}
    toy["update"] = {
        "learning_rate": 1e-3,
        "value_learning_rate": 3e-3,
        "epochs": 2,
        "minibatches": 2,
        "lr_schedule": "linear",
        "warmup_steps": 6,
        "critic_warmup_iterations": 1,
        "entropy_coef": 0.01,
    }
    return toy | {
        "iterations": 2 * HALF,
        "kl": {"controller": "adaptive", "coef": 0.1, "target": 0.02, "horizon": 16},
        "gate": {
            "every": 2,
            "prompts": 2,
            "action": "note",
            "judge": {"kind": "sequence_classifier", "model": str(judge)},
        },
        "evaluation": {"every": 2, "prompts": 2},
        "samples": {"per_iteration": 8},
        "checkpoints": {"every": HALF, "keep_last": -1},
    }


def kill_in_update(platform: Platform, run_id: str, iteration: int) -> None:
    """Kill -9 the last rank of the trainer while it is in the update of this iteration, which the journal proves."""
    pids = stop_in_update(platform, run_id, iteration)
    os.kill(pids[-1], signal.SIGKILL)
    signal_all(pids[:-1], signal.SIGCONT)


def lose_machine_in_update(platform: Platform, run_id: str, iteration: int) -> None:
    """Kill -9 worker, supervisor and trainer in the update of this iteration: nothing of their machine is left."""
    stop_in_update(platform, run_id, iteration)
    for process in platform.processes:
        process.kill()
        process.wait(10)
    for process_left in marked_processes(run_id, 10**6):
        os.kill(process_left.pid, signal.SIGKILL)


def stop_in_update(platform: Platform, run_id: str, iteration: int) -> list[int]:
    """SIGSTOP the trainer in the update of this iteration, which the journal proves; returns its ranks' numbers.

    From the iteration before on the trainer goes a few milliseconds at a time, so that no update is too short for it.
    """
    journal, offset, pids, last = platform.segment(run_id).journal, 0, [], None
    deadline = time.monotonic() + 240
    while last is None or (last.iteration, last.payload.get("phase")) != (iteration, "update"):
        assert time.monotonic() < deadline, f"{last}\n{platform.logs(run_id)}"
        signal_all(pids, signal.SIGCONT)
        time.sleep(STEP_S)
        if last is not None and last.iteration >= iteration - 1:
            pids = pids or ranks_of(platform.supervisor_pid(run_id))
            signal_all(pids, signal.SIGSTOP)
        events, offset = read_journal(journal, offset)
        last = events[-1] if events else last
        assert last is None or last.iteration <= iteration, last
        assert last is None or last.type != "end", f"{last.payload}\n{platform.logs(run_id)}"
    return pids


def ranks_of(supervisor: int) -> list[int]:
    """Process numbers of the present attempt, by rank."""
    found = psutil.Process(supervisor).children()
    return [process.pid for process in sorted(found, key=lambda each: int(each.environ()["RANK"]))]


def signal_all(pids: list[int], signum: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, signum)


def metrics_of(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Every metric but times, throughput, memory and share of the limit, by iteration, in whichever segment it is."""
    found: dict[int, dict[str, Any]] = {}
    for segment in segments(run_dir):
        for event in read_journal(segment.journal, max_bytes=2**30)[0]:
            if event.type == "metrics":
                found.setdefault(event.iteration, {}).update(timeless(event.payload))
    return found


def samples_of(run_dir: Path) -> dict[str, str]:
    """Texts and token records of every response, prompts in their order, by file name."""
    return {path.name: path.read_text() for one in segments(run_dir) for path in one.samples.iterdir()}


def state_of(checkpoint: Path) -> dict[str, Any]:
    """All that a checkpoint holds: digests of its files, and what stands in state.json but the time that it took."""
    document = json.loads((checkpoint / "state.json").read_text())
    document["trainer"].pop("hours")
    files = read_manifest(checkpoint)
    return {
        "digests": {name: entry["sha256"] for name, entry in files.items() if name != "state.json"},
        **{name: document[name] for name in ("trainer", "random", "versions")},
    }


def last_state(run_dir: Path) -> dict[str, Any]:
    return state_of(checkpoints(segments(run_dir)[-1])[-1])
