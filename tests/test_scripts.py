"""Every script from its command line to its run folder, on the embedded models: it runs, repeats, resumes, learns."""

import json
import math
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import cispo
import common
import grpo
import gspo
import ppo
import reinforce
import rloo

ROOT = Path(__file__).parents[1]
SCRIPTS = {m.__name__: m for m in (reinforce, rloo, ppo, grpo, gspo, cispo)}
FEW = Path(tempfile.mkdtemp())  # the embedded tasks, cut short: NAME.jsonl and NAME-eval.jsonl
for file, rows in (("addition", 64), ("addition-eval", 8), ("reviews", 64), ("reviews-eval", 8)):
    (FEW / f"{file}.jsonl").write_text("".join((ROOT / f"tiny/{file}.jsonl").read_text().splitlines(True)[:rows]))
ADDITION = {"dataset": str(FEW / "addition.jsonl"), "reward_fn": ("exact_match",), "max_new_tokens": 8}
SMALL = {"dataset": str(FEW / "reviews.jsonl"), "num_steps": 3, "num_prompts": 4, "group_size": 4, "minibatch_size": 8,
         "eval_every": 2, "max_new_tokens": 16}  # fmt: skip
ENVIRONMENT = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
TIMES = re.compile("time_|tokens_per_second")
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"

KEYS = {  # contract: the same keys wherever they mean something
    "step", "reward", "reward_std", "entropy", "completion_length", "truncated_fraction", "loss", "grad_norm", "lr",
    "tokens_per_second", "time_generate", "time_score", "time_update",
}  # fmt: skip


