"""The metrics of several runs on top of each other: a panel per metric, a line per run. Needs matplotlib.

    python benchmarks/plot.py runs/grpo-20260101-120000 runs/rloo-20260101-120500 --output both.png
"""

import json
import math
import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


@dataclass
class Args:
    runs: tuple[Path, ...]  # run folders
    output: Path = Path("curves.png")  # the image


def draw(panels: list[dict], path: Path) -> None:
    """Panels are {"title", "lines": {name: (x, y)}, "x_label", "log": the logarithmic axes}; after y may come how far
    a band reaches above and below it."""
    if not find_spec("matplotlib"):
        print(f"{path} is not drawn: there is no matplotlib; pip install matplotlib")
        return
    from matplotlib.figure import Figure  # without pyplot: no window

    width, shown = min(4, len(panels)), None
    height = math.ceil(len(panels) / width)
    figure = Figure((4 * width, 3 * height), layout="constrained")
    axes = figure.subplots(height, width, squeeze=False).flatten()
    for axis, panel in zip(axes, panels, strict=False):
        for i, (name, (x, y, *bands)) in enumerate(panel["lines"].items()):
            style = ("-", "--", "-.", ":")[i % 4]  # some lie on each other
            (line,) = axis.plot(x, y, style, marker="." if len(x) < 10 else None, label=name)
            for band in bands:
                below, above = ([a + sign * b for a, b in zip(y, band, strict=True)] for sign in (-1, 1))
                axis.fill_between(x, below, above, color=line.get_color(), alpha=0.15, linewidth=0)
        axis.set_title(panel["title"], fontsize="medium")
        axis.set(xlabel=panel.get("x_label", ""), **{f"{name}scale": "log" for name in panel.get("log", "")})
        if list(panel["lines"]) not in ([""], shown):  # the same names need no second legend
            axis.legend(fontsize="x-small")
        shown = list(panel["lines"])
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    figure.savefig(path)


def rows_of(path: Path) -> list[dict]:
    """The complete lines of a JSONL file: a run that goes on may be writing another."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def draw_curves(runs: dict[str, list[dict]], path: Path) -> None:
    """Every metric but learning rates and seconds; runs are {name: rows of metrics.jsonl}."""
    found = dict.fromkeys(name for rows in runs.values() for row in rows for name in row)
    panels = []
    for metric in [name for name in found if not re.match("step$|lr$|time_", name)]:
        points = {run: [(row["step"], row[metric]) for row in rows if metric in row] for run, rows in runs.items()}
        lines = {run: ([x for x, _ in each], [y for _, y in each]) for run, each in points.items()}
        panels.append({"title": metric, "lines": lines})
    draw(panels, path)


def main(args: Args) -> None:
    runs = {str(run): rows_of(run / "metrics.jsonl") for run in args.runs}
    empty = [run for run, rows in runs.items() if not rows]
    if empty or not runs:
        sys.exit(f"error: no metrics.jsonl with a row in {', '.join(empty) or 'no folder'}")
    draw_curves(runs, args.output)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args, description=__doc__, config=(tyro.conf.PositionalRequiredArgs,)))
