"""The whole example by one command: `python -m examples.length_bias`.

It prepares the models, starts the platform, submits the run, and watches the score climb while the answers get worse,
until the judge's gate stops it. Then it takes checkpoint and settings of the alert's suggestion as they are, has the
run go back, and sees what becomes of it. It ends with a table of what was promised and what was seen, keeps what the
platform told in OUT/story-SEED.json, and leaves with 1 where a promise was broken.

`python -m examples.length_bias twin` has a judge who wants long answers, `… controlled` the reward model without the
bias: neither run is stopped.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from examples.length_bias.prepare import DEFAULT_OUT, prepare
from examples.length_bias.story import RULE, going_right, going_wrong, parts, staying_well, wanting_length
from examples.reviews.corpus import CorpusError
from examples.reviews.download import DownloadError
from examples.reviews.figures import Promise
from examples.reviews.prepare import DEFAULT_OUT as REVIEWS_OUT
from ppo import show
from ppo.client import Client, ClientError, RequestError
from ppo.local.processes import StackError
from ppo.local.stack import DEFAULT_PORT, Stack
from ppo.local.up import Asked, ending_on_signals, make_stack
from ppo.spec_file import read_spec_file
from ppo.wire import Event, Suggestion
from ppo_core.spec import SpecFaults
from ppo_core.spec.loading import parse_spec

HERE = Path(__file__).parent
OUT = HERE / "told"
TALES = {
    "story": (),
    "twin": ("gate.judge.model=prepared/fond_judge_model",),
    "controlled": ("reward.sources.0.model=prepared/controlled_reward_model",),
}
SHOWN = ("reward/score_mean", "response/length_mean", "response/eos_rate", "kl/ref_sequence", "judge/win_rate_vs_start")


class Broken(Exception):
    """The story came to an end too early; the message says why."""


def train(client: Client, spec: str | Mapping[str, Any]) -> tuple[str, list[Event], str]:
    """Submit a run and show it until its end; its id, its events, and how it ended."""
    run = client.submit(spec)
    show.line(f"submitted {run['name']}: {run['id']}")
    events = list(shown(client, run["id"], 0))
    return run["id"], events, ending(client, run["id"])


def tell(client: Client, spec: str | Mapping[str, Any]) -> tuple[list[Event], Suggestion]:
    """Both parts of the story on a platform that runs; returns all events, and the suggestion that was followed.

    Raises:
        Broken: the run did not stop itself, nobody said why, or it could not go on.
    """
    run_id, events, end = train(client, spec)
    if end != "stopped (gate)":
        raise Broken(f"the run is {end}, not stopped by its gate")
    found = [alert for alert in client.alerts.list(run_id=run_id) if alert["rule"] == RULE]
    if not found:
        raise Broken("nobody told that the reward was hacked by length")
    alert = client.alerts.get(found[0]["id"])
    show.line(alert["detail"])
    suggestion = alert["suggestion"]
    if suggestion is None or suggestion["rollback"] is None:
        raise Broken("the alert has no checkpoint to go back to")
    wish = suggestion["rollback"]
    show.line(f"going back to iteration {suggestion['iteration']} with {wish['set']}")
    client.rollback(run_id, wish["checkpoint"], settings=wish["set"], reason=wish["reason"])
    client.wait(run_id, until=lambda now: now["state"] != "stopped")
    events += shown(client, run_id, events[-1]["seq"])
    end = ending(client, run_id)
    if end != "succeeded (goal)":
        raise Broken(f"after the roll back the run is {end}")
    return events, suggestion


def shown(client: Client, run_id: str, after: int) -> Iterator[Event]:
    """A run's events until its end, with a line for every fifth iteration."""
    for event in client.follow(run_id, after=after):
        yield event
        payload = event["payload"]
        if event["type"] == "metrics" and (event["iteration"] or 0) % 5 == 0:
            values = [f"{name} {payload[name]:.3g}" for name in SHOWN if payload.get(name) is not None]
            show.line(f"  {event['iteration']:3d}  " + "  ".join(values))
        elif event["type"] == "alert":
            show.line(f"  alert, {payload['status']}: {payload['title']}")


def ending(client: Client, run_id: str) -> str:
    """State and reason of a run that has ended."""
    run = client.run(run_id)
    end = f"{run['state']} ({run['reason_code']})"
    show.line(f"{end}: {run['reason_detail']}" if run["reason_detail"] else end)
    return end


def table(promises: list[Promise]) -> str:
    """Markdown."""
    lines = ["| | promised | seen |", "|---|---|---|"]
    lines += [f"| {each.name} | {each.bound} | {each.shown}{'' if each.holds else ' ✗'} |" for each in promises]
    return "\n".join(lines)


def play(stack: Stack, tale: str, spec: Mapping[str, Any], kept: Path) -> list[Promise]:
    """Have a tale told, keep what was told, and return what became of its promises."""
    began = time.monotonic()
    warmed_up = parse_spec(spec).update.critic_warmup_iterations
    suggestion = None
    with Client(stack.url, stack.admin_key) as client:
        if tale == "story":
            events, suggestion = tell(client, spec)
        else:
            _, events, end = train(client, spec)
            if end != "succeeded (goal)":
                raise Broken(f"the run is {end}")
    found = [part for _, part in sorted(parts(events).items())]
    if tale == "story":
        promises = [*going_wrong(found[0], warmed_up), *going_right(found[1], found[0], warmed_up)]
    elif tale == "twin":
        promises = wanting_length(found[0], warmed_up)
    else:
        promises = staying_well(found[0], warmed_up)
    document = {
        "seconds": round(time.monotonic() - began),
        "suggestion": suggestion,
        "events": [event for event in events if event["type"] in ("metrics", "alert", "gate", "state")],
    }
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(document))
    show.line(f"{document['seconds']} s")
    show.line(table(promises))
    return promises


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.length_bias", description="Tell the example's story.")
    parser.add_argument("tale", nargs="?", choices=list(TALES), default="story")
    parser.add_argument("--data", type=Path, default=HERE / "data", help="data folder of the platform")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="port; when taken, the next free one")
    parser.add_argument("--out", type=Path, default=OUT, help="where what was told is kept")
    parser.add_argument("--seed", type=int, default=1, help="of the run")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="change a field of the spec")
    asked = parser.parse_args()
    stack = make_stack(asked.data, asked.port, [HERE], show.line)
    with ending_on_signals(stack):
        try:
            prepare(DEFAULT_OUT, REVIEWS_OUT / "cache", Console())
            spec = read_spec_file(HERE / "spec.yaml", [*TALES[asked.tale], f"seed={asked.seed}", *asked.set])
            with stack:
                promises = play(stack, asked.tale, spec, asked.out / f"{asked.tale}-{asked.seed}.json")
        except Asked:
            return 130
        except (Broken, DownloadError, CorpusError, StackError, SpecFaults, RequestError, ClientError) as error:
            show.line(f"error: {error}", show.err)
            return 1
    return 0 if all(promise.holds for promise in promises) else 1


if __name__ == "__main__":
    sys.exit(main())
