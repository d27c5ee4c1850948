"""The connection to a vLLM server: every call has a deadline, and what fails says who, where and what to do.

The address is looked up and checked once, when the connection is opened; later calls go to the very number that was
checked. Redirects are not followed, and no proxy is used. It knows no tokens and no weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

import httpx

from ppo_core.errors import DataError, EngineLostError, EngineTimeoutError
from ppo_core.spec.hosts import Address, Endpoint, EngineHosts, parse_endpoint

# Of an error's body that is told.
SAID_CHARACTERS = 1500
# The longest are fingerprints, some hundred bytes a weight.
MAX_ANSWER_BYTES = 64 << 20
# A connection that nobody uses is given up after so long, well before vLLM does, after 5 s: a request that meets the
# other side's end of it would look like a server that is gone.
KEPT_S = 2.0
# Until the next of several addresses is tried.
CONNECT_S = 5.0


class ServerFault(Exception):
    """The server answered with another status than 200, or with what is no JSON."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"status {status}: {message}")
        self.status = status


class ServerConnection:
    """To one server; `open` first. All of it runs in one event loop.

    Args:
        name: what errors call the server.
        url: of the server, as the spec has it.
        environment: holds the list of allowed hosts, and tokens.
        timeout_s: longest wait for one answer.

    Raises:
        DataError: the host is not allowed, or its token is missing.
    """

    def __init__(self, name: str, url: str, environment: Mapping[str, str], timeout_s: float) -> None:
        self.name = name
        self._timeout_s = timeout_s
        self._endpoint, self._hosts, token = _allowed(url, environment)
        self._headers = {"Host": self._endpoint.authority, "Accept-Encoding": "identity"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._client: httpx.AsyncClient | None = None

    async def open(self) -> None:
        """Look the host up and get ready to speak to it; another time is harmless.

        Raises:
            DataError: the host stands for an address that is not allowed, or for none.
        """
        if self._client is not None:
            return
        endpoint = self._endpoint
        try:
            found = await asyncio.get_running_loop().getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise EngineLostError(f"{self.name}: {endpoint.host!r} cannot be looked up: {error}") from error
        addresses = [ipaddress.ip_address(where[4][0]) for where in found]
        for address in addresses:
            if not self._hosts.allows_address(address, endpoint.port):
                raise DataError(
                    f"{self.name}: {endpoint.host!r} stands for {address}, which {self._hosts.variable} does not allow",
                    hint=f"Add the address or its network to {self._hosts.variable}, if it is the one that is meant.",
                )
        address = await _listening(addresses, endpoint.port)
        place = f"[{address}]" if address.version == 6 else str(address)
        self._client = httpx.AsyncClient(
            base_url=f"{endpoint.scheme}://{place}:{endpoint.port}{endpoint.path.rstrip('/')}",
            headers=self._headers,
            verify=httpx.create_ssl_context() if endpoint.scheme == "https" else False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEPT_S),
            timeout=None,  # Each call has its deadline.
            trust_env=False,
            follow_redirects=False,
        )

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def get(self, path: str) -> Any:
        return await self._within(path, self._call("GET", path, None))

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The answer's JSON; None where it has none.

        Raises:
            ServerFault: another status than 200.
            EngineLostError: the server is gone.
            EngineTimeoutError: there was no answer in time.
        """
        return await self._within(path, self._call("POST", path, body))

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """The JSON of each event of a stream, without a deadline. Closing it early ends the request."""
        async with self._answered("POST", path, body) as answer:
            async for line in _lines(answer):
                if line.startswith(b"data: ") and line != b"data: [DONE]":
                    event = _json(path, answer, line.removeprefix(b"data: "))
                    if "error" in event:
                        raise ServerFault(500, str(event["error"])[:SAID_CHARACTERS])
                    yield event

    @property
    def _extensions(self) -> dict[str, Any]:
        # The certificate has to be the name's, not the address's.
        return {"sni_hostname": self._endpoint.host}

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        async with self._answered(method, path, body) as answer:
            content = await _whole(answer)
        return _json(path, answer, content) if content else None

    @contextlib.asynccontextmanager
    async def _answered(self, method: str, path: str, body: Mapping[str, Any] | None) -> AsyncIterator[httpx.Response]:
        assert self._client is not None
        try:
            async with self._client.stream(method, path, json=body, extensions=self._extensions) as answer:
                if answer.status_code != 200:
                    said = (await _whole(answer)).decode("utf-8", errors="replace")
                    raise ServerFault(answer.status_code, said[:SAID_CHARACTERS])
                yield answer
        except httpx.TransportError as error:
            raise self._lost(error) from error

    async def _within(self, path: str, call: Any) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await call
        except TimeoutError:
            raise EngineTimeoutError(
                f"{self.name} did not answer {path} within {self._timeout_s:g} s",
                hint="Look at the server's own log; rollout.vllm.timeout_s is how long it may be silent.",
            ) from None

    def _lost(self, error: httpx.TransportError) -> EngineLostError:
        said = str(error) or type(error).__name__
        return EngineLostError(
            f"{self.name} is gone, or was never there: {said}",
            hint="Look at the server's own log and start it again (docs/engines.md), then resume the run.",
        )


async def _parts(answer: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Of the body, as they come; a few bytes unpacked could be gigabytes."""
    if "Content-Encoding" in answer.headers:
        packing = answer.headers["Content-Encoding"]
        raise ServerFault(answer.status_code, f"the answer is packed by {packing}, which was not asked for")
    async for part in answer.aiter_raw():
        yield part


async def _whole(answer: httpx.Response) -> bytes:
    body = bytearray()
    async for part in _parts(answer):
        body += part
        _require_short(answer, body)
    return bytes(body)


async def _lines(answer: httpx.Response) -> AsyncGenerator[bytes, None]:
    begun = bytearray()
    async for part in _parts(answer):
        *ends, last = part.split(b"\n")
        for end in ends:
            yield bytes(begun + end).rstrip(b"\r")
            begun.clear()
        begun += last
        _require_short(answer, begun)


def _require_short(answer: httpx.Response, body: bytearray) -> None:
    if len(body) > MAX_ANSWER_BYTES:
        raise ServerFault(answer.status_code, f"the answer is longer than {MAX_ANSWER_BYTES} bytes")


def _json(path: str, answer: httpx.Response, content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ServerFault(answer.status_code, f"the answer to {path} is no JSON, so no vLLM server's") from error


async def _listening(addresses: Sequence[Address], port: int) -> Address:
    """The first at which somebody listens, of those that a name stands for; the first if none does.

    `localhost` often stands for ::1 as well, where a server on 127.0.0.1 does not listen.
    """
    for address in addresses if len(addresses) > 1 else ():
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(CONNECT_S):
                _, writer = await asyncio.open_connection(str(address), port)
            writer.close()
            return address
    return addresses[0]


def _allowed(url: str, environment: Mapping[str, str]) -> tuple[Endpoint, EngineHosts, str | None]:
    try:
        endpoint, hosts = parse_endpoint(url), EngineHosts.of_environment(environment)
        problem = hosts.problem(endpoint)
        if problem is not None:
            raise ValueError(problem)
        return endpoint, hosts, hosts.token(endpoint, environment)
    except ValueError as error:
        raise DataError(
            f"the vLLM server {url!r} cannot be used: {error}", hint=f"Look at {EngineHosts.variable} of the worker."
        ) from error
