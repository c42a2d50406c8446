"""What common.py does around the algorithms: sampling, scoring, cutting batches, prompts, rewards, run folders."""

import json
import math
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from test_models import CPU, POLICY, RAGGED, prompts_of, random_model
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import cispo
import common
import grpo
import gspo
import ppo
import reinforce
from common import InputError, Prompt

ROOT = Path(__file__).parents[1]


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


@pytest.mark.parametrize("of_generation_config", [[1, 9], [9], 9])
def test_a_mask_ends_with_the_first_of_all_stop_tokens(of_generation_config, tokenizer, monkeypatch):
    """Stops: 1 (tokenizer) and 9 (generation config). Rows: stop at once, the second stop id, cut, exactly full."""
    model = random_model()
    model.generation_config.eos_token_id = of_generation_config
    forced = torch.tensor([[1, 5, 5, 5], [5, 9, 5, 5], [5, 6, 7, 8], [5, 6, 7, 1]])
    steps, rows_left = iter(forced.T), {4: [0, 1, 2, 3], 3: [1, 2, 3], 2: [2, 3]}  # finished rows leave in order

    def force_tokens(logits, uniform, temperature):
        ids = next(steps)[rows_left[len(logits)]]
        return ids, torch.zeros(len(ids))

    monkeypatch.setattr(common, "sample_tokens", force_tokens)
    batch = common.generate(model, tokenizer, prompts_of([0, 1, 9], [0, 5], [0, 5], [0, 5]), 1, 4, 1.0, key=(0,))
    assert batch["mask"].tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert batch["length"].tolist() == [1, 2, 4, 4] and batch["truncated"].tolist() == [False, False, True, False]
    assert batch["input_ids"][0, :4].tolist() == [0, 1, 9, 1]
    assert batch["input_ids"][3, :6].tolist() == [0, 5, 5, 6, 7, 1]
    assert batch["completions"] == [tokenizer.decode(ids) for ids in ([], [5], [5, 6, 7, 8], [5, 6, 7])]


# --- batches ---


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_collate_makes_a_batch_of_anybodys_completions(tokenizer, kind):
    """Two rows each of two prompts, in lists or tensors. The tool's tokens of row 0 have no log-probability."""
    ids = [[50, 51, 60, 52, 1], [53, 1], [54, 61, 55, 56], [57, 58, 1]]
    logprobs = [[-0.5, -1, math.nan, -1.5, -2], [-1, -1], [-2, math.inf, -2, -2], [-1, -1, -1]]
    masks = [[1, 1, 0, 1, 1], [1, 1], [1, 0, 1, 1], [1, 1, 1]]
    ids, logprobs, masks = ([kind(row) for row in rows] for rows in (ids, logprobs, masks))
    prompts = prompts_of([0, 7, 8], [0, 9])
    batch = common.collate(tokenizer, prompts, 2, ids, logprobs, [False, False, True, False], masks)
    assert batch["input_ids"][:2].tolist() == [[0, 7, 8, 50, 51, 60, 52, 1], [0, 7, 8, 53, 1, 0, 0, 0]]
    assert batch["input_ids"][2:].tolist() == [[0, 9, 54, 61, 55, 56, 0, 0], [0, 9, 57, 58, 1, 0, 0, 0]]
    assert batch["prompt_length"].tolist() == [3, 3, 2, 2] and batch["length"].tolist() == [5, 2, 4, 3]
    assert batch["mask"].tolist() == [[1, 1, 0, 1, 1], [1, 1, 0, 0, 0], [1, 0, 1, 1, 0], [1, 1, 1, 0, 0]]
    assert common.weighted_sum(batch["logprobs"], batch["mask"], 1).tolist() == [-5, -2, -6, -3]
    assert batch["truncated"].tolist() == [False, False, True, False] and batch["prompt_id"].tolist() == [0, 0, 1, 1]
    assert batch["prompts"] == [prompts[0], prompts[0], prompts[1], prompts[1]]
    texts = [50, 51, 60, 52], [53], [54, 61, 55, 56], [57, 58]  # the stop token goes; the tool's tokens are text, too
    assert batch["completions"] == [tokenizer.decode(row) for row in texts]
    whole = common.collate(tokenizer, prompts, 2, ids, logprobs, [False] * 4)
    assert whole["mask"].tolist() == [[1] * n + [0] * (5 - n) for n in (5, 2, 4, 3)]
    sampled = common.generate(random_model(), tokenizer, prompts, 2, 4, 1.0, key=(0,))
    kinds = [{k: getattr(v, "dtype", type(v)) for k, v in x.items()} for x in (batch, whole, sampled)]
    assert kinds[0] == kinds[1] == kinds[2]


