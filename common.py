"""What the six scripts share and what is not the algorithm: loading, sampling, log-probabilities, rewards, data, checkpoints, logging.

Letters: N prompts per step, G completions per prompt, B = N * G rows (the G rows of a prompt adjacent), T completion tokens, V vocabulary.
A batch is a dict. Its tensors have B rows; its lists have B entries:
    input_ids      (B, L)  prompt, then completion, right-padded: no position or attention mask is needed to score it
    prompt_length  (B,)    column t of every (B, T) tensor is the token input_ids[prompt_length + t]
    prompt_id      (B,)    rows of one number have the same prompt, which is then read once for all of them
    mask           (B, T)  1 up to and including the first stop token, 0 after it
    logprobs       (B, T)  log-probabilities of the completion tokens, as sampled
    truncated      (B,)    True where no stop token came within max_new_tokens
    prompts, completions   list of Prompt, list of str
Scripts add their own: ref_logprobs, old_logprobs, advantages, weights, ...
"""

import copy
import csv
import hashlib
import importlib.util
import inspect
import io
import json
import logging
import math
import os
import re
import shutil
import signal
import sys
import textwrap
import time
import traceback
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from datetime import timedelta
from fractions import Fraction
from functools import lru_cache, partial
from pathlib import Path
from typing import Callable, NamedTuple

import torch
import torch.distributed as dist
import torch.utils.checkpoint
import tyro
from safetensors import SafetensorError
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, DynamicCache, DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

transformers_logging.disable_progress_bar()


class InputError(Exception):
    """Something the user gave can't be used; the message is one sentence that names it and says what would be right."""


class Prompt(NamedTuple):
    ids: list[int]  # token ids, special tokens included
    text: str  # the same as text, as reward functions see it
    row: dict  # the dataset row with every column, untouched


class Reward(NamedTuple):
    name: str
    weight: float
    fn: Callable  # (prompts: list[str], completions: list[str], rows: list[dict]) -> list[float]
    model: torch.nn.Module | None  # the reward model behind fn, where there is one


# --- start-up and randomness ---


POSITIVE = """num_steps num_prompts group_size max_new_tokens max_prompt_tokens temperature num_epochs minibatch_size
    microbatch_tokens max_grad_norm kl_target kl_horizon eval_samples""".split()
NOT_NEGATIVE = """lr value_lr warmup_steps eval_every save_every keep clip_low clip_high kl_coef vf_coef value_clip gamma gae_lambda
    missing_eos_penalty dynamic_sampling overlong_buffer is_correction_cap
    lora_rank reward_timeout eval_temperature""".split()


asked_to_stop: list[int] = []  # the signal, once SIGINT (Ctrl-C) or SIGTERM has come
quiet: list[bool] = []  # not empty with --quiet


def say(text: str) -> None:
    """Print what is good to know; with --quiet, don't. What the user should not miss is printed in any case."""
    if not quiet:
        print(text)


def ask_to_stop(process: int, number: int, frame) -> None:
    """The first signal lets the step finish, so that it can be saved; the second stops at once."""
    if os.getpid() != process:  # a child that a reward function forked: it has no step to finish
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    if asked_to_stop and num_ranks() == 1:  # torchrun passes on what the terminal has sent to all: once more is no second wish
        raise KeyboardInterrupt
    if not asked_to_stop and rank() == 0:
        when = "if the others still run" if num_ranks() > 1 else "once more to stop at once"
        print(f"stopping after this step, with a checkpoint; {when}", file=sys.stderr)
    asked_to_stop.append(number)


def launch(main, Args, description: str) -> None:
    """Parse the command line into Args and run main(args); what the user can mend ends the run with one sentence."""
    sys.stdout.reconfigure(line_buffering=True)  # a log file shows each step as it comes
    join_ranks()
    args = on_rank_0(partial(tyro.cli, Args, description=description))
    asked_to_stop.clear()
    handlers = {number: signal.signal(number, partial(ask_to_stop, os.getpid())) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if args.resume:
            args = on_rank_0(partial(resumed, args, Args, description))
        check_ranges(args)
        quiet[:] = [True] * args.quiet
        place_ranks(args.device, args.dtype, args.shard, args.gather_for_sampling)
        main(args)
        leave_ranks()
    except KeyboardInterrupt:
        print("stopped at once; nothing was saved since the last checkpoint", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        wait_unless_first(error)
        no_memory = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        if args.debug or not (no_memory or isinstance(error, (InputError, OSError))):
            raise
        sys.exit(f"error: {NO_MEMORY if no_memory else error}")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


NO_MEMORY = (
    "out of memory; lower --microbatch-tokens first, which changes no result, then add --gradient-checkpointing, lower --max-new-tokens "
    "or --num-prompts, or train an adapter with --lora-rank"
)


def resumed(args, Args, description: str):
    """The flags of the run in args.resume; what is typed beside it wins and is announced."""
    saved = read_json(Path(args.resume) / "args.json")
    if saved.get("script") != Path(sys.argv[0]).stem:
        raise InputError(f"--resume {args.resume} is a run of {saved.get('script')}.py")
    saved = {f.name: saved.get(f.name, getattr(args, f.name)) for f in fields(Args)}
    saved = {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()}
    args = tyro.cli(Args, default=Args(**saved | {"resume": args.resume, "output_dir": args.resume}), description=description)
    if Path(args.output_dir).resolve() != Path(args.resume).resolve():
        raise InputError("--resume continues in its own run folder; leave --output-dir out")
    for name, old in saved.items():
        new = getattr(args, name)
        if name not in ("resume", "output_dir") and (absolute(new) if name in PATHS else new) != old:
            if name in ("model", "lora_rank", "shared_backbone", "value_model"):
                raise InputError(f"--{name.replace('_', '-')} can't be changed in a resumed run; it was {old}")
            print(f"resuming with --{name.replace('_', '-')} {new} (was {old})")
    return args


def check_ranges(args) -> None:
    for name in POSITIVE + NOT_NEGATIVE:
        value = getattr(args, name, None)
        if value is not None and not (0 < value < math.inf or (value == 0 and name in NOT_NEGATIVE)):
            raise InputError(f"--{name.replace('_', '-')} must be {'above 0' if name in POSITIVE else '0 or more'}, not {value}")
    for name, value in vars(args).items():
        if not all(math.isfinite(v) for v in (value if isinstance(value, tuple) else (value,)) if isinstance(v, float)):
            raise InputError(f"--{name.replace('_', '-')} must be finite, not {value}")
    if getattr(args, "shared_backbone", False) and args.value_model:
        raise InputError("--shared-backbone puts the value head on the policy; leave out --value-model")
    if args.eval_temperature == 0 and args.eval_samples > 1:
        raise InputError("--eval-samples above 1 needs an --eval-temperature above 0: the likeliest completion is always the same")
    if 0 < args.is_correction_cap < 1:
        raise InputError(f"--is-correction-cap must be 1 or more, or 0 (off), not {args.is_correction_cap}")


def one_line(text) -> str:
    return " ".join(str(text).split())


def optional(package: str, needed_by: str):
    """Import a package that is not in requirements.txt."""
    try:
        return importlib.import_module(package)
    except ImportError:
        name = package.replace("_", "-")
        raise InputError(f"{needed_by} needs a package that is not installed: pip install {name}") from None


def generator(*key) -> torch.Generator:
    """CPU random generator seeded by a hash of key, e.g. (seed, "sample", step).

    All randomness is drawn from such generators: nothing depends on what was drawn before, so evaluation can't disturb
    training and a resumed run needs no random state.
    """
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))


