"""Bytes on each GPU, by arithmetic: does my model fit, and what takes the room?

    python benchmarks/memory.py --model-size 8B --gpus 8 --gradient-checkpointing

Weights, gradients and Adam's moments are float32: 16 bytes a trained parameter. A frozen one has 4, or 2 in a matrix
with bfloat16 passes. All are divided by the number of GPUs. On top comes the larger of two peaks. Sampling: the whole
weights, gathered, the cache, and a row of logits for each completion. Updating: a layer and the embeddings, gathered,
with their gradients, what the layers keep of a microbatch for the backward pass, and two copies of its logits. In both,
bfloat16 passes keep a bfloat16 copy of every matrix. Not counted: CUDA itself (about 0.5 GB), fragments, host memory.
"""

import itertools
from dataclasses import dataclass, replace
from typing import Literal

SCRIPTS = "grpo", "gspo", "ppo"  # reinforce and rloo take what grpo does, cispo what gspo does: no reference


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
}


@dataclass
class Args:
    model_size: Literal["0.5B", "1.7B", "8B", "32B"] = "8B"  # of the policy, a reward model and PPO's value model
    gpus: int = 8  # processes
    gradient_checkpointing: bool = False
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of the passes
    reward_model: bool = False
    num_prompts: int = 16
    group_size: int = 8  # PPO: 1, and as many more prompts
    prompt_tokens: int = 256
    max_new_tokens: int = 1024
    microbatch_tokens: int = 4096


def matrices(s: Shape) -> int:
    """Weights of a layer's linear maps."""
    return s.hidden * s.head_dim * (2 * s.heads + 2 * s.kv_heads) + 3 * s.hidden * s.intermediate


def parameters(s: Shape) -> int:
    """All weights; biases and the norms of queries and keys are left out."""
    return s.layers * (matrices(s) + 2 * s.hidden) + s.hidden + s.vocabulary * s.hidden * (1 if s.tied else 2)


def frozen(s: Shape, dtype: str) -> int:
    """Bytes of a model that is not trained; an output matrix that is the input embeddings, too, stays float32."""
    halved = s.layers * matrices(s) + (0 if s.tied else s.vocabulary * s.hidden)
    return 4 * parameters(s) - (0 if dtype == "float32" else 2 * halved)


def kept_per_token(s: Shape, dtype: str) -> int:
    """Bytes that a layer of transformers' Llama or Qwen keeps of a token for its backward pass.

    Twice a norm's input, normalised and scaled; queries, keys (each as projected, half rotated and rotated) and values;
    the attention's output before and after its heads are joined; gate, up, silu(gate) and their product. In bfloat16
    passes norms and rotated queries and keys stay float32, and what enters a matrix is kept in bfloat16 besides.
    """
    H, q, k, inner = s.hidden, s.heads * s.head_dim, s.kv_heads * s.head_dim, s.intermediate
    if dtype == "float32":
        return 4 * (6 * H + 5 * q + 4 * k + 4 * inner)
    return 4 * (6 * H + 2 * q + 2 * k) + 2 * (2 * H + 4 * q + 3 * k + 4 * inner)


def bytes_per_gpu(script: str, a: Args) -> dict[str, float]:
    """Bytes by purpose; "sampling" and "updating" are the two peaks, of which the larger counts in "peak"."""
    s, width = SHAPES[a.model_size], 4 if a.dtype == "float32" else 2
    size, still = parameters(s) / a.gpus, frozen(s, a.dtype) / a.gpus
    found = {"weights": 4 * size, "gradients": 4 * size, "optimizer": 8 * size}
    found["reference"] = 0.0 if script == "gspo" else still  # as by default
    found["reward model"] = still if a.reward_model else 0.0
    found["value model"] = 16 * size if script == "ppo" else 0.0
    held = sum(found.values())

    copies = 0 if a.dtype == "float32" else 2 * (s.layers * matrices(s) + s.vocabulary * s.hidden)
    prompts, group = (a.num_prompts * a.group_size, 1) if script == "ppo" else (a.num_prompts, a.group_size)
    fitting = 16 * a.microbatch_tokens // (group * (a.prompt_tokens + a.max_new_tokens))  # prompts sampled at once
    rows = group * min(-(-prompts // a.gpus), max(1, fitting))
    found["cache"] = rows * (a.prompt_tokens + a.max_new_tokens) * s.layers * 2 * s.kv_heads * s.head_dim * width
    one_row = rows * s.vocabulary * (width + 4 + 4 + 8)  # logits, shifted, their exponentials, the float64 sums
    gathered = 4 * parameters(s) if a.gpus > 1 else 0
    found["sampling"] = found["cache"] + one_row + copies + gathered

    tokens, shared = a.microbatch_tokens, group if a.gpus == 1 and not a.gradient_checkpointing else 1
    completions = tokens * shared * a.max_new_tokens / (a.prompt_tokens + shared * a.max_new_tokens)
    models = 2 if script == "ppo" else 1  # the value model's pass is kept beside the policy's, for one backward pass
    kept = kept_per_token(s, a.dtype)
    kept = s.layers * 4 * s.hidden + kept if a.gradient_checkpointing else s.layers * kept
    found["activations"] = models * tokens * kept
    found["logits"] = completions * s.vocabulary * 8
    layer, ends = matrices(s) + 2 * s.hidden, s.vocabulary * s.hidden * (1 if s.tied else 2)
    gathered = 8 * (2 * layer + ends) if a.gpus > 1 else 0
    found["updating"] = found["activations"] + found["logits"] + models * copies + gathered
    return found | {"peak": held + max(found["sampling"], found["updating"])}


def main(args: Args) -> None:
    """What takes the room; then, in Markdown, the peak for each size and number of GPUs. GB on each GPU."""
    found = {script: bytes_per_gpu(script, args) for script in SCRIPTS}
    print(f"{args.model_size} on {args.gpus} GPU(s)" + "".join(f"{script:>11}" for script in SCRIPTS))
    for name in found["ppo"]:
        print(f"{name:<16}" + "".join(f"{found[script][name] / 1e9:>11.1f}" for script in SCRIPTS))
    print("\n| model | GPUs | " + " | ".join(SCRIPTS) + " |\n" + "|---" * 5 + "|")
    for size, gpus in itertools.product(SHAPES, (1, 8, 64)):
        peaks = [bytes_per_gpu(script, replace(args, model_size=size, gpus=gpus))["peak"] for script in SCRIPTS]
        print(f"| {size} | {gpus} | " + " | ".join(f"{peak / 1e9:,.0f}" for peak in peaks) + " |")


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args, description=__doc__))
