"""Open to everybody and without detail: is the process alive, can it serve, which version is it.

`/healthz` depends on nothing and never waits behind other requests.
"""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter, Request, Response

from api.auth import least
from api.readiness import Readiness
from api.schemas import Alive, Ready, Version

router = APIRouter(tags=["health"])

PRODUCT = "ppo-control"
VERSION = version(PRODUCT)


@router.get("/healthz", openapi_extra=least("open"))
async def read_health() -> Alive:
    """The process answers."""
    return Alive()


@router.get("/readyz", openapi_extra=least("open"), responses={503: {"model": Ready, "description": "Not ready."}})
async def read_readiness(request: Request, response: Response) -> Ready:
    """Whether requests can be served. Without a broker they can: runs start a few seconds later."""
    readiness: Readiness = request.app.state.readiness
    ready = await readiness.read()
    if not ready.ready:
        response.status_code = 503
    return ready


@router.get("/version", openapi_extra=least("open"))
async def read_version() -> Version:
    """The product and its version."""
    return Version(name=PRODUCT, version=VERSION)
