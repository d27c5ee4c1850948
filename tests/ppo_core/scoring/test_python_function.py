"""Registered functions: a call that hangs, raises or dies costs its own score and no more, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppo_core.errors import DataError, RewardError
from ppo_core.scoring.python_function import PythonFunction
from ppo_core.scoring.source import Unusable
from ppo_core.spec.scorers import REWARD_FUNCTIONS
from tests.ppo_core.scoring.registered import register


@pytest.fixture(autouse=True)
def _registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(tmp_path, monkeypatch, REWARD_FUNCTIONS, broken="scoring_for_tests:nothing", vanished="no_such_module:f")


def made(name: str, timeout_s: float = 30.0) -> PythonFunction:
    return PythonFunction(REWARD_FUNCTIONS, name, timeout_s)


@pytest.fixture
def by_text() -> Iterator[PythonFunction]:
    function = made("by_text")
    yield function
    function.close()


def reasons(results: list[object]) -> list[object]:
    return [result.reason if isinstance(result, Unusable) else result for result in results]


def test_a_function_of_one_text_gets_prompt_and_response_as_one() -> None:
    function = made("length")
    assert function.score(["ab", "c"], ["cde", ""]) == [5.0, 1.0]
    function.close()


def test_a_function_of_prompt_and_response_gets_both() -> None:
    function = made("response_length")
    assert function.score(["ab"], ["cde"]) == [1.0]
    function.close()


def test_any_text_goes_through(by_text: PythonFunction) -> None:
    texts = ["", "\n\x00\ud800", "🎬", "x" * 300_000]
    assert by_text.score([" y"] * 4, texts) == [2.0, 5.0, 3.0, 300_002.0]


def test_hang_raise_and_death_cost_their_own_scores_step_after_step(tmp_path: Path) -> None:
    """T19: verl-project/verl#6673. After all steps there are as many processes as at the start."""
    function = made("by_text", timeout_s=2.0)
    responses = [" a", " sleep", " raise", " die", " b", " c", " exit", " d"]
    for _ in range(4):
        began = time.monotonic()
        results = function.score(["film"] * 8, responses)
        assert time.monotonic() - began < 3.5
        assert reasons(results) == [6.0, "timeout", "error", "died", 6.0, 6.0, "died", 6.0]
        assert function.num_processes == 1
    assert results[2] == Unusable("error", "ValueError: no such film")
    function.close()
    assert function.num_processes == 0


def test_slow_calls_run_beside_each_other() -> None:
    """One after the other they take 18 s; a second process halves that, once it has started."""
    function = made("by_text", timeout_s=15.0)
    assert function.score(["film"] * 12, [" slow"] * 12) == [9.0] * 12
    assert function.num_processes == 1
    function.close()


def test_what_a_function_prints_is_no_answer(by_text: PythonFunction) -> None:
    assert by_text.score(["film"] * 2, [" print", " a"]) == [10.0, 6.0]


def test_no_rows_are_no_work(by_text: PythonFunction) -> None:
    assert by_text.score([], []) == []


def test_a_function_that_cannot_be_loaded_is_refused_at_the_start() -> None:
    with pytest.raises(DataError, match="no 'unknown' is registered"):
        made("unknown")
    with pytest.raises(DataError, match="AttributeError"):
        made("broken")
    with pytest.raises(DataError, match="ModuleNotFoundError"):
        made("vanished")


def test_a_process_that_cannot_start_again_is_an_error_and_no_hang(tmp_path: Path) -> None:
    function = made("by_text")
    (tmp_path / "scoring_for_tests.py").write_text("raise RuntimeError('gone')")
    for compiled in (tmp_path / "__pycache__").glob("*"):
        compiled.unlink()
    with pytest.raises(RewardError, match="cannot be started: RuntimeError: gone"):
        function.score(["film"] * 3, [" die", " a", " b"])
    function.close()


def test_a_dropped_function_leaves_no_process(by_text: PythonFunction) -> None:
    function = made("length")
    (worker,) = function._workers
    del function
    assert not worker.is_alive()


def test_the_worker_dies_with_the_trainer(tmp_path: Path) -> None:
    code = (
        "import time\n"
        "from ppo_core.scoring.python_function import PythonFunction\n"
        f"f = PythonFunction({REWARD_FUNCTIONS!r}, 'by_text', 600.0)\n"
        "print(f._workers[0]._process.pid, flush=True)\n"
        "f.score(['film'], [' sleep'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])}
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    assert trainer.stdout is not None
    pid = int(trainer.stdout.readline())
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    trainer.stdout.close()
    deadline = time.monotonic() + 10
    while _runs(pid):
        assert time.monotonic() < deadline, "the worker outlives its trainer"
        time.sleep(0.02)


def test_the_worker_loads_no_torch() -> None:
    code = "import sys, ppo_core.scoring.function_worker\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"
