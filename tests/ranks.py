"""The same run in one process and on several ranks: what was sampled, the metrics and the trained weights.

    python tests/ranks.py            # every case below, on 2 and on 4 ranks, and resumed by another number; 10 minutes
    python tests/ranks.py --quick    # one case per script, on 2 ranks; a signal; part of the default run of the tests
    python tests/ranks.py --lora     # adapters; needs peft

Most cases have 3 prompts a step, which ranks do not divide; all have completions of 1 token (the stop token) to 8,
groups of equal rewards, and pieces of work of uneven number. This process imports everything and forks the ranks. Exit
status 1 if anything differs.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
from safetensors.torch import load_file

import cispo
import common
import grpo
import gspo
import ppo
import reinforce
import rloo

ALL = "--num-steps 3 --num-prompts 3 --group-size 4 --minibatch-size 8 --max-new-tokens 8 --microbatch-tokens 40"
ALL += " --eval-every 2 --kl-coef 0.05"
MORE = "--reward-model tiny/reward --eval-samples 2"
CASES = [  # the first of each script is the quick one
    (reinforce, MORE),
    (rloo, "--minibatch-size 5"),  # 5, 5 and 2 rows
    (ppo, "--num-epochs 2 --shared-backbone"),
    (grpo, "--dynamic-sampling 3 --num-epochs 2 --mask-truncated"),
    (gspo, "--minibatch-size 0 --microbatch-tokens 4096"),  # as few pieces of work as there are ranks
    (cispo, "--num-prompts 1 --minibatch-size 3 --gradient-checkpointing"),  # a rank without prompts; 3 rows and 1
    (reinforce, "--weighting reward-to-go --gamma 0.9"),
    (rloo, "--minibatch-size 0 --num-prompts 8 --microbatch-tokens 4096"),
    (ppo, MORE),
    (ppo, "--num-epochs 2 --entropy-coef 0.1 --normalize-rewards --minibatch-size 5"),
    (ppo, "--minibatch-size 1 --num-prompts 1 --kl-coef 0"),  # the KL of step 1 is rounding, which Adam would blow up
    (grpo, "--dynamic-sampling 2 --scale-rewards batch --is-correction-cap 2 --aggregation token"),
    (gspo, f"--num-epochs 2 --overlong-buffer 4 --entropy-coef 0.1 {MORE}"),
    (cispo, "--num-epochs 2"),
]
LORA = [(grpo, "--lora-rank 4"), (ppo, "--lora-rank 4 --shared-backbone"), (rloo, "--lora-rank 4")]


def live(script, words: list[str], folder: Path, rank: int, size: int, port: int) -> None:
    """A rank of a run, as torchrun would start it. It leaves what was sampled in step 1, a hash of its weights, and how
    many numbers of the weights and of the optimizer's state it holds."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    common.RANK, common.NUM_RANKS = rank, size
    generate, save_model, save_checkpoint = common.generate, common.save_model, common.save_checkpoint
    sampled, held = [], {}

    def noted_generate(*args, key, **kwargs):
        batch = generate(*args, key=key, **kwargs)
        if key[1:3] == ("sample", 1):
            sampled.append([batch["input_ids"], batch["mask"], batch["completions"]])
        return batch

    def local_size(tensors) -> int:
        return sum((x.to_local() if size > 1 else x).numel() for x in tensors)

    def noted_save_checkpoint(run_folder, step, trained, optimizer, *args):
        held["weights"] = local_size(trained.parameters())
        held["optimizer"] = local_size(entries["exp_avg"] for entries in optimizer.state.values())
        save_checkpoint(run_folder, step, trained, optimizer, *args)

    def noted_save_model(path, trained, *args):
        save_model(path, trained, *args)
        if path.name == "final":
            weights = [p.full_tensor() if size > 1 else p for p in trained.parameters()]
            digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in weights)).hexdigest()
            torch.save({"sampled": sampled, "hash": digest, "held": held}, folder / f"rank-{rank}.pt")

    common.generate, common.save_model = noted_generate, noted_save_model
    common.save_checkpoint = noted_save_checkpoint
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.argv = [script.__file__, *words]
    common.launch(script.main, script.Args, script.__doc__)


