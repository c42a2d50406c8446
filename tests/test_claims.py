"""What benchmarks/claims.py says it found is what its panels hold, and what can be worked out beside it."""

import sys

import pytest

from test_scripts import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import claims  # noqa: E402

close = pytest.approx


def panels_of(claim):
    return [dict(panel["lines"], x=panel["x"]) for panel in claim["panels"]]


def test_variance():
    bars, bias, gae, gae_bias, *_ = panels_of(claims.variance())
    of, off = dict(zip(bars["x"], bars[""])), dict(zip(bias["x"], bias[""]))
    assert of["reward-to-go"] == of["total return"] > 20 * of["RLOO of 3"]  # nothing but a score at the last token
    assert of["to-go - others of 2"] == of["RLOO of 2"] > of["RLOO of 3"] > of["to-go - mean reward"]
    assert {name: x for name, x in off.items() if x > 1e-9} == close({"group mean of 2": 1 / 2, "group mean of 3": 1 / 3}, rel=1e-5)
    assert of["group mean of 3"] == close((2 / 3) ** 2 * of["RLOO of 3"], rel=1e-5)  # the same step, shrunk
    assert gae["no values"][-1] == of["total return"] and max(gae_bias["true values"]) < 1e-9 < gae_bias["off by 0.1"][0]
    assert all(gae_bias[name][-1] < 1e-9 for name in gae_bias.keys() - {"x"})  # lambda 1
    assert gae["true values"] == sorted(gae["true values"]) and gae["off by 0.5"] == sorted(gae["off by 0.5"], reverse=True)


def test_clip():
    plain, sequence, weight = panels_of(claims.clip())
    for ratio, loss, slope in zip(plain["x"], plain["loss, advantage +1"], plain["gradient, advantage +1"]):
        assert (loss, slope) == close((-min(ratio, 1.2), -ratio if ratio < 1.2 else 0), abs=1e-6) or ratio == 1.2
    for ratio, loss, slope in zip(plain["x"], plain["loss, advantage -1"], plain["gradient, advantage -1"]):
        assert (loss, slope) == close((max(ratio, 0.8), ratio if ratio > 0.8 else 0), abs=1e-6) or ratio == 0.8
    for ratio, slope in zip(weight["x"], weight["gradient, advantage +1"]):
        assert slope == close(-min(ratio, 5))
    dead = [x for x, slope in zip(sequence["x"], sequence["gradient, advantage +1"]) if slope == 0]
    assert dead == [x for x in sequence["x"] if x > 4]


def test_groups():
    silent, factor, _ = panels_of(claims.groups())
    for size in (4, 8, 16):
        assert silent[f"G {size}, simulated"] == close(silent[f"G {size}"], abs=4 * (0.25 / 20_000) ** 0.5)
    assert factor["G 8, no std"] == close([7 / 8] * len(factor["x"]), rel=1e-5)
    for name in ("G 8, std", "G 8, no std"):
        assert factor[f"{name}, simulated"] == close(factor[name], rel=0.08)


def test_lengths():
    share, per_token, pull, cosine = panels_of(claims.lengths())
    assert share["sequence"] == [0.25] * 4 and per_token["sequence"] == [64, 16, 4, 1]
    for kind in ("token", "constant", "sum"):
        assert share[kind] == close([n / 680 for n in share["x"]], rel=1e-5) and per_token[kind] == [1] * 4
        assert pull[kind] == close([sign * n / 680 for sign, n in zip((1, -1, 1, -1), share["x"])], rel=1e-5)
    cosine = dict(zip(cosine["x"], cosine[""]))
    assert cosine["sum"] == cosine["constant"] == 1 > cosine["token"] > cosine["sequence"]


def test_experts():
    figures = claims.experts(seeds=(0,))["figures"]
    dense, experts = figures["dense"], figures["experts"]
    assert experts["token"] > 3 * dense["token"] and experts["token, experts changed"] > 2 * experts["token, same experts"]
    assert 0.01 < experts["changed"] < 0.5
    for figure in figures.values():  # averaging, nothing more
        assert 0.7 < figure["sequence"] / figure["independent"] < 2 and figure["outside"] > 0.5
