"""However a run ends, it says so in one line, all ranks end, and what was saved can be resumed."""

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import (
    ROOT,
    as_flags,
    assert_same,
    brief,
    only_run,
    params_of,
    popen,
    progress,
    python,
    start,
    train,
)

from common.errors import SidespinError

SHM = Path("/dev/shm")


def launch(script, data_dir, *flags, ranks=1, warm=True, **settings):
    words = [*as_flags(**brief(script, **settings)), "--data-dir", data_dir, *flags]
    return popen(f"{script}.py", *words, ranks=ranks, warm=warm)


def wait_for(process, text):
    """Read what a run prints until a line contains a text."""
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(process.communicate()[1])


def rank_0(data_dir):
    """Return the /proc entry of the process that logs below a folder."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            path = os.readlink(link)
        except OSError:  # it has just ended
            continue
        if path.startswith(f"{data_dir}/") and path.endswith("progress.txt"):
            return link.parents[1]
    raise AssertionError(f"nobody trains in {data_dir}")


def segments(data_dir):
    """Return the shared memory that MPI has in the process that trains below a folder."""
    found = set(re.findall(r"/dev/shm/(mpich\w+)", (rank_0(data_dir) / "maps").read_text()))
    assert found
    return found


def assert_gone(names):
    assert [name for name in names if (SHM / name).exists()] == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_finished_run_says_so_and_leaves_no_shared_memory(ranks, tmp_path):
    process = launch("ppo_torch", tmp_path, ranks=ranks, epochs=20)
    wait_for(process, "Epoch")
    mapped = segments(tmp_path)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    folder = only_run(tmp_path)
    done, play, plot = out.splitlines()[-3:]
    assert done == f"{folder}: done after 20 epochs"
    assert (play, plot) == tuple(f"    python {tool}.py {folder}" for tool in ("play", "plot"))
    assert_gone(mapped)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_interrupt_says_how_to_resume(number, ranks, tmp_path):
    process = launch("ppo_torch", tmp_path, ranks=ranks, epochs=1000)
    wait_for(process, "Epoch")
    mapped = segments(tmp_path)
    began = time.time()
    process.send_signal(number)
    _, shown = process.communicate(timeout=30)
    assert time.time() - began < 10
    assert process.returncode == 128 + number
    lines = [line for line in shown.splitlines() if "mpiexec" not in line]  # its own two on Ctrl-C
    (said,) = lines
    assert re.match(r"ppo_torch.py: interrupted after \d+ epochs?; to resume: ", said)
    launcher = f"mpirun -np {ranks} " * (ranks > 1)
    resume = said.split("to resume: ")[1]
    assert resume.startswith(f"{launcher}python ppo_torch.py --env-id Pendulum-v1 ")
    assert resume.endswith(f" --data-dir {tmp_path} --resume")
    assert not list(tmp_path.rglob("*.new"))
    if ranks == 1:  # with more, the launcher may be quicker to kill than a rank to clean up
        assert_gone(mapped)
    done = len(progress(only_run(tmp_path)))
    words = shlex.split(resume.removeprefix(launcher).removeprefix("python "))
    again = start(*words, "--epochs", done, ranks=ranks, warm=True)  # as it says, but not as long
    assert (again.returncode, again.stderr) == (0, "")


def test_a_second_signal_does_not_spoil_the_end(tmp_path):
    process = launch("sac_torch", tmp_path, epochs=1000)
    wait_for(process, "Epoch")
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
    _, shown = process.communicate(timeout=30)
    assert process.returncode in (128 + signal.SIGTERM, 128 + signal.SIGINT)
    assert len(shown.splitlines()) == 1
    assert "interrupted after" in shown


def test_a_background_job_ignores_ctrl_c(tmp_path):
    """As a shell without job control asks it to: `script.sh` with `python ppo_torch.py &`."""
    ignore = dict(preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    words = ["vpg_torch.py", *as_flags(**brief("vpg_torch", epochs=1000)), "--data-dir", tmp_path]
    process = popen(*words, **ignore)  # not a warm one: those handle signals themselves
    wait_for(process, "Epoch")
    process.send_signal(signal.SIGINT)
    wait_for(process, "Epoch")
    wait_for(process, "Epoch")
    process.terminate()
    assert "interrupted after" in process.communicate(timeout=30)[1]
    assert process.returncode == 128 + signal.SIGTERM


def test_cpu_leaves_no_shared_memory(tmp_path):
    process = launch("ppo_torch", tmp_path, "--cpu", "2", epochs=10, warm=False)
    wait_for(process, "Epoch")
    mapped = segments(tmp_path)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert not (SHM / f"mpich_shm_{process.pid:x}_0").exists(), "of the process that became mpirun"
    assert_gone(mapped)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("script", "settings", "quantity"),
    [
        ("ppo_torch", dict(pi_lr=1e30), r"(Loss|DeltaLoss|KL)\w+ is nan"),
        ("vpg_tf1", dict(env_id="envs:NanReward-v0"), "the environment's reward is nan"),
        ("sac_torch", dict(env_id="envs:HugeReward-v0"), "the environment's reward is 1e\\+300"),
        ("ddpg_torch", dict(pi_lr=1e30, q_lr=1e30), "diverged: number 0 of the action is nan"),
        (
            "trpo_torch",
            dict(env_id="envs:InfiniteObs-v0"),
            "number 1 of the environment's observation is inf",
        ),
    ],
)
def test_what_is_not_finite_stops_the_run(script, settings, quantity, ranks, tmp_path):
    if ranks == 2 and script == "vpg_tf1":
        pytest.skip("one framework is enough")
    run = dict(epochs=9, steps_per_epoch=100 * ranks, max_ep_len=None, **settings)
    process = launch(script, tmp_path, ranks=ranks, **run)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    *_, said = err.splitlines()  # NumPy may have warned of an overflow before
    assert "Traceback" not in err
    after = re.search(rf"error: stopped after ([01]) epochs?: .*{quantity}.*; to resume: ", said)
    assert after, said
    folder = only_run(tmp_path)
    if (folder / "model.pt").exists():
        for arrays in params_of(folder).values():
            assert all(np.isfinite(x).all() for x in arrays), "the last good model stays"
    assert (folder / "checkpoint" / "epoch1.json").exists() == (after[1] == "1")
    assert [path.name for path in SHM.glob(f"mpich_shm_{process.pid:x}_*")] == []


@pytest.mark.parametrize("script", ["vpg_torch", "vpg_tf1"])
@pytest.mark.parametrize("what", ["", "checkpoint"])
def test_what_vanishes_while_training_stops_the_run(script, what, tmp_path):
    process = launch(script, tmp_path, epochs=10_000)
    wait_for(process, "TotalEnvInteracts |          300")
    os.rename(only_run(tmp_path) / what, tmp_path / "gone")  # at once, unlike rm
    _, shown = process.communicate(timeout=30)
    assert process.returncode == 1
    assert re.fullmatch(r".*error: stopped after \d+ epochs: cannot write to .*\n", shown)


def test_a_full_stdout_stops_the_run_and_closed_ones_do_not(tmp_path):
    words = ["vpg_torch.py", *as_flags(**brief("vpg_torch")), "--data-dir", tmp_path]
    command = shlex.join(python(*words, warm=True))
    how = dict(shell=True, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    run = subprocess.run(f"{command} > /dev/full", **how)
    assert run.returncode == 1
    assert re.fullmatch(r"vpg_torch.py: error: cannot write to stdout: No space .*\n", run.stderr)
    assert subprocess.run(f"{command} --overwrite >&- 2>&-", **how).returncode == 0
    assert len(progress(only_run(tmp_path))) == 2


def test_a_reader_that_has_seen_enough_ends_the_run_quietly(tmp_path):
    words = ["vpg_torch.py", *as_flags(**brief("vpg_torch", epochs=1000)), "--data-dir", tmp_path]
    command = shlex.join(python(*words, warm=True))
    code = f"set -o pipefail; {command} | head -n 3"
    run = subprocess.run(["bash", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 128 + signal.SIGPIPE
    assert run.stderr == ""
    assert len(run.stdout.splitlines()) == 3


def test_a_signal_ends_a_run_whose_output_nobody_reads(tmp_path):
    process = launch("vpg_torch", tmp_path, epochs=10_000)
    deadline = time.time() + 60
    sizes = [-1]
    while time.time() < deadline and (len(sizes) < 4 or sizes[-1] != sizes[-4] or sizes[-1] == 0):
        time.sleep(0.5)  # until the pipe is full
        tables = tmp_path.glob("*/*/progress.txt")
        sizes.append(sum(table.stat().st_size for table in tables))
    process.terminate()
    assert process.wait(timeout=10) == 128 + signal.SIGTERM


@pytest.mark.parametrize("script", ["ppo_torch", "ppo_tf1"])
def test_a_full_disk_leaves_the_last_checkpoint(script, tmp_path):
    """A limit on the size of files, set after MPI has made its own, stands for a full disk."""
    settings = brief(script, hidden_sizes=(64, 64), epochs=4)
    train(script, tmp_path, **{**settings, "epochs": 2})
    words = [f"{script}.py", *as_flags(**settings), "--data-dir", str(tmp_path), "--resume"]
    code = f"""
