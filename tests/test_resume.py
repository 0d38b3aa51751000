"""Killed at any instant and resumed, a run ends as if nothing had happened; or it says why not."""

import contextlib
import fcntl
import importlib
import itertools
import json
import os
import pickle
import random
import re
import shutil
import signal
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from helpers import (
    OFF_POLICY_SCRIPTS,
    SCRIPTS,
    as_flags,
    assert_same,
    brief,
    files_in,
    only_run,
    outcome,
    popen,
    progress,
    start,
    train,
    trained,
)

import common.checkpoint
import common.run
from common.errors import SidespinError

# Twelve epochs of about a tenth of a second; the replay buffer of off-policy scripts wraps.
SHORT = dict(env_id="Hopper-v4", epochs=12, steps_per_epoch=120, hidden_sizes=(8,))
SHORT_ON_POLICY = dict(train_v_iters=4, batch_size=40)
SHORT_ON_POLICY |= dict(norm=True, vf_lam=0.9, decay=True, ortho=True)
SHORT_OFF_POLICY = dict(start_steps=120, update_after=120, update_every=40, batch_size=16)
SHORT_OFF_POLICY |= dict(replay_size=250, num_test_episodes=1)


def short(script, **kwargs):
    """Return the settings of a short run of a script."""
    own = SHORT_OFF_POLICY if script in OFF_POLICY_SCRIPTS else SHORT_ON_POLICY
    return {**SHORT, **own, **kwargs}


def tiny(script, **kwargs):
    """Return the settings of runs that tests make many of; epochs end in the middle of episodes."""
    own = dict(steps_per_epoch=40, max_ep_len=15, hidden_sizes=(4,))
    if script in OFF_POLICY_SCRIPTS:
        own |= dict(start_steps=20, update_after=20, update_every=20, replay_size=90)
        own |= dict(num_test_episodes=1)
    elif "ppo" in script:
        own |= dict(train_pi_iters=3)
    return brief(script, **own, **kwargs)


def launch(script, settings, data_dir, *flags, ranks=1):
    words = [*as_flags(**settings), *flags, "--data-dir", data_dir]
    return popen(f"{script}.py", *words, ranks=ranks, warm=True)


