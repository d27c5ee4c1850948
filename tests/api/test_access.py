"""Every route is closed unless it says otherwise, for every method and every caller."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from sqlalchemy.orm import Session, sessionmaker
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

from api.main import create_app
from api.settings import ApiSettings
from store import keys
from store.models import BrowserSession, LoginLink
from tests.api.conftest import ADDRESS, browser

# The written table: who may use each route. A new route has to be added here.
OPEN, VIEWER, OPERATOR, ADMIN = "open", "viewer", "operator", "admin"
TABLE = {
    ("POST", "/v1/runs"): OPERATOR,
    ("GET", "/v1/runs"): VIEWER,
    ("GET", "/v1/runs/{run_id}"): VIEWER,
    ("PATCH", "/v1/runs/{run_id}"): OPERATOR,
    ("DELETE", "/v1/runs/{run_id}"): OPERATOR,
    ("POST", "/v1/runs/{run_id}/stop"): OPERATOR,
    ("POST", "/v1/runs/{run_id}/kill"): OPERATOR,
    ("POST", "/v1/runs/{run_id}/pause"): OPERATOR,
    ("POST", "/v1/runs/{run_id}/checkpoint"): OPERATOR,
    ("POST", "/v1/runs/{run_id}/resume"): OPERATOR,
    ("POST", "/v1/runs/{run_id}/retry"): OPERATOR,
    ("POST", "/v1/runs/{run_id}/rollback"): OPERATOR,
    ("POST", "/v1/runs/{run_id}/forks"): OPERATOR,
    ("GET", "/v1/runs/{run_id}/segments"): VIEWER,
    ("GET", "/v1/runs/{run_id}/segments/{number}"): VIEWER,
    ("GET", "/v1/runs/{run_id}/lineage"): VIEWER,
    ("GET", "/v1/runs/{run_id}/commands/{command_id}"): VIEWER,
    ("GET", "/v1/runs/{run_id}/metrics"): VIEWER,
    ("GET", "/v1/runs/{run_id}/samples"): VIEWER,
    ("GET", "/v1/runs/{run_id}/checkpoints"): VIEWER,
    ("GET", "/v1/runs/{run_id}/checkpoints:gc-preview"): VIEWER,
    ("GET", "/v1/runs/{run_id}/checkpoints/{checkpoint_id}"): VIEWER,
    ("PATCH", "/v1/runs/{run_id}/checkpoints/{checkpoint_id}"): OPERATOR,
    ("DELETE", "/v1/runs/{run_id}/checkpoints/{checkpoint_id}"): OPERATOR,
    ("POST", "/v1/runs/{run_id}/checkpoints/{checkpoint_id}/verify"): OPERATOR,
    ("GET", "/v1/runs/{run_id}/checkpoints/{checkpoint_id}/download"): VIEWER,
    ("GET", "/v1/runs/{run_id}/alerts"): VIEWER,
    ("GET", "/v1/runs/{run_id}/preflight"): VIEWER,
    ("GET", "/v1/runs/{run_id}/gates"): VIEWER,
    ("GET", "/v1/alerts"): VIEWER,
    ("GET", "/v1/alerts/{alert_id}"): VIEWER,
    ("POST", "/v1/alerts/{alert_id}/ack"): OPERATOR,
    ("POST", "/v1/alerts/{alert_id}/snooze"): OPERATOR,
    ("GET", "/v1/alert-rules"): VIEWER,
    ("PUT", "/v1/alert-rules"): ADMIN,
    ("GET", "/v1/webhooks"): ADMIN,
    ("POST", "/v1/webhooks"): ADMIN,
    ("GET", "/v1/webhooks/{webhook_id}"): ADMIN,
    ("PATCH", "/v1/webhooks/{webhook_id}"): ADMIN,
    ("DELETE", "/v1/webhooks/{webhook_id}"): ADMIN,
    ("POST", "/v1/webhooks/{webhook_id}/test"): ADMIN,
    ("POST", "/v1/webhooks/{webhook_id}/rotate-secret"): ADMIN,
    ("GET", "/v1/webhooks/{webhook_id}/deliveries"): ADMIN,
    ("POST", "/v1/webhooks/{webhook_id}/deliveries/{delivery_id}/redeliver"): ADMIN,
    ("GET", "/v1/runs/{run_id}/events"): VIEWER,
    ("GET", "/v1/runs/{run_id}/logs"): VIEWER,
    ("GET", "/v1/runs/{run_id}/logs/files"): VIEWER,
    ("GET", "/v1/runs/{run_id}/logs/search"): VIEWER,
    ("GET", "/v1/runs/{run_id}/logs/download"): VIEWER,
    ("GET", "/v1/samples/{sample_id}/tokens"): VIEWER,
    ("GET", "/v1/metrics/query"): VIEWER,
    ("GET", "/v1/metrics/registry"): VIEWER,
    ("GET", "/v1/stream"): VIEWER,
    ("GET", "/v1/spec/schema"): VIEWER,
    ("GET", "/v1/spec/presets"): VIEWER,
    ("GET", "/v1/workers"): VIEWER,
    ("POST", "/v1/workers/{worker_id}/drain"): OPERATOR,
    ("POST", "/v1/workers/{worker_id}/enable"): OPERATOR,
    ("POST", "/v1/auth/login"): OPEN,
    ("POST", "/v1/auth/logout"): VIEWER,
    ("GET", "/v1/me"): VIEWER,
    ("GET", "/v1/api-keys"): ADMIN,
    ("POST", "/v1/api-keys"): ADMIN,
    ("DELETE", "/v1/api-keys/{key_id}"): ADMIN,
    ("GET", "/healthz"): OPEN,
    ("GET", "/readyz"): OPEN,
    ("GET", "/version"): OPEN,
    ("GET", "/{path:path}"): OPEN,
}
ORDER = [OPEN, VIEWER, OPERATOR, ADMIN]
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


def routes_of(app: FastAPI) -> set[tuple[str, str]]:
    return {
        (method, route.path)
        for route in app.routes
        if isinstance(route, Route | APIRoute)
        for method in (route.methods or set()) - {"HEAD"}
    }


def address(path: str) -> str:
    values = {
        "{run_id}": "r-none",
        "{command_id}": "c-none",
        "{sample_id}": "0",
        "{checkpoint_id}": "k-none",
        "{key_id}": "a-none",
        "{worker_id}": "w-none",
        "{alert_id}": "a-none",
        "{webhook_id}": "h-none",
        "{delivery_id}": "d-none",
    }
    for name, value in values.items():
        path = path.replace(name, value)
    return path.replace("{path:path}", "some/page")


def test_the_table_names_every_route_of_the_application(app: FastAPI) -> None:
    assert routes_of(app) == set(TABLE)


@pytest.mark.parametrize("path", sorted({path for _, path in TABLE}))
@pytest.mark.parametrize("method", METHODS)
def test_each_route_method_and_role(
    method: str, path: str, running: TestClient, as_role: Callable[[str], TestClient]
) -> None:
    """Without or with a bad credential 401, with too low a role 403, else never either of them."""
    needed = TABLE.get((method, path))
    bad = {"Authorization": "Bearer ppo_wrong"}
    callers = [
        (None, running, {}),
        (None, running, bad),
        (None, running, {"Authorization": "Basic eDp5"}),
        (None, running, {"Cookie": "ppo_session=wrong"}),
        *((role, as_role(role), {}) for role in (VIEWER, OPERATOR, ADMIN)),
    ]
    for role, client, headers in callers:
        body = {"json": {}} if method in ("POST", "PUT", "PATCH") else {}
        status = client.request(method, address(path), headers=headers, **body).status_code
        case = (role, headers, status)
        if needed is None and path == "/{path:path}":
            assert status in (401, 405), case
        elif needed == OPEN:
            assert status not in (403, 405), case
            assert status != 401 or path == "/v1/auth/login", case
        elif role is None:
            assert status == 401, case
        elif needed is None:
            assert status == 405, case
        elif ORDER.index(role) < ORDER.index(needed):
            assert status == 403, case
        else:
            assert status not in (401, 403, 405, 500), case


def test_an_unknown_address_under_v1_needs_a_credential_before_it_says_404(
    running: TestClient, viewer: TestClient
) -> None:
    assert running.get("/v1/nothing").status_code == 401
    assert viewer.get("/v1/nothing").status_code == 404
    assert running.get("/v1").status_code in (401, 404)


def test_routes_added_without_a_word_about_access_are_for_admins(
    settings: ApiSettings, keys_by_role: dict[str, str]
) -> None:
    app = create_app(settings)

    async def plain(request: object) -> PlainTextResponse:
        return PlainTextResponse("secret")

    @app.get("/added")
    def added() -> str:
        return "secret"

    app.router.routes.insert(0, Route("/plain", plain))
    app.router.routes.insert(0, Mount("/mounted", routes=[Route("/inside", plain)]))
    app.router.routes.insert(0, app.router.routes.pop())  # /added, in front of the pages' route
    client = TestClient(app, base_url=ADDRESS)
    for path in ("/added", "/plain", "/mounted/inside"):
        assert client.get(path).status_code == 401, path
        for role, expected in ((VIEWER, 403), (OPERATOR, 403), (ADMIN, 200)):
            key = {"Authorization": f"Bearer {keys_by_role[role]}"}
            assert client.get(path, headers=key).status_code == expected, (path, role)


def test_docs_pages_of_the_framework_do_not_exist(running: TestClient) -> None:
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert "swagger" not in running.get(path).text.lower()
        assert "openapi" not in running.get(path).text.lower()


def test_revoked_and_expired_keys_are_refused(admin: TestClient, running: TestClient) -> None:
    made = admin.post("/v1/api-keys", json={"name": "ci", "role": "viewer"}).json()
    key = {"Authorization": f"Bearer {made['key']}"}
    assert running.get("/v1/me", headers=key).json() == {"role": "viewer", "name": "ci", "csrf_token": None}
    assert admin.delete(f"/v1/api-keys/{made['id']}").status_code == 204
    assert running.get("/v1/me", headers=key).status_code == 401
    past = (datetime.now(UTC) - timedelta(seconds=1)).isoformat()
    made = admin.post("/v1/api-keys", json={"name": "old", "role": "viewer", "expires_at": past}).json()
    assert running.get("/v1/me", headers={"Authorization": f"Bearer {made['key']}"}).status_code == 401


def test_a_key_is_shown_once_and_kept_as_a_digest(admin: TestClient, sessions: sessionmaker[Session]) -> None:
    made = admin.post("/v1/api-keys", json={"name": "once", "role": "operator"}).json()
    listed = admin.get("/v1/api-keys").json()["items"]
    mine = next(item for item in listed if item["id"] == made["id"])
    assert "key" not in mine
    assert made["key"] not in str(listed)
    with sessions() as session:
        row = keys.find_key(session, made["key"])
        assert row is not None
        assert row.sha256 != made["key"]


def test_using_a_key_notes_when(admin: TestClient, running: TestClient) -> None:
    made = admin.post("/v1/api-keys", json={"name": "used", "role": "viewer"}).json()
    assert made["last_used_at"] is None
    running.get("/v1/me", headers={"Authorization": f"Bearer {made['key']}"})
    listed = {item["id"]: item for item in admin.get("/v1/api-keys").json()["items"]}
    assert listed[made["id"]]["last_used_at"] is not None


def login(running: TestClient, sessions: sessionmaker[Session], role: str = "operator") -> tuple[str, str]:
    with sessions.begin() as session:
        token = keys.create_login_link(session, role)
    answer = running.post("/v1/auth/login", json={"token": token})
    assert answer.status_code == 200, answer.text
    running.cookies.clear()
    return answer.headers["set-cookie"].split(";")[0].partition("=")[2], answer.json()["csrf_token"]


def test_a_login_link_works_once(running: TestClient, sessions: sessionmaker[Session]) -> None:
    with sessions.begin() as session:
        token = keys.create_login_link(session, "operator")
    first = running.post("/v1/auth/login", json={"token": token})
    running.cookies.clear()
    assert first.json()["role"] == "operator"
    cookie = first.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "path=/" in cookie
    assert running.post("/v1/auth/login", json={"token": token}).status_code == 401


def test_an_expired_login_link_is_refused(running: TestClient, sessions: sessionmaker[Session]) -> None:
    with sessions.begin() as session:
        token = keys.create_login_link(session, "admin", timedelta(seconds=-1))
    assert running.post("/v1/auth/login", json={"token": token}).status_code == 401
    with sessions() as session:
        link = session.get(LoginLink, keys.digest(token))
        assert link is not None
        assert link.used_at is None


def test_a_browser_needs_its_csrf_token_to_change_anything(
    app: FastAPI, running: TestClient, sessions: sessionmaker[Session], make_run: Callable[..., str]
) -> None:
    cookie, token = login(running, sessions)
    run_id = make_run()
    with browser(app, cookie) as client:
        assert client.get("/v1/me").json() == {"role": "operator", "name": "browser", "csrf_token": token}
        assert client.post(f"/v1/runs/{run_id}/stop").status_code == 403
        assert client.post(f"/v1/runs/{run_id}/stop", headers={"X-CSRF-Token": "x"}).status_code == 403
        assert client.get(f"/v1/runs/{run_id}").json()["state"] == "queued"
        assert client.post(f"/v1/runs/{run_id}/stop", headers={"X-CSRF-Token": token}).status_code == 202


def test_logout_ends_the_session(app: FastAPI, running: TestClient, sessions: sessionmaker[Session]) -> None:
    cookie, token = login(running, sessions)
    with browser(app, cookie) as client:
        assert client.post("/v1/auth/logout", headers={"X-CSRF-Token": token}).status_code == 204
        assert client.get("/v1/me").status_code == 401


def test_an_ended_session_is_refused(app: FastAPI, running: TestClient, sessions: sessionmaker[Session]) -> None:
    cookie, _ = login(running, sessions)
    with sessions.begin() as session:
        row = session.get_one(BrowserSession, keys.digest(cookie))
        row.expires_at = datetime.now(UTC) - timedelta(seconds=1)
    with browser(app, cookie) as client:
        assert client.get("/v1/me").status_code == 401


def test_a_bad_key_is_refused_even_with_a_good_cookie(
    app: FastAPI, running: TestClient, sessions: sessionmaker[Session]
) -> None:
    cookie, _ = login(running, sessions)
    with browser(app, cookie) as client:
        assert client.get("/v1/me", headers={"Authorization": "Bearer ppo_wrong"}).status_code == 401


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "http://127.0.0.1:81", "https://127.0.0.1.evil.example", "ftp://127.0.0.1"],
)
def test_pages_of_another_origin_change_nothing(
    origin: str, app: FastAPI, running: TestClient, sessions: sessionmaker[Session], make_run: Callable[..., str]
) -> None:
    cookie, token = login(running, sessions)
    run_id = make_run()
    with browser(app, cookie) as client:
        headers = {"X-CSRF-Token": token, "Origin": origin}
        assert client.post(f"/v1/runs/{run_id}/stop", headers=headers).status_code == 403
        assert client.get(f"/v1/runs/{run_id}").json()["state"] == "queued"


def test_the_own_origin_may_change_things(
    app: FastAPI, running: TestClient, sessions: sessionmaker[Session], make_run: Callable[..., str]
) -> None:
    cookie, token = login(running, sessions)
    with browser(app, cookie) as client:
        headers = {"X-CSRF-Token": token, "Origin": ADDRESS}
        assert client.post(f"/v1/runs/{make_run()}/stop", headers=headers).status_code == 202


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::2]"])
def test_another_host_name_gets_no_answer(host: str, viewer: TestClient) -> None:
    for path in ("/v1/me", "/healthz", "/"):
        answer = viewer.get(path, headers={"Host": host})
        assert answer.status_code == 400
        assert answer.json()["code"] == "bad_host"


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "LOCALHOST", "[::1]:8000"])
def test_allowed_host_names_are_answered(host: str, viewer: TestClient) -> None:
    assert viewer.get("/v1/me", headers={"Host": host}).status_code == 200


def test_every_answer_has_a_request_id_and_safe_headers(running: TestClient, viewer: TestClient) -> None:
    for client, path in ((running, "/v1/me"), (viewer, "/v1/me"), (running, "/"), (running, "/healthz")):
        headers = client.get(path).headers
        assert headers["x-request-id"]
        assert headers["x-content-type-options"] == "nosniff"
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self' 'unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
    problem = running.get("/v1/me", headers={"X-Request-Id": "ci-7"})
    assert problem.headers["x-request-id"] == problem.json()["request_id"] == "ci-7"
    assert running.get("/v1/me", headers={"X-Request-Id": "a b"}).headers["x-request-id"] != "a b"
