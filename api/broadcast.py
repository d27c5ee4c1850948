"""Live events of one api process: one LISTEN connection, each event read once, a bounded queue for every listener.

NOTIFY carries only `run:seq`, the last of what its transaction wrote. Whatever may have been missed (a lost connection,
a full queue, a database away) only sets a subscription's `missed`: whoever holds it reads the table again from its own
position, so nothing depends on a notification arriving. No database connection is kept for a subscription.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import anyio
import psycopg
from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from api.schemas import Event
from store.events import CHANNEL
from store.models import RunEvent
from store.session import AWAY

logger = logging.getLogger(__name__)

QUEUE_LENGTH = 256
RECONNECT_S = 0.5
READERS = 4  # Threads that read events for streams; a crowd of streams cannot take those of requests.

Result = TypeVar("Result")


@dataclass(frozen=True)
class LiveEvent:
    """An event as it goes down a stream: `data` is its JSON, made once for all listeners."""

    run: str
    seq: int
    type: str
    data: str

    @classmethod
    def of(cls, row: RunEvent) -> LiveEvent:
        fields = {"run": row.run_id, **Event.model_validate(row).model_dump(mode="json")}
        return cls(row.run_id, row.seq, row.type, json.dumps(fields, allow_nan=False, separators=(",", ":")))


class Subscription:
    """What one listener has not taken yet."""

    def __init__(self, runs: frozenset[str], every_state: bool) -> None:
        self.runs = runs
        self.every_state = every_state
        self.missed = True
        self.woken = asyncio.Event()
        self._queue: deque[LiveEvent] = deque()

    def wants(self, run: str) -> bool:
        return self.every_state or run in self.runs

    def offer(self, event: LiveEvent) -> None:
        if event.run not in self.runs and not (self.every_state and event.type == "state"):
            return
        if len(self._queue) >= QUEUE_LENGTH:
            self.miss()
            return
        self._queue.append(event)
        self.woken.set()

    def miss(self) -> None:
        """What is queued is worth nothing any more: there is a gap in it."""
        self._queue.clear()
        self.missed = True
        self.woken.set()

    def take(self) -> LiveEvent | None:
        if self._queue:
            return self._queue.popleft()
        self.woken.clear()
        return None

    def take_missed(self) -> bool:
        missed, self.missed = self.missed, False
        return missed


class Broadcast:
    """Hears of events and hands each to the subscriptions that want it."""

    def __init__(self, database_url: str, sessions: sessionmaker[Session]) -> None:
        self._database_url = database_url
        self._sessions = sessions
        self._subscriptions: set[Subscription] = set()
        self._newest: dict[str, int] = {}  # Last seq heard of each run, whether anybody listens or not.
        self._heard: dict[str, tuple[int, int]] = {}  # Not read yet: first and last seq.
        self._something_heard = asyncio.Event()
        self._readers = anyio.CapacityLimiter(READERS)
        self.closing = False

    @property
    def num_subscriptions(self) -> int:
        return len(self._subscriptions)

    @contextlib.contextmanager
    def subscribe(self, runs: frozenset[str], *, every_state: bool = False) -> Iterator[Subscription]:
        """Listen from now on. The subscription begins with `missed` set: read what happened before."""
        subscription = Subscription(runs, every_state)
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)

    def close(self) -> None:
        """Tell every listener that the process ends."""
        self.closing = True
        for subscription in self._subscriptions:
            subscription.woken.set()

    async def read(self, query: Callable[[Session], Result]) -> Result:
        """Run a reading query in a thread of the streams' own, with a connection held no longer than it runs."""

        def call() -> Result:
            with self._sessions() as session:
                return query(session)

        return await anyio.to_thread.run_sync(call, limiter=self._readers)

    async def run(self) -> None:
        """Listen and hand out until cancelled; survives the database going away."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._listen)
            tasks.start_soon(self._hand_out)

    async def _listen(self) -> None:
        while True:
            try:
                connection = await psycopg.AsyncConnection.connect(
                    self._database_url,
                    autocommit=True,
                    connect_timeout=3,
                    keepalives_idle=10,
                    keepalives_interval=5,
                    keepalives_count=3,
                    application_name="ppo-control events",
                )
                async with connection:
                    await connection.execute(f"LISTEN {CHANNEL}")
                    positions = await connection.execute("SELECT id, event_seq FROM runs")
                    self._newest = dict(await positions.fetchall())
                    self._miss_all()
                    async for notification in connection.notifies():
                        self._hear(notification.payload)
            except (psycopg.Error, OSError) as error:
                logger.warning("not listening for events: %s", type(error).__name__)
            await asyncio.sleep(RECONNECT_S)

    def _hear(self, payload: str) -> None:
        run, _, number = payload.rpartition(":")
        if not run or not number.isdigit():
            logger.warning("odd notification: %r", payload[:100])
            return
        seq, known = int(number), self._newest.get(run, 0)
        if seq <= known:
            return
        self._newest[run] = seq
        listeners = [subscription for subscription in self._subscriptions if subscription.wants(run)]
        first, _ = self._heard.get(run, (known + 1, seq))
        if seq - first >= QUEUE_LENGTH:
            for subscription in listeners:
                subscription.miss()
        elif listeners:
            self._heard[run] = (first, seq)
            self._something_heard.set()

    async def _hand_out(self) -> None:
        while True:
            await self._something_heard.wait()
            self._something_heard.clear()
            heard, self._heard = self._heard, {}
            try:
                events = await self.read(lambda session, heard=heard: _read_ranges(session, heard))  # type: ignore[misc]
            except AWAY as error:
                logger.warning("events not read: %s", type(error).__name__)
                await asyncio.sleep(RECONNECT_S)
                self._miss_all()
                continue
            for event in events:
                for subscription in self._subscriptions:
                    subscription.offer(event)

    def _miss_all(self) -> None:
        for subscription in self._subscriptions:
            subscription.miss()


def _read_ranges(session: Session, ranges: dict[str, tuple[int, int]]) -> list[LiveEvent]:
    events: list[LiveEvent] = []
    for run, (first, last) in ranges.items():
        rows = session.scalars(
            select(RunEvent).where(RunEvent.run_id == run, RunEvent.seq.between(first, last)).order_by(RunEvent.seq)
        )
        events.extend(LiveEvent.of(row) for row in rows)
    return events