def metrics_of(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def train(name, folder, **options):
    """Run a script's main in this process; its metrics."""
    module = SCRIPTS[name]
    module.main(module.Args(**{"output_dir": str(folder)} | options))
    return metrics_of(folder)


def without_times(rows):
    return [{k: v for k, v in row.items() if not TIMES.match(k)} for row in rows]


def weights_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def run_command(words, folder=ROOT):
    """python SCRIPT FLAGS in this process; a resumed run changes the working directory, but not for what comes next."""
    saved, before = sys.argv, os.getcwd()
    sys.argv = words
    try:
        runpy.run_path(str(folder / words[0]), run_name="__main__")
    finally:
        sys.argv = saved
        os.chdir(before)


def chat_model(folder):
    """tiny/policy with a chat template."""
    shutil.copytree(ROOT / "tiny/policy", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


# --- learning, through the command line ---


@pytest.mark.parametrize("name", ["reinforce", "rloo", "ppo"])  # the other three on reviews, below
def test_addition_from_the_command_line_is_learnt(name, tmp_path, capsys):
    command = f"{name}.py --dataset tiny/addition.jsonl --eval-dataset tiny/addition-eval.jsonl --reward-fn exact_match"
    words = [*shlex.split(command), "--num-steps", "20", "--eval-every", "0", "--output-dir", str(tmp_path / "run")]
    if name == "reinforce":  # a process of its own, as a user starts it
        command = [sys.executable, *words]
        done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT)
        assert done.returncode == 0, done.stderr
    else:
        run_command(words)
    out = done.stdout if name == "reinforce" else capsys.readouterr().out
    rows = metrics_of(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(21))
    assert 0.25 < rows[0]["eval_reward"] < 0.5 and rows[-1]["eval_reward"] > 0.75, (rows[0], rows[-1])
    assert KEYS <= rows[1].keys()
    assert all(math.isfinite(value) for row in rows for value in row.values())
    for words in (
        "device: cpu",
        "addition.jsonl: 3000 prompts, 0 left out",
        "run folder: ",
        "step 20: reward ",
        "' -> '",
    ):
        assert words in out, out
    folder = tmp_path / "run" / "final"  # an ordinary model folder
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = model.generate(**tokenizer("21+34=", return_tensors="pt"), do_sample=False, max_new_tokens=8)
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == "21+34=55"


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_the_learned_reward_rises_on_reviews_and_gold_with_it(name, tmp_path):
    rewards = {"reward_model": "tiny/reward", "reward_fn": ("tiny/make.py:gold_score",), "reward_weights": (1.0, 0.0)}
    rows = train(name, tmp_path / "run", num_steps=10, eval_every=0, lr=4e-4, warmup_steps=2, **rewards)
    first, last = rows[0], rows[-1]
    assert last["eval_reward"] > first["eval_reward"] + 0.4, (first, last)
    assert last["eval_reward/gold_score"] > first["eval_reward/gold_score"] + 0.3, (first, last)
    assert last["eval_reward/reward_model"] == pytest.approx(
        last["eval_reward"]
    )  # gold has weight 0: it is only watched
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert {"step", "prompt", "completion", "reward"} <= samples[0].keys()


# --- same seed, same numbers ---


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_run_repeats_and_resumes_bit_for_bit_whatever_is_evaluated_and_saved(name, tmp_path):
    """10 prompts, so that the epochs turn over; 4 steps in one go, and 2 then 2 more, each evaluated and saved."""
    data = tmp_path / "ten.jsonl"
    data.write_text("".join(ROOT.joinpath("tiny/addition.jsonl").read_text().splitlines(True)[:10]))
    options = SMALL | ADDITION | {"dataset": str(data), "eval_dataset": str(FEW / "addition-eval.jsonl")}
    options |= {"eval_every": 100}
    options |= {"num_epochs": 2 if name in ("ppo", "grpo") else 1, "kl_coef": 0.05}
    if name in ("reinforce", "rloo"):
        options["minibatch_size"] = 0
    whole = train(name, tmp_path / "whole", **options | {"num_steps": 4})
    train(name, tmp_path / "parts", **options | {"num_steps": 2, "eval_every": 1, "save_every": 1})
    run_command([f"{name}.py", "--resume", str(tmp_path / "parts"), "--num-steps", "4"])
    parts = metrics_of(tmp_path / "parts")

    def strip(rows):
        return [{k: v for k, v in row.items() if not k.startswith("eval")} for row in without_times(rows)]

    assert strip(parts) == strip(whole) and [row["step"] for row in parts] == [0, 1, 2, 3, 4]
    assert [p.name for p in common.checkpoints(tmp_path / "parts")] == ["checkpoint-3", "checkpoint-4"]
    a, b = weights_of(tmp_path / "whole" / "final"), weights_of(tmp_path / "parts" / "final")
    assert all(torch.equal(a[k], b[k]) for k in a)
    other = train(name, tmp_path / "other", **options | {"num_steps": 1, "seed": 1})
    assert strip(other)[1] != strip(whole)[1]


@pytest.mark.parametrize("name", SCRIPTS)
def test_at_learning_rate_0_nothing_moves(name, tmp_path):
    options = SMALL | ADDITION | {"lr": 0.0, "temperature": 1.5, "num_epochs": 2, "num_steps": 1}
    rows = train(name, tmp_path / "run", **options)
    before, after = weights_of(ROOT / "tiny/policy"), weights_of(tmp_path / "run" / "final")
    assert all(torch.equal(before[k].float(), after[k]) for k in before)
    for row in rows[1:]:
        assert row["sampler_gap"] < 1e-5 and row.get("ratio_mean", 1.0) == pytest.approx(1.0, abs=1e-4)
        assert row.get("clip_fraction", 0.0) == 0.0 and row.get("kl", 0.0) == pytest.approx(0.0, abs=1e-5)


def test_a_strong_kl_penalty_holds_the_policy_near_the_reference(tmp_path):
    options = SMALL | ADDITION | {"num_steps": 15, "eval_every": 0, "lr": 2e-4, "num_prompts": 16, "minibatch_size": 64}
    runs = (train("grpo", tmp_path / str(coef), **options | {"kl_coef": coef}) for coef in (1e-9, 5.0))
    loose, held = (sum(row["kl"] for row in rows[-5:]) for rows in runs)
    assert held < 0.5 * loose, (held, loose)


# --- options ---


@pytest.mark.parametrize("name, options", [  # what tests/test_loops.py does not reach
    ("reinforce", {"warmup_steps": 2, "save_every": 2}),
    ("rloo", {"warmup_steps": 0, "dtype": "bfloat16"}),
    ("ppo", {"value_model": "tiny/policy", "minibatch_size": 0}),
    ("ppo", {"shared_backbone": True, "minibatch_size": 0, "kl_coef": 0.0}),
    ("ppo", {"dtype": "bfloat16"}),
    ("grpo", {"clip_high": 0.28, "aggregation": "token", "kl_coef": 0.0, "dynamic_sampling": 3, "overlong_buffer": 4,
              "mask_truncated": True}),
    ("gspo", {"kl_coef": 0.1, "dtype": "bfloat16", "is_correction_cap": 2.0}),
])  # fmt: skip
def test_options_run(name, options, tmp_path):
    rows = train(name, tmp_path / "run", **SMALL | options)
    assert len(rows) == 4 and all(math.isfinite(value) for row in rows for value in row.values())
    assert ("kl" in rows[1]) == (options.get("kl_coef", SCRIPTS[name].Args.kl_coef) != 0)
    saved = ["checkpoint-3"] if "save_every" not in options else ["checkpoint-2", "checkpoint-3"]
    assert [path.name for path in common.checkpoints(tmp_path / "run")] == saved


def test_each_group_of_the_optimizer_warms_up_to_its_own_rate(tmp_path, monkeypatch):
    """The value model's second group, too; a resumed run goes on at the rate of its step."""
    steps, step = [], torch.optim.AdamW.step

    def noted(self, *args, **kwargs):
        steps.append([group["lr"] for group in self.param_groups])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", noted)
    options = SMALL | ADDITION | {"lr": 2e-4, "value_lr": 6e-3, "warmup_steps": 4, "minibatch_size": 0, "num_steps": 2}
    rows = train("ppo", tmp_path / "run", **options)
    run_command(["ppo.py", "--resume", str(tmp_path / "run"), "--num-steps", "5"])
    assert steps.pop(2) == [0.0, 0.0]  # how torch makes room for the state that it loads
    shares = (0.25, 0.5, 0.75, 1.0, 1.0)
    assert steps == [[pytest.approx(2e-4 * share), pytest.approx(6e-3 * share)] for share in shares]
    assert [row["lr"] for row in (*rows[1:3], *metrics_of(tmp_path / "run")[3:])] == [lr for lr, _ in steps]


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_dynamic_sampling_that_finds_no_signal_at_all_goes_on_without(name, tmp_path):
    """The start of a hard task: every group is dead, and so is every one that replaces it."""
    (tmp_path / "hard.jsonl").write_text('{"prompt": "1+1=", "answer": "no"}\n{"prompt": "2+2=", "answer": "no"}\n' * 4)
    (tmp_path / "hard-eval.jsonl").write_text('{"prompt": "1+1=", "answer": "no"}\n')
    options = SMALL | ADDITION | {"dataset": str(tmp_path / "hard.jsonl"), "dynamic_sampling": 2, "num_steps": 2}
    rows = train(name, tmp_path / "run", **options | {"kl_coef": 0.0})
    assert [row["no_signal_fraction"] for row in rows[1:]] == [1.0, 1.0] and rows[2]["grad_norm"] == 0.0


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_dynamic_sampling_replaces_groups_without_signal(name, tmp_path, monkeypatch):
    """Half the prompts can't be answered, so about half of the groups are dead: refilled, no such group is left."""
    rows = [json.loads(line) for line in ROOT.joinpath("tiny/addition.jsonl").read_text().splitlines()[:40]]
    data = tmp_path / "half.jsonl"
    lines = [json.dumps(row | {"answer": row["answer"] if i % 2 else "no"}) + "\n" for i, row in enumerate(rows)]
    data.write_text("".join(lines))
    options = SMALL | ADDITION | {"dataset": str(data), "num_steps": 2}
    plain = train(name, tmp_path / "plain", **options)
    trained, minibatches = [], common.minibatches
    monkeypatch.setattr(common, "minibatches", lambda batch, *args: trained.append(batch) or minibatches(batch, *args))
    refilled = train(name, tmp_path / "refilled", **options | {"dynamic_sampling": 20})
    assert len(trained) == 2
    for batch in trained:  # as many rows as were asked for, those of a group side by side, and a signal in each group
        assert len(batch["mask"]) == len(batch["prompts"]) == 16 and not common.no_signal(batch["rewards"], 4).any()
        assert all(len({p.text for p in batch["prompts"][i : i + 4]}) == 1 for i in range(0, 16, 4))
    assert plain[0]["reward"] == refilled[0]["reward"]  # what is logged is what was sampled, not what was kept
    assert plain[0]["no_signal_fraction"] == refilled[0]["no_signal_fraction"] > 0
    assert plain[0]["loss"] != refilled[0]["loss"]
    for line in (tmp_path / "refilled" / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)  # rows stay together when some are dropped
        answers = {row["prompt"]: row["answer"] for i, row in enumerate(rows) if i % 2}
        assert sample.get("held_out") or sample["reward"] == float(sample["completion"] == answers[sample["prompt"]])


def test_what_is_typed_beside_resume_wins(tmp_path, capsys):
    train("ppo", tmp_path / "run", **SMALL | ADDITION | {"num_steps": 1, "kl_coef": 0.0})
    typed = ["--num-steps", "2", "--lr", "1e-9", "--value-lr", "1e-9", "--kl-coef", "5.0"]
    run_command(["ppo.py", "--resume", str(tmp_path / "run"), *typed])
    last = metrics_of(tmp_path / "run")[-1]
    assert last["step"] == 2 and last["lr"] <= 1e-9 and "kl" in last
    assert json.loads((tmp_path / "run" / "args.json").read_text())["kl_coef"] == 5.0
    out = capsys.readouterr().out
    for words in ("--num-steps 2 (was 1)", "--lr 1e-09", "--kl-coef 5.0 (was 0.0)"):
        assert words in out


def test_a_text_option_is_no_path_in_a_resumed_run(tmp_path, monkeypatch, capsys):
    """A system prompt longer than a file name may be; and what is named like a file here is not taken for it."""
    monkeypatch.chdir(tmp_path)
    chat_model(Path("chatty"))
    Path("exact_match").touch()
    options = {"system_prompt": "Think. " * 40, "model": "chatty", "num_steps": 1}
    train("grpo", tmp_path / "run", **SMALL | ADDITION | options)
    run_command(["grpo.py", "--resume", str(tmp_path / "run"), "--num-steps", "2"])
    assert metrics_of(tmp_path / "run")[-1]["step"] == 2 and "--system-prompt" not in capsys.readouterr().out


def test_ppo_is_not_resumed_with_a_value_model_of_another_kind(tmp_path):
    train("ppo", tmp_path / "run", **SMALL | {"num_steps": 1})
    with pytest.raises(
        SystemExit, match="the checkpoint does not fit the models, whose options must stay as they were"
    ):
        run_command(["ppo.py", "--resume", str(tmp_path / "run"), "--num-steps", "2", "--reward-weights", "0"])


@pytest.mark.parametrize("command, message", [  # what is one script's own; tests/test_refusals.py has the rest
    ("rloo.py --group-size 1", "--group-size must be 2 or more"),
    ("gspo.py --group-size 1", "--group-size must be 2 or more"),
    ("ppo.py --value-model ./nothere", "no tokenizer could be loaded from ./nothere, a folder or a hub id"),
    ("ppo.py --shared-backbone --value-model tiny/policy", "--shared-backbone puts the value head on the policy"),
])  # fmt: skip
def test_what_cannot_work_is_refused_in_one_sentence(command, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        run_command(command.split())
    assert str(stop.value).startswith("error: ") and message in str(stop.value) and "\n" not in str(stop.value)
    assert not list(tmp_path.iterdir())  # nothing was written


def test_a_run_is_resumed_by_its_own_script_also_after_a_torn_line(tmp_path):
    options = SMALL | ADDITION | {"num_steps": 1}
    train("grpo", tmp_path / "run", **options)
    with pytest.raises(SystemExit, match="is a run of grpo.py"):
        run_command(["rloo.py", "--resume", str(tmp_path / "run"), "--num-steps", "2"])
    for file in ("metrics.jsonl", "samples.jsonl"):
        with open(tmp_path / "run" / file, "a") as torn:
            torn.write('{"step": 2, "rew')
    run_command(["grpo.py", "--resume", str(tmp_path / "run"), "--num-steps", "2"])
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == [0, 1, 2]


def test_several_updates_without_a_ratio_still_run(tmp_path):
    """The gap between sampling and training is measured before the policy moves, however far it moves then."""
    rows = train("rloo", tmp_path / "run", **SMALL | ADDITION | {"num_epochs": 10, "lr": 1e-2, "warmup_steps": 0})
    assert all(row["sampler_gap"] < 1e-4 for row in rows[1:])


def test_ppo_starts_its_value_model_from_the_reward_model_or_at_zero(tmp_path, capsys):
    train("ppo", tmp_path / "learned", **SMALL | {"num_steps": 1})
    assert "value model: starts from" in (out := capsys.readouterr().out) and "tiny/reward" in out
    rows = train("ppo", tmp_path / "verified", **SMALL | ADDITION | {"num_steps": 1})
    assert "starts from tiny/policy" in capsys.readouterr().out
    assert rows[1]["explained_variance"] == pytest.approx(0.0, abs=1e-6)  # V = 0 everywhere


# --- a script of one's own ---


def without(script, name):
    """The text of a script from which an option is dropped: its default stands where it was used."""
    default = r"(?!\(\n)[^\n]*?  #[^\n]*\n|\(\n.*?\n    \)[^\n]*\n"
    field = re.search(rf"^    {name}: [^\n]*? = ({default})", script, flags=re.MULTILINE | re.DOTALL)
    value = re.sub(r"#.*", "", field[1]).strip()
    return re.sub(rf"\bargs\.{name}\b", f"({value})", script[: field.start()] + script[field.end() :])


def test_a_copied_script_may_drop_options_and_add_its_own(tmp_path, monkeypatch):
    """A copy beside a copy of common.py, which knows no option by name but resume and output_dir."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "common")
    shutil.copy(ROOT / "common.py", tmp_path)
    words = f"mine.py --model {ROOT}/tiny/policy --dataset {FEW}/addition.jsonl --reward-fn exact_match --num-steps 1"
    words = f"{words} --num-prompts 2 --group-size 2 --max-new-tokens 4".split()
    script = (ROOT / "grpo.py").read_text()
    own = "    my_coef: float = 0.5  # mine\n    my_count: Positive[int] = 3  # mine\n"
    script = script.replace("    # algorithm\n", f"    # algorithm\n{own}", 1)
    script = script.replace("args.kl_coef *", "args.my_coef * args.my_count *", 1)
    dropped = [(), ("output_dir",), ("track", "seed"), ("eval_every", "eval_samples", "eval_temperature"), ("resume",)]
    dropped += [("is_correction_cap",)]
    gone = {name for names in dropped for name in names}
    left = [name for name in grpo.Args.__dataclass_fields__ if f"--{name.replace('_', '-')}" not in words]
    for names in [*dropped, tuple(name for name in left if name not in gone)]:  # at last all that the command needs not
        for name in names:
            script = without(script, name)
        (tmp_path / "mine.py").write_text(script)
        run_command([*words, "--my-coef", "0.25"], tmp_path)
        (run,) = tmp_path.glob("runs/*")
        assert sys.modules["common"].__file__ == str(tmp_path / "common.py")
        assert [row["step"] for row in metrics_of(run)] == [0, 1] and (run / "final" / "config.json").exists()
        options = json.loads((run / "args.json").read_text())
        assert options["my_coef"] == 0.25 and options["my_count"] == 3 and not options.keys() & set(names)
        if names == ("output_dir",):
            run_command(["mine.py", "--resume", str(run), "--num-steps", "2"], tmp_path)
            assert [row["step"] for row in metrics_of(run)] == [0, 1, 2]
        shutil.rmtree(run)
        for name, value, range_ in (
            ("my-coef", "-1", "0 or more, not -1.0"), ("my-coef", "nan", "0 or more, not nan"),
            ("my-coef", "inf", "0 or more, not inf"), ("my-count", "0", "above 0, not 0"),
        ):  # fmt: skip
            with pytest.raises(SystemExit, match=f"^error: --{name} must be {range_}$"):
                run_command([*words, f"--{name}", value], tmp_path)
    assert options.keys() == {"script", "started_in", "my_coef", "my_count"} | {
        word[2:].replace("-", "_") for word in words if word.startswith("--")
    }


# --- the README ---


README = (ROOT / "README.md").read_text()


def readme_commands():
    blocks = re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.split("#")[0].strip() for line in lines if re.search(r"python \w+\.py", line)]


@pytest.mark.parametrize("command", readme_commands())
def test_a_command_of_the_readme_runs(command, tmp_path, monkeypatch):
    """With the files that the README shows, named in backticks above each, and an embedded model for one of the hub."""
    monkeypatch.chdir(tmp_path)
    for name, text in re.findall(r"`(\w+\.\w+)`[^\n`]*:\n\n```\w+\n(.*?)```", README, flags=re.DOTALL):
        (tmp_path / name).write_text(text)
    words = shlex.split(command[command.index("python ") :])[1:]
    if "sentiment.py:score" in words:
        pytest.importorskip("vaderSentiment")
    if "--model" in words:
        words[words.index("--model") + 1] = str(chat_model(tmp_path / "chatty"))
    words += ["--max-new-tokens", "8"] * ("--max-new-tokens" not in words)
    words += ["--eval-dataset", str(FEW / "reviews-eval.jsonl")] * ("--dataset" not in words)
    run_command([*words, "--num-steps", "1", "--output-dir", str(tmp_path / "run")])
    assert (tmp_path / "run" / "final" / "config.json").exists()