@pytest.mark.parametrize("ids, logprobs, masks", [([], [], []), ([5], [-1, -1], [1]), ([5, 1], [-1, -1], [1])])
def test_collate_refuses_what_is_no_completion(tokenizer, ids, logprobs, masks):
    with pytest.raises(ValueError, match="a completion has one token or more"):
        common.collate(tokenizer, prompts_of([0]), 2, [[5, 1], ids], [[-1, -1], logprobs], [0, 0], [[1, 1], masks])


TEXT = "The answer is 42, playing games. 日本 é 😀 unbelievable"
BYTES = [f"<0x{i:02X}>" for i in range(256)]
SPECIAL = ["<s>", "</s>", "<unk>"]


def tokenizer_of(kind):
    """Each kind as its models have it, trained on a line of text, with an added token that is not special."""
    if kind == "byte-level":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet)
    elif kind == "WordPiece":
        made = Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=SPECIAL)
    else:
        made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        trainer = trainers.BpeTrainer(vocab_size=310, special_tokens=SPECIAL + BYTES)
        if kind == "Llama 2":
            steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
            made.normalizer = normalizers.Sequence(steps)
            steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        else:
            scheme = kind.removeprefix("SentencePiece, blank ")
            made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
            steps = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)]
        made.decoder = decoders.Sequence(steps)
    made.train_from_iterator([TEXT] * 3, trainer)
    made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    made.add_tokens([AddedToken("<tool>", normalized=False)])
    return made


KINDS = ["byte-level", "WordPiece", "Llama 2", *(f"SentencePiece, blank {x}" for x in ("first", "never", "always"))]


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_and_completion_are_the_text_that_was_sampled(kind):
    """Cut after each token of a text in turn: the first blank stays, and "##" goes, wherever the prompt ends."""
    made = tokenizer_of(kind)
    ids = made(TEXT + "<tool> 42").input_ids
    text = made.decode(ids, skip_special_tokens=True)
    assert len(ids) > 8 and "answer is 42" in text and "<tool>" in text
    for cut in range(2, len(ids)):
        prompt = Prompt(ids[:cut], made.decode(ids[:cut], skip_special_tokens=True), {})
        if "\ufffd" in prompt.text:
            continue  # a prompt is a text, it does not end within a character
        row = [*ids[cut:], made.eos_token_id]
        batch = common.collate(made, [prompt], 1, [row], [[-1.0] * len(row)], [False])
        assert prompt.text + batch["completions"][0] == text, (cut, prompt.text)
    half = (
        made("é", add_special_tokens=False).input_ids[-1:]
        if kind == "byte-level"
        else made.convert_tokens_to_ids(["a"])
    )
    batch = common.collate(made, [Prompt(ids[:3], "", {})], 1, [half], [[-1.0]], [True])
    assert len(batch["completions"][0].strip()) == 1  # half a character is one replacement sign


def test_collate_puts_tensors_on_the_device_and_rows_of_a_one_token_prompt_apart(tokenizer):
    """Nothing of such a prompt can be read before its rows, so there is nothing to share, with any prompt beside it."""
    rows = [[50, 1]] * 4, [[-1.0, -1.0]] * 4, [False] * 4
    elsewhere = SimpleNamespace(device=torch.device("meta"), shares_prompts=True)
    batch = common.collate(tokenizer, prompts_of([0], [0, 7, 8]), 2, *rows, policy=elsewhere)
    assert {v.device.type for v in batch.values() if isinstance(v, torch.Tensor)} == {"meta"}
    one, longer = (common.collate(tokenizer, prompts_of(ids, [0, 7]), 2, *rows) for ids in ([0], [0, 7]))
    assert one["prompt_id"].tolist() == [0, 1, 2, 3] and longer["prompt_id"].tolist() == [0, 0, 1, 1]


