"""What common.py does around the algorithms: sampling, scoring, cutting batches, prompts, rewards, run folders."""

import json
import math
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification

import cispo
import common
import grpo
import gspo
import ppo
import reinforce
from common import InputError, Prompt
from test_models import RAGGED, prompts_of, random_model

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer():
    return common.load_tokenizer("tiny/policy")


# --- sampling ---


def test_sample_tokens_inverts_the_cumulative_distribution():
    logits = torch.tensor([[0.5, 0.2, 0.3]]).log().repeat(6, 1)  # cumulative .5, .7, 1
    uniform = torch.tensor([0.0, 0.49, 0.51, 0.69, 0.71, 0.999], dtype=torch.float64)
    ids, logprobs = common.sample_tokens(logits, uniform, 1.0)
    assert ids.tolist() == [0, 0, 1, 1, 2, 2]
    assert logprobs.exp().tolist() == pytest.approx([0.5, 0.5, 0.2, 0.2, 0.3, 0.3], rel=1e-5)


def test_a_token_of_probability_0_is_never_sampled():
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).repeat(4, 1)
    ids, _ = common.sample_tokens(logits, torch.tensor([0.0, 0.5, 0.25, 1 - 2**-53], dtype=torch.float64), 1.0)
    assert ids.tolist() == [1, 3, 1, 3]


def test_a_completion_depends_on_its_row_and_key_alone(tokenizer):
    model = random_model()
    together = common.generate(model, tokenizer, RAGGED, 2, 16, 1.0, key=(0, 1))
    alone = common.generate(model, tokenizer, RAGGED[:1], 2, 16, 1.0, key=(0, 1))
    other = common.generate(model, tokenizer, RAGGED, 2, 16, 1.0, key=(0, 2))
    assert together["completions"][:2] == alone["completions"]
    assert together["completions"] != other["completions"] and together["completions"][0] != together["completions"][1]


def test_a_mask_ends_with_the_first_of_all_stop_tokens(tokenizer, monkeypatch):
    """Tokens are forced. Stops: 1 (tokenizer) and 9 (generation config). Rows: stop at once, the second stop id, cut, exactly full."""
    model = random_model()
    model.generation_config.eos_token_id = [1, 9]
    forced = torch.tensor([[1, 5, 5, 5], [5, 9, 5, 5], [5, 6, 7, 8], [5, 6, 7, 1]])
    steps = iter(forced.T)
    monkeypatch.setattr(common, "sample_tokens", lambda logits, u, T: (ids := next(steps)[rows_left(len(logits))], torch.zeros(len(ids))))

    def rows_left(n):  # finished rows leave the cache in order
        return {4: [0, 1, 2, 3], 3: [1, 2, 3], 2: [2, 3]}[n]

    batch = common.generate(model, tokenizer, prompts_of([0, 1, 9], [0, 5], [0, 5], [0, 5]), 1, 4, 1.0, key=(0,))
    assert batch["mask"].tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert batch["truncated"].tolist() == [False, False, True, False]
    assert batch["input_ids"][0, :4].tolist() == [0, 1, 9, 1] and batch["input_ids"][3].tolist()[:6] == [0, 5, 5, 6, 7, 1]
    assert batch["completions"] == [tokenizer.decode(ids) for ids in ([], [5], [5, 6, 7, 8], [5, 6, 7])]


# --- batches ---


def test_completion_positions_are_one_before_the_tokens_they_predict():
    batch = {"input_ids": torch.zeros(2, 6), "prompt_length": torch.tensor([3, 1]), "mask": torch.tensor([[1.0, 1, 0], [1, 1, 1]])}
    assert common.completion_positions(batch).int().tolist() == [[0, 0, 1, 1, 0], [1, 1, 1, 0, 0]]


def test_microbatches_hold_every_row_once_within_the_budget(tokenizer):
    batch = common.generate(random_model(), tokenizer, RAGGED, 4, 24, 1.0, key=(0, 1))
    for budget in (1, 40, 10_000):
        micros = list(common.microbatches(batch, budget))
        assert sorted(torch.cat([m["rows"] for m in micros]).tolist()) == list(range(16))
        for micro in micros:
            assert micro["input_ids"].numel() <= budget or len(micro["rows"]) == 1
            assert micro["mask"].sum() == batch["mask"][micro["rows"]].sum()
            assert micro["mask"].shape[1] == micro["mask"].sum(1).max()


