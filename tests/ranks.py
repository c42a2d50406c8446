"""The same run in one process and on several ranks: what was sampled, the metrics and the trained weights, script by script.

    python tests/ranks.py            # every case below, on 2 and on 4 ranks; about N minutes
    python tests/ranks.py --quick    # one case per script, on 2 ranks

Every case has 3 prompts a step, which ranks don't divide, completions of 1 token (the stop token) to 8, groups of equal rewards,
and microbatches of uneven number. A helper process imports everything once and forks the ranks. Exit status 1 if anything differs.
"""

import argparse
import hashlib
import json
import os
import shutil
import socket
import sys
import tempfile
import time
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
    (ppo, "--minibatch-size 1 --num-prompts 1"),  # fewer rows than ranks
    (grpo, "--shard none --dynamic-sampling 2 --scale-rewards batch --is-correction-cap 2 --aggregation token"),
    (gspo, "--num-epochs 2 --overlong-buffer 4 --entropy-coef 0.1"),
    (cispo, "--shard none --num-epochs 2"),
]  # fmt: skip
LORA = [(grpo, "--lora-rank 4"), (ppo, "--lora-rank 4 --shared-backbone --shard none"), (rloo, "--lora-rank 4 --no-gather-for-sampling")]


def live(script, words: list[str], rank: int, size: int, port: int) -> None:
    """A rank of a run, as torchrun would start it. It leaves a hash of its weights, and rank 0 what was sampled in step 1."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    folder, score, save_model, sampled = Path(words[-1]), script.score, script.save_model, []

    def noted_score(reward_fns, batch, step):
        if step == 1:
            sampled.append([batch["input_ids"], batch["mask"], batch["completions"]])
        return score(reward_fns, batch, step)

    def noted_save_model(path, policy, *args):
        save_model(path, policy, *args)
        weights = [p.full_tensor() if size > 1 else p for p in policy.parameters()]
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in weights)).hexdigest()
        torch.save({"sampled": sampled, "hash": digest}, folder / f"rank-{rank}.pt")

    script.score, script.save_model = noted_score, noted_save_model
    sys.argv = [script.__file__, *words]
    common.launch(script.main, script.Args, script.__doc__)


def run(script, words: list[str], size: int) -> float:
    """Fork all ranks of a run and wait for them; seconds."""
    began = time.time()
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(size):
        if not (child := os.fork()):
            code = 1
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                live(script, words, rank, size, port)
                code = 0
            except SystemExit as end:
                print(end.code, file=sys.stderr)
            except BaseException:
                __import__("traceback").print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    assert not any(codes), f"{script.__name__}.py {' '.join(words)} on {size} ranks: {codes}"
    return time.time() - began


def metrics_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def same(a, b) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def difference(one: Path, other: Path, size: int) -> tuple[float, float]:
    """The largest between the weights and, relative, between the metrics of two runs; what was sampled and the ranks' hashes must agree."""
    notes = [torch.load(other / f"rank-{rank}.pt", weights_only=True) for rank in range(size)]
    alone = torch.load(one / "rank-0.pt", weights_only=True)
    assert len({note["hash"] for note in notes}) == 1, "the ranks have different weights"
    for note in notes:
        assert len(note["sampled"]) == len(alone["sampled"]), "another number of rounds was sampled in step 1"
        assert all(same(a, b) for x, y in zip(alone["sampled"], note["sampled"]) for a, b in zip(x, y)), "step 1 sampled something else"
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
    for script, options in cases:
        words = [*ALL.split(), "--dataset", str(folder / "data.jsonl"), "--reward-fn", "exact_match", *options.split(), "--output-dir"]
        alone = run(script, [*words, str(folder / "one")], 1)
        for size in sizes:
            seconds = run(script, [*words, str(folder / str(size))], size)
            weights, metrics = difference(folder / "one", folder / str(size), size)
            worst = max(worst, weights, metrics)
            print(f"{script.__name__}.py {options} on {size} ranks: weights {weights:.1e}, metrics {metrics:.1e}, {seconds:.1f} s ({alone:.1f} s alone)", flush=True)
            shutil.rmtree(folder / str(size))
        shutil.rmtree(folder / "one")
    shutil.rmtree(folder)
    print(f"the largest difference is {worst:.1e}")
    sys.exit(worst > 1e-5)


if __name__ == "__main__":
    main()
