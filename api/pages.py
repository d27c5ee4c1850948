"""The built web pages: files as they are, and the one page for the addresses that it knows.

Elsewhere the status is 404: a browser gets the page, which says so in its own words, everybody else a problem.
"""

from __future__ import annotations

import re
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Match, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from api.auth import Access
from api.errors import ProblemError

NOT_BUILT = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>PPO Control</title>
<h1>PPO Control</h1>
<p>The service runs, but its web pages are not built. Build them with <code>make setup</code> and reload this page.</p>
<p>The command line and the REST interface under <code>/v1</code> work without them.</p>
</html>
"""
# What web/src/router.svelte.ts makes a page of; web/tests/addresses.json holds the two together.
PAGE_ADDRESS = re.compile(r"/*(?:login|settings|fleet|runs(?:/+[^/]+)?)?/*")
FOREVER = "public, max-age=31536000, immutable"


class Pages:
    """Serves the build. It holds nothing secret, so it is open: the pages ask for a credential themselves."""

    def __init__(self, build: Path) -> None:
        self._build = build
        self._files = StaticFiles(directory=build, check_dir=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._respond(scope)
        await response(scope, receive, send)

    async def _respond(self, scope: Scope) -> Response:
        path = scope["path"].lstrip("/")
        index = self._build / "index.html"
        if not index.is_file():
            return HTMLResponse(NOT_BUILT, 503)
        found = self._find(path)
        if found is not None:
            cache = FOREVER if path.startswith("assets/") else "no-cache"
            return FileResponse(found, headers={"Cache-Control": cache})
        known = PAGE_ADDRESS.fullmatch(scope["path"]) is not None
        if not known and "text/html" not in Headers(scope=scope).get("accept", ""):
            raise ProblemError(404, "not_found", "There is nothing at this address.")
        return FileResponse(index, 200 if known else 404, headers={"Cache-Control": "no-cache"})

    def _find(self, path: str) -> Path | None:
        try:
            full, found = self._files.lookup_path(path)
        except (OSError, ValueError):  # A NUL, or a name longer than the file system takes.
            return None
        return Path(full) if found is not None and Path(full).is_file() else None


class PageRoute(Route):
    """The route of the pages, after all others. It leaves /v1 alone, so addresses there keep needing a credential."""

    least_role: Access = "open"

    def __init__(self, build: Path) -> None:
        super().__init__("/{path:path}", Pages(build), methods=["GET"], include_in_schema=False)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if f"{scope['path']}/".startswith("/v1/"):
            return Match.NONE, {}
        return super().matches(scope)