def test_the_gradient_does_not_depend_on_the_microbatches(tokenizer):
    model = random_model()
    batch = common.generate(model, tokenizer, RAGGED, 4, 24, 1.0, key=(0, 1))
    batch["weights"] = common.loss_weights(batch["mask"], "token")
    gradients = []
    for budget in (1, 60, 10_000):
        model.zero_grad()
        for micro in common.microbatches(batch, budget):
            common.weighted_sum(common.logprobs_of(model, 1.0, micro), micro["weights"]).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-4, atol=1e-6)


def test_minibatches_cover_the_batch_once_an_epoch_and_never_lose_the_last_rows():
    batch = {"mask": torch.ones(10, 1), "x": torch.arange(10)}
    sizes = [len(m["x"]) for m in common.minibatches(batch, 2, 4, key=(0, 1))]
    seen = torch.cat([m["x"] for m in common.minibatches(batch, 2, 4, key=(0, 1))]).tolist()
    assert sizes == [4, 4, 2, 4, 4, 2] and common.updates_per_batch(10, 2, 4) == 6
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10)) and seen[:10] != seen[10:]
    assert len(list(common.minibatches(batch, 1, None, key=(0,)))) == common.updates_per_batch(10, 1, None) == 1


def test_select_takes_indices_or_bools_in_tensors_and_lists_alike():
    batch = {"x": torch.arange(6), "completions": list("abcdef")}
    for rows in (torch.tensor([2, 3, 4, 5]), torch.tensor([False, False, True, True, True, True])):
        chosen = common.select(batch, rows)
        assert chosen["x"].tolist() == [2, 3, 4, 5] and chosen["completions"] == list("cdef")


def test_concatenate_pads_to_the_wider():
    a = {"mask": torch.ones(1, 2), "truncated": torch.tensor([True]), "completions": ["a"]}
    b = {"mask": torch.ones(1, 3), "truncated": torch.tensor([False]), "completions": ["b"]}
    joined = common.concatenate(a, b)
    assert joined["mask"].tolist() == [[1, 1, 0], [1, 1, 1]] and joined["completions"] == ["a", "b"]
    assert joined["truncated"].tolist() == [True, False]


def test_paths_are_made_absolute_and_names_are_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("rewards.py", "exact_match", "a:b.jsonl", "c:d.py"):
        Path(name).touch()
    options = ("rewards.py:score", "c:d.py:score", "exact_match", "a:b.jsonl", "owner/data:main:train", "gone.py:score")
    assert common.absolute(options) == (
        f"{tmp_path}/rewards.py:score", f"{tmp_path}/c:d.py:score", "exact_match", f"{tmp_path}/a:b.jsonl", *options[4:]
    )  # fmt: skip
    assert common.absolute(None) is None and common.absolute("") == ""


def test_entropy_of_a_distribution():
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log()  # .5 ln 2 + 2 * .25 ln 4 = 1.5 ln 2
    assert common.LogprobsAndEntropy.apply(logits, torch.tensor([0]))[1].item() == pytest.approx(1.5 * math.log(2))


def test_the_score_lands_on_the_last_completion_token():
    mask = torch.tensor([[1.0, 1, 0], [1, 1, 1], [1, 0, 0]])
    assert common.at_last_token(torch.tensor([5.0, 6, 7]), mask).tolist() == [[0, 5, 0], [0, 0, 6], [7, 0, 0]]


def test_baseline_of_reinforce_is_the_mean_of_the_other_rows():
    # (1 + 4) / 2, (3 + 4) / 2, (3 + 1) / 2
    assert reinforce.leave_one_out_baseline(torch.tensor([3.0, 1.0, 4.0])).tolist() == [2.5, 3.5, 2.0]


def test_adaptive_kl_moves_by_a_fifth_at_most_in_nats_per_completion():
    # .15 * (1 + clip(12 / 6 - 1, .2) * 64 / 10000) = .15 * 1.00128; down: .15 * (1 - .2 * 64 / 10000); on target: as it was
    assert ppo.adapted_kl_coef(0.15, 12.0, 6.0, 64, 10000) == pytest.approx(0.150192)
    assert ppo.adapted_kl_coef(0.15, 0.24, 6.0, 64, 10000) == pytest.approx(0.149808)
    assert ppo.adapted_kl_coef(0.15, 6.6, 6.0, 64, 10000) == pytest.approx(0.15 * (1 + 0.1 * 0.0064))