def test_completion_positions_are_one_before_the_tokens_they_predict():
    masks = torch.tensor([[1.0, 1, 0, 0], [1, 1, 1, 0]])
    batch = {"input_ids": torch.zeros(2, 6), "prompt_length": torch.tensor([3, 1]), "mask": masks}
    assert common.completion_positions(batch).int().tolist() == [[0, 0, 1, 1, 0], [1, 1, 1, 0, 0]]
    # a prompt of 2 and a tool's tokens in the middle: tokens 2, 3, 4 and 9, 10, 11 are the policy's own
    holes = {"input_ids": torch.arange(12)[None], "prompt_length": torch.tensor([2])}
    holes["mask"] = torch.tensor([[1, 1, 1, 0, 0, 0, 0, 1, 1, 1]])
    assert common.completion_positions(holes).nonzero()[:, 1].tolist() == [1, 2, 3, 8, 9, 10]
    assert holes["input_ids"][:, 1:][common.completion_positions(holes)].tolist() == [2, 3, 4, 9, 10, 11]


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


def test_rewards_are_summed_before_they_are_rounded():
    """1000.1 - 1000 and .1 - 0: the first is .1 to 13 digits, but to 4 only where each number is a float32 first."""
    rewards = {"one": (lambda prompts, completions, rows: [1000.1, 0.1], 1.0)}
    rewards["other"] = (lambda prompts, completions, rows: [1000.0, 0.0], -1.0)
    found = common.score(rewards, batch_of(["a", "b"]))["rewards"]
    assert found.dtype == torch.float32 and common.no_signal(found, 2).all()


def test_rows_are_cut_where_the_budget_ends_and_not_before():
    def two_each(rows):
        return 2 * len(rows)

    assert common.cut_rows([5, 4, 3, 2, 1], two_each, 4, 9) == [[5, 4], [3, 2], [1]]
    assert common.cut_rows([5, 4, 3], two_each, 100, 2) == [[5, 4], [3]]  # no more rows than asked
    assert common.cut_rows([5, 4], two_each, 1, 9) == [[5], [4]] and common.cut_rows([], two_each, 1, 9) == []


def test_minibatches_cover_the_batch_once_an_epoch_and_never_lose_the_last_rows():
    batch = {"mask": torch.ones(10, 1), "x": torch.arange(10)}
    sizes = [len(m["x"]) for m in common.minibatches(batch, 2, 4, key=(0, 1))]
    seen = torch.cat([m["x"] for m in common.minibatches(batch, 2, 4, key=(0, 1))]).tolist()
    assert sizes == [4, 4, 2, 4, 4, 2]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10)) and seen[:10] != seen[10:]
    assert [len(m["x"]) for m in common.minibatches(batch, 2, 0, key=(0,))] == [10, 10]


def test_ranks_share_the_work_and_one_without_a_part_does_the_last_thing_once_more(monkeypatch):
    """All ranks must run as many passes; what is done for that alone counts for nothing."""
    parts, done = [], []
    monkeypatch.setattr(common, "NUM_RANKS", 3)
    monkeypatch.setattr(common, "on_every_rank", lambda mine: parts.append(mine) or parts)
    for rank in range(3):
        monkeypatch.setattr(common, "RANK", rank)
        found = common.in_parts(lambda mine: done.append(mine) or list(mine), 2)
    assert done == [range(1, 2), range(1), range(1, 2)] and parts == [[], [0], [1]] and found == [0, 1]


def test_select_takes_indices_or_bools_in_tensors_and_lists_alike():
    batch = {"x": torch.arange(6), "completions": list("abcdef")}
    for rows in (torch.tensor([2, 3, 4, 5]), torch.tensor([False, False, True, True, True, True])):
        chosen = common.select(batch, rows)
        assert chosen["x"].tolist() == [2, 3, 4, 5] and chosen["completions"] == list("cdef")


