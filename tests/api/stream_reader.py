"""Reads server-sent events as a browser does: by lines, remembering the last id."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True)
class Message:
    event: str
    data: Any
    id: str | None


def read_messages(response: httpx.Response) -> Iterator[Message]:
    fields: dict[str, str] = {}
    for line in response.iter_lines():
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "event" in fields:
            yield Message(fields["event"], json.loads(fields["data"]), fields.get("id"))
            fields = {}
        else:
            fields = {}


@contextlib.contextmanager
def stream(http: httpx.Client, runs: str, last: str | None = None) -> Iterator[Iterator[Message]]:
    headers = {"Last-Event-ID": last} if last is not None else {}
    with http.stream("GET", "/v1/stream", params={"runs": runs}, headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        yield read_messages(response)


def of(messages: Iterator[Message], *events: str) -> Iterator[Message]:
    return (message for message in messages if message.event in events)
