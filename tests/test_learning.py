"""benchmarks/learning.py on scripts that pretend to learn: who is trained with what, what is picked, what is kept, what is reported."""

import json
import sys
from pathlib import Path

import pytest

from test_scripts import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import learning  # noqa: E402

STUB = """
import json, pathlib, sys

class Args:
    num_prompts, group_size = 4, 2

if __name__ == "__main__":
    flags = {name: sys.argv[i + 1] for i, name in enumerate(sys.argv) if name.startswith("--") and i + 1 < len(sys.argv)}
    folder, lr = pathlib.Path(flags["--output-dir"]), float(flags["--lr"])
    (folder / "final").mkdir(parents=True)
    with open("calls.txt", "a") as calls:
        calls.write(" ".join(sys.argv) + "\\n")
    rows = [{"step": 0, "eval_reward": 0.0}]
    for step in range(1, int(flags["--num-steps"]) + 1):
        gain = {1e-4: 0.5, 2e-4: 0.8, 4e-4: 0.7}[lr] + int(flags["--seed"]) % 10 / 10
        rows.append({"step": step, "time_generate": 1.0, "time_score": 0.25, "time_update": 0.75, "lr": lr})
        if step % int(flags["--eval-every"]) == 0:
            rows[-1] |= {"eval_reward": gain * min(1, step / 4), "eval_reward/gold_score": -gain}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
"""


def test_learning(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(learning, "ROOT", tmp_path)
    for name in ("rloo", "grpo"):
        (tmp_path / f"{name}.py").write_text(STUB)
    few = {"completions": 64, "eval_every": 2, "seeds": 2, "lrs": (1e-4, 2e-4, 4e-4), "jobs": 2, "output_dir": tmp_path / "runs"}
    args = learning.Args(tasks=("reviews",), scripts=("rloo", "grpo"), **few)
    learning.main(args)
    calls = (tmp_path / "calls.txt").read_text().splitlines()
    assert len(calls) == len(set(calls)) == 2 * (3 + 2) and all(
        "--num-steps 8 --eval-every 2 --device cpu --quiet" in call for call in calls
    )
    for name in ("rloo", "grpo"):
        how = [call.split("--seed ")[1].split(" --num-steps")[0] for call in calls if call.startswith(name)]
        assert sorted(how) == ["0 --lr 0.0002", "1 --lr 0.0002", "1000 --lr 0.0001", "1000 --lr 0.0002", "1000 --lr 0.0004"]
    results = json.loads((tmp_path / "runs" / "learning.json").read_text())
    assert {"command", "commit", "machine", "date", "tasks"} <= results.keys()
    first, second = results["tasks"]["reviews"]["grpo"]["runs"]
    assert first["completions"] == [0, 16, 32, 48, 64] and first["seconds"] == [0, 4, 8, 12, 16]
    assert first["eval_reward"] == [0, 0.4, 0.8, 0.8, 0.8] and second["eval_reward"][-1] == 0.9
    row = (tmp_path / "runs" / "learning.md").read_text().splitlines()[3]
    assert row.startswith("| reviews | grpo | 0.50, 0.80, 0.70 | 2e-04 | 0.850 ± 0.071 | -0.85 ± 0.07 | 4 ± 0 | 16.0 ± 0.0 |"), row
    assert not list((tmp_path / "runs").glob("*/final"))

    # again: what is done is kept, what is not, or was done by another command, begins anew
    other = next((tmp_path / "runs").glob("reviews-rloo-0.0002-0-*/done.json"))
    other.write_text(other.read_text().replace("--device cpu", "--device cuda"))
    broken = next((tmp_path / "runs").glob("reviews-grpo-0.0002-1-*/done.json"))
    broken.unlink()
    learning.main(args)
    again = (tmp_path / "calls.txt").read_text().splitlines()[len(calls) :]
    assert sorted(call.split(" --dataset")[0] + call[call.index(" --seed") :][:19] for call in again) == [
        "grpo.py --seed 1 --lr 0.00", "rloo.py --seed 0 --lr 0.00"
    ] and broken.exists()  # fmt: skip


def test_what_stops_a_run_is_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(learning, "ROOT", tmp_path)
    Path(tmp_path / "rloo.py").write_text(STUB.replace("    flags = {", "    sys.exit('error: no such thing')\n    flags = {"))
    try:
        learning.main(learning.Args(tasks=("addition",), scripts=("rloo",), seeds=1, lrs=(1e-4,), output_dir=tmp_path / "runs"))
    except RuntimeError as error:
        assert "error: no such thing" in str(error)
    else:
        raise AssertionError("it went on")


def test_a_folder_that_two_runs_wrote_into_is_no_result(tmp_path, monkeypatch):
    monkeypatch.setattr(learning, "ROOT", tmp_path)
    twice = STUB.replace('"".join(json.dumps(row) + "\\n" for row in rows)', '2 * "".join(json.dumps(row) + "\\n" for row in rows)')
    assert twice != STUB
    (tmp_path / "rloo.py").write_text(twice)
    with pytest.raises(RuntimeError, match="was written by two runs"):
        learning.main(learning.Args(tasks=("addition",), scripts=("rloo",), seeds=1, lrs=(1e-4,), output_dir=tmp_path / "runs"))


def test_steps_to_a_share_of_the_way():
    def steps(*rewards):
        return learning.steps_to({"step": [0, 5, 10, 15], "eval_reward": rewards})

    assert steps(0, 0.5, 0.95, 1) == 10 and steps(0, 0.89, 0.89, 1) == 15 and steps(0.4, 0.95, 0.9, 1) == 5
    assert steps(1, 1, 1, 1) == 0 and steps(1, 0.5, 0, 0) == 10  # nothing gained; lost