def test_concatenate_pads_to_the_wider():
    a = {"mask": torch.ones(1, 2), "truncated": torch.tensor([True]), "completions": ["a"]}
    b = {"mask": torch.ones(1, 3), "truncated": torch.tensor([False]), "completions": ["b"]}
    joined = common.concatenate(a | {"prompt_id": torch.tensor([3])}, b | {"prompt_id": torch.tensor([0])})
    assert joined["mask"].tolist() == [[1, 1, 0], [1, 1, 1]] and joined["completions"] == ["a", "b"]
    assert joined["truncated"].tolist() == [True, False] and len(joined["prompt_id"].unique()) == 2


def test_entropy_of_a_distribution():
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log()  # .5 ln 2 + 2 * .25 ln 4 = 1.5 ln 2
    assert common.LogprobsAndEntropy.apply(logits, torch.tensor([0]))[1].item() == pytest.approx(1.5 * math.log(2))


def test_the_score_lands_on_the_last_completion_token():
    mask = torch.tensor([[1.0, 1, 0], [1, 0, 1], [1, 0, 0]])
    assert common.at_last_token(torch.tensor([5.0, 6, 7]), mask).tolist() == [[0, 5, 0], [0, 0, 6], [7, 0, 0]]


def test_baseline_of_reinforce_is_the_mean_of_the_other_rows():
    # (1 + 4) / 2, (3 + 4) / 2, (3 + 1) / 2
    assert reinforce.leave_one_out_baseline(torch.tensor([3.0, 1.0, 4.0])).tolist() == [2.5, 3.5, 2.0]


@pytest.mark.parametrize("module", [grpo, gspo, cispo])
def test_overlong_penalty_grows_over_the_buffer(module):
    # of 10 tokens the last 4 cost: up to 6 nothing, then a quarter each
    assert module.overlong_penalty(torch.tensor([1, 6, 7, 9, 10]), 10, 4).tolist() == [0, 0, 0.25, 0.75, 1]


def test_explained_variance():
    mask = torch.tensor([[1.0, 1, 0]])
    returns = torch.tensor([[1.0, 3, 9]])  # mean 2, variance 1
    assert ppo.explained_variance(returns, returns, mask) == 1.0
    assert ppo.explained_variance(torch.tensor([[2.0, 2, 0]]), returns, mask) == 0.0
    assert ppo.explained_variance(torch.tensor([[1.0, 2, 0]]), returns, mask) == pytest.approx(0.75)  # errors 0, 1
    assert ppo.explained_variance(returns, torch.ones(1, 3), mask) == 0.0  # nothing varies


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
    message = "a.jsonl line 1 can't be put through the tokenizer's chat template .*template is not set"
    with pytest.raises(InputError, match=message):
        common.load_prompts(data, tokenizer, 64)
    chat = common.load_tokenizer("tiny/policy")
    chat.chat_template = "<bos>{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    chat.chat_template += "{% if add_generation_prompt %}assistant:{% endif %}"
    (prompt,) = common.load_prompts(data, chat, 64)
    assert prompt.text == "<bos>user: hi\nassistant:" and prompt.ids.count(chat.bos_token_id) == 1


