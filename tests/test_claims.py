"""The numbers of benchmarks/claims.py, against what can be worked out beside it."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import claims

close = pytest.approx


def lines_of(panel):
    """{name: numbers}, and "x"."""
    if "" in panel["lines"]:
        numbers, names = panel["lines"][""]
        return dict(zip(names, numbers, strict=True))
    xs = [x for x, _ in panel["lines"].values()]
    assert all(x == xs[0] for x in xs)
    return {name: y for name, (_, y) in panel["lines"].items()} | {"x": xs[0]}


def test_variance():
    of, off, gae, gae_bias = map(lines_of, claims.variance())
    assert of["reward-to-go"] == of["total return"] > 20 * of["RLOO of 3"]  # nothing but a score at the last token
    assert of["to-go - others of 2"] == of["RLOO of 2"] > of["RLOO of 3"] > of["to-go - mean reward"]
    biased = {name: x for name, x in off.items() if x > 1e-9}
    assert biased == close({"group mean of 2": 1 / 2, "group mean of 3": 1 / 3}, rel=1e-5)
    assert of["group mean of 3"] == close((2 / 3) ** 2 * of["RLOO of 3"], rel=1e-5)  # the same step, shrunk
    assert gae["no values"][-1] == of["total return"]
    assert max(gae_bias["true values"]) < 1e-9 < gae_bias["off by 0.1"][0]
    assert all(gae_bias[name][-1] < 1e-9 for name in gae_bias.keys() - {"x"})  # lambda 1
    assert gae["true values"] == sorted(gae["true values"])
    assert gae["off by 0.5"] == sorted(gae["off by 0.5"], reverse=True)


def test_lengths():
    share, per_token, pull, cosine = map(lines_of, claims.lengths())
    assert share["sequence"] == [0.25] * 4 and per_token["sequence"] == [64, 16, 4, 1]
    for kind in ("token", "constant", "sum"):
        assert share[kind] == close([n / 680 for n in share["x"]], rel=1e-5) and per_token[kind] == [1] * 4
        signed = [sign * n / 680 for sign, n in zip((1, -1, 1, -1), share["x"], strict=True)]
        assert pull[kind] == close(signed, rel=1e-5)
    assert cosine["sum"] == cosine["constant"] == 1 > cosine["token"] > cosine["sequence"]


def test_experts():
    dense, experts = map(lines_of, claims.experts(seeds=(0,)))
    assert experts["token"] > 3 * dense["token"]
    assert experts["token, experts changed"] > 2 * experts["token, same experts"]
    assert 0.01 < experts["share with other experts"] < 0.5 and dense["share with other experts"] == 0
    for found in (dense, experts):  # averaging, nothing more
        assert 0.7 < found["sequence"] / found["mean of independent tokens"] < 2
        assert found["share outside GSPO's clip"] > 0.5


def test_claims_that_are_not_checked_keep_their_numbers(tmp_path, capsys):
    (tmp_path / "claims.json").write_text('{"variance": {"panels": "old"}, "lengths": {"panels": "old"}}')
    claims.main(claims.Args(only=("lengths",), output_dir=tmp_path))
    results = json.loads((tmp_path / "claims.json").read_text())
    assert results["variance"] == {"panels": "old"} and lines_of(results["lengths"]["panels"][0])["x"] == [
        8,
        32,
        128,
        512,
    ]
    assert {"command", "commit", "date", "machine", "versions"} <= results["lengths"].keys()
    out = capsys.readouterr().out
    assert out.startswith("lengths: A mean over each sequence") and "\n    sequence 0.8793\n" in out
