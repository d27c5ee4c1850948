"""JSON posted to an address that a spec names: which addresses may be spoken to, tries, waits, and one deadline.

A listed name is looked up before each connection, and the connection goes to the very address that was checked: what
the name is made to stand for a moment later is never spoken to. Redirects are not followed, and no proxy is used.
Nothing waits beyond the deadline: a connection that hangs, or an answer that comes drop by drop, is dropped then.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import ipaddress
import re
import socket
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import httpx

from ppo_core.errors import DataError
from ppo_core.scoring.source import CHECK_EVERY_S, Reason, not_asked_to_end
from ppo_core.spec.hosts import Endpoint, RewardHosts, parse_endpoint

# Before the second try, doubled before each further one up to the longest; always the same, so that runs repeat.
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
RETRYABLE_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
# A score takes some twenty characters, and a request holds at most 4096 of them.
MAX_ANSWER_BYTES = 1 << 20


@dataclass(frozen=True)
class Failure:
    """A request that came to nothing. `again_s`: seconds after which another try may succeed; None: none will."""

    reason: Reason
    detail: str
    again_s: float | None


@dataclass(frozen=True)
class Limits:
    """How patiently a service is asked."""

    at_once: int  #: requests under way at the same time
    retries: int  #: further tries of a request that failed in a way that may pass
    timeout_s: float  #: that all requests of one call may take, tries and waits included
    try_timeout_s: float | None = None  #: that one try may take; None: as long as there is time


class HttpPost:
    """Posts to one endpoint.

    Args:
        endpoint: where to post to.
        hosts: what may be spoken to.
        token: bearer token, if the service wants one.
        limits: how patiently.
    """

    def __init__(self, endpoint: Endpoint, hosts: RewardHosts, token: str | None, limits: Limits) -> None:
        self._endpoint, self._hosts, self._limits = endpoint, hosts, limits
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
    def of(cls, url: str, limits: Limits, environment: Mapping[str, str]) -> HttpPost:
        """What posts to `url`, as far as the environment allows it.

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
        return cls(endpoint, hosts, token, limits)

    def post(self, contents: Sequence[bytes], check: Callable[[], None] = not_asked_to_end) -> list[bytes | Failure]:
        """The answer to each content, in order; returns at the latest when `timeout_s` is over.

        What `check` raises, called at least every `CHECK_EVERY_S`, ends it.
        """
        return self._loop.run_until_complete(self._post_all(contents, check))

    def close(self) -> None:
        """Give back what it holds."""
        self._end()

    async def _post_all(self, contents: Sequence[bytes], check: Callable[[], None]) -> list[bytes | Failure]:
        deadline = self._loop.time() + self._limits.timeout_s
        turn = asyncio.Semaphore(self._limits.at_once)
        async with httpx.AsyncClient(verify=self._tls, trust_env=False, follow_redirects=False, timeout=None) as client:
            asked = asyncio.gather(*(self._one(client, content, turn, deadline) for content in contents))
            try:
                while not (await asyncio.wait([asked], timeout=CHECK_EVERY_S))[0]:
                    check()
            except BaseException:
                asked.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asked
                raise
        return asked.result()

    async def _one(
        self, client: httpx.AsyncClient, content: bytes, turn: asyncio.Semaphore, deadline: float
    ) -> bytes | Failure:
        last: Failure | None = None
        try:
            async with asyncio.timeout_at(deadline), turn:
                for number in range(self._limits.retries + 1):
                    answer = await self._timely_try(client, content, wait_s(number))
                    if not isinstance(answer, Failure):
                        return answer
                    last = answer
                    if last.again_s is None or self._loop.time() + last.again_s >= deadline:
                        break
                    if number < self._limits.retries:
                        await asyncio.sleep(last.again_s)
        except TimeoutError:
            before = f"; the try before: {last.detail}" if last is not None else ""
            return Failure("timeout", f"no answer within {self._limits.timeout_s:g} s{before}", None)
        assert last is not None  # There was at least one try, and it came to nothing.
        return last

    async def _timely_try(self, client: httpx.AsyncClient, content: bytes, next_wait_s: float) -> bytes | Failure:
        if self._limits.try_timeout_s is None:
            return await self._try(client, content, next_wait_s)
        within = asyncio.timeout(self._limits.try_timeout_s)
        try:
            async with within:
                return await self._try(client, content, next_wait_s)
        except TimeoutError:
            if not within.expired():  # The deadline of all requests has come.
                raise
            return Failure("timeout", f"no answer to one request within {self._limits.try_timeout_s:g} s", next_wait_s)

    async def _try(self, client: httpx.AsyncClient, content: bytes, next_wait_s: float) -> bytes | Failure:
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
                return await self._post(client, str(address), content, next_wait_s)
            except httpx.ConnectError as error:
                failure = Failure("unreachable", f"no connection to {address}: {error}", next_wait_s)
            except httpx.TransportError as error:
                said = str(error) or type(error).__name__
                return Failure("unreachable", f"the connection to {address} broke: {said}", next_wait_s)
        return failure

    async def _post(
        self, client: httpx.AsyncClient, address: str, content: bytes, next_wait_s: float
    ) -> bytes | Failure:
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
        return bytes(body)


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
