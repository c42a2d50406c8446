"""Bad input of every kind ends before training where it can, in one sentence, and nothing is written over.

The sentence names the culprit. On the command line's grammar tyro exits with 2 and suggests the nearest flag;
everything else exits with 1. Only what is wrong in one's own reward function keeps its traceback.
"""

import json
import sys
from importlib.util import find_spec

import pytest
import torch
from test_scripts import ADDITION, FEW, ROOT, SMALL, TEMPLATE, run_command, train
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

RUN = json.dumps({"script": "grpo", "started_in": str(ROOT)})
SHAPE = {"vocab_size": 512, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
SHAPE |= {"num_attention_heads": 2}
TEMPLATES = {"chatty": TEMPLATE, "bare": "{{ messages[0].nothing.more }}", "open": "{% for m in"}


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    """A folder of bad things, each named for what is wrong with it."""
    folder = tmp_path_factory.mktemp("bad")
    files = {
        "ok.jsonl": '{"prompt": "1+1=", "answer": "2"}\n', "empty.jsonl": "", "blank.jsonl": "\n\n",
        "torn.jsonl": '{"prompt": "a"}\n{"prompt": "b', "array.jsonl": "[1, 2]\n", "number.jsonl": "3\n",
        "noprompt.jsonl": '{"question": "a"}\n', "null.jsonl": '{"prompt": null}\n', "int.jsonl": '{"prompt": 3}\n',
        "nomessages.jsonl": '{"prompt": []}\n', "norole.jsonl": '{"prompt": [{"content": "a"}]}\n',
        "strings.jsonl": '{"prompt": ["a"]}\n', "chat.jsonl": '{"prompt": [{"role": "user", "content": "a"}]}\n',
        "noanswer.jsonl": '{"prompt": "a"}\n', "nullanswer.jsonl": '{"prompt": "a", "answer": null}\n',
        "word.jsonl": '{"prompt": "a", "answer": "east"}\n', "long.jsonl": json.dumps({"prompt": "1" * 900}),
        "pretty.jsonl": json.dumps({"prompt": "a"}, indent=2), "short.csv": "prompt,answer\na\n",
        "wide.csv": "prompt\na,b\n", "nocolumn.csv": "question\na\n", "syntax.py": "def score(:\n",
        "imports.py": "import no_such_package\n", "constant.py": "score = 3\n", "empty.py": "",
        "raises.py": "def score(prompts, completions, rows):\n    return [rows[0]['level'] for _ in rows]\n",
        "none.py": "def score(prompts, completions, rows):\n    pass\n",
        "one.py": "def score(prompts, completions, rows):\n    return [1]\n",
        "nan.py": "def score(prompts, completions, rows):\n    return [float('nan')] * len(rows)\n",
        "text.py": "def score(prompts, completions, rows):\n    return ['good'] * len(rows)\n",
        "few.py": "def score(prompts):\n    return [1.0]\n",
        "exits.py": "def score(prompts, completions, rows):\n    raise SystemError('no')\n", "notmodel/readme.txt": "",
        "broken/config.json": "{", "nothing/metrics.jsonl": "",
        "listanswer.jsonl": '{"prompt": "a", "answer": [1]}\n', "empty.csv": 'prompt,answer\n"",2\n',
        "parts.jsonl": '{"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}\n',
        "answered.jsonl": '{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n',
        "system.jsonl": '{"prompt": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}\n',
        "mine/final/thesis.txt": "precious",
        "dict.py": "def score(prompts, completions, rows):\n    return {str(i): 1.0 for i, _ in enumerate(rows)}\n",
        "scalar.py": "import torch\ndef score(prompts, completions, rows):\n    return torch.tensor(1.0)\n",
        "corrupt/args.json": RUN, "corrupt/checkpoint-3/state.pt": "no zip", "corrupt/checkpoint-old/state.pt": "",
        "hollow/args.json": RUN, "hollow/checkpoint-3/state.pt": "",
        "rankless/adapter_config.json": "{}", "adapter/adapter_config.json": '{"r": 8}',
        "run/args.json": RUN, "torn/args.json": '{"script": "gr', "list/args.json": "[]",
        "other/args.json": RUN.replace("grpo", "rloo"), "older/args.json": '{"script": "grpo"}',
        "moved/args.json": RUN.replace(str(ROOT), "/nowhere/at/all"), "noscript/args.json": "{}",
        "three/args.json": "3", "weights/args.json": RUN, "weights/metrics.jsonl": "",
        "weights/checkpoint-3/config.json": "{}",
    }  # fmt: skip
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text)
    (folder / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    (folder / "binary.jsonl").write_bytes(bytes(range(256)))
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny/policy")
    tokenizer.save_pretrained(folder / "rankless")
    for name, model in (
        ("two-labels", LlamaForSequenceClassification(LlamaConfig(**SHAPE, num_labels=2))),
        ("no-tokenizer", LlamaForCausalLM(LlamaConfig(**SHAPE))),
        ("no-eos", LlamaForCausalLM(LlamaConfig(**SHAPE))),
        ("pickle", LlamaForCausalLM(LlamaConfig(**SHAPE))),
        ("no-weights", LlamaForCausalLM(LlamaConfig(**SHAPE))),
        ("nan-weights", LlamaForCausalLM(LlamaConfig(**SHAPE))),
        *((name, LlamaForCausalLM(LlamaConfig(**SHAPE))) for name in TEMPLATES),
        ("small", None),
    ):
        if name == "small":
            model = LlamaForCausalLM(LlamaConfig(**SHAPE | {"vocab_size": 8}))
        if name == "nan-weights":
            model.lm_head.weight.data[:] = float("nan")
        model.save_pretrained(folder / name)
        if name != "no-tokenizer":
            tokenizer.save_pretrained(folder / name)
        if name in TEMPLATES:
            (folder / name / "chat_template.jinja").write_text(TEMPLATES[name])
    (folder / "no-weights" / "model.safetensors").unlink()
    (folder / "pickle" / "model.safetensors").unlink()
    torch.save(LlamaForCausalLM(LlamaConfig(**SHAPE)).state_dict(), folder / "pickle" / "pytorch_model.bin")
    config = json.loads((folder / "no-eos" / "tokenizer_config.json").read_text())
    config.pop("eos_token")
    (folder / "no-eos" / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


GRAMMAR = [  # exit 2, and what stands on stderr
    ("--num-step 3", "--num-steps"), ("--modle x", "--model"), ("--learning-rate 1", "--learning-rate"),
    ("--lr", "--lr"), ("--lr abc", "abc"), ("--num-steps 1.5", "1.5"), ("--dtype float64", "float64"),
    ("--kl-estimator k4", "k4"), ("--aggregation mean", "mean"), ("--track mlflow", "mlflow"),
    ("--scale-rewards std", "std"), ("extra", "extra"), ("--reward-weights a", "a"),
    ("--gradient-checkpointing maybe", "maybe"), ("--kl-estimator k1", "k1"), ("--lr-schedule cosine", "--lr-schedule"),
]  # fmt: skip
RANGES = [
    ("--num-steps 0", "--num-steps must be above 0"), ("--num-prompts -1", "--num-prompts must be above 0"),
    ("--group-size 0", "--group-size must be"), ("--max-new-tokens 0", "--max-new-tokens must be above 0"),
    ("--max-prompt-tokens 0", "--max-prompt-tokens must be above 0"),
    ("--temperature 0", "--temperature must be above 0"),
    ("--temperature inf", "--temperature must be above 0, not inf"), ("--num-epochs 0", "--num-epochs must be above 0"),
    ("--microbatch-tokens 0", "--microbatch-tokens must be above 0"), ("--lr -1", "--lr must be 0 or more"),
    ("--lr nan", "--lr must be 0 or more"), ("--lr inf", "--lr must be 0 or more"),
    ("--max-grad-norm 0", "--max-grad-norm must be above 0"), ("--warmup-steps -1", "--warmup-steps must be"),
    ("--kl-coef -1", "--kl-coef must be 0 or more"), ("--clip-low -0.1", "--clip-low must be from 0 to 1"),
    ("--clip-high nan", "--clip-high must be"), ("--eval-every -1", "--eval-every must be 0 or more"),
    ("--save-every -1", "--save-every must be 0 or more"), ("--eval-samples 0", "--eval-samples must be above 0"),
    ("--eval-temperature -1", "--eval-temperature must be 0 or more"),
    ("--lora-rank -1", "--lora-rank must be 0 or more"),
    ("--dynamic-sampling -1", "--dynamic-sampling must be 0 or more"),
    ("--group-size 1", "--group-size must be 2 or more"), ("--device nowhere", "--device nowhere can't be used"),
    ("--device cuda:7", "--device cuda:7"), ("--minibatch-size -1", "--minibatch-size must be 0 or more, not -1"),
    ("--is-correction-cap -1", "--is-correction-cap must be 0 or more"),
    ("--overlong-buffer -1", "--overlong-buffer must be 0 or more"), ("--seed -1", "--seed must be 0 or more"),
    ("--entropy-coef nan", "--entropy-coef must be 0 or more, not nan"),
    ("--clip-low 7", "--clip-low must be from 0 to 1, not 7"),
    ("--overlong-buffer 200 --max-new-tokens 100", "--overlong-buffer is a part of --max-new-tokens and can't be larger"),
]  # fmt: skip
THINGS = [  # BAD is the folder above
    ("--dataset BAD/nothere.jsonl", "nothere.jsonl is no JSONL or CSV file"),
    ("--dataset BAD", "BAD is no JSONL or CSV file"),
    ("--dataset BAD/empty.jsonl", "empty.jsonl has no prompt of at most"),
    ("--dataset BAD/blank.jsonl", "blank.jsonl has no prompt of at most"),
    ("--dataset BAD/torn.jsonl", "torn.jsonl line 2 is not JSON, one object a line"),
    ("--dataset BAD/pretty.jsonl", "pretty.jsonl line 1 is not JSON, one object a line"),
    ("--dataset BAD/array.jsonl", "array.jsonl line 1 has no"),
    ("--dataset BAD/number.jsonl", "number.jsonl line 1 has no"),
    ("--dataset BAD/noprompt.jsonl", "noprompt.jsonl line 1 has no"),
    ("--dataset BAD/null.jsonl", "null.jsonl line 1 has no"), ("--dataset BAD/int.jsonl", "int.jsonl line 1 has no"),
    ("--dataset BAD/nomessages.jsonl", "nomessages.jsonl line 1 has no"),
    ("--dataset BAD/norole.jsonl", "norole.jsonl line 1"),
    ("--dataset BAD/strings.jsonl", "strings.jsonl line 1 has no"), ("--dataset BAD/chat.jsonl", "chat template"),
    ("--dataset BAD/long.jsonl", "long.jsonl has no prompt of at most --max-prompt-tokens 512, in 1"),
    ("--dataset BAD/latin.jsonl", "latin.jsonl is not UTF-8"),
    ("--dataset BAD/binary.jsonl", "binary.jsonl is not UTF-8"),
    ("--dataset BAD/short.csv", "short.csv row 1 has not as many fields"),
    ("--dataset BAD/wide.csv", "wide.csv row 1 has not as many"),
    ("--dataset BAD/nocolumn.csv", "nocolumn.csv row 1 has no"),
    ("--eval-dataset BAD/torn.jsonl", "torn.jsonl line 2 is not JSON, one object a line"),
    ("--max-prompt-tokens 500 --max-new-tokens 510", "exceed the model's 512 positions"),
    ("--system-prompt x", "chat template"), ("--system-prompt x --model BAD/open", "ok.jsonl line 1"),
    ("--system-prompt x --model BAD/bare", "'nothing'"), ("--model BAD/nothere", "nothere"),
    ("--model BAD/notmodel", "no tokenizer could be loaded from BAD/notmodel"),
    ("--model BAD/broken", "no tokenizer could be loaded from BAD/broken"),
    ("--model BAD/no-tokenizer", "no tokenizer could be loaded from BAD/no-tokenizer"),
    ("--model BAD/no-weights", "no model could be loaded from BAD/no-weights"),
    ("--model BAD/pickle", "no model could be loaded from BAD/pickle"), ("--model BAD/adapter", "adapter"),
    ("--model BAD/nan-weights", "sampling and scoring it differ by nan nats per token"),
    ("--model no-such-model", "no tokenizer could be loaded from no-such-model, a folder or a hub id"),
    ("--reward-model BAD/nothere", "nothere"), ("--reward-model BAD/two-labels", "two-labels"),
    ("--reward-model tiny/policy", "score.weight"), ("--reward-fn nonsense", "--reward-fn nonsense is neither"),
    ("--reward-fn BAD/nothere.py:score", "nothere.py:score is neither"), ("--reward-fn BAD/none.py", "is neither"),
    ("--model BAD/rankless", "rankless is an adapter of rank ?"),
    ("--reward-fn BAD/ok.jsonl:score", "is neither exact_match"),
    ("--reward-fn BAD/none.py:grade", "none.py:grade names no function"),
    ("--reward-fn BAD/empty.py:score", "empty.py:score names no function"),
    ("--reward-fn BAD/constant.py:score", "constant.py:score names no function"),
    ("--reward-fn exact_match exact_match", "exact_match exact_match names a function twice"),
    ("--reward-fn exact_match --reward-weights nan", "--reward-weights (nan,) must have a number for each of exact"),
    ("--reward-fn BAD/imports.py:score", "no_such_package"),
    ("--reward-fn BAD/none.py:score", "reward score returned None"),
    ("--reward-fn BAD/one.py:score", "reward score returned [1], which is no list of 4 numbers"),
    ("--reward-fn BAD/nan.py:score", "reward score gave nan for prompt '1+1=', completion"),
    ("--reward-fn BAD/text.py:score", "reward score returned ['good', 'good'"),
    ("--reward-fn exact_match --dataset BAD/noanswer.jsonl", 'needs a column "answer"'),
    ("--reward-fn exact_match --dataset BAD/nullanswer.jsonl", 'needs a column "answer"'),
    ("--reward-fn math_answer --dataset BAD/word.jsonl",
     "math_answer can't judge the answer 'east'" if find_spec("math_verify") else "pip install math_verify"),
    ("--reward-fn exact_match --dataset BAD/listanswer.jsonl", 'needs a column "answer"'),
    ("--dataset BAD/empty.csv", 'empty.csv row 1 has no "prompt"'),
    ("--model BAD/chatty --dataset BAD/parts.jsonl", "parts.jsonl line 1 has no"),
    ("--model BAD/chatty --dataset BAD/system.jsonl --system-prompt x", "has a system message of its own"),
    ("--model BAD/chatty --dataset BAD/answered.jsonl", "ends with a message of the assistant"),
    ("--model BAD/small", "LlamaForCausalLM can't read these prompts, or not with a cache: index out of range"),
    ("--reward-fn BAD/dict.py:score", "reward score returned {'0': 1.0"),
    ("--reward-fn BAD/scalar.py:score", "reward score returned tensor(1.), which is no list of 4 numbers"),
    ("--device meta", "--device meta can't be used"), ("--resume BAD/corrupt", "checkpoint-3/state.pt is damaged"),
    ("--resume BAD/hollow", "checkpoint-3/state.pt is damaged"), ("--output-dir BAD/mine", "already holds a run"),
    ("--reward-weights 1 2 3", "--reward-weights (1.0, 2.0, 3.0) must have a number for each of reward_model"),
    ("--resume BAD/nothere", "nothere can't be continued"),
    ("--resume BAD/nothing", "nothing can't be continued"), ("--resume BAD/run", "run holds no complete checkpoint"),
    ("--resume BAD/weights", "weights holds no complete checkpoint"), ("--resume BAD/torn", "torn can't be continued"),
    ("--resume BAD/list", "list can't be continued"), ("--resume BAD/noscript", "noscript can't be continued"),
    ("--resume BAD/three", "three can't be continued"), ("--resume BAD/other", "other is a run of rloo.py"),
    ("--resume BAD/older", "older can't be continued"), ("--resume BAD/moved", "--resume BAD/moved"),
]  # fmt: skip
OWN = [  # what is wrong in one's own reward function shows its own exception, and its traceback
    ("syntax.py:score", SyntaxError, "syntax.py"), ("raises.py:score", KeyError, "^'level'$"),
    ("few.py:score", TypeError, "takes 1 positional argument"), ("exits.py:score", SystemError, "^no$"),
]  # fmt: skip


def refused(words, capsys):
    """The exit status and what stands on stderr."""
    with pytest.raises(SystemExit) as end:
        run_command(["grpo.py", *words])
    text = capsys.readouterr().err + (end.value.code if isinstance(end.value.code, str) else "")
    return (1 if isinstance(end.value.code, str) else end.value.code), text


def listing(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if "__pycache__" not in path.parts}


@pytest.mark.parametrize("flags, culprit", GRAMMAR)
def test_what_is_no_flag_or_no_value_of_it(flags, culprit, capsys):
    code, text = refused(flags.split(), capsys)
    assert code == 2 and culprit in text


def words_with(flags, bad, folder):
    """The flags, and what keeps the run short, so that nothing is loaded but what is refused."""
    words = [word.replace("BAD", str(bad)) for word in flags.split()]
    if "--resume" not in words:
        words += ["--num-steps", "2"] * ("--num-steps" not in words)
        words += ["--output-dir", str(folder / "run")] * ("--output-dir" not in words)
        words += ["--kl-coef", "0"] * ("--kl-coef" not in words)
        words += ["--reward-fn", "exact_match"] * ("--reward" not in flags)
        words += ["--num-prompts", "2"] * ("--num-prompts" not in words)
        words += ["--group-size", "2"] * ("--group-size" not in words)
    return words + ["--dataset", str(bad / "ok.jsonl")] * ("--dataset" not in words)


def nothing_was_learnt(folder):
    metrics = folder / "run" / "metrics.jsonl"
    return not (metrics.exists() and len(metrics.read_text().splitlines()) > 1) and not [*folder.rglob("checkpoint-*")]


@pytest.mark.parametrize("flags, sentence", RANGES + THINGS)
def test_what_cannot_work_ends_in_one_sentence(flags, sentence, bad, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = listing(bad)
    code, text = refused(words_with(flags, bad, tmp_path), capsys)
    assert code == 1 and text.startswith("error: ") and sentence.replace("BAD", str(bad)) in text, text
    assert text.count("\n") == 0 and "Traceback" not in text
    assert listing(bad) == before and nothing_was_learnt(tmp_path)  # nothing was written over


@pytest.mark.parametrize("script, flags, sentence", [
    ("ppo", "--gamma 3", "--gamma must be from 0 to 1, not 3"),
    ("ppo", "--gae-lambda 5", "--gae-lambda must be from 0 to 1, not 5"),
    ("reinforce", "--gamma 1.1", "--gamma must be from 0 to 1, not 1.1"),
    ("reinforce", "--num-prompts 1 --group-size 1", "--weighting baseline is the mean of the other rows"),
])  # fmt: skip
def test_what_cannot_work_in_one_script(script, flags, sentence, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        run_command([f"{script}.py", *flags.split(), "--output-dir", str(tmp_path / "run")])
    assert str(end.value).startswith("error: ") and sentence in str(end.value) and not (tmp_path / "run").exists()


def test_a_total_return_needs_no_other_row(tmp_path):
    words = "reinforce.py --weighting total --num-prompts 1 --num-steps 1 --max-new-tokens 4 --eval-every 0"
    run_command([*words.split(), "--dataset", str(FEW / "reviews.jsonl"), "--output-dir", str(tmp_path / "run")])
    assert (tmp_path / "run" / "final" / "config.json").exists()


@pytest.mark.parametrize("function, kind, message", OWN)
def test_an_error_of_ones_own_code_is_shown_as_it_is(function, kind, message, bad, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = listing(bad)
    with pytest.raises(kind, match=message):
        run_command(["grpo.py", *words_with(f"--reward-fn BAD/{function}", bad, tmp_path)])
    assert listing(bad) == before and nothing_was_learnt(tmp_path)


def test_a_tracker_that_is_not_installed_is_named_and_takes_no_folder(bad, tmp_path, monkeypatch, capsys):
    """Once it is installed, the same command works."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    code, text = refused(words_with("--track wandb", bad, tmp_path), capsys)
    assert code == 1 and text.startswith("error: ") and text.endswith("pip install wandb") and "\n" not in text
    assert not (tmp_path / "run" / "args.json").exists()


def test_a_folder_that_holds_a_run_is_left_as_it_is(tmp_path, capsys):
    train("grpo", tmp_path / "run", **SMALL | ADDITION | {"num_steps": 1})
    before = listing(tmp_path)
    code, text = refused(["--output-dir", str(tmp_path / "run")], capsys)
    assert code == 1 and "already holds a run" in text and listing(tmp_path) == before
    (tmp_path / "file").write_text("mine")
    code, text = refused(["--num-steps", "1", "--output-dir", str(tmp_path / "file")], capsys)
    assert code == 1 and f"{tmp_path}/file can't be a run folder: " in text
    assert (tmp_path / "file").read_text() == "mine"
