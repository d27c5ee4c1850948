"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SpecFile = Annotated[Path, typer.Argument(help="Run spec, YAML or JSON.", show_default=False)]
RunId = Annotated[str, typer.Argument(help="A run's id, its name, or the beginning of either.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="FIELD=VALUE", help="Change a field: --set update.learning_rate=1e-4. May be repeated."
    ),
]
