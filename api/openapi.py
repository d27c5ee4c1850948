"""The OpenAPI description, made from the routes. `python -m api.openapi > docs/openapi.json` writes it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from api.auth import COOKIE, ROLE_MARK
from api.errors import PROBLEM_TYPE
from api.schemas import FaultMessage, Problem

REFERENCE = "#/components/schemas/{model}"


def describe(app: FastAPI) -> dict[str, Any]:
    """OpenAPI 3.1 of all routes: every error is a Problem, every operation says the role it needs."""
    document = get_openapi(
        title="PPO Control", version=app.version, description=app.description, routes=app.routes, tags=app.openapi_tags
    )
    schemas = document["components"]["schemas"]
    for model in ("HTTPValidationError", "ValidationError"):
        schemas.pop(model, None)
    for problem in (Problem, FaultMessage):
        schema = problem.model_json_schema(ref_template=REFERENCE, mode="serialization")
        schema.pop("$defs", None)
        schemas[problem.__name__] = schema
    document["components"]["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer"},
        "session": {"type": "apiKey", "in": "cookie", "name": COOKIE},
    }
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = {
                "description": "Anything else.",
                "content": {PROBLEM_TYPE: {"schema": {"$ref": REFERENCE.format(model="Problem")}}},
            }
            is_open = operation[ROLE_MARK] == "open"
            operation["security"] = [] if is_open else [{"key": []}, {"session": []}]
    return document


def main() -> None:
    from api.main import create_app
    from api.settings import ApiSettings

    settings = ApiSettings(database_url="postgresql://nowhere/nothing", data_dir=Path("/nowhere"))
    json.dump(create_app(settings).openapi(), sys.stdout, indent=1, ensure_ascii=False)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
