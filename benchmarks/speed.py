"""Seconds, tokens per second and peak memory of a step, against TRL's trainers and against the floor of the machine.

    python benchmarks/speed.py                                   # ours alone
    python -m venv trl && trl/bin/pip install -r benchmarks/requirements.txt
    python benchmarks/speed.py --trl-python trl/bin/python       # both, in turn; CPU: an hour
    python benchmarks/speed.py --only W1 W3 --trl-python trl/bin/python  # minutes
    python benchmarks/speed.py --sweep                           # growth, memory over 200 steps, start-up; ours alone
    python benchmarks/speed.py --profile                         # where the time of a step goes; ours alone

One RL step is one rollout and one optimizer step over all its rows. Both sides get the same model folder (random weights), prompts,
lengths, reward and learning rate, nothing is cut from the distribution, and each measurement is a process of its own; the sides take
turns, so that noise hits both. A step lasts from the end of one update to the end of the next, logging included, evaluation and saving
not. The first steps of a process are not counted. Peak memory is the high-water mark of the process up to its last update (on cuda that
of the allocator). "generate" holds the tokenizer's work on both sides; "score" is the reward and every pass before the update.

Completions of full length need a stop token that is never drawn: hidden feature 0 is a constant, so the stop token's row of the (tied)
output matrix sets its logit. With another number it ends a completion with probability 1/32 at each token, which makes W3 ragged.

TRL as a user would set it for speed: the batch in one piece, no gradient checkpointing (its default is on), the same dtype as ours,
no logging, tracking or saving, its default optimizer (fused AdamW); its losses and all else are its defaults. Our scripts keep theirs,
but for the microbatch (which changes no result): all rows at once in W1, 1024 tokens with the larger model. PPO left TRL after 1.12, the
version to install for its figures (with `requests`, which it forgets to name); it always has a reference and a reward model, so ours gets
both, too, and it samples one completion of each of prompts x completions prompts.

The floor counts the floating-point operations of a step that reads each prompt once per group, in sampling and in training, and makes
logits where a completion token is predicted and nowhere else (2 per weight and token forward, 4 backward, and attention), over the rate
at which this machine multiplies matrices of these shapes; a decoding step takes at least the time of reading the weights and the cache.
"""

import importlib.util
import itertools
import json
import math
import os
import platform
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Args:
    only: tuple[Literal["W1", "W1k", "W2", "W3", "W4"], ...] = ("W1", "W1k", "W2", "W3", "W4")  # workloads
    algorithms: tuple[Literal["grpo", "rloo", "ppo"], ...] = ("grpo", "rloo", "ppo")  # scripts
    trl_python: str | None = None  # interpreter of an environment with TRL; None: only ours are measured
    rounds: int = 2  # times that the sides take turns
    steps: int | None = None  # measured steps of each process; None: 10 with the tiny model, 3 with the other
    device: str = "cpu"  # cpu, cuda
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the passes; trained weights are float32
    sweep: bool = False  # growth, memory over 200 steps and start-up time instead of workloads
    profile: bool = False  # shares of a step's time by kind of operation, under torch's profiler, instead of workloads
    output: str | None = None  # JSON; None: speed.json beside this file, or speed-ours.json, speed-sweep.json, speed-profile.json, ...


@dataclass
class Workload:
    shape: str  # of the model, a name in SHAPES
    num_prompts: int
    group_size: int
    prompt_tokens: int
    completion_tokens: int  # of every completion or, with a stop probability, at most
    speed: float = 2.0  # completion tokens per second, in those of TRL: what we aim at
    memory: float | None = None  # peak, in that of TRL: what we aim at
    kl_coef: float = 0.0
    stop: float = 0.0  # probability that a token ends its completion
    microbatch_tokens: int = 2048  # ours


