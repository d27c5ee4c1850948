"""`ppo alerts` and `ppo webhooks`: what trainers noticed, and who is told of it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from itertools import islice
from json import dumps
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.table import Table

from ppo import show
from ppo.cli_options import Json, ListsByDefault
from ppo.cli_runs import platform
from ppo.finding import find_run
from ppo.spec_file import read_alert_rules
from ppo.wire import Alert, AlertRules, AlertStatus, Delivery, Evidence, Webhook
from ppo_core.rundir import number

AlertId = Annotated[str, typer.Argument(metavar="ID", help="An alert's id, as `ppo alerts` shows it.")]
WebhookId = Annotated[str, typer.Argument(metavar="ID", help="A webhook's id, as `ppo webhooks` shows it.")]
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

alerts = typer.Typer(cls=ListsByDefault, help="List alerts: ppo alerts [RUN] [--open]. Or acknowledge or snooze one.")
rules = typer.Typer(
    cls=ListsByDefault,
    help="Show the platform's own alert rules: ppo alerts rules. Or put others there: ppo alerts rules set FILE.",
)
webhooks = typer.Typer(cls=ListsByDefault, help="List webhooks: ppo webhooks. Or make, test, change or remove one.")


# Alerts


@alerts.command()
def ls(
    run: Annotated[
        str | None, typer.Argument(help="A run's id or name. Default: all runs.", show_default=False)
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Only alerts that are open.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 50,
    json: Json = False,
) -> None:
    """List alerts, the last raised first.

    Into a pipe or file: one a line, fields between tabs, no heading: id, run, status, severity, rule,
    segment:iteration, onset, title.
    """
    with platform(json) as (client, _):
        run_id = find_run(client, run)["id"] if run is not None else None
        statuses: list[AlertStatus] = ["open"] if open_ else []
        found = list(islice(client.alerts.list(run_id=run_id, statuses=statuses), limit))
        if json:
            show.as_json(found)
        elif not show.out.is_terminal:
            for alert in found:
                print(*_alert_fields(alert), sep="\t")
        elif found:
            _alert_table(found)
        else:
            show.line("no open alerts" if open_ else "no alerts")


@alerts.command("show")
def show_alert(alert: AlertId, json: Json = False) -> None:
    """Show one alert: evidence, meaning, remedy, and the way back that it suggests."""
    with platform(json) as (client, _):
        found = client.alerts.get(alert)
        if json:
            show.as_json(found)
        else:
            _alert_page(found)


@alerts.command()
def ack(alert: AlertId, json: Json = False) -> None:
    """Say that somebody has seen an alert."""
    with platform(json) as (client, _):
        _changed(client.alerts.ack(alert), json)


@alerts.command()
def snooze(
    alert: AlertId,
    for_: Annotated[str, typer.Option("--for", metavar="TIME", help="So long: 90s, 30m, 2h, 1d; 0 ends it.")] = "1h",
    json: Json = False,
) -> None:
    """Hear nothing of an alert for a while: no webhook is told, pages show it folded."""
    seconds = _seconds(for_, "--for")
    with platform(json) as (client, _):
        _changed(client.alerts.snooze(alert, seconds=seconds), json)


def _seconds(text: str, option: str) -> int:
    found = re.fullmatch(r"(\d{1,9})([smhd]?)", text.strip())
    if found is None:
        raise typer.BadParameter(f"{text!r} is no time; write 90s, 30m, 2h or 1d", param_hint=option)
    return int(found[1]) * _UNITS[found[2] or "s"]


def _changed(alert: Alert, json: bool) -> None:
    if json:
        show.as_json(alert)
    else:
        show.line(f"{alert['id']} {standing(alert)}: {alert['title']}")


def standing(alert: Alert) -> str:
    """How an alert stands, in words."""
    words: list[str] = [alert["status"]]
    if alert["acknowledged_by"]:
        words.append(f"acknowledged by {alert['acknowledged_by']}")
    if alert["snoozed"] and alert["snoozed_until"]:
        words.append(f"snoozed until {alert['snoozed_until'][:16].replace('T', ' ')} UTC")
    return ", ".join(words)


def _alert_fields(alert: Alert) -> tuple[object, ...]:
    place = f"{alert['segment']}:{alert['iteration']}"
    title = " ".join(alert["title"].split())
    return alert["id"], alert["run_id"], alert["status"], alert["severity"], alert["rule"], place, alert["onset"], title


def _alert_table(found: Iterable[Alert]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for heading in ("alert", "run", "severity", "since", "stands", "what"):
        table.add_column(heading, no_wrap=heading not in ("run", "stands", "what"))
    for alert in found:
        table.add_row(
            alert["id"],
            show.plain(alert["run_name"]),
            alert["severity"],
            str(alert["onset"]),
            show.plain(standing(alert)),
            show.plain(alert["title"]),
        )
    show.out.print(table)


def _alert_page(alert: Alert) -> None:
    show.line(f"{alert['severity']}: {alert['title']}  ({alert['id']})")
    suggestion = alert["suggestion"]
    # A story's detail is its signs in a row, and another alert's one sign is its title: each is said once.
    signs = alert["evidence"] if alert["kind"] == "story" else []
    for label, value in (
        ("run", f"{alert['run_name']}  {alert['run_id']}"),
        ("stands", standing(alert)),
        ("raised", f"at iteration {alert['iteration']} of segment {alert['segment']}, since {alert['onset']}"),
        ("numbers", "" if signs else alert["detail"]),
        ("meaning", alert["meaning"]),
        ("remedy", alert["remedy"]),
    ):
        if value:
            show.line(f"  {label:<8} {value}")
    for sign in signs:
        show.line(f"  sign     {sign['text'] or _numbers(sign)}")
    if suggestion and suggestion["rollback"]:
        settings = "".join(f" --set {name}={_as_yaml(value)}" for name, value in suggestion["changes"].items())
        place = f"{suggestion['segment']}:{suggestion['iteration']}"
        show.line(f"  go back  ppo rollback {alert['run_id']} {place}{settings}")


def _numbers(sign: Evidence) -> str:
    return f"{sign['metric']}: {_plain(sign['then'])} → {_plain(sign['now'])}"


def _plain(value: object) -> str:
    return number(value) if isinstance(value, int | float) or value is None else str(value)


def _as_yaml(value: object) -> str:
    """A setting as `--set` reads it, for a shell: `null` and `true`, not Python's words for them."""
    return shlex.quote(value if isinstance(value, str) else dumps(value))


