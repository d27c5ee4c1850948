"""What a rank is told when it starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from ppo_core.rundir import device_names, free_port, num_ranks, rank_environment


@pytest.mark.parametrize(("spec", "ranks"), [({}, 1), ({"training": {}}, 1), ({"training": {"ranks": 3}}, 3)])
def test_the_spec_says_how_many_there_are(spec: dict[str, object], ranks: int) -> None:
    assert num_ranks(spec) == ranks


def test_all_meet_at_one_place_and_each_knows_its_number() -> None:
    first, second = (rank_environment(rank, 2, 12345, []) for rank in range(2))
    assert first == {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "12345",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
    }
    assert second == {**first, "RANK": "1", "LOCAL_RANK": "1"}


def test_each_sees_its_own_gpu_alone_as_the_first() -> None:
    ranks = [rank_environment(rank, 2, 1, ["4", "GPU-ab"]) for rank in range(2)]
    assert [(rank["CUDA_VISIBLE_DEVICES"], rank["LOCAL_RANK"]) for rank in ranks] == [("4", "0"), ("GPU-ab", "0")]
    assert rank_environment(0, 1, 1, ["4", "5"])["CUDA_VISIBLE_DEVICES"] == "4,5"


def test_gpus_are_counted_among_those_that_may_be_seen() -> None:
    assert (device_names((), None), device_names((0, 2), None)) == ([], ["0", "2"])
    assert device_names((1, 2), "4,GPU-ab,6") == ["GPU-ab", "6"]
    assert device_names((0, 3), "4,5") == ["4"]
    assert device_names((0,), "") == []
    assert device_names((0, 1), "6, 7") == ["6", "7"]
    assert device_names((0, 1), "6,-1,7") == ["6"]


def test_a_port_is_free_and_not_one_that_outgoing_connections_get() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 10
    for port in ports:
        assert 10240 <= port < max(lowest, 11240)
        socket.create_server(("127.0.0.1", port)).close()