@pytest.mark.parametrize("module", [grpo, gspo, cispo])
def test_overlong_penalty_grows_over_the_buffer(module):
    # of 10 tokens the last 4 cost: up to 6 nothing, then a quarter each
    assert module.overlong_penalty(torch.tensor([1, 6, 7, 9, 10]), 10, 4).tolist() == [0, 0, 0.25, 0.75, 1]


def test_explained_variance():
    mask = torch.tensor([[1.0, 1, 0]])
    returns = torch.tensor([[1.0, 3, 9]])  # mean 2, variance 1
    assert common.explained_variance(returns, returns, mask) == 1.0
    assert common.explained_variance(torch.tensor([[2.0, 2, 0]]), returns, mask) == 0.0
    assert common.explained_variance(torch.tensor([[1.0, 2, 0]]), returns, mask) == pytest.approx(0.75)  # errors 0, 1: variance 1/4
    assert common.explained_variance(returns, torch.ones(1, 3), mask) == 0.0  # nothing varies, so there is nothing to explain


def test_learning_rate_warms_up_and_decays():
    factors = lambda schedule: [round(common.lr_factor(k, 2, schedule, 6), 4) for k in range(6)]  # noqa: E731
    assert factors("constant") == [0.5, 1, 1, 1, 1, 1]
    assert factors("linear") == [0.5, 1, 1, 0.75, 0.5, 0.25]
    assert factors("cosine") == [0.5, 1, 1, 0.8536, 0.5, 0.1464]  # (1 + cos(pi / 4)) / 2 = .8536


# --- data ---


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_prompts_keep_every_column_and_long_ones_are_counted(tokenizer, tmp_path, capsys):
    row = {"prompt": "37+85=", "answer": "122", "meta": {"level": [1, 2]}}
    data = write(tmp_path / "a.jsonl", row, {"prompt": "1" * 300}, "", {"prompt": "1+1="})
    prompts = common.load_prompts(data, tokenizer, 64)
    assert [p.row for p in prompts] == [row, {"prompt": "1+1="}]
    assert prompts[0].ids == [tokenizer.bos_token_id, *tokenizer.encode("37+85=", add_special_tokens=False)]
    assert "2 prompts, 1 left out with over 64 tokens" in capsys.readouterr().out


def test_chat_prompts_take_the_template_and_one_bos(tokenizer, tmp_path):
    data = write(tmp_path / "a.jsonl", {"prompt": [{"role": "user", "content": "hi"}]})
    with pytest.raises(InputError, match="a.jsonl line 1 has chat messages, but the tokenizer has no chat template"):
        common.load_prompts(data, tokenizer, 64)
    chat = common.load_tokenizer("tiny/policy")
    chat.chat_template = "<bos>{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    (prompt,) = common.load_prompts(data, chat, 64)
    assert prompt.text == "<bos>user: hi\nassistant:" and prompt.ids.count(chat.bos_token_id) == 1


