"""What the scripts print and leave: the table, the run's folder, the models."""

import dataclasses
import importlib
import json
import shutil

import numpy as np
import pytest
from helpers import (
    OFF_POLICY,
    OFF_POLICY_SCRIPTS,
    ON_POLICY,
    SCRIPTS,
    TF1,
    TIMES,
    TORCH,
    brief,
    files_in,
    params_of,
    progress,
    train,
    trained,
)

from common.checkpoint import unpack
from common.errors import SidespinError


def statistics(key):
    return [f"{prefix}{key}" for prefix in ("Average", "Std", "Max", "Min")]


COLUMNS = {
    algo: [
        *("Epoch", "TotalEnvInteracts", *statistics("EpRet"), "EpLen", *statistics("VVals")),
        *("LossPi", "LossV", "DeltaLossPi", "DeltaLossV", "Entropy", "KL"),
    ]
    for algo in ON_POLICY
}
COLUMNS["ppo"] += ["ClipFrac", "StopIter"]
COLUMNS["trpo"] += ["BacktrackIters"]
for algo in OFF_POLICY:
    COLUMNS[algo] = ["Epoch", "TotalEnvInteracts", *statistics("EpRet"), *statistics("TestEpRet")]
    COLUMNS[algo] += ["EpLen", "TestEpLen", *statistics("Q1Vals")]
    COLUMNS[algo] += [] if algo == "ddpg" else statistics("Q2Vals")
    COLUMNS[algo] += [*statistics("LogPi"), "Alpha"] if algo == "sac" else []
    COLUMNS[algo] += ["LossPi", "LossQ"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_progress_has_spinning_ups_columns(script):
    table = progress(trained(script))
    assert list(table) == [*COLUMNS[script.split("_")[0]], *TIMES]
    assert list(table["Epoch"]) == [0, 1]
    assert list(table["TotalEnvInteracts"]) == [100, 200]
    assert np.isfinite(table.to_numpy()).all(), "updates were really executed"


def test_shared_arguments_come_first_and_in_one_order():
    shared = """env_id seed epochs steps_per_epoch max_ep_len hidden_sizes gamma cpu threads
        data_dir exp_name save_freq resume overwrite keep_models""".split()
    for script in SCRIPTS:
        fields = [f.name for f in dataclasses.fields(importlib.import_module(script).Args)]
        assert fields[: len(shared)] == shared


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_is_never_overwritten_by_accident(script, tmp_path):
    folder = tmp_path / trained(script).parent.name / trained(script).name
    shutil.copytree(trained(script), folder)
    before = files_in(folder)
    with pytest.raises(SidespinError) as refused:
        train(script, tmp_path, **brief(script))
    expected = f"{folder} already holds a run: use resume, overwrite or another exp_name or seed"
    assert str(refused.value) == expected
    assert before == files_in(folder)


def test_overwrite_leaves_nothing_of_the_old_run(tmp_path):
    folder = train("ppo_torch", tmp_path, **brief("ppo_torch", epochs=3, keep_models=True))
    (folder / "notes.txt").write_text("not of the run")
    brand_new = train("ppo_torch", tmp_path / "new", **brief("ppo_torch"))
    assert train("ppo_torch", tmp_path, overwrite=True, **brief("ppo_torch")) == folder
    names = {path.relative_to(brand_new) for path in files_in(brand_new)}
    kept = {path.relative_to(folder) for path in files_in(folder)}
    assert {str(name).split("tfevents")[0] for name in names ^ kept} <= {"notes.txt", "events.out."}
    assert (folder / "notes.txt").exists()
    assert progress(folder).drop(columns=TIMES).equals(progress(brand_new).drop(columns=TIMES))


@pytest.mark.parametrize("script", ["ppo_torch", "ppo_tf1"])
def test_what_a_run_leaves(script):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, module = trained(script), importlib.import_module(script)
    name = f"{script}_Pendulum-v1"
    assert (folder.parent.name, folder.name) == (name, f"{name}_s7")
    config = json.loads((folder / "config.json").read_text())
    settings = {**dataclasses.asdict(module.Args()), **brief(script)}
    for key, value in settings.items():
        if key not in ("data_dir", "exp_name"):
            assert config[key] == (list(value) if isinstance(value, tuple) else value)
    assert (config["script"], config["ranks"], config["exp_name"]) == (script, 1, name)
    framework = "torch" if script in TORCH else "tensorflow"
    assert config["versions"][framework] == importlib.import_module(framework).__version__
    with open(module.__file__, "rb") as file:
        assert (folder / "script.py").read_bytes() == file.read()

    events = EventAccumulator(str(folder)).Reload()
    tags = {tag.split("/")[-1]: tag for tag in events.Tags()["scalars"]}  # group/column
    table = progress(folder)
    assert sorted(tags) == sorted(table)
    for key in table:
        scalars = events.Scalars(tags[key])
        assert [s.step for s in scalars] == list(table["TotalEnvInteracts"])
        np.testing.assert_allclose([s.value for s in scalars], table[key], rtol=1e-6)
    kept = {p.name.split(".")[0] for p in folder.iterdir()}
    model = "model" if script in TORCH else "tf1_save"
    assert kept == {"config", "script", "progress", "events", model, "checkpoint"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_saved_model_is_that_of_the_last_checkpoint(script):
    """And that one holds the last update, or no run could be resumed bit for bit."""
    folder = trained(script)
    with np.load(folder / "checkpoint" / "epoch2.rank0.npz") as arrays:
        state = unpack(dict(arrays))["state"]
    networks = state[0] if script in TORCH else {k: v for k, v in state.items() if "/" in k}
    saved = {net: sorted(x.tobytes() for x in xs) for net, xs in params_of(folder).items()}
    for net in saved:
        own = [x for name, x in networks.items() if name.replace("/", ".").startswith(f"{net}.")]
        assert sorted(x.tobytes() for x in own) == saved[net]


@pytest.mark.parametrize("script", ["ppo_torch", "sac_torch", "ppo_tf1"])
def test_models_are_saved_every_so_many_epochs_and_at_the_end(script, tmp_path):
    settings = brief(script, epochs=3, save_freq=2, keep_models=True)
    folder = train(script, tmp_path, xla=True, **settings)
    last = params_of(folder)
    name = "model_{}.pt" if script in TORCH else "tf1_save_{}"
    found = [epoch for epoch in range(5) if (folder / name.format(epoch)).exists()]
    assert found == [1, 2], "after the second epoch and the third, counted from 0"
    params = []
    for epoch in found:
        kept = tmp_path / str(epoch)
        kept.mkdir()
        (folder / name.format(epoch)).rename(kept / name.replace("_{}", ""))
        params.append(params_of(kept))
    for then, now, end in zip(params[0]["pi"], params[1]["pi"], last["pi"]):
        np.testing.assert_array_equal(now, end)
        moves = np.ptp(now) > 0  # bounds and statistics stay; here, each holds one number
        assert not np.array_equal(then, now) or not moves
    for then, shorter in zip(params[0]["pi"], params_of(trained(script))["pi"]):
        np.testing.assert_array_equal(then, shorter)


def policy_class(module, discrete=False):
    if hasattr(module, "Policy"):
        return module.Policy
    return module.CategoricalPolicy if discrete else module.GaussianPolicy


@pytest.mark.parametrize("script", TF1)
def test_tf1_save_restores(script, tmp_path):
    import tensorflow.compat.v1 as tf

    from common.tf1_utils import restore_tf_graph

    module = importlib.import_module(script)
    discrete = script == "vpg_tf1"
    folder = trained(script)
    if discrete:
        folder = train(script, tmp_path, **brief(script, env_id="CartPole-v1", epochs=1))
    o = np.random.default_rng(0).standard_normal((5, 4 if discrete else 3)).astype(np.float32)
    with tf.Session(graph=tf.Graph()) as sess:
        model = restore_tf_graph(sess, folder / "tf1_save")
        values = {"ddpg": {"q1"}, "td3": {"q1", "q2"}, "sac": {"q1", "q2"}}
        values = values.get(script.split("_")[0], {"v", "logp"})
        assert set(model) == {"x", "a", "pi", *values}
        a = sess.run(model["pi"], {model["x"]: o})
        for key in values:
            assert sess.run(model[key], {model["x"]: o, model["a"]: a}).shape == (5,)
    pi_params = params_of(folder)["pi"]
    expected = [policy_class(module, discrete).act(pi_params, x) for x in o]
    np.testing.assert_allclose(a, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("script", TORCH)
def test_model_pt_is_the_policy(script):
    import torch
    from gymnasium.spaces import Box

    module = importlib.import_module(script)
    state = torch.load(trained(script) / "model.pt", weights_only=True)
    pi = {key.removeprefix("pi."): x for key, x in state.items() if key.startswith("pi.")}
    space = Box(-2, 2, (1,)) if script in OFF_POLICY_SCRIPTS else 1
    net = policy_class(module)(3, space, (8,), np.random.default_rng(0))
    net.load_state_dict(pi)
    o = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    with torch.no_grad():
        if script in ("ddpg_torch", "td3_torch"):
            expected = net(torch.as_tensor(o))
        else:
            expected = net.dist(torch.as_tensor(o))[0]
        expected = 2 * torch.tanh(expected) if script == "sac_torch" else expected
    a = [net.act([x.numpy() for x in pi.values()], x) for x in o]
    assert a[0].dtype == np.float32
    np.testing.assert_allclose(a, expected.numpy(), rtol=1e-4, atol=1e-6)
