"""A scorer behind an address: prompts and responses are posted in batches, scores come back, all by one deadline.

The request is `{"prompts": [...], "responses": [...]}`, the answer `{"scores": [...]}` of the same length; see
docs/reward-sources.md. A batch that fails costs the scores of its own responses. Nothing waits beyond the deadline:
a connection that hangs, or an answer that comes drop by drop, is dropped then.

A listed name is looked up before each connection, and the connection goes to the very address that was checked: what
the name is made to stand for a moment later is never spoken to. Redirects are not followed, and no proxy is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import ipaddress
import json
import re
import socket
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import httpx

from ppo_core.errors import DataError
from ppo_core.scoring.source import CHECK_EVERY_S, Reason, Unusable, not_asked_to_end
from ppo_core.spec.hosts import Endpoint, RewardHosts, parse_endpoint

# Requests under way at the same time.
MAX_AT_ONCE = 4
# Before the second try, doubled before each further one up to the longest; always the same, so that runs repeat.
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
RETRYABLE_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
# A score takes some twenty characters, and a request holds at most 4096 of them.
MAX_ANSWER_BYTES = 1 << 20


@dataclass(frozen=True)
class Failure:
    """A try that gave no scores. `again_s`: seconds after which another may succeed; None: none will."""

    reason: Reason
    detail: str
    again_s: float | None


class HttpService:
    """One service at `endpoint`.

    Args:
        endpoint: where to post to.
        hosts: what may be spoken to.
        token: bearer token, if the service wants one.
        batch_size: responses in one request.
        retries: further tries of a request that failed in a way that may pass.
        timeout_s: seconds that all requests of one call may take, tries and waits included.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        hosts: RewardHosts,
        token: str | None,
        batch_size: int,
        retries: int,
        timeout_s: float,
    ) -> None:
        self._endpoint, self._hosts = endpoint, hosts
        self._batch_size, self._retries, self._timeout_s = batch_size, retries, timeout_s
        self._headers = {
            "Host": endpoint.authority,
            "Content-Type": "application/json",
            "Accept": "application/json",
            # A few bytes unpacked can be gigabytes.
            "Accept-Encoding": "identity",
        }
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._tls = httpx.create_ssl_context() if endpoint.scheme == "https" else False
        self._loop = asyncio.new_event_loop()
        self._end = weakref.finalize(self, self._loop.close)

    @classmethod
    def of(
        cls, url: str, batch_size: int, retries: int, timeout_s: float, environment: Mapping[str, str]
    ) -> HttpService:
        """The service at `url`, as far as the environment allows it.

        Raises:
            DataError: the host is not allowed, or its token is missing or malformed.
        """
        try:
            endpoint, hosts = parse_endpoint(url), RewardHosts.of_environment(environment)
        except ValueError as error:
            raise DataError(f"{url!r} cannot be asked: {error}") from error
        problem = hosts.problem(endpoint)
        if problem is not None:
            hint = f"Look at {RewardHosts.variable} of the worker."
            raise DataError(f"{url!r} cannot be asked: {problem}", hint=hint)
        try:
            token = hosts.token(endpoint, environment)
        except ValueError as error:
            hint = "Set it in the worker's environment to the token, in plain letters without spaces."
            raise DataError(str(error), hint=hint) from error
        return cls(endpoint, hosts, token, batch_size, retries, timeout_s)

    def score(
        self, prompts: Sequence[str], responses: Sequence[str], check: Callable[[], None] = not_asked_to_end
    ) -> list[object]:
        """See `RewardSource`; returns at the latest when `timeout_s` is over."""
        return self._loop.run_until_complete(self._score(list(prompts), list(responses), check))

    def close(self) -> None:
        self._end()

    async def _score(self, prompts: list[str], responses: list[str], check: Callable[[], None]) -> list[object]:
        deadline = self._loop.time() + self._timeout_s
        turn = asyncio.Semaphore(MAX_AT_ONCE)
        starts = range(0, len(responses), self._batch_size)
        async with httpx.AsyncClient(verify=self._tls, trust_env=False, follow_redirects=False, timeout=None) as client:
            batches = [slice(start, start + self._batch_size) for start in starts]
            asked = asyncio.gather(
                *(self._batch(client, prompts[rows], responses[rows], turn, deadline) for rows in batches)
            )
            try:
                while not (await asyncio.wait([asked], timeout=CHECK_EVERY_S))[0]:
                    check()
            except BaseException:
                asked.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asked
                raise
        return [result for answer in asked.result() for result in answer]

    async def _batch(
        self,
        client: httpx.AsyncClient,
        prompts: list[str],
        responses: list[str],
        turn: asyncio.Semaphore,
        deadline: float,
    ) -> list[object]:
        # Escaped to ASCII: half a surrogate pair, which no UTF-8 can carry, goes as \ud800.
        content = json.dumps({"prompts": prompts, "responses": responses}).encode("ascii")
        last: Failure | None = None
        try:
            async with asyncio.timeout_at(deadline), turn:
                for number in range(self._retries + 1):
                    answer = await self._try(client, content, len(responses), wait_s(number))
                    if not isinstance(answer, Failure):
                        return answer
                    last = answer
                    if last.again_s is None or self._loop.time() + last.again_s >= deadline:
                        break
                    if number < self._retries:
                        await asyncio.sleep(last.again_s)
        except TimeoutError:
            before = f"; the try before: {last.detail}" if last is not None else ""
            return [Unusable("timeout", f"no answer within {self._timeout_s:g} s{before}")] * len(responses)
        assert last is not None  # There was at least one try, and it gave no scores.
        return [Unusable(last.reason, last.detail)] * len(responses)

    async def _try(
        self, client: httpx.AsyncClient, content: bytes, num_rows: int, next_wait_s: float
    ) -> list[object] | Failure:
        endpoint = self._endpoint
        try:
            found = await self._loop.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            return Failure("unreachable", f"{endpoint.host!r} cannot be looked up: {error}", next_wait_s)
        addresses = [ipaddress.ip_address(where[4][0]) for where in found]
        for address in addresses:
            if not self._hosts.allows_address(address, endpoint.port):
                detail = f"{endpoint.host!r} stands for {address}, which {RewardHosts.variable} does not allow"
                return Failure("forbidden_address", detail, None)
        failure = Failure("unreachable", f"{endpoint.host!r} has no address", next_wait_s)
        for address in addresses:
            try:
                return await self._post(client, str(address), content, num_rows, next_wait_s)
            except httpx.ConnectError as error:
                failure = Failure("unreachable", f"no connection to {address}: {error}", next_wait_s)
            except httpx.TransportError as error:
                said = str(error) or type(error).__name__
                return Failure("unreachable", f"the connection to {address} broke: {said}", next_wait_s)
        return failure

    async def _post(
        self, client: httpx.AsyncClient, address: str, content: bytes, num_rows: int, next_wait_s: float
    ) -> list[object] | Failure:
        endpoint = self._endpoint
        place = f"[{address}]" if ":" in address else address
        async with client.stream(
            "POST",
            f"{endpoint.scheme}://{place}:{endpoint.port}{endpoint.path}",
            content=content,
            headers=self._headers,
            # The certificate has to be the name's, not the address's.
            extensions={"sni_hostname": endpoint.host},
        ) as answer:
            if answer.status_code != 200:
                again_s = None
                if answer.status_code in RETRYABLE_STATUS:
                    asked_s = retry_after_s(answer.headers.get("Retry-After"), time.time())
                    again_s = next_wait_s if asked_s is None else max(asked_s, next_wait_s)
                return Failure("http_status", f"the service answered with status {answer.status_code}", again_s)
            if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
                return Failure("bad_answer", "the answer is compressed, which was not asked for", None)
            body = bytearray()
            async for chunk in answer.aiter_raw():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    return Failure("bad_answer", f"the answer is longer than {MAX_ANSWER_BYTES} bytes", None)
        return scores_of(bytes(body), num_rows)