WORKLOADS = {
    "W1": Workload("tiny", 16, 8, 16, 32, microbatch_tokens=8192),
    "W1k": Workload("tiny", 16, 8, 16, 32, kl_coef=0.04, microbatch_tokens=8192),
    "W2": Workload("135M", 2, 8, 64, 64, speed=2.2, memory=0.5, microbatch_tokens=1024),
    "W3": Workload("tiny", 16, 8, 16, 128, speed=3.0, memory=0.5, stop=1 / 32),
    "W4": Workload("135M", 2, 8, 384, 64, speed=4.0, memory=0.4, microbatch_tokens=1024),
}
SHAPES = {  # the tiny one has the layers of tiny/policy, the other is that of SmolLM2-135M; both tie input and output embeddings
    "tiny": {"layers": 4, "hidden": 128, "intermediate": 256, "heads": 4, "kv_heads": 2, "vocabulary": 100},
    "135M": {"layers": 30, "hidden": 576, "intermediate": 1536, "heads": 9, "kv_heads": 3, "vocabulary": 49152},
}
for width in (64, 256, 512):  # for --sweep
    SHAPES[f"width {width}"] = SHAPES["tiny"] | {"hidden": width, "intermediate": 2 * width}


def reward(prompts: list[str], completions: list[str], rows: list[dict] | None = None, **_) -> list[float]:
    """A hash of the text, in [0, 1): nothing to learn, but no group is without a signal."""
    return [zlib.crc32(completion.encode()) % 1000 / 1000 for completion in completions]


# --- children: each a process of its own, with a job (a dict) and a result (a dict) ---


def peak(device: str = "cpu") -> float:
    """High-water mark in MiB, of the process or of the GPU's allocator."""
    if device.startswith("cuda"):
        return importlib.import_module("torch").cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def make(job: dict) -> dict:
    """Model, tokenizer, reward model and prompts in the folder; a prompt of n words has n tokens."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

    folder, shape, V = Path(job["folder"]), SHAPES[job["shape"]], SHAPES[job["shape"]]["vocabulary"]
    words = ["<stop>", "<pad>"] + [f"w{i}" for i in range(V - 2)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<stop>", pad_token="<pad>")
    config = LlamaConfig(
        vocab_size=V, hidden_size=shape["hidden"], intermediate_size=shape["intermediate"], num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"], num_key_value_heads=shape["kv_heads"], max_position_embeddings=2048,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=0, pad_token_id=1, num_labels=1,
    )  # fmt: skip
    torch.manual_seed(0)
    policy, reward_model = LlamaForCausalLM(config), LlamaForSequenceClassification(config)
    with torch.no_grad():
        for layer in policy.model.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
        embeddings = policy.get_input_embeddings().weight
        embeddings[:, 0] = 0.1
        constant = policy.model(torch.randint(2, V, (4, 32))).last_hidden_state[..., 0].mean()
        for token, odds in (0, job["stop"] / (1 - job["stop"])), (1, 0.0):
            embeddings[token] = 0.0
            embeddings[token, 0] = 0.1 + (math.log(odds * (V - 2)) if odds else -50.0) / constant
    policy.save_pretrained(folder / "policy")
    reward_model.save_pretrained(folder / "reward")
    for name in "policy", "reward":
        tokenizer.save_pretrained(folder / name)
    ids = torch.randint(2, V, (512, job["prompt_tokens"])).tolist()
    rows = [json.dumps({"prompt": " ".join(words[i] for i in row)}) + "\n" for row in ids]
    (folder / "prompts.jsonl").write_text("".join(rows))
    (folder / "prompts-eval.jsonl").write_text(rows[0])
    return {"parameters": policy.num_parameters()}


def ours(job: dict) -> dict:
    """A script of the checkout, by its command line, with the end of every update noted. One lap is one step."""
    sys.path.insert(0, str(ROOT))
    script = importlib.import_module(job["algorithm"])
    result, marks = {"imports_mib": peak()}, []
    script.summarize = noted(script.summarize, lambda _: marks.append((time.perf_counter(), peak(job["device"]))))
    script.generate = noted(script.generate, lambda _: result.setdefault("startup", time.time() - job["started"]))
    flags = {name: job[name] for name in ("num_prompts", "group_size", "kl_coef", "microbatch_tokens", "device", "dtype", "output_dir")}
    flags |= {"model": job["folder"] + "/policy", "dataset": job["folder"] + "/prompts.jsonl", "num_steps": job["warmup"] + job["steps"]}
    flags |= {"max_new_tokens": job["completion_tokens"], "lr": 1e-6, "minibatch_size": None, "eval_every": 0}
    if job["algorithm"] == "ppo":
        flags |= {"reward_model": job["folder"] + "/reward", "value_lr": 1e-6}
    else:
        flags["reward_fn"] = f"{__file__}:reward"
    sys.argv = [script.__file__] + [str(x) for name, value in flags.items() for x in (f"--{name.replace('_', '-')}", value)]
    script.launch(script.main, script.Args, script.__doc__)
    rows = [json.loads(line) for line in (Path(job["output_dir"]) / "metrics.jsonl").read_text().splitlines()][1:]
    laps = [{name: row[f"time_{name}"] for name in ("generate", "score", "update")} for row in rows]
    B = job["num_prompts"] * job["group_size"]
    return result | measured(job, marks, laps, [row["completion_length"] * B for row in rows])


def profiled(job: dict) -> dict:
    """The last step of ours under torch's profiler: shares of its time by kind of operation, of the rollout and of what comes after it."""
    from torch.profiler import profile

    sys.path.insert(0, str(ROOT))
    script, running, spans = importlib.import_module(job["algorithm"]), [], []

    def switch(_) -> None:
        if running:
            (profiler, start), now = running.pop(), time.perf_counter()
            profiler.stop()
            spans.append(by_kind(profiler.key_averages(), now - start))
        (profiler := profile()).start()
        running.append((profiler, time.perf_counter()))

    script.generate, script.summarize = noted(script.generate, switch), noted(script.summarize, switch)
    ours(job)
    running.pop()[0].stop()
    return dict(zip(("generate", "update"), spans[-3:-1]))  # the last of all is the final evaluation


