"""The metrics of any runs on top of each other, a panel per metric: what a run's own curves.png shows, for several. Needs matplotlib.

python benchmarks/plot.py runs/grpo-20260101-120000 runs/rloo-20260101-120500 --output both.png
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import draw_curves, optional, read_lines


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[Path, ...]]  # run folders
    output: Path = Path("curves.png")  # the image


def main(args: Args) -> None:
    optional("matplotlib", "a plot")
    names = [run.resolve().name for run in args.runs]
    rows = {str(run) if names.count(name) > 1 else name: read_lines(run / "metrics.jsonl") for run, name in zip(args.runs, names)}
    if missing := [name for name, run in rows.items() if not run]:
        sys.exit(f"error: no metrics.jsonl with a row in {', '.join(missing)}")
    draw_curves(rows, args.output)
    print(args.output)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
