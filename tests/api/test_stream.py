"""The live stream and the long poll: no gap, no double, good manners."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session, sessionmaker

from api import event_stream
from api.broadcast import QUEUE_LENGTH, LiveEvent, Subscription
from api.event_stream import Positions
from api.settings import ApiSettings
from store.events import NewEvent, append_events
from tests.api.live_server import in_thread
from tests.api.stream_reader import of, stream


@pytest.fixture(scope="module")
def live_url(settings: ApiSettings) -> Iterator[str]:
    quick = settings.model_copy(update={"ping_s": 0.3, "pool_size": 5})
    with in_thread(quick) as (url, _):
        yield url


@pytest.fixture
def http(live_url: str, keys_by_role: dict[str, str]) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {keys_by_role['viewer']}"}
    with httpx.Client(base_url=live_url, headers=headers, timeout=20, trust_env=False) as client:
        yield client


def note(sessions: sessionmaker[Session], run_id: str, message: Any = "", num: int = 1) -> int:
    """Write `num` events in one transaction; returns the last seq."""
    with sessions.begin() as session:
        events = [NewEvent("note", {"level": "info", "message": message}, 1) for _ in range(num)]
        return append_events(session, run_id, events)


def test_history_comes_first_and_then_what_happens(
    http: httpx.Client, make_run: Callable[..., str], sessions: sessionmaker[Session]
) -> None:
    run_id = make_run()
    note(sessions, run_id, "before", num=3)
    with stream(http, f"{run_id}:1") as messages:
        found = of(messages, "run", "resync")
        assert [next(found).data["seq"] for _ in range(3)] == [2, 3, 4]
        note(sessions, run_id, "two at once", num=2)
        note(sessions, run_id, {"odd": ["\u0000 \u2028", None]})
        fresh = [next(found) for _ in range(3)]
    assert [message.data["seq"] for message in fresh] == [5, 6, 7]
    assert [message.id for message in fresh] == [f"{run_id}:{seq}" for seq in (5, 6, 7)]
    assert set(fresh[0].data) == {"run", "seq", "segment", "type", "iteration", "time", "actor", "payload"}
    assert fresh[0].data["run"] == run_id
    assert fresh[0].data["time"].endswith("Z")


def test_several_runs_share_one_stream_and_its_id_names_each(
    http: httpx.Client, make_run: Callable[..., str], sessions: sessionmaker[Session]
) -> None:
    one, two, other = make_run(), make_run(), make_run()
    with stream(http, f"{one}:1,{two}:0") as messages:
        found = of(messages, "run", "resync")
        first = next(found)
        assert (first.data["run"], first.data["seq"]) == (two, 1)
        note(sessions, other)
        note(sessions, one)
        message = next(found)
        assert (message.data["run"], message.data["seq"]) == (one, 2)
        assert message.id == f"{one}:2,{two}:1"


def test_last_event_id_wins_over_the_query(
    http: httpx.Client, make_run: Callable[..., str], sessions: sessionmaker[Session]
) -> None:
    run_id = make_run()
    note(sessions, run_id, num=9)
    with stream(http, f"{run_id}:0", last=f"{run_id}:8") as messages:
        assert next(of(messages, "run", "resync")).data["seq"] == 9


@pytest.mark.parametrize("position", ["", ":", ":x", ":-1", ":1e3", ":99999", ":99999999999999999999999", ":²"])
def test_a_position_that_is_none_gets_a_resync_and_the_stream_goes_on(
    position: str, http: httpx.Client, make_run: Callable[..., str], sessions: sessionmaker[Session]
) -> None:
    run_id = make_run()
    for query, last in ((run_id + position, None), (f"{run_id}:1", None if position == "" else run_id + position)):
        if last is not None and not last.isascii():
            continue  # No header can say it.
        if query == f"{run_id}:1" and last is None:
            continue
        with stream(http, query, last) as messages:
            found = of(messages, "run", "resync")
            seq = note(sessions, run_id) - 1
            first = next(found)
            if first.data["seq"] == seq + 1:  # The note was faster than the stream.
                seq += 1
            else:
                assert next(found).data["seq"] == seq + 1
            assert first.event == "resync"
            assert first.data == {"run": run_id, "seq": seq}


def test_an_unknown_run_gets_a_resync(http: httpx.Client) -> None:
    with stream(http, "r-none:5") as messages:
        assert next(of(messages, "run", "resync")).data == {"run": "r-none", "seq": None}


def test_too_far_back_is_a_resync_and_not_a_flood(
    http: httpx.Client, make_run: Callable[..., str], sessions: sessionmaker[Session]
) -> None:
    run_id = make_run()
    head = note(sessions, run_id, num=event_stream.REPLAY_LIMIT + 1)
    with stream(http, f"{run_id}:1") as messages:
        found = of(messages, "run", "resync")
        assert next(found).data == {"run": run_id, "seq": head}
        note(sessions, run_id)
        assert next(found).data["seq"] == head + 1


def test_the_list_page_hears_states_of_all_runs_and_nothing_else(
    http: httpx.Client, make_run: Callable[..., str], sessions: sessionmaker[Session]
) -> None:
    old = make_run()
    with stream(http, "*") as messages:
        found = of(messages, "run", "resync")
        assert next(found).data == {"run": "*"}  # Load the list now: from here on nothing is missed.
        note(sessions, old, num=3)
        new = make_run()
        message = next(one for one in found if one.data["run"] != old or one.data["type"] != "state")
        assert (message.data["run"], message.data["type"], message.data["payload"]["to"]) == (new, "state", "queued")
        assert message.id == "*"


def test_a_quiet_stream_pings(http: httpx.Client, make_run: Callable[..., str]) -> None:
    with stream(http, f"{make_run()}:1") as messages:
        begun = time.monotonic()
        assert next(messages).event == "ping"
        assert next(messages).event == "ping"
        assert time.monotonic() - begun < 5


@pytest.mark.parametrize("runs", ["", ",", ",".join(f"r{i}:1" for i in range(65)), "x" * 5000])
def test_a_stream_of_nothing_or_of_too_much_is_422(runs: str, http: httpx.Client) -> None:
    assert http.get("/v1/stream", params={"runs": runs}).status_code == 422


def test_parsing_positions() -> None:
    assert Positions.parse("r-a:5,*,r-b:x") == Positions({"r-a": 5, "r-b": None}, True)
    assert Positions.parse("") == Positions({}, False)


def test_a_full_queue_is_emptied_and_marked() -> None:
    subscription = Subscription(frozenset({"r"}), every_state=False)
    subscription.take_missed()
    for seq in range(QUEUE_LENGTH + 1):
        subscription.offer(LiveEvent("r", seq, "note", "{}"))
    assert subscription.take() is None
    assert subscription.take_missed()


def test_a_burst_beyond_every_queue_arrives_whole(
    http: httpx.Client, make_run: Callable[..., str], sessions: sessionmaker[Session]
) -> None:
    run_id = make_run()
    with stream(http, f"{run_id}:1") as messages:
        found = of(messages, "run", "resync")
        for _ in range(4):
            note(sessions, run_id, "x" * 500, num=QUEUE_LENGTH + 50)
        total = 4 * (QUEUE_LENGTH + 50)
        assert [next(found).data["seq"] for _ in range(total)] == list(range(2, total + 2))


# Long poll


def test_a_long_poll_waits_for_the_first_event(
    http: httpx.Client, make_run: Callable[..., str], sessions: sessionmaker[Session]
) -> None:
    run_id = make_run()
    threading.Timer(0.5, note, (sessions, run_id)).start()
    begun = time.monotonic()
    page = http.get(f"/v1/runs/{run_id}/events", params={"after": 1, "wait": 10}).json()
    assert 0.3 < time.monotonic() - begun < 5
    assert [item["seq"] for item in page["items"]] == [2]
    assert page["cursor"] == 2


def test_a_long_poll_ends_empty_after_its_time(http: httpx.Client, make_run: Callable[..., str]) -> None:
    run_id = make_run()
    begun = time.monotonic()
    page = http.get(f"/v1/runs/{run_id}/events", params={"after": 1, "wait": 0.5}).json()
    assert 0.4 < time.monotonic() - begun < 5
    assert page == {"items": [], "cursor": 1}
    assert http.get(f"/v1/runs/{run_id}/events", params={"after": 1}).json() == {"items": [], "cursor": 1}


def test_a_wait_that_is_over_at_once_still_reads_what_there_is(
    http: httpx.Client, make_run: Callable[..., str]
) -> None:
    run_id = make_run()
    for wait in (1e-9, 1e-4, 1e-3):
        page = http.get(f"/v1/runs/{run_id}/events", params={"after": 0, "wait": wait}).json()
        assert [item["seq"] for item in page["items"]] == [1]
        assert http.get(f"/v1/runs/{run_id}/events", params={"after": 1, "wait": wait}).json() == {
            "items": [],
            "cursor": 1,
        }


def test_events_are_read_in_pages(
    http: httpx.Client, make_run: Callable[..., str], sessions: sessionmaker[Session]
) -> None:
    run_id = make_run()
    note(sessions, run_id, num=10)
    seen, cursor = [], 0
    while page := http.get(f"/v1/runs/{run_id}/events", params={"after": cursor, "limit": 4}).json()["items"]:
        seen += [item["seq"] for item in page]
        cursor = seen[-1]
    assert seen == list(range(1, 12))


# Manners


def sessions_of(sessions: sessionmaker[Session]) -> list[tuple[str, str]]:
    with sessions() as session:
        rows = session.execute(
            text(
                "SELECT application_name, state FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        )
        return [(name, state) for name, state in rows]


def test_streams_keep_no_database_connection(
    http: httpx.Client, live_url: str, make_run: Callable[..., str], sessions: sessionmaker[Session]
) -> None:
    """A pool of 5 and 20 streams: everything else still answers, and nothing is idle in a transaction."""
    run_id = make_run()
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(stream(http, f"{run_id}:0")) for _ in range(20)]
        for messages in opened:
            assert next(of(messages, "run")).data["seq"] == 1
        for path in ("/readyz", "/v1/runs", f"/v1/runs/{run_id}"):
            assert http.get(path).status_code == 200
        listening = [name for name, _ in sessions_of(sessions) if name == "ppo-control events"]
        assert len(listening) == 1
        time.sleep(1)
        assert not [state for _, state in sessions_of(sessions) if state == "idle in transaction"]
        note(sessions, run_id)
        for messages in opened:
            assert next(of(messages, "run")).data["seq"] == 2


def test_listeners_that_leave_are_forgotten(settings: ApiSettings, keys_by_role: dict[str, str]) -> None:
    with in_thread(settings) as (url, server):
        broadcast = server._app.state.broadcast
        headers = {"Authorization": f"Bearer {keys_by_role['viewer']}"}
        process = psutil.Process()
        with httpx.Client(base_url=url, headers=headers, timeout=20, trust_env=False) as http:
            http.get("/v1/runs")
        files = process.num_fds()

        def open_and_drop(_: int) -> None:
            with (
                httpx.Client(base_url=url, headers=headers, timeout=20, trust_env=False) as http,
                stream(http, "r-none:5") as messages,
            ):
                next(messages)

        with ThreadPoolExecutor(10) as threads:
            list(threads.map(open_and_drop, range(100)))
        deadline = time.monotonic() + 5
        while broadcast.num_subscriptions and time.monotonic() < deadline:
            time.sleep(0.05)
        assert broadcast.num_subscriptions == 0
        assert process.num_fds() <= files + 12  # Pooled database connections may have been opened.


def test_the_server_says_bye_and_ends(settings: ApiSettings, keys_by_role: dict[str, str]) -> None:
    headers = {"Authorization": f"Bearer {keys_by_role['viewer']}"}
    with contextlib.ExitStack() as stack:
        with in_thread(settings) as (url, server):
            http = stack.enter_context(httpx.Client(base_url=url, headers=headers, timeout=20, trust_env=False))
            opened = [stack.enter_context(stream(http, "r-none:5")) for _ in range(5)]
            for messages in opened:
                next(messages)
            begun = time.monotonic()
            server.should_exit = True
        assert time.monotonic() - begun < 5
        for messages in opened:
            assert [message.event for message in messages][-1] == "bye"