def by_kind(operations, seconds: float) -> dict:
    """Share of the seconds, by kind; what the operations leave is the interpreter's, and the profiler's own."""
    found = dict.fromkeys(("matrix products", "attention", "other operations"), 0.0)
    for operation in operations:
        kind = "matrix products" if re.fullmatch("aten::(add|b|baddb)?mm", operation.key) else "other operations"
        found["attention" if "attention" in operation.key else kind] += operation.self_cpu_time_total / 1e6 / seconds
    return found | {
        "between them": 1 - sum(found.values()),
        "operations": sum(operation.count for operation in operations if operation.key.startswith("aten::")),
        "seconds": seconds,
    }


def noted(fn: Callable, note: Callable) -> Callable:
    """fn, with note(its result) called after it."""

    def call(*args, **kwargs):
        result = fn(*args, **kwargs)
        note(result)
        return result

    return call


def measured(job: dict, marks: list[tuple[float, float]], laps: list[dict], tokens: list[float]) -> dict:
    """The steps after the warm-up: seconds, their split, completion tokens; and the high-water mark after each step."""
    seconds = [after[0] - before[0] for before, after in itertools.pairwise(marks)]
    return {
        "seconds": seconds[job["warmup"] - 1 :],
        "tokens": tokens[job["warmup"] :],
        "peaks_mib": [mib for _, mib in marks],
    } | {name: [lap[name] for lap in laps[job["warmup"] :]] for name in laps[0]}


