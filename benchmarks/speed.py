"""Seconds, tokens per second and peak memory of a step: ours, in turn with another checkout or with TRL's trainers.

    python benchmarks/speed.py --against ../before --only W1 W2 W3  # is it slower than what was before?
    python -m venv trl && trl/bin/pip install -r benchmarks/requirements.txt
    python benchmarks/speed.py --trl-python trl/bin/python --output benchmarks/speed.json  # CPU: an hour

A step is one rollout and one optimizer step over all its rows. All sides get the same model folder (random weights),
prompts, lengths, reward and learning rate, in turns, each measurement in a process of its own. What they share is the
reward function: it notes when it is called, and the high-water mark of the process (on cuda that of the allocator). So
a step lasts from one scoring to the next, with all that comes between, and memory is that up to the last scoring:
evaluation and saving at the end count for neither. The first two steps don't count. Tokens are without stop tokens.

Ours keep their defaults but for the microbatch, which changes no result. TRL as a user would set it for speed: the
batch in one piece, no gradient checkpointing, no logging or saving. It has no PPO any more.
"""

import itertools
import json
import math
import os
import resource
import statistics
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import learning  # no torch here, see there
import plot

FIELDS = "shape", "num_prompts", "group_size", "prompt_tokens", "max_new_tokens", "microbatch_tokens", "kl_coef", "stop"
WORKLOADS = {  # stop: the probability that a token ends its completion
    "W1": ("tiny", 16, 8, 16, 32, 8192, 0.0, 0.0),
    "W1k": ("tiny", 16, 8, 16, 32, 8192, 0.04, 0.0),
    "W2": ("135M", 2, 8, 64, 64, 1024, 0.0, 0.0),
    "W3": ("tiny", 16, 8, 16, 128, 2048, 0.0, 1 / 32),
    "W4": ("135M", 2, 8, 384, 64, 1024, 0.0, 0.0),
}
SHAPES = {  # layers, hidden, intermediate, heads, key-value heads, vocabulary; as tiny/policy, and as SmolLM2-135M
    "tiny": (4, 128, 256, 4, 2, 100),
    "135M": (30, 576, 1536, 9, 3, 49152),
}
PARTS = "generate", "score", "update"


@dataclass
class Args:
    only: tuple[Literal["W1", "W1k", "W2", "W3", "W4"], ...] = tuple(WORKLOADS)  # workloads
    algorithms: tuple[str, ...] = ("grpo", "rloo", "ppo")  # scripts
    against: Path | None = None  # another checkout
    trl_python: str | None = None  # interpreter of an environment with TRL
    rounds: int = 2  # times that the sides take turns
    steps: int = 5  # measured steps of each process
    device: str = "cpu"  # cpu, cuda
    dtype: str = "float32"  # of the passes: float32, bfloat16
    output: Path | None = None  # JSON file; what is not measured this time stays in it


# --- in processes of their own; a job is a workload and where and how it is to run ---


