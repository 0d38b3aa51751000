"""Killed at any instant and resumed, a run ends as if nothing had happened; or it says why not."""

import copy
import fcntl
import importlib
import itertools
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import (
    OFF_POLICY_SCRIPTS,
    ROOT,
    SCRIPTS,
    as_flags,
    assert_same,
    files_in,
    only_run,
    outcome,
    popen,
    progress,
    start,
    train,
)

import common.checkpoint
import common.run
from common.checkpoint import pack, unpack
from common.env import make_env
from common.errors import SidespinError

# Twelve epochs of about a tenth of a second; the replay buffer of off-policy scripts wraps.
SHORT = dict(env_id="Hopper-v4", epochs=12, steps_per_epoch=240, hidden_sizes=(16,))
SHORT_ON_POLICY = dict(train_v_iters=4)
SHORT_OFF_POLICY = dict(start_steps=240, update_after=240, update_every=12, batch_size=32)
SHORT_OFF_POLICY |= dict(replay_size=500, num_test_episodes=1)
# For tests of many runs: a quarter of that
BRIEF = dict(steps_per_epoch=60)
BRIEF_OFF_POLICY = dict(start_steps=60, update_after=60, batch_size=16, replay_size=130)


def short(script, **kwargs):
    """Return the settings of a short run of a script."""
    own = SHORT_OFF_POLICY if script in OFF_POLICY_SCRIPTS else SHORT_ON_POLICY
    return {**SHORT, **own, **kwargs}


def brief(script, **kwargs):
    """Return the settings of a run for a moment only."""
    own = BRIEF_OFF_POLICY if script in OFF_POLICY_SCRIPTS else {}
    return short(script, **BRIEF, **own, **kwargs)


def ranks_of(process, data_dir):
    """Return the process ids of a job's ranks."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
        except OSError:  # it has just ended
            continue
        if str(data_dir) in words and "python" in words[0]:  # what a rank was started by
            found.append(int(path.parent.name))
    return found or [process.pid]


def launch(script, settings, data_dir, *flags, ranks=1):
    """Start a script that has its libraries in memory already."""
    words = [*as_flags(**settings), *flags, "--data-dir", data_dir]
    return popen(f"{script}.py", *words, ranks=ranks, warm=True)


def run_with_kills(script, settings, data_dir, kills, seed, ranks=1):
    """Run to the end in spite of SIGKILLs, one to a random rank at each random instant."""
    rng, hits = random.Random(seed), 0
    while True:
        process = launch(script, settings, data_dir, "--resume", ranks=ranks)
        if hits < kills:
            if rng.random() < 0.8:
                process.stdout.readline()  # it has begun; else it may not even have started
            time.sleep(rng.uniform(0, 0.6))
            victim = rng.choice(ranks_of(process, data_dir))
            running = process.poll() is None
            os.kill(victim, signal.SIGKILL)
            hits += running
        began = time.time()
        _, err = process.communicate(timeout=100)
        if process.returncode == 0:
            return hits
        assert hits <= kills, err
        assert time.time() - began < 10, "all ranks end soon"
        assert "Traceback" not in err


@pytest.mark.parametrize(
    ("script", "kills"),
    [(s, 5 if s in ("ppo_torch", "sac_torch") else 2 if s == "sac_tf1" else 1) for s in SCRIPTS],
)
def test_killed_and_resumed(script, kills, tmp_path):
    settings = short(script)
    unbroken = train(script, tmp_path / "a", **settings)
    assert run_with_kills(script, settings, tmp_path / "b", kills, seed=script) >= 1
    assert_same(unbroken, only_run(tmp_path / "b"))


@pytest.mark.parametrize(("script", "kills"), [("ppo_torch", 3), ("sac_torch", 3), ("td3_tf1", 1)])
def test_killed_and_resumed_on_two_ranks(script, kills, tmp_path):
    settings = short(script, save_freq=2)
    whole = launch(script, settings, tmp_path / "a", ranks=2)
    assert whole.communicate()[1] == ""
    assert run_with_kills(script, settings, tmp_path / "b", kills, seed=1, ranks=2) >= 1
    assert_same(only_run(tmp_path / "a"), only_run(tmp_path / "b"))


class Killed(BaseException):
    """Stands for a kill: nothing may handle it."""


@pytest.mark.parametrize("script", ["ppo_torch", "sac_torch"])
def test_killed_before_and_after_every_rename(script, tmp_path, monkeypatch):
    """The state of the disk after each step of three epochs' saving is one that resumes."""
    settings = brief(script, epochs=3)
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
    assert killed >= 2 * 3 * 3, "config, then model, part and index of each epoch, twice"


