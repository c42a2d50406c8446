"""What lectures say that takes whole trainings to check: the KL against over-optimisation, updates per batch, groups without a signal.

    python benchmarks/trained.py --jobs 2                # 18 + 36 + 12 runs, an hour; after a break it goes on
    python benchmarks/trained.py --only updates --seeds 1

Every run is the command line of a shipped script; its metrics.jsonl stays in --output-dir, for plot.py. trained.json holds the means over
the seeds at each evaluation, trained-NAME.md the tables, trained-NAME.png the figures (with matplotlib).
"""

import importlib.util
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from learning import TASKS, evaluations, mean_and_spread, train_all  # no torch here: see learning.py
from speed import facts

KL_COEFS = 1e-9, 0.03, 0.1  # 1e-9 pulls at nothing, but has the KL measured
UPDATES = 1, 4, 16
AS_RLOO = (
    "--scale-rewards none --aggregation constant --minibatch-size None --lr 2e-4"  # grpo.py's policy gradient is then rloo.py's, scaled
)
VARIANTS = {  # for the updates per batch
    "grpo": "grpo.py",
    "grpo, no clip": "grpo.py --clip-low 1e9 --clip-high 1e9",
    "gspo": "gspo.py",
    "cispo": "cispo.py",
}


@dataclass
class Args:
    only: tuple[Literal["overoptimization", "updates", "groups"], ...] = ("overoptimization", "updates", "groups")
    seeds: int = 3
    jobs: int = 1  # runs at a time
    device: str = "cpu"  # cpu, cuda
    output_dir: Path = Path("runs/trained")  # of the runs, trained.json, the tables and the figures


def overoptimization() -> dict[str, list[str]]:
    """{name: command}: reviews, trained by the reward model with the gold score watched; one gradient, but for where the KL stands."""
    common = f"{TASKS['reviews']} --num-steps 150 --eval-every 10"
    commands = {}
    for kl_coef in KL_COEFS:
        commands[f"reward {kl_coef:g}"] = f"rloo.py {common} --kl-coef {kl_coef:g}".split()
        commands[f"loss {kl_coef:g}"] = f"grpo.py {common} {AS_RLOO} --kl-coef {kl_coef:g}".split()
    return commands


def updates() -> dict[str, list[str]]:
    """{name: command}: reviews, the same batch in whole for every update, one learning rate for all, no KL."""
    common = f"{TASKS['reviews']} --num-steps 24 --eval-every 3 --minibatch-size None --kl-coef 0 --lr 1e-4"
    return {
        f"{name} x {number}": f"{script} {common} --num-epochs {number}".split() for number in UPDATES for name, script in VARIANTS.items()
    }


def groups() -> dict[str, list[str]]:
    """{name: command}: addition, where a group's rewards are soon all 1."""
    common = f"{TASKS['addition']} --num-steps 100 --eval-every 5 --lr 2e-4 --kl-coef 0"
    return {
        f"std {scale}, {rounds} rounds": f"grpo.py {common} --scale-rewards {scale} --dynamic-sampling {rounds}".split()
        for scale in ("group", "none")
        for rounds in (0, 3)
    }


def points_of(folder: Path) -> list[dict]:
    """evaluations(), where step 0, before any batch, is on the reference and clips nothing."""
    return [{"kl": 0.0, "clip_fraction": 0.0, "no_signal_fraction": 0.0} | row for row in evaluations(folder)]


def averaged(points: list[list[dict]], name: str) -> list[float]:
    """The mean over the seeds at every evaluation."""
    return [statistics.mean(row[name] for row in rows) for rows in zip(*points)]


def overoptimization_table(runs: dict[str, list[list[dict]]]) -> list[str]:
    lines = [
        "| KL in the | coefficient | learned reward, end | gold score, end | KL, end | best gold score | at a KL of |",
        "|---" * 7 + "|",
    ]
    for name, points in sorted(runs.items(), key=lambda item: item[0].split()[0], reverse=True):
        best = [max(rows, key=lambda row: row["eval_reward/gold_score"]) for rows in points]
        where, kl_coef = name.split()
        cells = [where, "0" if float(kl_coef) < 1e-6 else kl_coef]
        cells += [mean_and_spread([rows[-1][key] for rows in points]) for key in ("eval_reward", "eval_reward/gold_score", "kl")]
        cells += [mean_and_spread([row[key] for row in best]) for key in ("eval_reward/gold_score", "kl")]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def updates_table(runs: dict[str, list[list[dict]]]) -> list[str]:
    lines = [
        "| script | updates per batch | learned reward, end | gold score, end | best learned reward | tokens clipped |",
        "|---" * 6 + "|",
    ]
    for name, points in sorted(runs.items(), key=lambda item: item[0].split(" x ")[0]):
        cells = name.split(" x ") + [
            mean_and_spread([rows[-1][key] for rows in points]) for key in ("eval_reward", "eval_reward/gold_score")
        ]
        cells.append(mean_and_spread([max(row["eval_reward"] for row in rows) for rows in points]))
        cells.append(f"{statistics.mean(row['clip_fraction'] for rows in points for row in rows[1:]):.0%}")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def groups_table(runs: dict[str, list[list[dict]]]) -> list[str]:
    lines = ["| divided by | rounds of refilling | right after a quarter | at the end | silent groups at first | at the end | seconds |"]
    lines.append("|---" * 7 + "|")
    for name, points in runs.items():
        scale, rounds = name.removeprefix("std ").removesuffix(" rounds").split(", ")
        middle = [next(row for row in rows if row["step"] >= rows[-1]["step"] / 4) for rows in points]
        cells = [{"group": "the group's std", "none": "nothing"}[scale], rounds]
        cells += [mean_and_spread([row["eval_reward"] for row in rows]) for rows in (middle, [rows[-1] for rows in points])]
        cells += [f"{statistics.mean(rows[i]['no_signal_fraction'] for rows in points):.0%}" for i in (1, -1)]
        lines.append("| " + " | ".join([*cells, mean_and_spread([rows[-1]["seconds"] for rows in points], ".0f")]) + " |")
    return lines


