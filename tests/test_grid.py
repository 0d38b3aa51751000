"""A grid: its names, what it refuses, and real runs that fail, are stopped, resumed or skipped."""

import contextlib
import fcntl
import itertools
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import hosts
import pandas as pd
import pytest
from helpers import (
    MPIRUN,
    ROOT,
    TIMES,
    as_flags,
    assert_same,
    files_in,
    popen,
    progress,
    refusal,
    start,
    train,
)

import grid
import vpg_torch
from common.errors import SidespinError
from common.run import Run
from grid import ExperimentGrid, Screen, valid_str

TINY_WORDS = "--epochs 3 --steps-per-epoch 100 --hidden-sizes 8 --train-v-iters 2".split()
SINGLE = "vpg_torch_CartPole-v1"  # the name of a single run's experiment, and of a grid's


def refused(words, monkeypatch, capsys):
    """Return the one sentence that a grid ends with before it starts anything."""
    return refusal("grid", grid.own_options_first(words), monkeypatch, capsys)


def run_grid(words, monkeypatch):
    """Call grid.py in this process; return its exit code."""
    monkeypatch.setattr("sys.argv", ["grid.py", *grid.own_options_first(words)])
    try:
        grid.main(grid.tyro.cli(grid.Args))
    except SystemExit as ended:
        return ended.code
    return 0


def names(*flags, name="x"):
    """Return the names of all variants of a grid."""
    g = ExperimentGrid(name)
    for words in flags:
        g.add(*words)
    return [g.variant_name(variant) for variant in g.variants()]


