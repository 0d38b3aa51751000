"""A grid: its names, what it refuses, and real runs that fail, are killed, go on or are skipped."""

import contextlib
import itertools
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from helpers import MPIRUN, ROOT, progress, start, train

import grid
from grid import ExperimentGrid, Screen, valid_str

TINY = dict(env_id="CartPole-v1", epochs=3, steps_per_epoch=100, hidden_sizes=(8,), train_v_iters=2)
TINY_WORDS = """--env-id CartPole-v1 --epochs 3 --steps-per-epoch 100 --hidden-sizes 8
    --train-v-iters 2""".split()


def refusal(words, capsys):
    """Return the one sentence that a grid ends with before it starts anything."""
    with pytest.raises(SystemExit) as ended:
        grid.main(words)
    shown = capsys.readouterr()
    assert ended.value.code == 2
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    return shown.err.split(": error: ")[1]


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


def test_names_have_what_varies_but_the_seed():
    assert names(("seed", [0, 1])) == ["x", "x"]
    assert names(("gamma", 0.9), ("seed", 3)) == ["x"]
    assert names(("gamma", [0.9, 0.99])) == ["x_gam0-9", "x_gam0-99"]
    assert names(("clip-ratio", [0.1, 1e-5], "eps")) == ["x_eps0-1", "x_eps1e-05"]
    assert names(("hidden_sizes", [(64, 64), (32,)], "h")) == ["x_h64-64", "x_h32"]
    assert names(("env_id", ["Hopper-v4", "a.b:C-v0"])) == ["x_envhopper-v4", "x_enva-b-c-v0"]
    assert names(("pi_lr", [1, 2]), ("seed", [0, 1]), name="") == ["pi1", "pi1", "pi2", "pi2"]
    assert names(("gamma", [0.9], "G", True), ("epochs", [1, 2])) == ["x_g0-9_epo1", "x_g0-9_epo2"]
    assert names(("max_ep_len", [None, 10])) == ["x_maxnone", "x_max10"]


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


