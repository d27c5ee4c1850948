"""If-Match: a change is made to what its caller has seen, or not at all."""

from __future__ import annotations

from typing import Annotated

from fastapi import Header

from api.errors import ProblemError

IfMatch = Annotated[
    str | None,
    Header(
        alias="If-Match",
        max_length=1000,
        description="The ETag of what you have seen: another one means that somebody changed it since. `*` takes any.",
    ),
]


def check_if_match(given: str | None, etag: str) -> None:
    """Let a change pass only if it is meant for what is there now.

    Raises:
        ProblemError: 428 when the header is missing, 412 when it names something else.
    """
    if given is None:
        raise ProblemError(428, "if_match_missing", f"Send If-Match with the ETag of what you change; it is {etag}.")
    tags = [tag.strip().removeprefix("W/") for tag in given.split(",")]
    if "*" not in tags and etag not in tags:
        raise ProblemError(
            412, "if_match_stale", f"If-Match says {given[:100]}, the ETag is {etag} now: read it again, then decide."
        )


def version_etag(version: int) -> str:
    """The ETag of what counts its changes."""
    return f'"{version}"'


def run_etag(version: int) -> str:
    """A run's ETag. Its version rises with its state, its segment and roll backs asked, not with its iterations."""
    return version_etag(version)
