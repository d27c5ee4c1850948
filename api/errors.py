"""Every error's way out: one mapping from exceptions to `application/problem+json` with a true HTTP status.

Nothing of an unexpected error's text leaves the process: the answer names the request, the log has the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import DataError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from api.schemas import FaultMessage, Problem
from ppo_core.spec import SpecFaults
from store.deletion import RunNotDeletable
from store.idempotency import KeyReused
from store.runs import CommandRefused, IllegalMove, RunNotFound
from store.session import is_row_held
from store.storable import storable_json
from store.workers import WorkerLeaving, WorkerNotFound

logger = logging.getLogger(__name__)

PROBLEM_TYPE = "application/problem+json"
RETRY_AFTER_S = 2


class ProblemError(Exception):
    """An answer other than success, raised where it is known."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        errors: Sequence[FaultMessage] = (),
        allowed: Sequence[str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.errors = list(errors)
        self.allowed = None if allowed is None else list(allowed)
        self.headers = dict(headers or {})


def not_found(what: str, name: object) -> ProblemError:
    """404 for a thing that was looked up by name."""
    return ProblemError(404, "not_found", f"There is no {what} {str(name)[:100]!r}.")


def problem_response(error: ProblemError, request_id: str) -> Response:
    """The answer that an error becomes."""
    status = HTTPStatus(error.status)
    problem = Problem(
        type=f"urn:ppo-control:problem:{error.code}",
        title=status.phrase,
        status=error.status,
        detail=error.detail,
        code=error.code,
        request_id=request_id,
        errors=error.errors,
        allowed=error.allowed,
    )
    headers = {**error.headers, "WWW-Authenticate": "Bearer"} if error.status == 401 else error.headers
    # A fault may name what was sent, and that may be text which no answer can carry: half a surrogate pair.
    body = storable_json(problem.model_dump(mode="json", exclude_none=True))
    return JSONResponse(body, error.status, headers=headers, media_type=PROBLEM_TYPE)


def as_problem(error: Exception) -> ProblemError | None:
    """The one mapping; None for an error that nobody foresaw."""
    match error:
        case ProblemError():
            return error
        case SpecFaults():
            faults = [FaultMessage(pointer=fault.pointer, message=fault.message) for fault in error.faults]
            return ProblemError(422, "bad_spec", error.heading, errors=faults)
        case RequestValidationError():
            return ProblemError(422, "bad_request", "The request is not valid.", errors=_validation_faults(error))
        case CommandRefused():
            return ProblemError(409, "illegal_move", str(error), allowed=sorted(error.allowed))
        case IllegalMove():
            detail = f"The run is {error.state} now; this cannot be asked of it."
            return ProblemError(409, "illegal_move", detail, allowed=sorted(error.allowed))
        case RunNotFound():
            return not_found("run", error.run_id)
        case WorkerNotFound():
            return not_found("worker", error.worker_id)
        case RunNotDeletable():
            return ProblemError(409, error.code, str(error))
        case WorkerLeaving():
            return ProblemError(409, "worker_leaving", str(error))
        case KeyReused():
            return ProblemError(
                422, "idempotency_key_reused", "This Idempotency-Key was used before with another body; take a new one."
            )
        case DataError():
            # Text that the database cannot hold (NUL, half a surrogate pair) or a number beyond its types.
            return ProblemError(422, "bad_value", "A value of the request cannot be stored or compared.")
        case OperationalError() if is_row_held(error):
            logger.warning("a row is held: %s", type(error.__cause__ or error).__name__)
            return ProblemError(
                503,
                "busy",
                "Somebody else is changing this just now; try again shortly.",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            )
        case OperationalError() | InterfaceError() | PoolTimeout():
            logger.warning("database not usable: %s", type(error.__cause__ or error).__name__)
            return _unavailable()
        case DBAPIError() if error.connection_invalidated:
            return _unavailable()
        case HTTPException():
            return _http_problem(error)
    return None


def install(app: FastAPI) -> None:
    """Answer every foreseen error of a route as a problem; the rest is the envelope's."""

    async def handle(request: Request, error: Exception) -> Response:
        problem = as_problem(error)
        if problem is None:
            raise error
        return problem_response(problem, request.scope["state"]["request_id"])

    for kind in (
        ProblemError,
        SpecFaults,
        RequestValidationError,
        IllegalMove,
        RunNotFound,
        RunNotDeletable,
        WorkerNotFound,
        WorkerLeaving,
        KeyReused,
        DBAPIError,
        PoolTimeout,
        HTTPException,
    ):
        app.add_exception_handler(kind, handle)


def _unavailable() -> ProblemError:
    return ProblemError(
        503,
        "database_unavailable",
        "The database cannot be reached just now; try again shortly.",
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )


def _http_problem(error: HTTPException) -> ProblemError:
    codes = {400: "bad_request", 404: "not_found", 405: "method_not_allowed"}
    details = {404: "There is nothing at this address.", 405: "This address does not take this method."}
    status = error.status_code
    detail = details.get(status, str(error.detail))
    return ProblemError(status, codes.get(status, f"http_{status}"), detail, headers=error.headers)


def _validation_faults(error: RequestValidationError) -> list[FaultMessage]:
    faults = []
    for item in error.errors():
        place, *rest = item["loc"]
        parts = rest if place == "body" else [place, *rest]
        if item["type"] == "json_invalid":
            parts = []
        pointer = "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts)
        faults.append(FaultMessage(pointer=pointer, message=_message(item)))
    return faults


def _message(item: Mapping[str, Any]) -> str:
    if item["type"] == "value_error":
        return str(item["ctx"]["error"])
    if item["type"] == "json_invalid":
        return f"not valid JSON: {item['ctx']['error']}"
    if item["type"] == "extra_forbidden":
        return "unknown field"
    message = str(item["msg"])
    return message[:1].lower() + message[1:]
