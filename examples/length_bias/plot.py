"""Draws the story that runs told: `python -m examples.length_bias.plot PICTURE.svg STORY.json...`

One colour a run: the first part as a line, the part after the roll back dashed; ▲ where the story was told, ✕ where the
gate stopped the run. Needs matplotlib, which the test tools bring.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

from examples.length_bias.story import Part, parts
from ppo_core import registry

PANELS = (
    "reward/score_mean",
    "response/length_mean",
    "response/eos_rate",
    "kl/ref_sequence",
    "judge/win_rate_vs_start",
    "response/distinct_2",
)


def draw(picture: Path, stories: list[Path]) -> None:
    """Write the picture; the same stories give the same file."""
    # A fixed salt for the ids inside the file, and no date, so that only data changes it.
    pyplot.rcParams.update(
        {"svg.hashsalt": "ppo-control", "font.size": 8, "axes.spines.top": False, "axes.spines.right": False}
    )
    figure, axes = pyplot.subplots(2, 3, figsize=(10, 5), layout="constrained")
    colors = pyplot.rcParams["axes.prop_cycle"].by_key()["color"]
    for number, story in enumerate(stories):
        told = parts(json.loads(story.read_text())["events"])
        for axis, name in zip(axes.flat, PANELS, strict=True):
            for (_, part), style in zip(sorted(told.items()), ("-", "--"), strict=True):
                _line(axis, part, name, colors[number], style, f"run {number + 1}" if style == "-" else None)
    for axis, name in zip(axes.flat, PANELS, strict=True):
        axis.set_title(f"{registry.metric(name).title} ({name})", fontsize=7.5)
    axes.flat[4].axhline(0.5, color="grey", linewidth=0.5)
    for axis in axes[-1]:
        axis.set_xlabel("iteration")
    axes.flat[0].legend(frameon=False)
    figure.savefig(picture, metadata={"Date": None})


def _line(axis: pyplot.Axes, part: Part, name: str, color: str, style: str, label: str | None) -> None:
    points = part.series(name)
    axis.plot(*zip(*points, strict=True), style, color=color, linewidth=1, label=label)
    if part.raised_at is not None:
        axis.plot(*[at for at in points if at[0] <= part.raised_at][-1], "^", color=color, markersize=5)
    if style == "-":
        axis.plot(*points[-1], "x", color=color, markersize=5)


def main() -> int:
    if len(sys.argv) < 3:
        raise SystemExit("usage: python -m examples.length_bias.plot PICTURE.svg STORY.json...")
    draw(Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
