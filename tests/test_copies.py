"""Copied with common/ into an empty folder and edited, a script does what the edit says."""

import importlib.util
import json
import re
import shutil
import sys

import numpy as np
import pytest
import torch
from helpers import (
    OFF_POLICY_SCRIPTS,
    ROOT,
    SCRIPTS,
    as_flags,
    assert_same,
    brief,
    only_run,
    outcome,
    params_of,
    progress,
    start,
    trained,
)
from record import state_of

from common.errors import SidespinError
from common.torch_utils import Adam


def copy_of(script, folder, *edits, name=None):
    """Copy a script with common/ into a folder; an edit replaces a text that has to be there."""
    text = (ROOT / f"{script}.py").read_text()
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    folder.mkdir(exist_ok=True)
    shutil.copytree(ROOT / "common", folder / "common", ignore=shutil.ignore_patterns("__pyc*"))
    path = folder / (name or f"{script}.py")
    path.write_text(text)
    return path


def load(path, **injected):
    """Import a copy in this process, with values for names that an edit refers to."""
    name = "_".join(path.with_suffix("").parts[-2:])
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for it
    vars(module).update(injected)
    spec.loader.exec_module(module)
    return module


def run_copy(path, **settings):
    """Call main() of a copy in this process; return the run's folder."""
    module = load(path)
    script = path.stem if path.stem in SCRIPTS else "ppo_torch"
    settings = {"data_dir": str(path.parent / "runs"), **brief(script, **settings)}
    return module.main(module.Args(**settings))


def rows(folder, without=()):
    """Return the lines of progress.txt as dictionaries."""
    header, *lines = outcome(folder)["rows"]
    return [{k: x for k, x in zip(header, line) if k not in without} for line in lines]


