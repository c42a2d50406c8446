"""What lectures say that takes whole trainings to check: over-optimization, updates per batch, groups without a signal.

    python benchmarks/trained.py --jobs 2                # 18 + 36 + 12 runs, an hour; after a break it goes on
    python benchmarks/trained.py --only updates --seeds 1

Every run is the command line of a script; its metrics.jsonl stays in --output-dir, for plot.py.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import learning
from learning import GOLD, TASKS, last


@dataclass
class Args:
    only: tuple[Literal["overoptimization", "updates", "groups"], ...] = ("overoptimization", "updates", "groups")
    seeds: int = 3
    jobs: int = 1  # runs at a time
    device: str = "cpu"  # cpu, cuda
    output_dir: Path = Path("runs/trained")  # of the runs, and for each claim of its curves, table and figure


def overoptimization() -> dict[str, str]:
    """Reviews, trained by the reward model; one gradient, but for where the KL stands: in the reward or in the loss."""
    task = f"{TASKS['reviews']} --num-steps 150 --eval-every 10"
    as_rloo = "--scale-rewards none --aggregation constant --minibatch-size 0 --lr 2e-4"  # up to a factor
    commands = {}
    for kl_coef in ("1e-9", "0.03", "0.1"):  # 1e-9 pulls at nothing, but has the KL measured
        commands[f"reward {kl_coef}"] = f"rloo.py {task} --kl-coef {kl_coef}"
        commands[f"loss {kl_coef}"] = f"grpo.py {task} {as_rloo} --kl-coef {kl_coef}"
    return commands


def updates() -> dict[str, str]:
    """Reviews, the same batch in whole for every update, one learning rate for all, no KL."""
    task = f"{TASKS['reviews']} --num-steps 24 --eval-every 3 --minibatch-size 0 --kl-coef 0 --lr 1e-4"
    commands = {}
    for number in (1, 4, 16):
        for script in ("grpo", "gspo", "cispo"):
            commands[f"{script} x {number}"] = f"{script}.py {task} --num-epochs {number}"
        commands[f"grpo, no clip x {number}"] = commands[f"grpo x {number}"] + " --clip-low 1 --clip-high 1e9"
    return commands


def groups() -> dict[str, str]:
    """Addition, where a group's rewards are soon all 1."""
    task = f"{TASKS['addition']} --num-steps 100 --eval-every 5 --lr 2e-4 --kl-coef 0"
    commands = {}
    for scale in ("group", "none"):
        for rounds in (0, 3):
            flags = f"--scale-rewards {scale} --dynamic-sampling {rounds}"
            commands[f"std {scale}, {rounds} rounds"] = f"grpo.py {task} {flags}"
    return commands


def at_best_gold(name: str):
    return lambda run: max(zip(run[GOLD], run[name], strict=True))[1]


def clipped(run: dict) -> float:
    return sum(run["clip_fraction"][1:]) / len(run["clip_fraction"][1:])


ENDS = {"learned reward": last("eval_reward"), "gold score": last(GOLD)}
RIGHT = {"share right": last("eval_reward"), "silent groups": last("no_signal_fraction"), "seconds": last("seconds")}
COLUMNS = {  # at the end of a run, where nothing else is said
    "overoptimization": ENDS | {"KL": last("kl"), "best gold score": at_best_gold(GOLD), "its KL": at_best_gold("kl")},
    "updates": ENDS | {"best learned reward": lambda run: max(run["eval_reward"]), "clipped in all": clipped},
    "groups": RIGHT,
}
PANELS = {
    "overoptimization": [("kl", "eval_reward"), ("kl", GOLD)],
    "updates": [("step", "eval_reward"), ("step", GOLD)],
    "groups": [("step", "eval_reward"), ("step", "no_signal_fraction")],
}


def main(args: Args) -> None:
    for claim in args.only:
        learning.compare(args, f"trained-{claim}", globals()[claim](), COLUMNS[claim], PANELS[claim])


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args, description=__doc__))