def test_a_row_may_hold_any_character(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a\u2028b\u0085c"}\n', encoding="utf-8")
    assert common.load_prompts(str(tmp_path / "a.jsonl"), tokenizer, 64)[0].text == "a\u2028b\u0085c"


def test_an_eos_that_the_tokenizer_adds_to_every_text_goes(tokenizer, tmp_path):
    adds = common.load_tokenizer("tiny/policy")
    ends = [("<bos>", 0), ("<eos>", 1)]
    adds.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A <eos>", special_tokens=ends)
    assert adds("1+1=").input_ids[-1] == adds.eos_token_id
    (prompt,) = common.load_prompts(write(tmp_path / "a.jsonl", {"prompt": "1+1="}), adds, 64)
    assert prompt.ids == tokenizer("1+1=").input_ids


@pytest.mark.parametrize("text", ["<bos>1+1=", "1+1="])
def test_a_text_that_begins_with_the_start_token_gets_no_second_one(text, tokenizer, tmp_path):
    (prompt,) = common.load_prompts(write(tmp_path / "a.jsonl", {"prompt": text}), tokenizer, 64)
    assert prompt.ids.count(tokenizer.bos_token_id) == 1 and prompt.text == text
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
    # as people have them: what was found is shown beside what is needed
    (['{"question": "2+2", "answer": 4}'], 'line 1 has no "prompt" .*question.*answer'),
    (["["], "line 1 is not JSON, one object a line"),
    (['{"conversations": [{"from": "human", "value": "a"}]}'], "line 1 .*messages with texts as .content.*from.*human"),
    (['{"prompt": [{"from": "human", "value": "a"}]}'], "line 1 .*messages with texts as .content.*from.*human"),
    (['{"prompt": [{"role": "user", "content": [{"type": "text"}]}]}'], "line 1 .*with texts as .content.*type"),
    (['{"prompt": "[{\\"role\\": \\"user\\", \\"content\\": \\"a\\"}]"}'], 'line 1 has no "prompt" that is a text'),
    (['{"prompt": "[{\'content\': \'a\', \'role\': \'user\'}]"}'], 'line 1 has no "prompt" that is a text'),
    (['{"prompt": "\\ud800"}'], "line 1 can't be put through the tokenizer"),  # half of a pair
    ([], "has no prompt of at most"),
])  # fmt: skip
def test_a_broken_row_names_its_file_and_line(tokenizer, tmp_path, rows, message):
    with pytest.raises(InputError, match=f"a.jsonl.* {message}"):
        common.load_prompts(write(tmp_path / "a.jsonl", *rows), tokenizer, 64)


def test_a_csv_file_keeps_blanks_and_long_fields_and_another_separator_shows(tokenizer, tmp_path):
    (tmp_path / "a.csv").write_text("prompt,solution\n The sum is,  " + "7" * 200_000 + "\n")
    (prompt,) = common.load_prompts(str(tmp_path / "a.csv"), tokenizer, 64)
    assert prompt.row == {"prompt": " The sum is", "solution": "  " + "7" * 200_000}
    (tmp_path / "b.csv").write_text("prompt;answer\na;1\n")
    with pytest.raises(InputError, match="b.csv row 1 has no .prompt.*'prompt;answer': 'a;1'"):
        common.load_prompts(str(tmp_path / "b.csv"), tokenizer, 64)


def test_samples_are_the_best_and_the_worst_of_a_prompt_with_all_that_is_known_of_them():
    """Two prompts, groups of three; per-token advantages are averaged over the mask: (3 + 5) / 2 is 4."""
    prompts = [Prompt([5], text, {"prompt": text, "answer": n}) for n, text in enumerate("ab") for _ in range(3)]
    batch = {"prompts": prompts, "completions": list("uvwxyz"), "rewards": torch.tensor([0.5, 2, -1, 1, 1, 1])}
    batch |= {"truncated": torch.tensor([False, True, False, False, False, False]), "reward/mine": torch.arange(6.0)}
    batch["mask"] = torch.tensor([[1.0, 0.0, 1.0]] * 6)
    found = common.samples_of(batch, 3, advantage=torch.tensor([[3.0, 99.0, 5.0]] * 6))
    best = {"prompt": "a", "completion": "v", "reward": 2.0, "truncated": True, "reward/mine": 1.0, "advantage": 4.0}
    assert found[0] == best | {"row": {"prompt": "a", "answer": 0}}
    assert [(x["prompt"], x["completion"]) for x in found] == [("a", "v"), ("a", "w"), ("b", "x"), ("b", "z")]
    assert [x["completion"] for x in common.samples_of(batch, 1, advantage=torch.zeros(6))] == list("uvwx")


def test_the_stop_tokens_are_shown(tokenizer, capsys):
    """A base model with the template of an instruct model never stops, and this is where one sees it."""
    model = random_model()
    model.generation_config.eos_token_id = [1, 50]
    common.check_fits(model, tokenizer, RAGGED, 4)
    assert f"stop tokens: ['<eos>', {tokenizer.convert_ids_to_tokens(50)!r}]" in capsys.readouterr().out
    endless = common.load_tokenizer("tiny/policy")
    endless.eos_token, model.generation_config.eos_token_id = None, None
    common.check_fits(model, endless, RAGGED, 4)
    assert "stop tokens: none, all completions are cut" in capsys.readouterr().out