def assert_resumes(path, epochs=4, **settings):
    """Assert that half a run and the rest, resumed, are the whole; return its folder."""
    whole = run_copy(path, epochs=epochs, exp_name="whole", **settings)
    run_copy(path, epochs=epochs // 2, exp_name="parts", **settings)
    parts = run_copy(path, epochs=epochs, exp_name="parts", resume=True, **settings)
    assert_same(whole, parts)
    return whole


@pytest.mark.parametrize("script", SCRIPTS)
def test_copied_with_common_into_an_empty_folder_it_runs(script, tmp_path):
    path = copy_of(script, tmp_path)
    run = start(path.name, *as_flags(**brief(script)), cwd=tmp_path, warm=True)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    name = f"{script}_Pendulum-v1"
    folder = tmp_path / "runs" / name / f"{name}_s7"
    for key in progress(folder):
        assert run.stdout.count(f" {key} |") == 2
    # The same numbers as those of main(Args(...)) with the same settings in another process
    assert_same(folder, trained(script))


def test_a_renamed_script(tmp_path):
    path = copy_of("ppo_torch", tmp_path, name="my_idea.py")
    words = as_flags(**brief("ppo_torch"))
    run = start(path.name, *words, cwd=tmp_path, warm="torch")
    assert run.returncode == 0, run.stderr
    folder = only_run(tmp_path / "runs")
    assert folder.name == "my_idea_Pendulum-v1_s7"
    assert json.loads((folder / "config.json").read_text())["script"] == "my_idea"
    assert rows(folder) == rows(trained("ppo_torch"))
    refused = start(path.name, *words, "--foo", cwd=tmp_path, warm="torch")
    assert refused.stderr.startswith("my_idea.py: error: unrecognized options: --foo")


# Idioms of PyTorch


@pytest.mark.parametrize("script", ["ppo_torch", "sac_torch"])
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_to_none_or_to_zero(script, to_none, tmp_path):
    edit = ("optimizer.zero_grad()", f"optimizer.zero_grad(set_to_none={to_none})")
    assert_same(run_copy(copy_of(script, tmp_path, edit)), trained(script))


CLIP = (
    "            v_optimizer.step()",
    "            torch.nn.utils.clip_grad_norm_(v.parameters(), 0.125)\n"
    "            v_optimizer.step()",
)
SGD = ("v_optimizer = Adam(v.parameters(), lr=args.vf_lr)", "v_optimizer = torch.optim.SGD({})")
PLAIN_SGD = (SGD[0], SGD[1].format("v.parameters(), lr=1.0"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradient_clipping(ranks, tmp_path):
    """With plain gradient descent and a rate of 1, a step is as long as the clipped gradient."""
    path = copy_of("vpg_torch", tmp_path, CLIP, PLAIN_SGD)
    words = as_flags(**brief("vpg_torch", train_v_iters=1, keep_models=True))
    run = start(path.name, *words, cwd=tmp_path, ranks=ranks, warm=True)
    assert run.returncode == 0, run.stderr
    folder = only_run(tmp_path / "runs")
    before, after = (torch.load(folder / f"model_{epoch}.pt") for epoch in (0, 1))
    step = torch.cat([(after[k] - before[k]).flatten() for k in after if k.startswith("v.")])
    assert abs(step.norm() - 0.125) < 1e-5
    for rank in range(1, ranks):
        first, other = (state_of(folder, 2, r)[0] for r in (0, rank))
        assert all(np.array_equal(first[name], other[name]) for name in first)


SEEN = (
    "            v_optimizer.step()",
    "            grads = [p.grad.numpy().copy() for p in v.parameters()]\n"
    "            before = [p.detach().numpy().copy() for p in v.parameters()]\n"
    "            v_optimizer.step()\n"
    "            seen.append((before, grads, [p.detach().numpy().copy() for p in v.parameters()]))",
)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_another_optimizer(name, tmp_path):
    kind = f"v_optimizer = torch.optim.{name}(v.parameters(), lr=0.25, weight_decay=0.5)"
    path = copy_of("ppo_torch", tmp_path, (SGD[0], kind), SEEN)
    seen = []
    module = load(path, seen=seen)
    module.main(module.Args(data_dir=str(tmp_path), **brief("ppo_torch", epochs=1)))
    m = v = 0
    for t, (before, grads, after) in enumerate(seen, 1):
        p, g = (np.concatenate([x.ravel() for x in xs]).astype(float) for xs in (before, grads))
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        adam = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        expected = p - 0.25 * ((adam if name == "AdamW" else g) + 0.5 * p)
        np.testing.assert_allclose(
            np.concatenate([x.ravel() for x in after]), expected, rtol=1e-5, atol=1e-6
        )
    assert len(seen) == 2
    (tmp_path / "resume").mkdir()
    assert_resumes(copy_of("ppo_torch", tmp_path / "resume", (SGD[0], kind)))


SECOND_OPTIMIZER = [
    (
        "pi_optimizer = Adam(pi.parameters(), lr=args.pi_lr)",
        "pi_optimizer = Adam(pi.net.parameters(), lr=args.pi_lr)\n"
        "    std_optimizer = torch.optim.SGD([pi.log_std], lr=0.01, momentum=0.5)",
    ),
    (
        "            pi_optimizer.zero_grad()",
        "            pi_optimizer.zero_grad()\n            std_optimizer.zero_grad()",
    ),
    (
        "            pi_optimizer.step()",
        "            pi_optimizer.step()\n            mpi_avg_grads(std_optimizer)\n"
        "            std_optimizer.step()",
    ),
    ("State(model, pi_optimizer, ", "State(model, std_optimizer, pi_optimizer, "),
]


def test_a_second_optimizer(tmp_path):
    folder = assert_resumes(copy_of("ppo_torch", tmp_path, *SECOND_OPTIMIZER))
    start = trained("ppo_torch")
    assert params_of(folder)["pi"][0] != -0.5, "log_std has moved"
    _, sgd, adam, _ = state_of(folder, 4)
    assert len(sgd["state"]) == 1
    assert len(adam["state"]) == 4, "weights and biases of two layers"
    assert params_of(folder)["pi"][0] != params_of(start)["pi"][0], "and not as Adam would"


SHARED_TRUNK = (
    '    model = nn.ModuleDict({"pi": pi, "v": v})\n',
    '    v.net[0] = pi.net[0]\n    model = nn.ModuleDict({"pi": pi, "v": v})\n',
)


def test_two_networks_that_share_a_trunk(tmp_path):
    folder = assert_resumes(copy_of("ppo_torch", tmp_path, SHARED_TRUNK))
    one_epoch = run_copy(tmp_path / "ppo_torch.py", epochs=1, exp_name="one")
    model, pi_adam, v_adam = state_of(folder, 4)
    for name in ("weight", "bias"):
        np.testing.assert_array_equal(model[f"pi.net.0.{name}"], model[f"v.net.0.{name}"])
        assert not np.array_equal(
            model[f"pi.net.0.{name}"], state_of(one_epoch, 1)[0][f"pi.net.0.{name}"]
        )
    assert (len(pi_adam["state"]), len(v_adam["state"])) == (5, 4)
    assert v_adam["state"]["#0"]["step"] == 4 * 2, "each one steps, the trunk twice"


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_networks_that_share_a_trunk_on_ranks(ranks, tmp_path):
    path = copy_of("ppo_torch", tmp_path, SHARED_TRUNK)
    words = as_flags(**brief("ppo_torch"))
    run = start(path.name, *words, cwd=tmp_path, ranks=ranks, warm=True)
    assert run.returncode == 0, run.stderr
    states = [state_of(only_run(tmp_path / "runs"), 2, rank)[0] for rank in range(ranks)]
    for name, x in states[0].items():
        np.testing.assert_array_equal(x, states[-1][name])
    np.testing.assert_array_equal(states[0]["pi.net.0.weight"], states[0]["v.net.0.weight"])


RATE_BY_HAND = (
    "        update()\n",
    "        update()\n"
    "        for group in pi_optimizer.param_groups + v_optimizer.param_groups:\n"
    '            group["lr"] *= 0.5\n',
)


def test_a_learning_rate_changed_by_hand(tmp_path):
    folder = assert_resumes(copy_of("ppo_torch", tmp_path, RATE_BY_HAND))
    _, pi_adam, v_adam = state_of(folder, 4)
    assert pi_adam["param_groups"][0]["lr"] == 3e-4 * 0.5**4
    assert v_adam["param_groups"][0]["lr"] == 1e-3 * 0.5**4
    first, second = rows(folder)[:2], rows(trained("ppo_torch"))
    assert first[0] == second[0]
    assert first[1] != second[1], "the new rate was used"


@pytest.mark.parametrize(
    "schedule",
    [
        "ExponentialLR(pi_optimizer, 0.5)",
        "LambdaLR(pi_optimizer, lambda epoch: 1 / (1 + epoch))",
        "OneCycleLR(pi_optimizer, 3e-4, total_steps=9)",
        "ReduceLROnPlateau(pi_optimizer, patience=0, cooldown=1)",
    ],
)
def test_a_learning_rate_schedule(schedule, tmp_path):
    loss = "1.0" if "Plateau" in schedule else ""
    path = copy_of(
        "ppo_torch",
        tmp_path,
        (
            "from torch import nn\n",
            "from torch import nn\nfrom torch.optim.lr_scheduler import *\n",
        ),
        ("    # Losses\n", f"    scheduler = {schedule}\n    # Losses\n"),
        ("        update()\n", f"        update()\n        scheduler.step({loss})\n"),
        ("State(model, pi_optimizer, ", "State(model, scheduler, pi_optimizer, "),
    )
    folder = assert_resumes(path)
    plain = torch.optim.SGD([torch.zeros(1)], lr=3e-4)
    scheduler = eval(schedule, {**vars(torch.optim.lr_scheduler), "pi_optimizer": plain})
    for _ in range(4):
        plain.step()
        scheduler.step(*map(float, loss.split()))
    rate = state_of(folder, 4)[2]["param_groups"][0]["lr"]
    assert rate == plain.param_groups[0]["lr"] != 3e-4


def test_a_learning_rate_schedule_that_resume_would_lose(tmp_path):
    schedule = "torch.optim.lr_scheduler.LambdaLR(pi_optimizer, lambda epoch: 1 / (1 + epoch))"
    path = copy_of(
        "ppo_torch",
        tmp_path,
        ("    # Losses\n", f"    scheduler = {schedule}\n    # Losses\n"),
        ("        update()\n", "        update()\n        scheduler.step()\n"),
    )
    with pytest.raises(SidespinError, match=r"schedule of an optimizer.*: add it to State\("):
        run_copy(path)
    assert not (tmp_path / "runs").exists()


FROZEN = (
    "    buf = GAEBuffer(",
    "    pi.net[0].requires_grad_(False)\n    v.net[2].requires_grad_(False)\n    buf = GAEBuffer(",
)
FROZEN_LATER = (
    "        update()\n",
    "        update()\n        if epoch == 0:\n            v.net[0].requires_grad_(False)\n"
    "            v_optimizer.zero_grad()\n",
)


def changed(folder, then, now):
    """Return which parameters differ between the models after two epochs."""
    then, now = (torch.load(folder / f"model_{epoch}.pt") for epoch in (then, now))
    return {name for name in now if not torch.equal(then[name], now[name])}


@pytest.mark.parametrize("ranks", [1, 2])
def test_frozen_layers(ranks, tmp_path):
    path = copy_of("ppo_torch", tmp_path, FROZEN)
    words = as_flags(**brief("ppo_torch", keep_models=True))
    run = start(path.name, *words, cwd=tmp_path, ranks=ranks, warm=True)
    assert run.returncode == 0, run.stderr
    moving = {"pi.log_std", "pi.net.2.weight", "pi.net.2.bias", "v.net.0.weight", "v.net.0.bias"}
    assert changed(only_run(tmp_path / "runs"), 0, 1) == moving


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_layer_that_is_frozen_in_the_middle_of_training(ranks, tmp_path):
    """Adam would move it further, by its momentum, if it saw a gradient of zero."""
    path = copy_of("ppo_torch", tmp_path, FROZEN_LATER)
    words = as_flags(**brief("ppo_torch", keep_models=True, epochs=3))
    run = start(path.name, *words, cwd=tmp_path, ranks=ranks, warm=True)
    assert run.returncode == 0, run.stderr
    moving = {name for name in changed(only_run(tmp_path / "runs"), 0, 2) if name[0] == "v"}
    assert moving == {"v.net.2.weight", "v.net.2.bias"}


@pytest.mark.parametrize(
    ("kwargs", "groups"),
    [
        ({}, 1),
        (dict(weight_decay=0.1, betas=(0.8, 0.9), eps=1e-3), 1),
        (dict(weight_decay=0.1, decoupled_weight_decay=True), 1),
        (dict(amsgrad=True), 1),
        (dict(maximize=True), 2),
        ({}, 2),
    ],
)
def test_adam_is_torchs(kwargs, groups):
    """Also with parameters that have no gradient for a while, such as a layer that is frozen."""
    results = []
    for kind in (Adam, torch.optim.Adam):
        generator = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(3, 2, generator=generator)) for _ in range(4)]
        parts = [params] if groups == 1 else [params[:2], params[2:]]
        given = [dict(params=part, lr=0.1 / (1 + i)) for i, part in enumerate(parts)]
        optimizer = kind(given, **kwargs, **(dict(fused=True) if kind is not Adam else {}))
        calls = []
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append(1))
        for t in range(6):
            for i, p in enumerate(params):
                grad = torch.randn(3, 2, generator=generator)
                p.grad = None if (i == 1 and t in (3, 4)) or (i == 3 and t < 2) else grad
            if t == 4:
                optimizer.param_groups[0]["lr"] = 0.05
            optimizer.step()
        results.append((params, len(calls)))
    (own, own_calls), (torchs, calls) = results
    assert all(torch.equal(p, q) for p, q in zip(own, torchs))
    assert own_calls == calls == 6, "hooks are called"


