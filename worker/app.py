"""The Celery application: `celery -A worker.app worker`, or `python -m worker.app`.

Its one task, `hint`, says that the queue has work. A hint that is lost, doubled or late changes nothing, so there is
nothing to acknowledge late, retry, time out, or keep a result of; and since a supervisor is started detached, nothing
long ever runs inside Celery. With the broker away the thread below goes on looking by itself.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import Any

from celery import Celery, bootsteps
from celery.platforms import EX_FAILURE

from store.hint import HINT_QUEUE, HINT_TASK
from worker.data_folder import DataFolderError
from worker.devices import DevicesError
from worker.loop import Looker
from worker.settings import read_settings, settings_or_exit

log = logging.getLogger("worker")


def _configuration() -> dict[str, Any]:
    """Read when first needed, so that importing this module needs no environment."""
    return {
        "broker_url": read_settings().redis_url,
        # One process, no children: a fork would inherit database connections, and there is nothing to do in parallel.
        "worker_pool": "solo",
        "worker_concurrency": 1,
        "task_default_queue": HINT_QUEUE,
        "task_serializer": "json",
        "accept_content": ["json"],
        "task_ignore_result": True,
        "task_acks_late": False,
        "worker_prefetch_multiplier": 1,
        "worker_disable_prefetch": True,
        "worker_hijack_root_logger": False,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "worker_send_task_events": False,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        # A broker that answers and takes nothing (full, read-only, another password) is away like one that is silent.
        "broker_channel_error_retry": True,
        "broker_connection_timeout": 4,
        "broker_transport_options": {
            "socket_connect_timeout": 4,
            "socket_timeout": 30,
            "socket_keepalive": True,
            "health_check_interval": 10,
        },
    }


app = Celery("ppo")
app.add_defaults(_configuration)


def _look_or_leave(looker: Looker) -> None:
    """A worker that no longer looks would seem alive and take nothing: it leaves, and whoever keeps it starts it again.

    At once, since its supervisors are detached and go on.
    """
    try:
        looker.run()
    except BaseException:
        log.exception("fault of the worker")
        logging.shutdown()
        os._exit(70)


class Looking(bootsteps.StartStopStep):  # type: ignore[misc]  # Celery has no types
    """The thread that looks at the queue. It starts before the broker is reached, and works without it."""

    looker: Looker | None = None

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        self._thread: threading.Thread | None = None

    def start(self, parent: Any) -> None:
        log.setLevel(logging.INFO)  # Celery's own default is to say nothing below a warning
        looker = Looker(settings_or_exit())
        try:
            looker.register()
        except (DataFolderError, DevicesError) as error:
            print(error, file=sys.stderr)
            raise SystemExit(1) from error
        Looking.looker = looker
        self._thread = threading.Thread(target=_look_or_leave, args=(looker,), name="look")
        self._thread.start()

    def stop(self, parent: Any) -> None:
        """A warm shutdown is a drain: it lasts until the runs have saved and are back in the queue.

        A fault of Celery's own is none: the runs go on, and whoever keeps the worker starts it again.
        """
        if parent.exitcode == EX_FAILURE:
            logging.shutdown()
            os._exit(EX_FAILURE)
        if Looking.looker is not None and self._thread is not None:
            Looking.looker.stop()
            self._thread.join()

    def terminate(self, parent: Any) -> None:
        self.stop(parent)


app.steps["worker"].add(Looking)


@app.task(name=HINT_TASK, ignore_result=True)  # type: ignore[untyped-decorator]  # Celery has no types
def hint(run_id: str | None = None) -> None:
    """The queue has work. Which run was meant does not matter: the best one is taken."""
    if Looking.looker is not None:
        Looking.looker.hint()


def main() -> None:
    settings_or_exit()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stdout)
    app.worker_main(["worker", "--loglevel", "INFO", "--without-gossip", "--without-mingle", "--without-heartbeat"])


if __name__ == "__main__":
    main()