@pytest.mark.parametrize("script", ["vpg_torch", "td3_torch", "sac_tf1"])
def test_longer_and_finished_runs(script, tmp_path, capsys):
    settings = brief(script, epochs=6)
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
        assert "finished, 6 epochs are done; to continue, choose a larger epochs" in shown
    assert before == files_in(folder)


def test_tensorboard_shows_one_clean_curve(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = short("vpg_torch", epochs=3)
    folder = train("vpg_torch", tmp_path, **settings)
    with open(folder / "progress.txt", "a") as table:  # an epoch that was not saved, a half row
        table.write(re.sub(r"^2\b", "3", (folder / "progress.txt").read_text().splitlines()[-1]))
        table.write("\n4\t1.5")
    train("vpg_torch", tmp_path, resume=True, **{**settings, "epochs": 5})
    table = progress(folder)
    scalars = EventAccumulator(str(folder)).Reload().Scalars("episodes/AverageEpRet")
    assert (
        [s.step for s in scalars] == list(table["TotalEnvInteracts"]) == [240, 480, 720, 960, 1200]
    )
    np.testing.assert_allclose([s.value for s in scalars], table["AverageEpRet"], rtol=1e-6)
    assert (np.diff(table["Time"]) > 0).all(), "time goes on where it was"
    times = [s.wall_time for s in scalars]
    assert times == sorted(times)


@pytest.mark.parametrize("script", ["ppo_torch", "sac_tf1"])
def test_resuming_as_another_run_is_an_error(script, tmp_path, capsys):
    settings = short(script, epochs=2)
    folder = train(script, tmp_path, **settings)
    before = files_in(folder)
    other = {**settings, "epochs": 3, "gamma": 0.9, "hidden_sizes": (8, 8), "resume": True}
    differences = r"gamma 0.9, then 0.99.*hidden_sizes|hidden_sizes \[8, 8\], then \[16\].*gamma"
    with pytest.raises(SidespinError, match=differences):
        train(script, tmp_path, **other)

    run = launch(script, {**settings, "epochs": 3}, tmp_path, "--resume", ranks=2)
    shown = run.communicate()[1]
    assert run.returncode == 2
    assert re.fullmatch(r".*cannot resume .* with other settings: now ranks 2, then 1\n", shown)
    assert before == files_in(folder)


def test_only_one_process_in_a_folder(tmp_path):
    settings = short("vpg_torch", epochs=1)
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
    settings = brief(script, epochs=5)
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
    settings = short("ppo_torch", epochs=2)
    mine = train("ppo_torch", tmp_path, **settings)
    other = train("ppo_torch", tmp_path, **settings, seed=1)
    shutil.rmtree(mine / "checkpoint")
    shutil.copytree(other / "checkpoint", mine / "checkpoint")
    with pytest.raises(SidespinError, match=r"epoch2\.json belongs to another run"):
        train("ppo_torch", tmp_path, resume=True, **{**settings, "epochs": 3})


def test_a_changed_network_does_not_resume(tmp_path, monkeypatch):
    settings = short("ppo_torch", epochs=2)
    train("ppo_torch", tmp_path, **settings)
    module = importlib.import_module("ppo_torch")
    mlp = module.mlp
    monkeypatch.setattr(module, "mlp", lambda sizes, rng: mlp([*sizes[:-1], 9, sizes[-1]], rng))
    with pytest.raises(SidespinError, match="holds other networks or optimizers than this script"):
        train("ppo_torch", tmp_path, resume=True, **{**settings, "epochs": 3})


def test_a_hostile_model_is_refused(tmp_path):
    import pickle

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
    folder = train("vpg_torch", tmp_path, **short("vpg_torch", epochs=1))
    assert next(iter(load_model(folder / "model.pt"))) == "pi.log_std"


@pytest.mark.parametrize("script", ["ppo_torch", "sac_tf1"])
def test_what_does_not_replay_begins_a_new_episode(script, tmp_path, capsys):
    settings = short(script, env_id="envs:Strays-v0", epochs=3, steps_per_epoch=250)
    train(script, tmp_path, **settings)
    assert capsys.readouterr().err == ""
    folder = train(script, tmp_path, resume=True, **{**settings, "epochs": 4})
    warning = r"(\S+: )?warning: the environment does not replay exactly: a new episode begins\n"
    assert re.fullmatch(warning, capsys.readouterr().err)
    table = progress(folder)
    assert len(table) == 4
    assert list(table["EpLen"]) == [20, 20, 20, 20], "the broken episode is not counted"


@pytest.mark.parametrize(
    "env_id",
    """Hopper-v4 HalfCheetah-v4 Ant-v4 Walker2d-v4 Pendulum-v1 CartPole-v1 Acrobot-v1
    MountainCarContinuous-v0 envs:Mixed-v0 envs:Private-v0
    envs:DiscreteStart-v0 envs:MatrixAction-v0""".split(),
)
def test_environments_replay_to_the_bit(env_id):
    rng = np.random.default_rng(0)
    env, fresh = (make_env(env_id) for _ in range(2))
    actions = copy.deepcopy(env.action_space)  # with a generator that is not the environment's
    actions.seed(0)
    fresh.reset(seed=5)  # a resumed run resets, too, before it looks for a checkpoint
    env.reset(seed=3)
    for episode in range(3):
        for _ in range(rng.integers(2, 15)):
            _, _, d, truncated, _ = env.step(actions.sample())
            if d or truncated:
                break
        saved = unpack(pack(env.episode()))
        assert fresh.replay(saved)
        assert fresh.o.tobytes() == env.o.tobytes()
        assert len(fresh.actions) == len(env.actions)
        a = actions.sample()
        for x, y in zip(env.step(a)[:4], fresh.step(a)[:4], strict=True):
            np.testing.assert_array_equal(x, y)
        assert env.reset()[0].tobytes() == fresh.reset()[0].tobytes()
    saved["o"] = saved["o"] + 1
    assert not fresh.replay(saved)


@pytest.mark.parametrize("script", ["ppo_torch", "sac_torch"])
def test_environments_with_a_generator_of_their_own(script, tmp_path, capsys):
    settings = brief(script, env_id="envs:Private-v0", epochs=6)
    unbroken = train(script, tmp_path / "a", **settings)
    for epochs in (2, 5, 6):
        folder = train(script, tmp_path / "b", resume=True, **{**settings, "epochs": epochs})
    assert_same(unbroken, folder)
    assert capsys.readouterr().err == ""


def test_a_damaged_table_is_noticed(tmp_path, capsys):
    settings = brief("vpg_torch", epochs=4)
    folder = train("vpg_torch", tmp_path, **{**settings, "epochs": 3})
    text = (folder / "progress.txt").read_text()
    steps = text.index("60")
    damaged = {
        "newline lost": text[:-1],
        "cut": text[:-5],
        "header": text.replace("AverageEpRet", "AverageEpRft"),
        "digit": text[:steps] + "70" + text[steps + 2 :],
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


@pytest.mark.parametrize("script", ["vpg_torch", "vpg_tf1"])
@pytest.mark.parametrize("what", ["", "checkpoint"])
def test_what_vanishes_while_training_stops_the_run(script, what, tmp_path):
    process = launch(script, short(script, epochs=10_000), tmp_path)
    while "TotalEnvInteracts |          720" not in process.stdout.readline():
        pass
    os.rename(only_run(tmp_path) / what, tmp_path / "gone")  # at once, unlike rm
    _, shown = process.communicate(timeout=30)
    assert process.returncode == 1
    assert re.fullmatch(r".*error: stopped after \d+ epochs: cannot write to .*\n", shown)


def test_streams_that_nobody_reads(tmp_path):
    words = [sys.executable, "vpg_torch.py", *as_flags(**brief("vpg_torch", epochs=1000))]
    words += ["--data-dir", str(tmp_path)]
    how = dict(shell=True, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    run = subprocess.run(f"{shlex.join(words)} > /dev/full", **how)
    assert run.returncode == 1
    assert re.match(r"vpg_torch.py: error: cannot write to stdout: No space", run.stderr)
    assert len(run.stderr.splitlines()) == 1
    closed = f"{shlex.join(words)} --overwrite --epochs 1 >&- 2>&-"
    assert subprocess.run(closed, **how).returncode == 0
    assert len(progress(only_run(tmp_path))) == 1

    process = launch("vpg_torch", brief("vpg_torch", epochs=10_000), tmp_path / "blocked")
    deadline = time.time() + 60
    sizes = [-1]
    while time.time() < deadline and (len(sizes) < 4 or sizes[-1] != sizes[-4] or sizes[-1] == 0):
        time.sleep(0.5)  # until the pipe is full
        tables = tmp_path.glob("blocked/*/*/progress.txt")
        sizes.append(sum(table.stat().st_size for table in tables))
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 128 + signal.SIGTERM


def test_a_checkpoint_writes_only_what_is_new(tmp_path, monkeypatch):
    written = []
    write_file = common.checkpoint.write_file

    def counting(path, data):
        written.append((path.name, len(data)))
        write_file(path, data)

    monkeypatch.setattr(common.checkpoint, "write_file", counting)
    folder = train("ddpg_torch", tmp_path, **short("ddpg_torch", epochs=6))
    replay = [(name, size) for name, size in written if name.startswith("replay")]
    names = [f"replay.rank0.{240 * i}-{240 * (i + 1)}.npz" for i in range(6)]
    assert [name for name, _ in replay] == names
    transition = 4 * (11 + 3 + 1 + 11 + 1)
    assert all(240 * transition < size < 240 * transition + 2000 for _, size in replay)
    # 500 transitions: the last checkpoint needs those from 940, the one before from 700
    kept = sorted(p.name for p in (folder / "checkpoint").glob("replay*"))
    assert kept == sorted(names[2:])
    shutil.rmtree(folder)
    # More new transitions in one save than the buffer holds
    settings = {**short("ddpg_torch", epochs=6), "save_freq": 3}
    folder = train("ddpg_torch", tmp_path, **settings)
    kept = sorted(p.name for p in (folder / "checkpoint").glob("replay*"))
    assert kept == ["replay.rank0.220-720.npz", "replay.rank0.940-1440.npz"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_interrupt_says_how_to_resume(number, ranks, tmp_path):
    settings = short("ppo_torch", epochs=1000)
    process = launch("ppo_torch", settings, tmp_path, ranks=ranks)
    while "Epoch" not in process.stdout.readline():
        pass
    began = time.time()
    process.send_signal(number)
    _, shown = process.communicate(timeout=30)
    assert time.time() - began < 10
    assert process.returncode == 128 + number
    words = [f"mpirun -np {ranks} "] * (ranks > 1) + ["python ppo_torch.py --env-id Hopper-v4 "]
    words += [f"--data-dir {tmp_path} --resume"]
    lines = [line for line in shown.splitlines() if "mpiexec" not in line]  # its own two on Ctrl-C
    assert len(lines) == 1
    assert re.match(r"ppo_torch.py: interrupted after \d+ epochs?; to resume: ", lines[0])
    assert all(word in lines[0] for word in words)
    assert not list(tmp_path.rglob("*.new"))
    done = len(list(progress(only_run(tmp_path))["Epoch"]))
    resumed = launch("ppo_torch", {**settings, "epochs": done}, tmp_path, "--resume", ranks=ranks)
    assert resumed.wait() == 0


@pytest.mark.parametrize("script", ["ppo_torch", "ppo_tf1"])
def test_a_full_disk_leaves_the_last_checkpoint(script, tmp_path):
    """A limit on the size of files, raised after MPI has made its own, stands for a full disk."""
    settings = short(script, hidden_sizes=(64, 64), epochs=4)
    train(script, tmp_path, **{**settings, "epochs": 2})
    words = [f"{script}.py", *as_flags(**settings), "--data-dir", str(tmp_path), "--resume"]
    code = f"""
import resource, runpy, sys
import common.mpi
common.mpi.comm()
sys.argv = {words}
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
runpy.run_path({f"{script}.py"!r}, run_name="__main__")
"""
    run = start("-c", code)
    assert run.returncode == 1
    assert len(run.stderr.splitlines()) == 1
    stopped = "error: stopped after [23] epochs: cannot write to .*: .*; to resume: "
    assert re.search(stopped, run.stderr)
    folder = only_run(tmp_path)
    assert sorted(p.name for p in (folder / "checkpoint").glob("*.json")) == [
        "epoch1.json",
        "epoch2.json",
    ]
    assert not list(folder.rglob("*.new"))
    unbroken = train(script, tmp_path / "a", **settings)
    resumed = train(script, tmp_path, resume=True, **settings)
    assert_same(unbroken, resumed)


def test_a_rank_that_exits_alone_ends_the_job(tmp_path):
    settings = dict(env_id="envs:ExitsAlone-v0", steps_per_epoch=200)
    process = launch("ppo_torch", settings, tmp_path, ranks=2)
    while "Epoch" not in process.stdout.readline():
        pass
    began = time.time()
    _, shown = process.communicate(timeout=30)
    assert time.time() - began < 10
    assert process.returncode == 1
    assert re.search("error: rank 1 has exited alone; to resume: mpirun -np 2 python", shown)


@pytest.mark.parametrize("size", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_a_launcher_of_another_mpi_is_noticed(size, monkeypatch):
    from common.launch import LAUNCHERS, check_launcher

    monkeypatch.setenv(size, "4")
    monkeypatch.setenv(LAUNCHERS[size], "0")
    with pytest.raises(SidespinError, match="4 processes were started, but each thinks it is"):
        check_launcher()
    monkeypatch.setenv(LAUNCHERS[size], "3")
    with pytest.raises(SystemExit) as ended:
        check_launcher()
    assert ended.value.code == 2, "and says nothing: the first process does"


def test_resume_of_nothing_is_a_start(tmp_path, capsys):
    settings = short("vpg_torch", epochs=1)
    folder = train("vpg_torch", tmp_path, resume=True, **settings)
    assert "no checkpoint yet, starting" in capsys.readouterr().out
    assert_same(folder, train("vpg_torch", tmp_path / "b", **settings))


def test_a_run_without_its_checkpoints_is_kept(tmp_path):
    settings = short("vpg_torch", epochs=4)
    folder = train("vpg_torch", tmp_path, **settings)
    shutil.rmtree(folder / "checkpoint")
    table = (folder / "progress.txt").read_text()
    with pytest.raises(SidespinError, match="has epochs but no checkpoint: overwrite starts anew"):
        train("vpg_torch", tmp_path, resume=True, **settings)
    assert (folder / "progress.txt").read_text() == table
