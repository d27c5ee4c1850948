"""What the web service needs to know about its surroundings, from the environment alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from ppo_core.spec import EngineHosts, RewardHosts
from store.webhook_hosts import WebhookHosts

WEB_BUILD = Path(__file__).resolve().parent.parent / "web" / "dist"


class ApiSettings(BaseSettings):
    """Settings of one api process. It refuses to start without a database and a data folder."""

    model_config = SettingsConfigDict(env_prefix="PPO_", frozen=True, extra="ignore", populate_by_name=True)

    database_url: str = Field(validation_alias="DATABASE_URL", description="postgresql://user:password@host/name")
    redis_url: str | None = Field(None, validation_alias="REDIS_URL", description="Broker of hints; none: no hints.")
    data_dir: Path = Field(description="Folder shared with the workers; runs lie in its `runs/`.")
    roots: Annotated[tuple[Path, ...], NoDecode] = Field(
        (), description=f"Folders that specs may name files under, separated by {os.pathsep!r}; none: no files at all."
    )
    reward_hosts: Annotated[RewardHosts, NoDecode] = Field(
        RewardHosts(), description="Hosts that specs may name for HTTP scorers, by commas; none: no HTTP scorer at all."
    )
    engine_hosts: Annotated[EngineHosts, NoDecode] = Field(
        EngineHosts(), description="Hosts that specs may name for vLLM servers, by commas; none: no server at all."
    )
    webhook_hosts: Annotated[WebhookHosts, NoDecode] = Field(
        WebhookHosts(), description="Hosts that webhooks may be sent to, by commas; none: no webhook at all."
    )
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        ("127.0.0.1", "localhost", "[::1]"), description="Host names that requests may be addressed to, by commas."
    )
    cookie_secure: bool = Field(False, description="Send the session cookie over HTTPS only.")
    max_body_bytes: int = Field(1024 * 1024, ge=1024, description="Longest request body.")
    body_timeout_s: float = Field(30.0, gt=0, description="Longest time in which a request body may arrive.")
    ping_s: float = Field(15.0, gt=0, description="Time between pings on a quiet stream.")
    pool_size: int = Field(10, ge=1, description="Most database connections held for requests.")
    web_build: Path = Field(WEB_BUILD, description="Folder of the built web pages.")

    @field_validator("roots", mode="before")
    @classmethod
    def _split_roots(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(Path(part).expanduser().resolve() for part in value.split(os.pathsep) if part)
        return value

    @field_validator("reward_hosts", mode="before")
    @classmethod
    def _read_reward_hosts(cls, value: object) -> object:
        return RewardHosts.parse(value) if isinstance(value, str) else value

    @field_validator("engine_hosts", mode="before")
    @classmethod
    def _read_engine_hosts(cls, value: object) -> object:
        return EngineHosts.parse(value) if isinstance(value, str) else value

    @field_validator("webhook_hosts", mode="before")
    @classmethod
    def _read_webhook_hosts(cls, value: object) -> object:
        return WebhookHosts.parse(value) if isinstance(value, str) else value

    @field_validator("allowed_hosts", mode="before")
    @classmethod
    def _split_hosts(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip().lower() for part in value.split(",") if part.strip())
        return value
