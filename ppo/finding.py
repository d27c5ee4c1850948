"""Which run a user means: by its id, by its name, or by the beginning of either."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from ppo.client import Client, ClientError, NotFoundError
from ppo.wire import Run, RunDetail

MOST_SHOWN = 5


class AmbiguousRunError(ClientError):
    """Several runs could be meant; the message names the newest of them."""

    def __init__(self, text: str, candidates: Sequence[Run]) -> None:
        lines = [f"{text!r} fits several runs; give an id:"]
        lines += [f"  {run['id']}  {run['name']}  {run['state']}" for run in candidates[:MOST_SHOWN]]
        if len(candidates) > MOST_SHOWN:
            lines.append("  and more: see `ppo ls`")
        super().__init__("\n".join(lines))


def find_run(client: Client, text: str) -> RunDetail:
    """The run of this id, else the one run of this name, else the one run whose id or name begins so.

    Raises:
        NotFoundError: there is none.
        AmbiguousRunError: there are several.
    """
    if not text:
        raise NotFoundError(404, {"code": "not_found", "detail": "There is no run ''."})
    try:
        return client.run(text)
    except NotFoundError:
        fitting = list(islice(client.runs(match=text), MOST_SHOWN + 1))
        if not fitting:
            raise
    # A name that is the beginning of another one still means its own run.
    named = [run for run in fitting if run["name"] == text]
    candidates = named if len(named) == 1 else fitting
    if len(candidates) > 1:
        raise AmbiguousRunError(text, candidates)
    return client.run(candidates[0]["id"])
