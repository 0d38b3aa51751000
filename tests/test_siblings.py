"""What siblings share they share to the letter, so that a diff shows the algorithms alone."""

import ast
import re

import pytest
from helpers import OFF_POLICY, OFF_POLICY_SCRIPTS, ON_POLICY, ON_POLICY_SCRIPTS, ROOT, SCRIPTS

FAMILIES = [ON_POLICY, OFF_POLICY]
# What differs in shared sections because the algorithms do: PPO's minibatches for the policy, SAC's
# check of alpha, TD3's numbered updates, and how an action is drawn.
OWN = [
    (r".*buf.minibatches\(args.train_pi_iters, local_batch, rng\)\)\n", ""),
    (r" *pi_batches = tf.placeholder.*\n", ""),
    (r"pi_batches, v_batches", "v_batches"),
    (r"    if args.autotune and args.alpha < .*:\n.*\n", ""),
    (
        r"for n in range\(steps - args.update_every, steps\):.*",
        "for _ in range(args.update_every):",
    ),
    (r"update\(n \+ 1\)", "update()"),
    (r"update_burst\(steps\)", "update_burst()"),
    (r"pi.act\(pi_params, o, rng, args.act_noise\)", "pi.act(pi_params, o, rng)"),
]


def source(script):
    return (ROOT / f"{script}.py").read_text()


def definitions(script):
    """Map the name of each top-level function and class, and Class.method, to its source."""
    found, lines = {}, source(script).splitlines(keepends=True)

    def visit(nodes, prefix):
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
                found[prefix + node.name] = "".join(lines[first - 1 : node.end_lineno])
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{node.name}.")

    visit(ast.parse(source(script)).body, "")
    return found


def sections(script):
    """Map each section's comment in train() to the code below it, in order."""
    parts = re.split(r"^    # (.*)\n", definitions(script)["train"], flags=re.M)
    return dict(zip(parts[1::2], parts[2::2]))


def section(script, start):
    """Return the code of the section whose comment starts like this, without what may differ."""
    (text,) = [text for name, text in sections(script).items() if name.startswith(start)]
    for own, shared in OWN:
        text = re.sub(own, shared, text)
    return text


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
    shared_by([vpg, ppo, trpo], mlp, "mlp_numpy", "ValueFunction")
    shared_by([vpg, ppo], "CategoricalPolicy", "GaussianPolicy")
    methods = ("__init__", "dist", "logp", "entropy", "dist_numpy", "act")
    for policy in ("CategoricalPolicy", "GaussianPolicy"):
        shared_by([vpg, ppo, trpo], *(f"{policy}.{method}" for method in methods))
    shared_by([ddpg, td3, sac], mlp, "mlp_numpy", "QFunction")
    shared_by([ddpg, td3], "Policy")


def test_buffers_and_acting_in_both_frameworks():
    shared_by(ON_POLICY_SCRIPTS, "GAEBuffer")
    for policy in ("CategoricalPolicy", "GaussianPolicy"):
        shared_by(ON_POLICY_SCRIPTS, f"{policy}.dist_numpy", f"{policy}.act")
    shared_by(OFF_POLICY_SCRIPTS, "ReplayBuffer")
    shared_by([s for s in OFF_POLICY_SCRIPTS if "sac" not in s], "Policy.act")
    shared_by(["sac_torch", "sac_tf1"], "Policy.dist_numpy", "Policy.act")


def test_mlp_in_numpy_but_for_how_much_faster_it_is():
    def code(script):
        return re.sub(r'""".*"""', "", definitions(script)["mlp_numpy"])

    for scripts in (ON_POLICY_SCRIPTS, OFF_POLICY_SCRIPTS):
        same(code(script) for script in scripts)


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


@pytest.mark.parametrize("script", SCRIPTS)
def test_order_of_sections(script):
    expected = ["Set-up", "All randomness", "Networks"]
    expected += ["Losses"] if script in ON_POLICY_SCRIPTS else []
    expected += ["Update"] + ["Session"] * script.endswith("tf1")
    expected += ["Act in NumPy", "The NumPy policy must be the same function as the network"]
    expected += ["Test without noise"] if script in OFF_POLICY_SCRIPTS else []
    expected += ["Logs and checkpoints", "Loop"]
    assert [re.split("[:,]", comment)[0] for comment in sections(script)] == expected


@pytest.mark.parametrize("framework", ["torch", "tf1"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sections_that_a_family_shares(framework, family):
    scripts = [f"{algo}_{framework}" for algo in family]
    for name in ("Set-up", "Act in NumPy", "Loop"):
        same(section(script, name) for script in scripts)
    same(section(s, "The NumPy policy") for s in scripts if "sac" not in s)


def test_sections_that_both_frameworks_share():
    same(section(script, "All randomness") for script in SCRIPTS)
    same(section(script, "Test without noise") for script in OFF_POLICY_SCRIPTS)


@pytest.mark.parametrize("framework", ["torch", "tf1"])
def test_the_value_functions_part_on_policy(framework):
    def losses(script):
        text = section(script, "Losses")
        return text[text.index("    def compute_loss_v") :]

    def steps(script):
        loop = r" *if args\.norm:.*\n(?: {12}.*\n)* *for b in .*v_.*:.*\n(?: {12}.*\n)*"
        (found,) = re.findall(loop, section(script, "Update"))
        return found

    scripts = [f"{algo}_{framework}" for algo in ON_POLICY]
    same(losses(script) for script in scripts)
    same(steps(script) for script in scripts)
    if framework == "tf1":
        same(section(script, "Session") for script in scripts)


@pytest.mark.parametrize("algo", ON_POLICY + OFF_POLICY)
def test_the_loop_of_twins(algo):
    """They differ by one call: TF1 runs a whole update, or a burst of them, as one graph."""

    def loop(framework):
        text = section(f"{algo}_{framework}", "Loop")
        for call in (
            r" *for _ in range\(args.update_every\):\n *update\(\)\n",
            r" *update_burst\(\)\n",
            r"        update\(\)\n",
            r"        \*batch, values = buf.get\(value\)\n(?:.*minibatches.*\n)+.*run_update.*\n",
        ):
            text = re.sub(call, "<update>\n", text)
        assert text.count("<update>") == 1
        return text

    same(loop(framework) for framework in ("torch", "tf1"))


def test_how_a_script_starts():
    """First as a program that is still importing, last as one that has its arguments to read."""
    for i in (1, 2):
        same(source(script).split("\nif __name__")[i].split("\n\n")[0] for script in SCRIPTS)
    for framework in ("torch", "tf1"):
        shared_by([script for script in SCRIPTS if script.endswith(framework)], "main")
    with_graph = definitions("vpg_tf1")["main"]
    assert with_graph.replace("tf.Graph().as_default(), ", "") == definitions("vpg_torch")["main"]