def start(script, words: list[str], folder: Path, size: int) -> list:
    """Fork all ranks of a run; their processes."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    places = [(script, words, folder, rank, size, port) for rank in range(size)]
    ranks = [multiprocessing.get_context("fork").Process(target=live, args=place) for place in places]
    for process in ranks:
        process.start()
    return ranks


def codes_of(ranks: list) -> list[int]:
    for process in ranks:
        process.join()
    return [process.exitcode for process in ranks]


def run(script, words: list[str], folder: Path, size: int, *more: str) -> None:
    """A run from its beginning, or with --resume from its newest checkpoint, to its end."""
    where = ["--resume" if folder.exists() else "--output-dir", str(folder)]
    what = f"{script.__name__}.py {' '.join(words)} on {size} ranks"
    finish(start(script, [*words, *more, *where], folder, size), what)


def finish(ranks: list, what: str) -> None:
    codes = codes_of(ranks)
    assert not any(codes), f"{what}: {codes}"


def metrics_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def same(a, b) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def difference(one: Path, other: Path, size: int, resumed_by: int | None) -> tuple[float, float]:
    """The largest between the weights and, relative, between the metrics of two runs.

    What was sampled and the ranks' hashes must agree, and weights and optimizer state be spread over the ranks.
    """
    notes = [torch.load(other / f"rank-{rank}.pt", weights_only=True) for rank in range(resumed_by or size)]
    alone = torch.load(one / "rank-0.pt", weights_only=True)
    assert len({note["hash"] for note in notes}) == 1, "the ranks have different weights"
    for note in notes:
        if resumed_by is None:
            assert len(note["sampled"]) == len(alone["sampled"]), "another number of rounds was sampled in step 1"
            for mine, theirs in zip(alone["sampled"], note["sampled"], strict=True):
                assert all(map(same, mine, theirs)), "step 1 sampled something else"
    for part, total in alone["held"].items():
        held = [note["held"][part] for note in notes]
        assert sum(held) == total and max(held) < 1.5 * total / len(held), (part, held, total)
    is_adapter = (one / "final" / "adapter_model.safetensors").exists()
    file = "adapter_model.safetensors" if is_adapter else "model.safetensors"
    a, b = load_file(one / "final" / file), load_file(other / "final" / file)
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    rows, gap = [metrics_of(folder) for folder in (one, other)], 0.0
    assert [list(row) for row in rows[0]] == [list(row) for row in rows[1]], "other metrics were logged"
    for x, y in zip(*rows, strict=True):
        for name in x:
            if not name.startswith(("time_", "tokens_per_second", "sampler_gap")):
                gap = max(gap, abs(x[name] - y[name]) / (1 + abs(x[name])))
    return max((a[k] - b[k]).abs().max().item() for k in a), gap


def a_signal_to_one_rank_stops_all(words: list[str], folder: Path) -> None:
    """After the step, with one checkpoint. In bfloat16, so that frozen models hold weights of two kinds."""
    words = [*words, "--dtype", "bfloat16", "--reward-model", "tiny/reward", "--output-dir", str(folder)]
    ranks = start(grpo, words, folder, 2)
    while not (folder / "metrics.jsonl").exists() or len((folder / "metrics.jsonl").read_text().splitlines()) < 2:
        time.sleep(0.1)
    os.kill(ranks[1].pid, signal.SIGTERM)
    codes = codes_of(ranks)
    (checkpoint,) = folder.glob("checkpoint-*")
    assert codes == [128 + signal.SIGTERM] * 2, codes
    assert checkpoint.name == f"checkpoint-{metrics_of(folder)[-1]['step']}", checkpoint
    print(f"a signal to one rank: {codes}, {checkpoint.name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--lora", action="store_true", help="the cases of an adapter, which need peft")
    quick, lora = vars(parser.parse_args()).values()
    cases, sizes = (LORA if lora else CASES[:6] if quick else CASES), (2,) if quick else (2, 4)
    folder, worst = Path(tempfile.mkdtemp()), 0.0
    rows = (ROOT / "tiny/addition.jsonl").read_text().splitlines(True)
    rows[1] = '{"prompt": "12+34=46", "answer": ""}\n'  # ends at once
    (folder / "data.jsonl").write_text("".join(rows[:5]))
    (folder / "data-eval.jsonl").write_text("".join(rows[:5]))
    data = ["--dataset", str(folder / "data.jsonl"), "--reward-fn", "exact_match"]
    for script, options in cases:
        words, alone = [*ALL.split(), *data, *options.split()], folder / "alone"
        began_alone = start(script, [*words, "--output-dir", str(alone)], alone, 1)  # beside the first of the others
        for size in sizes:
            # the second number of ranks resumes what the first began
            runs = [(size, None), (size, 1 if size == 2 else 3), (1, size)]
            for first, then in runs[2:] if quick and script is ppo else runs[:1] if quick else runs:
                began, other = time.time(), folder / "other"
                if then is None:
                    run(script, words, other, first)
                else:
                    run(script, words, other, first, "--num-steps", "2")
                    shutil.rmtree(other / "final")
                    run(script, words, other, then, "--num-steps", "3")
                finish(began_alone, f"{script.__name__}.py {options} alone")
                began_alone = []
                weights, metrics = difference(alone, other, first, then)
                worst = max(worst, weights, metrics)
                how = f"{first} ranks" + (f", resumed on {then}" if then else "")
                found = f"{weights:.1e} {metrics:.1e} ({time.time() - began:.1f} s)"
                print(f"{script.__name__}.py {options} on {how}: {found}", flush=True)
                shutil.rmtree(other)
        shutil.rmtree(alone)
    if not lora:
        a_signal_to_one_rank_stops_all([*ALL.split(), *data, "--num-steps", "500"], folder / "stopped")
    shutil.rmtree(folder)
    print(f"the largest difference of a weight, or relative of a metric, is {worst:.1e}")
    sys.exit(worst > 1e-5)


if __name__ == "__main__":
    main()
