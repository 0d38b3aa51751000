"""The scripts as users start them: what they print, write and refuse."""

import dataclasses
import importlib
import json
import re
import shutil

import numpy as np
import pytest
from helpers import (
    OFF_POLICY,
    OFF_POLICY_SCRIPTS,
    ON_POLICY,
    ON_POLICY_SCRIPTS,
    ROOT,
    SCRIPTS,
    TF1,
    TORCH,
    only_run,
    params_of,
    progress,
    refusal,
    start,
    train,
)

SHORT = "--env-id Pendulum-v1 --epochs 2 --steps-per-epoch 400".split()
SHORT_OFF_POLICY = (
    "--hidden-sizes 16 --start-steps 100 --update-after 300 --num-test-episodes 2".split()
)
TIMES = ["Time", "StepsPerSec"]


def statistics(key):
    return [f"{prefix}{key}" for prefix in ("Average", "Std", "Max", "Min")]


COLUMNS = {
    algo: [
        *("Epoch", *statistics("EpRet"), "EpLen", *statistics("VVals"), "TotalEnvInteracts"),
        *("LossPi", "LossV", "DeltaLossPi", "DeltaLossV", "Entropy", "KL"),
    ]
    for algo in ON_POLICY
}
COLUMNS["ppo"] += ["ClipFrac", "StopIter"]
COLUMNS["trpo"] += ["BacktrackIters"]
for algo in OFF_POLICY:
    COLUMNS[algo] = ["Epoch", *statistics("EpRet"), *statistics("TestEpRet"), "EpLen", "TestEpLen"]
    COLUMNS[algo] += ["TotalEnvInteracts", *statistics("Q1Vals")]
    COLUMNS[algo] += [] if algo == "ddpg" else statistics("Q2Vals")
    COLUMNS[algo] += [*statistics("LogPi"), "Alpha"] if algo == "sac" else []
    COLUMNS[algo] += ["LossPi", "LossQ"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_copied_with_common_into_an_empty_folder_it_runs(script, tmp_path):
    algo, framework = script.split("_")
    shutil.copy(ROOT / f"{script}.py", tmp_path)
    shutil.copytree(ROOT / "common", tmp_path / "common")
    argv = [*SHORT, *(SHORT_OFF_POLICY if algo in OFF_POLICY else [])]
    first = start(f"{script}.py", *argv, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert first.stderr == ""
    folder = tmp_path / "runs" / f"{script}_Pendulum-v1" / f"{script}_Pendulum-v1_s0"
    table = progress(folder)
    assert list(table) == [*COLUMNS[algo], *TIMES]
    assert list(table["TotalEnvInteracts"]) == [400, 800]
    assert np.isfinite(table.to_numpy()).all(), "updates were really executed"
    assert all(key in first.stdout for key in table)

    # The same command gives the same numbers, and imports one framework only.
    code = f"""
import runpy, sys
sys.argv = {[f"{script}.py", *argv, "--overwrite"]}
sys.path.insert(0, ".")
runpy.run_path("{script}.py", run_name="__main__")
print(sorted({{"torch", "tensorflow"}} & set(sys.modules)))
"""
    third = start("-c", code, cwd=tmp_path)
    assert third.returncode == 0, third.stderr
    assert table.drop(columns=TIMES).equals(progress(folder).drop(columns=TIMES))
    imported = "torch" if framework == "torch" else "tensorflow"
    assert third.stdout.splitlines()[-1] == str([imported])


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_explains_every_argument(script, monkeypatch, capsys):
    module = importlib.import_module(script)
    monkeypatch.setattr("sys.argv", [f"{script}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        module.parse_args(module.Args, module.__doc__)
    assert ended.value.code == 0
    text = " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    source = (ROOT / f"{script}.py").read_text()
    for field in dataclasses.fields(module.Args):
        comment = re.search(rf"^    {field.name}: .*  # (.*)$", source, re.M).group(1)
        flag = "--" + field.name.replace("_", "-")
        assert re.search(rf"{flag} .*?{re.escape(comment)}", text), flag


def test_help_under_mpirun_is_printed_once():
    run = start("ppo_torch.py", "--help", ranks=2)
    assert run.returncode == 0
    assert run.stdout.count("--clip-ratio") == 1


def test_shared_arguments_come_first_and_in_one_order():
    shared = """env_id seed epochs steps_per_epoch max_ep_len hidden_sizes gamma cpu threads
        data_dir exp_name save_freq resume overwrite keep_models""".split()
    for script in SCRIPTS:
        fields = [f.name for f in dataclasses.fields(importlib.import_module(script).Args)]
        assert fields[: len(shared)] == shared


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_is_never_overwritten_by_accident(script, tmp_path, capsys):
    settings = dict(env_id="Pendulum-v1", epochs=1, steps_per_epoch=10)
    folder = train(script, tmp_path, **settings)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    with pytest.raises(SystemExit) as ended:
        train(script, tmp_path, **settings)
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert re.search(
        r"error: .* already holds a run: .*--resume.*--overwrite.*--exp-name.*--seed\n$", shown
    )
    assert before == {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert train(script, tmp_path, overwrite=True, **settings) == folder


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
    assert kept == {"config", "progress", "events", model, "checkpoint"}


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
        for p, q, r in zip(short["pi"], long["pi"], kept["pi"]):
            assert not np.array_equal(p, q)
            np.testing.assert_array_equal(q, r)


@pytest.mark.parametrize(
    ("script", "env_id"),
    [("vpg_tf1", "CartPole-v1"), *((script, "Pendulum-v1") for script in TF1)],
)
def test_tf1_save_restores(script, env_id, tmp_path):
    import tensorflow.compat.v1 as tf

    from common.tf1_utils import restore_tf_graph

    module = importlib.import_module(script)
    folder = train(script, tmp_path, env_id=env_id, epochs=1, steps_per_epoch=300)
    o = np.random.default_rng(0).standard_normal((5, 4 if "Cart" in env_id else 3))
    with tf.Session(graph=tf.Graph()) as sess:
        model = restore_tf_graph(sess, folder / "tf1_save")
        values = {"ddpg": {"q1"}, "td3": {"q1", "q2"}, "sac": {"q1", "q2"}}
        values = values.get(script.split("_")[0], {"v", "logp"})
        assert set(model) == {"x", "a", "pi", *values}
        a = sess.run(model["pi"], {model["x"]: o})
        for key in values:
            assert sess.run(model[key], {model["x"]: o, model["a"]: a}).shape == (5,)
    pi_params = params_of(folder)["pi"]
    expected = [module.act(pi_params, x.astype(np.float32)) for x in o]
    np.testing.assert_allclose(a, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("script", TORCH)
def test_model_pt_is_the_policy(script, tmp_path):
    folder = train(script, tmp_path, env_id="Pendulum-v1", epochs=1, steps_per_epoch=300)
    module = importlib.import_module(script)
    a = module.act(params_of(folder)["pi"], np.ones(3, np.float32))
    assert a.shape == (1,)
    assert a.dtype == np.float32


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--env-id", "Hoper-v4"], "cannot make the environment Hoper-v4: .*Hopper"),
        (["--env-id", "nowhere:Thing-v0"], "cannot make the environment nowhere:Thing-v0"),
        (["--env-id", "envs:MultiDiscreteAction-v0"], r"MultiDiscrete.*needs Discrete or Box"),
        (["--env-id", "envs:IntegerAction-v0"], r"int64.*needs Discrete or Box"),
        (["--env-id", "envs:SequenceObs-v0"], "cannot be flattened"),
        (["--env-id", "CartPole-v1"], r"Discrete\(2\), where this script needs Box"),
        (["--env-id", "envs:UnboundedAction-v0"], "needs finite bounds"),
        (["--data-dir", "/proc/nowhere"], "cannot write to /proc/nowhere"),
        (["--seed", "-1"], "--seed must not be negative, as -1 is"),
        (["--epochs", "0"], "--epochs must be at least 1, not 0"),
        (["--max-ep-len", "0"], "--max-ep-len must be at least 1, not 0"),
        (["--hidden-sizes", "64", "0"], r"--hidden-sizes must be at least 1, not \(64, 0\)"),
        (["--gamma", "1.5"], "--gamma must lie between 0 and 1, where 1.5 does not"),
        (["--pi-lr", "nan"], "--pi-lr nan is not a finite number"),
        (["--exp-name", "a/b"], "--exp-name a/b must be a name, without folders"),
        (["--exp-name", ".."], "--exp-name must be the name of a folder"),
    ],
)
def test_errors_are_one_sentence(argv, words, tmp_path, monkeypatch, capsys):
    script = "ddpg_torch" if "needs Box" in words or "finite" in words else "vpg_torch"
    monkeypatch.chdir(tmp_path)
    assert re.search(words, refusal(script, argv, monkeypatch, capsys))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("script", "settings", "quantity"),
    [
        ("ppo_torch", ["--pi-lr", "1e30", "--env-id", "Pendulum-v1"], "(Loss|DeltaLoss|KL).*"),
        ("vpg_tf1", ["--env-id", "envs:NanReward-v0"], "the environment's reward"),
        ("sac_torch", ["--env-id", "envs:HugeReward-v0", *SHORT_OFF_POLICY], ".*reward"),
        ("trpo_torch", ["--env-id", "envs:InfiniteObs-v0"], "number 1 of .*observation"),
    ],
)
def test_what_is_not_finite_stops_the_run(script, settings, quantity, tmp_path):
    few = ["--epochs", "9", "--steps-per-epoch", "100", "--data-dir", tmp_path]
    shown = start(f"{script}.py", *settings, *few)
    assert shown.returncode == 1
    assert len(shown.stderr.splitlines()) == 1
    assert re.search(
        rf"error: stopped in epoch [01]: {quantity} is (nan|inf|1e\+300)", shown.stderr
    )
    assert "Traceback" not in shown.stderr
    folder = only_run(tmp_path)
    if (folder / "model.pt").exists():
        for arrays in params_of(folder).values():
            assert all(np.isfinite(x).all() for x in arrays), "the last good model stays"
    assert (folder / "checkpoint" / "epoch1.json").exists() == ("epoch 1" in shown.stderr)


@pytest.mark.parametrize("script", ["ppo_torch", "ppo_tf1", "td3_torch", "sac_tf1"])
def test_a_changed_network_is_noticed(script, tmp_path):
    source = (ROOT / f"{script}.py").read_text()
    changed = source.replace(", Tanh()]", ", nn.ReLU()]").replace(
        "tf.tanh(tf.mat", "tf.nn.relu(tf.mat"
    )
    if changed == source:
        changed = source.replace("nn.ReLU(inplace=True)", "nn.Tanh()").replace(
            "tf.nn.relu(", "tf.tanh("
        )
    source = changed
    (tmp_path / f"{script}.py").write_text(source)
    shutil.copytree(ROOT / "common", tmp_path / "common")
    argv = SHORT + SHORT_OFF_POLICY * (script in OFF_POLICY_SCRIPTS)
    run = start(f"{script}.py", *argv, cwd=tmp_path)
    assert run.returncode == 2
    assert re.search("(dist_numpy and pi.dist|pi_numpy and pi) disagree", run.stderr)


def test_logger_is_quiet_without_a_terminal_and_alive_on_one(tmp_path):
    import os
    import pty
    import subprocess
    import sys

    longer = "--env-id Pendulum-v1 --epochs 2 --steps-per-epoch 8000 --train-pi-iters 1".split()
    command = [sys.executable, "ppo_torch.py", *longer, "--data-dir", str(tmp_path)]
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


ODD_OBSERVATIONS = "DictObs TupleObs DiscreteObs ImageObs ScalarObs Float64Obs WideObs".split()
ODD_ACTIONS = "MatrixAction Float64Action AsymmetricAction".split()
ODD_ON_POLICY = "DiscreteStart SmallDiscrete UnboundedAction".split()


@pytest.mark.parametrize("script", SCRIPTS)
def test_odd_spaces(script, tmp_path):
    settings = dict(epochs=2, steps_per_epoch=60, hidden_sizes=(8,))
    if script in OFF_POLICY_SCRIPTS:
        settings |= dict(start_steps=20, update_after=40, update_every=10, batch_size=32)
        settings |= dict(replay_size=100)
    if script in ("ppo_torch", "sac_torch"):
        names = ODD_OBSERVATIONS + ODD_ACTIONS
    else:  # they share the code that makes environments
        names = ["DictObs", "AsymmetricAction"]
    for name in names + ODD_ON_POLICY * (script in ON_POLICY_SCRIPTS):
        table = progress(train(script, tmp_path, env_id=f"envs:{name}-v0", **settings))
        assert list(table["EpLen"]) == [20, 20]
        assert np.isfinite(table.to_numpy()).all()


def test_observations_changed_in_place_are_kept(tmp_path):
    from record import record

    module = importlib.import_module("vpg_torch")
    args = module.Args(env_id="envs:InPlace-v0", epochs=1, steps_per_epoch=20)
    args.data_dir = str(tmp_path)
    o = record("vpg_torch", args).batches[0][0]
    np.testing.assert_array_equal(o[:, 0], [*range(10), *range(10)])


def test_max_ep_len_cuts_and_bootstraps(tmp_path):
    folder = train("ppo_torch", tmp_path, env_id="Pendulum-v1", epochs=1, max_ep_len=50)
    assert progress(folder)["EpLen"][0] == 50
    folder = train("ppo_torch", tmp_path, env_id="Pendulum-v1", epochs=1, max_ep_len=400, seed=1)
    assert progress(folder)["EpLen"][0] == 400
