"""The scripts as users start them: what they print, write and refuse."""

import dataclasses
import importlib
import json
import re
import shutil

import numpy as np
import pytest
from helpers import ROOT, SCRIPTS, TF1, TORCH, params_of, progress, start, train

SHORT = "--env-id CartPole-v1 --epochs 2 --steps-per-epoch 400".split()
COLUMNS = """Epoch AverageEpRet StdEpRet MaxEpRet MinEpRet EpLen AverageVVals StdVVals MaxVVals
    MinVVals TotalEnvInteracts LossPi LossV DeltaLossPi DeltaLossV Entropy KL""".split()
OWN_COLUMNS = {"vpg": [], "ppo": ["ClipFrac", "StopIter"], "trpo": ["BacktrackIters"]}
TIMES = ["Time", "StepsPerSec"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_copied_with_common_into_an_empty_folder_it_runs(script, tmp_path):
    shutil.copy(ROOT / f"{script}.py", tmp_path)
    shutil.copytree(ROOT / "common", tmp_path / "common")
    first = start(f"{script}.py", *SHORT, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert first.stderr == ""
    folder = tmp_path / "runs" / f"{script}_CartPole-v1" / f"{script}_CartPole-v1_s0"
    table = progress(folder)
    assert list(table) == [*COLUMNS, *OWN_COLUMNS[script.split("_")[0]], *TIMES]
    assert list(table["TotalEnvInteracts"]) == [400, 800]
    assert all(key in first.stdout for key in table)

    # The folder is never overwritten by accident, and the same command gives the same numbers.
    again = start(f"{script}.py", *SHORT, cwd=tmp_path)
    assert again.returncode == 2
    assert re.fullmatch(rf"{script}\.py: error: .*--overwrite.*--exp-name.*--seed\n", again.stderr)
    third = start(f"{script}.py", *SHORT, "--overwrite", cwd=tmp_path)
    assert third.returncode == 0, third.stderr
    assert table.drop(columns=TIMES).equals(progress(folder).drop(columns=TIMES))


@pytest.mark.parametrize("script", SCRIPTS)
def test_imports_its_own_framework_only(script, tmp_path):
    code = f"""
import sys, {script}
{script}.main({script}.Args(env_id='CartPole-v1', epochs=1, steps_per_epoch=100, data_dir='r'))
print(sorted({{'torch', 'tensorflow'}} & set(sys.modules)))
"""
    (tmp_path / "check.py").write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}")
    run = start(tmp_path / "check.py", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == str(["torch" if script in TORCH else "tensorflow"])


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_explains_every_argument(script):
    run = start(f"{script}.py", "--help")
    assert run.returncode == 0
    text = " ".join(re.sub("[│╭╮╰╯─]", " ", run.stdout).split())
    source = (ROOT / f"{script}.py").read_text()
    for field in dataclasses.fields(importlib.import_module(script).Args):
        comment = re.search(rf"^    {field.name}: .*  # (.*)$", source, re.M).group(1)
        flag = "--" + field.name.replace("_", "-")
        assert re.search(rf"{flag} .*?{re.escape(comment)}", text), flag


def test_shared_arguments_come_first_and_in_one_order():
    shared = """env_id seed epochs steps_per_epoch max_ep_len hidden_sizes gamma cpu threads
        data_dir exp_name save_freq overwrite""".split()
    for script in SCRIPTS:
        fields = [f.name for f in dataclasses.fields(importlib.import_module(script).Args)]
        assert fields[: len(shared)] == shared


@pytest.mark.parametrize("script", ["ppo_torch", "ppo_tf1"])
def test_what_a_run_leaves(script, tmp_path):
    folder = train(script, tmp_path, env_id="CartPole-v1", epochs=3, steps_per_epoch=300, seed=7)
    assert folder == tmp_path / f"{script}_CartPole-v1" / f"{script}_CartPole-v1_s7"
    config = json.loads((folder / "config.json").read_text())
    args = dataclasses.asdict(importlib.import_module(script).Args())
    assert set(args) < set(config)
    assert (config["seed"], config["script"], config["ranks"]) == (7, script, 1)
    framework = "torch" if script in TORCH else "tensorflow"
    assert config["versions"][framework] == importlib.import_module(framework).__version__

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    table = progress(folder)
    for key in table:
        scalars = events.Scalars(key)
        assert [s.step for s in scalars] == list(table["TotalEnvInteracts"])
        np.testing.assert_allclose([s.value for s in scalars], table[key], rtol=1e-6)
    kept = {p.name.split(".")[0] for p in folder.iterdir()}
    model = "model" if script in TORCH else "tf1_save"
    assert kept == {"config", "progress", "events", model}


def test_the_saved_model_is_the_last_update(tmp_path):
    """A run of two epochs and its first epoch alone differ by the second update."""
    for script in ("ppo_torch", "ppo_tf1"):
        short, long = (
            params_of(
                train(script, tmp_path, env_id="CartPole-v1", epochs=n, exp_name=f"{script}{n}")
            )
            for n in (1, 2)
        )
        kept = params_of(
            train(script, tmp_path, env_id="CartPole-v1", epochs=2, exp_name="x", save_freq=5)
        )
        shutil.rmtree(tmp_path / "x")
        for p, q, r in zip(short[0], long[0], kept[0]):
            assert not np.array_equal(p, q)
            np.testing.assert_array_equal(q, r)


@pytest.mark.parametrize("script", TF1)
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_tf1_save_restores(script, env_id, tmp_path):
    import tensorflow.compat.v1 as tf

    from common.tf1_utils import restore_tf_graph

    module = importlib.import_module(script)
    folder = train(script, tmp_path, env_id=env_id, epochs=1, steps_per_epoch=300)
    o = np.random.default_rng(0).standard_normal((5, 4 if "Cart" in env_id else 3))
    with tf.Session(graph=tf.Graph()) as sess:
        model = restore_tf_graph(sess, folder / "tf1_save")
        assert set(model) == {"x", "a", "pi", "v", "logp"}
        a, v = sess.run([model["pi"], model["v"]], {model["x"]: o})
        sess.run(model["logp"], {model["x"]: o, model["a"]: a})
    pi_params, _ = params_of(folder)
    expected = [module.act(pi_params, x.astype(np.float32)) for x in o]
    np.testing.assert_allclose(a, expected, rtol=1e-4, atol=1e-6)
    assert v.shape == (5,)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--env-id", "Hoper-v4"], "cannot make the environment Hoper-v4: .*Hopper"),
        (["--env-id", "nowhere:Thing-v0"], "cannot make the environment nowhere:Thing-v0"),
        (["--env-id", "envs:MultiDiscreteAction-v0"], r"MultiDiscrete.*needs Discrete or Box"),
        (["--env-id", "envs:IntegerAction-v0"], r"int64.*needs Discrete or Box"),
        (["--env-id", "envs:SequenceObs-v0"], "cannot be flattened"),
        (["--data-dir", "/proc/nowhere"], "cannot write to /proc/nowhere"),
    ],
)
def test_errors_are_one_sentence(argv, words, tmp_path):
    run = start(ROOT / "vpg_torch.py", *argv, cwd=tmp_path)
    assert run.returncode == 2
    assert re.fullmatch(f"vpg_torch.py: error: .*{words}.*\n", run.stderr)
    assert run.stdout == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", ["ppo_torch", "ppo_tf1"])
