"""Logs over REST: pieces by byte position, which there are, search within bounds, download; nothing read whole."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import update
from sqlalchemy.orm import Session, sessionmaker
from starlette.testclient import TestClient

from api.logs import LONGEST_LINE, PIECE_BYTES, SEARCHED_BYTES
from api.settings import ApiSettings
from ppo_core.rundir import segment_dir
from store import keys
from store.models import Run
from tests.api.live_server import ServerProcess


@pytest.fixture
def log(settings: ApiSettings, make_run: Callable[..., str]) -> tuple[str, Path]:
    run_id = make_run()
    path = segment_dir(settings.data_dir / "runs" / run_id, 1).log(0, 0)
    path.parent.mkdir(parents=True)
    return run_id, path


def _search(viewer: TestClient, run_id: str, text: str, **query: Any) -> dict[str, Any]:
    answer = viewer.get(f"/v1/runs/{run_id}/logs/search", params={"search": text, **query})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_a_log_is_read_by_byte_position(viewer: TestClient, log: tuple[str, Path]) -> None:
    run_id, path = log
    text = "line eins\nžluťoučký kůň 😀\n" * 50
    path.write_bytes(text.encode() + b"\xff\xfe rubbish\n")
    size = path.stat().st_size
    read, offset = "", 0
    while offset < size:
        piece = viewer.get(f"/v1/runs/{run_id}/logs", params={"offset": offset, "limit": 7}).json()
        assert piece["size"] == size
        assert piece["next_offset"] > offset
        read, offset = read + piece["text"], piece["next_offset"]
    assert read == text + "\ufffd\ufffd rubbish\n"
    tail = viewer.get(f"/v1/runs/{run_id}/logs", params={"offset": -9}).json()
    assert tail["text"] == " rubbish\n"
    beyond = viewer.get(f"/v1/runs/{run_id}/logs", params={"offset": size + 100}).json()
    assert (beyond["text"], beyond["next_offset"]) == ("", size)
    assert viewer.get(f"/v1/runs/{run_id}/logs", params={"offset": -(10**9)}).json()["offset"] == 0


def test_a_log_that_is_not_there_yet_is_empty(viewer: TestClient, log: tuple[str, Path]) -> None:
    run_id, _ = log
    piece = viewer.get(f"/v1/runs/{run_id}/logs").json()
    assert piece == {"text": "", "offset": 0, "next_offset": 0, "size": 0}
    assert _search(viewer, run_id, "x") == {"items": [], "offset": 0, "next_offset": 0, "size": 0}
    missing = viewer.get(f"/v1/runs/{run_id}/logs/download", params={"attempt": 3, "rank": 1})
    assert missing.status_code == 404
    assert "no log of attempt 3, rank 1" in missing.json()["detail"]


def test_a_log_that_there_cannot_be_is_not_found(
    viewer: TestClient, log: tuple[str, Path], sessions: sessionmaker[Session]
) -> None:
    run_id, _ = log
    with sessions.begin() as session:
        spec = {"training": {"ranks": 2}}
        session.execute(update(Run).where(Run.id == run_id).values(attempt=2, spec=spec))
    read, search = f"/v1/runs/{run_id}/logs", f"/v1/runs/{run_id}/logs/search"
    for query in ({"rank": 2}, {"attempt": 3}, {"attempt": 0}, {"attempt": 1, "rank": 77}):
        answers = [viewer.get(read, params=query), viewer.get(search, params={"search": "x", **query})]
        assert [answer.status_code for answer in answers] == [404, 404], query
        assert "has no log of attempt" in answers[0].json()["detail"]
    may_come: list[dict[str, Any]] = [{}, {"attempt": 1, "rank": 1}, {"rank": 1}, {"source": "supervisor", "rank": 7}]
    for not_yet in may_come:
        assert viewer.get(read, params=not_yet).json()["text"] == "", not_yet


def test_a_log_that_got_shorter_under_its_reader_reads_on_from_its_end(
    viewer: TestClient, log: tuple[str, Path]
) -> None:
    run_id, path = log
    path.write_text("first\n" * 100)
    path.write_text("new\n")
    piece = viewer.get(f"/v1/runs/{run_id}/logs", params={"offset": 600}).json()
    assert (piece["text"], piece["next_offset"], piece["size"]) == ("", 4, 4)


def test_one_answer_holds_no_more_than_the_cap(viewer: TestClient, log: tuple[str, Path]) -> None:
    run_id, path = log
    path.write_bytes(b"x" * 1_000_000)
    assert len(viewer.get(f"/v1/runs/{run_id}/logs").json()["text"]) == 65536
    assert viewer.get(f"/v1/runs/{run_id}/logs", params={"limit": 10**7}).status_code == 422


def test_the_logs_that_a_run_has_are_listed_and_each_can_be_read(
    viewer: TestClient, settings: ApiSettings, make_run: Callable[..., str], sessions: sessionmaker[Session]
) -> None:
    """Two attempts, the second with two ranks and in a later segment; faults and other files are no logs."""
    run_id = make_run()
    folder = settings.data_dir / "runs" / run_id
    first, second = segment_dir(folder, 1), segment_dir(folder, 2)
    for segment in (first, second):
        segment.logs.mkdir(parents=True)
    first.log(1, 0).write_text("one")
    second.log(2, 0).write_text("two")
    second.log(2, 1).write_text("rank one")
    second.fault(2, 1).write_text("{}")
    (second.logs / "attempt-x-rank-0.log").write_text("")
    (folder / "supervisor.log").write_text("looked after it")
    with sessions.begin() as session:
        session.execute(update(Run).where(Run.id == run_id).values(attempt=2))
    items = viewer.get(f"/v1/runs/{run_id}/logs/files").json()["items"]
    names = [(item["source"], item["attempt"], item["rank"], item["segment"]) for item in items]
    assert names == [("trainer", 2, 0, 2), ("trainer", 2, 1, 2), ("trainer", 1, 0, 1), ("supervisor", None, None, None)]
    read = []
    for item in items:
        query = {name: item[name] for name in ("source", "attempt", "rank") if item[name] is not None}
        piece = viewer.get(f"/v1/runs/{run_id}/logs", params=query).json()
        assert piece["size"] == item["size"]
        read.append(piece["text"])
    assert read == ["two", "rank one", "one", "looked after it"]
    assert viewer.get(f"/v1/runs/{run_id}/logs").json()["text"] == "two", "the newest attempt's first rank"


def test_a_log_that_was_taken_away_is_not_listed(viewer: TestClient, log: tuple[str, Path]) -> None:
    run_id, path = log
    path.write_text("here")
    path.with_name("attempt-01-rank-0.log").symlink_to(path.with_name("gone"))
    answer = viewer.get(f"/v1/runs/{run_id}/logs/files")
    assert answer.status_code == 200
    assert [(log["attempt"], log["size"]) for log in answer.json()["items"]] == [(0, 4)]


def test_search_finds_lines_in_either_case_with_their_byte_positions(viewer: TestClient, log: tuple[str, Path]) -> None:
    run_id, path = log
    data = (
        "ž start\nLoss is NaN, loss again\r\nfine\n 10%\r 20% LOSS\rdone\n".encode()
        + b"\xff loss\n"
        + "Ž END\n".encode()
    )
    path.write_bytes(data)
    found = _search(viewer, run_id, "loss")
    assert [item["line"] for item in found["items"]] == ["Loss is NaN, loss again", " 20% LOSS", "\ufffd loss"]
    for item in found["items"]:
        assert data[item["offset"] : item["offset"] + 4].lower() == b"loss"
        assert data[: item["line_offset"]][-1:] in (b"\n", b"\r")
    assert found["next_offset"] == found["size"] == len(data)
    assert [item["line"] for item in _search(viewer, run_id, "ž")["items"]] == ["ž start", "Ž END"]
    assert _search(viewer, run_id, "l.ss")["items"] == [], "plain text, no pattern"


def test_search_goes_on_where_its_answer_was_full(viewer: TestClient, log: tuple[str, Path]) -> None:
    """Every matching line once, whatever the size of the pages."""
    run_id, path = log
    path.write_text("".join(f"line {number} wanted wanted\nother\n" for number in range(25)))
    seen, offset = [], 0
    while offset < path.stat().st_size:
        found = _search(viewer, run_id, "wanted", offset=offset, limit=4)
        assert len(found["items"]) <= 4
        assert found["next_offset"] > offset
        seen += [item["line"] for item in found["items"]]
        offset = found["next_offset"]
    assert seen == [f"line {number} wanted wanted" for number in range(25)]


def test_one_search_reads_some_megabytes_and_the_next_goes_on(viewer: TestClient, log: tuple[str, Path]) -> None:
    run_id, path = log
    path.write_bytes((b"x" * 99 + b"\n") * (2 * SEARCHED_BYTES // 100) + b"the needle\n")
    found = _search(viewer, run_id, "needle")
    assert found["items"] == []
    assert SEARCHED_BYTES <= found["next_offset"] < SEARCHED_BYTES + 2 * PIECE_BYTES
    rounds = 1
    while found["next_offset"] < found["size"]:
        found = _search(viewer, run_id, "needle", offset=found["next_offset"])
        rounds += 1
    assert [item["line"] for item in found["items"]] == ["the needle"]
    assert rounds <= 3


def test_a_line_longer_than_memory_is_searched_and_shown_in_part(viewer: TestClient, log: tuple[str, Path]) -> None:
    """The match lies across the border of what is held at once."""
    run_id, path = log
    before = PIECE_BYTES - 3
    path.write_bytes(b"y" * before + b"needle" + b"z" * PIECE_BYTES)
    found = _search(viewer, run_id, "NEEDLE")
    assert [item["offset"] for item in found["items"]] == [before]
    assert len(found["items"][0]["line"]) <= LONGEST_LINE
    assert "needle" in found["items"][0]["line"]


@pytest.mark.parametrize("query", [{}, {"search": ""}, {"search": "x" * 201}, {"search": "x", "offset": -1}])
def test_a_search_without_sense_is_refused(viewer: TestClient, log: tuple[str, Path], query: dict[str, Any]) -> None:
    assert viewer.get(f"/v1/runs/{log[0]}/logs/search", params=query).status_code == 422


def test_a_log_is_downloaded_byte_for_byte_as_text_that_no_browser_shows(
    viewer: TestClient, log: tuple[str, Path]
) -> None:
    run_id, path = log
    data = b"<script>alert(1)</script>\n\xff\x00" + b"line\n" * 100_000
    path.write_bytes(data)
    answer = viewer.get(f"/v1/runs/{run_id}/logs/download")
    assert answer.content == data
    assert answer.headers["content-disposition"] == f'attachment; filename="{run_id}-attempt-0-rank-0.log"'
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.headers["x-content-type-options"] == "nosniff"


def _growth_under_tails(database_url: str, folder: Path, run_id: str, key: str, clients: int, rounds: int) -> float:
    """MiB that the service grows by while so many clients read the end, search and go on."""
    import httpx

    server = ServerProcess(database_url, folder)
    faults: list[str] = []
    try:
        process = psutil.Process(server.process.pid)

        def read(rounds: int) -> None:
            with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {key}"}, timeout=60) as client:
                for number in range(rounds):
                    for query in ({"offset": -65536}, {"offset": number * PIECE_BYTES, "limit": PIECE_BYTES}):
                        answer = client.get(f"/v1/runs/{run_id}/logs", params=query)
                        if answer.status_code != 200:
                            faults.append(answer.text)
                    client.get(f"/v1/runs/{run_id}/logs/search", params={"search": "nowhere", "offset": number * 4096})

        read(3)  # what any first request costs
        before = process.memory_info().rss
        threads = [threading.Thread(target=read, args=(rounds,)) for _ in range(clients)]
        for thread in threads:
            thread.start()
        most = before
        while any(thread.is_alive() for thread in threads):
            most = max(most, process.memory_info().rss)
            threads[0].join(0.05)
        for thread in threads:
            thread.join()
        assert faults == []
        return (most - before) / 2**20
    finally:
        server.close()


@pytest.fixture
def big_log(tmp_path: Path, sessions: sessionmaker[Session], make_run: Callable[..., str]) -> tuple[str, str, Path]:
    run_id = make_run()
    path = segment_dir(tmp_path / "runs" / run_id, 1).log(0, 0)
    path.parent.mkdir(parents=True)
    with sessions.begin() as session:
        key = keys.create_key(session, "reader", "viewer")[1]
    return run_id, key, path


def _fill(path: Path, megabytes: int) -> None:
    line = b"iteration %7d reward 0.25 kl 0.03 entropy 1.9 ......................\n"
    block = b"".join(line % number for number in range(15_000))
    with path.open("wb") as file:
        while file.tell() < megabytes * 2**20:
            file.write(block)


@pytest.mark.stack
def test_readers_of_a_large_log_cost_no_memory(module_url: str, tmp_path: Path, big_log: tuple[str, str, Path]) -> None:
    run_id, key, path = big_log
    _fill(path, 100)
    assert _growth_under_tails(module_url, tmp_path, run_id, key, clients=6, rounds=2) < 50


@pytest.mark.slow
def test_twenty_tails_of_200_megabytes_cost_no_memory(
    module_url: str, tmp_path: Path, big_log: tuple[str, str, Path]
) -> None:
    run_id, key, path = big_log
    _fill(path, 200)
    assert _growth_under_tails(module_url, tmp_path, run_id, key, clients=20, rounds=30) < 50
