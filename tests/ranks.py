"""The same run in one process and on several ranks: what was sampled, the metrics and the trained weights, script by script.

    python tests/ranks.py            # every case below, on 2 and on 4 ranks, and resumed by another number of them; about 10 minutes
    python tests/ranks.py --quick    # one case per script, on 2 ranks; a signal; part of the default run of the tests
    python tests/ranks.py --lora     # adapters; needs peft

Most cases have 3 prompts a step, which ranks don't divide; all have completions of 1 token (the stop token) to 8, groups of equal rewards,
and pieces of work of uneven number. A helper process imports everything once and forks the ranks. Exit status 1 if anything differs.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed.checkpoint.state_dict  # noqa: E402, F401
import torch.distributed.fsdp  # noqa: E402, F401
from safetensors.torch import load_file  # noqa: E402

import cispo  # noqa: E402
import common  # noqa: E402
import grpo  # noqa: E402
import gspo  # noqa: E402
import ppo  # noqa: E402
import reinforce  # noqa: E402
import rloo  # noqa: E402

ALL = "--num-steps 3 --num-prompts 3 --group-size 4 --minibatch-size 8 --max-new-tokens 8 --microbatch-tokens 40 --eval-every 2 --kl-coef 0.05"
MORE = "--reward-model tiny/reward --no-gather-for-sampling --eval-samples 2"
CASES = [  # the first of each script is the quick one
    (reinforce, ""),
    (rloo, "--shard none"),
    (ppo, "--num-epochs 2 --shared-backbone"),
    (grpo, "--dynamic-sampling 3 --num-epochs 2 --no-gather-for-sampling --mask-truncated"),
    (gspo, MORE),
    (cispo, "--num-prompts 1 --gradient-checkpointing"),  # a rank without prompts
    (reinforce, MORE),
    (rloo, "--minibatch-size None --num-prompts 8 --microbatch-tokens 4096"),
    (ppo, MORE),
    (ppo, "--shard none --num-epochs 2 --entropy-coef 0.1 --normalize-rewards --minibatch-size 5"),
    (ppo, "--minibatch-size 1 --num-prompts 1 --kl-coef 0"),  # fewer rows than ranks; the KL of step 1 is rounding, which Adam would blow up
    (grpo, "--shard none --dynamic-sampling 2 --scale-rewards batch --is-correction-cap 2 --aggregation token"),
    (gspo, "--num-epochs 2 --overlong-buffer 4 --entropy-coef 0.1"),
    (cispo, "--shard none --num-epochs 2"),
]  # fmt: skip
LORA = [(grpo, "--lora-rank 4"), (ppo, "--lora-rank 4 --shared-backbone --shard none"), (rloo, "--lora-rank 4 --no-gather-for-sampling")]


def live(script, words: list[str], folder: Path, rank: int, size: int, port: int) -> None:
    """A rank of a run, as torchrun would start it. It leaves a hash of its weights, and rank 0 what was sampled in step 1."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    score, save_model, full_state, sampled, held = script.score, script.save_model, script.full_state, [], {}

    def noted_score(reward_fns, batch, step):
        if step == 1:
            sampled.append([batch["input_ids"], batch["mask"], batch["completions"]])
        return score(reward_fns, batch, step)

    def local_size(x) -> int:
        return (x.to_local() if size > 1 else x).numel()

    def noted_full_state(owner):
        if isinstance(owner, torch.optim.Optimizer):
            held["optimizer"] = sum(local_size(entries["exp_avg"]) for entries in owner.state.values())
        return full_state(owner)

    def noted_save_model(path, policy, *args):
        save_model(path, policy, *args)
        weights = [p.full_tensor() if size > 1 else p for p in policy.parameters()]
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in weights)).hexdigest()
        held["policy"] = sum(map(local_size, policy.parameters()))
        torch.save({"sampled": sampled, "hash": digest, "held": held}, folder / f"rank-{rank}.pt")

    script.score, script.save_model, script.full_state = noted_score, noted_save_model, noted_full_state
    sys.argv = [script.__file__, *words]
    common.launch(script.main, script.Args, script.__doc__)


