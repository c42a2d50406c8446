"""Bad input of every kind: it ends before training where it can, with one sentence that names the culprit, and nothing written over.

On the command line's grammar tyro exits with 2 and suggests the nearest flag; everything else exits with 1 and a sentence on stderr.
"""

import json

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from test_scripts import ADDITION, ROOT, SMALL, run_command, train

SHAPE = {"vocab_size": 512, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    """A folder of bad things, each named for what is wrong with it."""
    folder = tmp_path_factory.mktemp("bad")
    files = {
        "ok.jsonl": '{"prompt": "1+1=", "answer": "2"}\n',
        "empty.jsonl": "", "blank.jsonl": "\n\n", "torn.jsonl": '{"prompt": "a"}\n{"prompt": "b', "array.jsonl": "[1, 2]\n",
        "number.jsonl": "3\n", "noprompt.jsonl": '{"question": "a"}\n', "null.jsonl": '{"prompt": null}\n', "int.jsonl": '{"prompt": 3}\n',
        "nomessages.jsonl": '{"prompt": []}\n', "norole.jsonl": '{"prompt": [{"content": "a"}]}\n', "strings.jsonl": '{"prompt": ["a"]}\n',
        "chat.jsonl": '{"prompt": [{"role": "user", "content": "a"}]}\n', "noanswer.jsonl": '{"prompt": "a"}\n',
        "nullanswer.jsonl": '{"prompt": "a", "answer": null}\n', "word.jsonl": '{"prompt": "a", "answer": "east"}\n',
        "long.jsonl": json.dumps({"prompt": "1" * 900}) + "\n", "pretty.jsonl": json.dumps({"prompt": "a"}, indent=2),
        "short.csv": "prompt,answer\na\n", "wide.csv": "prompt\na,b\n", "nocolumn.csv": "question\na\n",
        "syntax.py": "def score(:\n", "imports.py": "import no_such_package\n", "constant.py": "score = 3\n", "empty.py": "",
        "raises.py": "def score(prompts, completions, rows):\n    return [rows[0]['level'] for _ in rows]\n",
        "none.py": "def score(prompts, completions, rows):\n    pass\n", "one.py": "def score(prompts, completions, rows):\n    return [1]\n",
        "nan.py": "def score(prompts, completions, rows):\n    return [float('nan')] * len(rows)\n",
        "text.py": "def score(prompts, completions, rows):\n    return ['good'] * len(rows)\n",
        "lists.py": "def score(prompts, completions, rows):\n    return [[1.0]] * len(rows)\n",
        "few.py": "def score(prompts):\n    return [1.0]\n",
        "sleeps.py": "import time\ndef score(prompts, completions, rows):\n    time.sleep(60)\n",
        "exits.py": "def score(prompts, completions, rows):\n    raise SystemError('no')\n",
        "notmodel/readme.txt": "", "broken/config.json": "{", "empty/x": "", "nothing/metrics.jsonl": "",
        "listanswer.jsonl": '{"prompt": "a", "answer": [1]}\n', "twice.csv": "prompt,answer,prompt\na,b,c\n", "empty.csv": 'prompt,answer\n"",2\n',
        "emptytext.jsonl": '{"prompt": " "}\n', "parts.jsonl": '{"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}\n',
        "answered.jsonl": '{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n',
        "fine.jinja": "{% for m in messages %}{{ m.content }}{% endfor %}", "mine/final/thesis.txt": "precious",
        "quits.py": "import sys\ndef score(prompts, completions, rows):\n    sys.exit(0)\n",
        "dict.py": "def score(prompts, completions, rows):\n    return {i: 1.0 for i in range(len(rows))}\n",
        "scalar.py": "import torch\ndef score(prompts, completions, rows):\n    return torch.tensor(1.0)\n",
        "corrupt/args.json": '{"script": "grpo"}', "corrupt/checkpoint-3/state.pt": "no zip", "corrupt/checkpoint-old/state.pt": "",
        "hollow/args.json": '{"script": "grpo"}', "hollow/checkpoint-3/state.pt": "",
        "bare.jinja": "{{ messages[0].nothing.more }}", "open.jinja": "{% for m in",
        "adapter/adapter_config.json": '{"r": 8}',
        "run/args.json": '{"script": "grpo"}', "torn/args.json": '{"script": "gr', "list/args.json": "[]", "other/args.json": '{"script": "rloo"}',
        "noscript/args.json": "{}", "three/args.json": "3", "weights/args.json": '{"script": "grpo"}', "weights/metrics.jsonl": "", "weights/checkpoint-3/config.json": "{}",
    }  # fmt: skip
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text)
    (folder / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    (folder / "binary.jsonl").write_bytes(bytes(range(256)))
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny/policy")
    for name, model in (
        ("two-labels", LlamaForSequenceClassification(LlamaConfig(**SHAPE, num_labels=2))),
        ("no-tokenizer", LlamaForCausalLM(LlamaConfig(**SHAPE))),
        ("no-eos", LlamaForCausalLM(LlamaConfig(**SHAPE))),
        ("pickle", LlamaForCausalLM(LlamaConfig(**SHAPE))),
        ("no-weights", LlamaForCausalLM(LlamaConfig(**SHAPE))),
        ("nan-weights", LlamaForCausalLM(LlamaConfig(**SHAPE))),
        ("small", None),
    ):
        if name == "small":
            model = LlamaForCausalLM(LlamaConfig(**SHAPE | {"vocab_size": 8}))
        if name == "nan-weights":
            model.lm_head.weight.data[:] = float("nan")
        model.save_pretrained(folder / name)
        if name != "no-tokenizer":
            tokenizer.save_pretrained(folder / name)
    (folder / "no-weights" / "model.safetensors").unlink()
    (folder / "pickle" / "model.safetensors").unlink()
    torch.save(LlamaForCausalLM(LlamaConfig(**SHAPE)).state_dict(), folder / "pickle" / "pytorch_model.bin")
    config = json.loads((folder / "no-eos" / "tokenizer_config.json").read_text())
    config.pop("eos_token")
    (folder / "no-eos" / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


GRAMMAR = [  # exit 2, and what stands on stderr
    ("--num-step 3", "--num-steps"), ("--modle x", "--model"), ("--learning-rate 1", "--learning-rate"), ("--lr", "--lr"), ("--lr abc", "abc"),
    ("--num-steps 1.5", "1.5"), ("--dtype float64", "float64"), ("--kl-estimator k4", "k4"), ("--aggregation mean", "mean"),
    ("--lr-schedule warm", "warm"), ("--track mlflow", "mlflow"), ("--scale-rewards std", "std"), ("extra", "extra"),
    ("--reward-weights a", "a"), ("--gradient-checkpointing maybe", "maybe"),
]  # fmt: skip
RANGES = [
    ("--num-steps 0", "--num-steps must be above 0"), ("--num-prompts -1", "--num-prompts must be above 0"), ("--group-size 0", "--group-size must be"),
    ("--max-new-tokens 0", "--max-new-tokens must be above 0"), ("--max-prompt-tokens 0", "--max-prompt-tokens must be above 0"),
    ("--temperature 0", "--temperature must be above 0"), ("--temperature inf", "--temperature must be above 0, not inf"),
    ("--num-epochs 0", "--num-epochs must be above 0"), ("--minibatch-size 0", "--minibatch-size must be above 0"),
    ("--microbatch-tokens 0", "--microbatch-tokens must be above 0"), ("--lr -1", "--lr must be 0 or more"), ("--lr nan", "--lr must be 0 or more"),
    ("--lr inf", "--lr must be 0 or more"), ("--max-grad-norm 0", "--max-grad-norm must be above 0"), ("--warmup-steps -1", "--warmup-steps must be"),
    ("--kl-coef -1", "--kl-coef must be 0 or more"), ("--clip-low -0.1", "--clip-low must be 0 or more"), ("--clip-high nan", "--clip-high must be"),
    ("--eval-every -1", "--eval-every must be 0 or more"), ("--save-every -1", "--save-every must be 0 or more"), ("--keep -1", "--keep must be 0 or more"),
    ("--eval-samples 0", "--eval-samples must be above 0"), ("--eval-temperature -1", "--eval-temperature must be 0 or more"),
    ("--eval-samples 4 --eval-temperature 0", "--eval-samples above 1 needs"), ("--is-correction-cap 0.5", "--is-correction-cap must be 1 or more"),
    ("--reward-timeout -1", "--reward-timeout must be 0 or more"), ("--lora-rank -1", "--lora-rank must be 0 or more"),
    ("--overlong-buffer 99", "--overlong-buffer 99 is longer than"), ("--dynamic-sampling -1", "--dynamic-sampling must be 0 or more"),
    ("--group-size 1", "--group-size must be 2 or more"), ("--device nowhere", "--device nowhere can't be used"), ("--device cuda:7", "--device cuda:7"),
]  # fmt: skip
THINGS = [  # BAD is the folder above
    ("--dataset BAD/nothere.jsonl", "nothere.jsonl is not a file that exists"), ("--dataset BAD", "nor a hub dataset"),
    ("--dataset BAD/empty.jsonl", "empty.jsonl has no prompt"), ("--dataset BAD/blank.jsonl", "blank.jsonl has no prompt"),
    ("--dataset BAD/torn.jsonl", "torn.jsonl line 2 is not JSON"), ("--dataset BAD/pretty.jsonl", "pretty.jsonl line 1 is not JSON"),
    ("--dataset BAD/array.jsonl", "array.jsonl line 1 has no"), ("--dataset BAD/number.jsonl", "number.jsonl line 1 has no"),
    ("--dataset BAD/noprompt.jsonl", "noprompt.jsonl line 1 has no"), ("--dataset BAD/null.jsonl", "null.jsonl line 1 has no"),
    ("--dataset BAD/int.jsonl", "int.jsonl line 1 has no"), ("--dataset BAD/nomessages.jsonl", "nomessages.jsonl line 1 has no"),
    ("--dataset BAD/norole.jsonl", "norole.jsonl line 1 has no"), ("--dataset BAD/strings.jsonl", "strings.jsonl line 1 has no"),
    ("--dataset BAD/chat.jsonl", "no chat template"), ("--dataset BAD/long.jsonl", "has no prompt of at most --max-prompt-tokens"),
    ("--dataset BAD/latin.jsonl", "latin.jsonl is not UTF-8"), ("--dataset BAD/binary.jsonl", "binary.jsonl is not UTF-8"),
    ("--dataset BAD/short.csv", "short.csv line 2 has not as many fields"), ("--dataset BAD/wide.csv", "wide.csv line 2 has not as many"),
    ("--dataset BAD/nocolumn.csv", "nocolumn.csv line 2 has no"), ("--eval-dataset BAD/torn.jsonl", "torn.jsonl line 2 is not JSON"),
    ("--max-prompt-tokens 500 --max-new-tokens 510", "exceed the model's 512 positions"),
    ("--system-prompt x", "no chat template"), ("--chat-template BAD/nothere", "nothere is not a file"),
    ("--system-prompt x --chat-template BAD/open.jinja", "the chat template does not take these"), ("--system-prompt x --chat-template BAD/bare.jinja", "line 1: the chat template"),
    ("--model BAD/nothere", "nothere"), ("--model BAD/notmodel", "notmodel could not be loaded"), ("--model BAD/broken", "broken could not be loaded"),
    ("--model BAD/no-tokenizer", "no-tokenizer could not be loaded"), ("--model BAD/no-eos", "no-eos has no eos_token"),
    ("--model BAD/no-weights", "no-weights could not be loaded"), ("--model BAD/pickle", "pickle could not be loaded"),
    ("--model BAD/adapter", "adapter"), ("--model BAD/nan-weights", "not finite for prompt"), ("--model no-such-model", "no-such-model could not be loaded"),
    ("--reward-model BAD/nothere", "nothere"), ("--reward-model BAD/two-labels", "two-labels has no trained head with one label"),
    ("--reward-model tiny/policy", "tiny/policy has no trained head with one label"), ("--reward-fn nonsense", "--reward-fn nonsense is neither"),
    ("--reward-fn BAD/nothere.py:score", "nothere.py:score is neither"), ("--reward-fn BAD/none.py", "is neither"),
    ("--reward-fn BAD/none.py:grade", "has no function grade"), ("--reward-fn BAD/constant.py:score", "has no function score"),
    ("--reward-fn BAD/empty.py:score", "has no function score"), ("--reward-fn BAD/syntax.py:score", "syntax.py"),
    ("--reward-fn BAD/imports.py:score", "no_such_package"), ("--reward-fn BAD/raises.py:score", "reward score raised KeyError: 'level' (raises.py line 2)"),
    ("--reward-fn BAD/none.py:score", "reward score returned None"), ("--reward-fn BAD/one.py:score", "reward score returned 1 scores for"),
    ("--reward-fn BAD/nan.py:score", "reward score returned nan"), ("--reward-fn BAD/text.py:score", "reward score returned 'good'"),
    ("--reward-fn BAD/lists.py:score", "reward score returned [1.0]"), ("--reward-fn BAD/few.py:score", "reward score raised TypeError"),
    ("--reward-fn BAD/sleeps.py:score --reward-timeout 0.1", "took more than --reward-timeout 0.1 s"),
    ("--reward-fn BAD/exits.py:score", "reward score raised SystemError: no"),
    ("--reward-fn exact_match --dataset BAD/noanswer.jsonl", 'need a column "answer"'),
    ("--reward-fn exact_match --dataset BAD/nullanswer.jsonl", 'need a column "answer"'),
    ("--reward-fn math_answer --dataset BAD/word.jsonl", "math_answer can't judge the answer 'east'"),
    ("--reward-fn exact_match --dataset BAD/listanswer.jsonl", 'need a column "answer"'), ("--dataset BAD/twice.csv", "names a column twice"),
    ("--dataset BAD/empty.csv", "line 2: the prompt is empty"), ("--dataset BAD/emptytext.jsonl", "line 1: the prompt is empty"),
    ("--system-prompt x --chat-template BAD/fine.jinja --dataset BAD/parts.jsonl", "line 1 has no"),
    ("--system-prompt x --chat-template BAD/fine.jinja --dataset BAD/answered.jsonl", "ends with a message of the assistant"),
    ("--model BAD/small", "they don't belong together"), ("--reward-weights inf", "--reward-weights must be finite"),
    ("--entropy-coef nan", "--entropy-coef must be finite"), ("--reward-fn BAD/quits.py:score", "reward score raised SystemExit: 0"),
    ("--reward-fn BAD/dict.py:score", "not a list,"), ("--reward-fn BAD/scalar.py:score", "not a list,"), ("--device meta", "--device meta can't be used"),
    ("--resume BAD/corrupt", "checkpoint-3/state.pt is damaged"), ("--resume BAD/hollow", "checkpoint-3/state.pt is damaged"), ("--output-dir BAD/mine", "already holds a run"),
    ("--reward-fn exact_match exact_match", "a reward is given twice"), ("--reward-weights 1 2 3", "--reward-weights has 3 numbers for 1 rewards"),
    ("--track wandb", "pip install wandb"),
    ("--resume BAD/nothere", "nothere is not a run folder"), ("--resume BAD/nothing", "nothing is not a run folder"),
    ("--resume BAD/run", "run holds no complete checkpoint"), ("--resume BAD/weights", "weights holds no complete checkpoint"),
    ("--resume BAD/torn", "args.json is not JSON"), ("--resume BAD/list", "list is a run of None.py"), ("--resume BAD/noscript", "noscript is a run of"), ("--resume BAD/three", "args.json is not JSON, or no object"),
    ("--resume BAD/other", "other is a run of rloo.py"),
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


@pytest.mark.parametrize("flags, sentence", RANGES + THINGS)
def test_what_cannot_work_ends_in_one_sentence(flags, sentence, bad, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before, words = listing(bad), [word.replace("BAD", str(bad)) for word in flags.split()]
    if "--resume" not in words and "--output-dir" not in words:
        words += ["--num-steps", "2"] * ("--num-steps" not in words) + ["--output-dir", str(tmp_path / "run")]
    if "--dataset" not in words:
        words += ["--dataset", str(bad / "ok.jsonl")]
    if "--resume" not in words:  # nothing is loaded but what is refused
        words += ["--kl-coef", "0"] * ("--kl-coef" not in words) + ["--reward-fn", "exact_match"] * ("--reward" not in flags)
    code, text = refused(words, capsys)
    assert code == 1 and text.startswith("error: ") and sentence in text, text
    assert text.count("\n") == 0 and "Traceback" not in text
    assert listing(bad) == before  # nothing was written over
    assert not (tmp_path / "run" / "checkpoint-1").exists() and len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
                                                                    if (tmp_path / "run" / "metrics.jsonl").exists() else []) <= 1  # fmt: skip


def test_there_are_enough_of_them():
    assert len(GRAMMAR) + len(RANGES) + len(THINGS) >= 80


def test_debug_shows_the_traceback():
    with pytest.raises(Exception, match="is neither exact_match nor math_answer"):
        run_command(["grpo.py", "--reward-fn", "nonsense", "--debug"])


def test_a_folder_that_holds_a_run_is_left_as_it_is(tmp_path, capsys):
    train("grpo", tmp_path / "run", **SMALL | ADDITION | {"num_steps": 1})
    before = listing(tmp_path)
    code, text = refused(["--output-dir", str(tmp_path / "run")], capsys)
    assert code == 1 and "already holds a run" in text and listing(tmp_path) == before
    (tmp_path / "file").write_text("mine")
    code, text = refused(["--num-steps", "1", "--output-dir", str(tmp_path / "file")], capsys)
    assert code == 1 and (tmp_path / "file").read_text() == "mine" and "file" in text
