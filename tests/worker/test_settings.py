"""The worker refuses to start without what it needs, and loads nothing heavy."""

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from worker.app import _configuration as app_configuration
from worker.data_folder import DataFolderError, prove_writable, token_file
from worker.settings import WorkerSettings, read_settings


def test_missing_settings_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATABASE_URL", "PPO_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValidationError) as caught:
        read_settings()
    assert {error["loc"] for error in caught.value.errors()} == {("DATABASE_URL",), ("data_dir",)}


def test_renewal_has_to_fit_twice_into_a_lease(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="at most half"):
        WorkerSettings(database_url="postgresql://x", data_dir=tmp_path, lease_s=5, renew_s=4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PPO_DATA_DIR", None),
        ("PPO_DATA_DIR", ""),
        ("PPO_CPU_SLOTS", "many"),
        ("PPO_LEASE_S", "inf"),
        ("PPO_POLL_S", "1e308"),
        ("PPO_TRAINER_COMMAND", "python 'unclosed"),
    ],
)
@pytest.mark.parametrize("module", ["worker.app", "worker.loop", "worker.reconcile"])
def test_a_setting_that_cannot_be_used_is_named_without_any_secret(
    tmp_path: Path, module: str, name: str, value: str | None
) -> None:
    given = {"DATABASE_URL": "postgresql://u:secret@/nothing", "PPO_DATA_DIR": str(tmp_path), name: value}
    environment = {"PATH": "/usr/bin:/bin", **{key: value for key, value in given.items() if value is not None}}
    words = [sys.executable, "-m", module]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"{name}: ")
    assert len(ended.stderr.splitlines()) == 1
    assert "secret" not in ended.stdout + ended.stderr


def test_trainer_command_may_be_replaced(tmp_path: Path) -> None:
    settings = WorkerSettings(database_url="postgresql://x", data_dir=tmp_path)
    assert settings.trainer_words == [sys.executable, "-m", "ppo_core.main"]
    for empty in ("", " "):
        given = WorkerSettings(database_url="postgresql://x", data_dir=tmp_path, trainer_command=empty)
        assert given.trainer_words == settings.trainer_words
    replaced = settings.model_copy(update={"trainer_command": "python 'my trainer.py' --fast"})
    assert replaced.trainer_words == ["python", "my trainer.py", "--fast"]


def test_token_is_left_in_the_data_folder(tmp_path: Path) -> None:
    token = prove_writable(tmp_path, "machine/1")
    assert token_file(tmp_path, "machine/1").read_text() == token
    (tmp_path / "file").write_text("")
    with pytest.raises(DataFolderError, match="cannot be written"):
        prove_writable(tmp_path / "file", "w")


@pytest.mark.parametrize("module", ["worker.app", "worker.loop", "worker.supervise", "worker.reconcile"])
def test_module_loads_without_the_training_stack_and_without_settings(module: str) -> None:
    program = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    environment = {"PATH": "/usr/bin:/bin"}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"


def test_celery_forks_no_process_that_would_share_a_database_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T43: with prefork, connections that were opened before the fork are used by parent and child at once."""
    monkeypatch.setenv("DATABASE_URL", "postgresql://x")
    monkeypatch.setenv("PPO_DATA_DIR", str(tmp_path))
    settings = app_configuration()
    assert (settings["worker_pool"], settings["worker_concurrency"]) == ("solo", 1)
    assert (settings["task_acks_late"], settings["accept_content"]) == (False, ["json"])
