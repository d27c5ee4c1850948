"""Sends what waits for webhooks, in a thread of the reconciler's process with an event loop of its own.

It shares nothing with the reconciler's loop but the process: no lease waits for a receiver. It needs no lock either,
since every message is claimed before it is sent, so several may run. One message a webhook is on its way at a time.
Webhooks whose last attempt failed share half of the places, so receivers that hang keep nobody else waiting, however
many they are and however much waits for them.

A message that fails is tried again after `webhook_first_wait_s`, then four times as long each time, six hours at most;
after `webhook_attempts` it is dead. A receiver that says 410 Gone is switched off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from sqlalchemy.orm import Session, sessionmaker

from store import webhook_queue
from store.session import AWAY, STILL_S, describe, make_engine, session_factory
from store.webhook_hosts import WebhookHosts
from store.webhook_queue import Claimed
from worker.settings import WorkerSettings
from worker.webhook_post import GONE, Answer, post

log = logging.getLogger("worker.webhooks")

LOOK_EVERY_S = 0.5
AWAY_PAUSE_S = 3.0
AT_ONCE = 8
AT_ONCE_FAILING = AT_ONCE // 2
LONGEST_WAIT_S = 6 * 3600.0
FORGET_EVERY_S = 3600.0
# A look-up of a name cannot be broken off, so hung ones hold threads until the resolver gives up.
THREADS = 32


class WebhookSender:
    """One loop in one thread; `stop` ends it, and what was on its way is sent again by the next."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._hosts: WebhookHosts = settings.webhook_hosts
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="webhooks", daemon=True)
        self._flights: dict[asyncio.Task[None], str] = {}
        self._failing: set[str] = set()
        self._delivered = asyncio.Event()
        self._forget_at = 0.0

    def start(self) -> None:
        self._thread.start()

    def stop(self, patience_s: float = 2.0) -> None:
        """Ask it to end, and give it some time to."""
        self._stopping.set()
        self._thread.join(patience_s)

    def _run(self) -> None:
        engine = make_engine(self._settings.database_url, pool_size=2, still_s=STILL_S)
        self._sessions: sessionmaker[Session] = session_factory(engine)
        try:
            asyncio.run(self._send_until_stopped())
        finally:
            engine.dispose()

    async def _send_until_stopped(self) -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, "webhooks"))
        tls = ssl.create_default_context()
        while not self._stopping.is_set():
            try:
                await self._look(tls)
            except AWAY as error:
                log.warning("%s", describe(error))
                await asyncio.sleep(AWAY_PAUSE_S)
            except Exception:
                log.exception("webhooks")
                await asyncio.sleep(AWAY_PAUSE_S)
            # A receiver that takes messages is sent the next at once; one that does not is given time.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._delivered.wait(), LOOK_EVERY_S)
            self._delivered.clear()
        if self._flights:
            await asyncio.wait(self._flights, timeout=1.0)

    async def _look(self, tls: ssl.SSLContext) -> None:
        """Take what is due, as far as there is room."""
        while len(self._flights) < AT_ONCE:
            message = await asyncio.to_thread(self._claim, self._not_now())
            if message is None:
                break
            flight = asyncio.create_task(self._deliver(message, tls))
            self._flights[flight] = message.webhook_id
            flight.add_done_callback(self._flights.pop)
        if time.monotonic() >= self._forget_at:
            self._forget_at = time.monotonic() + FORGET_EVERY_S
            await asyncio.to_thread(self._forget)

    def _not_now(self) -> list[str]:
        """Webhooks that are sent nothing while the present messages are on their way."""
        busy = set(self._flights.values())
        if len(busy & self._failing) >= AT_ONCE_FAILING:
            busy |= self._failing
        return list(busy)

    async def _deliver(self, message: Claimed, tls: ssl.SSLContext) -> None:
        try:
            answer = await post(message, self._hosts, self._settings.webhook_timeout_s, tls)
        except Exception as error:
            log.exception("message %s", message.id)
            answer = Answer(error=f"it could not be sent: {type(error).__name__}: {error}")
        if answer.error is None:
            self._failing.discard(message.webhook_id)
        else:
            self._failing.add(message.webhook_id)
        try:
            await asyncio.to_thread(self._mark, message, answer)
        except AWAY as error:
            # Unmarked, it is sent again once its claim has run out: at least once, under one id.
            log.warning("message %s is not marked: %s", message.id, str(error).splitlines()[0])
        except Exception:
            log.exception("message %s", message.id)
        else:
            if answer.error is None:
                self._delivered.set()

    def _claim(self, busy: list[str]) -> Claimed | None:
        with self._sessions.begin() as session:
            return webhook_queue.claim(session, 2 * self._settings.webhook_timeout_s, busy)

    def _mark(self, message: Claimed, answer: Answer) -> None:
        with self._sessions.begin() as session:
            if answer.error is None and answer.status is not None:
                webhook_queue.mark_delivered(session, message.id, answer.status)
                return
            error = answer.error or "no answer"
            again_s = None if answer.final else self._next_wait_s(message.attempt, answer.again_s)
            webhook_queue.mark_failed(session, message.id, error, answer.status, again_s)
            if answer.status == GONE:
                webhook_queue.switch_off(session, message.webhook_id, "the receiver said that it is gone (410)")
        log.warning(
            "webhook %s, event %s, attempt %d: %s%s",
            message.webhook_id, message.event_id, message.attempt, error, "" if again_s else "; given up",
        )  # fmt: skip

    def _next_wait_s(self, attempt: int, asked_s: float | None) -> float | None:
        if attempt >= self._settings.webhook_attempts:
            return None
        return max(asked_s or 0.0, min(self._settings.webhook_first_wait_s * 4.0 ** (attempt - 1), LONGEST_WAIT_S))

    def _forget(self) -> None:
        with self._sessions.begin() as session:
            webhook_queue.forget_old(session)
