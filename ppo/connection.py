"""Requests to a platform: its address, its key, how long to wait and what may be sent again. It knows no routes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from ppo.client_errors import RequestError, UnreachableError, refusal_of

TIMEOUT_S = 30.0
PAGE = 200
RETRY_WAITS_S = (0.2, 0.8)
COMES_AND_GOES = frozenset({502, 503, 504})


class Connection:
    """To one platform. Answers are what their JSON says; whatever is no success is raised (`ppo.client_errors`)."""

    def __init__(self, url: str, key: str, timeout_s: float) -> None:
        self.http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {key}", "Accept": "application/json"},
            timeout=timeout_s,
            # A proxy of the environment would see the key, and cannot reach a platform on this machine.
            trust_env=False,
        )

    def close(self) -> None:
        self.http.close()

    def get(self, path: str, params: Mapping[str, Any] | None = None) -> Any:
        """What is there; parameters that are None are left out."""
        return self.repeat("GET", path, params={k: v for k, v in (params or {}).items() if v is not None})

    def pages(self, path: str, params: Mapping[str, Any]) -> Iterator[Any]:
        """The items of a list that comes in pages."""
        cursor: str | None = None
        while True:
            page = self.get(path, {**params, "cursor": cursor, "limit": PAGE})
            yield from page["items"]
            cursor = page["next"]
            if cursor is None:
                return

    def repeat(self, method: str, path: str, **request: Any) -> Any:
        """A request that may be sent again: one that changes nothing, or carries an Idempotency-Key."""
        for wait_s in RETRY_WAITS_S:
            try:
                return self.once(method, path, **request)
            except RequestError as error:
                if error.status not in COMES_AND_GOES:
                    raise
            except UnreachableError:
                pass
            time.sleep(wait_s)
        return self.once(method, path, **request)

    def once(self, method: str, path: str, *, longest_s: float | None = None, **request: Any) -> Any:
        """A request that is sent one time; `longest_s` is how long its answer may take, if not the usual time."""
        wait_s = float(request.get("params", {}).get("wait", 0) or 0)
        timeout = httpx.Timeout(self.http.timeout)
        timeout.read = longest_s or (timeout.read or TIMEOUT_S) + wait_s
        try:
            answer = self.http.request(method, path, timeout=timeout, **request)
        except httpx.TransportError as error:
            place = str(self.http.base_url).rstrip("/")
            raise UnreachableError(f"no answer from {place}: {error or type(error).__name__}") from error
        if answer.is_success:
            return answer.json() if answer.content else None
        raise refusal_of(answer)

    def download(self, path: str, params: Mapping[str, Any], target: Path) -> int:
        """Write what comes to a file aside, then rename it; returns its bytes."""
        aside = target.with_name(f".{target.name}.part")
        try:
            with self.http.stream("GET", path, params=params) as answer, aside.open("wb") as file:
                if not answer.is_success:
                    answer.read()
                    raise refusal_of(answer)
                for chunk in answer.iter_bytes():
                    file.write(chunk)
            aside.rename(target)
        except httpx.TransportError as error:
            raise UnreachableError(f"the download broke off: {error or type(error).__name__}") from error
        finally:
            aside.unlink(missing_ok=True)
        return target.stat().st_size