def test_a_changed_network_is_noticed(script, tmp_path):
    source = (ROOT / f"{script}.py").read_text()
    for old, new in [("nn.Tanh()", "nn.ReLU()"), ("tf.tanh(", "tf.nn.relu(")]:
        source = source.replace(old, new)
    (tmp_path / f"{script}.py").write_text(source)
    shutil.copytree(ROOT / "common", tmp_path / "common")
    run = start(f"{script}.py", *SHORT, cwd=tmp_path)
    assert run.returncode == 2
    assert "dist_numpy and pi.dist disagree" in run.stderr


def test_logger_is_quiet_without_a_terminal_and_alive_on_one(tmp_path):
    import os
    import pty
    import subprocess
    import sys

    command = [sys.executable, "ppo_torch.py", *SHORT, "--data-dir", str(tmp_path)]
    leader, follower = pty.openpty()
    process = subprocess.Popen(command, cwd=ROOT, stdout=follower, stderr=follower)
    os.close(follower)
    shown = b""
    while chunk := _read(leader):
        shown += chunk
    assert process.wait() == 0
    assert re.search(rb"epoch [12]/2 \[#* *\] +\d+%  [\d,]+ steps/s  \d+:\d\d left", shown)
    run = start("ppo_torch.py", *SHORT, "--data-dir", tmp_path / "quiet")
    assert "\r" not in run.stdout
    assert "steps/s" not in run.stdout


def _read(leader):
    import os

    try:
        return os.read(leader, 4096)
    except OSError:  # the other side is closed
        return b""


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    "name",
    """DictObs TupleObs DiscreteObs ImageObs ScalarObs Float64Obs DiscreteStart MatrixAction
    Float64Action AsymmetricAction UnboundedAction""".split(),
)
def test_odd_spaces(script, name, tmp_path):
    folder = train(script, tmp_path, env_id=f"envs:{name}-v0", epochs=2, steps_per_epoch=60)
    table = progress(folder)
    assert list(table["EpLen"]) == [20, 20]
    assert np.isfinite(table.to_numpy()).all()


def test_observations_changed_in_place_are_kept(tmp_path):
    from record import record

    module = importlib.import_module("vpg_torch")
    args = module.Args(env_id="envs:InPlace-v0", epochs=1, steps_per_epoch=20)
    args.data_dir = str(tmp_path)
    o = record("vpg_torch", args)["batches"][0][0]
    np.testing.assert_array_equal(o[:, 0], [*range(10), *range(10)])


def test_max_ep_len_cuts_and_bootstraps(tmp_path):
    folder = train("ppo_torch", tmp_path, env_id="Pendulum-v1", epochs=1, max_ep_len=50)
    assert progress(folder)["EpLen"][0] == 50
    folder = train("ppo_torch", tmp_path, env_id="Pendulum-v1", epochs=1, max_ep_len=400, seed=1)
    assert progress(folder)["EpLen"][0] == 400
