"""What siblings share they share to the letter, so that a diff shows the algorithms alone."""

import ast
import re

import pytest
from helpers import ON_POLICY, ROOT, SCRIPTS, TF1, TORCH

# What differs because the algorithms do.
OWN_LINES = re.compile(r".*\b(ClipFrac|StopIter|BacktrackIters|pi_optimizer)\b.*\n")
SHARED_BY_ALL = ["dist_numpy", "act", "GAEBuffer"]
SHARED_BY_FRAMEWORK = {
    "torch": ["mlp", "CategoricalPolicy", "GaussianPolicy", "ValueFunction"],
    "tf1": ["MLP", "CategoricalPolicy", "GaussianPolicy", "ValueFunction"],
}


def source(script):
    return (ROOT / f"{script}.py").read_text()


def definitions(script):
    """Map the name of each top-level function and class, and Class.method, to its source."""
    text = source(script)
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = ast.get_source_segment(text, node)
            for method in getattr(node, "body", []):
                if isinstance(node, ast.ClassDef) and isinstance(method, ast.FunctionDef):
                    found[f"{node.name}.{method.name}"] = ast.get_source_segment(text, method)
    return found


def sections(script):
    """Map each one-line section comment of main() to the code below it."""
    parts = re.split(r"^    # (.*)\n", definitions(script)["main"], flags=re.M)
    return dict(zip(parts[1::2], parts[2::2]))


def same(texts):
    texts = list(texts)
    assert len(texts) > 1
    for text in texts[1:]:
        assert text == texts[0]


@pytest.mark.parametrize("name", SHARED_BY_ALL)
def test_blocks_that_all_share(name):
    same(definitions(script)[name] for script in SCRIPTS)


@pytest.mark.parametrize("framework", [TORCH, TF1])
def test_networks(framework):
    for name in SHARED_BY_FRAMEWORK[framework[0].split("_")[1]]:
        blocks = [definitions(script) for script in framework]
        for method in [m for m in blocks[0] if m == name or m.startswith(f"{name}.")]:
            if "." in method or name in ("mlp", "MLP", "ValueFunction"):
                same(block[method] for block in blocks)


@pytest.mark.parametrize("algo", ON_POLICY)
def test_arguments_of_twins(algo):
    same(definitions(f"{algo}_{framework}")["Args"] for framework in ("torch", "tf1"))


def test_shared_arguments():
    def shared(script):
        text = definitions(script)["Args"]
        return text[: text.index("    lam:")]

    same(shared(script) for script in SCRIPTS)


@pytest.mark.parametrize("algo", ON_POLICY)
def test_docstrings_of_twins(algo):
    def idea(script):
        return ast.get_docstring(ast.parse(source(script))).splitlines()[1:-1]

    same(idea(f"{algo}_{framework}") for framework in ("torch", "tf1"))


def test_conjugate_gradient():
    same(definitions(script)["conjugate_gradient"] for script in ("trpo_torch", "trpo_tf1"))


@pytest.mark.parametrize("framework", [TORCH, TF1])
def test_sections_of_main(framework):
    found = [sections(script) for script in framework]
    assert len(found[0]) == 6
    for name in found[0]:
        if name not in ("Losses", "Update"):
            same(OWN_LINES.sub("", s[name]) for s in found)


def test_the_loop_of_twins():
    for algo in ON_POLICY:
        refetch = "        pi_params = sess.run(pi.params)\n"
        loop = sections(f"{algo}_tf1")["Loop"]
        assert refetch in loop
        same([sections(f"{algo}_torch")["Loop"], loop.replace(refetch, "")])


def test_how_a_script_starts():
    same(source(script).split("\nif __name__")[1] for script in SCRIPTS)