def pick_device(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """Device and compute dtype; "auto" is the accelerator if there is one, and bfloat16 autocast on cuda only."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.zeros(1, device=device).tolist()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"--device {device} can't be used here: {str(error).splitlines()[0]}") from None
    if device == "cpu":  # transformers copies keys and values for every query head where there is a mask; on a CPU torch needs no copies
        os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
    return torch.device(device), getattr(torch, dtype)


class Timer:
    """Seconds since the last lap, by name, waiting for the GPU first so that they belong to the right lap."""

    def __init__(self, device: torch.device):
        self.device, self.laps, self.last = device, {}, time.perf_counter()

    def lap(self, name: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self.last
        self.last = now


# --- several processes: ranks, as torchrun starts them ---

# Every rank holds every batch in full and computes the same advantages and weights from it. What is split is the work: prompts to sample,
# rows to score, microbatches; and, over the mesh, the weights, their gradients and the optimizer's state (FSDP2, arXiv:2304.11277).


ranks: dict = {}  # empty in a single process; "store" is for small messages, "mesh" for weights, "gather" is --gather-for-sampling


class OtherRankFailed(Exception):
    """An error that another rank reports."""


def num_ranks() -> int:
    return dist.get_world_size() if ranks else 1


def rank() -> int:
    return dist.get_rank() if ranks else 0


def join_ranks() -> None:
    """Under torchrun, join the other processes, with gloo on CPU and nccl on GPU; all but rank 0 print nothing from here on."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return
    ranks["store"], number, count = next(dist.rendezvous("env://"))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    patience = timedelta(days=1)  # one rank's reward function may take its time; one that dies is noticed anyway
    dist.init_process_group(backend, timeout=patience, store=ranks["store"], rank=number, world_size=count)
    if rank() > 0:
        sys.stdout = open(os.devnull, "w")


def place_ranks(device: str, dtype: str, shard: str, gather_for_sampling: bool) -> None:
    """The mesh over which weights are sharded ("full") or, with a copy on each rank, only their gradients are summed ("none")."""
    if num_ranks() == 1:
        return
    if device in ("auto", "cuda") and torch.cuda.is_available():  # before anything reaches a GPU
        if (local := int(os.environ["LOCAL_RANK"])) >= torch.cuda.device_count():
            raise InputError(f"each process needs a GPU; lower --nproc-per-node to the {torch.cuda.device_count()} of this machine")
        torch.cuda.set_device(local)
    kind = pick_device(device, dtype)[0]
    if kind.type not in ("cpu", "cuda") or kind.index is not None:
        raise InputError(f"--device {device} can't be shared by several processes; it must be auto, cpu or cuda")
    shape = {"full": (num_ranks(),), "none": (num_ranks(), 1)}[shard]
    ranks["mesh"] = dist.init_device_mesh(kind.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    ranks["gather"] = gather_for_sampling


def leave_ranks() -> None:
    if ranks:
        ranks.clear()
        dist.destroy_process_group()


def wait_unless_first(error: Exception) -> None:
    """Of all ranks, the first to fail says why; the others wait for torchrun to end them. An error of all ranks is said once, too."""
    if ranks and (isinstance(error, OtherRankFailed) or ranks["store"].add("failed", 1) > 1):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(30)  # on another machine, torchrun may not know
        os._exit(1)


def everywhere(fn: Callable) -> list:
    """[fn() of each rank], on every rank; tensors should be on the CPU. An exception on one rank stops all."""
    if num_ranks() == 1:
        return [fn()]
    mine = error = None
    try:
        mine = fn()
    except (Exception, SystemExit) as fault:
        if getattr(fault, "out_of_step", False):
            raise
        error = fault
    found = [None] * num_ranks()
    dist.all_gather_object(found, (mine, error if error is None or isinstance(error, SystemExit) else OtherRankFailed()))
    for _, fault in found:
        if fault is not None:
            raise error or fault
    return [result for result, _ in found]


def on_rank_0(fn: Callable):
    """fn(), which only rank 0 calls; its result, or its exception, on every rank."""
    return everywhere(fn if rank() == 0 else lambda: None)[0]


def share(count: int) -> slice:
    """This rank's part of count things in a row; it may be empty."""
    return slice(count * rank() // num_ranks(), count * (rank() + 1) // num_ranks())


def summed(x: torch.Tensor) -> torch.Tensor:
    """x, summed over all ranks in place."""
    if num_ranks() > 1:
        dist.all_reduce(x)
    return x


def stopping() -> bool:
    """Whether a signal to stop has come, to whichever rank; all ranks get the same answer."""
    asked = max(everywhere(lambda: asked_to_stop[:1]))
    asked_to_stop.extend(asked)  # one that has come meanwhile stays there for the next time
    return bool(asked)


def sharded(model):
    """The model with its weights on the mesh: each layer is gathered when it is needed and gradients are summed over the ranks."""
    if num_ranks() == 1:
        return model
    from torch.distributed.fsdp import fully_shard  # half a second

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in [*reversed(layers), model]:
        fully_shard(module, mesh=ranks["mesh"], reshard_after_forward=True)
        module.set_gradient_divide_factor(1.0)  # a sum, not a mean: the weights of a loss are those of all ranks
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    model.set_reduce_scatter_unused_params(True)  # the rows of a rank may leave an expert out
    return model


@contextmanager
def in_step(model):
    """Forward passes without gradient, each of which needs all ranks: a rank that is done joins in those of the others."""
    if num_ranks() == 1 or model is None:
        yield
        return

    def anyone(runs: bool) -> bool:
        return summed(torch.tensor(float(runs))).item() > 0

    hook, in_time = model.register_forward_pre_hook(lambda *_: anyone(True) and None, prepend=True), True
    try:
        yield
    except Exception as error:
        in_time = isinstance(error, InputError)  # else the others may be in the middle of a pass, and wait for this rank there
        error.out_of_step = not in_time
        raise
    finally:
        hook.remove()
        with torch.no_grad(), autocast(model):
            while in_time and anyone(False):
                model(torch.zeros(1, 1, dtype=torch.long, device=ranks["mesh"].device_type))


@contextmanager
def gathered(model):
    """The whole weights on each rank for many forward passes, or, with --no-gather-for-sampling, a layer at a time in each of them."""
    if num_ranks() > 1 and not ranks["gather"]:
        with in_step(model):
            yield
        return
    modules = [module for module in model.modules() if hasattr(module, "unshard")] if num_ranks() > 1 else []
    try:
        for module in modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
    except Exception as error:
        error.out_of_step = True  # the others may have gone on, and wait for this rank in the middle of it
        raise
    yield
    for module in modules:
        module.set_reshard_after_forward(True, recurse=False)
        module.reshard()


def full_state(owner) -> dict:
    """state_dict() of a model or an optimizer in whole tensors, the same for any number of ranks; on rank 0, nothing on the others."""
    if num_ranks() == 1:
        return owner.state_dict()
    if isinstance(owner, torch.nn.Module):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        state, names = get_model_state_dict(owner, options=options), {}
        tied = ((name, names.setdefault(p, name)) for name, p in owner.named_parameters(remove_duplicate=False) if name in state)
        return state | {name: state[first] for name, first in tied}

    def whole(x):
        x = x.full_tensor() if hasattr(x, "full_tensor") else x
        return x.cpu() if rank() == 0 else None

    state = owner.state_dict()
    return state | {"state": {i: {name: whole(x) for name, x in entries.items()} for i, entries in state["state"].items()}}


def load_state(owner, state: dict) -> None:
    """Load what full_state gave on rank 0; each rank keeps its part."""
    if num_ranks() == 1:
        try:
            owner.load_state_dict(state)
        except (RuntimeError, ValueError) as error:
            why = "PPO's value model is made from the reward model, so keep the rewards and --value-model as they were"
            raise InputError(f"the checkpoint does not fit the models ({one_line(error)}); {why}") from error
    elif isinstance(owner, torch.nn.Module):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        set_model_state_dict(owner, state, options=StateDictOptions(full_state_dict=True))
    else:
        from torch.distributed.tensor import distribute_tensor

        parameters = [p for group in owner.param_groups for p in group["params"]]

        def part(x, p):
            return x if x.dim() == 0 else distribute_tensor(x.to(p.device), p.device_mesh, p.placements, src_data_rank=None)

        parts = {i: {name: part(x, parameters[i]) for name, x in entries.items()} for i, entries in state["state"].items()}
        owner.load_state_dict(state | {"state": parts})


# --- models ---


def locate(path: str) -> str:
    """The path itself if it exists, else the same path beside this file if that exists (tiny/ from any folder), else a hub id."""
    beside = Path(__file__).parent / path
    return str(beside) if not Path(path).exists() and beside.exists() else path


def pretrained(kind, path: str, trust_remote_code: bool = False, **kwargs):
    """kind.from_pretrained of a folder or a hub id; float32 weights, from safetensors only; its own code is run only if trusted."""
    kwargs |= {"trust_remote_code": trust_remote_code}
    if "CausalLM" in kind.__name__ or "Classification" in kind.__name__:
        kwargs |= {"dtype": torch.float32, "use_safetensors": True}
    if not Path(locate(path)).exists() and (path.count("/") > 1 or path[0] in "./~"):
        raise InputError(f"{path} is neither a folder that exists nor a hub id (owner/name)")
    try:
        return kind.from_pretrained(locate(path), **kwargs)
    except (OSError, ValueError, SafetensorError) as error:
        if "trust_remote_code" in str(error):
            raise InputError(f"{path} brings Python code of its own; read it, and if you trust it, add --trust-remote-code") from None
        raise InputError(f"{path} could not be loaded: {one_line(error)}") from None


def load_tokenizer(path: str, chat_template: str | None = None, trust_remote_code: bool = False):
    """The model's own tokenizer, with the chat template of a Jinja file if one is given."""
    tokenizer = pretrained(AutoTokenizer, path, trust_remote_code)
    if tokenizer.eos_token_id is None:
        raise InputError(f"the tokenizer of {path} has no eos_token, so no completion could ever end; set one in its tokenizer_config.json")
    if chat_template:
        if not Path(chat_template).is_file():
            raise InputError(f"--chat-template {chat_template} is not a file; it should be a Jinja template")
        tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
    return tokenizer


def prepare(model, device: torch.device, dtype: torch.dtype, trainable: bool, gradient_checkpointing: bool = False):
    """Move to the device; no dropout anywhere, so that the ratio of two passes is exact. Weights are float32 whatever the checkpoint's
    dtype, but for the linear layers of a frozen model, which are in dtype.

    NOTE: transformers' own switch for gradient checkpointing (arXiv:1604.06174) only works in train mode, with dropout.
    NOTE: with bfloat16 weights a step of 1e-6 is rounded away; for a model that is trained, dtype is that of autocast alone.
    """
    model.compute_dtype, model.recomputed = dtype, gradient_checkpointing
    if gradient_checkpointing:
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers:
            raise InputError(f"--gradient-checkpointing: {type(model).__name__} has no layers that can be recomputed")
        for layer in layers:
            layer.forward = partial(checkpointed, layer.forward)
    if not trainable and dtype != torch.float32:  # what never changes is cast once, not in every pass: the same numbers
        embedded = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
        for module in model.modules():
            if isinstance(module, torch.nn.Linear) and id(module.weight) not in embedded and module.out_features > 1:
                module.to(dtype)  # not what makes one number: a reward is read in float32
    model = model if ranks else model.to(device)  # sharding moves it layer by layer
    return model.eval().requires_grad_(trainable)


def checkpointed(forward: Callable, *args, **kwargs):
    """forward, whose inner results are computed again in the backward pass instead of being kept; sampling is not touched."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def load_policy(
    path: str, device: torch.device, dtype: torch.dtype,
    checkpoint: str | None = None, lora_rank: int = 0, gradient_checkpointing: bool = False, seed: int = 0, trust_remote_code: bool = False,
):  # fmt: skip
    """A causal language model to be trained, from a folder or a hub id or, in a resumed run, from its checkpoint.

    With lora_rank only a low-rank adapter is trained (LoRA, arXiv:2106.09685), on every linear layer but the output, with alpha twice
    the rank; the checkpoint is then the adapter's.
    """
    if adapter_rank(path):
        raise InputError(f"--model {path} is an adapter; merge it first (peft: AutoPeftModelForCausalLM, merge_and_unload) and save that")
    if checkpoint and adapter_rank(checkpoint) != lora_rank:
        raise InputError(f"--lora-rank {lora_rank}: the run to be resumed has {adapter_rank(checkpoint)}")
    model = pretrained(AutoModelForCausalLM, path if lora_rank else checkpoint or path, trust_remote_code)
    if missing := [name for name in ("cache", "logits_to_keep") if name not in inspect.signature(model.forward).parameters]:
        raise InputError(f"--model {path}: its own code's forward() takes no {' and no '.join(missing)}; it is of another transformers")
    model = prepare(model, device, dtype, not lora_rank, gradient_checkpointing)
    if lora_rank:
        peft = optional("peft", "--lora-rank")
        model.name_or_path = absolute(locate(path))  # final/ finds it from anywhere
        if checkpoint:
            model = peft.PeftModel.from_pretrained(model, checkpoint, is_trainable=True)
        else:
            config = peft.LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                model = peft.get_peft_model(model, config)
        model.eval().compute_dtype = dtype
    return sharded(model)


def adapter_rank(folder: str) -> int:
    """Of the adapter in a folder; 0 if there is none."""
    config = Path(locate(folder)) / "adapter_config.json"
    return read_json(config)["r"] if config.is_file() else 0


class WithoutAdapter:
    """The policy with its adapter off: the model it started from, with no second copy of the weights."""

    def __init__(self, policy):
        self.policy, self.compute_dtype, self.config = policy, policy.compute_dtype, policy.config

    def __call__(self, *args, **kwargs):
        with self.policy.disable_adapter():
            return self.policy(*args, **kwargs)

    def parameters(self):
        return (p for p in self.policy.parameters() if not p.requires_grad)


def load_reference(policy, path: str, device: torch.device, dtype: torch.dtype, trust_remote_code: bool = False):
    """The frozen model that the policy started from."""
    if hasattr(policy, "disable_adapter"):
        return WithoutAdapter(policy)
    return sharded(prepare(pretrained(AutoModelForCausalLM, path, trust_remote_code), device, dtype, trainable=False))


def load_reward_model(path: str, device: torch.device, dtype: torch.dtype, trust_remote_code: bool = False):
    """A sequence-classification model with one label."""
    options = {"num_labels": 1, "ignore_mismatched_sizes": True, "output_loading_info": True}
    model, info = pretrained(AutoModelForSequenceClassification, path, trust_remote_code, **options)
    if info["missing_keys"] or info["mismatched_keys"]:
        raise InputError(
            f"--reward-model {path} has no trained head with one label; it must be a sequence-classification model with num_labels 1"
        )
    for head in set(model.modules()) - set(model.base_model.modules()):
        if isinstance(head, torch.nn.Linear) and head.out_features == 1:
            head.forward = partial(float32_linear, head)
    return prepare(model, device, dtype, trainable=False)


def float32_linear(head, x: torch.Tensor) -> torch.Tensor:
    """A head outside autocast: bfloat16 has 8 bits, which make equal what is not."""
    with torch.autocast(x.device.type, enabled=False):
        return torch.nn.functional.linear(x.float(), head.weight, head.bias)


class ValueModel(torch.nn.Module):
    """A trunk and a scalar head: V(x, y_<t), from a causal LM (zero head, so V = 0 at first) or a reward model (its head)."""

    def __init__(self, model):
        super().__init__()
        self.trunk, self.config = model.base_model, model.config
        self.head = torch.nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False)
        self.head.weight.data = model.score.weight.data if hasattr(model, "score") else torch.zeros_like(self.head.weight)

    def forward(self, batch: dict) -> torch.Tensor:
        with autocast(self):
            inputs, keep = completion_inputs(self, self.trunk, batch)
            hidden = self.trunk(**inputs).last_hidden_state
        return scatter_tokens(self.head(hidden[keep].float())[:, 0], batch["mask"])  # (B, T)


def load_value_model(
    path: str | None, model: str, reward_fns: list[Reward], tokenizer,
    device: torch.device, dtype: torch.dtype, gradient_checkpointing: bool = False, trust_remote_code: bool = False,
) -> ValueModel:  # fmt: skip
    """From path, else from the reward model if it reads the policy's own token ids, else from the policy."""
    starts = [reward.model.name_or_path for reward in reward_fns if reward.model and reward.weight]
    starts = [start for start in starts if pretrained(AutoTokenizer, start, trust_remote_code).get_vocab() == tokenizer.get_vocab()]
    if path and pretrained(AutoTokenizer, path, trust_remote_code).get_vocab() != tokenizer.get_vocab():
        raise InputError(f"--value-model {path} has another tokenizer than the policy, whose token ids it would have to read")
    path = path or (starts + [model])[0]
    kinds = pretrained(AutoConfig, path, trust_remote_code).architectures or []
    is_classifier = any("SequenceClassification" in kind for kind in kinds)
    say(f"value model: starts from {path}{'' if is_classifier else ', with a zero head'}")
    if is_classifier:
        source = load_reward_model(path, device, torch.float32, trust_remote_code)  # to be trained
    else:
        source = pretrained(AutoModelForCausalLM, path, trust_remote_code)
    if source.get_input_embeddings().num_embeddings < pretrained(AutoConfig, model, trust_remote_code).get_text_config().vocab_size:
        raise InputError(f"the value model {path} has fewer embeddings than the policy; name another with --value-model")
    with torch.no_grad():
        one, other = (source.base_model(torch.tensor([[0, i]], device=source.device)).last_hidden_state[0, 0] for i in (0, 1))
    if not torch.allclose(one, other, atol=1e-3):
        raise InputError(f"the value model {path} sees the tokens that come after; it must be a causal model")
    return sharded(prepare(ValueModel(source), device, dtype, trainable=True, gradient_checkpointing=gradient_checkpointing))


class ValueHead(torch.nn.Module):
    """A scalar head on the policy's own trunk; it reads the hidden states of the policy's latest forward pass."""

    def __init__(self, policy):
        super().__init__()
        self.head = torch.nn.Linear(policy.config.get_text_config().hidden_size, 1, bias=False)
        torch.nn.init.zeros_(self.head.weight)
        self.to(policy.device)
        sharded(self)
        policy.get_output_embeddings().register_forward_pre_hook(lambda module, inputs: setattr(self, "hidden", inputs[0]))

    def forward(self, batch: dict) -> torch.Tensor:
        return scatter_tokens(self.head(self.hidden.float())[:, 0], batch["mask"])  # (B, T)


def autocast(model):
    """Run a forward pass in the model's compute dtype, whatever its weights are in."""
    if model.compute_dtype == torch.float32:
        return nullcontext()
    keeps_casts = num_ranks() == 1 or ranks["gather"]  # else they would be a second copy of what is to be gathered layer by layer
    return torch.autocast(next(model.parameters()).device.type, dtype=model.compute_dtype, cache_enabled=keeps_casts)


# --- sampling ---


def stop_token_ids(model, tokenizer) -> list[int]:
    """Every id that ends a completion: the tokenizer's eos and all of the generation config's."""
    ids = model.generation_config.eos_token_id
    return sorted({tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [] if ids is None else [ids])})


class InPlaceLayer(DynamicLayer):
    """A layer of a key-value cache with room for tokens to come: each is written there, where DynamicLayer copies all that came before."""

    room = None  # keys and values with up to 63 columns to spare; self.keys and self.values are their first columns

    def update(self, key_states, value_states, *args, **kwargs):
        key_states = key_states.to(value_states.dtype)  # autocast leaves rotated keys in float32, and attention would cast all of them
        if not self.is_initialized:
            return super().update(key_states, value_states)
        n, new = self.keys.shape[-2], key_states.shape[-2]
        if self.room is None or n + new > self.room[0].shape[-2]:
            self.room = [x.new_empty(*x.shape[:-2], n + new + 63, x.shape[-1]) for x in (self.keys, self.values)]
            for room, states in zip(self.room, (self.keys, self.values)):
                room[..., :n, :] = states
        for room, states in zip(self.room, (key_states, value_states)):
            room[..., n : n + new, :] = states
        self.keys, self.values = (room[..., : n + new, :] for room in self.room)
        return self.keys, self.values

    def reorder_cache(self, beam_idx):
        self.room = None
        super().reorder_cache(beam_idx)


def sample_tokens(logits: torch.Tensor, uniform: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (B,) drawn from softmax(logits / temperature), and their log-probabilities (B,), by inverting the cumulative distribution.

    Nothing is cut (no top-k, no top-p): what is sampled is what is trained. uniform is float64 where the device has it:
    a float32 sum over a large vocabulary is too coarse for its tail. Temperature 0 (evaluation only) takes the likeliest token.
    """
    if temperature == 0:
        return (ids := logits.argmax(-1)), token_logprobs(logits, ids)
    logits = scaled(logits, temperature)
    shifted = logits - logits.amax(-1, keepdim=True)  # (B, V), at most 0
    cumulative = shifted.exp().cumsum(-1, dtype=uniform.dtype)  # (B, V)
    total = cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, uniform[:, None] * total, right=True).clamp(max=logits.shape[-1] - 1)
    return ids[:, 0], (shifted.gather(1, ids) - total.log())[:, 0].to(shifted.dtype)


def sample_completions(policy, prompt_ids: list[torch.Tensor], uniform: torch.Tensor, stops: torch.Tensor, temperature: float):
    """One completion per row of uniform (B, max_new_tokens): ids (any after the end), log-probabilities (0 there), lengths, whether cut.

    Each prompt is read once; its cache is then repeated for the group. Finished rows leave once they are a quarter.
    """
    device, (B, max_new_tokens) = uniform.device, uniform.shape
    new_ids = torch.zeros(B, max_new_tokens, dtype=torch.long, device=device)
    logprobs = torch.zeros(B, max_new_tokens, device=device)
    length = torch.zeros(B, dtype=torch.long, device=device)
    truncated = torch.ones(B, dtype=torch.bool, device=device)

    # left-padded prompts, with explicit positions: models with absolute positions need them
    attention = pad_sequence([torch.ones_like(ids) for ids in prompt_ids], batch_first=True, padding_side="left")
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    inputs = pad_sequence(prompt_ids, batch_first=True, padding_side="left")
    cache = DynamicCache(config=policy.config)
    cache.layers = [InPlaceLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    forward = partial(policy, cache=cache, use_cache=True, logits_to_keep=1)
    logits = forward(inputs, attention_mask=attention, position_ids=positions).logits[:, -1]
    prompt_of_row = torch.arange(len(prompt_ids), device=device).repeat_interleave(B // len(prompt_ids))
    cache.reorder_cache(prompt_of_row)
    logits, positions = logits[prompt_of_row], positions[prompt_of_row, -1:]
    attention = torch.nn.functional.pad(attention[prompt_of_row], (0, max_new_tokens), value=1)  # a column for each token to come

    rows = torch.arange(B, device=device)  # the rows still in the cache
    for t in range(max_new_tokens):
        ids, ids_logprobs = sample_tokens(logits, uniform[rows, t], temperature)
        running = truncated[rows]  # no stop token so far; the others are carried along and count for nothing
        new_ids[rows, t], logprobs[rows, t] = ids, ids_logprobs.where(running, 0.0)
        length[rows] += running
        truncated[rows] = running = running & ~torch.isin(ids, stops)
        left = int(running.sum())
        if t + 1 == max_new_tokens or left == 0:
            break
        if left <= 0.75 * len(rows):
            cache.reorder_cache(running.nonzero()[:, 0])
            rows, ids, attention, positions = rows[running], ids[running], attention[running], positions[running]
        seen = attention[:, : t + 1 - max_new_tokens]
        logits = forward(ids[:, None], attention_mask=seen, position_ids=positions + t + 1).logits[:, -1]
    return new_ids, logprobs, length, truncated


def generate(
    policy, tokenizer, prompts: list[Prompt], group_size: int, max_new_tokens: int, temperature: float, key: tuple, first_row: int = 0
) -> dict:
    """Sample group_size completions of each prompt: a batch (see the top of this file).

    key seeds one uniform number per row (from first_row on) and token position, so a completion depends on nothing else in the batch.
    """
    device, wide = policy.device, torch.float32 if policy.device.type == "mps" else torch.float64
    prompt_ids = [torch.tensor(p.ids, device=device) for p in prompts]
    mine = share(len(prompts))
    first, end = (first_row + i * group_size for i in (mine.start, mine.stop))
    uniform = torch.rand(end, max_new_tokens, generator=generator(*key), dtype=torch.float64)[first:]
    if wide == torch.float32:
        uniform = uniform.clamp(max=1 - 2**-24)  # else rounding may make it 1, and the token one of probability 0
    stops = torch.tensor(stop_token_ids(policy, tokenizer), device=device)

    def sample():
        with torch.no_grad(), autocast(policy), gathered(policy):
            if len(uniform):
                sampled = sample_completions(policy, prompt_ids[mine], uniform.to(device, wide), stops, temperature)
                return [x.cpu() for x in sampled]

    new_ids, logprobs, length, truncated = (torch.cat(parts).to(device) for parts in zip(*filter(None, everywhere(sample))))
    if not (finite := torch.isfinite(logprobs).all(1)).all():
        text = prompts[int(finite.logical_not().nonzero()[0, 0]) // group_size].text
        raise InputError(f"the log-probabilities of {key[1:]} are not finite for prompt {text!r}; try a lower --lr, or the model is broken")
    T = int(length.max())
    lengths, cut, ids = length.tolist(), truncated.tolist(), new_ids.tolist()
    shares = can_share_prompts(policy) and all(len(p.ids) > 1 for p in prompts)  # of a prompt of one token nothing is read before the rows
    return {
        "input_ids": pad_sequence(
            [torch.cat([prompt_ids[i // group_size], new_ids[i, :n]]) for i, n in enumerate(lengths)], batch_first=True
        ),
        "prompt_length": torch.tensor([len(p.ids) for p in prompts], device=device).repeat_interleave(group_size),
        "prompt_id": torch.arange(len(lengths), device=device) // (group_size if shares else 1),
        "mask": (torch.arange(T, device=device) < length[:, None]).float(),
        "logprobs": logprobs[:, :T],
        "truncated": truncated,
        "prompts": [p for p in prompts for _ in range(group_size)],
        "completions": tokenizer.batch_decode([ids[i][: n if cut[i] else n - 1] for i, n in enumerate(lengths)], skip_special_tokens=True),
    }


# --- batches ---


def select(batch: dict, rows: torch.Tensor) -> dict:
    """The given rows (indices, or a bool each) of every entry."""
    rows = rows.nonzero()[:, 0] if rows.dtype == torch.bool else rows
    return {k: [v[i] for i in rows.tolist()] if isinstance(v, list) else v[rows] for k, v in batch.items()}


def concatenate(first: dict, second: dict) -> dict:
    """The rows of both, padded on the right to the wider."""
    joined = {}
    for k, a in first.items():
        b = second[k]
        if isinstance(a, torch.Tensor) and a.dim() == 2:
            width = max(a.shape[1], b.shape[1])
            a, b = (torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in (a, b))
        if k == "prompt_id":
            b = b + (a.max() + 1 if len(a) else 0)
        joined[k] = a + b if isinstance(a, list) else torch.cat([a, b])
    return joined


def minibatches(batch: dict, num_epochs: int, minibatch_size: int | None, key: tuple):
    """num_epochs passes over the batch, each in a new random order and cut into minibatches of minibatch_size rows (None: all).

    A last, shorter minibatch is an optimizer step like the others, with its own denominators.
    """
    B = len(batch["mask"])
    for epoch in range(num_epochs):
        order = torch.randperm(B, generator=generator(*key, epoch)).to(batch["mask"].device)
        for rows in order.split(minibatch_size or B):
            yield select(batch, rows)


def microbatches(batch: dict, microbatch_tokens: int):
    """Cut a batch into pieces of at most microbatch_tokens tokens, padding included (one row at least), each cut to its own width.

    Rows of like length go together, or those of one prompt, whichever makes fewer tokens: a shared prompt is read once a piece. The
    result of an update can't depend on the cut: losses are sums with weights that were computed over the whole minibatch.

    Ranks take the pieces in turn. All must run as many passes, in which weights are gathered and gradients summed; so a rank left without a
    piece gets a row that carries no weight and has no place in "rows".
    """
    prompt_length, completion_length = batch["prompt_length"].tolist(), batch["mask"].sum(1).long().tolist()
    prompt = batch["prompt_id"].tolist() if "prompt_id" in batch else range(len(prompt_length))
    length = [p + t for p, t in zip(prompt_length, completion_length)]
    most = math.ceil(len(length) / num_ranks())  # rows, so that there is work for every rank

    def cut(key: Callable) -> tuple[int, list[list[int]]]:
        """The tokens of all pieces, and the pieces."""
        pieces, sizes = [], []
        for row in sorted(range(len(length)), key=key):
            alone = {prompt[row]}, prompt_length[row], completion_length[row], length[row]  # prompts, and the greatest lengths
            if pieces:
                shared = together[0] | alone[0], *map(max, together[1:], alone[1:])
                n, prompts = len(pieces[-1]) + 1, len(shared[0])
                size = n * shared[3] if n == prompts else prompts * shared[1] + n * shared[2]
            if not pieces or size > microbatch_tokens or len(pieces[-1]) == most:
                pieces.append([])
                sizes.append(0)
                shared, size = alone, length[row]
            pieces[-1].append(row)
            together, sizes[-1] = shared, size
        return sum(sizes), pieces

    tensors = {k: v for k, v in batch.items() if isinstance(v, torch.Tensor)}
    by_length, by_prompt = cut(lambda i: -length[i]), cut(lambda i: (-prompt_length[i], prompt[i], -completion_length[i]))
    pieces = min(by_length, by_prompt, key=lambda found: found[0])[1]
    work = [(piece, True) for piece in pieces] + [(pieces[-1][:1], False)] * (-len(pieces) % num_ranks())
    for piece, counts in work[rank() :: num_ranks()]:
        rows = torch.tensor(piece, device=batch["mask"].device)
        width, T = max(length[i] for i in piece), max(completion_length[i] for i in piece)
        micro = select(tensors, rows)
        micro = {k: v[:, : width if k == "input_ids" else T] if v.dim() == 2 else v for k, v in micro.items()}
        micro["rows"] = rows
        yield micro if counts else micro | {"rows": rows[:0], "weights": torch.zeros_like(micro["mask"])}


@torch.no_grad()
def no_grad_pass(fn: Callable, batch: dict, microbatch_tokens: int):
    """fn(microbatch) for the whole batch, without gradients: its (m, t) tensor, or tuple of them, as (B, T)."""
    results = None
    for micro in microbatches(batch, microbatch_tokens):
        outputs = fn(micro)
        pieces = outputs if isinstance(outputs, tuple) else (outputs,)
        results = results or tuple(torch.zeros_like(batch["mask"]) for _ in pieces)
        for result, piece in zip(results, pieces):
            result[micro["rows"], : piece.shape[1]] = piece
    results = tuple(map(summed, results))  # of the other ranks, where this one has 0
    return results if isinstance(outputs, tuple) else results[0]


# --- log-probabilities, masks, weights ---


def completion_positions(batch: dict) -> torch.Tensor:
    """(B, L - 1) bool: the positions whose output predicts a completion token. The one place of the shift between logits and tokens.

    Example: prompt of 3 tokens a b c, completion d e. Position 2 (c) predicts d and position 3 (d) predicts e: [0, 0, 1, 1].
    """
    position = torch.arange(batch["input_ids"].shape[1] - 1, device=batch["mask"].device)
    first = batch["prompt_length"][:, None] - 1
    return (position >= first) & (position < first + batch["mask"].sum(1, keepdim=True))


def scatter_tokens(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """One number per completion token, in a row (n,), to where the mask is 1: (B, T), 0 elsewhere."""
    return x.new_zeros(mask.shape).masked_scatter(mask.bool(), x)


def upcast(x: torch.Tensor) -> torch.Tensor:
    """In float32, or float64 if that is what came in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """logits / temperature in float32 or wider, without a copy where none is needed."""
    return upcast(logits) if temperature == 1.0 else upcast(logits) / temperature


def token_logprobs(logits: torch.Tensor, ids: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """log-softmax(logits / temperature) at ids, float32: (..., V), (...) -> (...). Makes one copy of the logits."""
    logits = scaled(logits, temperature)
    top = logits.detach().amax(-1)  # taken off first: a logsumexp of 1e4 is good to 1e-3 only
    return logits.gather(-1, ids[..., None])[..., 0] - top - (logits - top[..., None]).exp_().sum(-1).log()


class LogprobsAndEntropy(torch.autograd.Function):
    """Logits (n, V), ids (n,) -> log-probabilities of the ids, and entropies in nats, (n,) each.

    The gradients, one-hot(ids) - p and -p (log p + entropy) with p = softmax(logits), are written out: autograd's own way holds four
    (n, V) tensors at once, this one two (three if the entropy is in the loss).
    """

    @staticmethod
    def forward(ctx, logits, ids):
        found = []
        for rows in logits.split(max(1, 2**22 // logits.shape[-1])):  # 16 MB at a time: no second copy of the logits
            top = rows.amax(-1)
            terms = (shifted := rows - top[:, None]).exp()
            total = terms.sum(-1)
            expected = terms.mul_(shifted).nansum(-1) / total  # nan: 0 times the -inf of a token that can't come
            found.append((top, total.log(), total.log() - expected))
        top, log_total, entropy = map(torch.cat, zip(*found))
        ctx.save_for_backward(logits, ids, top + log_total, entropy)
        ctx.set_materialize_grads(False)  # None for what is in no loss, usually the entropy
        return logits.gather(1, ids[:, None])[:, 0] - top - log_total, entropy

    @staticmethod
    def backward(ctx, grad, entropy_grad):
        logits, ids, logsumexp, entropy = ctx.saved_tensors
        grad = (torch.zeros_like(logsumexp) if grad is None else grad)[:, None]
        probabilities = (logits - logsumexp[:, None]).exp_()
        if entropy_grad is None:
            return probabilities.mul_(-grad).scatter_add_(1, ids[:, None], grad), None
        entropy_grad, surprise = entropy_grad[:, None], torch.special.entr(probabilities)  # -p log p, 0 where p is 0
        gradient = surprise.mul_(entropy_grad) - probabilities.mul_(grad + entropy_grad * entropy[:, None])
        return gradient.scatter_add_(1, ids[:, None], grad), None


def can_share_prompts(model) -> bool:
    """Whether a prompt's key-value cache can be repeated for its completions: all of it in every layer, and no layer computed twice.

    NOTE: sharded weights are there for a layer's backward pass only once its output has a gradient; a prompt's last layer gets none but
    through the cache.
    """
    computed_once = not getattr(model, "recomputed", False) and num_ranks() == 1
    return computed_once and all(type(x) is DynamicLayer for x in DynamicCache(config=model.config).layers)


def completion_inputs(model, read: Callable, batch: dict) -> tuple[dict, torch.Tensor]:
    """What the model is to read, and the positions (bool) at which it then predicts the completion tokens.

    Rows are right-padded and attention is causal, so no token sees padding and no attention mask is needed. Where rows share prompts,
    read(prompts) runs each prompt but its last token once, gradients included; the rows go on from its cache, repeated for them.
    """
    input_ids, start = batch["input_ids"], batch["prompt_length"] - 1  # start (B,): the position that predicts the first token
    prompts, prompt_of_row = batch["prompt_id"].unique(return_inverse=True) if "prompt_id" in batch else (start, None)
    if len(prompts) == len(start) or not can_share_prompts(model) or (start == 0).any():
        return {"input_ids": input_ids[:, :-1], "use_cache": False}, completion_positions(batch)
    a_row = torch.zeros_like(prompts).scatter_(0, prompt_of_row, torch.arange(len(start), device=start.device))
    column = torch.arange(-int(start.max()), 0, device=start.device) + start[a_row, None]  # (prompts, P), negative: padding on the left
    attention = (column >= 0).long()
    cache, column = DynamicCache(config=model.config), column.clamp(min=0)
    read(input_ids[a_row].gather(1, column), attention_mask=attention, position_ids=column, cache=cache, use_cache=True)
    cache.reorder_cache(prompt_of_row)
    mask = batch["mask"].bool()
    column = (start[:, None] + torch.arange(mask.shape[1], device=start.device)).clamp(max=input_ids.shape[1] - 1)  # (B, T)
    attention = torch.cat([attention[prompt_of_row], torch.ones_like(column)], 1)
    return dict(input_ids=input_ids.gather(1, column), attention_mask=attention, position_ids=column, cache=cache, use_cache=True), mask


def completion_logits(model, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (n, V) that predict the batch's n completion tokens, in row order, and those tokens (n,)."""
    with autocast(model):
        inputs, keep = completion_inputs(model, partial(model, logits_to_keep=1), batch)
        logits = model(**inputs, logits_to_keep=keep).logits
    return logits, batch["input_ids"][:, 1:][completion_positions(batch)]


def logprobs_of(model, temperature: float, batch: dict) -> torch.Tensor:
    """Log-probabilities of the completion tokens, (B, T), 0 outside the mask."""
    return scatter_tokens(token_logprobs(*completion_logits(model, batch), temperature), batch["mask"])


def logprobs_and_entropy_of(model, temperature: float, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, and the entropy in nats of the distribution that each token was drawn from."""
    logits, ids = completion_logits(model, batch)
    logprobs, entropy = LogprobsAndEntropy.apply(scaled(logits, temperature), ids)
    return scatter_tokens(logprobs, batch["mask"]), scatter_tokens(entropy, batch["mask"])


def masked_sum(x: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Sum of x where the mask is 1, over all or one dimension; elsewhere x may be anything, inf and NaN included."""
    return x.masked_fill(mask == 0, 0.0).sum(dim)


def masked_mean(x: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Mean of x where the mask is 1, over all or one dimension; 0 where the mask is empty."""
    return masked_sum(x, mask, dim) / (mask != 0).sum(dim).clamp(min=1)


def loss_weights(mask: torch.Tensor, aggregation: str, max_new_tokens: int | None = None) -> torch.Tensor:
    """(B, T): the share of the minibatch's loss that each token carries. Compute it over the whole minibatch, before any cut.

    "sequence": mean over a sequence's tokens, then over sequences (GRPO); "token": mean over all tokens (DAPO);
    "constant": sum over tokens / max_new_tokens, mean over sequences (Dr. GRPO); "sum": sum over tokens, mean over sequences (RLOO).
    A row with an empty mask carries nothing but counts as a sequence.
    """
    mask = upcast((mask != 0).to(mask.dtype))
    if aggregation == "sequence":
        return mask / mask.sum(1, keepdim=True).clamp(min=1) / len(mask)
    if aggregation == "token":
        return mask / mask.sum().clamp(min=1)
    if aggregation == "constant":
        return mask / max_new_tokens / len(mask)
    if aggregation == "sum":
        return mask / len(mask)
    raise ValueError(f"aggregation must be sequence, token, constant or sum, not {aggregation!r}")


def weighted_sum(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """(x * weights).sum(), where an x that carries no weight may be anything, inf and NaN included."""
    return (x.masked_fill(weights == 0, 0.0) * weights).sum()


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: str) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference) from samples of the policy (J. Schulman, "Approximating KL divergence", 2020).

    k1 and k3 are unbiased. As a loss on fresh samples the expected gradient of k1 is 0, of k2 that of KL(policy || reference),
    of k3 that of KL(reference || policy). k3's exponent is clamped at 20 and expm1 keeps it right near 0.
    """
    log_ratio = upcast(logprobs) - upcast(ref_logprobs)
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio**2
    if estimator == "k3":
        log_ratio = log_ratio.clamp(min=-20)
        return torch.expm1(-log_ratio) + log_ratio
    raise ValueError(f"estimator must be k1, k2 or k3, not {estimator!r}")


def importance_weighted(weights: torch.Tensor, logprobs: torch.Tensor, sampled_logprobs: torch.Tensor, cap: float) -> torch.Tensor:
    """weights times min(trained / sampled probability, cap), (B, T), without a gradient.

    Truncated importance sampling (Ionides 2008), for a sampler whose distribution is not quite the one that is trained: bfloat16,
    a mixture of experts, another engine. The policy ratio, if any, starts from logprobs, so that nothing is corrected twice.
    """
    log_ratio = (logprobs.detach() - sampled_logprobs).masked_fill(weights == 0, 0.0)
    return weights * log_ratio.exp().clamp(max=cap)


def at_last_token(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(B,) -> (B, T): x on the last completion token of each row, 0 elsewhere."""
    last = (mask.cumsum(1) == mask.sum(1, keepdim=True)) & (mask != 0)
    return torch.where(last, x[:, None], 0.0)


def check_finite(step: int, **quantities) -> None:
    """Stop before a number that is not finite reaches the weights."""
    for name, value in quantities.items():
        if not math.isfinite(value):
            raise InputError(
                f"the {name.replace('_', ' ')} is {float(value)} in step {step}, so this optimizer step was not taken; try a lower --lr"
            )


# --- rewards ---


def exact_match(prompts: list[str], completions: list[str], rows: list[dict]) -> list[float]:
    """1.0 where the completion is the row's "answer", spaces around it aside."""
    return [float(c.strip() == answer_of(row).strip()) for c, row in zip(completions, rows)]


def answer_of(row: dict) -> str:
    if not isinstance(row.get("answer"), (str, int, float)):
        raise InputError(f'exact_match and math_answer need a column "answer", a text or a number, in every row; this row has none: {row}')
    return str(row["answer"])


NUMBER = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,2}\b|/\d+)?"


def plain_number(text: str) -> Fraction | None:
    """The number in a text that is just one number, exactly, maybe with a sign and a unit: 1,234.50, -3/4, 18 apples."""
    match = re.fullmatch(rf"\s*([-+]?)\s*({NUMBER})(?:\s*[A-Za-z][A-Za-z ]*)?[\s.]*", text)
    try:
        return Fraction(match[1] + match[2].replace(",", "")) if match else None
    except (ValueError, ZeroDivisionError):  # thousands of digits, or over 0
        return None


def final_answer(text: str) -> tuple[str, bool]:
    """What is in the last \\boxed{}, else after the last ####, else all of it; and whether it was marked so. Money and percent signs go."""
    text = re.sub(r"\\?[$€£¥%]", "", text).replace("−", "-")
    text = re.sub(r"\\d?frac\s*(?:\{(\d+)\}\{(\d+)\}|(\d)(\d))", r"\1\3/\2\4", text)
    start = text.rfind("\\boxed{")
    if start >= 0:
        depth, inside = 0, text[start + 6 :]
        for end, character in enumerate(inside):
            depth += (character == "{") - (character == "}")
            if depth == 0:
                return inside[1:end], True
    return (text.rpartition("####")[2], True) if "####" in text else (text, False)


def last_number(text: str) -> Fraction | None:
    """The final number of a completion: what it marks as its answer, if that is one number, else the last number in it."""
    answer, is_marked = final_answer(text)
    numbers = re.findall(rf"(?:(?<![\d.)])-)?{NUMBER}", answer)
    return plain_number(answer if is_marked else numbers[-1] if numbers else "")


def math_answer(prompts: list[str], completions: list[str], rows: list[dict]) -> list[float]:
    """1.0 where the completion's final number equals that of the row's "answer", as exact fractions.

    An answer that is a formula is compared by the package math-verify, and refused without it; a word is for exact_match.
    """

    def is_right(completion: str, answer: str) -> bool:
        number = plain_number(final_answer(answer)[0])
        return math_verified(completion, answer) if number is None else last_number(completion) == number

    return [float(is_right(completion, answer_of(row))) for completion, row in zip(completions, rows)]


def math_verified(text: str, answer: str) -> bool:
    """NOTE: it gives up by itself after 5 s, which counts as wrong; its parser hands what looks like a formula to sympy."""
    if not re.search(r"\d|\\[a-z]|[-+*/^=]", answer):
        raise InputError(f"math_answer can't judge the answer {answer!r}, which is no number and no formula; exact_match can")
    math_verify = optional("math_verify", f"math_answer with the answer {answer!r}, which is not one number,")
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold = math_verify.parse(answer if "$" in answer or "boxed" in answer else f"${answer}$")
    if not gold:
        raise InputError(f"math-verify can't read the answer {answer!r}")
    return text.strip() == answer.strip() or math_verify.verify(gold, math_verify.parse(text) or math_verify.parse(f"${text}$"))


def load_reward_fn(spec: str, called: str = "", timeout: float = 0.0) -> Callable:
    """exact_match, math_answer, or path/to/file.py:function."""
    if spec in ("exact_match", "math_answer"):
        return globals()[spec]
    path, _, name = spec.rpartition(":")
    if not name or not Path(locate(path)).is_file():
        raise InputError(f"--reward-fn {spec} is neither exact_match nor math_answer nor path/to/file.py:function of a file that exists")
    file = Path(locate(path)).resolve()
    sys.path.append(str(file.parent))  # as any script, it may import its neighbours
    module = importlib.util.spec_from_file_location(f"reward_file_{file.stem}", file)
    module, loader = importlib.util.module_from_spec(module), module.loader
    sys.modules[module.__name__] = module  # so that what it defines can be pickled, for a pool of processes
    try:
        loader.exec_module(module)
    except Exception as error:
        raise InputError(f"--reward-fn {spec} could not be loaded: {type(error).__name__}: {one_line(error)}") from error
    fn = getattr(module, name, None)
    if not callable(fn):
        raise InputError(f"--reward-fn {spec}: {path} has no function {name}")
    return guarded(called or name, fn, str(file), timeout)


class TimeUp(BaseException):
    """No Exception, so that a reward function which catches those can't take it for a score."""


@contextmanager
def time_limit(seconds: float):
    """TimeUp in what runs longer (0: no limit)."""

    def ring(*_):
        raise TimeUp(f"it took more than --reward-timeout {seconds:g} s")

    if not seconds:
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def guarded(name: str, fn: Callable, file: str, timeout: float) -> Callable:
    """fn, an exception or an overrun of which is one sentence that names the row; fn is called row by row to find it."""

    def fault_of(*args) -> tuple[object, BaseException | None]:
        try:
            with time_limit(timeout):
                return fn(*copy.deepcopy(args)), None  # it may edit what it gets
        except (Exception, SystemExit, TimeUp) as fault:
            return None, fault

    def call(prompts: list[str], completions: list[str], rows: list[dict]):
        scores, fault = fault_of(prompts, completions, rows)
        if fault is None:
            return scores
        where = f"{len(prompts)} completions at once, though for none of them alone"
        for prompt, completion, row in zip(prompts, completions, rows):
            alone = fault_of([prompt], [completion], [row])[1]
            if type(alone) is type(fault):
                fault, where = alone, f"prompt {prompt!r}, completion {completion!r}"
                break
        lines = [frame.lineno for frame in traceback.extract_tb(fault.__traceback__) if frame.filename == file]
        what = f"{type(fault).__name__}: {one_line(fault)}" + (f" ({Path(file).name} line {lines[-1]})" if lines else "")
        raise InputError(f"reward {name} raised {what} for {where}") from fault

    return call


def reward_model_fn(model, tokenizer, batch_tokens: int, system_prompt: str | None) -> Callable:
    """A reward function that reads prompt + completion as text, with the reward model's own tokenizer (and chat template)."""
    config = model.config.get_text_config()
    if tokenizer.pad_token_id is None:
        pad = config.pad_token_id  # which may be none, -1, or an id that only the model has
        known = pad is not None and 0 <= pad < len(tokenizer)
        tokenizer.pad_token = (known and tokenizer.convert_ids_to_tokens(pad)) or tokenizer.eos_token
    config.pad_token_id = tokenizer.pad_token_id  # the score is read at the last token that is not this one
    tokenizer.padding_side = "right"

    def text_of(prompt: str, completion: str, row: dict) -> tuple[str, bool]:
        """The text, and whether the tokenizer adds its special tokens; a template has its own."""
        messages = conversation(row["prompt"], system_prompt)
        if isinstance(messages, str):
            return prompt + completion, True
        if tokenizer.chat_template is None:
            raise InputError(
                "prompts are messages, but the reward model's tokenizer has no chat template; give prompts as text or use --reward-fn"
            )
        messages = messages + [{"role": "assistant", "content": completion}]
        return tokenizer.apply_chat_template(messages, tokenize=False), False

    @torch.no_grad()
    def fn(prompts, completions, rows):
        texts, kinds = zip(*map(text_of, prompts, completions, rows))
        ids = {kind: tokenizer(list(texts), add_special_tokens=kind).input_ids for kind in set(kinds)}
        ids = [ids[kind][i] for i, kind in enumerate(kinds)]
        if (longest := max(map(len, ids))) > getattr(model.config, "max_position_embeddings", math.inf):
            raise InputError(
                f"a completion with its prompt has {longest} tokens, more than the reward model's positions; lower --max-new-tokens"
            )
        scores = [0.0] * len(ids)
        order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
        while order:
            n = max(1, batch_tokens // len(ids[order[0]]))
            piece, order = order[:n], order[n:]
            inputs = tokenizer.pad({"input_ids": [ids[i] for i in piece]}, return_tensors="pt").to(model.device)
            with autocast(model):
                logits = model(**inputs).logits[:, 0].float().tolist()
            for i, score in zip(piece, logits):
                scores[i] = score
        return scores

    return fn


def load_rewards(
    reward_model: str | None, reward_fn: tuple, reward_weights: tuple, timeout: float, system_prompt: str | None,
    device, dtype, batch_tokens: int, trust_remote_code: bool = False,
) -> list[Reward]:  # fmt: skip
    """The reward model first, then the functions, each with its weight (1 by default; 0: only watched)."""
    if not reward_model and not reward_fn:
        reward_model = "tiny/reward"
    specs = ([reward_model] if reward_model else []) + list(reward_fn)
    weights = reward_weights or (1.0,) * len(specs)
    if len(weights) != len(specs):
        raise InputError(f"--reward-weights has {len(weights)} numbers for {len(specs)} rewards ({', '.join(specs)})")
    if len(set(specs)) < len(specs):
        raise InputError(f"a reward is given twice: {', '.join(specs)}; give it once, with --reward-weights")
    rewards = []
    if reward_model:
        model = sharded(load_reward_model(reward_model, device, dtype, trust_remote_code))
        tokenizer = pretrained(AutoTokenizer, reward_model, trust_remote_code)
        rewards.append(Reward("reward_model", weights[0], reward_model_fn(model, tokenizer, batch_tokens, system_prompt), model))
    names = [*(spec.rpartition(":")[2] for spec in reward_fn), *(reward.name for reward in rewards)]
    for spec, name, weight in zip(reward_fn, names, weights[len(rewards) :]):
        name = spec if names.count(name) > 1 else name
        rewards.append(Reward(name, weight, load_reward_fn(spec, name, timeout), None))
    return rewards


def scores_of(reward: Reward, prompts: list[Prompt], completions: list[str], step: int) -> list[float]:
    """What a reward function gives, checked."""
    with in_step(reward.model):
        values = reward.fn([p.text for p in prompts], completions, [p.row for p in prompts]) if prompts else []
    is_list = hasattr(values, "__len__") and not isinstance(values, (dict, set, str)) and getattr(values, "ndim", 1) == 1
    if not is_list or len(values) != len(completions):
        found = f"{len(values)} scores" if is_list else f"{str(values):.60}, not a list,"
        raise InputError(f"reward {reward.name} returned {found} for {len(completions)} completions")
    values = list(values)
    for i, value in enumerate(values):
        try:
            values[i] = math.nan if isinstance(value, str) else float(value)
        except (TypeError, ValueError):
            values[i] = math.nan
        if not abs(values[i]) < 1e30:  # nan, and what float32 can't hold
            where = f"prompt {prompts[i].text!r}, completion {completions[i]!r}"
            raise InputError(f"reward {reward.name} returned {value!r}, not a finite number, in step {step} for {where}")
    return values


def score(reward_fns: list[Reward], batch: dict, step: int = 0) -> dict:
    """Entries for the batch: "rewards" (B,), the weighted sum, and "reward/NAME" (B,) of each where there are several."""
    prompts = batch["prompts"]
    groups = [i for i, prompt in enumerate(prompts) if i == 0 or prompt is not prompts[i - 1]] + [len(prompts)]
    mine = slice(groups[(part := share(len(groups) - 1)).start], groups[part.stop])  # rows of whole groups
    parts = everywhere(lambda: [scores_of(reward, prompts[mine], batch["completions"][mine], step) for reward in reward_fns])
    each = {f"reward/{r.name}": torch.tensor(sum(values, []), device=batch["mask"].device) for r, *values in zip(reward_fns, *parts)}
    total = sum(reward.weight * values for reward, values in zip(reward_fns, each.values()))
    return {"rewards": total} | (each if len(each) > 1 else {})


def normalize(rewards: torch.Tensor) -> torch.Tensor:
    """(x - mean) / std over the batch; sample std; exactly 0 for equal rewards, whatever rounding leaves of the mean."""
    if rewards.amax() == rewards.amin():
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + 1e-8)


def no_signal(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """(N,) bool: the groups in which all rewards are equal, so that nothing can be learnt from comparing them."""
    groups = rewards.view(-1, group_size)
    return groups.amax(1) == groups.amin(1)


# --- data ---


def read_json(path: Path):
    if not path.is_file():
        raise InputError(f"{path} does not exist, so {path.parent} is not a run folder")
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise InputError(f"{path} is not JSON, or no object: {error}") from None


def read_rows(dataset: str) -> list[tuple[str, dict]]:
    """The rows of a JSONL, CSV or parquet file or of a hub dataset "id:split" or "id:config:split", each with where it stands."""
    path = Path(locate(dataset))
    if not path.is_file() or path.suffix == ".parquet":
        name, *config = dataset.split(":")
        if not path.is_file() and (path.suffix in (".jsonl", ".csv", ".parquet") or not config):
            raise InputError(f"dataset {dataset} is not a file that exists (JSONL, CSV or parquet), nor a hub dataset as id:split")
        load_dataset = optional("datasets", f"dataset {dataset}").load_dataset
        try:
            if path.is_file():
                table = load_dataset("parquet", data_files=str(path), split="train")
            else:
                table = load_dataset(name, *config[:-1], split=config[-1])
        except Exception as error:
            raise InputError(f"dataset {dataset} could not be loaded: {one_line(error)}") from error
        return [(f"{dataset} row {i}", row) for i, row in enumerate(table)]
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{dataset} is not UTF-8 text: {error}") from None
    rows = []
    if path.suffix.lower() == ".csv":
        csv.field_size_limit(2**31 - 1)
        reader = csv.DictReader(io.StringIO(text), skipinitialspace=True)
        if len(set(reader.fieldnames or [])) < len(reader.fieldnames or []):
            raise InputError(f"{dataset} names a column twice: {', '.join(reader.fieldnames)}")
        for row in reader:
            if None in row or None in row.values():
                raise InputError(f"{dataset} line {reader.line_num} has not as many fields as the first line ({len(reader.fieldnames)})")
            rows.append((f"{dataset} line {reader.line_num}", row))
        return rows
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                rows.append((f"{dataset} line {number}", json.loads(line)))
            except json.JSONDecodeError as error:
                raise InputError(f"{dataset} line {number} is not JSON: {error}") from None
    return rows


def conversation(prompt, system_prompt: str | None):
    """A prompt as models see it: a text, or messages; a system prompt, even an empty one, makes messages of a text."""
    if system_prompt is None:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return ([{"role": "system", "content": system_prompt}] if system_prompt else []) + messages


def is_message(message) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)


def load_prompts(dataset: str, tokenizer, max_prompt_tokens: int, system_prompt: str | None = None) -> list[Prompt]:
    """The prompts of a dataset; those over max_prompt_tokens are left out, and counted on the screen.

    A text prompt gets the tokenizer's own special tokens; messages get the chat template, which holds its own.
    """
    prompts, too_long = [], 0
    ends_with_eos = tokenizer("a").input_ids[-1:] == [tokenizer.eos_token_id]  # some tokenizers end every text with it
    for where, row in read_rows(dataset):
        prompt = row.get("prompt") if isinstance(row, dict) else None
        if isinstance(prompt, (str, list)):
            prompt = conversation(prompt, system_prompt)
        if isinstance(prompt, str):
            text, ids = prompt, tokenizer(prompt).input_ids
            if ends_with_eos:
                ids = ids[:-1]
        elif isinstance(prompt, list) and prompt and all(is_message(m) for m in prompt):
            if tokenizer.chat_template is None:
                raise InputError(
                    f"{where} has chat messages, but the tokenizer has no chat template; give one with --chat-template, or a text as prompt"
                )
            if prompt[-1]["role"] == "assistant":
                raise InputError(f"{where} ends with a message of the assistant, whose turn it should be")
            if system_prompt and [m["role"] for m in prompt].count("system") > 1:
                raise InputError(f"{where} has a system message of its own; leave out --system-prompt")
            try:
                text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            except Exception as error:  # templates raise what they like
                raise InputError(f"{where}: the chat template does not take these messages: {error}") from error
            ids = tokenizer(text, add_special_tokens=False).input_ids
        else:
            raise InputError(f'{where} has no "prompt" that is a text or a list of messages')
        if not text.strip() or not ids:
            raise InputError(f"{where}: the prompt is empty")
        if len(ids) > max_prompt_tokens:
            too_long += 1
        else:
            prompts.append(Prompt(ids, text, row))
    if not prompts:
        raise InputError(f"{dataset} has no prompt of at most --max-prompt-tokens {max_prompt_tokens} tokens")
    left_out = f", {too_long} left out with over {max_prompt_tokens} tokens" if too_long else ""
    how = " and ".join(sorted({"texts, continued as they are" if p.text == p.row["prompt"] else "chats, in the template" for p in prompts}))
    (print if too_long else say)(f"{dataset}: {len(prompts)} prompts{left_out} ({how})")
    return prompts


def load_eval_prompts(
    eval_dataset: str | None, dataset: str, tokenizer, max_prompt_tokens: int, system_prompt: str | None = None
) -> list[Prompt]:
    """Held-out prompts: of eval_dataset, else of NAME-eval.jsonl beside NAME.jsonl (or .csv, .parquet), else none."""
    beside = str(Path(dataset).with_stem(Path(dataset).stem + "-eval"))
    if eval_dataset or Path(locate(beside)).is_file():
        return load_prompts(eval_dataset or beside, tokenizer, max_prompt_tokens, system_prompt)
    print("no --eval-dataset: nothing is evaluated on held-out prompts")
    return []


@lru_cache(maxsize=4)
def epoch_order(num_prompts: int, seed: int, epoch: int) -> list[int]:
    return torch.randperm(num_prompts, generator=generator(seed, "prompts", epoch)).tolist()


def take(prompts: list[Prompt], count: int, state: dict, seed: int) -> list[Prompt]:
    """The next prompts of an endless sequence of epochs, each shuffled in its own way; moves state["consumed"] on."""
    places = [divmod(state["consumed"] + i, len(prompts)) for i in range(count)]
    state["consumed"] += count
    return [prompts[epoch_order(len(prompts), seed, epoch)[i]] for epoch, i in places]


# --- evaluation, checkpoints, logging ---


def evaluate(
    rollout: Callable, reward_fns: list[Reward], prompts: list[Prompt], seed: int, chunk: int, num_samples: int, temperature: float | None,
    step: int = 0,
) -> tuple[dict, list[dict]]:  # fmt: skip
    """num_samples completions of each held-out prompt, chunk rows at once, with the same noise every time: mean scores by metric name,
    and a few samples. eval_pass@k, k > 1, is the mean over prompts of the best of k rewards: pass@k where they are 0 or 1."""
    totals, samples, n = {}, [], max(1, chunk // num_samples)
    options = {} if temperature is None else {"temperature": temperature}
    for first in range(0, len(prompts), n):
        batch = rollout(prompts[first : first + n], num_samples, key=(seed, "evaluate"), first_row=first * num_samples, **options)
        batch |= score(reward_fns, batch, step)
        samples = samples or samples_of(select(batch, torch.arange(0, len(batch["mask"]), num_samples)), held_out=True)
        means = {k: v.view(-1, num_samples).mean(1) for k, v in batch.items() if k.startswith("reward")}
        if num_samples > 1:
            means[f"pass@{num_samples}"] = batch["rewards"].view(-1, num_samples).amax(1)
        accumulate(totals, **{k: v.sum().item() for k, v in means.items()})
    return {f"eval_{'reward' if k == 'rewards' else k}": total / len(prompts) for k, total in totals.items()}, samples


def best_so_far(folder: Path) -> dict:
    """Step and eval_reward of best/, which may be of a later step than the checkpoint that a run was resumed from."""
    path = folder / "best" / "state.pt"
    return read_state(path) if path.exists() else {"step": 0, "eval_reward": -math.inf}


def read_state(path: Path) -> dict:
    """A state.pt; tensors and plain values only, nothing is unpickled."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch's own message would have it unpickled
        raise InputError(f"{path} is damaged, or not of a run; move {path.parent.name}/ away") from error


def keep_best(folder: Path, policy, tokenizer, state: dict, step: int, eval_metrics: dict) -> None:
    """Save the policy as best/ when its held-out reward is the best so far, the untrained policy's included."""
    if not eval_metrics:
        return
    reward, best = on_rank_0(lambda: (eval_metrics["eval_reward"], best_so_far(folder)["eval_reward"]))
    best = max(best, state.get("best", -math.inf))
    state["best"] = max(best, reward)
    if step > 0 and reward > best:
        save_model(folder / "best", policy, tokenizer, {"step": step, "eval_reward": reward})


def samples_of(batch: dict, **extra) -> list[dict]:
    """The first few prompt/completion/reward triples."""
    rows = zip(batch["prompts"], batch["completions"], batch["rewards"].tolist())
    return [{"prompt": p.text, "completion": c, "reward": r} | extra for (p, c, r), _ in zip(rows, range(4))]


def rollout_metrics(batch: dict, group_size: int) -> dict:
    """What is logged of a rollout, before anything is filtered or shaped."""
    rewards = batch["rewards"]
    metrics = {"reward": rewards.mean().item(), "reward_std": rewards.std(unbiased=False).item()}
    metrics |= {name: values.mean().item() for name, values in batch.items() if name.startswith("reward/")}
    metrics["completion_length"] = batch["mask"].sum(1).mean().item()
    metrics["truncated_fraction"] = batch["truncated"].float().mean().item()
    if group_size > 1:
        metrics["no_signal_fraction"] = no_signal(rewards, group_size).float().mean().item()
    return metrics


def accumulate(totals: dict, **values) -> None:
    """Add to running sums, without waiting for the GPU."""
    for name, value in values.items():
        totals[name] = totals.get(name, 0.0) + (value.detach() if isinstance(value, torch.Tensor) else value)


def summarize(batch: dict, totals: dict, laps: dict) -> dict:
    """What is logged of an update: losses and gradient norms per optimizer step, other sums per unit of loss weight.

    sampler_gap: nats per token between the log-probabilities as sampled and as scored, 0 but for rounding.
    kl: nats per completion, k3 summed over its tokens, from the log-probabilities as sampled.
    """
    totals = {name: float(value) for name, value in totals.items()}
    of_a_rank = [name for name in totals if name != "updates" and not name.endswith("grad_norm")]
    totals |= zip(of_a_rank, summed(torch.tensor([totals[name] for name in of_a_rank], dtype=torch.float64)).tolist())
    updates, weights, gap_weights = totals.pop("updates"), totals.pop("weights"), totals.pop("gap_weights")
    if (gap := totals.pop("sampler_gap") / (gap_weights or 1.0)) > 0.5:
        raise InputError(
            f"the log-probabilities of sampling and of training differ by {gap:.2f} nats per token; this model can't be sampled in a "
            "padded batch with a cache, and training it here would be wrong"
        )
    metrics = {k: v / updates for k, v in totals.items() if k.endswith(("loss", "grad_norm"))} | {"sampler_gap": gap}
    metrics |= {k: v / weights for k, v in totals.items() if k not in metrics and weights > 0}
    if "ref_logprobs" in batch:
        metrics["kl"] = masked_sum(kl_estimate(batch["logprobs"], batch["ref_logprobs"], "k3"), batch["mask"], 1).mean().item()
    metrics["tokens_per_second"] = batch["mask"].sum().item() / sum(laps.values())
    return metrics | {f"time_{name}": seconds for name, seconds in laps.items()}


def updates_per_batch(batch_size: int, num_epochs: int, minibatch_size: int | None) -> int:
    return num_epochs * math.ceil(batch_size / (minibatch_size or batch_size))


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """1 - variance of (returns - values) / variance of returns, over the mask; 1: values predict all, 0: no better than a constant,
    which is all there is to do where returns don't vary."""

    def variance(x):
        return masked_mean((x - masked_mean(x, mask)) ** 2, mask)

    total = variance(returns).item()
    return 1 - variance(returns - values).item() / total if total > 1e-8 else 0.0


def lr_factor(step: int, warmup_steps: int, schedule: str, num_steps: int) -> float:
    """Learning rate of a step (from 0), as a share of --lr: linear warm-up, then constant, or linear or cosine decay towards 0."""
    progress = min(1.0, max(0, step - warmup_steps) / max(1, num_steps - warmup_steps))
    decay = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}[schedule]
    return min(1.0, (step + 1) / max(1, warmup_steps)) * decay


def load_checkpoint(run_folder: str | None) -> tuple[str | None, dict]:
    """The newest complete checkpoint of a run folder and its state; of a new run: None, and step 0 with no prompt consumed."""
    anew = None, {"step": 0, "consumed": 0}
    if run_folder is None:
        return anew
    on_rank_0(lambda: put_back(Path(run_folder)))
    found = checkpoints(Path(run_folder))
    if not found and (Path(run_folder) / "metrics.jsonl").exists() and not list(Path(run_folder).glob("checkpoint-*")):
        if (Path(run_folder) / "final").exists():
            raise InputError(f"{run_folder} has a final/ but no checkpoint to continue from; name another --output-dir to begin anew")
        print(f"{run_folder} has no checkpoint yet: the run begins anew, and what is there is put aside")
        return anew
    if not found:
        raise InputError(f"--resume {run_folder} holds no complete checkpoint (checkpoint-STEP/state.pt)")
    return str(found[-1]), read_state(found[-1] / "state.pt")


def put_back(run_folder: Path) -> None:
    """The folders whose old one had given its name away when the process died; what else it left half done goes."""
    for old in run_folder.glob(".*.old"):
        if not (folder := old.with_name(old.name[1:-4])).exists() and not old.name.startswith(".checkpoint"):
            old.rename(folder)
    for left in [*run_folder.glob(".*.old"), *run_folder.glob(".*.partial")]:
        shutil.rmtree(left)


def save_model(folder: Path, policy, tokenizer, state: dict | None = None) -> None:
    """A folder that from_pretrained loads, with what --resume needs beside it. All ranks call this and rank 0 writes.

    It is written under another name and gets its own when it is complete and on the disk; an older folder of that name goes only then.
    """
    weights = full_state(policy)
    on_rank_0(lambda: write_model(folder, policy, weights, tokenizer, state))


def write_model(folder: Path, policy, weights: dict, tokenizer, state: dict | None) -> None:
    if not all(torch.isfinite(x).all() for x in weights.values()):
        raise InputError(f"the policy's weights are not finite, so {folder} was not saved; try a lower --lr")
    unfinished, old = folder.with_name(f".{folder.name}.partial"), folder.with_name(f".{folder.name}.old")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        policy.save_pretrained(unfinished, state_dict=weights)
        tokenizer.save_pretrained(unfinished)
        if state is not None:
            torch.save(state, unfinished / "state.pt")
        for path in [*unfinished.rglob("*"), unfinished]:
            sync(path)
    except Exception as error:  # safetensors and torch have their own for a full disk
        left = shutil.disk_usage(folder.parent).free / 2**20
        shutil.rmtree(unfinished, ignore_errors=True)
        why = f"{one_line(error)}; {left:.0f} MB were left on the disk"
        raise InputError(f"{folder} could not be saved ({why}); what was saved before is still there") from error
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    unfinished.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def checkpoints(run_folder: Path) -> list[Path]:
    """The complete ones, oldest first."""
    complete = (p.parent for p in run_folder.glob("checkpoint-*/state.pt") if re.fullmatch(r"checkpoint-\d+", p.parent.name))
    return sorted(complete, key=lambda p: int(p.name.rpartition("-")[2]))


def save_checkpoint(run_folder: Path, step: int, policy, tokenizer, state: dict, keep: int) -> None:
    """checkpoint-STEP, after which all but the newest keep go (0: none goes). On a signal to stop, the run ends here."""
    save_model(run_folder / f"checkpoint-{step}", policy, tokenizer, state | {"step": step})
    for old in checkpoints(run_folder)[:-keep] if keep and rank() == 0 else []:
        old = old.rename(old.with_name(f".{old.name}.old"))
        shutil.rmtree(old, ignore_errors=True)
    if stopping():
        if rank() == 0:
            print(f"stopped after step {step}; continue with --resume {run_folder}", file=sys.stderr)
        sys.exit(128 + asked_to_stop[0])


def write_text(path: Path, text: str) -> None:
    """The whole new text or, whenever the process dies, the whole old one."""
    path.with_name(f".{path.name}").write_text(text)
    path.with_name(f".{path.name}").replace(path)


def read_lines(path: Path) -> list[dict]:
    """The rows of a JSONL file of ours; a last line that was cut short when the process died is left out."""
    rows = []
    for line in path.read_text().split("\n") if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


RUN_FILES = r"args\.json|metrics\.jsonl|samples\.jsonl|checkpoint-\d+|best|final"
PATHS = "model", "reward_model", "value_model", "dataset", "eval_dataset", "chat_template", "reward_fn"


def absolute(option):
    """A path option (or several, or file.py:function) that names something in this folder, so that it does from any other."""
    if isinstance(option, tuple):
        return tuple(map(absolute, option))
    if not option or option in ("exact_match", "math_answer"):
        return option
    path, colon, rest = (option, "", "") if Path(option).exists() else option.rpartition(":")
    return str(Path(path).resolve()) + colon + rest if path and Path(path).exists() else option


def stamp() -> str:
    """The time, and the process, for a name that another run of the same second does not have."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


class Logger:
    """The run folder, the progress on the screen, and a tracker; rank 0's alone."""

    def __init__(self, name: str, config: dict, start: int):
        self.num_steps, self.start = config["num_steps"], start
        self.dir = Path(config["output_dir"] or on_rank_0(lambda: f"runs/{name}-{stamp()}")).absolute()
        on_rank_0(lambda: self.open(name, dict(config), start))

    def open(self, name: str, config: dict, start: int) -> None:
        if not config["resume"] and [name for name in self.dir.glob("*") if re.fullmatch(RUN_FILES, name.name)]:
            raise InputError(f"--output-dir {self.dir} already holds a run; name another folder, or continue it with --resume {self.dir}")
        if start > self.num_steps:  # at num_steps the process may have died before final/ was written
            raise InputError(f"--resume {self.dir}: the run has {start} steps already, more than --num-steps {self.num_steps}")
        self.track, self.end_tracking = open_tracker(config["track"], self.dir, config, start)
        self.dir.mkdir(parents=True, exist_ok=True)
        config |= {option: absolute(config.get(option)) for option in PATHS if option in config}  # to be resumed from any folder
        write_text(self.dir / "args.json", json.dumps({"script": name} | config, indent=2) + "\n")
        if config["resume"] and start == 0 and read_lines(self.dir / "metrics.jsonl"):  # begun anew
            (aside := self.dir / f"until-{stamp()}").mkdir()
            for left in ("metrics.jsonl", "samples.jsonl", "best"):
                if (self.dir / left).exists():
                    (self.dir / left).rename(aside / left)
        for file in ("metrics.jsonl", "samples.jsonl"):  # a resumed run writes the steps after its checkpoint again
            rows = read_lines(self.dir / file) if config["resume"] else []
            write_text(self.dir / file, "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= start))
        bar = {"bar_format": "{desc} {n_fmt}/{total_fmt} {bar} {elapsed}<{remaining}{postfix}", "dynamic_ncols": True}
        self.bar = tqdm(total=self.num_steps, initial=start, desc=name, disable=bool(quiet) or not sys.stderr.isatty(), **bar)
        self.figures = {}

    def log(self, step: int, metrics: dict, samples: list[dict]) -> None:
        """One line in metrics.jsonl, the samples in samples.jsonl, the figures on the screen, and with an evaluation a sample."""
        if rank() > 0:
            return
        metrics = {"step": step} | metrics
        with open(self.dir / "metrics.jsonl", "a") as file:
            file.write(json.dumps(metrics) + "\n")
        with open(self.dir / "samples.jsonl", "a") as file:
            file.writelines(json.dumps({"step": step} | sample) + "\n" for sample in samples)
        self.track(metrics, samples if "eval_reward" in metrics or step == self.num_steps else [])
        form = {"reward": "reward {:.3f}", "kl": "kl {:.2f}", "completion_length": "length {:.1f}", "eval_reward": "eval {:.3f}"}
        figures = {name: text.format(metrics[name]) for name, text in form.items() if name in metrics}
        self.figures |= figures  # the bar keeps the latest evaluation
        if "eval_reward" in metrics or self.bar.disable or not sys.stdout.isatty():
            speed = [f"{metrics['tokens_per_second']:.0f} tokens/s"] if "tokens_per_second" in metrics else []
            self.say(f"step {step}/{self.num_steps}: {', '.join([*figures.values(), *speed])}")
        if "eval_reward" in metrics and not self.bar.disable:
            self.say(fitted(f"    {samples[-1]['prompt'][-30:]!r} -> ", samples[-1]["completion"], samples[-1]["reward"]))
        if step > self.start:
            self.bar.set_postfix_str(", ".join(self.figures[name] for name in form if name in self.figures), refresh=False)
            self.bar.update()

    def say(self, text: str) -> None:
        if not quiet:
            self.bar.write(text)

    def close(self) -> None:
        """The held-out scores before and after, and where everything lies."""
        if rank() > 0:
            return
        self.bar.close()
        self.end_tracking()
        metrics, samples = read_lines(self.dir / "metrics.jsonl"), read_lines(self.dir / "samples.jsonl")
        first, last = metrics[0], metrics[-1]
        names = [name for name in first if name.startswith("eval_reward") and name in last]
        if names:
            print(f"\n{'held-out prompts':<40}{'before':>10}{'after':>10}")
        for name in names:
            print(f"{name.removeprefix('eval_'):<40}{first[name]:>10.3f}{last[name]:>10.3f}")
        before, after = ([s for s in samples if s.get("held_out") and s["step"] == row["step"]] for row in (first, last))
        for b, a in zip(before[:3], after):
            say(fitted("", b["prompt"]))
            say(fitted("    before: ", b["completion"], b["reward"]))
            say(fitted("    after:  ", a["completion"], a["reward"]))
        best = best_so_far(self.dir)["step"]
        curves = "curves.png, " if draw_curves({self.dir.name: metrics}, self.dir / "curves.png") else ""
        print(f"\nrun folder: {self.dir}")
        say(f"    metrics.jsonl, samples.jsonl, {curves}final/{f', best/ of step {best}' if best else ''}")


def fitted(label: str, text: str, score: float | None = None) -> str:
    """label, text as in Python and score in about three lines of the terminal's width, or 140; the middle of a longer text goes."""
    width = max(40, shutil.get_terminal_size((140, 24)).columns)
    text, end, indent = repr(text), "" if score is None else f" ({score:.3f})", min(len(label), 12)
    room = max(40, int(2.5 * (width - indent)) - len(label) - len(end) + indent)
    text = text if len(text) <= room else f"{text[: room // 2]} ... {text[-room // 2 :]}"
    return textwrap.fill(label + text + end, width, subsequent_indent=" " * indent, break_on_hyphens=False)


def draw_curves(runs: dict[str, list[dict]], path: Path) -> bool:
    """An image with a panel per metric and a line per run, given as {name: rows of metrics.jsonl}; False without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure  # without pyplot: no window, no state that a reward function could share

    found = dict.fromkeys(name for rows in runs.values() for row in rows for name in row)
    names = [name for name in found if not re.match("step$|lr$|time_", name)]
    height = math.ceil(len(names) / 4)
    figure = Figure((14, 2.2 * height + 0.3), layout="constrained")
    axes = figure.subplots(height, 4, squeeze=False).flatten()
    for axis, name in zip(axes, names):
        for run, rows in runs.items():
            points = [(row["step"], row[name]) for row in rows if name in row]
            axis.plot(*zip(*points), ".-" if name.startswith("eval") else "-", label=run, linewidth=1) if points else axis.plot([])
        axis.set_title(name, fontsize="medium")
    for axis in axes[len(names) :]:
        axis.set_axis_off()
    if len(runs) > 1:
        figure.legend(handles=axes[0].lines, loc="outside upper center", ncols=4)
    figure.savefig(path)
    return True


def open_tracker(track: str, folder: Path, config: dict, start: int) -> tuple[Callable, Callable]:
    """(metrics, samples) -> None, which shows a step under the names of metrics.jsonl, and () -> None, which ends the run there.

    The package is imported only here. A resumed run goes on in the old one's place; the steps after its checkpoint are sent again.
    """
    if track == "none":
        return lambda metrics, samples: None, lambda: None
    package = optional(track, f"--track {track}")
    folder.mkdir(parents=True, exist_ok=True)
    columns = ["held_out", "prompt", "completion", "reward"]

    def rows_of(samples: list[dict]) -> list[list]:
        return [[sample.get(column, False) for column in columns] for sample in samples]

    if track == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(folder), purge_step=(start + 1 if start else 0) if config["resume"] else None)

        def log(metrics: dict, samples: list[dict]) -> None:
            step = metrics["step"]
            for name, value in metrics.items():
                if name != "step":
                    writer.add_scalar(name, value, step)
            if samples:  # as a table in markdown, where a bar would begin a new cell
                rows = [[repr(x).replace("|", "&#124;") for x in row] for row in rows_of(samples)]
                writer.add_text("samples", "\n".join(f"| {' | '.join(row)} |" for row in [columns, ["---"] * len(columns), *rows]), step)
            writer.flush()

        return log, writer.close
    options = {"name": folder.name, "config": config, "resume": "allow" if config["resume"] else "never"}  # the same in both
    if track == "wandb":
        earlier = sorted(folder.glob("wandb/*run-*-*"))
        options |= {"dir": str(folder), "id": earlier[-1].name.rpartition("-")[2] if config["resume"] and earlier else None}
    package.init(project="policy-gradients", **options)

    def log(metrics: dict, samples: list[dict]) -> None:
        table = {"samples": package.Table(columns=columns, data=rows_of(samples))} if samples else {}
        package.log({name: value for name, value in metrics.items() if name != "step"} | table, step=metrics["step"])

    return log, package.finish


def describe(
    device, dtype, tokenizer, models: dict, reward_fns: list[Reward], prompts: list[Prompt], eval_prompts: list[Prompt], /,
    *, num_steps, num_prompts, group_size, num_epochs, minibatch_size, temperature, max_new_tokens, **_,
) -> None:  # fmt: skip
    """The first screen: device, models with their sizes, what a step is in numbers, and how completions are sampled."""
    longest, positions = max(len(p.ids) for p in prompts + eval_prompts), getattr(models["policy"].config, "max_position_embeddings", None)
    if positions and longest + max_new_tokens > positions:
        raise InputError(
            f"the longest prompt ({longest} tokens) and --max-new-tokens {max_new_tokens} exceed the model's {positions} positions"
        )
    embeddings, ids = models["policy"].get_input_embeddings().num_embeddings, stop_token_ids(models["policy"], tokenizer)
    if (largest := max(*ids, *(max(p.ids) for p in prompts + eval_prompts))) >= embeddings:
        raise InputError(f"the tokenizer gives the id {largest}, but the model has {embeddings} embeddings; they don't belong together")
    for reward in reward_fns:
        if reward.fn in (exact_match, math_answer):  # refuses a row without an answer now, not when its turn comes
            reward.fn(*zip(*((p.text, "", p.row) for p in prompts + eval_prompts)))
    several = f" x {num_ranks()} ({'each with a copy of the weights' if ranks['mesh'].ndim > 1 else 'weights sharded'})" if ranks else ""
    say(f"device: {device}{several}, float32 weights, {str(dtype).removeprefix('torch.')} passes")
    for name, model in [*models.items(), *((r.name, r.model) for r in reward_fns)]:
        if model is not None:
            total, trained = (sum(p.numel() for p in model.parameters() if p.requires_grad or k) / 1e6 for k in (True, False))
            how = ", frozen" if trained == 0 else f", {trained:.3f}M trained" if trained < total else ""
            how = " of the policy, its adapter off" if isinstance(model, WithoutAdapter) else how
            say(f"{name.replace('_', ' ')}: {total:.3f}M parameters{how}")
    say("reward: " + " + ".join(f"{r.weight:g} * {r.name}" for r in reward_fns))
    B, updates = num_prompts * group_size, updates_per_batch(num_prompts * group_size, num_epochs, minibatch_size)
    in_a_step = f"{num_prompts} prompts x {group_size} completions = {B}"
    say(f"a step: {in_a_step}, {updates} optimizer step(s) in {num_epochs} pass(es)")
    epochs = num_steps * num_prompts / len(prompts)
    say(f"in all: {num_steps} steps = {num_steps * B:,} completions, {num_steps * updates:,} optimizer steps, {epochs:.1f} epochs")
    say(f"sampling: temperature {temperature}, at most {max_new_tokens} new tokens; no top-k, top-p or penalties")
