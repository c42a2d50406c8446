"""How the six scripts learn the two embedded tasks: one budget of completions, one rule for the learning rate, seeds.

    python benchmarks/learning.py --jobs 2  # both tasks: 108 runs, over an hour; after a break it goes on

The rule: every script tries the same --lrs once each, with a seed that is not used again, and takes the one with the
highest held-out reward at the end; it is then run with seeds 0, 1, ... All else is its defaults. On reviews the learned
reward is what is trained and picked by; the gold score, the readers' true taste, is only watched. Each run is a process
of its own. Seconds are those of the steps; peak memory is that of the process. Finished runs stay in --output-dir.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import plot  # no torch here: Linux counts the parent's memory in a child's high-water mark

ROOT = Path(__file__).resolve().parent.parent
ROWS = 128  # completions of a step, by default the same in all scripts
REVIEWS = "--dataset tiny/reviews.jsonl --reward-model tiny/reward --reward-fn tiny/make.py:gold_score"
TASKS = {
    "addition": "--dataset tiny/addition.jsonl --reward-fn exact_match",
    "reviews": f"{REVIEWS} --reward-weights 1 0",
}
GOLD = "eval_reward/gold_score"
KEPT = "step", "completions", "seconds", "eval_reward", GOLD, "kl", "clip_fraction", "no_signal_fraction"
TUNING_SEED = 1000
RSS_UNITS_IN_A_MIB = 2**20 if sys.platform == "darwin" else 2**10  # of the memory that a process is said to have had


@dataclass
class Args:
    tasks: tuple[Literal["addition", "reviews"], ...] = ("addition", "reviews")  # what is learnt
    scripts: tuple[str, ...] = ("reinforce", "rloo", "ppo", "grpo", "gspo", "cispo")  # who learns
    seeds: int = 5  # runs at the chosen learning rate
    lrs: tuple[float, ...] = (5e-5, 1e-4, 2e-4, 4e-4)  # learning rates, tried once each by every script
    completions: int = 12_800  # budget of a run
    eval_every: int = 5  # steps between points of a curve
    jobs: int = 1  # runs at a time
    device: str = "cpu"  # cpu, cuda
    output_dir: Path = Path("runs/learning")  # of the runs, and for each task of its curves, table and figure


# --- for the other benchmarks, too ---


def commit_of(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()


def facts(device: str) -> dict:
    """What belongs beside every figure: the command, the commit, the day and the machine."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    processor = cpuinfo.partition("model name")[2].partition("\n")[0].strip("\t: ")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    machine = {"processor": processor, "cores": os.cpu_count(), "memory_gib": round(memory), "device": device}
    found = {"command": " ".join(["python", *sys.argv]), "commit": commit_of(ROOT), "date": time.strftime("%Y-%m-%d")}
    return found | {"machine": machine, "versions": {name: version(name) for name in ("torch", "transformers")}}