def theirs(job: dict) -> dict:
    """A trainer of TRL, with timers around its rollout and its sampling."""
    import torch
    import trl
    from datasets import load_dataset
    from transformers import AutoTokenizer, TrainerCallback

    if job["algorithm"] == "ppo":
        from trl.experimental.ppo import PPOTrainer  # noqa: F401
    else:
        Config, Trainer = (getattr(trl, job["algorithm"].upper() + kind) for kind in ("Config", "Trainer"))
    imports, policy, B = peak(), job["folder"] + "/policy", job["num_prompts"] * job["group_size"]
    options = {
        "output_dir": job["output_dir"], "per_device_train_batch_size": B, "gradient_accumulation_steps": 1, "learning_rate": 1e-6,
        "lr_scheduler_type": "constant", "gradient_checkpointing": False, "bf16": job["dtype"] == "bfloat16", "report_to": "none",
        "use_cpu": job["device"] == "cpu", "logging_strategy": "no", "save_strategy": "no", "disable_tqdm": True, "temperature": 1.0,
    }  # fmt: skip
    dataset = load_dataset("json", data_files=job["folder"] + "/prompts.jsonl", split="train", cache_dir=job["output_dir"])
    tokenizer = AutoTokenizer.from_pretrained(policy, padding_side="left")
    marks, laps, tokens, lap = [], [], [], {}

    def now() -> float:
        if job["device"] != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    class Marks(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            marks.append((now(), peak(job["device"])))
            generate, rollout = lap.pop("generate"), lap.pop("rollout")
            update = marks[-1][0] - lap.pop("scored")
            laps.append({"generate": generate, "score": rollout - generate, "update": update})

    def timed(name: str, fn: Callable) -> Callable:
        def call(*args, **kwargs):
            start = now()
            result = fn(*args, **kwargs)
            lap.update({name: now() - start, "scored": now()})
            return result

        return call

    def counted(prompts, completions, completion_ids, **_):
        tokens.append(sum(map(len, completion_ids)))
        return reward(prompts, completions)

    if job["algorithm"] == "ppo":
        trainer = ppo_trainer(job, options, tokenizer, dataset, timed, lap, tokens, now)
    else:
        options |= {"max_steps": job["warmup"] + job["steps"], "num_generations": job["group_size"], "beta": job["kl_coef"]}
        options |= {"max_completion_length": job["completion_tokens"], "model_init_kwargs": {"dtype": "float32"}}
        trainer = Trainer(policy, counted, Config(**options), dataset, processing_class=tokenizer)
        trainer._generate = timed("generate", trainer._generate)
        trainer._generate_and_score_completions = timed("rollout", trainer._generate_and_score_completions)
    trainer.add_callback(Marks())
    trainer.train()
    return {"imports_mib": imports} | measured(job, marks, laps, tokens)


def ppo_trainer(job: dict, options: dict, tokenizer, dataset, timed: Callable, lap: dict, tokens: list, now: Callable):
    """TRL's PPOTrainer, up to 1.12. Its scoring ends where its first microbatch begins."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    B, P = options["per_device_train_batch_size"], job["prompt_tokens"]
    policy, reference = (AutoModelForCausalLM.from_pretrained(job["folder"] + "/policy", dtype="float32") for _ in range(2))
    reward_model, value_model = (AutoModelForSequenceClassification.from_pretrained(job["folder"] + "/reward") for _ in range(2))
    config = PPOConfig(
        **options, total_episodes=(job["warmup"] + job["steps"]) * B, num_ppo_epochs=1, num_mini_batches=1, num_sample_generations=0,
        local_rollout_forward_batch_size=B, response_length=job["completion_tokens"], stop_token="eos", kl_coef=job["kl_coef"],
    )  # fmt: skip
    dataset = dataset.map(lambda row: {"input_ids": tokenizer(row["prompt"]).input_ids}, remove_columns="prompt")
    trainer = PPOTrainer(config, tokenizer, policy, reference, reward_model, dataset, value_model, eval_dataset=dataset.select([0]))

    def count(result) -> None:
        stops = (result[0][:, P:] == tokenizer.eos_token_id).long()
        tokens.append(int((stops.cumsum(1) - stops == 0).sum()))
        lap["started"] = lap["scored"] - lap["generate"]

    def scored(_) -> None:
        if "started" in lap:
            lap.update(rollout=now() - lap.pop("started"), scored=now())

    ppo_trainer.batch_generation = noted(timed("generate", ppo_trainer.batch_generation), count)
    trainer.accelerator.accumulate = noted(trainer.accelerator.accumulate, scored)
    return trainer


def rates(job: dict) -> dict:
    """The best of several tries: floating-point operations a second at the layers' and the vocabulary's shapes, bytes read a second."""
    import torch

    shape, options = SHAPES[job["shape"]], {"device": job["device"], "dtype": getattr(torch, job["dtype"])}
    H, I, kv = shape["hidden"], shape["intermediate"], shape["hidden"] * shape["kv_heads"] // shape["heads"]

    def fastest(fn: Callable, *inputs) -> float:
        seconds = []
        for _ in range(8):
            start = time.perf_counter()
            fn(*inputs)
            if job["device"] != "cpu":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    def multiply(rows: int, shapes: list[tuple[int, int]]) -> float:
        seconds = sum(fastest(torch.nn.functional.linear, torch.randn(rows, n, **options), torch.randn(m, n, **options)) for n, m in shapes)
        return sum(2 * rows * n * m for n, m in shapes) / seconds

    big = torch.randn(2**18, 1024, **options)
    reading = min(fastest(torch.mv, big, big[0]), fastest(torch.sum, big))
    return {
        "layers": multiply(2048, [(H, H), (H, 2 * kv), (H, H), (H, 2 * I), (I, H)]),
        "vocabulary": multiply(512, [(H, shape["vocabulary"])]),
        "bandwidth": big.nbytes / reading,
    }


def versions(job: dict) -> dict:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in "torch", "transformers", "tokenizers", "trl", "accelerate", "datasets":
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            pass
    has_ppo = "trl" in found and importlib.util.find_spec("trl.experimental.ppo") is not None
    return {"versions": found, "has_ppo": has_ppo, "threads": importlib.import_module("torch").get_num_threads()}


# --- the parent ---


def run(child: Callable, python: str, job: dict) -> dict:
    """The child's result, from a process of its own. The parent stays small: Linux counts it in the child's high-water mark."""
    job = job | {"output_dir": tempfile.mkdtemp(dir=job["folder"]), "started": time.time()}
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with open(job["output_dir"] + "/log", "w+") as log:
        command = [python, __file__, "child", child.__name__, json.dumps(job)]
        if subprocess.run(command, check=False, stdout=log, stderr=log, env=environment).returncode:
            log.seek(0)
            sys.exit(f"{child.__name__} failed with {job}\n" + log.read()[-4000:])
    result = json.loads((Path(job["output_dir"]) / "result.json").read_text())
    shutil.rmtree(job["output_dir"])  # a run folder at W2 holds 3 GB
    return result


def pooled(results: list[dict]) -> dict:
    """Medians over the steps of all rounds with their spread, and the highest of the high-water marks."""
    figures = {"rounds": len(results), "steps": sum(len(r["seconds"]) for r in results)}
    for name in "seconds", "generate", "score", "update":
        figures[name] = spread([x for r in results for x in r[name]])
    figures["tokens_per_second"] = spread([t / s for r in results for t, s in zip(r["tokens"], r["seconds"])])
    return figures | {"peak_mib": max(r["peaks_mib"][-1] for r in results), "imports_mib": max(r["imports_mib"] for r in results)}


def spread(x: list[float]) -> list[float]:
    """Median, smallest, largest."""
    return [statistics.median(x), min(x), max(x)]


def floor(w: Workload, parameters: int, rates: dict, bytes_per_weight: int) -> dict:
    """Seconds that sampling and updating need at least."""
    s, N, B, P, T = SHAPES[w.shape], w.num_prompts, w.num_prompts * w.group_size, w.prompt_tokens, w.completion_tokens
    L, H, V, kv = s["layers"], s["hidden"], s["vocabulary"], s["hidden"] * s["kv_heads"] // s["heads"]
    linear = L * (2 * H * H + 2 * H * kv + 3 * H * s["intermediate"])  # weights that each token meets

    def forward(tokens: int, context: int, predicted: int) -> float:
        """tokens read, the sum over them of what each attends to, and how many of them predict a completion token."""
        return (2 * linear * tokens + 4 * L * H * context) / rates["layers"] + 2 * H * V * predicted / rates["vocabulary"]

    prompt, completion = P * (P + 1) // 2, sum(range(P + 1, P + T))  # the last token is not read
    generate = forward(N * P, N * prompt, N)
    for t in range(1, T):
        cache = 2 * L * kv * (N * P + B * t)
        generate += max(forward(B, B * (P + t), B), (linear + H * V + cache) * bytes_per_weight / rates["bandwidth"])
    adam = 7 * 4 * parameters / rates["bandwidth"]  # reads weight, gradient and two moments, writes weight and moments
    return {"generate": generate, "update": 3 * forward(N * P + B * (T - 1), N * prompt + B * completion, N + B * (T - 1)) + adam}


def job_of(w: Workload, folder: str, args: Args, algorithm: str = "grpo", **changed) -> dict:
    job = asdict(w) | {"folder": folder, "algorithm": algorithm, "device": args.device, "dtype": args.dtype}
    tiny = w.shape != "135M"
    job |= {"warmup": 2 if tiny else 1, "steps": args.steps or (10 if tiny else 3)}
    if algorithm == "ppo":
        job |= {"num_prompts": w.num_prompts * w.group_size, "group_size": 1, "kl_coef": 0.05}
    return job | changed


def measure(args: Args, folder: Path, theirs_has_ppo: bool) -> dict:
    """Both sides of every workload, printed as they come."""
    figures = {}
    for name in args.only:
        w = WORKLOADS[name]
        (folder / name).mkdir()
        job = job_of(w, str(folder / name), args)
        parameters = run(make, sys.executable, job)["parameters"]
        lengths = f"{w.prompt_tokens} + {'at most ' if w.stop else ''}{w.completion_tokens} tokens"
        print(f"\n{name}: {w.shape}, {parameters / 1e6:.2f}M parameters, {w.num_prompts} x {w.group_size}, {lengths}, KL {w.kl_coef:g}")
        print(
            f"{'':<11}{'s/step (min..max)':>24}{'generate':>10}{'score':>8}{'update':>8}{'tokens/s (min..max)':>24}{'MiB':>8}{'imports':>9}"
        )
        figures[name] = {"workload": asdict(w), "parameters": parameters}
        for algorithm in args.algorithms:
            if algorithm == "ppo" and w.kl_coef:
                continue  # it has the KL in W1, too
            sides = {"ours": (ours, sys.executable)}
            if args.trl_python and (algorithm != "ppo" or theirs_has_ppo):
                sides["trl"] = theirs, args.trl_python
            results = {side: [] for side in sides}
            for _ in range(args.rounds):
                for side, (child, python) in sides.items():
                    results[side].append(run(child, python, job_of(w, str(folder / name), args, algorithm)))
            figures[name][algorithm] = {side: pooled(r) for side, r in results.items()}
            for side, f in figures[name][algorithm].items():
                print_row(f"{side} {algorithm}", f)
            if "trl" in sides:
                figures[name][algorithm]["ratio"] = ratio = compare(results, figures[name][algorithm])
                aims = f"aims: {w.speed:g}x" + (f", {w.memory:g}x" if w.memory else "")
                (speed, low, high), memory = ratio["speed"], ratio["memory"]
                print(f"    ours / trl: {speed:.2f}x tokens/s ({low:.2f}..{high:.2f} by round), {memory:.2f}x peak memory; {aims}")
        if not w.stop:  # else the lengths, and with them the work, are drawn
            figures[name]["rates"] = found = run(rates, sys.executable, job)
            figures[name]["floor"] = least = floor(w, parameters, found, 4 if args.dtype == "float32" else 2)
            at = f"{found['layers'] / 1e9:.0f} and {found['vocabulary'] / 1e9:.0f} GFLOP/s, {found['bandwidth'] / 1e9:.1f} GB/s"
            print(f"    floor at {at}: generate {least['generate']:.2f} s, update {least['update']:.2f} s")
            for algorithm in [a for a in args.algorithms if a != "ppo"]:
                for side in [side for side in figures[name][algorithm] if side != "ratio"]:
                    shares = [f"{lap} {least[lap] / figures[name][algorithm][side][lap][0]:.0%}" for lap in least]
                    print(f"    {side} {algorithm} reaches of the floor's speed: {', '.join(shares)}")
    return figures


def print_row(name: str, f: dict) -> None:
    seconds, tokens = ("{:.3g} ({:.3g}..{:.3g})".format(*f["seconds"]), "{:.0f} ({:.0f}..{:.0f})".format(*f["tokens_per_second"]))
    laps = f"{f['generate'][0]:>10.3f}{f['score'][0]:>8.3f}{f['update'][0]:>8.3f}"
    print(f"{name:<11}{seconds:>24}{laps}{tokens:>24}{f['peak_mib']:>8.0f}{f['imports_mib']:>9.0f}", flush=True)


def compare(results: dict, figures: dict) -> dict:
    """Ratio of the medians, and of each round's own; memory as the ratio of the high-water marks."""
    speed = figures["ours"]["tokens_per_second"][0] / figures["trl"]["tokens_per_second"][0]
    by_round = [pooled([a])["tokens_per_second"][0] / pooled([b])["tokens_per_second"][0] for a, b in zip(results["ours"], results["trl"])]
    return {"speed": [speed, min(by_round), max(by_round)], "memory": figures["ours"]["peak_mib"] / figures["trl"]["peak_mib"]}


def profiles(args: Args, folder: Path) -> dict:
    """Shares of the time of ours, by kind of operation. The profiler slows small operations most."""
    figures = {}
    print(f"\n{'':<20}{'matrix products':>17}{'attention':>11}{'other operations':>18}{'between them':>14}{'operations':>12}{'seconds':>9}")
    for name in args.only:
        (folder / name).mkdir()
        run(make, sys.executable, job_of(WORKLOADS[name], str(folder / name), args))
        figures[name] = {}
        for algorithm in args.algorithms:
            job = job_of(WORKLOADS[name], str(folder / name), args, algorithm, warmup=1, steps=1)
            figures[name][algorithm] = run(profiled, sys.executable, job)
            for lap, f in figures[name][algorithm].items():
                shares = f"{f['matrix products']:>17.0%}{f['attention']:>11.0%}{f['other operations']:>18.0%}{f['between them']:>14.0%}"
                print(f"{f'{name} {algorithm} {lap}':<20}{shares}{f['operations']:>12,}{f['seconds']:>9.2f}")
    return figures


def sweep(args: Args, folder: Path) -> dict:
    """How time and memory of grpo.py grow, from W1: one thing changes at a time. A slope of 1 is proportional."""
    base, sweeps, figures = WORKLOADS["W1"], {}, {}
    sweeps["num_prompts"] = [replace(base, num_prompts=n) for n in (8, 16, 32, 64)]
    sweeps["group_size"] = [replace(base, group_size=n) for n in (4, 8, 16, 32)]
    sweeps["completion_tokens"] = [replace(base, completion_tokens=n) for n in (16, 32, 64, 128, 256)]
    sweeps["parameters"] = [replace(base, shape=shape) for shape in ("width 64", "tiny", "width 256", "width 512")]
    models = {}
    for shape in ("tiny", "width 64", "width 256", "width 512"):
        (at := folder / shape.replace(" ", "-")).mkdir()
        models[shape] = str(at), run(make, sys.executable, job_of(replace(base, shape=shape), str(at), args))["parameters"]
    for name, workloads in sweeps.items():
        print(f"\n{name:>18}{'s/step':>10}{'generate':>10}{'update':>10}{'MiB over imports':>18}")
        points = figures[name] = []
        for w in workloads:
            f = pooled([run(ours, sys.executable, job_of(w, models[w.shape][0], args)) for _ in range(args.rounds)])
            x = models[w.shape][1] if name == "parameters" else getattr(w, name)
            points.append({"x": x} | f)
            print(
                f"{x:>18}{f['seconds'][0]:>10.3f}{f['generate'][0]:>10.3f}{f['update'][0]:>10.3f}{f['peak_mib'] - f['imports_mib']:>18.0f}"
            )
        slopes = {lap: slope([p["x"] for p in points], [p[lap][0] for p in points]) for lap in ("seconds", "generate", "update")}
        print(f"{'log-log slope':>18}{slopes['seconds']:>10.2f}{slopes['generate']:>10.2f}{slopes['update']:>10.2f}", flush=True)
        figures[name + "_slopes"] = slopes
    result = run(ours, sys.executable, job_of(base, models["tiny"][0], args, steps=200, warmup=1))
    figures["peak_mib_at_step"] = {step: result["peaks_mib"][step - 1] for step in (2, 20, 100, 200)}
    print("\nhigh-water mark: " + ", ".join(f"{mib:.0f} MiB after step {step}" for step, mib in figures["peak_mib_at_step"].items()))
    once = [replace(base, num_prompts=n, completion_tokens=1) for n in (16, 16, 16)]
    figures["startup"] = spread([run(ours, sys.executable, job_of(w, models["tiny"][0], args, steps=1))["startup"] for w in once])
    print("start-up, from the start of the process to its first token: {:.2f} s ({:.2f}..{:.2f})".format(*figures["startup"]))
    return figures


def draw(figures: dict, path: Path) -> None:
    """Seconds of a step of GRPO as bars, ours over TRL's over the floor's, each workload as shares of TRL's step."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    works = [name for name in WORKLOADS if "trl" in figures.get(name, {}).get("grpo", {})]
    fig, axes = pyplot.subplots(len(works), 1, figsize=(8, 1.1 * len(works)), sharex=True, squeeze=False)
    colours = {"generate": "tab:blue", "score": "tab:orange", "update": "tab:green", "other": "lightgrey"}
    for ax, name in zip(axes[:, 0], works):
        f = figures[name]
        bars = {side: {lap: f["grpo"][side][lap][0] for lap in list(colours)[:3]} for side in ("trl", "ours")}
        for side, laps in bars.items():
            laps["other"] = max(0.0, f["grpo"][side]["seconds"][0] - sum(laps.values()))
        bars = ({"floor": f["floor"]} if "floor" in f else {}) | {"ours": bars["ours"], "TRL": bars["trl"]}
        whole = f["grpo"]["trl"]["seconds"][0]
        for row, laps in enumerate(bars.values()):
            left = 0.0
            for lap, seconds in laps.items():
                ax.barh(row, seconds / whole, left=left, color=colours[lap], label=lap if ax is axes[0, 0] and row == 1 else None)
                left += seconds / whole
            ax.text(left + 0.01, row, f"{left * whole:.3g} s", va="center", fontsize=8)
        ax.set_yticks(range(len(bars)), list(bars), fontsize=8)
        ax.set_ylabel(name, rotation=0, labelpad=18)
    axes[-1, 0].set_xlabel("share of TRL's step")
    axes[0, 0].set_xlim(0, 1.15)
    fig.legend(loc="upper center", ncols=4, fontsize=8)
    fig.savefig(path, dpi=110, bbox_inches="tight")


def slope(x: list[float], y: list[float]) -> float:
    return statistics.linear_regression([math.log(v) for v in x], [math.log(v) for v in y]).slope


def git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], check=False, capture_output=True, text=True).stdout.strip()


def facts(device: str) -> dict:
    """What belongs beside every figure: the command, the commit, the day and the machine."""
    commit = git("describe", "--always", "--dirty", "--abbrev=12")
    return {"command": " ".join(["python", *sys.argv]), "commit": commit, "date": time.strftime("%Y-%m-%d"), "machine": machine(device)}


def machine(device: str) -> dict:
    names = [line.split(":")[1].strip() for line in read("/proc/cpuinfo").splitlines() if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"processor": (names or [platform.processor()])[0], "cores": os.cpu_count(), "memory_gib": round(memory), "device": device}


def read(path: str) -> str:
    return Path(path).read_text() if Path(path).exists() else ""


def main(args: Args) -> None:
    sys.stdout.reconfigure(line_buffering=True)  # a log file shows each row as it comes
    if args.profile and (args.sweep or args.device != "cpu"):
        sys.exit("error: --profile shares out the processor's time: leave --sweep out and use --device cpu")
    with tempfile.TemporaryDirectory() as folder:
        us = run(versions, sys.executable, {"folder": folder})
        alone = args.sweep or args.profile
        them = run(versions, args.trl_python, {"folder": folder}) if args.trl_python and not alone else {}
        if them and "ppo" in args.algorithms and not them["has_ppo"]:
            print(f"TRL {them['versions']['trl']} ships no PPOTrainer (1.12.0 was the last that did), so only our PPO is measured")
        run_facts = facts(args.device) | {"threads": us["threads"], "dtype": args.dtype}
        run_facts |= {"versions": us["versions"], "trl_versions": them.get("versions")}
        run_facts["command"] = run_facts["command"].replace(args.trl_python or "\0", "trl/bin/python")  # this machine's path says nothing
        print(json.dumps(run_facts, indent=2))
        kind = ["sweep"] * args.sweep or ["profile"] * args.profile or ["ours"] * (not args.trl_python)
        kind += [word for word in (args.device, args.dtype) if word not in ("cpu", "float32")]
        output = Path(args.output or Path(__file__).with_name("-".join(["speed", *kind]) + ".json"))
        if not output.parent.is_dir():
            sys.exit(f"error: --output {output} is in no folder that exists")
        if alone:
            figures = run_facts | (sweep if args.sweep else profiles)(args, Path(folder))
        else:  # workloads and algorithms that are not measured this time keep their figures
            figures = json.loads(output.read_text()) if output.exists() else {}
            for name, new in measure(args, Path(folder), them.get("has_ppo", False)).items():
                for algorithm in args.algorithms:
                    if algorithm in new:
                        new[algorithm]["run"] = run_facts
                figures[name] = figures.get(name, {}) | new
    output.write_text(json.dumps(figures, indent=2) + "\n")
    print(f"\nfigures: {output}")
    if importlib.util.find_spec("matplotlib") and not alone and args.trl_python:
        draw(figures, output.with_suffix(".png"))


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        job = json.loads(sys.argv[3])
        result = globals()[sys.argv[2]](job)
        (Path(job["output_dir"]) / "result.json").write_text(json.dumps(result))
    else:
        import tyro

        main(tyro.cli(Args, description=__doc__))
