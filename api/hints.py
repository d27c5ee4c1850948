"""Hints to the workers that the queue has work. Losing one costs a few seconds: workers look by themselves as well.

Sent after the commit, from a thread of its own, so that a broker that is away or silent never holds up a request.
"""

from __future__ import annotations

import logging
import threading

from celery import Celery
from kombu.exceptions import KombuError, OperationalError

from store.hint import HINT_QUEUE, HINT_TASK

logger = logging.getLogger(__name__)

CONNECT_S = 1.0


class Hints:
    """One hint at most waits to be sent: several say no more than one."""

    def __init__(self, redis_url: str | None) -> None:
        self._wanted = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None
        if redis_url is not None:
            self._celery = _celery(redis_url)
            self._thread = threading.Thread(target=self._send_when_wanted, name="hints", daemon=True)
            self._thread.start()

    def send(self) -> None:
        """Tell the workers soon; returns at once."""
        self._wanted.set()

    def close(self) -> None:
        self._closing = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * CONNECT_S)

    def _send_when_wanted(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._closing:
                return
            try:
                self._celery.send_task(HINT_TASK, queue=HINT_QUEUE, retry=False, ignore_result=True, expires=60)
            except (OSError, KombuError, OperationalError) as error:
                logger.warning("hint not sent, the workers will look by themselves: %s", type(error).__name__)


def _celery(redis_url: str) -> Celery:
    app = Celery("ppo-control-hints", broker=redis_url, set_as_current=False)
    app.conf.update(
        broker_connection_timeout=CONNECT_S,
        broker_connection_retry=False,
        broker_transport_options={"socket_connect_timeout": CONNECT_S, "socket_timeout": CONNECT_S},
        task_publish_retry=False,
    )
    return app
