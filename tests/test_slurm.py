"""The scripts under Slurm: every command of the guide, launchers that do not fit, lost jobs."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import slurm
from helpers import MPIRUN, ROOT, as_flags, assert_same, only_run, progress, python, scratch
from slurm import Cluster, wait_until

GUIDE = (ROOT / "docs" / "clusters.md").read_text().partition("## Slurm")[2].partition("\n## ")[0]
FILES = {
    re.search(r"^# (\S+):", text, re.M)[1]: text
    for text in re.findall(r"```bash\n(.*?)```", GUIDE, re.S)
}
COMMANDS = [
    line for block in re.findall(r"```sh\n(.*?)```", GUIDE, re.S) for line in block.splitlines()
]
ENDLESS = dict(env_id="CartPole-v1", steps_per_epoch=600, hidden_sizes=(8,), train_v_iters=2)
ENDLESS |= dict(save_freq=3, epochs=10**6)


@pytest.fixture(scope="module")
def cluster():
    if slurm.missing():
        pytest.skip(f"needs Debian's slurm-wlm and munge: no {', '.join(slurm.missing())}")
    # Tests of other modules may come in between, and then it starts anew: never in an old folder.
    with Cluster(scratch() / f"slurm-{time.time_ns()}") as cluster:
        yield cluster


@pytest.fixture
def project(tmp_path):
    """The project as a user of the cluster has it; its python starts at once: see warm.py.

    SHORTER in the environment is added to every command, to make it brief.
    """
    shutil.copytree(ROOT / "common", tmp_path / "common")
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    bin = tmp_path / ".venv" / "bin"
    bin.mkdir(parents=True)
    warm = shlex.join(python(warm="torch"))
    (bin / "python").write_text(f'#!/bin/sh\nexec {warm} "$@" $SHORTER\n')
    (bin / "python").chmod(0o755)
    (bin / "activate").write_text(f'PATH="{bin}:{Path(MPIRUN).parent}:$PATH"\n')
    return tmp_path


def run(cluster, project, command, shorter="", **how):
    """Run a line of bash in the project's environment."""
    line = f". .venv/bin/activate; {command}"
    return cluster.run(line, cwd=project, env={"SHORTER": shorter}, **how)


def said(stderr):
    """Return the lines that Slurm itself did not print."""
    return [line for line in stderr.splitlines() if not line.startswith(("srun:", "slurmstepd"))]


def epochs(folder):
    with contextlib.suppress(Exception):  # no complete row yet
        return len(progress(only_run(folder)))
    return 0