def processes(data_dir):
    """Return the ids of the processes that have the folder in their command."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            if str(data_dir) in path.read_bytes().decode().split("\0"):
                found.append(int(path.parent.name))
    return found


def wait_until(true, seconds=120):
    deadline = time.time() + seconds
    while not true():
        assert time.time() < deadline
        time.sleep(0.02)


def epochs(folder):
    with contextlib.suppress(OSError, pd.errors.EmptyDataError):
        return len(progress(folder))
    return 0


def read_all(terminal):
    """Return what was printed on a pseudo-terminal, once its other side is closed."""
    shown = b""
    with contextlib.suppress(OSError):
        while data := os.read(terminal, 10**6):
            shown += data
    return shown.decode()


def test_names_have_what_varies_but_the_seed():
    assert names(("seed", [0, 1])) == ["x", "x"]
    assert names(("gamma", 0.9), ("seed", 3)) == ["x"]
    assert names(("gamma", [0.9, 0.99])) == ["x_gam0-9", "x_gam0-99"]
    assert names(("clip-ratio", [0.1, 1e-5], "eps")) == ["x_eps0-1", "x_eps1e-05"]
    assert names(("hidden_sizes", [(64, 64), (32,)], "h")) == ["x_h64-64", "x_h32"]
    assert names(("pi_lr", [1, 2]), ("seed", [0, 1]), name="") == ["pi1", "pi1", "pi2", "pi2"]
    assert names(("gamma", [0.9], "G", True), ("epochs", [1, 2])) == ["x_g0-9_epo1", "x_g0-9_epo2"]
    assert names(("max_ep_len", [None, 10])) == ["x_maxnone", "x_max10"]


def test_the_environment_is_in_every_name():
    assert names(("env_id", "Hopper-v4")) == ["x_Hopper-v4"]
    assert names(("env_id", ["Hopper-v4", "a.b:C-v0"])) == ["x_Hopper-v4", "x_a.b-C-v0"]
    varied = names(("gamma", [0.9, 0.99]), ("env_id", ["Ant-v4"]))
    assert varied == ["x_Ant-v4_gam0-9", "x_Ant-v4_gam0-99"]
    assert names(("env_id", ["Ant-v4", "Hopper-v4"]), name="my-Ant-v4")[0] == "my-Ant-v4"
    g = ExperimentGrid("x")
    assert g.runs("vpg_torch")[0].name == "x_Hopper-v4", "which is the script's default"


@pytest.mark.parametrize("env_id", ["Walker2d-v4", "envs:Odd-v0"])
def test_names_are_those_of_a_single_run(env_id):
    g = ExperimentGrid()
    g.add("env_id", env_id)
    g.add("seed", [0, 7])
    args = [vpg_torch.Args(env_id=env_id, seed=seed) for seed in (0, 7)]
    expected = [Run(x, vpg_torch.__file__, ranks=1).folder for x in args]
    assert [run.folder for run in g.runs("vpg_torch")] == expected
    assert g.runs("ppo_torch")[0].name == expected[0].parent.name.replace("vpg", "ppo")


def test_names_of_flags_that_are_true_or_false():
    assert names(("autotune", [True, False])) == ["x_aut", "x"]
    assert names(("autotune", [True])) == ["x"]
    assert names(("autotune", True, "at", True)) == ["x_at"]
    assert names(("autotune", False, "at", True)) == ["x"]


def test_flags_with_the_same_first_letters_have_their_whole_name():
    pi, v = ("train_pi_iters", [1, 2]), ("train_v_iters", [3, 4])
    assert names(pi, v)[1] == "x_train_pi_iters1_train_v_iters4"
    assert names(pi, ("train_v_iters", [3])) == ["x_tra1", "x_tra2"]
    assert names(pi, (*v, "v"))[1] == "x_train_pi_iters1_v4"


def test_values_become_parts_of_file_names():
    assert valid_str((0.1, "A b")) == "0-1-a-b"
    assert valid_str("ü/..\n$") == "------"
    assert valid_str(None) == "none"


def test_variants_are_all_combinations_in_order():
    g = ExperimentGrid()
    g.add("a", [1, 2])
    g.add("b", "x")
    g.add("c", [(1, 2), (3,)])
    expected = itertools.product([1, 2], ["x"], [(1, 2), (3,)])
    assert g.variants() == [dict(zip("abc", values)) for values in expected]


def test_runs_never_share_a_folder():
    g = ExperimentGrid("x")
    g.add("seed", [0, 1, 2])
    g.add("hidden_sizes", ["64 64", "64", (6, 4)])
    g.add("gamma", [0.9, 0.99, "0.999"])
    g.add("pi_lr", [1e-3, 1e-4])
    runs = g.runs("ppo_torch")
    assert len({run.folder for run in runs}) == len({tuple(run.command) for run in runs}) == 54
    for vals in (["Hopper-v4", "hopper-v4"], ["a:b-v0", "a-b-v0"]):
        g = ExperimentGrid("x")
        g.add("env_id", vals)
        with pytest.raises(SidespinError, match="values of env_id would share the name x_"):
            g.runs("ppo_torch")
    for key, vals in (("gamma", [0.1, "1e-1"]), ("hidden_sizes", ["64", (64,)]), ("seed", [0, 0])):
        g = ExperimentGrid("x")
        g.add(key, vals)
        with pytest.raises(SidespinError, match=f"^{key} has a value twice"):
            g.runs("ppo_torch")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("ppo_trch", "there is no script ppo_trch (did you mean ppo_torch?)"),
        ("grid", "grid.py is not a training script"),
        ("ppo_torch --clp-ratio 1", "ppo_torch has no --clp-ratio (did you mean --clip-ratio?)"),
        ("ppo_torch --clip 1", "ppo_torch has no --clip (did you mean --clip-ratio?)"),
        ("ppo_torch --worker 1", "ppo_torch has no --worker (did you mean --workers?)"),
        ("ppo_torch --autotune true", "ppo_torch has no --autotune"),
        ("ppo_torch --hidden-sizes 64 64", "twice: 64, 64; quote several numbers to make"),
        ("ppo_torch --seed 0 x", "--seed must be a whole number of at least 0, got x"),
        ("ppo_torch --max-ep-len 1.5", "--max-ep-len must be a whole number"),
        ("ppo_torch --hidden-sizes 64 a", "--hidden-sizes must be a tuple of numbers"),
        ("trpo_torch --algo trpo ppo", "--algo must be one of trpo, npg, got ppo"),
        ("sac_torch --autotune yes", "--autotune must be true or false, got yes"),
        ("ppo_torch --seed", "--seed needs a value"),
        ("ppo_torch --env-id", "--env-id needs a value"),
        ("ppo_torch 0 1", "there is no flag before 0"),
        ("ppo_torch --seed 0 --seed 1", "--seed is given twice"),
        ("ppo_torch --gamma 0.9 2", "--gamma must be between 0 and 1, got 2.0"),
        ("ppo_torch --cpu 3", "--steps-per-epoch 4000 cannot be divided evenly among 3 ranks"),
        ("ppo_torch --cpu 2 --steps-per-epoch 10 11", "--steps-per-epoch 11 cannot be divided"),
        ("ppo_torch --cpu many", "--cpu must be "),
        ("ppo_torch --workers 0", "--workers must be "),
        ("ppo_torch --exp-name a/b", "--exp-name must be a plain name, not a path, got 'a/b_"),
        ("ppo_torch --overwrite", "--overwrite cannot be set: a grid names and resumes its own"),
        ("ppo_torch --env-id CartPole-v1 Hoper-v4", "cannot make the environment Hoper-v4: "),
        ("sac_torch --env-id CartPole-v1", "needs bounded continuous actions, but CartPole-v1 has"),
        (f"ppo_torch --lam[{'x' * 260}] 1", "too long for a folder name: use shorthands"),
        ("", "missing SCRIPT"),
        ("--seed 0 1 ppo_torch", "name the script before its flags"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(
    words, sentence, tmp_path, monkeypatch, capsys
):
    words = [*words.split(), "--data-dir", str(tmp_path)]
    assert sentence in refused(words, monkeypatch, capsys)
    assert not list(tmp_path.iterdir())


def test_from_python_mistakes_are_exceptions(tmp_path):
    def run(key, vals, **options):
        g = ExperimentGrid()
        g.add(key, vals)
        g.run("ppo_torch", data_dir=tmp_path, **options)

    for key, vals, sentence in (
        ("clp_ratio", 1, r"ppo_torch has no clp_ratio \(did you mean clip_ratio\?\)"),
        ("gamma", [0.9, 2], "^gamma must be between 0 and 1, got 2.0"),
        ("env_id", "Hoper-v4", "cannot make the environment Hoper-v4"),
    ):
        with pytest.raises(SidespinError, match=sentence):
            run(key, vals)
    with pytest.raises(SidespinError, match=r"^workers must be at least 1, got 0"):
        run("seed", 0, workers=0)
    assert not list(tmp_path.iterdir())


def test_a_mistake_is_one_line_on_a_terminal_and_under_mpirun():
    terminal, side = pty.openpty()
    words = ["grid.py", "ppo_trch", "--seed", "0"]
    process = popen(*words, stdout=side, stderr=side)
    os.close(side)
    shown = read_all(terminal)
    assert (process.wait(), shown.count("\n")) == (2, 1)
    sentence = "grid.py: error: there is no script ppo_trch (did you mean ppo_torch?)"
    assert shown.strip() == sentence
    result = start(*words, ranks=2)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", sentence + "\n")


def test_help_fits_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    words = set(start("grid.py", "--help").stdout.split())
    for columns in (80, 60):
        monkeypatch.setenv("COLUMNS", str(columns))
        shown = start("grid.py", "--help").stdout
        assert max(map(len, shown.splitlines())) <= columns
        whole = {word for word in words if not word.startswith(("╭", "╰", "─"))}
        assert whole <= set(shown.split()), "every word is whole"
        assert {"--workers", "--dry-run", "--exp-name", "log.txt."} <= whole


def test_dry_run_prints_commands_that_can_be_pasted(tmp_path, monkeypatch, capsys):
    words = ["--seed", "0", "1", "--autotune", "true", "false", "--hidden-sizes[h]=8 9"]
    words += ["--exp-name", "it's", "--cpu", "2", "--data-dir", str(tmp_path), "--dry-run"]
    assert run_grid(["sac_torch.py", *words], monkeypatch) == 0
    lines = capsys.readouterr().out.splitlines()
    ends = ("aut_h8-9_s0", "h8-9_s0", "aut_h8-9_s1", "h8-9_s1")
    assert lines[::2] == [f"# it's_Hopper-v4_{end}: waiting" for end in ends]
    commands = [shlex.split(line) for line in lines[1::2]]
    assert [("--autotune" in command) for command in commands] == [True, False, True, False]
    script = os.path.relpath(ROOT / "sac_torch.py")
    expected = f"python {script} --seed 1 --hidden-sizes 8 9 --data-dir {tmp_path} --cpu 2"
    assert commands[3] == [*expected.split(), "--exp-name", "it's_Hopper-v4_h8-9", "--resume"]
    assert not list(tmp_path.iterdir())
    words = "--datestamp --dry-run --cpu auto vpg_torch --steps-per-epoch 5040"
    run_grid(words.split(), monkeypatch)
    shown = capsys.readouterr().out
    assert re.match(r"# \d{4}-\d\d-\d\d_vpg_torch_Hopper-v4_s0: waiting\n", shown)
    assert grid.cores() == 1 or f"--cpu {grid.cores()} " in shown


def test_cores_of_a_system_without_affinity(monkeypatch):
    assert grid.cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert grid.cores() == os.cpu_count()


def test_a_script_of_ones_own(tmp_path, monkeypatch):
    """Its environments are made once; those that it registers or makes itself are no mistake."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    source = (ROOT / "vpg_torch.py").read_text().replace("(64, 64)", "(7, 7)")
    module = "import gymnasium\nfrom gymnasium.envs.classic_control import CartPoleEnv\n"
    module += "class Counted(CartPoleEnv):\n    def __init__(self, **kwargs):\n"
    module += f"        open({str(tmp_path / 'made')!r}, 'a').write('.')\n"
    module += "        super().__init__(**kwargs)\n"
    module += "gymnasium.register('Counted-v0', entry_point=Counted)\n"
    (tmp_path / "counted.py").write_text(module)
    (tmp_path / "mine.py").write_text(source)
    g = ExperimentGrid()
    g.add("env_id", "counted:Counted-v0")
    g.add("seed", [0, 1, 2])
    run, *_ = g.run(tmp_path / "mine", data_dir=tmp_path, dry_run=True)
    assert run.name == "mine_counted-Counted-v0"
    assert run.args.hidden_sizes == (7, 7)
    assert Path(run.command[0]).resolve() == tmp_path / "mine.py"
    assert (tmp_path / "made").read_text() == "."

    g = ExperimentGrid()
    g.add("env_id", "Counted-v0")  # which only the counted module knows
    with pytest.raises(SidespinError, match="cannot make the environment Counted-v0"):
        g.run(tmp_path / "mine", data_dir=tmp_path, dry_run=True)
    registers = source.replace("import torch\n", "import counted, torch\n", 1)
    (tmp_path / "mine.py").write_text(registers)
    g.run(tmp_path / "mine", data_dir=tmp_path, dry_run=True)
    own = "def make_env(name):\n    return name\n\n\n@dataclass\n"
    (tmp_path / "mine.py").write_text(source.replace("@dataclass\n", own, 1))
    g.run(tmp_path / "mine", data_dir=tmp_path, dry_run=True)