import resource, runpy, sys
sys.path.insert(0, {str(ROOT)!r})
import common.mpi
common.mpi.comm()
sys.argv = {words}
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
runpy.run_path({f"{script}.py"!r}, run_name="__main__")
"""
    (tmp_path / "full.py").write_text(code)
    run = start(tmp_path / "full.py", warm=script.split("_")[1])
    assert run.returncode == 1
    (said,) = run.stderr.splitlines()
    assert re.search("error: stopped after [23] epochs: cannot write to .*: .*; to resume: ", said)
    folder = only_run(tmp_path)
    saved = sorted(p.name for p in (folder / "checkpoint").glob("*.json"))
    assert saved == ["epoch1.json", "epoch2.json"]
    assert not list(folder.rglob("*.new"))
    unbroken = train(script, tmp_path / "a", **settings)
    resumed = train(script, tmp_path, resume=True, **settings)
    assert_same(unbroken, resumed)


def test_a_killed_rank_ends_the_job_with_one_line(tmp_path):
    """Not with the launcher's own lines on what has become of its processes."""
    process = launch("ppo_torch", tmp_path, ranks=2, warm=False, epochs=1000)
    wait_for(process, "Epoch")
    mapped = segments(tmp_path)
    os.kill(int(rank_0(tmp_path).name), signal.SIGKILL)
    _, shown = process.communicate(timeout=30)
    assert process.returncode != 0
    (said,) = shown.splitlines()
    start = r"ppo_torch.py: error: rank 0 on \S+ was killed or crashed; to resume: mpirun -np 2 "
    assert re.match(start, said)
    assert_gone(mapped)