def wait_s(number: int) -> float:
    """Seconds between try `number`, counted from 0, and the next: 0.5, 1, 2, 4, 8, 16, then 30."""
    return float(min(FIRST_WAIT_S * 2**number, LONGEST_WAIT_S))


def retry_after_s(header: str | None, now: float) -> float | None:
    """What a Retry-After header (RFC 9110, 10.2.3) asks for, in seconds; None where it says nothing that can be read.

    Args:
        header: seconds, or a date.
        now: seconds since 1970.
    """
    if header is None:
        return None
    if re.fullmatch(r"[0-9]{1,9}", header.strip()):
        return float(header)
    try:
        return max(email.utils.parsedate_to_datetime(header).timestamp() - now, 0.0)
    except (ValueError, OverflowError):
        return None


def scores_of(body: bytes, num_rows: int) -> list[object] | Failure:
    """The scores in an answer, not yet looked at one by one."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        return Failure("bad_answer", f"the answer is no JSON: {error}", None)
    scores = answer.get("scores") if isinstance(answer, dict) else None
    if not isinstance(scores, list):
        return Failure("bad_answer", 'the answer is no object with a list under "scores"', None)
    if len(scores) != num_rows:
        return Failure("wrong_count", f"{len(scores)} scores for {num_rows} responses", None)
    return scores
