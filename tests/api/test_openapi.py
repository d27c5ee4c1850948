"""The committed description is the application's own, and its names are stable."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from fastapi import FastAPI

COMMITTED = Path(__file__).parents[2] / "docs" / "openapi.json"


def operations(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [operation for operations in document["paths"].values() for operation in operations.values()]


def test_the_committed_description_is_the_applications_own(app: FastAPI) -> None:
    assert json.loads(COMMITTED.read_text()) == app.openapi(), "run `python -m api.openapi > docs/openapi.json`"


def test_every_operation_has_a_name_of_its_own_a_role_and_problems(app: FastAPI) -> None:
    document = app.openapi()
    assert document["openapi"].startswith("3.1")
    names = [operation["operationId"] for operation in operations(document)]
    assert len(names) == len(set(names))
    for operation in operations(document):
        assert operation["x-role"] in ("open", "viewer", "operator", "admin")
        assert (operation["security"] == []) == (operation["x-role"] == "open")
        assert "application/problem+json" in operation["responses"]["default"]["content"]
        assert "422" not in operation["responses"]


def test_every_reference_leads_somewhere(app: FastAPI) -> None:
    document = app.openapi()

    def references(node: Any) -> list[str]:
        if isinstance(node, dict):
            return [node["$ref"]] if "$ref" in node else [r for value in node.values() for r in references(value)]
        return [r for value in node for r in references(value)] if isinstance(node, list) else []

    for reference in references(document):
        name = reference.removeprefix("#/components/schemas/")
        assert name in document["components"]["schemas"], reference


def test_the_service_loads_no_training_stack() -> None:
    code = (
        "import sys, api.main\n"
        "heavy = {'torch', 'transformers', 'numpy', 'deepspeed', 'vllm', 'worker'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
