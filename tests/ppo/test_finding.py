"""Which run a text means, against a service that lists by the beginning of ids and names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from ppo.client import Client, NotFoundError
from ppo.finding import AmbiguousRunError, find_run


class Listed:
    """Runs by id and name, as `Client` reads them."""

    def __init__(self, **names: str) -> None:
        self._runs = {f"r-{key}": {"id": f"r-{key}", "name": name, "state": "queued"} for key, name in names.items()}

    def run(self, run_id: str) -> dict[str, Any]:
        if run_id not in self._runs:
            raise NotFoundError(404, {"detail": f"There is no run {run_id!r}."})
        return self._runs[run_id]

    def runs(self, match: str) -> Iterator[dict[str, Any]]:
        return (run for run in self._runs.values() if run["id"].startswith(match) or run["name"].startswith(match))


def found(text: str, **names: str) -> str:
    return find_run(cast(Client, Listed(**names)), text)["id"]


def test_id_name_and_beginnings_all_name_the_run() -> None:
    for text in ("r-abc", "r-a", "reviews-b0.05", "reviews-b"):
        assert found(text, abc="reviews-b0.05", xyz="other") == "r-abc", text


def test_a_name_that_begins_another_means_its_own_run() -> None:
    assert found("reviews", one="reviews-2", two="reviews") == "r-two"


def test_several_are_told_up_to_five() -> None:
    with pytest.raises(AmbiguousRunError) as caught:
        found("same", **{f"n{number}": "same" for number in range(7)})
    lines = str(caught.value).splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == [f"r-n{number}" for number in range(5)]
    assert lines[-1] == "  and more: see `ppo ls`"


@pytest.mark.parametrize("text", ["", "r-none", "views"])
def test_what_fits_none_is_not_found(text: str) -> None:
    with pytest.raises(NotFoundError, match=f"There is no run {text!r}."):
        found(text, abc="reviews")
