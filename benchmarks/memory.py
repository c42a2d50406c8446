"""Bytes on each GPU, by arithmetic: does my model fit, and what takes the room?

    python benchmarks/memory.py --model-size 8B --gpus 8          # every script, at its peak while sampling and while updating
    python benchmarks/memory.py --table --gradient-checkpointing  # the README's table
    python benchmarks/memory.py --check                           # against measured peaks of runs on this machine's CPU; minutes

Weights, gradients and Adam's two moments are float32, 16 bytes a trained parameter and 4 a frozen one (2 in a matrix, with bfloat16
passes), divided by the number of GPUs (--shard none: not divided). On top comes the larger of two peaks. Sampling: the whole weights,
gathered (--no-gather-for-sampling: a layer and the embeddings), the cache of this GPU's completions, and one row of logits for each.
Updating: the gathered layer and embeddings with their gradients, what a microbatch's layers keep for the backward pass, and two copies
of its logits. bfloat16 passes keep a bfloat16 copy of every matrix. Not counted: CUDA itself (about 0.5 GB), fragments, and the host's
memory.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Shape:
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = True  # input and output embeddings


SHAPES = {
    "0.5B": Shape(24, 896, 4864, 14, 2, 64, 151936),  # Qwen2.5-0.5B
    "1.7B": Shape(28, 2048, 6144, 16, 8, 128, 151936),  # Qwen3-1.7B
    "8B": Shape(36, 4096, 12288, 32, 8, 128, 151936, tied=False),  # Qwen3-8B
    "32B": Shape(64, 5120, 25600, 64, 8, 128, 151936, tied=False),  # Qwen3-32B
    "30M": Shape(8, 384, 1024, 6, 2, 64, 32000),  # --check
}
SCRIPTS = "reinforce", "rloo", "ppo", "grpo", "gspo", "cispo"


@dataclass
class Args:
    model_size: Literal["0.5B", "1.7B", "8B", "32B", "30M"] = "8B"  # shapes of well-known models
    gpus: int = 8  # processes; the reward model, if any, is as large as the policy, and so is PPO's value model
    shard: Literal["full", "none"] = "full"
    gather_for_sampling: bool = True
    gradient_checkpointing: bool = False
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of the passes
    kl: bool | None = None  # a reference; None: each script's default
    reward_model: bool = False
    num_prompts: int = 16
    group_size: int = 8
    prompt_tokens: int = 256
    max_new_tokens: int = 1024
    microbatch_tokens: int = 4096
    table: bool = False
    check: bool = False


def matrices(s: Shape) -> int:
    """Weights of a layer's linear maps."""
    return s.hidden * s.head_dim * (2 * s.heads + 2 * s.kv_heads) + 3 * s.hidden * s.intermediate


def parameters(s: Shape) -> int:
    """All weights; biases and the norms of queries and keys are left out."""
    return s.layers * (matrices(s) + 2 * s.hidden) + s.hidden + s.vocabulary * s.hidden * (1 if s.tied else 2)


def frozen(s: Shape, dtype: str) -> int:
    """Bytes of a model that is not trained; an output matrix that is the input embeddings, too, stays float32."""
    return 4 * parameters(s) - (0 if dtype == "float32" else 2 * (s.layers * matrices(s) + (0 if s.tied else s.vocabulary * s.hidden)))


def kept_per_token(s: Shape, dtype: str) -> int:
    """Bytes that one layer keeps of a token for its backward pass, as transformers writes a Llama or a Qwen.

    Twice a norm's input, normalised and scaled; queries, keys (each as projected, half rotated and rotated) and values, the attention's
    output before and after its heads are joined; gate, up, silu(gate) and their product. In bfloat16 passes the norms, the rotated queries
    and keys stay float32, and what enters a matrix is kept in bfloat16 besides.
    """
    H, q, k, inner = s.hidden, s.heads * s.head_dim, s.kv_heads * s.head_dim, s.intermediate
    if dtype == "float32":
        return 4 * (6 * H + 5 * q + 4 * k + 4 * inner)
    return 4 * (6 * H + 2 * q + 2 * k) + 2 * (2 * H + 4 * q + 3 * k + 4 * inner)