# Lines that look cosmetic


PROGRESS = ("            logger.progress(epoch, t, local_steps)\n", "")
SAVE_MODEL = ("            save_model(run, model, epoch)\n", "")
SAVE_IF = "        if (epoch + 1) % args.save_freq == 0 or epoch + 1 == args.epochs:\n"
TEST = [
    ("        test_agent(epoch)\n\n", ""),
    ("EpRet* TestEpRet* EpLen TestEpLen", "EpRet* EpLen"),
]


def without_checkpoints(script):
    lines = (ROOT / f"{script}.py").read_text().splitlines(keepends=True)
    edits = [(line, "") for line in lines if re.search(r"    .*(checkpoint(\.| =)|State\()", line)]
    assert len(edits) in (3, 4), "State, Checkpoint, restore and save"
    return [*edits, ("range(first_epoch, args.epochs)", "range(args.epochs)")]


def cosmetics(script):
    edits = {"progress": [PROGRESS], "save_model": [SAVE_MODEL]}
    edits["checkpoint"] = without_checkpoints(script)
    return {**edits, "test": TEST} if script in OFF_POLICY_SCRIPTS else edits


@pytest.mark.parametrize(
    ("script", "what"),
    [
        *((script, what) for script in ("ppo_torch", "sac_torch") for what in cosmetics(script)),
        *((script, "everything") for script in ("vpg_torch", "td3_torch", "ppo_tf1", "sac_tf1")),
    ],
)
def test_without_lines_that_look_cosmetic_it_trains_the_same(script, what, tmp_path):
    found = cosmetics(script)
    edits = found[what] if what in found else [edit for edits in found.values() for edit in edits]
    if what == "everything":
        edits.append((SAVE_IF, ""))
    folder = run_copy(copy_of(script, tmp_path, *edits))
    tests = (
        [k for k in progress(trained(script)) if "Test" in k] if what in "test everything" else []
    )
    assert rows(folder) == rows(trained(script), without=tests)
    saved = {path.name for path in folder.iterdir()} & {"model.pt", "tf1_save", "checkpoint"}
    model = "tf1_save" if "tf1" in script else "model.pt"
    assert (model in saved) == (what not in ("save_model", "everything"))
    assert ("checkpoint" in saved) == (what not in ("checkpoint", "everything"))
    table = progress(folder)
    assert (table["Time"].diff()[1:] > 0).all()
    assert (table["StepsPerSec"] > 0).all()


