"""A run to work on."""

from collections.abc import Callable

import pytest
from sqlalchemy.orm import Session

from store.ids import new_id
from store.models import Run
from store.runs import create_run


@pytest.fixture
def make_run(session: Session) -> Callable[..., Run]:
    def make(**fields: object) -> Run:
        values = {"name": "test", "spec": {"seed": 1}, "num_iterations": 10, "priority": 0, "gpus": 0}
        return create_run(session, **{"run_id": new_id("r"), "created_by": "ada", **values, **fields})

    return make
