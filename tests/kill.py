"""Kill short runs at random moments, resume each, and compare the end with that of a run never killed, bit for bit.

Compared are metrics and weights. A run that was killed before its first checkpoint begins anew.

    python tests/kill.py             # 100 kills; about two minutes
    python tests/kill.py --kills 10

All is imported once, and a child is forked per life, so that a life is short. Exit status 1 if anything differs.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from safetensors.torch import load_file

import cispo
import common
import grpo
import gspo
import ppo
import reinforce
import rloo

ROOT = Path(__file__).parents[1]
SCRIPTS = (ppo, grpo, reinforce, gspo, rloo, cispo)
STEPS = 8
FLAGS = f"--num-steps {STEPS} --num-prompts 2 --group-size 4 --minibatch-size 4 --max-new-tokens 5 --save-every 1"
FLAGS = f"{FLAGS} --eval-every 3 --reward-fn exact_match"


def start(script, words: list[str]) -> int:
    """The script's command line in a child; its process id."""
    if child := os.fork():
        return child
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        sys.argv = [script.__file__, *words]
        common.launch(script.main, script.Args, script.__doc__)
    finally:  # also after an error: the rest is the parent's
        if error := sys.exc_info()[1]:
            traceback.print_exception(error)
        os._exit(bool(error))


def outcome(folder: Path) -> tuple[list[dict], dict]:
    """Metrics without times, and the final weights."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(STEPS + 1)), [row["step"] for row in rows]
    rows = [{k: v for k, v in row.items() if not k.startswith(("time_", "tokens_per"))} for row in rows]
    return rows, load_file(folder / "final" / "model.safetensors")


def run(script, data: Path, folder: Path, rng: random.Random | None, budget: int = 0) -> tuple[int, int]:
    """Run to the end, killed at most budget times; the number of kills, and of those that hit a save."""
    words, kills, in_saves = ["--dataset", str(data), "--output-dir", str(folder), *FLAGS.split()], 0, 0
    while True:
        if not common.checkpoints(folder):
            shutil.rmtree(folder, ignore_errors=True)
        child = start(script, ["--resume", str(folder)] if folder.exists() else words)
        if kills < budget:
            time.sleep(rng.uniform(0.1, 0.8))
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        if os.WIFEXITED(status):
            if os.WEXITSTATUS(status):
                raise SystemExit(f"{script.__name__} could not go on after {kills} kills")
            return kills, in_saves
        kills, in_saves = kills + 1, in_saves + bool(list(folder.glob(".*.partial")))


def main(kills: int, seed: int = 0) -> int:
    """The number of kills made; AssertionError where a killed run ends otherwise than an unharmed one."""
    rng, done, in_saves = random.Random(seed), 0, 0
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        data = scratch / "few.jsonl"  # 5 prompts, so that epochs turn over
        data.write_text("".join((ROOT / "tiny/addition.jsonl").read_text().splitlines(True)[:5]))
        held_out = "".join((ROOT / "tiny/addition-eval.jsonl").read_text().splitlines(True)[:4])
        (scratch / "few-eval.jsonl").write_text(held_out)
        unharmed, n = {}, 0
        while done < kills:
            script = SCRIPTS[n % len(SCRIPTS)]
            if script not in unharmed:
                run(script, data, scratch / script.__name__, None)
                unharmed[script] = outcome(scratch / script.__name__)
            more, hits = run(script, data, scratch / f"killed-{n}", rng, min(12, kills - done))
            rows, weights = outcome(scratch / f"killed-{n}")
            assert rows == unharmed[script][0], script.__name__
            assert all(torch.equal(weights[k], v) for k, v in unharmed[script][1].items()), script.__name__
            done, in_saves, n = done + more, in_saves + hits, n + 1
            print(f"{script.__name__}: {more} kills, {hits} of them in a save; the same end", flush=True)
    print(f"{done} kills, {in_saves} of them in a save, {n} runs: all as if never killed")
    return done


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
