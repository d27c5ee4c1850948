"""The worker's settings, from the environment; it refuses to start without the ones it needs."""

from __future__ import annotations

import shlex
import socket
import sys
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from store.webhook_hosts import WebhookHosts


class WorkerSettings(BaseSettings):
    """Settings of worker, supervisor and reconciler."""

    # A fault is told without what was read: that may be an address with a password in it.
    model_config = SettingsConfigDict(
        env_prefix="PPO_", extra="ignore", populate_by_name=True, hide_input_in_errors=True, allow_inf_nan=False
    )

    database_url: str = Field(validation_alias="DATABASE_URL")
    redis_url: str | None = Field(None, validation_alias="REDIS_URL", description="Broker of hints; none: look only.")
    data_dir: Path = Field(description="Folder shared with the api; run directories lie in data_dir/runs/.")
    worker_id: str = Field(
        default_factory=socket.gethostname,
        min_length=1,
        max_length=200,
        description="This machine's name. Worker processes of one name share its slots.",
    )
    cpu_slots: int = Field(1, ge=0, le=1024, description="Runs without GPU at the same time.")
    gpus: int = Field(0, ge=0, le=1024, description="GPUs to give to runs.")
    lease_s: float = Field(
        20, gt=0, le=3600, description="How long a supervisor may be silent before its run is taken back."
    )
    renew_s: float = Field(5, gt=0, description="How often a supervisor renews its lease.")
    poll_s: float = Field(5, gt=0, le=3600, description="How often worker and reconciler look by themselves.")
    reserve_after_s: float = Field(
        600,
        ge=0,
        le=1e7,
        description="How long a run of several GPUs waits until GPUs are held for it as they become free.",
    )
    drain_s: float = Field(780, gt=0, description="How long a draining worker's runs have to save and stop.")
    rollback_stop_s: float = Field(60, gt=0, description="How long a trainer has to save before its run goes back.")
    webhook_hosts: Annotated[WebhookHosts, NoDecode] = Field(
        WebhookHosts(), description="Hosts that webhooks may be sent to, by commas; none: nothing is sent."
    )
    webhook_timeout_s: float = Field(10, gt=0, le=120, description="How long a webhook's receiver has to answer.")
    webhook_first_wait_s: float = Field(5, gt=0, description="Wait before a webhook's second attempt; then 4 times it.")
    webhook_attempts: int = Field(8, ge=1, le=20, description="Attempts before a webhook's message is given up.")
    trainer_command: str | None = Field(None, description="Replaces `python -m ppo_core.main`; same arguments.")

    @field_validator("data_dir", mode="before")
    @classmethod
    def _names_a_folder(cls, value: object) -> object:
        if value == "":
            raise ValueError("it is empty; give the folder that api and workers share")
        return value

    @field_validator("trainer_command")
    @classmethod
    def _is_a_command_line(cls, value: str | None) -> str | None:
        """Empty, as files of settings have what is not set, it replaces nothing."""
        return value if value is not None and shlex.split(value) else None

    @field_validator("webhook_hosts", mode="before")
    @classmethod
    def _read_webhook_hosts(cls, value: object) -> object:
        return WebhookHosts.parse(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _renews_in_time(self) -> Self:
        if self.renew_s > self.lease_s / 2:
            raise ValueError("PPO_RENEW_S must be at most half of PPO_LEASE_S: one late renewal must not end a lease")
        return self

    @property
    def trainer_words(self) -> list[str]:
        """The trainer's command line without its arguments."""
        return shlex.split(self.trainer_command) if self.trainer_command else [sys.executable, "-m", "ppo_core.main"]

    def run_dir(self, run_id: str) -> Path:
        """A run's folder."""
        return self.data_dir.absolute() / "runs" / run_id


def read_settings() -> WorkerSettings:
    """Settings of this process's environment.

    Raises:
        ValidationError
    """
    return WorkerSettings()


def settings_or_exit() -> WorkerSettings:
    """The same for a program that starts: where they cannot be read it says which and why, and ends."""
    try:
        return read_settings()
    except ValidationError as error:
        sys.exit("; ".join(_fault(fault["loc"], fault["msg"]) for fault in error.errors()))


def _fault(place: tuple[int | str, ...], message: str) -> str:
    message = message.removeprefix("Value error, ")
    if not place:
        return message
    name = str(place[0])
    return f"{name if name.isupper() else f'PPO_{name.upper()}'}: {message}"