def fake_runs(n, epochs=50):
    g = ExperimentGrid("a_rather_long_name_of_an_experiment")
    g.add("seed", list(range(n)))
    g.add("epochs", epochs)
    return g.runs("ppo_torch")


def pretend(run, state, rows=0, seconds=2.0, start_up=None, first=None):
    """Let a run be in a state, with rows that took some seconds each and one written just now."""
    run.state, run.ret = state, 12.3
    run.times = [seconds * (i + 1) - (first or 0.0) for i in range(rows)]
    if start_up is not None:
        run.changed = time.time() if rows else None
        run.began = time.time() - start_up - (run.times[-1] if rows else 0.0)


def test_time_left_is_by_the_rows_written_and_includes_start_up():
    runs = fake_runs(5, epochs=10)
    assert grid.estimate(runs, 2) is None, "no row yet"
    pretend(runs[0], "done", rows=10, start_up=30.0)
    pretend(runs[1], "running", rows=4, start_up=30.0)
    pretend(runs[2], "running", rows=0, start_up=10.0)
    left = grid.estimate(runs, 2)
    assert runs[1].left == pytest.approx(6 * 2, abs=0.5)
    assert runs[2].left == pytest.approx(30 + 10 * 2 - 10, abs=0.5)
    assert runs[3].left == pytest.approx(30 + 10 * 2, abs=0.5)
    assert left == pytest.approx(max(6 * 2 + 50, 40 + 50), abs=0.5), "the fourth, then the fifth"
    assert grid.estimate(runs, 4) == pytest.approx(50, abs=0.5)
    # One that was interrupted after 6 epochs has 4 left, at its own pace
    pretend(runs[3], "waiting", rows=6, seconds=10.0)
    runs[3].saved = 6
    grid.estimate(runs, 2)
    assert runs[3].left == pytest.approx(30 + 4 * 10, abs=0.5)
    # Off-policy, the first epochs are short: those to come are as long as the last ones
    pretend(runs[1], "running", rows=6, start_up=30.0, seconds=0.1)
    runs[1].times = [0.1, 0.2, 0.3, 10.3, 20.3, 30.3]
    grid.estimate(runs, 2)
    assert runs[1].left == pytest.approx(4 * 10, abs=0.5)


