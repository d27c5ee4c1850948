"""One message to one webhook: signed, posted to an address that was looked at, answered or not within its time.

Signed as Standard Webhooks has it (https://github.com/standard-webhooks/standard-webhooks): headers `webhook-id`,
`webhook-timestamp` and `webhook-signature`, HMAC-SHA256 over "id.timestamp.body", one signature a secret while several
sign. The host's name is looked up here and
every number it stands for is held against the list of allowed hosts; the connection goes to that very number, so a name
that changes between the look and the connection leads nowhere else. Redirects are not followed, proxies of the
environment not used.
"""

from __future__ import annotations

import asyncio
import base64
import email.utils
import hashlib
import hmac
import ipaddress
import os
import re
import socket
import ssl
import time
from dataclasses import dataclass

import httpx

from ppo_core.spec.hosts import AllowedHosts
from store.webhook_hosts import Target, parse_target
from store.webhook_queue import Claimed
from store.webhooks import secret_bytes

LONGEST_RETRY_AFTER_S = 86_400.0
GONE = 410


@dataclass(frozen=True)
class Answer:
    """What became of an attempt: delivered without an `error`, else why not, and whether to try again."""

    status: int | None = None
    error: str | None = None
    final: bool = False
    again_s: float | None = None  # asked for by the receiver


def signature(secret: str, message_id: str, timestamp: int, body: bytes) -> str:
    """One signature of the `webhook-signature` header: `v1,` and the HMAC-SHA256 in base64."""
    signed = f"{message_id}.{timestamp}.".encode("ascii") + body
    return "v1," + base64.b64encode(hmac.new(secret_bytes(secret), signed, hashlib.sha256).digest()).decode("ascii")


async def post(message: Claimed, hosts: AllowedHosts, timeout_s: float, tls: ssl.SSLContext) -> Answer:
    """Send a message once; returns at the latest when `timeout_s` is over."""
    try:
        target = parse_target(message.url)
    except ValueError as error:
        return Answer(error=str(error), final=True)
    problem = hosts.problem(target.endpoint)
    if problem is not None:
        return Answer(error=problem)
    try:
        async with asyncio.timeout(timeout_s):
            return await _post(message, target, hosts, tls)
    except TimeoutError:
        return Answer(error=f"no answer within {timeout_s:g} s")


async def _post(message: Claimed, target: Target, hosts: AllowedHosts, tls: ssl.SSLContext) -> Answer:
    endpoint = target.endpoint
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return Answer(error=f"{endpoint.host!r} cannot be looked up: {error}")
    addresses = list(dict.fromkeys(str(where[4][0]) for where in found))
    for address in addresses:
        if not hosts.allows_address(ipaddress.ip_address(address), endpoint.port):
            return Answer(error=f"{endpoint.host!r} stands for {address}, which {hosts.variable} does not allow")
    try:
        headers = _headers(message, target, hosts.token(endpoint, os.environ))
    except ValueError as error:
        return Answer(error=str(error))
    answer = Answer(error=f"{endpoint.host!r} has no address")
    async with httpx.AsyncClient(verify=tls, trust_env=False, follow_redirects=False, timeout=None) as client:
        for address in addresses:
            place = f"[{address}]" if ":" in address else address
            url = f"{endpoint.scheme}://{place}:{endpoint.port}{target.path}"
            try:
                # The certificate has to be the name's, not the address's.
                request = client.build_request(
                    "POST", url, content=message.body, headers=headers, extensions={"sni_hostname": endpoint.host}
                )
                response = await client.send(request, stream=True)  # nobody reads what it says beside its status
                await response.aclose()
            except httpx.ConnectError as error:
                answer = Answer(error=f"no connection to {address}: {error}")
            except httpx.TransportError as error:
                return Answer(error=f"the connection to {address} broke: {error or type(error).__name__}")
            else:
                return _of_response(response)
    return answer


def _headers(message: Claimed, target: Target, token: str | None) -> dict[str, str]:
    timestamp = int(time.time())
    bearer = {} if token is None else {"Authorization": f"Bearer {token}"}
    return {
        **bearer,
        "Host": target.endpoint.authority,
        "Content-Type": "application/json",
        "User-Agent": "ppo-control-webhooks",
        "webhook-id": message.event_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(
            signature(secret, message.event_id, timestamp, message.body) for secret in message.secrets
        ),
    }


def _of_response(response: httpx.Response) -> Answer:
    status = response.status_code
    if 200 <= status < 300:
        return Answer(status)
    error = f"the receiver answered with status {status}"
    if status == GONE:
        return Answer(status, f"{error}: it is gone for good", final=True)
    return Answer(status, error, again_s=_retry_after_s(response.headers.get("Retry-After")))


def _retry_after_s(header: str | None) -> float | None:
    """What a Retry-After header (RFC 9110, 10.2.3) asks for, at most a day; None where it says nothing."""
    if header is None:
        return None
    if re.fullmatch(r"[0-9]{1,9}", header.strip()):
        return min(float(header), LONGEST_RETRY_AFTER_S)
    try:
        asked = email.utils.parsedate_to_datetime(header).timestamp() - time.time()
    except (ValueError, OverflowError):
        return None
    return min(max(asked, 0.0), LONGEST_RETRY_AFTER_S)