def bytes_per_gpu(script: str, a: Args) -> dict[str, float]:
    """Bytes by purpose; "sampling" and "updating" are the two peaks, of which the larger counts in "peak"."""
    s, size = SHAPES[a.model_size], parameters(SHAPES[a.model_size])
    parts = a.gpus if a.shard == "full" else 1
    kl = a.kl if a.kl is not None else script not in ("gspo", "cispo")
    found = {"weights": 4 * size / parts, "gradients": 4 * size / parts, "optimizer": 8 * size / parts}
    found["reference"] = frozen(s, a.dtype) / parts if kl else 0.0
    found["reward model"] = frozen(s, a.dtype) / parts if a.reward_model else 0.0
    found["value model"] = 16 * size / parts if script == "ppo" else 0.0

    width = 4 if a.dtype == "float32" else 2
    copies = 0 if a.dtype == "float32" else 2 * (s.layers * matrices(s) + s.vocabulary * s.hidden)
    layer, ends = matrices(s) + 2 * s.hidden, s.vocabulary * s.hidden * (1 if s.tied else 2)
    rows = -(-a.num_prompts * a.group_size // a.gpus)
    found["cache"] = rows * (a.prompt_tokens + a.max_new_tokens) * s.layers * 2 * s.kv_heads * s.head_dim * width
    one_row = rows * s.vocabulary * (width + 4 + 4 + 8)  # logits, shifted, their exponentials, the float64 sums
    gathered = 4 * size if a.gather_for_sampling else 4 * (layer + ends)
    found["sampling"] = found["cache"] + one_row + copies + (gathered if a.gpus > 1 else 0)

    tokens = a.microbatch_tokens
    if a.gpus == 1 and not a.gradient_checkpointing and script != "ppo":  # prompts are read once for their completions
        completions = tokens * a.max_new_tokens * a.group_size / (a.prompt_tokens + a.group_size * a.max_new_tokens)
    else:
        completions = tokens * a.max_new_tokens / (a.prompt_tokens + a.max_new_tokens)
    models = 2 if script == "ppo" else 1  # the value model's pass is kept beside the policy's, for one backward pass
    kept, copies = kept_per_token(s, a.dtype), copies * models
    found["activations"] = models * tokens * (s.layers * 4 * s.hidden + kept if a.gradient_checkpointing else s.layers * kept)
    found["logits"] = completions * s.vocabulary * 8
    found["updating"] = found["activations"] + found["logits"] + copies + (8 * (2 * layer + ends) if a.gpus > 1 else 0)
    held = sum(found[name] for name in ("weights", "gradients", "optimizer", "reference", "reward model", "value model"))
    return found | {"peak": held + max(found["sampling"], found["updating"])}


def show(args: Args) -> None:
    names = list(bytes_per_gpu("ppo", args))
    print(f"{parameters(SHAPES[args.model_size]) / 1e9:.2f}B parameters on {args.gpus} GPU(s), GB on each")
    print(f"{'':<14}" + "".join(f"{script:>11}" for script in SCRIPTS))
    found = {script: bytes_per_gpu(script, args) for script in SCRIPTS}
    for name in names:
        print(f"{name:<14}" + "".join(f"{found[script][name] / 1e9:>11.1f}" for script in SCRIPTS))


def table(args: Args) -> None:
    """Markdown: the peak for each size and number of GPUs, GB on each GPU; scripts with the same numbers share a column."""
    kinds = {"grpo": "`reinforce.py` `rloo.py` `grpo.py`", "gspo": "`gspo.py` `cispo.py` (no reference)", "ppo": "`ppo.py`"}
    print("| model | GPUs | " + " | ".join(kinds.values()) + " |\n|---|---|---|---|---|")
    for size in ("0.5B", "1.7B", "8B", "32B"):
        for gpus in (1, 8, 64):
            peaks = [bytes_per_gpu(script, replace(args, model_size=size, gpus=gpus))["peak"] / 1e9 for script in kinds]
            print(f"| {size} | {gpus} | " + " | ".join(f"{peak:,.0f}" for peak in peaks) + " |")


# --- against measured peaks ---


RUN = """
import json, resource, sys
script, words, peaks = sys.argv[2], sys.argv[3:], []
sys.path.insert(0, sys.argv[1])
module = __import__(script)
note = lambda: peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
note()
summarize, sys.argv = module.summarize, [module.__file__, *words]
module.summarize = lambda *args: (summarize(*args), note())[0]
module.launch(module.main, module.Args, module.__doc__)
print("PEAK", json.dumps([peaks[0], peaks[-1]]))
"""


def check(args: Args) -> None:
    """Peaks over three steps of each script on this machine's CPU, imports subtracted, beside the arithmetic."""
    import speed  # makes a model that never stops, its tokenizer and its prompts

    s = SHAPES["30M"]
    a = replace(args, model_size="30M", gpus=1, dtype="float32", num_prompts=8, group_size=8, prompt_tokens=24, max_new_tokens=64)
    speed.SHAPES["30M"] = {"layers": s.layers, "hidden": s.hidden, "intermediate": s.intermediate, "heads": s.heads}
    speed.SHAPES["30M"] |= {"kv_heads": s.kv_heads, "vocabulary": s.vocabulary}
    with tempfile.TemporaryDirectory() as folder:
        speed.make({"folder": folder, "shape": "30M", "prompt_tokens": a.prompt_tokens, "stop": 0.0})
        words = f"--model {folder}/policy --dataset {folder}/prompts.jsonl --reward-fn {speed.__file__}:reward --num-steps 3 --eval-every 0"
        words += f" --max-new-tokens {a.max_new_tokens} --microbatch-tokens {a.microbatch_tokens} --minibatch-size None --device cpu"
        print(f"{'':<12}{'arithmetic, MB':>16}{'measured, MB':>16}{'ratio':>8}")
        for script in SCRIPTS:
            a = replace(a, num_prompts=64 if script == "ppo" else 8, group_size=1 if script == "ppo" else 8)
            flags = f"{words} --num-prompts {a.num_prompts} --group-size {a.group_size} --output-dir {folder}/{script}"
            command = [sys.executable, "-c", RUN, str(ROOT), script, *flags.split()]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(done.stdout[-2000:] + done.stderr[-2000:])
            imports, peak = json.loads(done.stdout.rpartition("PEAK ")[2])
            expected, found = bytes_per_gpu(script, a)["peak"] / 1e6, (peak - imports) / 1e6
            print(f"{script:<12}{expected:>16.0f}{found:>16.0f}{found / expected:>8.2f}", flush=True)


def main(args: Args) -> None:
    (check if args.check else table if args.table else show)(args)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args, description=__doc__))
