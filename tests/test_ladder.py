"""Each script is its parent plus its idea, and stays small: diffs, words, lines, options and imports have limits."""

import ast
import difflib
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

import cispo
import common
import grpo
import gspo
import ppo
import reinforce
import rloo

ROOT = Path(common.__file__).parent
SCRIPTS = [reinforce, rloo, ppo, grpo, gspo, cispo]
LINES = {reinforce: 215, rloo: 200, ppo: 345, grpo: 240, gspo: 240, cispo: 240, common: 1200}
NOT_CODE = r'(?s:""".*?""")|#.*'  # docstrings and comments
BANNERS = ["# 1. generate", "# 2. score", "# 3. advantages", "# 4. update", "# 5. log"]


def code(module):
    """The lines of a script, without its docstring and without PPO's value model, which no other script has."""
    source = Path(module.__file__).read_text()
    docstring = ast.parse(source).body[0]
    source = "\n".join(source.splitlines()[docstring.end_lineno :])
    return re.sub(r"# --- the value model ---\n.*?(?=def main)", "", source, flags=re.DOTALL).splitlines()


def changed_lines(child, parent):
    diff = list(difflib.unified_diff(code(parent), code(child), n=0, lineterm=""))[2:]
    return [line for line in diff if line[0] in "+-" and line[1:].strip()]


# --- the ladder ---


@pytest.mark.parametrize(
    "child, parent, budget",
    [(rloo, reinforce, 42), (grpo, rloo, 80), (gspo, grpo, 16), (cispo, grpo, 16), (ppo, grpo, 144)],
)
def test_a_script_is_its_parent_plus_its_idea(child, parent, budget):
    changed = changed_lines(child, parent)
    assert len(changed) <= budget, "\n".join(changed)


@pytest.mark.parametrize("module", SCRIPTS)
def test_every_script_has_the_five_banners_in_order(module):
    found = [line.strip() for line in code(module) if re.match(r"\s+# \d\. ", line)]
    assert found == BANNERS


def test_an_option_of_the_same_name_means_the_same_in_every_script():
    comments, kinds = {}, {}
    for module in SCRIPTS:
        names = {f.name: f.type for f in fields(module.Args)}
        for line in inspect.getsource(module.Args).splitlines():
            match = re.match(r"    (\w+): .*?  # (.*)", line)
            if match and match[1] in names:
                comments.setdefault(match[1], set()).add(match[2].replace(module.__name__, "NAME"))
                kinds.setdefault(match[1], set()).add(str(names[match[1]]))
    apart = {"kl_coef", "num_epochs", "clip_low", "aggregation"}  # options whose meaning is the algorithm's own
    assert {name for name, texts in comments.items() if len(texts) > 1} <= apart
    assert {name for name, types in kinds.items() if len(types) > 1} <= {"aggregation"}


@pytest.mark.parametrize("module", SCRIPTS)
def test_every_option_has_a_line_of_help(module):
    source = inspect.getsource(module.Args)
    for field in fields(module.Args):
        assert re.search(rf"^    {field.name}: .*  # \S", source, flags=re.MULTILINE), field.name


def test_common_knows_no_algorithm_and_no_option():
    """No name of a script, no advantage, no object with the options; of option names only those of the run folder."""
    source = (ROOT / "common.py").read_text()
    words = set(re.findall(r"[a-z]+", re.sub(NOT_CODE, "", source.lower())))
    assert not words & {"reinforce", "rloo", "ppo", "grpo", "gspo", "cispo", "advantages", "advantage"}
    looked_up = set(re.findall(r"\bargs\.(?!json)(\w+)|getattr\(args, \"(\w+)\"", source))
    assert {a or b for a, b in looked_up} <= {"resume"}
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    assert not [f.name for f in functions if "args" in [a.arg for a in f.args.args]]


# --- limits ---


@pytest.mark.parametrize("module", LINES)
def test_lines_and_columns(module):
    lines = Path(module.__file__).read_text().splitlines()
    assert len(lines) <= LINES[module], len(lines)
    assert max(map(len, lines)) <= 120
    assert not [line for line in lines if "fmt: skip" in line or "fmt: off" in line]  # no line that a formatter left


def test_no_function_of_common_is_longer_than_a_screen():
    functions = [f for f in ast.walk(ast.parse((ROOT / "common.py").read_text())) if isinstance(f, ast.FunctionDef)]
    assert not {f.name: f.end_lineno - f.lineno + 1 for f in functions if f.end_lineno - f.lineno + 1 > 45}


def test_the_first_half_of_common_is_what_an_algorithm_stands_on():
    """It is under 500 lines, and meets ranks as a few named things alone."""
    first, second = re.split(r"# =+ second half: plumbing =+\n", (ROOT / "common.py").read_text())
    assert len(first.splitlines()) <= 500
    plumbing = {f.name for f in ast.parse(second).body if isinstance(f, ast.FunctionDef | ast.ClassDef)}
    met = set(re.findall(r"\w+", re.sub(NOT_CODE, "", first))) & plumbing
    assert met == {"autocast", "gathered", "in_parts", "summed"}


@pytest.mark.parametrize("module", SCRIPTS)
def test_options_and_names_imported_from_common(module):
    assert len(fields(module.Args)) <= (48 if module is ppo else 42)
    body = ast.parse(Path(module.__file__).read_text()).body
    imports = [node for node in body if isinstance(node, ast.ImportFrom) and node.module == "common"]
    assert sum(len(node.names) for node in imports) <= 18


def test_the_readme_can_be_read_in_ten_minutes():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 240 and len(text.split()) <= 3000
    assert max(len(line) for line in text.splitlines() if not line.startswith("|")) <= 120


def test_benchmarks_stay_small_too():
    assert sum(len(path.read_text().splitlines()) for path in (ROOT / "benchmarks").glob("*.py")) <= 900
