"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ppo.checkpoint_finding import MEANINGS

SpecFile = Annotated[Path, typer.Argument(help="Run spec, YAML or JSON.", show_default=False)]
RunId = Annotated[str, typer.Argument(help="A run's id, its name, or the beginning of either.", show_default=False)]
CheckpointName = Annotated[
    str,
    typer.Argument(metavar="CHECKPOINT", help=f"{MEANINGS[0].upper()}{MEANINGS[1:]}.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="FIELD=VALUE", help="Change a field: --set update.learning_rate=1e-4. May be repeated."
    ),
]


class ListsByDefault(TyperGroup):
    """`ppo THINGS WHICH` is `ppo THINGS ls WHICH`; so is `ppo THINGS`, where that needs nothing more."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        lists = not self.no_args_is_help if not args else args[0] not in self.commands and args[0] != "--help"
        return super().parse_args(ctx, ["ls", *args] if lists else args)