def test_without_tiny_beside_common_its_place_is_named(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common, "__file__", str(tmp_path / "common.py"))
    with pytest.raises(InputError, match="tiny/policy is not here: copy tiny/ from the repository, or name your own"):
        common.load_tokenizer("tiny/policy")


def test_prompts_come_in_epochs_each_in_its_own_order():
    prompts = prompts_of(*([i] for i in range(10)))
    state = {"consumed": 0}
    taken = [p.ids[0] for _ in range(5) for p in common.next_prompts(prompts, 4, state, seed=0)]
    assert sorted(taken[:10]) == sorted(taken[10:]) == list(range(10)) and taken[:10] != taken[10:]
    assert state == {"consumed": 20}
    assert [p.ids[0] for p in common.next_prompts(prompts, 3, {"consumed": 9}, seed=0)] == taken[9:12]


# --- rewards ---


def batch_of(completions, rows=None):
    rows = rows or [{"prompt": "p"}] * len(completions)
    prompts = [Prompt([0], "p", row) for row in rows]
    return {"prompts": prompts, "completions": completions, "mask": torch.ones(len(completions), 1)}


@pytest.mark.parametrize("text, number", [
    ("the answer is 42.", 42), ("1,234.50 dollars", Fraction(2469, 2)), ("-7", -7), ("50%", 50),
    ("3/4", Fraction(3, 4)), (r"\boxed{\frac{1}{2}}", Fraction(1, 2)), ("10-3", 3), ("2024-01-15", 15), ("$3.00", 3),
    (".5", Fraction(1, 2)), (r"so \boxed{12} and not 13", 12), ("2 + 2\n#### 4 apples", 4), ("5 - 3", 3),
])  # fmt: skip
def test_the_final_number_of_a_text(text, number):
    other = number + Fraction(1, 10**9)  # compared exactly
    assert common.math_answer([""] * 2, [text] * 2, [{"answer": str(n)} for n in (number, other)]) == [1.0, 0.0]


@pytest.mark.parametrize("text", ["none", "9" * 5000, "1/0", ""])
def test_a_text_without_a_number_is_wrong(text):
    assert common.number_of(text) is None and common.math_answer([""], [text], [{"answer": "0"}]) == [0.0]


def test_verifiers():
    rows = [{"answer": "122"}, {"answer": 122}, {"answer": "12"}]
    assert common.exact_match(["", "", ""], [" 122\n", "122", "122"], rows) == [1.0, 1.0, 0.0]
    assert common.math_answer(["", "", ""], ["It is 122.0", "I don't know", r"\boxed{12}"], rows) == [1.0, 0.0, 1.0]


def test_several_rewards_are_weighted_and_each_is_kept(tmp_path):
    file = tmp_path / "mine.py"
    body = "[len(c) + row['bonus'] for c, row in zip(completions, rows)]"
    file.write_text(f"def length(prompts, completions, rows):\n    return {body}\n")
    rewards = common.load_rewards(None, ("exact_match", f"{file}:length"), (2.0, 0.5), None, POLICY, 1000)
    scores = common.score(rewards, batch_of(["ab", "c"], [{"answer": "ab", "bonus": 4}, {"answer": "ab", "bonus": 0}]))
    assert scores["rewards"].tolist() == [2 * 1 + 0.5 * 6, 2 * 0 + 0.5 * 1]
    assert scores["reward/exact_match"].tolist() == [1, 0] and scores["reward/length"].tolist() == [6, 1]


@pytest.mark.parametrize("value", [True, 1, 1.0, torch.tensor(1.0), torch.tensor(1.0).numpy()])
def test_any_kind_of_number_is_a_score(value):
    scores = common.score({"mine": (lambda p, c, r: [value, 0.0], 1.0)}, batch_of(["a", "b"]))
    assert scores["rewards"].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
