"""The arithmetic of benchmarks/speed.py; its measurements are no test's matter."""

import sys
from types import SimpleNamespace

import pytest

from test_scripts import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import speed  # noqa: E402


def test_the_floor_of_a_small_example_by_hand(monkeypatch):
    """A layer of 2 * 4 * 4 (queries, output) + 2 * 4 * 2 (keys, values) + 3 * 4 * 6 = 120 weights, 10 x 4 embeddings; a prompt of 3 tokens,
    two completions of 2, of which the last token is not read."""
    shape = {"layers": 1, "hidden": 4, "intermediate": 6, "heads": 2, "kv_heads": 1, "vocabulary": 10}
    monkeypatch.setitem(speed.SHAPES, "small", shape)
    w = speed.Workload("small", num_prompts=1, group_size=2, prompt_tokens=3, completion_tokens=2)
    rates = {"layers": 1.0, "vocabulary": 1.0, "bandwidth": 1e9}
    found = speed.floor(w, 1e9 / 28, rates, 4)  # Adam moves 7 numbers of 4 bytes a parameter: 1 s
    # a token: 2 * 120 for the weights, 4 * 4 for each token it sees, 2 * 40 where it predicts
    assert found["generate"] == pytest.approx(3 * 240 + (1 + 2 + 3) * 16 + 80 + 2 * (240 + 4 * 16 + 80))
    assert found["update"] == pytest.approx(3 * (5 * 240 + (6 + 2 * 4) * 16 + 3 * 80) + 1)
    slow = speed.floor(w, 0, rates | {"bandwidth": 0.5}, 4)  # a sampled token waits for the weights and the cache: 2 vectors of 2, 5 tokens
    assert slow["generate"] == pytest.approx(3 * 240 + 6 * 16 + 80 + (120 + 40 + 2 * 2 * 5) * 4 / 0.5)


def test_shares_of_a_profile():
    names = {"aten::mm": 1e6, "aten::addmm": 1e6, "aten::baddbmm": 1e6, "aten::_flash_attention_cpu": 2e6, "aten::mul": 3e6, "autograd::x": 1e6}
    found = speed.by_kind([SimpleNamespace(key=k, self_cpu_time_total=v, count=2) for k, v in names.items()], 10.0)
    assert found == {
        "matrix products": pytest.approx(0.3), "attention": pytest.approx(0.2), "other operations": pytest.approx(0.4),
        "between them": pytest.approx(0.1), "operations": 10, "seconds": 10.0,
    }  # fmt: skip


def test_a_ratio_is_that_of_the_medians_with_its_spread_over_rounds():
    results = {
        side: [{"seconds": s, "tokens": [10] * 3, "peaks_mib": [mib], "imports_mib": 1} | dict.fromkeys(("generate", "score", "update"), s)
               for s in rounds]
        for side, rounds, mib in (("ours", [[1, 1, 2], [2, 2, 2]], 50), ("trl", [[2, 2, 2], [8, 8, 8]], 200))
    }  # fmt: skip
    ratio = speed.compare(results, {side: speed.pooled(rounds) for side, rounds in results.items()})
    # ours 10, 10, 5, 5, 5, 5 tokens a second, median 5; TRL's 5, 5, 5, 1.25, 1.25, 1.25, median 3.125
    assert ratio == {"speed": [5 / 3.125, 2.0, 4.0], "memory": 0.25}


def test_a_slope_of_1_is_proportional():
    assert speed.slope([1, 2, 4], [3, 6, 12]) == pytest.approx(1) and speed.slope([1, 2, 4], [5, 5, 5]) == pytest.approx(0)