def test_many_runs_on_a_small_terminal(monkeypatch, capsys):
    """Those that run are below the lines of those that have ended; what is cut off is in front."""
    runs = fake_runs(30)
    for run in runs[:12]:
        pretend(run, "done", rows=50)
    pretend(runs[25], "failed")
    runs[25].code = -9
    for run in runs[27:]:
        pretend(run, "running", rows=25, start_up=0.0)
    screen = Screen(runs, 3)
    screen.is_terminal = True
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setenv("LINES", "5")
    screen.update()
    shown = capsys.readouterr()
    assert "_s25 failed (killed by SIGKILL), see " in shown.err
    lines = shown.out.splitlines()
    assert sum(": done, epoch 50/50, return 12.3, 0:01:40" in line for line in lines) == 12
    assert len(lines) == 12 + 1 + 4
    assert re.fullmatch(r"\S*_s27: running, epoch 25/50, return 12.3, 0:00:(50|49) left", lines[13])
    assert len(lines[13]) == 69
    assert " runs: 3 running, 1 failed, 14 waiting, 12 done, about 0:09:" in lines[-1]
    screen.update()
    shown = capsys.readouterr().out
    assert shown.startswith("\x1b[4F\x1b[J"), "what was below is redrawn"
    assert len(shown.splitlines()) == 4
    monkeypatch.setenv("LINES", "1")
    screen.update()
    assert capsys.readouterr().out.count("\n") == 1