def run(words: list[str], log: Path, **environment: str) -> float:
    """A command in a process of its own, from the root of the checkout; its peak memory in MiB."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | environment
    with open(log, "w") as file:
        process = subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=file, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)} failed:\n{log.read_text()[-2000:]}")
    return usage.ru_maxrss / RSS_UNITS_IN_A_MIB


def train(args, name: str, command: str) -> dict:
    """A finished run, from the folder of that name if it is there already: its command, commit, peak and curve."""
    folder = args.output_dir.absolute() / re.sub(r"[^\w.]+", "-", name)
    command, done = f"{command} --device {args.device} --save-every 0", folder / "done.json"
    if not done.exists() or json.loads(done.read_text())["command"] != command:
        shutil.rmtree(folder, ignore_errors=True)  # what was interrupted begins anew: its seconds are to mean something
        folder.parent.mkdir(parents=True, exist_ok=True)
        threads = os.environ.get("OMP_NUM_THREADS", str(max(1, os.cpu_count() // args.jobs)))
        words = [sys.executable, *command.split(), "--output-dir", str(folder)]
        peak = run(words, folder.with_name(f"{folder.name}.log"), OMP_NUM_THREADS=threads)
        for weights in [*folder.glob("checkpoint-*"), folder / "final"]:
            shutil.rmtree(weights, ignore_errors=True)
        done.write_text(json.dumps({"command": command, "commit": commit_of(ROOT), "peak_mib": peak}))
        print(folder, flush=True)
    return json.loads(done.read_text()) | curve(plot.rows_of(folder / "metrics.jsonl"))


def train_all(args, runs: dict[str, str]) -> list[dict]:
    """train() of every {name: command}, args.jobs at a time; where one fails, those that wait are cancelled."""
    with ThreadPoolExecutor(args.jobs) as pool:
        return list(pool.map(partial(train, args), runs, runs.values()))


def curve(rows: list[dict]) -> dict[str, list]:
    """What is kept of each evaluation. Step 0, before any batch, is on the reference and clips nothing."""
    found, seconds = [], 0.0
    for row in rows:
        seconds += sum(value for name, value in row.items() if name.startswith("time_"))
        if "eval_reward" in row:
            found.append(row | {"seconds": seconds, "completions": row["step"] * ROWS})
    return {name: [row.get(name, 0.0) for row in found] for name in KEPT if name in found[-1]}


def last(name: str) -> Callable:
    return lambda run: run[name][-1]


def mean_and_spread(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4g}{spread}"


def markdown(names: list[str], rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [names, ["---"] * len(names), *rows])


def averaged(runs: list[dict], x: str, y: str) -> tuple[list, list, list]:
    """Over the seeds: mean x, mean y, and the standard deviation of y."""
    xs, ys = (list(zip(*(run[name] for run in runs), strict=True)) for name in (x, y))
    spread = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in ys]
    return [statistics.mean(values) for values in xs], [statistics.mean(values) for values in ys], spread


def compare(args, name: str, commands: dict[str, str], columns: dict[str, Callable], panels: list[tuple]) -> None:
    """Run each {label: command} with every seed. NAME.json gets the curves, NAME.md a table (a column is a number of a
    run), NAME.png a figure (a panel is an x and a y)."""
    jobs = {f"{name} {label} {i}": f"{commands[label]} --seed {i}" for label in commands for i in range(args.seeds)}
    finished = iter(train_all(args, jobs))
    runs = {label: [next(finished) for _ in range(args.seeds)] for label in commands}
    about = facts(args.device) | {"seeds": args.seeds, "runs": runs}
    (args.output_dir / f"{name}.json").write_text(json.dumps(about) + "\n")
    rows = [[label, *(mean_and_spread([*map(fn, each)]) for fn in columns.values())] for label, each in runs.items()]
    (args.output_dir / f"{name}.md").write_text(table := markdown([name, *columns], rows))
    print(table, flush=True)
    drawn = []
    for x, y in panels:
        drawn.append({"title": y, "x_label": x, "lines": {label: averaged(runs[label], x, y) for label in runs}})
    plot.draw(drawn, args.output_dir / f"{name}.png")


# --- the comparison ---


def steps_to_90_percent(run: dict) -> int:
    """The step of the first evaluation at which that share of the way from first to last held-out reward is done."""
    first, end = run["eval_reward"][0], run["eval_reward"][-1]
    way = [(reward - first) / ((end - first) or 1.0) for reward in run["eval_reward"]]
    return next(step for step, done in zip(run["step"], way, strict=True) if done >= 0.9 or done == way[-1])


def main(args: Args) -> None:
    for task in args.tasks:
        flags = f"{TASKS[task]} --num-steps {max(1, args.completions // ROWS)} --eval-every {args.eval_every}"
        commands = {(script, lr): f"{script}.py {flags} --lr {lr:g}" for script in args.scripts for lr in args.lrs}
        jobs = {f"tuning {task} {x} {lr:g}": f"{command} --seed {TUNING_SEED}" for (x, lr), command in commands.items()}
        found = zip(commands, train_all(args, jobs), strict=True)
        rewards = {key: run["eval_reward"][-1] for key, run in found}
        tried = [[script, *(f"{rewards[script, lr]:.2f}" for lr in args.lrs)] for script in args.scripts]
        table = markdown([f"{task}, tried", *(f"{lr:g}" for lr in args.lrs)], tried)
        (args.output_dir / f"learning-{task}-tuning.md").write_text(table)
        print(table, flush=True)
        best = [(script, max((rewards[script, lr], lr) for lr in args.lrs)[1]) for script in args.scripts]
        scores = ("eval_reward", GOLD) if task == "reviews" else ("eval_reward",)
        columns = {score: last(score) for score in scores} | {"steps to 90 % of the gain": steps_to_90_percent}
        columns |= {"seconds": last("seconds"), "peak MiB": lambda run: run["peak_mib"]}
        panels = [("seconds", "eval_reward"), *(("completions", score) for score in scores)]
        chosen = {f"{script}, lr {lr:g}": commands[script, lr] for script, lr in best}
        compare(args, f"learning-{task}", chosen, columns, panels)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args, description=__doc__))
