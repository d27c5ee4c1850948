"""Asks each dependency whether it answers, by its own connection and within two seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Literal

import psycopg
from redis.asyncio import Redis
from redis.exceptions import RedisError

from api.schemas import Ready

Check = Literal["ok", "slow", "unreachable", "none"]

LIMIT_S = 2.0
KEPT_S = 1.0  # The route is open to everybody; asking more often than this tells nothing new.


class Readiness:
    """One check at a time, its result kept for a moment."""

    def __init__(self, database_url: str, redis_url: str | None) -> None:
        self._database_url = database_url
        self._redis_url = redis_url
        self._lock = asyncio.Lock()
        self._kept: Ready | None = None
        self._kept_until = 0.0

    async def read(self) -> Ready:
        async with self._lock:
            if self._kept is None or time.monotonic() >= self._kept_until:
                database, broker = await asyncio.gather(_check(self._ask_database()), _check(self._ask_broker()))
                checks: dict[str, Check] = {
                    "database": database,
                    "broker": broker if self._redis_url is not None else "none",
                }
                self._kept = Ready(ready=database == "ok", checks=checks)
                self._kept_until = time.monotonic() + KEPT_S
            return self._kept

    async def _ask_database(self) -> None:
        connection = await psycopg.AsyncConnection.connect(self._database_url, autocommit=True)
        async with connection:
            await connection.execute("SELECT 1 FROM runs LIMIT 1")

    async def _ask_broker(self) -> None:
        if self._redis_url is None:
            return
        client: Redis = Redis.from_url(self._redis_url.replace("redis+socket://", "unix://", 1))
        async with client:
            await client.ping()


async def _check(asking: Awaitable[None]) -> Check:
    try:
        async with asyncio.timeout(LIMIT_S):
            await asking
    except TimeoutError:
        return "slow"
    except (psycopg.Error, RedisError, OSError):
        return "unreachable"
    return "ok"
