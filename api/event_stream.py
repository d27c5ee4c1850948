"""Server-sent events of one listener: from its positions on, no gap, no double, ended in good order.

A listener names the last `seq` it has of each run. What it lacks is read from the table, then live events follow; an
event that is not the next one means that something was missed, and the table is read again. A position that cannot
be served (unknown run, not a number, too far back, from a later future) gets a `resync`: reload that run, the stream
goes on from the position in the message.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api.broadcast import Broadcast, LiveEvent, Subscription
from store.run_read import event_positions, events_after
from store.session import AWAY

logger = logging.getLogger(__name__)

EVERY_RUN = "*"
MAX_RUNS = 64
REPLAY_LIMIT = 2000  # Reloading a page is cheaper than replaying more than this.
READ_AT_ONCE = 500
RECONNECT_MS = 1000
SEND_TIMEOUT_S = 60.0  # A reader that takes nothing for so long is gone.


@dataclass(frozen=True)
class Positions:
    """What a listener follows: the last seq it has of each run (None: not known), and whether all runs' states too."""

    runs: Mapping[str, int | None]
    every_state: bool

    @classmethod
    def parse(cls, text: str) -> Positions:
        """Read `ID:SEQ,ID:SEQ`, with `*` for the states of all runs. What is no number becomes None."""
        runs: dict[str, int | None] = {}
        parts = [part for part in text.split(",") if part]
        for part in parts:
            if part != EVERY_RUN:
                run, _, seq = part.partition(":")
                runs[run] = int(seq) if seq.isascii() and seq.isdigit() and len(seq) < 19 else None
        return cls(runs, EVERY_RUN in parts)


async def messages(live: Broadcast, asked: Positions, ping_s: float) -> AsyncGenerator[bytes]:
    """Everything that goes down the stream, message by message."""
    positions = dict(asked.runs)
    yield f"retry: {RECONNECT_MS}\n\n".encode()
    with live.subscribe(frozenset(positions), every_state=asked.every_state) as subscription:
        while not live.closing:
            if subscription.take_missed():
                try:
                    async with contextlib.aclosing(_catch_up(live, positions, asked.every_state)) as missing:
                        async for message in missing:
                            yield message
                except AWAY as error:
                    logger.warning("stream waits for the database: %s", type(error).__name__)
                    yield _message("ping", {})
                    await asyncio.sleep(1)
                    subscription.miss()
                continue
            event = subscription.take()
            if event is None:
                if not await _woken(subscription, ping_s):
                    yield _message("ping", {})
            elif event.run not in positions:
                yield _run_message(event, positions, asked.every_state)
            elif event.seq == (positions[event.run] or 0) + 1:
                positions[event.run] = event.seq
                yield _run_message(event, positions, asked.every_state)
            elif event.seq > (positions[event.run] or 0):
                subscription.miss()
        yield _message("bye", {})


async def _catch_up(live: Broadcast, positions: dict[str, int | None], every_state: bool) -> AsyncGenerator[bytes]:
    newest = await live.read(lambda session: event_positions(session, positions))
    if every_state:
        yield _message("resync", {"run": EVERY_RUN}, _event_id(positions, every_state))
    for run in list(positions):
        position, head = positions[run], newest.get(run)
        if head is None or position is None or not 0 <= head - position <= REPLAY_LIMIT:
            positions[run] = head or 0
            yield _message("resync", {"run": run, "seq": head}, _event_id(positions, every_state))
            continue
        while position < head:
            rows = await live.read(
                lambda session, run=run, position=position: events_after(session, run, position, READ_AT_ONCE)  # type: ignore[misc]
            )
            if not rows:
                break
            for row in rows:
                positions[run] = position = row.seq
                yield _run_message(LiveEvent.of(row), positions, every_state)


async def _woken(subscription: Subscription, timeout_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await subscription.woken.wait()
        return True
    return False


def _event_id(positions: Mapping[str, int | None], every_state: bool) -> str:
    parts = [f"{run}:{seq}" for run, seq in positions.items() if seq is not None]
    return ",".join([EVERY_RUN, *parts] if every_state else parts)


def _run_message(event: LiveEvent, positions: Mapping[str, int | None], every_state: bool) -> bytes:
    return f"id: {_event_id(positions, every_state)}\nevent: run\ndata: {event.data}\n\n".encode()


def _message(event: str, data: Mapping[str, object], event_id: str | None = None) -> bytes:
    head = "" if event_id is None else f"id: {event_id}\n"
    return f"{head}event: {event}\ndata: {json.dumps(data)}\n\n".encode()


class EventStream(Response):
    """Sends messages until they end or the listener leaves, whichever is first."""

    media_type = "text/event-stream"

    def __init__(self, stream: AsyncGenerator[bytes]) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with contextlib.aclosing(self._stream), anyio.create_task_group() as tasks:

            async def leave_with_the_listener() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                tasks.cancel_scope.cancel()

            tasks.start_soon(leave_with_the_listener)
            with anyio.CancelScope() as sending:
                async for message in self._stream:
                    sending.deadline = anyio.current_time() + SEND_TIMEOUT_S
                    await send({"type": "http.response.body", "body": message, "more_body": True})
                    sending.deadline = float("inf")
            if not sending.cancelled_caught:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            tasks.cancel_scope.cancel()