def draw_overoptimization(figure, runs: dict[str, list[list[dict]]]) -> None:
    axes = figure.subplots(1, 2, sharey=True)
    for axis, where in zip(axes, ("reward", "loss")):
        for i, kl_coef in enumerate(KL_COEFS):
            points = runs[f"{where} {kl_coef:g}"]
            kl = averaged(points, "kl")
            axis.plot(kl, averaged(points, "eval_reward"), "-", color=f"C{i}", label=f"learned, coefficient {kl_coef if i else 0:g}")
            axis.plot(kl, averaged(points, "eval_reward/gold_score"), "--", color=f"C{i}", label="gold")
        axis.set(title=f"KL in the {where}", xlabel="KL to the reference, nats per completion", xlim=(0, 60), ylim=(-1, 4))
    axes[0].legend(fontsize="x-small", ncols=2)
    axes[0].set_ylabel("held-out score")


def draw_updates(figure, runs: dict[str, list[list[dict]]]) -> None:
    axes = figure.subplots(1, 3, sharey=True)
    for axis, number in zip(axes, UPDATES):
        for name in VARIANTS:
            points = runs[f"{name} x {number}"]
            axis.plot(averaged(points, "step"), averaged(points, "eval_reward"), label=name)
        axis.set(title=f"{number} update{'s' * (number > 1)} per batch", xlabel="step")
    axes[0].legend(fontsize="x-small")
    axes[0].set_ylabel("held-out learned reward")


def draw_groups(figure, runs: dict[str, list[list[dict]]]) -> None:
    axes = figure.subplots(1, 2)
    for name, points in runs.items():
        axes[0].plot(averaged(points, "step"), averaged(points, "eval_reward"), label=name)
        axes[1].plot(averaged(points, "step")[1:], averaged(points, "no_signal_fraction")[1:], label=name)
    axes[0].set(title="held-out share right", xlabel="step")
    axes[1].set(title="share of groups without a signal", xlabel="step")
    axes[0].legend(fontsize="x-small")


CLAIMS = {
    "overoptimization": (overoptimization, overoptimization_table, draw_overoptimization),
    "updates": (updates, updates_table, draw_updates),
    "groups": (groups, groups_table, draw_groups),
}


def main(args: Args) -> None:
    output = args.output_dir / "trained.json"
    results = json.loads(output.read_text()) if output.exists() else {}  # claims that are not checked this time keep theirs
    for claim in args.only:
        commands, table, drawing = CLAIMS[claim]
        jobs = [
            (f"{claim} {name} {seed}".replace(", ", "-").replace(" ", "-"), [*command, "--seed", str(seed)], 128)
            for name, command in commands().items()
            for seed in range(args.seeds)
        ]
        train_all(args, jobs)
        folders = iter(args.output_dir / job[0] for job in jobs)
        runs = {name: [points_of(next(folders)) for _ in range(args.seeds)] for name in commands()}
        keys = "step", "seconds", "kl", "eval_reward", "eval_reward/gold_score", "clip_fraction", "no_signal_fraction"
        results[claim] = (
            facts(args.device)
            | {"seeds": args.seeds}
            | {
                name: {"command": " ".join(["python", *commands()[name]])}
                | {key: averaged(points, key) for key in keys if key in points[0][0]}
                for name, points in runs.items()
            }
        )
        output.write_text(json.dumps(results) + "\n")
        (args.output_dir / f"trained-{claim}.md").write_text("\n".join(table(runs)) + "\n")
        print("\n".join(["", *table(runs), ""]), flush=True)
        if importlib.util.find_spec("matplotlib"):
            from matplotlib.figure import Figure

            drawing(figure := Figure((11, 3.6), layout="constrained"), runs)
            figure.savefig(args.output_dir / f"trained-{claim}.png", dpi=120)
    print(f"{args.output_dir}: trained.json, trained-NAME.md, trained-NAME.png")


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args, description=__doc__))