# The platform's own alert rules


@rules.command("ls")
def show_rules(json: Json = False) -> None:
    """Show the platform's own alert rules: what a submitted spec takes where its `alerts` say nothing.

    As YAML that `ppo alerts rules set` takes, with the version in a comment.
    """
    with platform(json) as (client, _):
        _rules(client.alert_rules.get(), json)


@rules.command("set")
def set_rules(
    file: Annotated[
        Path, typer.Argument(help="YAML or JSON with the key `alerts`, as in a spec; {alerts: {}} for no rules.")
    ],
    version: Annotated[
        int | None,
        typer.Option(min=0, help="Only if the rules are still of this version.", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    """Put other alert rules in the place of the platform's, whole. They count for runs submitted from now on."""
    with show.errors(json):
        alerts = read_alert_rules(file)
    with platform(json) as (client, _):
        _rules(client.alert_rules.put(alerts, version=version), json)


def _rules(found: AlertRules, json: bool) -> None:
    if json:
        show.as_json(found)
        return
    changed = f", changed by {found['changed_by']} at {found['changed_at']}" if found["changed_at"] else ""
    print(f"# version {found['version']}{changed}")
    print(yaml.safe_dump({"alerts": found["alerts"]}, sort_keys=False, allow_unicode=True), end="")


# Webhooks


@webhooks.command("ls")
def ls_webhooks(json: Json = False) -> None:
    """List webhooks. Into a pipe or file, between tabs: id, name, enabled, url, events, pending, dead."""
    with platform(json) as (client, _):
        found = client.webhooks.list()
        if json:
            show.as_json(found)
        elif not found and show.out.is_terminal:
            show.line("no webhooks")
        else:
            for hook in found:
                _webhook_line(hook)


@webhooks.command()
def add(
    name: Annotated[str, typer.Argument(help="What people call it.")],
    url: Annotated[str, typer.Argument(help="http or https, of a host in the server's PPO_WEBHOOK_HOSTS.")],
    event: Annotated[
        list[str] | None,
        typer.Option(help="alert.raised, alert.escalated, alert.cleared, run.state. Default: all.", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    """Have an address told what happens. The secret that signs its messages is shown this once."""
    with platform(json) as (client, _):
        made = client.webhooks.create(name, url, event)
        if json:
            show.as_json(made)
        else:
            show.line(f"{made['id']} is told of {', '.join(made['events'])}")
            show.line(f"secret, shown this once: {made['secret']}")


@webhooks.command()
def on(webhook: WebhookId, json: Json = False) -> None:
    """Switch a webhook on."""
    _switch(webhook, True, json)


@webhooks.command()
def off(webhook: WebhookId, json: Json = False) -> None:
    """Switch a webhook off; what waits for it is given up."""
    _switch(webhook, False, json)


@webhooks.command()
def rotate(
    webhook: WebhookId,
    overlap: Annotated[
        str,
        typer.Option(metavar="TIME", help="So long the old secret signs, too: 90s, 30m, 2h, 1d; 0 ends it at once."),
    ] = "1d",
    json: Json = False,
) -> None:
    """Give a webhook another secret, shown this once; for a while messages bear a signature of each."""
    overlap_s = _seconds(overlap, "--overlap")
    with platform(json) as (client, _):
        made = client.webhooks.rotate_secret(webhook, overlap_s)
        if json:
            show.as_json(made)
        else:
            show.line(f"secret, shown this once: {made['secret']}")
            until = made["old_secrets_until"]
            show.line(f"the old one signs beside it until {until}" if until else "the old one signs no more")


@webhooks.command()
def rm(webhook: WebhookId) -> None:
    """Remove a webhook."""
    with platform(False) as (client, _):
        client.webhooks.delete(webhook)
        show.line(f"{webhook} is removed")


@webhooks.command("test")
def send_test(webhook: WebhookId, json: Json = False) -> None:
    """Send it a message that says nothing but that it works."""
    with platform(json) as (client, _):
        _delivery(client.webhooks.test(webhook), json)


@webhooks.command()
def deliveries(
    webhook: WebhookId,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 20,
    json: Json = False,
) -> None:
    """What was sent to a webhook, or waits, the newest first."""
    with platform(json) as (client, _):
        found = list(islice(client.webhooks.deliveries(webhook), limit))
        if json:
            show.as_json(found)
        else:
            for one in found:
                _delivery(one, False)


@webhooks.command()
def redeliver(
    webhook: WebhookId,
    delivery: Annotated[str, typer.Argument(help="Its id, as `ppo webhooks deliveries` shows it.")],
    json: Json = False,
) -> None:
    """Send a message once more, under its old id."""
    with platform(json) as (client, _):
        _delivery(client.webhooks.redeliver(webhook, delivery), json)


def _switch(webhook: str, enabled: bool, json: bool) -> None:
    with platform(json) as (client, _):
        found = client.webhooks.change(webhook, {"enabled": enabled})
        if json:
            show.as_json(found)
        else:
            _webhook_line(found)


def _webhook_line(hook: Webhook) -> None:
    standing = "on" if hook["enabled"] else f"off ({hook['disabled_reason']})"
    events = ",".join(hook["events"])
    print(hook["id"], hook["name"], standing, hook["url"], events, hook["pending"], hook["dead"], sep="\t")


def _delivery(found: Delivery, json: bool) -> None:
    if json:
        show.as_json(found)
        return
    why = f": {found['last_error']}" if found["last_error"] else ""
    attempts = f"{found['attempts']} attempt{'' if found['attempts'] == 1 else 's'}"
    show.line(f"{found['id']}  {found['event']}  {found['status']} after {attempts}{why}")


def register(app: typer.Typer) -> None:
    """Add these commands to the `ppo` command."""
    alerts.add_typer(rules, name="rules")
    app.add_typer(alerts, name="alerts")
    app.add_typer(webhooks, name="webhooks")