def test_without_checkpoints_nothing_is_resumed_nor_lost(tmp_path):
    """A script that does not restore must not take --resume for a permission to start anew."""
    path = copy_of("ppo_torch", tmp_path, *without_checkpoints("ppo_torch"))
    folder = run_copy(path)
    before = (folder / "progress.txt").read_text()
    with pytest.raises(SidespinError):
        run_copy(path, resume=True, epochs=3)
    assert (folder / "progress.txt").read_text() == before


# The usual edits


RELU = {
    "torch": [
        (", Tanh()]", ", nn.ReLU()]"),
        ("x = np.tanh(w @ x + b)", "x = np.maximum(w @ x + b, 0)"),
    ],
    "tf1": [("x = tf.tanh(tf.mat", "x = tf.nn.relu(tf.mat")],
}
RELU["tf1"].append(RELU["torch"][1])
TANH = {
    "torch": [
        ("nn.ReLU(inplace=True)", "nn.Tanh()"),
        ("x = np.maximum(w @ x + b, 0)", "x = np.tanh(w @ x + b)"),
    ],
    "tf1": [("x = tf.nn.relu(tf.mat", "x = tf.tanh(tf.mat")],
}
TANH["tf1"].append(TANH["torch"][1])


@pytest.mark.parametrize("script", ["vpg_torch", "ppo_tf1", "trpo_torch", "td3_torch", "sac_tf1"])
def test_another_activation(script, tmp_path):
    off_policy = script in OFF_POLICY_SCRIPTS
    edits = (TANH if off_policy else RELU)[script.split("_")[1]]
    folder = run_copy(copy_of(script, tmp_path / "both", *edits))
    then, now = rows(trained(script)), rows(folder)
    assert (
        then[0]["MaxQ1Vals" if off_policy else "MaxVVals"]
        != now[0]["MaxQ1Vals" if off_policy else "MaxVVals"]
    )
    for i, edit in enumerate(edits):
        path = copy_of(script, tmp_path / str(i), edit)
        with pytest.raises(
            SidespinError, match=r"mlp_numpy or .* differs from mlp or .*: change both"
        ):
            run_copy(path)
        assert not (tmp_path / str(i) / "runs").exists()


