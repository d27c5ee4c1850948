"""Makes the application and serves it: `python -m api.main --host 127.0.0.1 --port 8000`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator

import uvicorn
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.middleware import Middleware

from api import errors, openapi
from api.auth import Doorkeeper
from api.bodies import BodyLimit
from api.broadcast import Broadcast
from api.envelope import Envelope
from api.hints import Hints
from api.pages import PageRoute
from api.readiness import Readiness
from api.routes import (
    alert_rules,
    alerts,
    auth,
    checkpoints,
    events,
    gates,
    going_back,
    health,
    keys,
    lineage,
    logs,
    metrics,
    runs,
    samples,
    spec,
    webhooks,
    workers,
)
from api.settings import ApiSettings
from store.session import make_engine, session_factory

GRACE_S = 8  # Longest time that requests may take to finish once the process was asked to end.


def create_app(settings: ApiSettings) -> FastAPI:
    """The application. It connects to nothing before it is started."""
    engine = make_engine(settings.database_url, pool_size=settings.pool_size)
    sessions = session_factory(engine)
    broadcast = Broadcast(settings.database_url, sessions)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.hints = Hints(settings.redis_url)
        listening = asyncio.create_task(broadcast.run())
        try:
            yield
        finally:
            broadcast.close()
            listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await listening
            app.state.hints.close()
            engine.dispose()

    app = FastAPI(
        title="PPO Control",
        version=health.VERSION,
        description="Submit, watch and control PPO training runs.",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        generate_unique_id_function=_operation_id,
        lifespan=lifespan,
        middleware=[
            Middleware(Envelope),
            Middleware(Doorkeeper, sessions=sessions, allowed_hosts=settings.allowed_hosts),
            Middleware(BodyLimit, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s),
        ],
    )
    app.state.settings = settings
    app.state.sessions = sessions
    app.state.broadcast = broadcast
    app.state.readiness = Readiness(settings.database_url, settings.redis_url)
    for resource in (
        runs,
        going_back,
        lineage,
        metrics,
        samples,
        checkpoints,
        alerts,
        alert_rules,
        gates,
        events,
        logs,
        spec,
        workers,
        webhooks,
        auth,
        keys,
        health,
    ):
        app.include_router(resource.router)
    document = None

    def described() -> dict[str, object]:
        nonlocal document
        document = document or openapi.describe(app)
        return document

    app.openapi = described  # type: ignore[method-assign]
    app.router.routes.append(PageRoute(settings.web_build))
    errors.install(app)
    return app


def _operation_id(route: APIRoute) -> str:
    return route.name


class Server(uvicorn.Server):
    """Says goodbye to open streams first: uvicorn waits for them, and they would never end by themselves."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.broadcast.close()
        await super().shutdown(sockets)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m api.main", description="Serve PPO Control.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--fd", type=int, help="an inherited listening socket to serve, in place of host and port")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        settings = ApiSettings()
    except ValidationError as error:
        parser.error("; ".join(f"{fault['loc'][0]}: {fault['msg']}" for fault in error.errors()))
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        host=arguments.host,
        port=arguments.port,
        fd=arguments.fd,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    # Uvicorn ends in good order and then raises the signal again; that it was asked to end is no failure.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    Server(config, app).run(None if arguments.fd is None else [socket.socket(fileno=arguments.fd)])


if __name__ == "__main__":
    main()
