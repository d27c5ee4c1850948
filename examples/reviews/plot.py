"""Draws the curves of runs of the example: `python -m examples.reviews.plot PICTURE.svg RUN_DIR...`

One line a run (one a seed) in each panel. Reads journals only. Needs matplotlib, which the test tools bring.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

from examples.reviews.figures import run_events
from ppo_core import registry

PANELS = (
    ("reward/score_mean", "heldout/score_mean"),
    ("judge/score_mean",),
    ("kl/ref_sequence",),
    ("value/loss",),
    ("value/explained_variance_return",),
    ("policy/first_minibatch_ratio_max_dev",),
    ("policy/approx_kl",),
    ("policy/entropy",),
    ("response/length_mean", "heldout/length_mean"),
)


def curve(run_dir: Path, name: str) -> tuple[list[int], list[float]]:
    """Iterations and values of one metric, where it has one."""
    _, events = run_events(run_dir)
    points = {
        event.iteration: event.payload[name]
        for event in events
        if event.type == "metrics" and event.payload.get(name) is not None
    }
    return list(points), list(points.values())


def draw(picture: Path, folders: list[Path]) -> None:
    """Write the picture; the same journals give the same file."""
    # A fixed salt for the ids inside the file, and no date, so that only data changes it.
    pyplot.rcParams.update(
        {"svg.hashsalt": "ppo-control", "font.size": 8, "axes.spines.top": False, "axes.spines.right": False}
    )
    figure, axes = pyplot.subplots(3, 3, figsize=(10, 7.5), layout="constrained")
    colors = pyplot.rcParams["axes.prop_cycle"].by_key()["color"]
    for axis, names in zip(axes.flat, PANELS, strict=True):
        for name, style in zip(names, ("-", "o--"), strict=False):
            for number, folder in enumerate(folders):
                iterations, values = curve(folder, name)
                axis.plot(
                    iterations,
                    values,
                    style,
                    color=colors[number],
                    linewidth=1,
                    markersize=2.5,
                    label=f"run {number + 1}" if style == "-" else None,
                )
        axis.set_title(", ".join(f"{registry.metric(name).title} ({name})" for name in names[:1]), fontsize=7.5)
        if names[0] == "policy/first_minibatch_ratio_max_dev":
            axis.set_yscale("symlog", linthresh=1e-7)
    for axis in axes[-1]:
        axis.set_xlabel("iteration")
    axes.flat[0].legend(frameon=False)
    figure.savefig(picture, metadata={"Date": None})


def main() -> int:
    if len(sys.argv) < 3:
        raise SystemExit("usage: python -m examples.reviews.plot PICTURE.svg RUN_DIR...")
    draw(Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