def test_an_activation_changed_in_one_place_is_one_line_on_the_command_line(tmp_path):
    path = copy_of("ppo_torch", tmp_path, RELU["torch"][0])
    run = start(path.name, *as_flags(**brief("ppo_torch")), cwd=tmp_path, warm=True)
    assert run.returncode == 2
    assert re.fullmatch("ppo_torch.py: error: mlp_numpy or .*: change both\n", run.stderr)


def wrapped(script, wrapper):
    """Return the edits that wrap the environments, all that the script makes."""
    imports = f"from gymnasium.wrappers import {wrapper}\nfrom common.args"
    made = "make_env(args.env_id, args.max_ep_len)"
    if script in OFF_POLICY_SCRIPTS:
        made = made.replace(")", ", bounded_actions=True)")
    return [("from common.args", imports), (made, f"{wrapper}({made})")]


@pytest.mark.parametrize(
    ("script", "wrapper"),
    [
        ("ppo_torch", "NormalizeObservation"),
        ("trpo_torch", "NormalizeReward"),
        ("vpg_torch", "TimeAwareObservation"),
        ("ddpg_torch", "TimeAwareObservation"),
        ("td3_torch", "NormalizeReward"),
        ("sac_torch", "NormalizeObservation"),
        ("vpg_tf1", "NormalizeReward"),
    ],
)
def test_wrappers_keep_their_state(script, wrapper, tmp_path, capfd):
    path = copy_of(script, tmp_path, *wrapped(script, wrapper))
    # 30 does not divide the length of an epoch: checkpoints are in the middle of episodes
    folder = assert_resumes(path, max_ep_len=30)
    assert rows(folder) != rows(trained(script)), "the wrapper is really there"
    assert "does not replay" not in capfd.readouterr().err


