"""Which addresses webhooks may have: hosts of the list `PPO_WEBHOOK_HOSTS`, written as `ppo_core.spec.hosts` says.

Without the list there is no webhook at all. The same list counts when an address is stored and again, for the number
that its name has turned out to be, at every connection: a name that points into a private range later is not followed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ppo_core.spec.hosts import AllowedHosts, Endpoint, parse_endpoint

_QUERY = re.compile(r"(?:[A-Za-z0-9._~/&=+:,-]|%[0-9A-Fa-f]{2})*")


class WebhookHosts(AllowedHosts):
    """Where webhooks may be."""

    variable = "PPO_WEBHOOK_HOSTS"


@dataclass(frozen=True)
class Target:
    """A webhook's address in its parts; `path` has the query, if any."""

    endpoint: Endpoint
    path: str


def parse_target(url: str) -> Target:
    """The parts of a webhook's address: http or https, in plain letters, with a query where the receiver wants one.

    Raises:
        ValueError: it is no such address; the message says what to write.
    """
    if "@" in url or "#" in url:
        raise ValueError("give the address without user name, password or fragment; messages are signed instead")
    place, mark, query = url.partition("?")
    if not _QUERY.fullmatch(query):
        raise ValueError("the query of the address holds odd characters; write them as %XX")
    try:
        endpoint = parse_endpoint(place)
    except ValueError as error:
        if "port" in str(error) or "IPv6" in str(error):
            raise
        raise ValueError("expected an address such as https://hooks.example/alerts, in plain letters") from error
    return Target(endpoint, f"{endpoint.path}{mark}{query}")


def problem_with(url: str, hosts: AllowedHosts) -> str | None:
    """Why a webhook may not have this address, and what to do; None when it may. Names are not looked up."""
    try:
        target = parse_target(url)
    except ValueError as error:
        return str(error)
    return hosts.problem(target.endpoint)
