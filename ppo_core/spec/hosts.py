"""Which hosts a run may speak to over HTTP, from the environment of whoever checks or asks. Opens no connection.

Scorers have the list `PPO_REWARD_HOSTS`, servers that generate the list `PPO_ENGINE_HOSTS`:

    PPO_REWARD_HOSTS=rewards.example,scorer:9000,10.1.0.0/16,127.0.0.1:9000,[::1],judge.example=JUDGE_TOKEN

Entries stand between commas: a name, an address or a network (IPv6 in brackets), then `:port` where only that one is
meant, then `=VARIABLE` where that environment variable holds the bearer token of the host. An address in a private,
loopback or otherwise special range is never spoken to unless it is, or its network is, an entry itself: a listed name
does not bring it in.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import ClassVar, Self

# One plain form, so that no two readers of an address can take it for two different hosts.
_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?P<port>:[0-9]{1,5})?"
    r"(?P<path>/(?:[A-Za-z0-9._~/-]|%[0-9A-Fa-f]{2})*)?"
)
_ENTRY = re.compile(
    r"(?P<place>\[[0-9A-Fa-f:./]+\]|[A-Za-z0-9._-]+(?:/[0-9]{1,2})?)(?::(?P<port>[0-9]{1,5}))?"
    r"(?:=(?P<token>[A-Za-z_][A-Za-z0-9_]*))?"
)
# Public by their own numbers, yet each stands for an IPv4 address inside it, which may be a private one.
_TUNNELS = tuple(ipaddress.ip_network(text) for text in ("64:ff9b::/96", "2002::/16", "2001::/32"))

Address = IPv4Address | IPv6Address


@dataclass(frozen=True)
class Endpoint:
    """An address to post to, in its parts; `host` in small letters and without brackets."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def address(self) -> Address | None:
        """The host as a number; None where it is a name."""
        try:
            return _plain(ipaddress.ip_address(self.host))
        except ValueError:
            return None

    @property
    def authority(self) -> str:
        """Host and port as a request's Host header names them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = {"http": 80, "https": 443}[self.scheme]
        return host if self.port == usual else f"{host}:{self.port}"


@dataclass(frozen=True)
class HostEntry:
    """One entry of the list: a `name` or a `network`."""

    name: str | None
    network: IPv4Network | IPv6Network | None
    port: int | None  #: None: any
    token_variable: str | None


@dataclass(frozen=True)
class AllowedHosts:
    """The hosts of one configuration; empty allows none."""

    variable: ClassVar[str]  #: of the environment, that holds the list

    entries: tuple[HostEntry, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a list as it stands in the environment.

        Raises:
            ValueError: an entry is malformed.
        """
        return cls(tuple(_entry(part.strip(), cls.variable) for part in text.split(",") if part.strip()))

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> Self:
        """The list of a process; without the variable no host is allowed.

        Raises:
            ValueError: an entry is malformed.
        """
        return cls.parse(environment.get(cls.variable, ""))

    def entry_of(self, endpoint: Endpoint) -> HostEntry | None:
        """The entry that allows this host and port; None: not allowed."""
        address = endpoint.address
        for entry in self.entries:
            same = entry.name == endpoint.host if address is None else _holds(entry, address)
            if same and entry.port in (None, endpoint.port):
                return entry
        return None

    def allows_address(self, address: Address, port: int) -> bool:
        """Whether a connection may be made to what a listed host has turned out to be."""
        plain = _plain(address)
        return _is_public(plain) or any(_holds(entry, plain) and entry.port in (None, port) for entry in self.entries)

    def token(self, endpoint: Endpoint, environment: Mapping[str, str]) -> str | None:
        """The bearer token of a listed host; None where it has none.

        Raises:
            ValueError: the variable that should hold it does not. The token itself is never told.
        """
        entry = self.entry_of(endpoint)
        if entry is None or entry.token_variable is None:
            return None
        token = environment.get(entry.token_variable, "")
        if not re.fullmatch(r"[!-~]+", token):
            raise ValueError(f"the environment variable {entry.token_variable} holds no token for {endpoint.host!r}")
        return token

    def problem(self, endpoint: Endpoint) -> str | None:
        """Why a spec may not name this host, and what to do; None when it may. Names are not looked up."""
        entry = self.entry_of(endpoint)
        if entry is None:
            return (
                f"the host {endpoint.host!r}, port {endpoint.port}, is not allowed here; "
                f"ask whoever runs this service to add it to {self.variable}"
            )
        if entry.token_variable is not None and endpoint.scheme == "http" and not _is_here(endpoint):
            return f"the host {endpoint.host!r} is given a token, which must not travel in the open; use https"
        return None


class RewardHosts(AllowedHosts):
    """Where scorers may be."""

    variable = "PPO_REWARD_HOSTS"


class EngineHosts(AllowedHosts):
    """Where servers that generate may be."""

    variable = "PPO_ENGINE_HOSTS"


def parse_endpoint(url: str) -> Endpoint:
    """The parts of an http or https address of the one plain form that a spec may hold.

    Raises:
        ValueError: another scheme, a user name or password, a query, a fragment, or a port that is none.
    """
    if "@" in url:
        raise ValueError(
            "an address with a user name or password puts it into every copy of the spec; "
            "name a variable that holds its token in the list of allowed hosts"
        )
    if "?" in url or "#" in url:
        raise ValueError("give the address without a query or fragment; what is secret in it would be in the spec")
    found = _URL.fullmatch(url)
    if found is None:
        raise ValueError("expected an address such as https://rewards.example/score, in plain letters")
    host = found["host"].strip("[]").lower()
    if found["host"].startswith("["):
        try:
            host = str(ipaddress.IPv6Address(host))
        except ValueError as error:
            raise ValueError(f"{found['host']} is no IPv6 address") from error
    port = int(found["port"][1:]) if found["port"] else {"http": 80, "https": 443}[found["scheme"]]
    if not 1 <= port <= 65535:
        raise ValueError(f"there is no port {port}; ports go from 1 to 65535")
    return Endpoint(found["scheme"], host, port, found["path"] or "/")


def _entry(text: str, variable: str) -> HostEntry:
    found = _ENTRY.fullmatch(text)
    port = int(found["port"]) if found is not None and found["port"] else None
    if found is None or (port is not None and not 1 <= port <= 65535):
        raise ValueError(f"{variable}: {text!r} is no entry; write host, host:port or network, then =VARIABLE if any")
    place = found["place"].strip("[]").lower()
    is_number = "/" in place or found["place"].startswith("[") or re.fullmatch(r"[0-9.]+", place)
    if not is_number:
        return HostEntry(place, None, port, found["token"])
    try:
        return HostEntry(None, ipaddress.ip_network(place), port, found["token"])
    except ValueError as error:
        raise ValueError(f"{variable}: {text!r} is no address or network: {error}") from error


def _plain(address: Address) -> Address:
    """IPv4 in IPv6's clothes is IPv4."""
    return getattr(address, "ipv4_mapped", None) or address


def _holds(entry: HostEntry, address: Address) -> bool:
    return entry.network is not None and address in entry.network


def _is_public(address: Address) -> bool:
    return address.is_global and not address.is_multicast and not any(address in tunnel for tunnel in _TUNNELS)


def _is_here(endpoint: Endpoint) -> bool:
    return endpoint.host == "localhost" or (endpoint.address is not None and endpoint.address.is_loopback)
