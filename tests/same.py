"""Do two checkouts give the same numbers? All six scripts, by default and on addition, ten steps each.

Not part of the default run:

    git worktree add ../before COMMIT
    python tests/same.py ../before .             # two minutes on two cores
    python tests/same.py ../before . --steps 3

Every metric of every step is compared, times aside: equal to one millionth of its size, or to 1e-7 where it is about 0.
MEANT names what a change was meant to move, and why. Exit status 1 if anything else differs.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPTS = "reinforce", "rloo", "ppo", "grpo", "gspo", "cispo"
TASKS = {"reviews": [], "addition": ["--dataset", "tiny/addition.jsonl", "--reward-fn", "exact_match"]}
MEANT = {"kl_coef": "an adaptive coefficient, which PPO has no more"}  # metric: why it is another number, or gone
TIMES = "time_", "tokens_per_second"


def metrics_of(checkout: Path, script: str, flags: list[str], steps: int) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, f"{script}.py", *flags, "--num-steps", str(steps), "--seed", "0"]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [*command, "--output-dir", f"{folder}/run"],
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed in {checkout}:\n{done.stderr[-2000:]}")
        return [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]


def differences(before: list[dict], after: list[dict]) -> list[str]:
    found = [f"{len(before)} rows, then {len(after)}"] * (len(before) != len(after))
    for old, new in zip(before, after, strict=False):
        for name in sorted(old.keys() | new.keys()):
            if name in MEANT or name.startswith(TIMES):
                continue
            if name not in old or name not in new:
                found.append(f"step {old['step']}: {name} is only in the {'new' if name in new else 'old'} one")
            elif not math.isclose(old[name], new[name], rel_tol=1e-6, abs_tol=1e-7):
                found.append(f"step {old['step']}: {name} was {old[name]!r}, is {new[name]!r}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    args, failed = parser.parse_args(), 0
    for task, flags in TASKS.items():
        for script in SCRIPTS:
            before, after = (metrics_of(checkout, script, flags, args.steps) for checkout in (args.old, args.new))
            found = differences(before, after)
            failed += bool(found)
            equal = "bit for bit" if [*map(without_times, before)] == [*map(without_times, after)] else "to rounding"
            print(f"{script}.py on {task}: {'DIFFERS' if found else f'the same {equal}'}", flush=True)
            print("".join(f"    {line}\n" for line in found[:8]), end="")
    for name, why in MEANT.items():
        print(f"not compared: {name}, {why}")
    sys.exit(failed > 0)


def without_times(row: dict) -> dict:
    return {name: value for name, value in row.items() if not name.startswith(TIMES)}


if __name__ == "__main__":
    main()
