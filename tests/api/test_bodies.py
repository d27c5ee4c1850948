"""Bodies: JSON only, within the limit, within the time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from api.bodies import BodyLimit
from api.errors import ProblemError

KEY = {"Idempotency-Key": "k"}


def test_a_body_beyond_the_limit_is_413(operator: TestClient) -> None:
    text = json.dumps({"spec_yaml": "x" * (1024 * 1024)})
    answer = operator.post("/v1/runs", content=text, headers={**KEY, "Content-Type": "application/json"})
    assert answer.status_code == 413
    assert answer.json()["code"] == "body_too_long"


def test_a_chunked_body_beyond_the_limit_is_413_and_not_read_to_its_end(operator: TestClient) -> None:
    sent = 0

    def chunks() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(64):
            sent += 1
            yield b"x" * 65536

    answer = operator.post("/v1/runs", content=chunks(), headers={**KEY, "Content-Type": "application/json"})
    assert answer.status_code == 413


@pytest.mark.parametrize(
    "media_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", None]
)
def test_json_of_another_type_is_415(
    media_type: str | None, operator: TestClient, spec: dict[str, Any], num_runs: Any
) -> None:
    before = num_runs()
    headers = {**KEY, **({"Content-Type": media_type} if media_type else {})}
    answer = operator.post("/v1/runs", content=json.dumps({"spec": spec}), headers=headers)
    assert answer.status_code == 415
    assert num_runs() == before


@pytest.mark.parametrize(
    "text", ["{", '{"spec": }', "[" * 200_000, '"x"', "null", '{"spec": ' + "1" * 5000 + "}", b"\xff\xfe{}", ""]
)
def test_broken_json_is_a_clear_4xx(text: str | bytes, operator: TestClient) -> None:
    answer = operator.post("/v1/runs", content=text, headers={**KEY, "Content-Type": "application/json"})
    assert answer.status_code in (400, 422), answer.text
    assert answer.headers["content-type"] == "application/problem+json"


def test_a_body_that_drips_is_cut_off() -> None:
    async def never_called(*_: Any) -> None:
        raise AssertionError("the application was called")

    async def drip() -> dict[str, Any]:
        await asyncio.sleep(0.05)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def ignore(_: Any) -> None: ...

    limit = BodyLimit(never_called, max_bytes=1000, timeout_s=0.2)
    scope = {"type": "http", "method": "POST", "headers": []}
    with pytest.raises(ProblemError) as caught:
        asyncio.run(limit(scope, drip, ignore))  # type: ignore[arg-type]
    assert caught.value.status == 408