def ranks_of(process, data_dir):
    """Return the process ids of a job's ranks."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
        except OSError:  # it has just ended
            continue
        if str(data_dir) in words and "python" in words[0]:
            found.append(int(path.parent.name))
    return found or [process.pid]


def run_with_kills(script, settings, data_dir, kills, ranks=1):
    """Run to the end in spite of SIGKILLs, one to a random rank at each random instant."""
    rng, hits = random.Random(script), 0
    while True:
        process = launch(script, settings, data_dir, "--resume", ranks=ranks)
        if hits < kills:
            if rng.random() < 0.8:  # while it trains; else it may not even have started
                epochs = (line for line in process.stdout if "| " in line and " Epoch " in line)
                next(itertools.islice(epochs, rng.randrange(12 // kills), None), None)
            time.sleep(rng.uniform(0, 0.2))
            victim = rng.choice(ranks_of(process, data_dir))
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(victim, signal.SIGKILL)
                hits += process.poll() is None or process.returncode != 0
        began = time.time()
        _, err = process.communicate(timeout=100)
        if process.returncode == 0:
            return hits
        assert hits <= kills, err
        assert time.time() - began < 10, "all ranks end soon"
        assert "Traceback" not in err


@pytest.mark.parametrize(
    ("script", "kills"), [("ppo_torch", 5), ("sac_torch", 5), ("ppo_tf1", 1), ("sac_tf1", 2)]
)
def test_killed_and_resumed(script, kills, tmp_path):
    unbroken = train(script, tmp_path / "a", xla=True, **short(script))
    assert run_with_kills(script, short(script), tmp_path / "b", kills) >= 1
    assert_same(unbroken, only_run(tmp_path / "b"))


@pytest.mark.parametrize(("script", "kills"), [("ppo_torch", 3), ("td3_torch", 3), ("sac_tf1", 1)])
def test_killed_and_resumed_on_two_ranks(script, kills, tmp_path):
    settings = short(script, save_freq=2)
    whole = launch(script, settings, tmp_path / "a", ranks=2)
    assert whole.communicate()[1] == ""
    assert run_with_kills(script, settings, tmp_path / "b", kills, ranks=2) >= 1
    assert_same(only_run(tmp_path / "a"), only_run(tmp_path / "b"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_one_epoch_and_one_more_are_two(script, tmp_path):
    train(script, tmp_path, xla=True, **brief(script, epochs=1))
    folder = train(script, tmp_path, xla=True, resume=True, **brief(script))
    assert_same(folder, trained(script))


def test_on_other_threads_and_under_another_name_it_is_the_same_run(tmp_path):
    """What does not change the numbers may differ; the folder may be moved."""
    folder = train("ppo_torch", tmp_path, **brief("ppo_torch", epochs=1))
    moved = tmp_path / "elsewhere" / "idea" / "idea_s7"
    shutil.copytree(folder, moved)
    options = dict(exp_name="idea", threads=os.cpu_count(), save_freq=2, keep_models=True)
    train("ppo_torch", tmp_path / "elsewhere", resume=True, **brief("ppo_torch"), **options)
    assert outcome(moved)["rows"] == outcome(trained("ppo_torch"))["rows"]


class Killed(BaseException):
    """Stands for a kill: nothing may handle it."""


@pytest.mark.parametrize("script", ["ppo_torch", "sac_torch"])
def test_killed_before_and_after_every_rename(script, tmp_path, monkeypatch):
    """The state of the disk after each step of three epochs' saving is one that resumes."""
    settings = tiny(script, epochs=3)
    unbroken = train(script, tmp_path / "a", **settings)
    replace, killed = os.replace, 0
    for instant in itertools.count():
        calls = itertools.count()

        def replace_or_die(old, new, calls=calls, instant=instant):
            call = next(calls)
            if instant == 2 * call:
                raise Killed
            replace(old, new)
            if instant == 2 * call + 1:
                raise Killed

        name = str(instant)
        monkeypatch.setattr(common.run.os, "replace", replace_or_die)
        try:
            train(script, tmp_path, exp_name=name, **settings)
            break
        except Killed:
            killed += 1
        monkeypatch.setattr(common.run.os, "replace", replace)
        resumed = train(script, tmp_path, exp_name=name, resume=True, **settings)
        assert outcome(resumed)["rows"] == outcome(unbroken)["rows"]
        assert outcome(resumed)["model.pt"] == outcome(unbroken)["model.pt"]
        assert outcome(resumed).keys() == outcome(unbroken).keys(), "no file more or less"
    assert killed >= 2 * 3 * 3, "config, then model, part and index of each epoch, twice"


@pytest.mark.parametrize("script", ["vpg_torch", "td3_torch", "ddpg_tf1"])
def test_longer_and_finished_runs(script, tmp_path, capsys):
    settings = tiny(script, epochs=6)
    unbroken = train(script, tmp_path / "a", **settings)
    for epochs, save_freq in ((2, 1), (3, 5), (6, 1)):
        changed = {**settings, "epochs": epochs, "save_freq": save_freq}
        folder = train(script, tmp_path / "b", resume=True, **changed)
        assert len(progress(folder)) == epochs
    one, two = outcome(unbroken), outcome(folder)
    assert one["rows"] == two["rows"]
    assert one["epoch6.rank0.npz"] == two["epoch6.rank0.npz"] or script in OFF_POLICY_SCRIPTS

    before = files_in(folder)
    capsys.readouterr()
    for epochs in (6, 4):
        train(script, tmp_path / "b", resume=True, **{**settings, "epochs": epochs})
        shown = capsys.readouterr().out.splitlines()[-1]
        assert "already finished after 6 epochs; to extend the run, choose a larger epochs" in shown
    assert before == files_in(folder)


