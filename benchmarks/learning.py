"""How the six scripts learn the two embedded tasks: one budget of completions, learning rates picked by one rule, several seeds.

    python benchmarks/learning.py --jobs 2                           # both tasks: 108 runs, over an hour; after a break it goes on
    python benchmarks/learning.py --tasks addition --seeds 2 --completions 1280 --output-dir /tmp/try  # minutes

The rule: every script tries the same --lrs (all six defaults are among them) once each, with a seed that is not used again, and takes the
one with the highest held-out reward at the end; it is then run with seeds 0, 1, ... All else is its defaults (PPO's --value-lr, too).
Each run is a command line of its own, in a process of its own with OMP_NUM_THREADS or else cores / jobs threads. On reviews the learned
reward is what is trained and picked by; the gold score, the readers' true taste, is only watched. Seconds are those of the steps, without
start-up and evaluations; peak memory is that of the process. The table and the figures (with matplotlib) are made of what is in
--output-dir, where finished runs are kept.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from speed import facts  # no torch here: Linux counts the parent's memory in a child's high-water mark

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = "reinforce", "rloo", "ppo", "grpo", "gspo", "cispo"
TASKS = {
    "addition": "--dataset tiny/addition.jsonl --reward-fn exact_match",
    "reviews": "--dataset tiny/reviews.jsonl --reward-model tiny/reward --reward-fn tiny/make.py:gold_score --reward-weights 1 0",
}
TUNING_SEED = 1000


@dataclass
class Args:
    tasks: tuple[Literal["addition", "reviews"], ...] = ("addition", "reviews")  # what is learnt
    scripts: tuple[str, ...] = SCRIPTS  # who learns
    seeds: int = 5  # runs at the chosen learning rate
    lrs: tuple[float, ...] = (5e-5, 1e-4, 2e-4, 4e-4)  # learning rates, tried once each by every script
    completions: int = 12_800  # budget of a run
    eval_every: int = 5  # steps between points of a curve
    jobs: int = 1  # runs at a time
    device: str = "cpu"  # cpu, cuda
    output_dir: Path = Path("runs/learning")  # of the runs, and of learning.json, learning.md and the figures


def rows_of_a_step(scripts: tuple[str, ...]) -> dict[str, int]:
    """{script: completions of a step}, as the scripts have it by default."""
    code = "print(json.dumps({s: (a := importlib.import_module(s).Args).num_prompts * a.group_size for s in sys.argv[1:]}))"
    command = [sys.executable, "-c", f"import importlib, json, sys\n{code}", *scripts]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout)


def train(args, name: str, command: list[str], rows: int) -> dict:
    """A finished run: its command, its curve, seconds and peak memory; from the folder of that name if it is there already."""
    folder = args.output_dir.absolute() / name
    command, done = [*command, "--device", args.device, "--quiet"], folder / "done.json"
    if not done.exists() or json.loads(done.read_text())["command"] != " ".join(["python", *command]):
        shutil.rmtree(folder, ignore_errors=True)  # what was interrupted begins anew, so that its seconds mean something
        environment = {"OMP_NUM_THREADS": str(max(1, os.cpu_count() // args.jobs))} | os.environ | {"HF_HUB_OFFLINE": "1"}
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{folder}.log", "w") as log:
            words = [sys.executable, *command, "--output-dir", str(folder)]
            process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log, env=environment)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n" + Path(f"{folder}.log").read_text()[-2000:])
        found = {"command": " ".join(["python", *command]), "peak_mib": usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)}
        found |= {"commit": facts(args.device)["commit"]} | curve(evaluations(folder), rows)
        if found["step"] != sorted(set(found["step"])):
            raise RuntimeError(f"{folder} was written by two runs; is one left over from a benchmark that was killed?")
        for weights in [*folder.glob("checkpoint-*"), folder / "best", folder / "final"]:
            shutil.rmtree(weights, ignore_errors=True)
        done.write_text(json.dumps(found))
        print(f"{name}: {found['eval_reward'][0]:.3f} -> {found['eval_reward'][-1]:.3f}", flush=True)
    return json.loads(done.read_text())


def train_all(args, runs: list[tuple[str, list[str], int]]) -> list[dict]:
    """train() of every run, args.jobs at a time; the first that fails stops all."""
    with ThreadPoolExecutor(args.jobs) as pool:
        waiting = [pool.submit(train, args, *run) for run in runs]
        try:
            return [run.result() for run in waiting]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def evaluations(folder: Path) -> list[dict]:
    """The rows of metrics.jsonl with an evaluation, each with the "seconds" of the steps so far."""
    found, seconds = [], 0.0
    for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        seconds += sum(value for name, value in row.items() if name.startswith("time_"))
        if "eval_reward" in row:
            found.append(row | {"seconds": seconds})
    return found


def curve(evaluated: list[dict], rows: int) -> dict:
    """Lists with an entry per evaluation: steps, completions, seconds of the steps so far, and each held-out score."""
    names = dict.fromkeys(name for row in evaluated for name in row if name in ("step", "seconds") or name.startswith("eval_"))
    points = {name: [row[name] for row in evaluated if name in row] for name in names}
    return points | {"completions": [step * rows for step in points["step"]]}


def steps_to(run: dict, share: float = 0.9) -> int:
    """The step of the first evaluation at which that share of the way from the first to the last held-out reward is done."""
    first, last = run["eval_reward"][0], run["eval_reward"][-1]
    way = [(reward - first) / ((last - first) or 1.0) for reward in run["eval_reward"]]
    return next(step for step, done in zip(run["step"], way) if done >= share or done == way[-1])


def pick(tried: list[dict]) -> float:
    """The learning rate of the run that ends highest."""
    return max(tried, key=lambda run: run["eval_reward"][-1])["lr"]


def mean_and_spread(values: list[float], form: str = ".2f") -> str:
    spread = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{spread}"


def table(results: dict) -> str:
    """Markdown: what each learning rate came to when tried; of the chosen one ("edge": lowest or highest) mean ± standard deviation."""
    lrs = ", ".join(f"{trial['lr']:.0e}" for trial in next(iter(next(iter(results.values())).values()))["tuning"])
    lines = [f"| task | script | {lrs} | lr | held-out reward | gold score | steps to 90 % of the gain | seconds | peak MiB |"]
    lines.append("|---" * 9 + "|")
    for task, scripts in results.items():
        for script, result in scripts.items():
            runs, lrs = result["runs"], [trial["lr"] for trial in result["tuning"]]
            gold = [run["eval_reward/gold_score"][-1] for run in runs if "eval_reward/gold_score" in run]
            edge = " (edge)" if len(lrs) > 1 and result["lr"] in (min(lrs), max(lrs)) else ""
            cells = [task, script, ", ".join(f"{trial['eval_reward']:.2f}" for trial in result["tuning"]), f"{result['lr']:.0e}{edge}"]
            cells += [mean_and_spread([run["eval_reward"][-1] for run in runs], ".3f"), mean_and_spread(gold) if gold else ""]
            cells += [mean_and_spread([steps_to(run) for run in runs], ".0f"), mean_and_spread([run["seconds"][-1] for run in runs], ".1f")]
            lines.append(f"| {' | '.join(cells)} | {max(run['peak_mib'] for run in runs):.0f} |")
    return "\n".join(lines) + "\n"


def draw(scripts: dict, path: Path) -> None:
    """Mean and standard deviation of the held-out reward against completions and seconds, and of a gold score."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    panels = [("completions", "eval_reward"), ("seconds", "eval_reward")]
    if all("eval_reward/gold_score" in run for result in scripts.values() for run in result["runs"]):
        panels.append(("completions", "eval_reward/gold_score"))
    figure = Figure((4.5 * len(panels) + 1, 4), layout="constrained")
    axes = figure.subplots(1, len(panels))
    for script, result in scripts.items():
        for axis, (x, y) in zip(axes, panels):
            columns = list(zip(*(run[y] for run in result["runs"])))
            mean = [statistics.mean(values) for values in columns]
            spread = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in columns]
            at = [statistics.mean(values) for values in zip(*(run[x] for run in result["runs"]))]
            (line,) = axis.plot(at, mean, label=f"{script}, lr {result['lr']:.0e}", linewidth=1.2)
            below, above = ([m + sign * s for m, s in zip(mean, spread)] for sign in (-1, 1))
            axis.fill_between(at, below, above, color=line.get_color(), alpha=0.15, linewidth=0)
            axis.set(xlabel=x, ylabel=y.replace("eval_reward/", "held-out ").replace("eval_", "held-out ").replace("_", " "))
    axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main(args: Args) -> None:
    start, rows = time.time(), rows_of_a_step(args.scripts)
    results, who = {task: {} for task in args.tasks}, [(task, script) for task in args.tasks for script in args.scripts]

    def trained(runs: list[tuple]) -> list[dict]:
        commands = []
        for task, script, lr, seed in runs:
            flags = f"{TASKS[task]} --seed {seed} --lr {lr:g} --num-steps {max(1, args.completions // rows[script])}"
            name = f"{task}-{script}-{lr:g}-{seed}-{args.completions}-{args.eval_every}"
            commands.append((name, [f"{script}.py", *flags.split(), "--eval-every", str(args.eval_every)], rows[script]))
        return [{"lr": lr, "seed": seed} | found for (_, _, lr, seed), found in zip(runs, train_all(args, commands))]

    tried, n = trained([(*key, lr, TUNING_SEED) for key in who for lr in args.lrs]), len(args.lrs)
    chosen = {key: tried[i * n : (i + 1) * n] for i, key in enumerate(who)}
    final = trained([(*key, pick(chosen[key]), seed) for key in who for seed in range(args.seeds)])
    for i, (task, script) in enumerate(who):
        tuning = [{"lr": run["lr"], "eval_reward": run["eval_reward"][-1]} for run in chosen[task, script]]
        runs = final[i * args.seeds : (i + 1) * args.seeds]
        results[task][script] = {"lr": runs[0]["lr"], "tuning_seed": TUNING_SEED, "tuning": tuning, "runs": runs}
    figures = facts(args.device) | {"seconds": round(time.time() - start), "tasks": results}
    (args.output_dir / "learning.json").write_text(json.dumps(figures) + "\n")
    (args.output_dir / "learning.md").write_text(table(results))
    for task in args.tasks:
        draw(results[task], args.output_dir / f"learning-{task}.png")
    print(table(results) + f"\n{args.output_dir}: learning.json, learning.md, learning-TASK.png")


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args, description=__doc__))
