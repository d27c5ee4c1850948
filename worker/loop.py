"""The worker's one job: look at the queue, claim what fits, start a supervisor for it. `python -m worker.loop`.

Nothing long runs here. It looks every few seconds by itself and at once when hinted; a supervisor is a session of its
own and outlives this process. `worker.app` is the same with Celery's hints; this one needs no broker.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from store import leases, workers
from store.queue import Claim, claim
from store.session import AWAY, STILL_S, describe, make_engine, session_factory
from worker.data_folder import DataFolderError, data_folder_fault, is_there, prove_writable, room_fault
from worker.devices import DevicesError, check_visible, describe_gpus
from worker.processes import carries, marks
from worker.settings import WorkerSettings, settings_or_exit

log = logging.getLogger("worker")

# On top of the first lease: on a busy machine a supervisor's interpreter takes seconds until it can renew.
START_ALLOWANCE_S = 10.0
# How long the worker holds the lease for one that lives and cannot: the server has no connection left, say.
START_LIMIT_S = 120.0


def code_version() -> str:
    """The installed version of this code."""
    try:
        return version("ppo-control")
    except PackageNotFoundError:
        return "source"


@dataclass(frozen=True)
class Supervisor:
    """A supervisor that this process started, for which claim, and when (monotonic)."""

    process: subprocess.Popen[bytes]
    run_id: str
    token: int
    started_at: float


class Looker:
    """Registers the worker and looks at the queue until it is told to drain. One thread calls `run`."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.engine = make_engine(settings.database_url, pool_size=2, still_s=STILL_S)
        self.sessions = session_factory(self.engine)
        self._hinted = threading.Event()
        self._stopping = threading.Event()
        self._supervisors: list[Supervisor] = []
        self._inherited: list[tuple[str, int, int]] = []
        self._folder_fault: str | None = None
        self._told: set[tuple[str, int]] = set()

    def hint(self) -> None:
        """The queue may have work: look now."""
        self._hinted.set()

    def stop(self) -> None:
        """Claim nothing more; `run` drains and returns."""
        self._stopping.set()
        self._hinted.set()

    def register(self) -> None:
        """Prove the data folder and announce the worker, waiting for the database if it is not up yet.

        Raises:
            DataFolderError
            DevicesError: it is to give away GPUs that it does not see.
        """
        settings = self.settings
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        check_visible(settings.gpus, visible)
        token = prove_writable(settings.data_dir, settings.worker_id)
        devices = describe_gpus(settings.gpus, visible)

        def announce() -> None:
            with self.sessions.begin() as session:
                workers.register(
                    session,
                    worker_id=settings.worker_id,
                    host=socket.gethostname(),
                    pid=os.getpid(),
                    cpu_slots=settings.cpu_slots,
                    gpus=settings.gpus,
                    version=code_version(),
                    data_token=token,
                    devices=devices,
                )

        while not self._stopping.is_set():
            if self._try(announce):
                log.info("worker %s: %d CPU slots, %d GPUs", settings.worker_id, settings.cpu_slots, settings.gpus)
                return
            self._stopping.wait(1)

    def run(self) -> None:
        """Look until told to stop, then drain."""
        while not self._stopping.is_set():
            self._hinted.clear()
            self._try(self.look)
            self._hinted.wait(self.settings.poll_s)
        self._drain()

    def look(self) -> int:
        """Say that the worker is alive and start what fits; returns how many runs were started.

        While somebody wants it drained it starts nothing, and has its supervisors put their runs back.
        """
        self._reap()
        fault = self._look_at_data_folder()
        with self.sessions.begin() as session:
            state = workers.heartbeat(session, self.settings.worker_id, fault)
        self._hold_for_starting()
        if state == "draining":
            self._put_runs_back()
            return 0
        if fault is not None:
            return 0
        started = 0
        while not self._stopping.is_set():
            with self.sessions.begin() as session:
                lease_s = self.settings.lease_s + START_ALLOWANCE_S
                claimed = claim(session, self.settings.worker_id, lease_s, self.settings.reserve_after_s)
            if claimed is None:
                break
            try:
                self._start_supervisor(claimed)
            except OSError as error:
                # Its lease runs out, and it is taken back. No other run is claimed now, which would fare alike.
                log.error("the supervisor of %s cannot be started: %s", claimed.run_id, error)
                break
            started += 1
        return started

    def _look_at_data_folder(self) -> str | None:
        """What is wrong with it: a run claimed without the folder, room in it, or the right one would only be lost."""
        folder, worker_id = self.settings.data_dir, self.settings.worker_id
        if is_there(folder, worker_id):
            fault = room_fault(folder) or data_folder_fault(self.sessions, folder, f"worker {worker_id}")
        else:
            fault = (
                f"PPO_DATA_DIR {folder} is not there, or not the folder that the worker started with: mount that one, "
                "or start the worker again."
            )
        if fault != self._folder_fault:
            log.warning("%s", f"nothing is started: {fault}" if fault else f"{folder} can be used")
        self._folder_fault = fault
        return fault

    def _start_supervisor(self, claimed: Claim) -> None:
        """Detached: in a session of its own, with nothing of ours open. If it cannot start, the lease runs out."""
        run_dir = self.settings.run_dir(claimed.run_id)
        run_dir.mkdir(parents=True, exist_ok=True)
        log.info("claimed %s, attempt %d", claimed.run_id, claimed.attempt)
        with (run_dir / "supervisor.log").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "worker.supervise", claimed.run_id, str(claimed.token)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **marks(claimed.run_id, claimed.token)},
            )
        self._supervisors.append(Supervisor(process, claimed.run_id, claimed.token, time.monotonic()))

    def _hold_for_starting(self) -> None:
        """Keep the lease of a run whose supervisor lives and has not come to renew it: that is no loss of the run."""
        since = time.monotonic() - START_LIMIT_S
        young = [(each.run_id, each.token) for each in self._supervisors if each.started_at > since]
        if young:
            with self.sessions.begin() as session:
                leases.hold_for_starting(session, young, self.settings.lease_s + START_ALLOWANCE_S)

    def _put_runs_back(self) -> None:
        """Tell every supervisor once, whichever process of this worker started it.

        One that has not said its process id may not listen yet; it is told at a later look.
        """
        with self.sessions() as session:
            running = workers.supervised_runs(session, self.settings.worker_id)
        for run, token, pid in running:
            if (run, token) not in self._told and carries(pid, run, token):
                log.info("draining: run %s goes back into the queue", run)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
                self._told.add((run, token))

    def _reap(self) -> None:
        self._supervisors = [each for each in self._supervisors if each.process.poll() is None]

    def _drain(self) -> None:
        """Have every supervisor of this worker save its run and put it back, and wait until they are gone."""
        worker = self.settings.worker_id
        self._try(lambda: self._set_state("draining"))
        for each in self._supervisors:
            with contextlib.suppress(ProcessLookupError):
                each.process.terminate()
        self._try(self._terminate_inherited)
        deadline = time.monotonic() + self.settings.drain_s + 60
        beat_at = time.monotonic()
        while time.monotonic() < deadline:
            if time.monotonic() >= beat_at:  # it may take minutes, in which the worker is not gone
                self._try(self._beat)
                beat_at = time.monotonic() + self.settings.poll_s
            self._reap()
            if not self._supervisors and not self._inherited:
                break
            self._inherited = [key for key in self._inherited if carries(key[2], key[0], key[1])]
            time.sleep(0.1)
        self._try(lambda: self._set_state("gone"))
        self.engine.dispose()
        log.info("worker %s is drained", worker)

    def _terminate_inherited(self) -> None:
        """Supervisors that an earlier process of this worker started and left behind when it was killed."""
        with self.sessions() as session:
            running = workers.supervised_runs(session, self.settings.worker_id)
        ours = {each.process.pid for each in self._supervisors}
        self._inherited = [
            (run, token, pid) for run, token, pid in running if pid not in ours and carries(pid, run, token)
        ]
        for _, _, pid in self._inherited:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def _beat(self) -> None:
        with self.sessions.begin() as session:
            workers.heartbeat(session, self.settings.worker_id)

    def _set_state(self, state: str) -> None:
        with self.sessions.begin() as session:
            workers.set_state(session, self.settings.worker_id, state)

    def _try(self, work: Callable[[], object]) -> bool:
        """Do what needs the database; False when it could not. The next look tries again."""
        try:
            work()
        except AWAY as error:
            log.warning("%s", describe(error))
            return False
        return True


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stdout)
    looker = Looker(settings_or_exit())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: looker.stop())
    try:
        looker.register()
    except (DataFolderError, DevicesError) as error:
        print(error, file=sys.stderr)
        return 1
    looker.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