def test_a_row_may_hold_any_character(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a\u2028b\u0085c"}\n', encoding="utf-8")
    assert common.load_prompts(str(tmp_path / "a.jsonl"), tokenizer, 64)[0].text == "a\u2028b\u0085c"


def test_an_eos_that_the_tokenizer_adds_to_every_text_goes(tokenizer, tmp_path):
    adds = common.load_tokenizer("tiny/policy")
    adds.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A <eos>", special_tokens=[("<bos>", 0), ("<eos>", 1)])
    assert adds("1+1=").input_ids[-1] == adds.eos_token_id
    (prompt,) = common.load_prompts(write(tmp_path / "a.jsonl", {"prompt": "1+1="}), adds, 64)
    assert prompt.ids == tokenizer("1+1=").input_ids


def test_an_eos_that_the_user_wrote_stays(tokenizer, tmp_path):
    (prompt,) = common.load_prompts(write(tmp_path / "a.jsonl", {"prompt": "a<eos>"}), tokenizer, 64)
    assert prompt.ids[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize("rows, message", [
    (['{"prompt": "a"}', "{broken"], "line 2 is not JSON"),
    (['{"question": "a"}'], 'line 1 has no "prompt"'),
    (["[1, 2]"], 'line 1 has no "prompt"'),
    (['{"prompt": []}'], 'line 1 has no "prompt"'),
    (['{"prompt": ["hi", "there"]}'], 'line 1 has no "prompt"'),
    ([], "has no prompt of at most"),
])  # fmt: skip
def test_a_broken_row_names_its_file_and_line(tokenizer, tmp_path, rows, message):
    with pytest.raises(InputError, match=f"a.jsonl.* {message}"):
        common.load_prompts(write(tmp_path / "a.jsonl", *rows), tokenizer, 64)


def test_prompts_come_in_epochs_each_in_its_own_order():
    prompts = prompts_of(*([i] for i in range(10)))
    state = {"consumed": 0}
    taken = [p.ids[0] for _ in range(5) for p in common.take(prompts, 4, state, seed=0)]
    assert sorted(taken[:10]) == sorted(taken[10:]) == list(range(10)) and taken[:10] != taken[10:]
    assert state == {"consumed": 20}
    assert [p.ids[0] for p in common.take(prompts, 3, {"consumed": 9}, seed=0)] == taken[9:12]


# --- rewards ---


def batch_of(completions, rows=None):
    rows = rows or [{"prompt": "p"}] * len(completions)
    prompts = [Prompt([0], "p", row) for row in rows]
    return {"prompts": prompts, "completions": completions, "mask": torch.ones(len(completions), 1)}


def rewards_of(fn, weight=1.0):
    return [common.Reward("mine", weight, fn, None)]


@pytest.mark.parametrize("text, number", [
    ("the answer is 42.", 42), ("1,234.50 dollars", Fraction(2469, 2)), ("-7", -7), ("50%", 50), ("3/4", Fraction(3, 4)), (r"\boxed{\frac{1}{2}}", Fraction(1, 2)), ("10-3", 3), ("2024-01-15", 15), ("9" * 5000, None), ("1/0", None), ("$3.00", 3), (".5", Fraction(1, 2)),
    (r"so \boxed{12} and not 13", 12), ("2 + 2\n#### 4 apples", 4), ("none", None), ("5 - 3", 3),
])  # fmt: skip
def test_the_final_number_of_a_text(text, number):
    assert common.last_number(text) == number


def test_verifiers():
    rows = [{"answer": "122"}, {"answer": 122}, {"answer": "12"}]
    assert common.exact_match(["", "", ""], [" 122\n", "122", "122"], rows) == [1.0, 1.0, 0.0]
    assert common.math_answer(["", "", ""], ["It is 122.0", "I don't know", r"\boxed{12}"], rows) == [1.0, 0.0, 1.0]


def test_several_rewards_are_weighted_and_each_is_kept(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def length(prompts, completions, rows):\n    return [len(c) + row['bonus'] for c, row in zip(completions, rows)]\n")
    rewards = common.load_rewards(None, ("exact_match", f"{file}:length"), (2.0, 0.5), 0, None, CPU, torch.float32, 1000)
    scores = common.score(rewards, batch_of(["ab", "c"], [{"answer": "ab", "bonus": 4}, {"answer": "ab", "bonus": 0}]))
    assert scores["rewards"].tolist() == [2 * 1 + 0.5 * 6, 2 * 0 + 0.5 * 1]
    assert scores["reward/exact_match"].tolist() == [1, 0] and scores["reward/length"].tolist() == [6, 1]


@pytest.mark.parametrize("value", [True, 1, 1.0, torch.tensor(1.0), torch.tensor(1.0).numpy()])
def test_any_kind_of_number_is_a_score(value):
    assert common.score(rewards_of(lambda p, c, r: [value, 0.0]), batch_of(["a", "b"]))["rewards"].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("value", [None, math.nan, math.inf, 1e300, "1", [1]])
def test_a_score_that_is_no_number_is_refused_with_its_row(value):
    with pytest.raises(InputError, match="reward mine returned .* for prompt 'p', completion 'b'"):
        common.score(rewards_of(lambda p, c, r: [0.0, value]), batch_of(["a", "b"]))


def test_two_functions_of_one_name_are_kept_apart(tmp_path):
    for name, value in (("one", 1), ("ten", 10)):
        (tmp_path / f"{name}.py").write_text(f"def score(prompts, completions, rows):\n    return [{value}] * len(prompts)\n")
    specs = (f"{tmp_path}/one.py:score", f"{tmp_path}/ten.py:score")
    scores = common.score(common.load_rewards(None, specs, (), 0, None, CPU, torch.float32, 100), batch_of(["a"]))
    assert scores["rewards"].tolist() == [11] and scores[f"reward/{specs[1]}"].tolist() == [10]


@pytest.mark.parametrize("result", [None, 1.0])
def test_what_is_no_list_is_refused(result):
    with pytest.raises(InputError, match="reward mine returned"):
        common.score(rewards_of(lambda p, c, r: result), batch_of(["a"]))


def test_messages_need_a_chat_template_of_the_reward_model():
    (reward,) = common.load_rewards("tiny/reward", (), (), 0, None, CPU, torch.float32, 100)
    with pytest.raises(InputError, match="the reward model's tokenizer has no chat template"):
        reward.fn(["a"], ["b"], [{"prompt": [{"role": "user", "content": "a"}]}])


def test_a_list_of_the_wrong_length_is_refused():
    with pytest.raises(InputError, match="returned 1 scores for 2 completions"):
        common.score(rewards_of(lambda p, c, r: [0.0]), batch_of(["a", "b"]))


@pytest.mark.parametrize("spec", ["nonsense", "nothere.py:f", "tests/conftest.py:f", "tests/conftest.py"])
def test_a_reward_function_that_is_not_there_is_named(spec):
    with pytest.raises(InputError, match=f"--reward-fn {spec}"):
        common.load_reward_fn(spec)


def test_the_reward_model_scores_text_alike_alone_and_in_a_batch():
    (reward,) = common.load_rewards("tiny/reward", (), (), 0, None, CPU, torch.float32, 30)
    texts = [" Dull.", " A great and moving film with a superb cast.", " Good.", " It was long, flat and strange. I loved the cast."]
    rows = [{"prompt": "Review of the comedy Lost River:"}] * 4
    args = ([r["prompt"] for r in rows], texts, rows)
    together = reward.fn(*args)
    alone = [reward.fn(*([x[i]] for x in args))[0] for i in range(4)]
    assert together == pytest.approx(alone, abs=1e-5) and len(set(together)) == 4


def test_scores_of_a_reward_model_in_bfloat16_passes_are_not_rounded_to_8_bits():
    (full,), (low,) = (common.load_rewards("tiny/reward", (), (), 0, None, CPU, dtype, 100) for dtype in (torch.float32, torch.bfloat16))
    texts = [" Dull.", " A great and moving film with a superb cast.", " Good.", " It was long, flat and strange. I loved the cast."]
    args = (["Review of the comedy Lost River:"] * 4, texts, [{"prompt": "Review of the comedy Lost River:"}] * 4)
    scores = low.fn(*args)
    assert scores == pytest.approx(full.fn(*args), abs=0.1) and torch.equal(low.model.score.weight, full.model.score.weight)
    assert all(score != torch.tensor(score).bfloat16().item() for score in scores)


@torch.no_grad()
def test_a_rank_that_is_done_joins_the_passes_of_a_bfloat16_model(monkeypatch):
    """Its matrices are bfloat16, so its stand-in passes need autocast as the others' do."""
    (reward,) = common.load_rewards("tiny/reward", (), (), 0, None, CPU, torch.bfloat16, 100)
    busy = iter([1.0, 0.0])  # what this rank hears: one more pass of another, then none
    monkeypatch.setattr(common, "num_ranks", lambda: 2)
    monkeypatch.setattr(common, "summed", lambda x: torch.tensor(next(busy)))
    monkeypatch.setattr(common, "ranks", {"mesh": SimpleNamespace(device_type="cpu"), "gather": True})
    passes, forward = [], reward.model.forward
    monkeypatch.setattr(reward.model, "forward", lambda *args: passes.append(forward(*args)))
    with common.in_step(reward.model):
        pass
    assert len(passes) == 1


def test_a_causal_model_is_refused_as_a_reward_model():
    with pytest.raises(InputError, match="--reward-model tiny/policy has no trained head"):
        common.load_rewards("tiny/policy", (), (), 0, None, CPU, torch.float32, 100)


@pytest.mark.parametrize("pad", [None, 7, -1, 599])
def test_a_reward_model_whose_tokenizer_has_no_pad_scores_batches(pad, tokenizer, tmp_path):
    """With the pad id of its config, where the tokenizer knows it: then a text that ends in eos, as many templates do, is read to its end."""
    torch.manual_seed(0)
    shape = {"vocab_size": 600, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForSequenceClassification(LlamaConfig(**shape, num_labels=1, pad_token_id=pad)).eval()
    model.save_pretrained(tmp_path / "reward")
    bare = common.load_tokenizer("tiny/policy")
    bare.pad_token = None
    bare.save_pretrained(tmp_path / "reward")
    (reward,) = common.load_rewards(str(tmp_path / "reward"), (), (), 0, None, CPU, torch.float32, 100)
    rows = [{"prompt": "a"}] * 3
    together = reward.fn(["a"] * 3, ["b", "bcd", "bcdefg"], rows)
    assert together == pytest.approx([reward.fn(["a"], [c], rows[:1])[0] for c in ("b", "bcd", "bcdefg")], abs=1e-5)
    if pad == 7:
        text = "ab" + tokenizer.eos_token
        with torch.no_grad():
            last = model.score(model.model(torch.tensor([tokenizer(text).input_ids])).last_hidden_state[0, -1])
        assert tokenizer(text).input_ids[-1] == tokenizer.eos_token_id
        assert reward.fn(["a", "a"], ["b" + tokenizer.eos_token, "bcdefg"], rows[:2])[0] == pytest.approx(last.item(), abs=1e-5)


# --- models and run folders ---


def test_a_bfloat16_checkpoint_trains_in_float32_and_the_reference_shares_no_storage(tmp_path):
    AutoModelForCausalLM.from_pretrained(ROOT / "tiny/policy", dtype=torch.bfloat16).save_pretrained(tmp_path)
    policy = common.load_policy(str(tmp_path), CPU, torch.float32)
    reference = common.load_reference(policy, str(tmp_path), CPU, torch.float32)
    assert {p.dtype for p in policy.parameters()} == {torch.float32} and not policy.training
    assert not {p.data_ptr() for p in policy.parameters()} & {p.data_ptr() for p in reference.parameters()}
    assert all(p.requires_grad for p in policy.parameters()) and not any(p.requires_grad for p in reference.parameters())


@pytest.mark.parametrize("path", ["./nothere", "/no/such/folder", "no/such/model"])
def test_a_model_that_is_not_there_is_named_at_once(path):
    with pytest.raises(InputError, match=f"{path} is neither a folder that exists nor a hub id"):
        common.load_policy(path, CPU, torch.float32)


def test_value_model_reads_the_position_before_each_token(tokenizer):
    """The trunk's hidden state at the last prompt token predicts the value of the first completion token."""
    (reward,) = common.load_rewards("tiny/reward", (), (), 0, None, CPU, torch.float32, 100)
    values = common.load_value_model(None, "tiny/policy", [reward], tokenizer, CPU, torch.float32)
    batch = {"input_ids": torch.tensor([[0, 7, 8, 9, 1], [0, 5, 6, 1, 0]]), "prompt_length": torch.tensor([3, 2]), "mask": torch.ones(2, 2)}
    with torch.no_grad():
        found = values(batch)
        for i, start in enumerate([3, 2]):
            for t in range(2):  # the reward model's score of the text before token t
                assert found[i, t].item() == pytest.approx(reward.model(batch["input_ids"][i : i + 1, : start + t]).logits.item(), abs=1e-5)


def test_a_value_head_reads_the_policys_latest_pass(tokenizer):
    policy = random_model()
    head = common.ValueHead(policy)
    torch.nn.init.ones_(head.head.weight)
    batch = {"input_ids": torch.tensor([[0, 7, 8, 9, 1]]), "prompt_length": torch.tensor([3]), "mask": torch.ones(1, 2)}
    common.logprobs_of(policy, 1.0, batch)
    hidden = policy.model(batch["input_ids"]).last_hidden_state.sum(-1)
    torch.testing.assert_close(head(batch), hidden[:, 2:4])


def test_resuming_what_holds_no_run_is_refused(tmp_path):
    with pytest.raises(InputError, match="holds no complete checkpoint"):
        common.load_checkpoint(str(tmp_path))
    (tmp_path / "checkpoint-5").mkdir()  # weights without a state: not complete
    with pytest.raises(InputError, match="holds no complete checkpoint"):
        common.load_checkpoint(str(tmp_path))


def test_a_number_that_is_not_finite_stops_the_step():
    with pytest.raises(InputError, match="gradient norm is nan in step 3"):
        common.check_finite(3, gradient_norm=torch.tensor(math.nan))
