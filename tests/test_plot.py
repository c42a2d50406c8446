"""benchmarks/plot.py: what is drawn, read back from the figure."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import plot


def write(folder, rows, end=""):
    folder.mkdir()
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text + end)


def row_of(step):
    row = {"step": step, "reward": step / 2, "lr": 1e-4, "time_update": 1.0} if step else {"step": 0}
    return row | ({"eval_reward": -step} if step % 2 == 0 else {})


def test_curves_show_every_metric_of_every_run(tmp_path, monkeypatch):
    """A panel per metric and a line per run, with the numbers of metrics.jsonl; half a line at the end is left out."""
    figure, drawn = pytest.importorskip("matplotlib.figure"), []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, path: drawn.append((self, path)))
    runs = {str(tmp_path / "one"): 5, str(tmp_path / "two"): 2}
    for run, end in runs.items():
        write(Path(run), map(row_of, range(end + 1)), '{"step": 7, "rew')
    plot.main(plot.Args(tuple(map(Path, runs)), tmp_path / "both.png"))
    [(drawn_figure, path)] = drawn
    panels = {axis.get_title(): axis for axis in drawn_figure.axes if axis.get_title()}
    assert path == tmp_path / "both.png" and list(panels) == ["eval_reward", "reward"]
    for name, axis in panels.items():
        for line, (run, end) in zip(axis.lines, runs.items(), strict=True):
            steps = [step for step in range(end + 1) if name in row_of(step)]
            assert line.get_label() == run and list(line.get_xdata()) == steps
            assert list(line.get_ydata()) == [row_of(step)[name] for step in steps]
    assert [axis.get_legend() is not None for axis in panels.values()] == [True, False]  # once is enough


def test_bands_words_and_logarithmic_axes(tmp_path, monkeypatch):
    figure, drawn = pytest.importorskip("matplotlib.figure"), []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, path: drawn.append(self.axes))
    band = {"title": "a", "lines": {"x": ([1, 2], [3.0, 4.0], [0.5, 1.0])}, "x_label": "steps", "log": "xy"}
    plot.draw([band, {"title": "b", "lines": {"": ([3.0, 4.0], ["three", "four"])}}], tmp_path / "x.png")
    first, second, *others = drawn[0]
    corners = first.collections[0].get_paths()[0].vertices.tolist()
    assert all(corner in corners for corner in ([1, 2.5], [1, 3.5], [2, 3], [2, 5]))
    assert (first.get_xscale(), first.get_yscale(), first.get_xlabel()) == ("log", "log", "steps")
    assert [text.get_text() for text in second.get_yticklabels()] == ["three", "four"]
    assert not any(axis.axison for axis in others)


def test_an_image_is_made(tmp_path):
    pytest.importorskip("matplotlib")
    write(tmp_path / "one", map(row_of, range(4)))
    plot.main(plot.Args((tmp_path / "one",), tmp_path / "one.png"))
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_one_sentence_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    write(tmp_path / "one", map(row_of, range(4)))
    plot.main(plot.Args((tmp_path / "one",), tmp_path / "one.png"))
    assert (
        capsys.readouterr().out
        == f"{tmp_path / 'one.png'} is not drawn: there is no matplotlib; pip install matplotlib\n"
    )
    assert not (tmp_path / "one.png").exists()


def test_a_folder_without_rows_is_named(tmp_path):
    write(tmp_path / "one", [row_of(1)])
    write(tmp_path / "two", [])
    with pytest.raises(SystemExit, match=f"no metrics.jsonl with a row in {tmp_path / 'two'}, {tmp_path / 'three'}$"):
        plot.main(plot.Args((tmp_path / "one", tmp_path / "two", tmp_path / "three"), tmp_path / "x.png"))
    with pytest.raises(SystemExit, match="in no folder$"):
        plot.main(plot.Args(()))
