"""Messages arrive whole and in order, whatever pieces the socket makes of them, and an end is told."""

from __future__ import annotations

import fcntl
import resource
import socket
import time
from collections.abc import Iterator

import pytest

from ppo_core.rollout.vllm_channel import Channel, ChannelClosed

Ends = tuple[Channel, Channel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    one, other = (Channel(end) for end in socket.socketpair())
    yield one, other
    one.close()
    other.close()


def test_messages_arrive_whole_and_in_order(ends: Ends) -> None:
    one, other = ends
    for number in range(3):
        one.post({"number": number, "text": "\ud800 é"})
    one.exchange(0)
    assert [message["number"] for message in other.exchange(1)] == [0, 1, 2]


def test_what_is_larger_than_the_sockets_buffer_goes_through_while_both_look(ends: Ends) -> None:
    one, other = ends
    one.post({"ids": list(range(1_000_000))})
    found: list[dict[str, object]] = []
    while not found:
        one.exchange(0)
        found = other.exchange(0)
    assert found == [{"ids": list(range(1_000_000))}]
    assert not one.has_unsent


def test_nobody_waits_longer_than_asked(ends: Ends) -> None:
    one, _ = ends
    one.post({"ids": list(range(1_000_000))})  # Nobody takes it.
    began = time.monotonic()
    for _ in range(5):
        assert one.exchange(0.05) == []
    assert time.monotonic() - began < 1
    assert one.has_unsent


def test_what_was_said_before_the_end_is_heard_before_it(ends: Ends) -> None:
    one, other = ends
    one.post({"last": True})
    one.exchange(0)
    one.close()
    other.post({"too": "late"})
    assert other.exchange(1) == [{"last": True}]
    with pytest.raises(ChannelClosed):
        other.exchange(1)


def test_a_process_may_have_many_files_open() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(2000, hard)), hard))
    one, other = socket.socketpair()
    with one, other:
        high = Channel(socket.socket(fileno=fcntl.fcntl(one.fileno(), fcntl.F_DUPFD, 1500)))
        low = Channel(other.dup())
        low.post({"number": 1})
        low.exchange(0)
        assert high.exchange(1) == [{"number": 1}]
        high.post({"number": 2})
        high.exchange(0)
        assert low.exchange(1) == [{"number": 2}]
        high.close()
        low.close()