def test_failed_and_finished_runs_in_a_pipe(tmp_path, monkeypatch, capsys):
    command = ["vpg_torch", *TINY_WORDS, "--data-dir", str(tmp_path)]
    three = ["--env-id", "envs:NanReward-v0", "CartPole-v1", "Pendulum-v1", "--workers=2"]
    result = start("grid.py", *command, *three, warm=True)
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    assert not re.search(r"[^\n -~]", result.stdout + result.stderr), "no control characters"
    good, bad = [f"{SINGLE}_s0", "vpg_torch_Pendulum-v1_s0"], "vpg_torch_envs-NanReward-v0_s0"
    for name, state in ((bad, "failed"), *((name, "done") for name in good)):
        own = [line for line in lines if line.startswith(f"{name}: ")]
        assert [line.split()[1].strip(",") for line in own] == ["running", state]
    assert f"{SINGLE}_s0: done, epoch 3/3, return " in result.stdout
    under_way = list(itertools.accumulate(1 if "running" in line else -1 for line in lines[:-1]))
    assert max(under_way) == 2
    assert under_way[1] == 2
    assert lines[-1] == "3 runs: 1 failed, 2 done"
    report = rf"grid.py: error: {bad} failed \(exit code 1\), see .*log.txt\n"
    report += r"(    .*\n)*    vpg_torch.py: error: .*reward is nan.*\n"
    assert re.fullmatch(report, result.stderr), result.stderr
    folder = tmp_path / SINGLE / f"{SINGLE}_s0"
    assert progress(folder)["AverageEpRet"].notna().all()
    assert "AverageEpRet" in (folder / "log.txt").read_text()

    before = files_in(tmp_path)
    assert run_grid([*command, "--env-id", "CartPole-v1", "Pendulum-v1"], monkeypatch) == 0
    shown = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"{SINGLE}_s0: finished before, epoch 3/3, return .*", shown[0])
    assert shown[-1] == "2 runs: 2 finished before"
    assert before == files_in(tmp_path)

    other = [*command, "--env-id", "CartPole-v1", "--gamma", "0.5"]
    sentence = refused(other, monkeypatch, capsys)
    assert "with different settings: --gamma 0.5 (was 0.99); choose another --exp-name" in sentence


