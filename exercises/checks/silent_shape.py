"""Checks exercise 2.2: answers by exact computations, and the mended copy against the script."""

import contextlib
import importlib.util
import io
import sys
import tempfile
from pathlib import Path

import numpy as np

from . import ROOT, Open, Wrong, exercise

FOLDER = ROOT  # where the copy goes: scripts find common/ next to them
# The one place of each script that the bug is in, and what stands there in the broken copy
BUG = {
    "torch": (".squeeze(1)  # [B]: a [B, 1] minus a [B] is a [B, B]", ""),
    "tf1": ("return tf.squeeze(q, 1)  # [B]: a [B, 1] minus a [B] is a [B, B]", "return q"),
}
FIRST_RUN = """--env-id Pendulum-v1 --epochs 5 --steps-per-epoch 1000 \\
        --gamma 0.9 --polyak 0.98 --hidden-sizes 32 32 --batch-size 64 \\
        --start-steps 1000 --update-after 800 --pi-lr 4e-3 --q-lr 4e-3"""
# Short, and with episodes that terminate; then r, d and Q all have their say
BRIEF = dict(env_id="InvertedPendulum-v4", seed=7, epochs=2, steps_per_epoch=100, hidden_sizes=(8,))
BRIEF |= dict(start_steps=40, update_after=60, update_every=20, batch_size=16, replay_size=150)
BRIEF |= dict(num_test_episodes=1)
COLUMNS = ("LossQ", "AverageQ1Vals", "StdQ1Vals", "LossPi", "AverageTestEpRet")


def broken(framework):
    """Return the text of ddpg_torch.py or ddpg_tf1.py with the bug in it."""
    text = (ROOT / f"ddpg_{framework}.py").read_text()
    right, wrong = BUG[framework]
    if text.count(right) != 1:
        raise LookupError(f"ddpg_{framework}.py has no single place that reads {right!r}")
    return text.replace(right, wrong)


def write_copy(copy, framework):
    """Write the broken copy and say what to do with it."""
    copy.write_text(broken(framework))
    script = f"ddpg_{framework}.py"
    print(f"  Wrote {copy.name}: {script} with a bug that raises no error. Run both in")
    print("  the folder of the scripts; each takes a few seconds:\n")
    for name in (script, copy.name):
        print(f"    python {name} {FIRST_RUN}\n")
    runs = " ".join(f"runs/{Path(name).stem}_Pendulum-v1" for name in (script, copy.name))
    print(f"    python plot.py {runs} \\")
    print("        -y AverageTestEpRet AverageQ1Vals StdQ1Vals LossQ --out compare.png\n")
    print("  Then answer the questions and mend the copy.\n")


def load(path):
    spec = importlib.util.spec_from_file_location(f"checked_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


def train(path):
    """Run a script briefly; return its progress.txt."""
    module = load(path)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        run = module.main(module.Args(data_dir=folder, **BRIEF))
        return np.genfromtxt(run / "progress.txt", names=True)


@exercise("2.2: a silent bug in DDPG")
def check(framework, answers):
    copy = FOLDER / f"my_2_2_ddpg_{framework.name}.py"
    if not copy.exists():
        write_copy(copy, framework.name)

    def given(name):
        if answers[name] is None:
            raise Open(f'the answer to "{name}" is still None')
        return answers[name]

    if given("column") != "StdQ1Vals":
        raise Wrong(f"{given('column')} does not say how much the Qs of transitions differ")
    yield "the column that gives it away"

    if list(np.ravel(given("shape"))) != [64, 64]:
        how = "see for yourself: print((q1_vals - backup).shape) in its update"
        raise Wrong(f"the copy does not have shape {given('shape')} there; {how}")
    yield "the shape of the error"

    r, d, q_targ = np.array([0, 3, 9.0]), np.array([0, 0, 1.0]), np.array([[12], [2], [5.0]])
    best = np.mean(r + 0.5 * (1 - d) * q_targ, 1)[0]  # the mean of a row minimises its squares
    found = given("pulled_to")
    if not isinstance(found, int | float) or abs(found - best) > 0.01:
        raise Wrong(f"at Q(o, a) = {found}, the copy's loss_q still has a slope")
    yield "what the broken loss pulls Q to"

    if given("floor") not in ("o", "a", "r", "o2", "d"):
        raise Wrong(f'"floor" should be one of "o", "a", "r", "o2", "d", got {given("floor")!r}')
    if given("floor") != "r":
        raise Wrong(
            f"give all transitions the same {given('floor')}, and LossQ stays where it is: "
            "it is another part of a transition"
        )
    yield "what keeps LossQ up"

    mine, right = train(copy), train(ROOT / f"ddpg_{framework.name}.py")
    for column in COLUMNS:
        for epoch in range(BRIEF["epochs"]):
            x, y = mine[column][epoch], right[column][epoch]
            if not np.isclose(x, y, rtol=1e-3, atol=1e-3):
                where = f"in epoch {epoch} of a short run on InvertedPendulum-v4 with the same seed"
                raise Wrong(f"{copy.name}: {column} should be {y:.5g}, got {x:.5g}\n{where}")
    yield f"{copy.name} computes the same as ddpg_{framework.name}.py"
