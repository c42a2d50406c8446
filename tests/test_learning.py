"""benchmarks/learning.py on scripts that pretend to learn: who is trained with what, what is picked, kept, reported."""

import importlib
import json
import sys
from pathlib import Path

import pytest

import common

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import learning

STUB = """
import json, pathlib, sys

flags = {name: sys.argv[i + 1] for i, name in enumerate(sys.argv) if name.startswith("--") and i + 1 < len(sys.argv)}
folder, lr = pathlib.Path(flags["--output-dir"]), float(flags["--lr"])
(folder / "final").mkdir(parents=True)
with open("calls.txt", "a") as calls:
    calls.write(" ".join(sys.argv) + "\\n")
rows = [{"step": 0, "eval_reward": 0.0, "eval_reward/gold_score": 0.0}]
for step in range(1, int(flags["--num-steps"]) + 1):
    gain = {1e-4: 0.5, 2e-4: 0.8, 4e-4: 0.7}[lr] + int(flags["--seed"]) % 10 / 10
    rows.append({"step": step, "time_generate": 1.0, "time_score": 0.25, "time_update": 0.75, "lr": lr})
    if step % int(flags["--eval-every"]) == 0:
        rows[-1] |= {"eval_reward": gain * min(1, step / 4), "eval_reward/gold_score": -gain}
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
"""
FEW = {"completions": 64, "eval_every": 2, "seeds": 2, "lrs": (1e-4, 2e-4, 4e-4), "jobs": 2}


@pytest.fixture
def pretending(tmp_path, monkeypatch):
    monkeypatch.setattr(learning, "ROOT", tmp_path)
    monkeypatch.setattr(learning, "ROWS", 8)
    for name in ("rloo", "grpo"):
        (tmp_path / f"{name}.py").write_text(STUB)
    return tmp_path


def test_learning(pretending, capsys):
    runs = pretending / "runs"
    args = learning.Args(tasks=("reviews",), scripts=("rloo", "grpo"), output_dir=runs, **FEW)
    learning.main(args)
    calls = (pretending / "calls.txt").read_text().splitlines()
    assert len(calls) == len(set(calls)) == 2 * (3 + 2)
    assert all("--num-steps 8 --eval-every 2 --lr" in call and "--device cpu --save-every 0" in call for call in calls)
    for name in ("rloo", "grpo"):
        how = [call.split("--lr ")[1].split(" --device")[0] for call in calls if call.startswith(name)]
        assert sorted(how) == ["0.0001 --seed 1000", "0.0002 --seed 0", "0.0002 --seed 1", "0.0002 --seed 1000",
                               "0.0004 --seed 1000"]  # fmt: skip
    results = json.loads((runs / "learning-reviews.json").read_text())
    assert {"command", "commit", "machine", "date", "versions", "seeds", "runs"} <= results.keys()
    first, second = results["runs"]["grpo, lr 0.0002"]
    assert first["completions"] == [0, 16, 32, 48, 64] and first["seconds"] == [0, 4, 8, 12, 16]
    assert first["eval_reward"] == [0, 0.4, 0.8, 0.8, 0.8] and second["eval_reward"][-1] == 0.9
    assert first[learning.GOLD] == [0, -0.8, -0.8, -0.8, -0.8] and first["peak_mib"] > 1
    out, table = capsys.readouterr().out, (runs / "learning-reviews.md").read_text()
    assert (
        "| grpo | 0.50 | 0.80 | 0.70 |\n" in (runs / "learning-reviews-tuning.md").read_text() in out and table in out
    )
    row = table.splitlines()[3]
    assert row.startswith("| grpo, lr 0.0002 | 0.85 ± 0.071 | -0.85 ± 0.071 | 4 ± 0 | 16 ± 0 |"), row
    assert not list(runs.glob("*/final"))

    # again: what is done is kept, what is not, or was done by another command, begins anew
    other = runs / "learning-reviews-rloo-lr-0.0002-0" / "done.json"
    other.write_text(other.read_text().replace("--device cpu", "--device cuda"))
    broken = runs / "learning-reviews-grpo-lr-0.0002-1" / "done.json"
    broken.unlink()
    learning.main(args)
    again = (pretending / "calls.txt").read_text().splitlines()[len(calls) :]
    again = sorted(call.split(" --dataset")[0] + call.split("--lr 0.0002")[1][:9] for call in again)
    assert again == ["grpo.py --seed 1", "rloo.py --seed 0"] and broken.exists()


def test_the_figure_shows_mean_and_spread(pretending, monkeypatch):
    figures = {}
    monkeypatch.setattr(learning.plot, "draw", lambda panels, path: figures.setdefault(path.name, panels))
    args = learning.Args(tasks=("reviews",), scripts=("grpo",), output_dir=pretending / "runs", **FEW)
    learning.main(args)
    seconds, rewards, gold = figures["learning-reviews.png"]
    x, mean, spread = rewards["lines"]["grpo, lr 0.0002"]
    assert x == [0, 16, 32, 48, 64] and mean == pytest.approx([0, 0.425, 0.85, 0.85, 0.85])
    assert spread == pytest.approx([0, 0.05 / 2**0.5, 0.1 / 2**0.5, 0.1 / 2**0.5, 0.1 / 2**0.5])
    assert seconds["lines"]["grpo, lr 0.0002"][0] == [0, 4, 8, 12, 16] and gold["title"] == learning.GOLD


def test_what_stops_a_run_is_shown(pretending):
    (pretending / "rloo.py").write_text("import sys\nsys.exit('error: no such thing')")
    with pytest.raises(RuntimeError, match="error: no such thing"):
        learning.main(learning.Args(tasks=("addition",), scripts=("rloo",), output_dir=pretending / "runs", **FEW))


def test_steps_to_a_share_of_the_way():
    def steps(*rewards):
        return learning.steps_to_90_percent({"step": [0, 5, 10, 15], "eval_reward": rewards})

    assert steps(0, 0.5, 0.95, 1) == 10 and steps(0, 0.89, 0.89, 1) == 15 and steps(0.4, 0.95, 0.9, 1) == 5
    assert steps(1, 1, 1, 1) == 0 and steps(1, 0.5, 0, 0) == 10  # nothing gained; lost


@pytest.mark.parametrize("name", learning.Args.scripts)
def test_scripts_take_the_commands_and_have_the_same_rows(name, monkeypatch):
    script = importlib.import_module(name)
    for flags in learning.TASKS.values():
        how = f"{name}.py {flags} --num-steps 100 --eval-every 5 --lr 5e-05 --seed 1 --device cpu --save-every 0"
        monkeypatch.setattr(sys, "argv", how.split())
        args = common.parsed(script.Args, "")
        assert args.num_prompts * args.group_size == learning.ROWS and len(args.reward_fn) == 1