def test_runs_never_share_a_folder(capsys):
    g = ExperimentGrid("x")
    g.add("seed", [0, 1, 2])
    g.add("hidden_sizes", ["64 64", "64", (6, 4)])
    g.add("gamma", [0.9, 0.99, "0.999"])
    g.add("pi_lr", [1e-3, 1e-4])
    runs = g.runs("ppo_tf1")
    assert len({run.folder for run in runs}) == len({tuple(run.command) for run in runs}) == 54
    for vals in (["Hopper-v4", "hopper-v4"], ["a:b-v0", "a-b-v0"]):
        g = ExperimentGrid("x")
        g.add("env_id", vals)
        with pytest.raises(SystemExit):
            g.runs("ppo_tf1")
        assert "values of --env-id would share the name x_env" in capsys.readouterr().err
    for key, vals in (("gamma", [0.1, "1e-1"]), ("hidden_sizes", ["64", (64,)]), ("seed", [0, 0])):
        g = ExperimentGrid("x")
        g.add(key, vals)
        with pytest.raises(SystemExit):
            g.runs("ppo_tf1")
        assert "has a value twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("ppo_trch", "there is no script ppo_trch: did you mean ppo_torch?"),
        ("grid", "grid.py is not a script that trains: it has no Args"),
        ("ppo_torch --clp-ratio 1", "no flag --clp-ratio: did you mean --clip-ratio?"),
        ("ppo_torch --clip 1", "no flag --clip: did you mean --clip-ratio?"),
        ("ppo_torch --hidden-sizes 64 64", "twice: 64, 64; several numbers in quotes, like"),
        ("ppo_torch --worker 1", "no flag --worker: did you mean --workers?"),
        ("ppo_torch --autotune true", "ppo_torch has no flag --autotune"),
        ("ppo_torch --seed 0 x", "--seed takes int, not 'x'"),
        ("ppo_torch --max-ep-len 1.5", "--max-ep-len takes int | None, not '1.5'"),
        ("ppo_torch --hidden-sizes 64 a", "--hidden-sizes takes tuple[int, ...], not 'a'"),
        ("trpo_tf1 --algo trpo ppo", "--algo takes Literal['trpo', 'npg'], not 'ppo'"),
        ("sac_tf1 --autotune yes", "--autotune takes true or false, not 'yes'"),
        ("ppo_torch --seed", "--seed needs a value"),
        ("ppo_torch --env-id", "--env-id needs a value"),
        ("ppo_torch 0 1", "0 has no flag in front of it"),
        ("ppo_torch --seed 0 --seed 1", "--seed is given twice"),
        ("ppo_torch --gamma 0.9 2", "--gamma must lie between 0 and 1, where 2.0 does not"),
        ("ppo_torch --cpu 3", "--steps-per-epoch 4000 cannot be divided among 3 ranks"),
        ("ppo_torch --cpu 2 --steps-per-epoch 10 11", "--steps-per-epoch 11 cannot be divided"),
        ("sac_tf1 --cpu 4 --batch-size 260", "--batch-size 260 is more than the 250 transitions"),
        ("ppo_torch --cpu many", "--cpu takes int, not 'many'"),
        ("ppo_torch --workers 0", "--workers must be at least 1, not 0"),
        ("ppo_torch --exp-name a/b", "--exp-name a/b must be a name, without folders"),
        ("ppo_torch --overwrite", "--overwrite cannot vary: a grid names its runs and resumes"),
        (f"ppo_torch --lam[{'x' * 260}] 1", "too long for a folder's name"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(words, sentence, tmp_path, capsys):
    words = [*words.split(), "--data-dir", str(tmp_path)]
    assert sentence in refusal(words, capsys)
    assert not list(tmp_path.iterdir())


def test_dry_run_prints_commands_that_can_be_pasted(tmp_path, capsys):
    words = ["--seed", "0", "1", "--autotune", "true", "false", "--hidden-sizes[h]=8 9"]
    words += ["--exp-name", "it's", "--cpu", "2", "--data-dir", str(tmp_path), "--dry-run"]
    assert grid.main(["sac_torch.py", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[::2] == [
        f"# {name}: waiting"
        for name in ("it's_aut_h8-9_s0", "it's_h8-9_s0", "it's_aut_h8-9_s1", "it's_h8-9_s1")
    ]
    commands = [shlex.split(line) for line in lines[1::2]]
    assert [("--autotune" in command) for command in commands] == [True, False, True, False]
    script = os.path.relpath(ROOT / "sac_torch.py")
    expected = f"python {script} --seed 1 --hidden-sizes 8 9 --data-dir {tmp_path} --cpu 2"
    assert commands[3] == [*expected.split(), "--exp-name", "it's_h8-9", "--resume"]
    assert not list(tmp_path.iterdir())
    grid.main(["vpg_tf1", "--datestamp", "--dry-run", "--cpu", "auto", "--steps-per-epoch", "5040"])
    shown = capsys.readouterr().out
    assert re.match(r"# \d{4}-\d\d-\d\d_vpg_tf1_s0: waiting\n", shown)
    assert len(os.sched_getaffinity(0)) == 1 or f"--cpu {len(os.sched_getaffinity(0))} " in shown


def test_a_script_of_ones_own(tmp_path):
    text = (ROOT / "vpg_torch.py").read_text().replace("(64, 64)", "(7, 7)")
    (tmp_path / "mine.py").write_text(text)
    run = ExperimentGrid("mine").runs(tmp_path / "mine")[0]
    assert run.args.hidden_sizes == (7, 7)
    assert Path(run.command[0]).resolve() == tmp_path / "mine.py"


def test_thirty_runs_on_a_small_terminal():
    g = ExperimentGrid("a_rather_long_name_of_an_experiment")
    g.add("seed", list(range(30)))
    runs = g.runs("ppo_torch")
    for run in runs[:12]:
        run.state, run.epochs, run.ret, run.seconds = "done", 50, 12.3, 100.0
    runs[25].state = "failed"
    for run in runs[27:29]:
        run.state, run.epochs, run.seconds, run.began = "running", 25, 50.0, time.time()
    runs[29].state = "running"
    lines = Screen(runs, 2).table(80, 24)
    assert len(lines) == 23
    assert all(len(line) < 80 for line in lines)
    text = "\n".join(lines)
    assert re.search("_s25 +failed", text)
    assert re.search("_s27 +running +epoch 25/50 +0:00:(50|49) left", text)
    assert re.search("_s29 +running +epoch 0/50$", text, re.MULTILINE)
    # Two that are half done, and fifteen of which each will take 100 seconds, two at once
    assert lines[-1].startswith("30 run(s): 3 running, 1 failed, 14 waiting, 12 done, about 0:13:")
    assert len(Screen(runs, 2).table(80, 60)) == 31
    narrow = Screen(runs, 2).table(40, 5)
    assert len(narrow) == 4
    assert all(len(line) < 40 for line in narrow)


def test_failed_and_finished_runs_in_a_pipe(tmp_path, capsys):
    command = ["vpg_torch", *TINY_WORDS[2:], "--data-dir", str(tmp_path), "--seed", "0", "1"]
    result = start("grid.py", *command, "--env-id[e]", "Nowhere-v0", "CartPole-v1", "--workers=2")
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    assert not re.search(r"[^\n -~]", result.stdout + result.stderr), "no control characters"
    good, bad = "vpg_torch_ecartpole-v1_s", "vpg_torch_enowhere-v0_s"
    for name, state in ((good, "done"), (bad, "failed")):
        for seed in (0, 1):
            own = [line for line in lines if line.startswith(f"{name}{seed}: ")]
            assert [line.split()[1].strip(",") for line in own] == ["running", state]
    assert f"{good}0: done, epoch 3/3, return " in result.stdout
    under_way = list(itertools.accumulate(1 if "running" in line else -1 for line in lines[:-1]))
    assert max(under_way) == 2
    assert under_way[1] == 2
    assert lines[-1] == "4 run(s): 2 failed, 2 done"
    for seed in (0, 1):
        report = rf"grid.py: error: {bad}{seed} failed \(exit code 2\), see .*log.txt\n"
        report += r"    vpg_torch.py: error: .*Nowhere"
        assert re.search(report, result.stderr), result.stderr
    folder = tmp_path / good[:-2] / f"{good}0"
    assert progress(folder)["AverageEpRet"].notna().all()
    assert "AverageEpRet" in (folder / "log.txt").read_text()

    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert grid.main([*command, "--env-id[e]", "CartPole-v1"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"{good}0: finished before, epoch 3/3, return .*", shown[0])
    assert shown[-1] == "2 run(s): 2 finished before"
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    other = [*command, "--env-id[e]", "CartPole-v1", "--gamma", "0.5"]
    assert "holds another run, with gamma 0.99, not 0.5" in refusal(other, capsys)


LONG = {**TINY, "epochs": 40, "steps_per_epoch": 600, "save_freq": 3}
LONG_WORDS = """vpg_torch --env-id CartPole-v1 --epochs 40 --steps-per-epoch 600 --save-freq 3
    --hidden-sizes 8 --train-v-iters 2 --seed 0 1""".split()
RUNNING = r"vpg_torch_s0  running  epoch \d+/40  return \d.*  0:00:\d\d left"


def wait_until(true, seconds=60):
    deadline = time.time() + seconds
    while not true():
        assert time.time() < deadline
        time.sleep(0.02)


def epochs(folder):
    with contextlib.suppress(OSError, pd.errors.EmptyDataError):
        return len(progress(folder))
    return 0


@pytest.mark.parametrize("how", ["Ctrl-C on a terminal", "SIGKILL"])
def test_stopped_and_started_again(how, tmp_path):
    command = ["grid.py", *LONG_WORDS, "--data-dir", str(tmp_path / "b"), "--workers", "1"]
    terminal, side = pty.openpty()
    output = dict(stdout=side, stderr=side) if "terminal" in how else {}
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, start_new_session=True, **output
    )
    first, second = (tmp_path / "b" / "vpg_torch" / f"vpg_torch_s{seed}" for seed in (0, 1))
    wait_until(lambda: epochs(first) >= 4)
    if how == "SIGKILL":
        for pid in sorted(processes(tmp_path / "b")):  # the grid, then its run
            os.kill(pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        wait_until(lambda: not processes(tmp_path / "b"))
    else:
        shown = ""
        while not re.search(RUNNING, shown):
            shown += os.read(terminal, 10**6).decode()
        process.send_signal(signal.SIGINT)  # to the grid alone, which has to pass it on
        assert process.wait(30) == 130
        assert not processes(tmp_path / "b")
        shown += os.read(terminal, 10**6).decode()
        assert "\x1b[3F\x1b[J" in shown, "the table is redrawn in place"
        assert re.search(r"_s0  stopped  epoch \d+/40  return .*\r\n.*_s1  waiting", shown)
        assert "grid.py: interrupted; the same command goes on" in shown
        assert "interrupted in epoch" in (first / "log.txt").read_text()
    os.close(terminal)
    os.close(side)
    assert 4 <= epochs(first) < 40, "it was stopped half-way"
    assert not second.exists()

    result = start(*command)
    assert result.returncode == 0, result.stderr
    assert "going on with epoch" in (first / "log.txt").read_text()
    unbroken = progress(train("vpg_torch", tmp_path / "a", **LONG))
    times = ["Time", "StepsPerSec"]
    pd.testing.assert_frame_equal(progress(first).drop(columns=times), unbroken.drop(columns=times))
    assert epochs(second) == 40


def test_a_signal_to_an_mpi_job_stops_its_runs(tmp_path):
    command = [sys.executable, "grid.py", *LONG_WORDS, "--data-dir", str(tmp_path)]
    process = subprocess.Popen([MPIRUN, "-np", "2", *command], cwd=ROOT, start_new_session=True)
    wait_until(lambda: epochs(tmp_path / "vpg_torch" / "vpg_torch_s0") >= 3)
    process.terminate()
    assert process.wait(30) == 143
    wait_until(lambda: not processes(tmp_path), 5)
    log = (tmp_path / "vpg_torch" / "vpg_torch_s0" / "log.txt").read_text()
    assert "interrupted in epoch" in log
    assert not (tmp_path / "vpg_torch" / "vpg_torch_s1").exists()


def test_ranks_of_an_mpi_job_share_the_runs(tmp_path):
    """Each run has two ranks of its own, whatever the job around it has."""
    command = ["vpg_torch", *TINY_WORDS, "--data-dir", tmp_path, "--seed", "0", "1", "--cpu", "2"]
    result = start("grid.py", *command, ranks=3)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["vpg_torch_s0", "vpg_torch_s1"]
    assert all("running" in line for line in lines[:2]), "both at once"
    assert lines[-1] == "2 run(s): 2 done"
    for path in tmp_path.glob("*/*/config.json"):
        assert json.loads(path.read_text())["ranks"] == 2
    result = start("grid.py", *command, "--workers", "2", ranks=2)
    assert result.returncode == 2
    assert result.stderr.count("grid.py: error: --workers does not go with mpirun") == 1


def test_from_python(tmp_path, capsys):
    """Flags that are true or false, too, and a run that the disk refuses."""
    g = ExperimentGrid("x")
    g.add("env_id", "Pendulum-v1")
    g.add("autotune", [True, False])
    tiny = dict(epochs=1, steps_per_epoch=20, hidden_sizes=4, start_steps=10, update_after=10)
    tiny |= dict(update_every=5, batch_size=4, replay_size=50, num_test_episodes=1, max_ep_len=10)
    for key, value in tiny.items():
        g.add(key, value)
    g.print()
    assert "--autotune:  True  False\n" in capsys.readouterr().out
    (tmp_path / "x").write_text("in the way")
    runs = g.run("sac_torch", data_dir=tmp_path)
    assert [run.state for run in runs] == ["done", "failed"]
    assert json.loads((runs[0].folder / "config.json").read_text())["autotune"] is True
    assert runs[0].ret == progress(runs[0].folder)["AverageTestEpRet"][0]
    assert "x_s0 failed ([Errno 20] Not a directory" in capsys.readouterr().err
    (tmp_path / "x").unlink()
    runs = g.run("sac_torch", data_dir=tmp_path)
    assert [run.state for run in runs] == ["finished before", "done"]
    assert json.loads((runs[1].folder / "config.json").read_text())["autotune"] is False