def test_a_finished_run_with_decay_does_not_advise_what_is_refused(tmp_path, capsys):
    settings = tiny("ppo_torch", epochs=2, decay=True)
    train("ppo_torch", tmp_path, **settings)
    train("ppo_torch", tmp_path, resume=True, **settings)
    shown = capsys.readouterr().out.splitlines()[-1]
    assert shown.endswith("after 2 epochs; decay fixes epochs, so the run cannot be extended")


def test_tensorboard_shows_one_clean_curve(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = tiny("vpg_torch", epochs=3)
    folder = train("vpg_torch", tmp_path, **settings)
    with open(folder / "progress.txt", "a") as table:  # an epoch that was not saved, a half row
        table.write(re.sub(r"^2\b", "3", (folder / "progress.txt").read_text().splitlines()[-1]))
        table.write("\n4\t1.5")
    train("vpg_torch", tmp_path, resume=True, **{**settings, "epochs": 5})
    table = progress(folder)
    scalars = EventAccumulator(str(folder)).Reload().Scalars("episodes/AverageEpRet")
    assert [s.step for s in scalars] == list(table["TotalEnvInteracts"]) == [40, 80, 120, 160, 200]
    np.testing.assert_allclose([s.value for s in scalars], table["AverageEpRet"], rtol=1e-6)
    assert (np.diff(table["Time"]) > 0).all(), "time goes on where it was"
    times = [s.wall_time for s in scalars]
    assert times == sorted(times)


@pytest.mark.parametrize("script", ["ppo_torch", "sac_tf1"])
def test_resuming_as_another_run_is_an_error(script, tmp_path):
    folder = tmp_path / trained(script).parent.name / trained(script).name
    shutil.copytree(trained(script), folder)
    before = files_in(folder)
    other = dict(epochs=3, gamma=0.9, hidden_sizes=(4, 4))
    with pytest.raises(SidespinError) as refused:
        train(script, tmp_path, resume=True, **brief(script, **other))
    differences = "hidden_sizes [4, 4] (was [8]), gamma 0.9 (was 0.99)"
    assert str(refused.value) == f"cannot resume {folder} with different settings: {differences}"

    run = launch(script, brief(script, epochs=3), tmp_path, "--resume", ranks=2)
    shown = run.communicate()[1]
    assert run.returncode == 2
    assert re.fullmatch(r".*cannot resume .* with different settings: ranks 2 \(was 1\)\n", shown)
    assert before == files_in(folder)


def test_only_one_process_in_a_folder(tmp_path):
    settings = tiny("vpg_torch", epochs=1)
    folder = train("vpg_torch", tmp_path, **settings)
    with open(folder / "progress.txt") as held:  # as a run under way does
        fcntl.flock(held, fcntl.LOCK_EX)
        for flag in ("resume", "overwrite"):
            with pytest.raises(SidespinError, match="another process is training in"):
                train("vpg_torch", tmp_path, **{flag: True}, **settings)
    train("vpg_torch", tmp_path, resume=True, **settings)


def damages(data):
    """Yield damaged versions of a file's content."""
    for position in (0, len(data) // 3, len(data) // 2, len(data) - 1):
        yield data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]
    yield data[: len(data) // 2]
    yield b""
    yield None


@pytest.mark.parametrize("script", ["ppo_torch", "sac_torch"])
def test_damaged_checkpoints(script, tmp_path, capsys):
    settings = tiny(script, epochs=5)
    unbroken = outcome(train(script, tmp_path / "a", **settings))
    folder = train(script, tmp_path / "b", **{**settings, "epochs": 4})
    pristine = tmp_path / "pristine"
    shutil.copytree(folder, pristine)
    names = [p.name for p in (folder / "checkpoint").iterdir()] + ["../progress.txt"]
    assert len(names) == 5 if script == "ppo_torch" else len(names) > 6
    for name in names:
        data = (pristine / "checkpoint" / name).read_bytes()
        for damaged in damages(data):
            shutil.rmtree(folder)
            shutil.copytree(pristine, folder)
            file = folder / "checkpoint" / name
            file.unlink() if damaged is None else file.write_bytes(damaged)
            capsys.readouterr()
            try:
                train(script, tmp_path / "b", resume=True, **settings)
            except SidespinError as error:
                assert "replay" in name or "progress" in name, "both checkpoints need it"
                assert error.exit_code == 2
                assert re.search("is (damaged|missing)", str(error))
                continue
            assert outcome(folder)["rows"] == unbroken["rows"]
            if name.startswith("epoch4") and (damaged is not None or "rank" in name):
                shown = capsys.readouterr().err
                assert re.search("is (damaged|missing); using the checkpoint after 3 epochs", shown)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    settings = tiny("ppo_torch", epochs=2)
    mine = train("ppo_torch", tmp_path, **settings)
    other = train("ppo_torch", tmp_path, **{**settings, "seed": 1})
    shutil.rmtree(mine / "checkpoint")
    shutil.copytree(other / "checkpoint", mine / "checkpoint")
    with pytest.raises(SidespinError, match=r"epoch2\.json belongs to another run"):
        train("ppo_torch", tmp_path, resume=True, **{**settings, "epochs": 3})


def test_a_changed_network_does_not_resume(tmp_path, monkeypatch):
    settings = tiny("ppo_torch", epochs=2)
    train("ppo_torch", tmp_path, **settings)
    module = importlib.import_module("ppo_torch")
    mlp = module.mlp
    monkeypatch.setattr(module, "mlp", lambda sizes, rng: mlp([*sizes[:-1], 9, sizes[-1]], rng))
    with pytest.raises(SidespinError, match="does not match this script's networks or optimizers"):
        train("ppo_torch", tmp_path, resume=True, **{**settings, "epochs": 3})


def test_a_hostile_model_is_refused(tmp_path):
    from common.torch_utils import load_model

    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    for content in (pickle.dumps(Hostile()), b"", b"\x80\x02garbage", None):
        if content is not None:
            (tmp_path / "model.pt").write_bytes(content)
        else:
            (tmp_path / "model.pt").unlink()
        with pytest.raises(SidespinError, match=r"cannot read .*model.pt"):
            load_model(tmp_path / "model.pt")
    assert not (tmp_path / "executed").exists()
    folder = train("vpg_torch", tmp_path, **tiny("vpg_torch", epochs=1))
    assert next(iter(load_model(folder / "model.pt"))) == "pi.log_std"


@pytest.mark.parametrize("script", ["ppo_torch", "sac_torch", "vpg_tf1"])
def test_what_does_not_replay_begins_a_new_episode(script, tmp_path, capsys):
    settings = short(script, env_id="envs:Strays-v0", epochs=3, steps_per_epoch=250)
    settings.pop("decay", None)  # such a run could not be extended
    train(script, tmp_path, **settings)
    assert capsys.readouterr().err == ""
    folder = train(script, tmp_path, resume=True, **{**settings, "epochs": 4})
    warning = r"(\S+: )?warning: the environment does not replay exactly: a new episode begins\n"
    assert re.fullmatch(warning, capsys.readouterr().err)
    table = progress(folder)
    assert len(table) == 4
    assert list(table["EpLen"]) == [20, 20, 20, 20], "the broken episode is not counted"


def test_a_damaged_table_is_noticed(tmp_path, capsys):
    settings = tiny("vpg_torch", epochs=4)
    folder = train("vpg_torch", tmp_path, **{**settings, "epochs": 3})
    text = (folder / "progress.txt").read_text()
    steps = text.index("40")
    damaged = {
        "newline lost": text[:-1],
        "cut": text[:-5],
        "header": text.replace("AverageEpRet", "AverageEpRft"),
        "digit": text[:steps] + "50" + text[steps + 2 :],
        "a row less": "\n".join(text.split("\n")[:2]) + "\n",
        "a time": re.sub(r"\t([\d.]+)\t([\d.]+)\n", r"\tx\t\2\n", text),
    }
    for damage in damaged.values():
        (folder / "progress.txt").write_text(damage)
        capsys.readouterr()
        try:
            train("vpg_torch", tmp_path, resume=True, **settings)
        except SidespinError as error:
            assert re.search("progress.txt is damaged", str(error))
        else:  # only the last row was, which the checkpoint before does not have
            assert "using the checkpoint after 2 epochs" in capsys.readouterr().err
            assert len(progress(folder)) == 4
            train("vpg_torch", tmp_path, overwrite=True, **{**settings, "epochs": 3})


def test_a_checkpoint_writes_only_what_is_new(tmp_path, monkeypatch):
    written = []
    write_file = common.checkpoint.write_file

    def counting(path, data):
        written.append((path.name, len(data)))
        write_file(path, data)

    monkeypatch.setattr(common.checkpoint, "write_file", counting)
    folder = train("ddpg_torch", tmp_path, **short("ddpg_torch", epochs=6))
    replay = [(name, size) for name, size in written if name.startswith("replay")]
    names = [f"replay.rank0.{120 * i}-{120 * (i + 1)}.npz" for i in range(6)]
    assert [name for name, _ in replay] == names
    transition = 4 * (11 + 3 + 1 + 11 + 1)
    assert all(120 * transition < size < 120 * transition + 2000 for _, size in replay)
    # 250 transitions: the last checkpoint needs those from 470, the one before from 350
    kept = sorted(p.name for p in (folder / "checkpoint").glob("replay*"))
    assert kept == sorted(names[2:])
    shutil.rmtree(folder)
    # More new transitions in one save than the buffer holds
    settings = {**short("ddpg_torch", epochs=6), "save_freq": 3}
    folder = train("ddpg_torch", tmp_path, **settings)
    kept = sorted(p.name for p in (folder / "checkpoint").glob("replay*"))
    assert kept == ["replay.rank0.110-360.npz", "replay.rank0.470-720.npz"]


def test_resume_of_nothing_is_a_start(tmp_path, capsys):
    settings = tiny("vpg_torch", epochs=1)
    folder = train("vpg_torch", tmp_path, resume=True, **settings)
    assert "no checkpoint yet, starting" in capsys.readouterr().out
    assert_same(folder, train("vpg_torch", tmp_path / "b", **settings))


def test_a_run_of_another_simulator_says_so(tmp_path):
    """In processes of their own: there, MuJoCo is not imported before the environment is made."""
    settings = tiny("vpg_torch", epochs=1, env_id="Hopper-v4")
    words = ["vpg_torch.py", *as_flags(**settings), "--data-dir", tmp_path]
    assert start(*words).returncode == 0
    path = only_run(tmp_path) / "config.json"
    config = json.loads(path.read_text())
    assert config["versions"]["mujoco"] == version("mujoco")
    config["versions"]["mujoco"] = "3.0.1"
    path.write_text(json.dumps(config))
    resumed = start(*words, "--resume", "--epochs", 2)
    assert resumed.returncode == 0
    warning = "results may differ from an unbroken run: this one began with mujoco 3.0.1"
    assert resumed.stderr == f"vpg_torch.py: warning: {warning}\n"


def test_a_run_without_its_checkpoints_is_kept(tmp_path):
    settings = tiny("vpg_torch", epochs=4)
    folder = train("vpg_torch", tmp_path, **settings)
    shutil.rmtree(folder / "checkpoint")
    table = (folder / "progress.txt").read_text()
    with pytest.raises(SidespinError, match="has epochs but no checkpoint: use overwrite to start"):
        train("vpg_torch", tmp_path, resume=True, **settings)
    assert (folder / "progress.txt").read_text() == table
