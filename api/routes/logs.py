"""What a run's processes printed: which logs there are, pieces by byte position, search, download."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse

from api.auth import least
from api.deps import Database, Settings
from api.errors import ProblemError
from api.log_schemas import LogFile, LogMatches, LogText
from api.logs import PIECE_BYTES, Source, find_log, list_logs, log_chunks, read_log, search_log
from api.schemas import Page
from ppo_core.rundir import num_ranks
from store import run_read
from store.models import Run

router = APIRouter(prefix="/v1/runs/{run_id}/logs", tags=["logs"])

LONGEST_SEARCH = 200

FromWhom = Annotated[
    Source, Query(description="supervisor: who looked after the trainer; attempt and rank say nothing.")
]
Attempt = Annotated[int | None, Query(ge=0, le=10**6, description="Which attempt; the newest by default.")]
Rank = Annotated[int, Query(ge=0, le=10**6)]


@router.get("", openapi_extra=least("viewer"))
def read_run_log(
    run_id: str,
    database: Database,
    settings: Settings,
    source: FromWhom = "trainer",
    attempt: Attempt = None,
    rank: Rank = 0,
    offset: Annotated[
        int, Query(ge=-(2**63), le=2**63 - 1, description="Byte to begin at; negative: from the end.")
    ] = 0,
    limit: Annotated[int, Query(ge=1, le=PIECE_BYTES, description="Most bytes.")] = 64 * 1024,
) -> LogText:
    """A piece of a log; go on from `next_offset`. Beyond the end, and before anything is written, the text is empty."""
    run = run_read.known_run(database, run_id)
    path = _path_or_none_yet(settings.data_dir, run, source, attempt, rank)
    return LogText.model_validate(read_log(path, offset, limit))


@router.get("/files", openapi_extra=least("viewer"))
def list_run_logs(run_id: str, database: Database, settings: Settings) -> Page[LogFile]:
    """Every log that the run has: the newest attempt first, its ranks in order, the supervisors' last."""
    run = run_read.known_run(database, run_id)
    found = list_logs(settings.data_dir / "runs" / run.id)
    return Page[LogFile](items=[LogFile.model_validate(log) for log in found])


@router.get("/search", openapi_extra=least("viewer"))
def search_run_log(
    run_id: str,
    database: Database,
    settings: Settings,
    search: Annotated[
        str, Query(min_length=1, max_length=LONGEST_SEARCH, description="Plain text, upper or lower case.")
    ],
    source: FromWhom = "trainer",
    attempt: Attempt = None,
    rank: Rank = 0,
    offset: Annotated[int, Query(ge=0, le=2**63 - 1, description="Byte to begin at.")] = 0,
    limit: Annotated[int, Query(ge=1, le=200, description="Most matches.")] = 100,
) -> LogMatches:
    """Lines of a log that hold a text. One request reads a few MB at most: go on from `next_offset` up to `size`."""
    run = run_read.known_run(database, run_id)
    path = _path_or_none_yet(settings.data_dir, run, source, attempt, rank)
    return LogMatches.model_validate(search_log(path, search, offset, limit))


@router.get(
    "/download",
    openapi_extra=least("viewer"),
    response_class=Response,
    responses={200: {"description": "The log as it is now.", "content": {"text/plain": {}}}},
)
def download_run_log(
    run_id: str,
    database: Database,
    settings: Settings,
    source: FromWhom = "trainer",
    attempt: Attempt = None,
    rank: Rank = 0,
) -> Response:
    """A whole log, byte for byte, as an attachment."""
    run = run_read.known_run(database, run_id)
    number = run.attempt if attempt is None else attempt
    path = _path(settings.data_dir, run, source, number, rank)
    if path is None:
        raise _no_log(run, source, number, rank)
    size = path.stat().st_size
    name = f"{run.id}-supervisor" if source == "supervisor" else f"{run.id}-attempt-{number}-rank-{rank}"
    headers = {"Content-Length": str(size), "Content-Disposition": f'attachment; filename="{name}.log"'}
    return StreamingResponse(log_chunks(path, size), headers=headers, media_type="text/plain; charset=utf-8")


def _path(data_dir: Path, run: Run, source: Source, attempt: int | None, rank: int) -> Path | None:
    return find_log(data_dir / "runs" / run.id, source, run.attempt if attempt is None else attempt, rank)


def _path_or_none_yet(data_dir: Path, run: Run, source: Source, attempt: int | None, rank: int) -> Path | None:
    """The log's path; None for one that only has not been written yet. 404 for one that there cannot be."""
    path = _path(data_dir, run, source, attempt, rank)
    number = run.attempt if attempt is None else attempt
    begun = number == run.attempt or 1 <= number < run.attempt
    if path is None and source == "trainer" and not (begun and rank < num_ranks(run.spec)):
        raise _no_log(run, source, number, rank)
    return path


def _no_log(run: Run, source: Source, attempt: int, rank: int) -> ProblemError:
    what = "supervisor log" if source == "supervisor" else f"log of attempt {attempt}, rank {rank}"
    return ProblemError(404, "not_found", f"{run.name} has no {what}; see /v1/runs/{run.id}/logs/files.")
