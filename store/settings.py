"""Where the database is. Taken from the environment; refuses to start without it."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class DatabaseSettings(BaseSettings):
    """The one setting that everything with a database needs."""

    model_config = SettingsConfigDict(extra="ignore")

    database_url: str = Field(
        validation_alias="DATABASE_URL", description="postgresql://user:password@host:port/database"
    )
