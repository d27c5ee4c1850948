"""Hosts of HTTP scorers: one plain form of address, a list that allows, and special ranges only when they are on it."""

from __future__ import annotations

import ipaddress

import pytest

from ppo_core.spec.hosts import Endpoint, RewardHosts, parse_endpoint


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("https://Rewards.Example/score", Endpoint("https", "rewards.example", 443, "/score")),
        ("http://scorer:9000", Endpoint("http", "scorer", 9000, "/")),
        ("http://127.0.0.1/a/b%20c", Endpoint("http", "127.0.0.1", 80, "/a/b%20c")),
        ("https://[0:0:0:0:0:0:0:1]:65535/", Endpoint("https", "::1", 65535, "/")),
    ],
)
def test_an_address_in_its_parts(url: str, endpoint: Endpoint) -> None:
    assert parse_endpoint(url) == endpoint


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://me:secret@rewards.example/", "user name or password"),
        ("https://token@rewards.example/", "user name or password"),
        ("https://rewards.example/?key=secret", "without a query"),
        ("https://rewards.example/#x", "without a query"),
        ("ftp://rewards.example/", "expected an address"),
        ("file:///etc/passwd", "expected an address"),
        ("HTTP://rewards.example/", "expected an address"),
        ("//rewards.example/", "expected an address"),
        ("https://", "expected an address"),
        ("https://a b/", "expected an address"),
        ("https://rewards.example\\\\evil/", "expected an address"),
        ("https://rewards.example/\n", "expected an address"),
        ("https://r\u00e9wards.example/", "expected an address"),
        ("https://rewards.example:0/", "there is no port 0"),
        ("https://rewards.example:70000/", "there is no port 70000"),
        ("https://[::1/", "expected an address"),
        ("https://[1.2.3]/", "is no IPv6 address"),
    ],
)
def test_any_other_form_is_refused(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_endpoint(url)


LIST = RewardHosts.parse(" Rewards.Example, scorer:9000 ,10.1.0.0/16,[fd00::/8],127.0.0.1:8080,judge.example=T_1,")


@pytest.mark.parametrize(
    "url",
    [
        "https://rewards.example/x",
        "http://rewards.example:81/",
        "http://scorer:9000/",
        "http://10.1.2.3/",
        "http://[fd00::7]/",
        "http://127.0.0.1:8080/",
        "https://judge.example/",
        "http://[::ffff:10.1.0.1]/",
    ],
)
def test_a_listed_host_is_allowed(url: str) -> None:
    assert LIST.problem(parse_endpoint(url)) is None


@pytest.mark.parametrize(
    "url",
    [
        "https://other.example/",
        "https://sub.rewards.example/",
        "https://rewards.example.evil.example/",
        "https://rewards.example./",
        "http://scorer:9001/",
        "http://10.2.0.1/",
        "http://127.0.0.1/",
        "http://127.1:8080/",
        "http://2130706433:8080/",
        "http://0x7f000001:8080/",
        "http://localhost:8080/",
        "http://169.254.169.254/",
        "http://[::1]:8080/",
        "http://[::ffff:127.0.0.1]/",
        "http://8.8.8.8/",
    ],
)
def test_a_host_that_is_not_listed_is_refused_with_the_remedy(url: str) -> None:
    problem = LIST.problem(parse_endpoint(url))
    assert problem is not None
    assert "add it to PPO_REWARD_HOSTS" in problem
    assert RewardHosts().problem(parse_endpoint(url)) is not None


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1", True),
        ("127.0.0.1", False),
        ("10.0.0.1", False),
        ("172.18.0.5", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("ff0e::1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1", False),
        ("fc00::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
        ("10.1.255.255", True),
        ("::ffff:10.1.0.9", True),
        ("fd12::1", True),
    ],
)
def test_what_a_listed_name_may_stand_for(address: str, allowed: bool) -> None:
    """Special ranges only where they are on the list themselves: a name alone does not bring them in."""
    assert LIST.allows_address(ipaddress.ip_address(address), 443) is allowed


def test_a_port_of_an_entry_holds_for_addresses_too() -> None:
    assert LIST.allows_address(ipaddress.ip_address("127.0.0.1"), 8080)
    assert not LIST.allows_address(ipaddress.ip_address("127.0.0.1"), 5432)


def test_a_token_does_not_travel_in_the_open() -> None:
    hosts = RewardHosts.parse("judge.example=TOKEN,127.0.0.1=TOKEN,10.0.0.1=TOKEN")
    assert hosts.problem(parse_endpoint("https://judge.example/")) is None
    assert hosts.problem(parse_endpoint("http://127.0.0.1/")) is None
    for url in ("http://judge.example/", "http://10.0.0.1/"):
        assert "use https" in str(hosts.problem(parse_endpoint(url)))


@pytest.mark.parametrize(
    "text", ["http://x", "a b", "x:0", "x:99999", "x=1", "x=", "10.0.0.1/8", "10.0.0", "[::g]", "*"]
)
def test_a_malformed_entry_is_an_error_that_names_it(text: str) -> None:
    with pytest.raises(ValueError, match=r"PPO_REWARD_HOSTS: "):
        RewardHosts.parse(f"fine.example,{text}")


def test_without_the_variable_no_host_is_allowed() -> None:
    assert RewardHosts.of_environment({}) == RewardHosts(())
    assert RewardHosts.of_environment({"PPO_REWARD_HOSTS": "a"}) == RewardHosts.parse("a")
