"""Chromium, and the whole platform to point it at: with the real trainer, or with a scripted one that is quicker."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from ppo.local.stack import Stack

ROOT = Path(__file__).parents[2]
SCRIPTED = f"{sys.executable} {ROOT / 'tests' / 'worker' / 'scripted_trainer.py'}"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run",
]  # fmt: skip


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """The system's Chromium where there is one, else the one that `playwright install` brought.

    For one module: as long as Playwright is there an event loop runs in this thread, and no other can.
    """
    expect.set_options(timeout=10_000)  # A busy machine draws late.
    names = (os.environ.get("PPO_CHROMIUM", "chromium"), "chromium-browser", "google-chrome", "google-chrome-stable")
    program = next((found for name in names if (found := shutil.which(name))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session", autouse=True)
def _pages_are_built() -> None:
    assert (ROOT / "web" / "dist" / "index.html").is_file(), "web/dist is missing: build the pages with make setup"


class Visitor:
    """A signed-in browser at one platform. What its pages complain about is kept in `complaints`."""

    def __init__(self, context: BrowserContext, stack: Stack) -> None:
        self.context = context
        self.stack = stack
        self.complaints: list[str] = []
        self.page = self.new_page()
        self.page.goto(stack.login_link())
        self.page.get_by_role("heading", name="Runs", exact=True).wait_for()

    def new_page(self) -> Page:
        page = self.context.new_page()
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda message: message.type == "error" and self.complaints.append(message.text))
        page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))
        return page

    def open(self, path: str) -> Page:
        self.page.goto(self.stack.url + path)
        return self.page


@pytest.fixture
def visit(chromium: Browser) -> Iterator[Callable[..., Visitor]]:
    """Make a visitor; keywords go to the browser's context. A page that complained fails the test."""
    visitors: list[Visitor] = []

    def make(stack: Stack, **options: Any) -> Visitor:
        context = chromium.new_context(**{"viewport": {"width": 1400, "height": 900}, **options})
        context.set_default_timeout(20_000)
        visitors.append(Visitor(context, stack))
        return visitors[-1]

    yield make
    for visitor in visitors:
        visitor.context.close()
    assert [visitor.complaints for visitor in visitors if visitor.complaints] == []


class Platform:
    """A stack whose trainer is scripted: its score is the iteration's number."""

    def __init__(self, stack: Stack, inputs: Path) -> None:
        self.stack = stack
        self.inputs = inputs
        self._http = httpx.Client(
            base_url=stack.url, headers={"Authorization": f"Bearer {stack.admin_key}"}, trust_env=False
        )
        self._number = 0

    def spec(self, iterations: int, name: str = "scripted", **more: Any) -> dict[str, Any]:
        return {
            "name": name,
            "iterations": iterations,
            "policy": {"model": "policy"},
            "data": {"prompts": "prompts.jsonl"},
            "rollout": {"batch_size": 4, "max_new_tokens": 8},
            "reward": {"sources": [{"kind": "sequence_classifier", "model": "reward"}]},
            **more,
        }

    def submit(self, iterations: int, name: str = "scripted", **more: Any) -> str:
        """Submit a run; its id."""
        self._number += 1
        body = {"spec": self.spec(iterations, name, **more)}
        answer = self._http.post("/v1/runs", json=body, headers={"Idempotency-Key": f"k-{self._number}"})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def get(self, path: str, **query: Any) -> Any:
        answer = self._http.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def scores(self, run: str) -> dict[int, float | None]:
        """Iteration and score, as the database has them."""
        names = {"runs": run, "names": "reward/score_mean", "max_points": 10_000}
        series = self.get("/v1/metrics/query", **names)["series"]
        return {int(x): y for one in series for x, y in zip(one["x"], one["y"], strict=True)}

    def wait_for(self, run: str, state: str) -> Any:
        """The run, once it is in a state."""
        return self._wait(run, lambda found: bool(found["state"] == state), state)

    def wait_for_iteration(self, run: str, iteration: int) -> Any:
        return self._wait(run, lambda found: bool(found["iteration"] >= iteration), f"at iteration {iteration}")

    def _wait(self, run: str, ready: Callable[[Any], bool], what: str) -> Any:
        deadline = time.monotonic() + 30
        while not ready(found := self.get(f"/v1/runs/{run}")):
            assert time.monotonic() < deadline, f"{found['state']} at {found['iteration']} after 30 s, not {what}"
            time.sleep(0.05)
        return found

    def stop(self, run: str) -> None:
        self._http.post(f"/v1/runs/{run}/stop")


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    with scripted_platform(tmp_path_factory, iteration_s=0.2, nan_at=3) as platform:
        yield platform


@contextmanager
def scripted_platform(tmp_path_factory: pytest.TempPathFactory, **script: Any) -> Iterator[Platform]:
    """A platform whose every trainer follows `script` (`tests/worker/scripted_trainer.py` says what there is)."""
    inputs = tmp_path_factory.mktemp("inputs")
    for name in ("policy", "reward"):
        (inputs / name).mkdir()
        config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 32,
            "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64, "max_position_embeddings": 128,
        }  # fmt: skip
        (inputs / name / "config.json").write_text(json.dumps(config))
        (inputs / name / "model.safetensors").write_bytes(b"")
    (inputs / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"text {n}"}) + "\n" for n in range(8)))
    env = {
        "PPO_TRAINER_COMMAND": SCRIPTED,
        "PPO_SCRIPTED": json.dumps(script),
        "PPO_CPU_SLOTS": "4",
    }
    with Stack(tmp_path_factory.mktemp("stack") / "data", port=0, roots=[inputs], env=env) as stack:
        yield Platform(stack, inputs)