def test_a_rank_that_exits_alone_ends_the_job(tmp_path):
    settings = dict(env_id="envs:ExitsAlone-v0", steps_per_epoch=200)
    process = launch("ppo_torch", tmp_path, ranks=2, **settings)
    wait_for(process, "Epoch")
    began = time.time()
    _, shown = process.communicate(timeout=30)
    assert time.time() - began < 10
    assert process.returncode == 1
    said = "error: rank 1 exited before the other ranks; to resume: mpirun -np 2 python"
    assert re.search(said, shown)


def test_a_rank_that_fails_alone_leaves_no_shared_memory(tmp_path):
    settings = dict(env_id="envs:Raises-v0", steps_per_epoch=200)
    process = launch("ppo_torch", tmp_path, ranks=2, **settings)
    wait_for(process, "Epoch")
    mapped = segments(tmp_path)
    _, shown = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "the simulator of rank 1 blew up" in shown
    assert_gone(mapped)


@pytest.mark.parametrize("size", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_a_launcher_of_another_mpi_is_noticed(size, tmp_path, monkeypatch):
    from common.launch import LAUNCHERS, check_launcher

    monkeypatch.setenv(size, "4")
    monkeypatch.setenv(LAUNCHERS[size], "0")
    with pytest.raises(SidespinError, match="4 processes were started, but each thinks it is"):
        check_launcher()
    monkeypatch.setenv(LAUNCHERS[size], "3")
    with pytest.raises(SystemExit) as ended:
        check_launcher()
    assert ended.value.code == 2, "and says nothing: the first process does"


def test_a_launcher_of_another_mpi_is_one_line(tmp_path):
    """With all that Open MPI sets: MPICH itself aborts at the sight of PMIx."""
    foreign = {**os.environ, "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}
    foreign |= {"PMIX_RANK": "0", "PMIX_NAMESPACE": "1"}
    words = ["ppo_torch.py", "--data-dir", tmp_path / "x"]
    process = popen(*words, warm=True, env=foreign)
    _, shown = process.communicate(timeout=60)
    assert process.returncode == 2
    assert re.fullmatch("ppo_torch.py: error: 4 processes were started, but .*\n", shown)
    process = popen(*words, warm=True, env={**foreign, "OMPI_COMM_WORLD_RANK": "3"})
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 2
    assert not list(tmp_path.iterdir())


def test_a_fault_in_the_code_shows_where(tmp_path):
    """A traceback, and below it how to resume."""
    code = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import envs, ppo_torch
from common.launch import launch

def step(self, a):
    self.n = getattr(self, "n", 0) + 1
    return 1 / (130 - self.n) and old(self, a)

old, envs.Odd.step = envs.Odd.step, step
launch(ppo_torch.main, ppo_torch.Args)
"""
    (tmp_path / "fault.py").write_text(code)
    words = as_flags(**brief("ppo_torch", env_id="envs:DictObs-v0"), data_dir=tmp_path)
    run = start(tmp_path / "fault.py", *words, warm="torch")
    assert run.returncode == 1
    assert "Traceback" in run.stderr
    error, note = run.stderr.splitlines()[-2:]
    assert error == "ZeroDivisionError: division by zero", run.stderr
    assert note.startswith("stopped after 1 epoch; to resume: python ")


def test_what_is_stale_in_shared_memory_is_removed_and_nothing_else(tmp_path):
    """Segments that no process maps and that are older than ten minutes."""
    old = time.time() - 700
    names = {"mpich_shm_test_old": old, "mpich_shm_test_new": time.time(), "other_test_old": old}
    try:
        for name, then in names.items():
            (SHM / name).write_bytes(b"x")
            os.utime(SHM / name, (then, then))
        assert start("ppo_torch.py", "--help", warm=True).returncode == 0
        assert {name for name in names if (SHM / name).exists()} == set(names) - {
            "mpich_shm_test_old"
        }
    finally:
        for name in names:
            (SHM / name).unlink(missing_ok=True)


def test_help_and_mistakes_need_no_mpi(tmp_path):
    """So that they are quick, and leave no shared memory wherever they are called."""
    code = f"""
import sys, atexit
sys.path.insert(0, {str(ROOT)!r})
atexit.register(lambda: print("mpi4py.MPI" in sys.modules))
import ppo_torch
from common.launch import launch
launch(ppo_torch.main, ppo_torch.Args)
"""
    (tmp_path / "asks.py").write_text(code)
    for words in (["--help"], ["--foo"]):
        run = start(tmp_path / "asks.py", *words, warm="torch")
        assert run.stdout.splitlines()[-1] == "False"