def test_a_score_that_is_not_finite_is_refused_with_its_row(value):
    with pytest.raises(InputError, match="reward mine gave .* for prompt 'p', completion 'b'"):
        common.score({"mine": (lambda p, c, r: [0.0, value], 1.0)}, batch_of(["a", "b"]))


@pytest.mark.parametrize("values", [[0.0, None], [0.0, "a"], [0.0, [1]], None, 1.0, [0.0], [0.0] * 3])
def test_what_is_no_list_of_a_number_each_is_refused(values):
    with pytest.raises(InputError, match="reward mine returned .*, which is no list of 2 numbers"):
        common.score({"mine": (lambda p, c, r: values, 1.0)}, batch_of(["a", "b"]))


def test_two_functions_of_one_name_are_kept_apart(tmp_path):
    for name, value in (("one", 1), ("ten", 10)):
        body = f"    return [{value}] * len(prompts)\n"
        (tmp_path / f"{name}.py").write_text(f"def score(prompts, completions, rows):\n{body}")
    specs = (f"{tmp_path}/one.py:score", f"{tmp_path}/ten.py:score")
    scores = common.score(common.load_rewards(None, specs, (), None, POLICY, 100), batch_of(["a"]))
    assert scores["rewards"].tolist() == [11] and scores[f"reward/{specs[1]}"].tolist() == [10]


@pytest.mark.parametrize("spec", ["nonsense", "nothere.py:f", "tests/conftest.py:f", "tests/conftest.py"])
def test_a_reward_function_that_is_not_there_is_named(spec):
    with pytest.raises(InputError, match=f"--reward-fn {spec}"):
        common.load_reward_fn(spec)


# --- reward models ---

FILM = "Review of the comedy Lost River:"
REVIEWS = [" Dull.", " A great film with a superb cast.", " Good.", " Long, flat, strange. I loved the cast."]


def reward_fn(path="tiny/reward", policy=POLICY, batch_tokens=100):
    ((fn, _),) = common.load_rewards(path, (), (), None, policy, batch_tokens).values()
    return fn


def scores_of(fn, completions, prompt=FILM):
    return fn([prompt] * len(completions), completions, [{"prompt": prompt}] * len(completions))


def test_messages_need_a_chat_template_of_the_reward_model():
    with pytest.raises(InputError, match="can't be put through the chat template of the reward model's tokenizer"):
        reward_fn()(["a"], ["b"], [{"prompt": [{"role": "user", "content": "a"}]}])


def test_the_reward_model_scores_text_alike_alone_and_in_a_batch_of_the_tokens_that_fit(monkeypatch):
    sizes, forward = [], transformers.LlamaForSequenceClassification.forward

    def counted(self, input_ids, **inputs):
        sizes.append(input_ids.shape)
        return forward(self, input_ids=input_ids, **inputs)

    monkeypatch.setattr(transformers.LlamaForSequenceClassification, "forward", counted)
    together = scores_of(reward_fn(batch_tokens=50), REVIEWS)
    alone, in_pieces = [scores_of(reward_fn(), [text])[0] for text in REVIEWS], sizes[: -len(REVIEWS)]
    assert together == pytest.approx(alone, abs=1e-5) and len(set(together)) == 4
    assert max(map(math.prod, in_pieces)) <= 50 and 1 < len(in_pieces) < len(REVIEWS), in_pieces


def test_scores_of_a_reward_model_in_bfloat16_passes_are_not_rounded_to_8_bits():
    low = SimpleNamespace(device=CPU, compute_dtype=torch.bfloat16)
    scores = scores_of(reward_fn(policy=low), REVIEWS)
    assert scores == pytest.approx(scores_of(reward_fn(), REVIEWS), abs=0.1)
    assert all(score != torch.tensor(score).bfloat16().item() for score in scores)
    full, half = (
        common.load_model(transformers.AutoModelForSequenceClassification, "tiny/reward", num_labels=1)
        for _ in range(2)
    )
    assert torch.equal(common.prepare(half, torch.bfloat16, trainable=False).score.weight, full.score.weight)


def test_a_causal_model_is_refused_as_a_reward_model():
    message = r"tiny/policy .*LlamaForSequenceClassification \(1 label\).* score.weight"
    with pytest.raises(InputError, match=message):
        reward_fn("tiny/policy")