def start(script, words: list[str], folder: Path, size: int) -> list[int]:
    """Fork all ranks of a run; their process ids."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(size):
        if not (child := os.fork()):
            code = 1
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                live(script, words, folder, rank, size, port)
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else print(end.code, file=sys.stderr) or 1
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    return children


def run(script, words: list[str], folder: Path, size: int, *more: str) -> None:
    """A run from its beginning, or with --resume from its newest checkpoint, to its end."""
    where = ["--resume" if folder.exists() else "--output-dir", str(folder)]
    finish(start(script, [*words, *more, *where], folder, size), f"{script.__name__}.py {' '.join(words)} on {size} ranks")


def finish(children: list[int], what: str) -> None:
    codes = [os.waitpid(child, 0)[1] for child in children]
    assert not any(codes), f"{what}: {codes}"


def metrics_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def same(a, b) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def difference(one: Path, other: Path, size: int, resumed_by: int | None, replicated: bool) -> tuple[float, float]:
    """The largest between the weights and, relative, between the metrics of two runs; what was sampled and the ranks' hashes must agree."""
    notes = [torch.load(other / f"rank-{rank}.pt", weights_only=True) for rank in range(resumed_by or size)]
    alone = torch.load(one / "rank-0.pt", weights_only=True)
    assert len({note["hash"] for note in notes}) == 1, "the ranks have different weights"
    for note in notes:
        if resumed_by is None:
            assert len(note["sampled"]) == len(alone["sampled"]), "another number of rounds was sampled in step 1"
            assert all(same(a, b) for x, y in zip(alone["sampled"], note["sampled"]) for a, b in zip(x, y)), "step 1 sampled something else"
    for part, total in alone["held"].items():  # weights and optimizer state are spread over the ranks, or a copy is on each
        held = [note["held"][part] for note in notes]
        assert held == [total] * len(held) or (sum(held) == total and max(held) < 1.5 * total / len(held)), (part, held, total)
        assert (held == [total] * len(held)) == (len(held) == 1 or replicated), (part, held)
    file = "adapter_model.safetensors" if (one / "final" / "adapter_model.safetensors").exists() else "model.safetensors"
    a, b = load_file(one / "final" / file), load_file(other / "final" / file)
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    rows, gap = [metrics_of(folder) for folder in (one, other)], 0.0
    assert [list(row) for row in rows[0]] == [list(row) for row in rows[1]], "other metrics were logged"
    for x, y in zip(*rows):
        for name in x:
            if not name.startswith(("time_", "tokens_per_second", "sampler_gap")):
                gap = max(gap, abs(x[name] - y[name]) / (1 + abs(x[name])))
    return max((a[k] - b[k]).abs().max().item() for k in a), gap


def a_signal_to_one_rank_stops_all(words: list[str], folder: Path) -> None:
    """After the step, with one checkpoint. In bfloat16, so that frozen models hold weights of two kinds."""
    children = start(grpo, [*words, "--dtype", "bfloat16", "--reward-model", "tiny/reward", "--output-dir", str(folder)], folder, 2)
    while not (folder / "metrics.jsonl").exists() or len((folder / "metrics.jsonl").read_text().splitlines()) < 2:
        time.sleep(0.1)
    os.kill(children[1], signal.SIGTERM)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
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
            runs = [(size, None), (size, 1 if size == 2 else 3), (1, size)]  # the second number of ranks resumes what the first began
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
                weights, metrics = difference(alone, other, first, then, "--shard none" in options)
                worst = max(worst, weights, metrics)
                how = f"{first} ranks" + (f", resumed on {then}" if then else "")
                print(f"{script.__name__}.py {options} on {how}: {weights:.1e} {metrics:.1e} ({time.time() - began:.1f} s)", flush=True)
                shutil.rmtree(other)
        shutil.rmtree(alone)
    if not lora:
        a_signal_to_one_rank_stops_all([*ALL.split(), *data, "--num-steps", "500"], folder / "stopped")
    shutil.rmtree(folder)
    print(f"the largest difference of a weight, or relative of a metric, is {worst:.1e}")
    sys.exit(worst > 1e-5)


if __name__ == "__main__":
    main()
