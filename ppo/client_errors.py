"""What a `Client` raises: the service's own words, by kind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx

from ppo.wire import FaultMessage


class ClientError(Exception):
    """Base of what a `Client` raises."""


class UnreachableError(ClientError):
    """No answer from the platform: it is not running, or not at this address."""


class RequestError(ClientError):
    """The platform refused or failed; the attributes are those of its problem (RFC 9457)."""

    def __init__(self, status: int, problem: Mapping[str, Any]) -> None:
        self.status = status
        self.code = str(problem.get("code", f"http_{status}"))
        self.detail = str(problem.get("detail", f"HTTP status {status}"))
        self.errors: list[FaultMessage] = list(problem.get("errors", ()))
        self.allowed: list[str] | None = problem.get("allowed")
        self.request_id = problem.get("request_id")
        lines = [self.detail, *(f"{error['pointer'] or '/'}: {error['message']}" for error in self.errors)]
        super().__init__("\n".join(lines))


class AccessError(RequestError):
    """The key is missing, unknown, expired, or its role is too low."""


class NotFoundError(RequestError):
    """There is no such thing."""


class RefusedError(RequestError):
    """What is asked does not fit how the run stands, which the message says; `allowed` lists states it can go to."""


class WaitTimeoutError(ClientError):
    """The run had not ended in time. It goes on."""


def refusal_of(answer: httpx.Response) -> RequestError:
    """The exception that an answer other than success becomes."""
    try:
        problem = answer.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        problem = {}
    fields = problem if isinstance(problem, dict) else {}
    kinds: dict[int, type[RequestError]] = {401: AccessError, 403: AccessError, 404: NotFoundError}
    if fields.get("code") == "illegal_move":
        return RefusedError(answer.status_code, fields)
    return kinds.get(answer.status_code, RequestError)(answer.status_code, fields)
