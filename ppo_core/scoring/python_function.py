"""A registered Python function as a reward source, in processes of its own with a deadline.

A call that never returns, raises or kills its process costs the score of its own response and nothing else. While one
call takes long, others go on in further processes; what has no answer when the time is up is a time-out, and its
process is killed. Afterwards there is one process again, as before.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from ppo_core.errors import DataError, RewardError
from ppo_core.scoring.source import CHECK_EVERY_S, Unusable, not_asked_to_end
from ppo_core.scoring.worker_process import WorkerProcess

# Importing a lexicon or a grammar takes seconds on a busy machine.
STARTUP_TIMEOUT_S = 60.0
# A call is late after this share of the batch's time, at most this long; then the next ones get another process.
LATE_SHARE = 0.125
LATE_S = 1.0
MAX_PROCESSES = 8
MAX_FAILED_STARTS = 3


class PythonFunction:
    """The function registered as `name` in the entry point group `group`.

    Args:
        group: `ppo_core.rewards` or `ppo_core.judges`.
        name: its name there.
        timeout_s: seconds that one batch of scores may take.

    Raises:
        DataError: it is not registered, or its module cannot be imported.
    """

    def __init__(self, group: str, name: str, timeout_s: float) -> None:
        self._group, self._name, self._timeout_s = group, name, timeout_s
        self._workers: list[WorkerProcess] = []
        self._end = weakref.finalize(self, _end_all, self._workers)
        self._start_first()
        #: A digest of the function, whatever it is called; None where its source does not say all of it.
        self.content = self._workers[0].content

    @property
    def num_processes(self) -> int:
        """Live processes."""
        return sum(1 for worker in self._workers if worker.is_alive())

    def score(
        self, prompts: Sequence[str], responses: Sequence[str], check: Callable[[], None] = not_asked_to_end
    ) -> list[object]:
        """See `RewardSource`; returns at the latest when `timeout_s` is over.

        Raises:
            RewardError: the function's process cannot be started any more.
        """
        batch = _Batch(list(prompts), list(responses))
        deadline = time.monotonic() + self._timeout_s
        patience = min(LATE_S, LATE_SHARE * self._timeout_s)
        try:
            while batch.is_open and (left := deadline - time.monotonic()) > 0:
                check()
                self._hand_out(batch, patience)
                self._listen(batch, min(left, patience, CHECK_EVERY_S))
        finally:
            self._back_to_one()
        return batch.results

    def close(self) -> None:
        self._end()

    def _hand_out(self, batch: _Batch, patience: float) -> None:
        for worker in self._workers:
            if batch.waiting and worker.is_idle:
                row = batch.waiting.popleft()
                worker.send(row, batch.prompts[row], batch.responses[row])
        if batch.waiting and len(self._workers) < MAX_PROCESSES and all(w.is_late(patience) for w in self._workers):
            self._workers.append(self._started())

    def _listen(self, batch: _Batch, wait_s: float) -> None:
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                worker.register(selector)
            for key, events in selector.select(wait_s):
                worker = key.data
                if worker not in self._workers:
                    continue  # It was found dead by an earlier event of this round.
                if events & selectors.EVENT_WRITE:
                    worker.write()
                elif events & selectors.EVENT_READ:
                    self._hear(worker, batch)

    def _hear(self, worker: WorkerProcess, batch: _Batch) -> None:
        for message in worker.messages():
            if "row" in message:
                batch.results[message["row"]] = _result(message)
                batch.num_open -= 1
        if worker.has_ended:
            if worker.row is not None:
                batch.results[worker.row] = Unusable("died", "the scoring process ended during this call")
                batch.num_open -= 1
            elif not worker.was_ready:
                batch.failed_starts.append(worker.failure)
            self._workers.remove(worker)
            worker.end()
            if len(batch.failed_starts) >= MAX_FAILED_STARTS:
                raise RewardError(f"the process of {self._name!r} cannot be started: {batch.failed_starts[-1]}")

    def _back_to_one(self) -> None:
        """Keep one process that waits for work; end those that still compute or start, and all others."""
        kept = next((worker for worker in self._workers if worker.is_idle), None)
        for worker in [worker for worker in self._workers if worker is not kept]:
            self._workers.remove(worker)
            worker.end()
        if kept is None:
            self._workers.append(self._started())

    def _start_first(self) -> None:
        worker = self._started()
        self._workers.append(worker)
        deadline = time.monotonic() + STARTUP_TIMEOUT_S
        problem = f"it was not ready after {STARTUP_TIMEOUT_S:.0f} s"
        while not worker.is_idle and (left := deadline - time.monotonic()) > 0:
            with selectors.DefaultSelector() as selector:
                worker.register(selector)
                selector.select(left)
            worker.messages()
            if worker.has_ended:
                problem = worker.failure
                break
        if not worker.is_idle:
            self.close()
            raise DataError(
                f"the function {self._name!r} of {self._group!r} cannot be used: {problem}",
                hint="Install the package that registers it into this environment.",
            )

    def _started(self) -> WorkerProcess:
        # The worker finds what this process finds, wherever it was started.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [sys.executable, "-m", "ppo_core.scoring.function_worker", self._group, self._name, str(os.getpid())]
        return WorkerProcess(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=0)
        )


class _Batch:
    """One call of `score` under way."""

    def __init__(self, prompts: list[str], responses: list[str]) -> None:
        self.prompts, self.responses = prompts, responses
        self.waiting = deque(range(len(responses)))
        self.results: list[object] = [Unusable("timeout", "no answer in time")] * len(responses)
        self.num_open = len(responses)
        self.failed_starts: list[str] = []

    @property
    def is_open(self) -> bool:
        return self.num_open > 0


def _result(message: dict[str, object]) -> object:
    if "error" in message:
        return Unusable("error", str(message["error"]))
    if "wrong_type" in message:
        return Unusable("wrong_type", f"a {message['wrong_type']} is no score")
    return message["score"]


def _end_all(workers: list[WorkerProcess]) -> None:
    while workers:
        workers.pop().end()