def test_a_wrapper_around_the_training_environment_alone(tmp_path):
    wrap = "    env = NormalizeReward(env)\n    low, high = env.action_space.low"
    imports = (
        "from common.args",
        "from gymnasium.wrappers import NormalizeReward\nfrom common.args",
    )
    edits = [imports, ("    low, high = env.action_space.low", wrap)]
    folder = assert_resumes(copy_of("sac_torch", tmp_path, *edits), max_ep_len=30)
    assert rows(folder) != rows(trained("sac_torch")), "the wrapper is really there"


def test_a_wrapper_that_looks_at_the_clock(tmp_path):
    """Its numbers differ from run to run; those of the training do not."""
    path = copy_of("ppo_torch", tmp_path, *wrapped("ppo_torch", "RecordEpisodeStatistics"))
    run_copy(path, epochs=1)
    folder = run_copy(path, resume=True)
    assert rows(folder) == rows(trained("ppo_torch"))
    assert outcome(folder)["model.pt"] == outcome(trained("ppo_torch"))["model.pt"]


@pytest.mark.parametrize("env_id", ["Normalized", "Stacked", "Counting", "Array"])
def test_wrappers_of_registered_environments_keep_their_state(env_id, tmp_path, capfd):
    path = copy_of("ppo_torch", tmp_path)
    assert_resumes(path, env_id=f"envs:{env_id}-v0", max_ep_len=30)
    assert "does not replay" not in capfd.readouterr().err


PRIORITIES = [
    (
        "        self.ptr, self.size, self.max_size = 0, 0, size",
        "        self.p = np.zeros(size + 0, np.float32)\n"
        "        self.ptr, self.size, self.max_size = 0, 0, size",
    ),
    (
        "        self.ptr = (self.ptr + 1)",
        "        self.p[self.ptr] = 1 + self.p.max()\n        self.ptr = (self.ptr + 1)",
    ),
    (
        "        i = rng.integers(self.size, size=batch_size)",
        "        p = self.p[: self.size] / self.p[: self.size].sum(dtype=float)\n"
        "        i = rng.choice(self.size, batch_size, p=p)\n"
        "        self.p[i] *= 0.5",
    ),
]


@pytest.mark.parametrize("script", ["td3_torch", "sac_tf1"])
@pytest.mark.parametrize(
    "edit",
    [
        ("size + 0", "size + 1"),
        ("    def sample_batch", '    saved_whole = ["p"]\n\n    def sample_batch'),
    ],
    ids=["of another length", "by name"],
)
def test_priorities_of_transitions(script, edit, tmp_path):
    """They change after a transition was stored, so a checkpoint has to save them whole."""
    folder = assert_resumes(copy_of(script, tmp_path, *PRIORITIES, edit))
    assert rows(folder) != rows(trained(script)), "they were used"


def test_transitions_that_change_after_they_were_stored(tmp_path):
    with pytest.raises(SidespinError, match=r"name the array in buf\.saved_whole"):
        run_copy(copy_of("td3_torch", tmp_path, *PRIORITIES), replay_size=1000)


@pytest.mark.parametrize("script", ["ppo_torch", "sac_tf1"])
def test_a_column_that_was_not_declared(script, tmp_path):
    edit = ("logger.store(EpRet=ep_ret", "logger.store(Idea=1.0, EpRet=ep_ret")
    path = copy_of(script, tmp_path, edit)
    with pytest.raises(SidespinError, match=r"no column for Idea: add it to EpochLogger\("):
        run_copy(path)


