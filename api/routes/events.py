"""A run's history, by long poll and as a live stream."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response

from api.auth import least
from api.cursors import MAX_INTEGER
from api.deps import Live, Settings
from api.errors import ProblemError, not_found
from api.event_stream import MAX_RUNS, EventStream, Positions, messages
from api.schemas import Event, EventPage, FaultMessage
from store.run_read import events_after, find_run

router = APIRouter(prefix="/v1", tags=["events"])

MAX_STREAMS = 500  # A process's share; more are told to come again.


@router.get("/runs/{run_id}/events", openapi_extra=least("viewer"))
async def read_events(
    run_id: str,
    live: Live,
    after: Annotated[int, Query(ge=0, le=MAX_INTEGER, description="Last seq already seen.")] = 0,
    wait: Annotated[float, Query(ge=0, le=30, description="Seconds to wait for a first event.")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> EventPage:
    """Events after a sequence number. With `wait`, an empty answer is held back until something happens."""
    with live.subscribe(frozenset({run_id})) as subscription:
        if await live.read(lambda session: find_run(session, run_id)) is None:
            raise not_found("run", run_id)
        rows = await live.read(lambda session: events_after(session, run_id, after, limit))
        # However short the wait, the table has been read once when it is over.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait or None):
                while not rows and wait and not live.closing:
                    await subscription.woken.wait()
                    while subscription.take():  # The table is read instead; this only wakes.
                        pass
                    rows = await live.read(lambda session: events_after(session, run_id, after, limit))
    return EventPage(items=[Event.model_validate(row) for row in rows], cursor=rows[-1].seq if rows else after)


@router.get(
    "/stream",
    openapi_extra=least("viewer"),
    response_class=Response,
    responses={
        200: {
            "description": "Server-sent events: `run` (an event; its id is a map ID:SEQ,ID:SEQ to go on from), "
            "`resync` (reload that run, the stream goes on from the seq given), `ping`, `bye`.",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        }
    },
)
async def stream_events(
    request: Request,
    live: Live,
    settings: Settings,
    runs: Annotated[
        str, Query(max_length=4000, description="ID:SEQ,ID:SEQ, the last seq seen of each run; * for all runs' states.")
    ],
    last_event_id: Annotated[str | None, Header(alias="Last-Event-ID", max_length=4000)] = None,
) -> Response:
    """Follow several runs in one stream, from where each was left. `Last-Event-ID` wins over `runs`."""
    positions = _positions(runs, last_event_id)
    if len(positions.runs) > MAX_RUNS or not (positions.runs or positions.every_state):
        fault = FaultMessage(pointer="/query/runs", message=f"follow 1 to {MAX_RUNS} runs, or *")
        raise ProblemError(422, "bad_request", "The request is not valid.", errors=[fault])
    if live.closing or live.num_subscriptions >= MAX_STREAMS:
        raise ProblemError(503, "too_many_streams", "No room for a stream now.", headers={"Retry-After": "2"})
    return EventStream(messages(live, positions, settings.ping_s))


def _positions(runs: str, last_event_id: str | None) -> Positions:
    """What the query names, at the positions of the last event id where it has them."""
    asked = Positions.parse(runs)
    if not last_event_id:
        return asked
    seen = Positions.parse(last_event_id)
    return Positions({run: seen.runs.get(run) for run in asked.runs}, asked.every_state)
