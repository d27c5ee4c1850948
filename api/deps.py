"""What routes ask for: a database session, who is asking, the settings, the live events, the hints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from fastapi import Depends, Request
from sqlalchemy.orm import Session, sessionmaker

from api.auth import Caller
from api.broadcast import Broadcast
from api.hints import Hints
from api.settings import ApiSettings


def _settings(request: Request) -> ApiSettings:
    settings: ApiSettings = request.app.state.settings
    return settings


def _sessions(request: Request) -> sessionmaker[Session]:
    sessions: sessionmaker[Session] = request.app.state.sessions
    return sessions


def _session(request: Request) -> Iterator[Session]:
    with _sessions(request)() as session:
        yield session


def _caller(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


def _broadcast(request: Request) -> Broadcast:
    broadcast: Broadcast = request.app.state.broadcast
    return broadcast


def _hints(request: Request) -> Hints:
    hints: Hints = request.app.state.hints
    return hints


Settings = Annotated[ApiSettings, Depends(_settings)]
Sessions = Annotated[sessionmaker[Session], Depends(_sessions)]
# Given back when the route's function returns, not when the last byte has left: a slow reader holds no connection.
Database = Annotated[Session, Depends(_session, scope="function")]
Who = Annotated[Caller, Depends(_caller)]
Live = Annotated[Broadcast, Depends(_broadcast)]
Hint = Annotated[Hints, Depends(_hints)]