LONG = dict(env_id="CartPole-v1", epochs=25, steps_per_epoch=600, save_freq=3, hidden_sizes=(8,))
LONG_WORDS = """vpg_torch --env-id CartPole-v1 --epochs 25 --steps-per-epoch 600 --save-freq 3
    --hidden-sizes 8 --train-v-iters 2 --seed 0 1""".split()


def start_on_terminal(command):
    """Start a command whose terminal is a pseudo-terminal; return the process and the other end."""

    def take_terminal():
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        for number in (signal.SIGINT, signal.SIGHUP):  # which background jobs and nohup ignore
            signal.signal(number, signal.SIG_DFL)

    terminal, side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        stdin=side,
        stdout=side,
        stderr=side,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(side)
    return process, terminal


def test_stopped_in_all_ways_and_resumed(tmp_path):
    """By a kill, Ctrl-C and the end of the terminal; a pipe that nobody reads stops nothing."""
    command = ["grid.py", *LONG_WORDS, "--data-dir", str(tmp_path / "a"), "--workers", "1"]
    first, second = (tmp_path / "a" / SINGLE / f"{SINGLE}_s{seed}" for seed in (0, 1))
    log = first / "log.txt"
    process, terminal = start_on_terminal(command)
    wait_until(lambda: epochs(first) >= 4)
    process.kill()  # and its run ends, too
    assert process.wait() == -signal.SIGKILL
    os.close(terminal)

    process, terminal = start_on_terminal(command)
    wait_until(lambda: "resuming after" in log.read_text() and epochs(first) >= 8)
    assert log.read_text().count("interrupted after") == 1
    shown = ""
    while not re.search(r"_s0: running, epoch \d+/25, return \d.*, 0:\d\d:\d\d left", shown):
        shown += os.read(terminal, 10**6).decode()
    os.write(terminal, b"\x03")
    shown += read_all(terminal)
    assert process.wait(30) == 130
    assert not processes(tmp_path / "a")
    assert "\x1b[2F\x1b[J" in shown, "what is below is redrawn in place"
    assert re.search(r"_s0: stopped, epoch \d+/25, return .*\r\n", shown)
    assert "2 runs: 1 stopped, 1 waiting\r\n" in shown
    assert "grid.py: interrupted; to resume: repeat the command" in shown
    assert log.read_text().count("interrupted after") == 2
    os.close(terminal)

    done = epochs(first)
    process, terminal = start_on_terminal(command)
    wait_until(lambda: log.read_text().count("resuming after") == 2 and epochs(first) > done)
    os.close(terminal)
    assert process.wait(30) == -signal.SIGHUP
    assert not processes(tmp_path / "a")
    assert log.read_text().count("interrupted after") == 3
    assert epochs(first) < 25, "it was stopped half-way"
    assert not second.exists()

    process = popen(*command)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 0
    assert log.read_text().count("resuming after") == 3
    assert "Traceback" not in log.read_text()
    unbroken = progress(train("vpg_torch", tmp_path / "b", **LONG, train_v_iters=2))
    pd.testing.assert_frame_equal(*(x.drop(columns=TIMES) for x in (progress(first), unbroken)))
    assert epochs(second) == 25


