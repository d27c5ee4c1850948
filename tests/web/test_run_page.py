"""The main job in a browser, nothing scripted: submit, watch, stop, load what was saved."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from playwright.sync_api import Page, expect
from transformers import AutoModelForCausalLM

from ppo.local.stack import Stack
from tests.ppo_core.toy_run import make_toy
from tests.web.conftest import Visitor

pytestmark = pytest.mark.browser

MARKUP = '<img src=x onerror="window.ran=1"><b>bold</b>'
START_MS = 90_000  # torch has to be loaded first, on whatever machine


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and prompts of a run that trains in seconds; names and prompts hold markup."""
    folder = tmp_path_factory.mktemp("toy")
    spec = make_toy(folder) | {"name": f"toy {MARKUP}", "iterations": 2000}
    prompts = folder / "train.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"film {n} {MARKUP[:24]}"}) + "\n" for n in range(24)))
    spec["data"]["max_prompt_tokens"] = 48
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    return folder


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, toy: Path) -> Iterator[Stack]:
    env = {"OMP_NUM_THREADS": "1"}
    with Stack(tmp_path_factory.mktemp("stack") / "data", port=0, roots=[toy], env=env) as stack:
        yield stack


def iteration(page: Page) -> int:
    return int(re.sub(r"\D", "", page.locator("header dl b").inner_text()))


def test_a_run_from_the_form_to_a_checkpoint_that_loads(stack: Stack, toy: Path, visit: Callable[..., Visitor]) -> None:
    """Submit through the form, see points arrive, press Stop, see `stopped` and a checkpoint in Hugging Face form."""
    page = visit(stack).open("/runs/new")
    page.get_by_label("Run spec in YAML").fill((toy / "spec.yaml").read_text())
    page.get_by_role("button", name="Check").click()
    expect(page.get_by_role("heading", name="The spec is valid")).to_be_visible()
    expect(page.get_by_text("2,000 iterations × 8 prompts")).to_be_visible()

    page.get_by_role("button", name="Submit").dblclick()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"toy {MARKUP}")
    run = page.url.rpartition("/")[2]
    expect(page.locator("header [data-state]")).to_have_text("running", timeout=START_MS)

    score = page.locator("[data-metric='reward/score_mean']")
    expect(score).to_have_text(re.compile(r"\d"), timeout=START_MS)
    before = iteration(page)
    expect(page.locator("header dl b")).not_to_have_text(str(before))
    expect(score).not_to_have_text(score.inner_text())
    expect(page.locator("[data-panel=reward] [data-points]")).not_to_have_attribute("data-points", "0")
    expect(page.locator("[data-notice=no-judge]")).to_contain_text("reward hacking")

    page.get_by_role("tab", name="Samples").click()
    sample = page.locator("[data-sample]").first
    expect(sample).to_contain_text(MARKUP[:24])
    sample.get_by_role("button", name="Tokens").click()
    page.get_by_label("Colour by").select_option("kl")
    tokens = sample.get_by_role("toolbar", name="Tokens").get_by_role("button")
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    expect(sample.locator("dl")).to_contain_text("token 2 of")

    page.locator("header").get_by_role("button", name="Stop").click()
    page.get_by_role("button", name="Stop the run").click()
    expect(page.locator("header [data-state]")).to_have_text("stopped", timeout=60_000)
    expect(page.locator("header").get_by_role("button", name="Stop")).to_be_disabled()

    page.get_by_role("tab", name="Checkpoints").click()
    newest = page.locator("[data-checkpoint]").first
    expect(newest).to_contain_text("good")
    expect(newest).to_have_attribute("data-checkpoint", str(iteration(page)))
    path = stack.data / "runs" / run / str(newest.locator("code").first.get_attribute("title"))
    AutoModelForCausalLM.from_pretrained(path / "policy")

    assert page.evaluate("window.ran") is None
    key = {"Authorization": f"Bearer {stack.admin_key}"}
    listed = httpx.get(f"{stack.url}/v1/runs", headers=key, trust_env=False).json()["items"]
    assert [item["id"] for item in listed] == [run], "the double click made one run"
    # Every iteration once, and the untrained policy's evaluation; a panel out of sight waits until it is seen.
    drawn = page.locator("[data-panel=reward] [data-points]")
    drawn.scroll_into_view_if_needed()
    expect(drawn).to_have_attribute("data-points", str(iteration(page) + 1))