def reward(prompts: list[str], completions: list[str], rows: list[dict] | None = None, **_) -> list[float]:
    """A hash of the text, in [0, 1): nothing to learn, but no group is without a signal."""
    mark = {"at": time.perf_counter(), "rows": len(completions), "tokens": sum(len(x.split()) for x in completions)}
    mark["mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / learning.RSS_UNITS_IN_A_MIB
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        mark["mib"] = sys.modules["torch"].cuda.max_memory_allocated() / 2**20
    with open(os.environ["MARKS"], "a") as file:
        file.write(json.dumps(mark) + "\n")
    return [zlib.crc32(completion.encode()) % 1000 / 1000 for completion in completions]


def make(job: dict) -> None:
    """Model, tokenizer, reward model and prompts; a prompt of n words has n tokens.

    Completions of full length need a stop token that is never drawn: hidden feature 0 is a constant, so the stop
    token's row of the (tied) output matrix sets its logit, or, in W3, its probability.
    """
    import tokenizers
    import torch
    import transformers

    layers, hidden, intermediate, heads, kv_heads, V = SHAPES[job["shape"]]
    words = ["<stop>", "<pad>"] + [f"w{i}" for i in range(V - 2)]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"eos_token": "<stop>", "pad_token": "<pad>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    options = {"vocab_size": V, "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    options |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 2048}
    options |= {"tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1}
    config = transformers.LlamaConfig(**options, num_labels=1)
    torch.manual_seed(0)
    policy = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in policy.model.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
        embeddings = policy.get_input_embeddings().weight
        embeddings[:, 0] = 0.1
        constant = policy.model(torch.randint(2, V, (4, 32))).last_hidden_state[..., 0].mean()
        stop = math.log(job["stop"] / (1 - job["stop"]) * (V - 2)) if job["stop"] else -50.0
        embeddings[:2] = 0.0
        embeddings[:2, 0] = 0.1 + torch.tensor([stop, -50.0]) / constant
    reward_model = transformers.LlamaForSequenceClassification(config)
    for name, model in (("policy", policy), ("reward", reward_model)):
        model.save_pretrained(f"{job['folder']}/{name}")
        tokenizer.save_pretrained(f"{job['folder']}/{name}")
    ids = torch.randint(2, V, (512, job["prompt_tokens"])).tolist()
    rows = [json.dumps({"prompt": " ".join(words[i] for i in row)}) + "\n" for row in ids]
    Path(job["folder"], "prompts.jsonl").write_text("".join(rows))
    Path(job["folder"], "prompts-eval.jsonl").write_text(rows[0])


def train_with_trl(job: dict) -> None:
    """What our script of that name does, by TRL's trainer."""
    import datasets
    import transformers
    import trl

    Config, Trainer = (getattr(trl, job["algorithm"].upper() + kind) for kind in ("Config", "Trainer"))
    options = {"per_device_train_batch_size": job["num_prompts"] * job["group_size"], "max_steps": job["num_steps"]}
    options |= {"num_generations": job["group_size"], "max_completion_length": job["max_new_tokens"]}
    options |= {"gradient_accumulation_steps": 1, "gradient_checkpointing": False, "temperature": 1.0}
    options |= {"beta": job["kl_coef"], "use_cpu": job["device"] == "cpu", "bf16": job["dtype"] == "bfloat16"}
    options |= {"report_to": "none", "logging_strategy": "no", "save_strategy": "no", "learning_rate": 1e-6}
    config = Config(output_dir=job["folder"], model_init_kwargs={"dtype": "float32"}, **options)
    dataset = datasets.Dataset.from_json(f"{job['folder']}/prompts.jsonl", cache_dir=job["folder"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(f"{job['folder']}/policy", padding_side="left")
    Trainer(f"{job['folder']}/policy", reward, config, dataset, processing_class=tokenizer).train()


# --- in the process that measures ---


def command_of(checkout: Path, job: dict) -> list[str]:
    """A script of any checkout; its minibatch is the whole batch."""
    B = job["num_prompts"] * job["group_size"]
    if job["algorithm"] == "ppo":  # the reward function is there to note only
        how = f"--num-prompts {B} --group-size 1 --kl-coef 0.05 --value-lr 1e-6 --reward-weights 1 0"
        how += " --reward-model {folder}/reward"
    else:
        how = "--num-prompts {num_prompts} --group-size {group_size} --kl-coef {kl_coef}"
    how += " --model {folder}/policy --dataset {folder}/prompts.jsonl --max-new-tokens {max_new_tokens}"
    how += " --microbatch-tokens {microbatch_tokens} --num-steps {num_steps} --device {device} --dtype {dtype}"
    how += f" --minibatch-size {B} --lr 1e-6 --eval-every 0 --save-every 0 --reward-fn benchmarks/speed.py:reward"
    return [sys.executable, str(checkout / f"{job['algorithm']}.py"), *how.format(**job).split()]


def measure(words: list[str]) -> list[dict]:
    """What each step took, but for the first two."""
    with tempfile.TemporaryDirectory() as own:
        learning.run([*words, "--output-dir", f"{own}/run"], Path(own, "log"), MARKS=f"{own}/marks.jsonl")
        marks, rows = (plot.rows_of(Path(own, name)) for name in ("marks.jsonl", "run/metrics.jsonl"))
    rows_of_a_step = max(mark["rows"] for mark in marks)  # evaluations have fewer
    steps = []
    for before, after in itertools.pairwise(mark for mark in marks if mark["rows"] == rows_of_a_step):
        seconds = after["at"] - before["at"]
        steps.append({"seconds": seconds, "tokens_per_second": after["tokens"] / seconds, "peak_mib": after["mib"]})
    parts = [row for row in rows if "time_generate" in row][1:]
    for step, row in zip(steps, parts, strict=False):  # TRL has none
        step |= {part: row[f"time_{part}"] for part in PARTS}
    return steps[1:]


def pooled(rounds: list[list[dict]]) -> dict:
    """Median, smallest and largest over the steps of all rounds; of the high-water mark the highest."""
    steps = [step for steps in rounds for step in steps]
    columns = {name: [step[name] for step in steps] for name in steps[0]}
    found = {name: [statistics.median(x), min(x), max(x)] for name, x in columns.items()}
    return found | {"peak_mib": max(columns["peak_mib"]), "steps": len(steps)}


def compare(ours: list[list[dict]], theirs: list[list[dict]]) -> dict:
    """Ours over theirs: tokens per second, of the medians and in each round; the high-water mark."""
    pairs = [(ours, theirs), *(([a], [b]) for a, b in zip(ours, theirs, strict=True))]
    speed, *by_round = (pooled(a)["tokens_per_second"][0] / pooled(b)["tokens_per_second"][0] for a, b in pairs)
    return {"speed": speed, "by_round": by_round, "memory": pooled(ours)["peak_mib"] / pooled(theirs)["peak_mib"]}


def main(args: Args) -> None:
    about = learning.facts(args.device)
    sides = {"ours": partial(command_of, learning.ROOT)}
    if args.against:
        sides["before"] = partial(command_of, args.against.resolve())
        about["before"] = learning.commit_of(args.against)
    if args.trl_python:
        sides["trl"] = lambda job: [args.trl_python, __file__, "train_with_trl", json.dumps(job)]
        about["trl_requirements"] = Path(__file__).with_name("requirements.txt").read_text().split()
    print(json.dumps(about, indent=2))
    figures = json.loads(args.output.read_text()) if args.output and args.output.exists() else {}
    for name, algorithm in itertools.product(args.only, args.algorithms):
        workload = dict(zip(FIELDS, WORKLOADS[name], strict=True))
        job = workload | {"algorithm": algorithm, "device": args.device, "dtype": args.dtype}
        job["num_steps"] = args.steps + 2
        print(f"\n{name} {algorithm}: {workload}", flush=True)
        rounds = {side: [] for side in sides if side != "trl" or algorithm in ("grpo", "rloo")}
        with tempfile.TemporaryDirectory() as job["folder"]:
            learning.run([sys.executable, __file__, "make", json.dumps(job)], Path(job["folder"], "log"))
            for _, side in itertools.product(range(args.rounds), rounds):
                rounds[side].append(measure(sides[side](job)))
        found, ratios = {side: pooled(each) for side, each in rounds.items()}, {}
        for side, f in found.items():
            seconds = "{:.3f} s ({:.3f}..{:.3f})".format(*f["seconds"])
            parts = ", ".join(f"{part} {f[part][0]:.3f}" for part in PARTS if part in f)
            rates = f"{f['tokens_per_second'][0]:>7.0f} tokens/s{f['peak_mib']:>7.0f} MiB"
            print(f"  {side:<7}{seconds:<30}{rates}   {parts}", flush=True)
            if side != "ours":
                ratios[side] = ratio = compare(rounds["ours"], rounds[side])
                each = ", ".join(f"{x:.2f}" for x in ratio["by_round"])
                print(f"  ours / {side}: {ratio['speed']:.2f}x tokens/s ({each}), {ratio['memory']:.2f}x memory")
        found |= {"ours over": ratios, "run": about}
        figures.setdefault(name, {"workload": workload})[algorithm] = found
        if args.output:
            args.output.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] in (["make"], ["train_with_trl"]):
        globals()[sys.argv[1]](json.loads(sys.argv[2]))
    else:
        import tyro

        main(tyro.cli(Args, description=__doc__))