def test_a_signal_to_an_mpi_job_stops_its_runs(tmp_path):
    """Each run has two ranks of its own, whatever the job around it has."""
    command = ["grid.py", *LONG_WORDS, "--data-dir", str(tmp_path), "--cpu", "2"]
    process = popen(*command, ranks=2, warm=True, start_new_session=True)
    first = tmp_path / SINGLE / f"{SINGLE}_s0"
    wait_until(lambda: epochs(first) >= 3)
    process.terminate()
    _, shown = process.communicate(timeout=30)
    assert process.returncode == 143
    assert shown.count("grid.py: interrupted; to resume: repeat the command\n") == 1
    wait_until(lambda: not processes(tmp_path), 5)
    assert (first / "log.txt").read_text().count("interrupted after") == 1
    assert json.loads((first / "config.json").read_text())["ranks"] == 2
    assert not (tmp_path / SINGLE / f"{SINGLE}_s1").exists()


ENDLESS = dict(env_id="CartPole-v1", steps_per_epoch=200, hidden_sizes=(8,), train_v_iters=2)
ENDLESS |= dict(save_freq=3, epochs=10**6)


def endless(data_dir, epochs=ENDLESS["epochs"]):
    """Return the command of a grid of two runs that only end if they are stopped."""
    flags = as_flags(**{**ENDLESS, "data_dir": data_dir, "epochs": epochs})
    return ["grid.py", "vpg_torch", *flags, "--seed", "0", "1"]


