"""What siblings share they share to the letter, so that a diff shows the algorithms alone."""

import ast
import re

import pytest
from helpers import OFF_POLICY, OFF_POLICY_SCRIPTS, ON_POLICY, ON_POLICY_SCRIPTS, ROOT, SCRIPTS

FAMILIES = [ON_POLICY, OFF_POLICY]
# Lines of a shared loop that are there because of the algorithm: its columns, TD3's number of an
# update for the delay, and how an action is drawn.
OWN_LINES = re.compile(
    r' *logger.log_tabular."(ClipFrac|StopIter|BacktrackIters|Q2Vals|LogPi|Alpha)".*\n'
)
OWN_CALLS = [
    (
        "for n in range(steps - args.update_every, steps):  # an update for each step",
        "for _ in range(args.update_every):",
    ),
    ("update(n + 1)", "update()"),
    ("act(pi_params, o, rng, args.act_noise)", "act(pi_params, o, rng)"),
]


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


def shared_by(scripts, *names):
    """Assert that all scripts have these functions, classes or methods, the same in each."""
    for name in names:
        same(definitions(script)[name] for script in scripts)


@pytest.mark.parametrize("framework", ["torch", "tf1"])
def test_networks(framework):
    vpg, ppo, trpo = (f"{algo}_{framework}" for algo in ON_POLICY)
    ddpg, td3, sac = (f"{algo}_{framework}" for algo in OFF_POLICY)
    mlp = "mlp" if framework == "torch" else "MLP"
    shared_by([vpg, ppo, trpo], mlp, "ValueFunction", *(["Tanh"] if framework == "torch" else []))
    shared_by([vpg, ppo], "CategoricalPolicy", "GaussianPolicy")
    for policy in ("CategoricalPolicy", "GaussianPolicy"):
        methods = (f"{policy}.{method}" for method in ("__init__", "dist", "logp", "entropy"))
        shared_by([vpg, ppo, trpo], *methods)
    shared_by([ddpg, td3, sac], mlp, "QFunction")
    shared_by([ddpg, td3], "Policy")


def test_acting_and_buffers():
    shared_by(ON_POLICY_SCRIPTS, "dist_numpy", "act", "GAEBuffer")
    shared_by(OFF_POLICY_SCRIPTS, "ReplayBuffer")
    shared_by([s for s in OFF_POLICY_SCRIPTS if "sac" not in s], "pi_numpy", "act")
    shared_by(["sac_torch", "sac_tf1"], "dist_numpy", "act")
    shared_by(["trpo_torch", "trpo_tf1"], "conjugate_gradient")


@pytest.mark.parametrize("algo", ON_POLICY + OFF_POLICY)
def test_twins_have_one_idea_and_one_set_of_arguments(algo):
    def idea(script):
        return ast.get_docstring(ast.parse(source(script))).splitlines()[1:-1]

    twins = f"{algo}_torch", f"{algo}_tf1"
    same(idea(script) for script in twins)
    shared_by(twins, "Args")


def test_shared_arguments():
    def shared(script):
        text = definitions(script)["Args"]
        return text[: text.index("keep_models")].replace("(256, 256)", "(64, 64)")

    same(shared(script) for script in SCRIPTS)


def without_own(text):
    text = OWN_LINES.sub("", text)
    for own, shared in OWN_CALLS:
        text = text.replace(own, shared)
    return text


@pytest.mark.parametrize("framework", ["torch", "tf1"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sections_of_main(framework, family):
    found = [sections(f"{algo}_{framework}") for algo in family]
    names = [name.split(":")[0] for name in found[0] if "step" not in name]
    order = ["Set-up", "Networks", "Losses", "Update", "Loop"]
    assert [name for name in names if name in order] == order
    shared = [n for n in found[0] if n.startswith(("Set-up", "The only randomness", "Loop"))]
    assert len(shared) == 3
    for name in shared:
        same(without_own(s[name]) for s in found)


@pytest.mark.parametrize("framework", ["torch", "tf1"])
def test_how_actions_and_tests_are_made(framework):
    def acting(algo):
        found = sections(f"{algo}_{framework}")
        (text,) = [text for name, text in found.items() if name.startswith("Act in NumPy")]
        return text

    same(acting(algo) for algo in ON_POLICY)
    same(acting(algo) for algo in ("ddpg", "td3"))
    same(acting(algo)[acting(algo).index("    test_limit") :] for algo in OFF_POLICY)


@pytest.mark.parametrize("algo", ON_POLICY + OFF_POLICY)
def test_the_loop_of_twins(algo):
    loop = sections(f"{algo}_tf1")["Loop"]
    refetch = re.compile(r" *pi_params = sess.run\(pi.params\)\n")
    assert len(refetch.findall(loop)) == 2  # after a resume and after updates
    same([sections(f"{algo}_torch")["Loop"], refetch.sub("", loop)])


def test_how_a_script_starts():
    same(source(script).split("\nif __name__")[1] for script in SCRIPTS)