def test_a_column_of_ones_own(tmp_path):
    edits = [
        ("logger.store(EpRet=ep_ret", "logger.store(Idea=ep_len / 50, EpRet=ep_ret"),
        ('columns = "EpRet* ', 'columns = "Idea* EpRet* '),
    ]
    table = progress(assert_resumes(copy_of("ppo_torch", tmp_path, *edits)))
    for kind in ("Average", "Max", "Min"):
        assert list(table[f"{kind}Idea"]) == [1, 1, 1, 1]


def test_other_columns_than_the_run_has(tmp_path):
    run_copy(copy_of("ppo_torch", tmp_path / "a"), data_dir=str(tmp_path))
    edit = ('columns = "EpRet* ', 'columns = "Idea EpRet* ')
    path = copy_of("ppo_torch", tmp_path / "b", edit)
    with pytest.raises(SidespinError, match=r"is damaged or has different columns"):
        run_copy(path, data_dir=str(tmp_path), resume=True, epochs=3)


def test_a_changed_script_resumes_with_a_warning(tmp_path, capfd):
    path = copy_of("ppo_torch", tmp_path)
    folder = run_copy(path)
    path.write_text(path.read_text() + "# Monday\n")
    run_copy(path, resume=True, epochs=3)
    expected = f"warning: ppo_torch.py has changed since this run began, see {folder}/script.py\n"
    assert capfd.readouterr().err.endswith(expected)
    assert not (folder / "script.py").read_text().endswith("# Monday\n")


TF1_RATE = [
    (
        "    pi_optimizer = MpiAdamOptimizer(pi.params, factor * args.pi_lr)",
        "    rate = tf.Variable(args.pi_lr, trainable=False)\n"
        "    halve = rate.assign(0.5 * rate)\n"
        "    pi_optimizer = MpiAdamOptimizer(pi.params, rate)",
    ),
    (
        "        pi_params = get_pi_params()\n\n",
        "        pi_params = get_pi_params()\n        sess.run(halve)\n\n",
    ),
]


def test_a_learning_rate_as_a_variable_in_tf1(tmp_path):
    folder = assert_resumes(copy_of("ppo_tf1", tmp_path, *TF1_RATE), epochs=2)
    then, now = rows(trained("ppo_tf1")), rows(folder)
    assert then[0] == now[0]
    assert then[1] != now[1], "the new rate was used"
    state = {name: x for name, x in state_of(folder, 2).items() if name.startswith("Variable")}
    rates = [x for x in state.values() if x.dtype == np.float32 and x.ndim == 0]
    np.testing.assert_allclose(rates, [3e-4 / 4], rtol=1e-6)


def test_a_variable_that_the_loss_does_not_use_in_tf1(tmp_path):
    """As in PyTorch, it stays as it is; the others are trained as without it."""
    params = "        self.params = [self.log_std, *self.net.params"
    edit = (f"{params}]", f'{params}, tf.get_variable("pi/b9", initializer=0.25)]')
    folder = run_copy(copy_of("ppo_tf1", tmp_path, edit))
    assert rows(folder) == rows(trained("ppo_tf1"))
    assert state_of(folder, 2)["pi/b9"] == 0.25


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Adam(pi.parameters(), lr=args.pi_lr)", "Adam(pi.parameters(), lr=1e-4)"),
        (
            "Adam(pi.parameters(), lr=args.pi_lr)",
            "Adam([{'params': [pi.log_std], 'lr': 1e-2}, {'params': pi.net.parameters()}], 1e-3)",
        ),
    ],
    ids=["another rate", "two rates"],
)
def test_decay_of_rates_that_were_edited(old, new, tmp_path):
    path = copy_of("ppo_torch", tmp_path, (old, new))
    folder = run_copy(path, decay=True, epochs=4)
    for epoch, share in (3, 1 / 4), (4, 0):
        groups = [x for part in state_of(folder, epoch) for x in part.get("param_groups", [])]
        first = [1e-4, 1e-3] if "1e-4" in new else [1e-2, 1e-3, 1e-3]
        np.testing.assert_allclose([x["lr"] for x in groups], np.multiply(share, first))