def test_a_lost_worker_or_launcher_ends_the_grid_and_all_runs(tmp_path):
    """The same command then does what is left, each run once."""
    folders = [tmp_path / SINGLE / f"{SINGLE}_s{seed}" for seed in (0, 1)]
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    done = [0, 0]
    for lost in ("worker", "launcher"):
        process = popen(*endless(tmp_path), ranks=3, **quiet)
        wait_until(lambda n=done: all(epochs(f) >= k + 4 for f, k in zip(folders, n)))
        workers = {parent(pid) for pid in processes(tmp_path)} & {*processes(tmp_path)}
        os.kill(min(workers - {process.pid}) if lost == "worker" else process.pid, signal.SIGKILL)
        assert process.wait(30) != 0
        wait_until(lambda: not processes(tmp_path), 30)
        done = [*map(epochs, folders)]
    result = start(*endless(tmp_path, max(done) + 1), ranks=3, warm=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("2 runs: 2 done\n")
    unbroken = train("vpg_torch", tmp_path / "b", **ENDLESS | dict(epochs=max(done) + 1))
    assert_same(folders[0], unbroken)
    for folder in folders:
        shown = (folder / "log.txt").read_text()
        assert [shown.count(x) for x in ("resuming after", "another process")] == [2, 0]


@pytest.mark.skipif(bool(hosts.missing()), reason=str(hosts.missing()))
def test_a_lost_host_ends_the_grid_and_all_runs(tmp_path):
    """Within half a minute, on both sides of the cable; the same command then continues."""
    env = {**os.environ, "PATH": f"{Path(MPIRUN).parent}:{os.environ['PATH']}"}
    with hosts.Switch("nodea", "nodeb") as (a, b):
        at_rest = {**a.processes(), **b.processes()}
        command = ["mpirun", "-hosts", "nodea,nodeb", "-np", "3", "python"]
        with open(tmp_path / "shown", "wb") as shown:
            process = a.popen(*command, *endless(tmp_path), env=env, stdout=shown, stderr=shown)
        folders = [tmp_path / SINGLE / f"{SINGLE}_s{seed}" for seed in (0, 1)]
        wait_until(lambda: all((folder / "model.pt").exists() for folder in folders))
        b.connect(False)
        assert process.wait(60) != 0
        wait_until(lambda: {**a.processes(), **b.processes()}.keys() <= at_rest.keys(), 30)
        sentence = r"grid.py: error: .*node[ab].*; to resume: repeat the command"
        assert re.search(sentence, (tmp_path / "shown").read_text())
        b.connect()
        command += endless(tmp_path, max(map(epochs, folders)) + 1)
        assert a.run(*command, env=env, stdout=subprocess.DEVNULL).returncode == 0
    for folder in folders:
        assert (folder / "log.txt").read_text().count("resuming after") == 1


def parent(pid):
    """Return the id of a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_run_waits_for_its_predecessor_to_end(tmp_path, monkeypatch):
    """But not for longer than one may take whose grid was killed."""
    table = tmp_path / "progress.txt"
    with open(table, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        threading.Timer(0.5, file.close).start()
        began = time.time()
        grid.wait_for_lock(table)
        assert 0.4 < time.time() - began < 5
    monkeypatch.setattr(grid, "LOCKED", 0.5)
    with open(table, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        began = time.time()
        grid.wait_for_lock(table)
        assert 0.4 < time.time() - began < 5
    grid.wait_for_lock(tmp_path / "none")


def test_a_run_that_does_not_end_is_killed(tmp_path, monkeypatch):
    script = tmp_path / "deaf.py"
    script.write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('ready', flush=True)\ntime.sleep(100)\n"
    )
    monkeypatch.setattr(grid, "PATIENCE", 0.5)
    monkeypatch.setattr(grid, "stop", grid.Stop())
    codes = []
    thread = threading.Thread(
        target=lambda: codes.append(grid.do_run([str(script)], tmp_path / "log.txt"))
    )
    thread.start()
    wait_until(lambda: (tmp_path / "log.txt").exists() and (tmp_path / "log.txt").read_text())
    began = time.time()
    grid.stop(signal.SIGTERM)
    thread.join(10)
    assert codes == [-signal.SIGKILL]
    assert time.time() - began >= 0.5
    assert grid.do_run([str(script)], tmp_path / "log.txt") is None, "nothing starts any more"


def test_ranks_of_an_mpi_job_share_the_runs(tmp_path):
    command = ["vpg_torch", "--env-id", "CartPole-v1", *TINY_WORDS, "--data-dir", tmp_path]
    command += ["--seed", "0", "1"]
    result = start("grid.py", *command, ranks=3, warm=True)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == [f"{SINGLE}_s0", f"{SINGLE}_s1"]
    assert all("running" in line for line in lines[:2]), "both at once"
    assert lines[-1] == "2 runs: 2 done"
    for path in tmp_path.glob("*/*/config.json"):
        assert json.loads(path.read_text())["ranks"] == 1
    result = start("grid.py", *command, "--workers", "2", ranks=2, warm=True)
    assert result.returncode == 2
    assert result.stderr == "grid.py: error: under mpirun, -np takes the place of --workers\n"


def test_from_python(tmp_path, capsys):
    """Flags that are true or false, and a run that the disk refuses."""
    g = ExperimentGrid("x")
    g.add("env_id", "Pendulum-v1")
    g.add("autotune", [True, False])
    tiny = dict(epochs=1, steps_per_epoch=20, hidden_sizes=4, start_steps=10, update_after=10)
    tiny |= dict(update_every=5, batch_size=4, replay_size=50, num_test_episodes=1, max_ep_len=10)
    for key, value in tiny.items():
        g.add(key, value)
    (tmp_path / "x_Pendulum-v1").write_text("in the way")
    runs = g.run("sac_torch", data_dir=tmp_path)
    assert [run.state for run in runs] == ["done", "failed"]
    assert json.loads((runs[0].folder / "config.json").read_text())["autotune"] is True
    assert runs[0].ret == progress(runs[0].folder)["AverageTestEpRet"][0]
    assert "x_Pendulum-v1_s0 failed ([Errno 20] Not a directory" in capsys.readouterr().err
    (tmp_path / "x_Pendulum-v1").unlink()
    # Other handlers than Python's own must come back
    handlers = [signal.signal(n, lambda *_: None) for n in (signal.SIGINT, signal.SIGTERM)]
    mine = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    try:
        runs = g.run("sac_torch", data_dir=tmp_path)
        assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == mine
    finally:
        for n, handler in zip((signal.SIGINT, signal.SIGTERM), handlers):
            signal.signal(n, handler)
    assert [run.state for run in runs] == ["finished before", "done"]
    assert json.loads((runs[1].folder / "config.json").read_text())["autotune"] is False
