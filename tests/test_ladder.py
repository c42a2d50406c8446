"""Each script is its parent plus its idea: the diff between two scripts stays small, and what they share is word for word the same."""

import ast
import difflib
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

import cispo
import grpo
import gspo
import ppo
import reinforce
import rloo

SCRIPTS = [reinforce, rloo, ppo, grpo, gspo, cispo]
BANNERS = ["# 1. generate", "# 2. score", "# 3. advantages", "# 4. update", "# 5. log"]


def code(module):
    """The lines of a script without its docstring and its list of imports from common, which follow from the rest."""
    source = Path(module.__file__).read_text()
    docstring = ast.parse(source).body[0]
    source = "\n".join(source.splitlines()[docstring.end_lineno :])
    return re.sub(r"from common import \(.*?\)  # fmt: skip\n", "", source, flags=re.S).splitlines()


def changed_lines(child, parent):
    diff = list(difflib.unified_diff(code(parent), code(child), n=0, lineterm=""))[2:]
    return [line for line in diff if line[0] in "+-" and line[1:].strip()]


@pytest.mark.parametrize("child, parent, budget", [
    (rloo, reinforce, 42),
    (grpo, rloo, 80),
    (gspo, grpo, 16),
    (cispo, grpo, 16),
    (ppo, grpo, 144),
])  # fmt: skip
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
    apart = {  # options whose meaning is the algorithm's own
        "kl_coef", "num_epochs", "minibatch_size", "kl_estimator", "clip_low", "aggregation",
    }  # fmt: skip
    assert {name for name, texts in comments.items() if len(texts) > 1} <= apart
    assert {name for name, types in kinds.items() if len(types) > 1} <= {"aggregation"}


@pytest.mark.parametrize("module", SCRIPTS)
def test_every_option_has_a_line_of_help(module):
    source = inspect.getsource(module.Args)
    for field in fields(module.Args):
        assert re.search(rf"^    {field.name}: .*  # \S", source, flags=re.M), field.name


def test_common_knows_no_algorithm():
    source = Path(inspect.getsourcefile(grpo)).with_name("common.py").read_text().lower()
    words = set(re.findall(r"[a-z]+", re.sub(r'""".*?"""|#.*', "", source, flags=re.S)))
    assert not words & {"reinforce", "rloo", "ppo", "grpo", "gspo", "cispo", "advantages", "advantage"}