def processes(folder):
    """Return the ids of the processes that have the folder in their command, Slurm's own apart."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            words = path.read_bytes().decode().split("\0")
            if str(folder) in words and words[0] == sys.executable:
                found.append(int(path.parent.name))
    return found


def test_every_command_of_the_guide(cluster, project):
    assert [line.split()[0] for line in COMMANDS] == (
        "sbatch salloc srun srun sbatch squeue python grep sbatch sbatch".split()
    )
    typed = "\n".join(COMMANDS)
    done = run(cluster, project, f"set -e\n{typed}", "--epochs 1 --steps-per-epoch 400")
    wait_until(lambda: not cluster.output("squeue -h"), 120)
    logs = "".join(path.read_text() for path in project.glob("*.log"))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr + logs
    states = re.findall(r"JobState=(\w+)", cluster.output("scontrol show jobs"))
    assert set(states) == {"COMPLETED"}, logs
    runs = {path.parent.name: path.parent for path in project.glob("runs/*/*/model.pt")}
    single = "ppo_torch_Hopper ppo_torch_Walker2d ppo_torch_Ant ppo_torch_Humanoid sac_torch_Hopper"
    expected = {f"{name}-v4_s0" for name in single.split()}
    array = {f"ppo_torch_Hopper-v4_cli0-{x}_s{seed}" for x in (1, 3) for seed in (0, 1, 2)}
    assert set(runs) == expected | array | {"sac_torch_Hopper-v4_aut_s0"}
    ranks = {
        name: re.search(r'"ranks": (\d)', (f / "config.json").read_text())[1]
        for name, f in runs.items()
    }
    assert {name for name in runs if ranks[name] == "4"} == {n for n in expected if "ppo" in n}
    (sweep,) = project.glob("sweep.sh-*.log")
    assert sweep.read_text().endswith("2 runs: 1 done, 1 finished before\n")
    assert len(list(project.glob("array.sh-*.log"))) == 6


def test_a_job_that_is_stopped_in_all_ways_continues(cluster, project):
    """By a preemption with a grace period, by `scontrol requeue`, and by `scancel`."""
    where, done = project / "runs", 0

    def submit(epochs):
        flags = shlex.join(as_flags(**ENDLESS | dict(train_pi_iters=2, epochs=epochs)))
        line = "sbatch --parsable --ntasks-per-node=1 train.sh"  # two ranks have cores enough
        return run(cluster, project, line, flags).stdout.strip()

    job = submit(10**6)
    preempt = "srun --partition=high --nodes=3 --exclusive true"
    stops = {
        preempt: "PENDING",
        f"scontrol requeue {job}": "PENDING",
        f"scancel {job}": "CANCELLED",
    }
    for restarts, (stop, state) in enumerate(stops.items()):
        wait_until(lambda done=done: epochs(where) > done + 2)
        assert cluster.job(job)["Restarts"] == str(restarts)
        assert run(cluster, project, stop).returncode == 0
        wait_until(lambda state=state: cluster.job(job)["JobState"] == state)
        assert not processes(where)
        done = epochs(where)
    job = submit(done + 2)
    wait_until(lambda: cluster.job(job)["JobState"] == "COMPLETED")
    assert sum(log.read_text().count("resuming after") for log in project.glob("*.log")) == 3
    flags = shlex.join(as_flags(**ENDLESS | dict(train_pi_iters=2, epochs=done + 2)))
    unbroken = "srun --mpi=pmi2 --nodes=2 python ppo_torch.py --data-dir whole"
    assert run(cluster, project, unbroken, flags).returncode == 0
    assert_same(only_run(where), only_run(project / "whole"))


def test_a_job_requeues_itself_before_its_time_limit(cluster, project):
    """Slurm looks at time limits every half a minute, so any program will do that takes longer."""
    (project / ".venv" / "bin" / "python").write_text("#!/bin/sh\nexec sleep 100\n")
    sent = run(cluster, project, "sbatch --parsable --time=1 train.sh")
    job = sent.stdout.strip()
    wait_until(lambda: cluster.job(job)["Restarts"] == "1")
    cluster.run(f"scancel {job}")
    (log,) = project.glob("*.log")
    assert "TIME LIMIT" not in log.read_text()


def test_a_failed_job_is_not_requeued(cluster, project):
    job = run(cluster, project, "sbatch --parsable train.sh", "--gamma 2").stdout.strip()
    wait_until(lambda: cluster.job(job)["JobState"] == "FAILED")
    assert cluster.job(job)["ExitCode"] == "2:0"
    (log,) = project.glob("*.log")
    sentence = "ppo_torch.py: error: --gamma must be between 0 and 1, got 2.0"
    assert sentence in said(log.read_text())


def test_a_launcher_that_does_not_fit_is_one_sentence(cluster, project):
    """Slurm without PMI, and with what a job under --mpi=pmix has in its environment."""
    script = "python vpg_torch.py --env-id CartPole-v1 --epochs 1 --steps-per-epoch 100"
    pmix = f"env PMIX_RANK=0 PMIX_NAMESPACE=x {script}"
    for command in (script, pmix):
        done = run(cluster, project, f"srun --mpi=none --ntasks=2 --nodes=2 {command}")
        assert done.returncode == 2
        (sentence,) = said(done.stderr)
        assert re.match("vpg_torch.py: error: 2 processes were started, but each thinks", sentence)
        assert sentence.endswith("; use the mpirun that was installed with it, or srun --mpi=pmi2")
        assert not (project / "runs").exists()
    done = run(cluster, project, f"srun --mpi=none {pmix}")
    assert (done.returncode, done.stderr) == (0, ""), "one process needs no launcher"
    done = run(cluster, project, f"srun --mpi=none --cpus-per-task=2 {pmix} --cpu 2 --seed 1")
    assert (done.returncode, done.stderr) == (0, ""), "or brings its own"


def test_a_grid_that_loses_a_task_ends_and_continues(cluster, project):
    flags = shlex.join(as_flags(**ENDLESS, data_dir=project / "g"))
    words = f"python grid.py vpg_torch {flags} --seed 0 1"
    line = f". .venv/bin/activate; srun --mpi=pmi2 --kill-on-bad-exit -n3 -N3 {words}"
    process = cluster.popen(line, cwd=project)
    names = [f"vpg_torch_CartPole-v1_s{seed}" for seed in (0, 1)]
    models = [project / "g" / "vpg_torch_CartPole-v1" / name / "model.pt" for name in names]
    wait_until(lambda: all(model.exists() for model in models))
    tasks = [pid for pid in processes(project / "g") if is_grid(pid)]
    assert len(tasks) == 3
    os.kill(tasks[-1], signal.SIGKILL)
    assert process.wait(30) == 137
    wait_until(lambda: not processes(project / "g"), 30)
    line = line.replace(
        str(ENDLESS["epochs"]), str(1 + max(len(progress(m.parent)) for m in models))
    )
    done = cluster.run(line, cwd=project)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("2 runs: 2 done\n")
    for model in models:
        log = model.with_name("log.txt").read_text()
        assert [log.count(x) for x in ("resuming after", "another process")] == [1, 0]


def is_grid(pid):
    return b"grid.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
