"""Reads server-sent events as a browser does: by lines, remembering the last id."""

from __future__ import annotations

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