@pytest.mark.parametrize("family, pad", [
    ("Llama", None), ("Llama", 7), ("Llama", -1), ("Llama", 1), ("Llama", 599), ("GPT2", None), ("GPT2", 5000),
    ("Bert", None), ("Roberta", 1),
])  # fmt: skip
def test_a_reward_models_score_is_that_of_the_text_alone_whatever_its_pad_id(family, pad, tokenizer, tmp_path):
    """Also where texts of one batch end in ids that could be taken for padding: 0, 1 (the eos), 2, 7."""
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = getattr(transformers, f"{family}Config")(**shape, vocab_size=600, num_labels=1, pad_token_id=1)
    model = getattr(transformers, f"{family}ForSequenceClassification")(config).eval()
    for parameter in model.parameters():
        parameter.data *= 12 if parameter.dim() > 1 else 1
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text()) | {"pad_token_id": pad}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    bare = common.load_tokenizer("tiny/policy")
    bare.pad_token = None
    bare.save_pretrained(tmp_path)

    @torch.no_grad()
    def alone(row):
        if hasattr(model, "score"):  # reads the last token; the heads of encoders read the first
            return model.score(model.base_model(row).last_hidden_state[0, -1]).item()
        return model(row).logits.item()

    texts = ["b", "bcd", "b<eos>", "bcdefg", "be<bos>", "bf<bos><eos>", "cde<pad>", "c" + tokenizer.decode(7)]
    ids = [tokenizer("a" + text, return_tensors="pt").input_ids for text in texts]
    assert {0, 1, 2, 7} <= {int(row[0, -1]) for row in ids}
    expected, fn = [alone(row) for row in ids], reward_fn(str(tmp_path))
    assert scores_of(fn, texts, prompt="a") == pytest.approx(expected, abs=1e-5) and len(set(expected)) == 8
    assert scores_of(fn, texts[2:3], prompt="a") == pytest.approx(expected[2:3], abs=1e-5)


# --- models and run folders ---


def test_a_bfloat16_checkpoint_trains_in_float32_and_the_reference_shares_no_storage(tmp_path):
    AutoModelForCausalLM.from_pretrained(ROOT / "tiny/policy", dtype=torch.bfloat16).save_pretrained(tmp_path)
    policy = common.load_policy(str(tmp_path), CPU, torch.float32)
    reference = common.load_reference(str(tmp_path), policy)
    assert {p.dtype for p in policy.parameters()} == {torch.float32} and not policy.training
    assert not {p.data_ptr() for p in policy.parameters()} & {p.data_ptr() for p in reference.parameters()}
    assert all(p.requires_grad for p in policy.parameters())
    assert not any(p.requires_grad for p in reference.parameters())


@pytest.mark.parametrize("path", ["./nothere", "/no/such/folder", "no/such/model"])
def test_a_model_that_is_not_there_is_named_at_once(path):
    with pytest.raises(InputError, match=f"no model could be loaded from {path}, a folder or a hub id"):
        common.load_policy(path, CPU, torch.float32)


def test_value_model_reads_the_position_before_each_token(tokenizer):
    """The trunk's hidden state at the last prompt token predicts the value of the first completion token."""
    values = ppo.load_value_model(["tiny/reward", "tiny/policy"], POLICY, tokenizer)
    reward = common.load_model(transformers.AutoModelForSequenceClassification, "tiny/reward", num_labels=1).eval()
    ids = torch.tensor([[0, 7, 8, 9, 1], [0, 5, 6, 1, 0]])
    batch = {"input_ids": ids, "prompt_length": torch.tensor([3, 2]), "mask": torch.ones(2, 2)}
    with torch.no_grad():
        found = values(batch)
        for i, start in enumerate([3, 2]):
            for t in range(2):  # the reward model's score of the text before token t
                score = reward(ids[i : i + 1, : start + t]).logits.item()
                assert found[i, t].item() == pytest.approx(score, abs=1e-5)


def test_a_value_head_reads_the_policys_latest_pass():
    policy = random_model()
    head = ppo.ValueHead(policy)
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
