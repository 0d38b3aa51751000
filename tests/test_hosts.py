"""Ranks on several hosts: they train, end together whatever happens, and resume, byte for byte."""

import os
import re
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers import MPIRUN, ROOT, as_flags, assert_same, brief, only_run
from hosts import PASSWORD, Switch, missing
from test_readme import copy_project, warm_python

from common.guard import children_of, name_of, parent_of, planned_hosts
from common.launch import placement

WHY_NOT = missing()
needs_hosts = pytest.mark.skipif(bool(WHY_NOT), reason=str(WHY_NOT))
GUIDE = (ROOT / "docs" / "clusters.md").read_text()
A_AND_B, A_AND_C = ("-hosts", "nodea,nodeb", "-np", "2"), ("-hosts", "nodea,nodec", "-np", "2")


class Cluster:
    """Three hosts that share a folder."""

    def __init__(self, folder, hosts):
        self.folder, self.hosts, self.a, self.b, self.c = folder, hosts, *hosts
        warm_python(folder / "bin" / "python")
        self.at_rest = self.processes()

    def processes(self):
        return {(host.name, pid) for host in self.hosts for pid in host.processes()}

    def assert_at_rest(self, deadline):
        while left := self.processes() - self.at_rest:
            assert time.time() < deadline, left
            time.sleep(0.1)

    def mpirun(self, name, *launcher, script="ppo_torch", **settings):
        return Job(self, self.folder / name, launcher, script, settings)


class Job:
    """A script under mpirun, started on the first host, which stops in its third epoch."""

    def __init__(self, cluster, folder, launcher, script, settings):
        self.cluster, self.folder, self.hold = cluster, folder, folder / "hold"
        folder.mkdir()
        self.hold.touch()
        settings = {"env_id": "envs:Holds-v0", "epochs": 4, **settings}
        words = [f"{script}.py", *as_flags(**brief(script, **settings)), "--data-dir", folder]
        self.start(["mpirun", *launcher, "python", *words])

    def start(self, words):
        path = f"{self.cluster.folder}/bin:{Path(MPIRUN).parent}:{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "tests")}
        env["HOLD"] = str(self.hold)
        streams = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.process = self.cluster.a.popen(*words, env=env, **streams)

    def stop_in_third_epoch(self):
        while not list(self.folder.glob("*/*/checkpoint/epoch2.json")):
            assert self.process.poll() is None, self.process.communicate()[1]
            time.sleep(0.05)

    def end(self, timeout=60):
        self.errors = self.process.communicate(timeout=timeout)[1]
        return self.process.returncode

    def resume(self):
        """Do as the job has said at its end."""
        (command,) = re.findall("to resume: (mpirun .* --resume)$", self.errors, re.M)
        self.hold.unlink(missing_ok=True)
        self.start(["sh", "-c", command])
        assert self.end() == 0, self.errors
        return only_run(self.folder)

    def rank_on(self, host):
        """Return the process of this job's only rank on a host."""
        found = host.processes().items()
        (pid,) = [p for p, line in found if f"{self.folder} " in line and "mpirun" not in line]
        return pid

    def ssh(self):
        (pid,) = [pid for pid in children_of(self.process.inside) if name_of(pid) == "ssh"]
        return pid


@pytest.fixture(scope="module")
def started_cluster(tmp_path_factory):
    with Switch("nodea", "nodeb", "nodec") as hosts:
        yield Cluster(tmp_path_factory.mktemp("hosts"), hosts)


@pytest.fixture
def cluster(started_cluster):
    """The hosts, at rest and connected even after a test that failed."""
    yield started_cluster
    for host in started_cluster.hosts:
        host.clear()
        host.connect()


# If one of the launcher's processes ends, so do the others: the first that is noticed is named.
LAUNCHER = [
    "mpirun on nodea has ended",
    "hydra_pmi_proxy on nodeb has ended",
    "the ssh session on nodeb has ended",
]
FAULTS = {
    "rank": (
        lambda job: os.kill(job.rank_on(job.cluster.b), signal.SIGKILL),
        "rank 1 on nodeb was killed or crashed",
    ),
    "rank-tf1": (
        lambda job: os.kill(job.rank_on(job.cluster.a), signal.SIGKILL),
        "rank 0 on nodea was killed or crashed",
    ),
    "mpirun": (
        lambda job: os.kill(job.process.inside, signal.SIGKILL),
        LAUNCHER[0],
    ),
    "proxy-sac": (
        lambda job: os.kill(parent_of(job.rank_on(job.cluster.b)), signal.SIGKILL),
        LAUNCHER[1],
    ),
    "ssh": (
        lambda job: os.kill(job.ssh(), signal.SIGKILL),
        LAUNCHER[2],
    ),
    "ctrl-c": (
        lambda job: os.kill(job.process.inside, signal.SIGINT),
        "interrupted after 2 epochs",
    ),
    "sigterm": (
        lambda job: os.kill(job.rank_on(job.cluster.b), signal.SIGTERM),
        "interrupted after 2 epochs",
    ),
}


def script_of(name):
    return {"tf1": "ppo_tf1", "sac": "sac_torch"}.get(name.partition("-")[2], "ppo_torch")


def break_off(cluster, name):
    """Start a job and have it suffer; return it once all of it is gone from the first host."""
    act, what = FAULTS[name]
    job = cluster.mpirun(name, *A_AND_B, script=script_of(name))
    job.stop_in_third_epoch()
    began = time.time()
    act(job)
    assert job.end() != 0
    assert time.time() - began < 20
    said = [line for line in job.errors.splitlines() if "ssh" not in line or "resume" in line]
    what = "|".join(LAUNCHER) if what in LAUNCHER else what
    start = f"{script_of(name)}.py: (error: )?({what}); to resume: mpirun -hosts nodea,nodeb -np 2 "
    assert len(said) == 1 and re.match(start, said[0]), job.errors
    return job


def cut_off(cluster):
    """Pull a host's cable for 3 seconds, which does no harm, and then for good."""
    file = cluster.folder / "hostfile"
    file.write_text("# ours\nnodea\n\nnodec:1\n")
    brave = cluster.mpirun("pause", *A_AND_C)
    job = cluster.mpirun("cut", "-f", file, "-np", "2")
    brave.stop_in_third_epoch()
    job.stop_in_third_epoch()
    cluster.c.connect(False)
    brave.hold.unlink()  # now its ranks need the network
    time.sleep(3)
    cluster.c.connect()
    assert (brave.end(), brave.errors) == (0, "")
    cluster.c.connect(False)
    began = time.time()
    assert job.end() != 0
    assert time.time() - began < 30
    said = "error: nodec has not answered for 21 seconds; to resume: mpirun -hosts nodea,nodec -np"
    assert said in job.errors
    return brave, job


@needs_hosts
def test_whatever_happens_all_ranks_end_and_resume(cluster):
    """All faults at once, each in a job of its own."""
    with ThreadPoolExecutor(20) as pool:
        cut = pool.submit(cut_off, cluster)
        whole = {
            name: cluster.mpirun(f"whole-{name}", *A_AND_B, script=script_of(f"-{name}"))
            for name in ("tf1", "sac", "torch")
        }
        for job in whole.values():
            job.hold.unlink()
        jobs = list(pool.map(lambda name: break_off(cluster, name), FAULTS))
        for job in whole.values():
            assert (job.end(), job.errors) == (0, "")
        brave, lost = cut.result()
        cluster.assert_at_rest(time.time() + 10)
        cluster.c.connect()
        resumed = list(pool.map(Job.resume, [*jobs, lost]))
    for folder in [*resumed, only_run(brave.folder)]:
        framework = next(name for name in ("tf1", "sac", "torch") if name in folder.name)
        assert_same(only_run(whole[framework].folder), folder)
    cluster.assert_at_rest(time.time() + 10)


@needs_hosts
def test_the_commands_of_the_guide_typed_in_order(tmp_path):
    """On two hosts without keys, in a copy of the project; what would take hours is shortened."""
    section = GUIDE.partition("## Two machines with ssh")[2].partition("\n## ")[0]
    cost = GUIDE.partition("## What the network costs")[2]
    blocks = re.findall(r"```sh\n(.*?)```", section + cost, re.S)
    assert sum(block.count("mpirun") for block in blocks) == 5
    copy_project(tmp_path, "ppo_torch.py")
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    warm_python(tmp_path / "bin" / "python")
    (tmp_path / "setup.sh").write_text(f'PATH="{tmp_path}/bin:{Path(MPIRUN).parent}:$PATH"\n')
    askpass = tmp_path / "askpass"
    askpass.write_text(f"#!/bin/sh\necho {PASSWORD}\n")
    askpass.chmod(0o755)
    env = {**os.environ, "SSH_ASKPASS": str(askpass), "SSH_ASKPASS_REQUIRE": "force"}
    shorter = """mpirun() { case "$*" in
        *_torch.py*) set -- "$@" --epochs 1 --steps-per-epoch 40 --train-{pi,v}-iters=1 ;; esac
        command mpirun "$@"; }"""
    typed = "\n".join([f"set -e; cd {tmp_path}", shorter, *blocks])
    with Switch("nodea", "nodeb", keys=False) as (a, b):
        done = a.run("bash", "-c", typed, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert b.run("grep", "-q", "ed25519", "/root/.ssh/authorized_keys").returncode == 0
    names = [line for line in done.stdout.splitlines() if line.startswith("node")]
    assert (names[0], sorted(names[1:])) == ("nodeb", ["nodea", "nodeb"])
    assert done.stdout.count("4 ranks") == done.stdout.count("done after 1 epoch") == 3


def test_the_guide_has_the_sentences_of_the_faults_and_the_plan(monkeypatch):
    for _, what in FAULTS.values():
        assert (
            re.sub(r"\d+ epochs", "12 epochs", what).replace("rank 0 on nodea", "rank 1 on nodeb")
            in GUIDE
        )
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from network import plan

    for row in plan():
        assert f"| {' | '.join(row.values())} |\n" in GUIDE


@needs_hosts
def test_a_host_without_the_project_is_named(cluster):
    copy = cluster.folder / "copy"  # without the environment, which the host does have
    copy_project(copy, "ppo_torch.py")
    with cluster.c.without(copy):
        launcher = "-hosts", "nodea:2,nodec", "-np", "3"
        job = cluster.mpirun("lacks", *launcher, script=f"{copy}/ppo_torch", steps_per_epoch=90)
        assert job.end() != 0
    *_, said = job.errors.splitlines()
    assert "No such file or directory" in job.errors
    assert said.startswith("ppo_torch.py: error: the ranks on nodec ended before they began")
    cluster.assert_at_rest(time.time() + 10)


@needs_hosts
def test_a_host_that_does_not_see_the_folder_is_named(cluster):
    (cluster.folder / "private").mkdir()
    with cluster.c.without(cluster.folder / "private"):
        job = cluster.mpirun("private/disk", *A_AND_C)
        assert job.end() == 2
    folder = f"{job.folder}/ppo_torch_envs-Holds-v0/ppo_torch_envs-Holds-v0_s7"
    assert job.errors == (
        f"ppo_torch.py: error: nodec does not see {folder} of nodea: choose a --data-dir that all "
        "hosts share\n"
    )
    assert [path.name for path in job.folder.iterdir()] == ["hold"]


def test_the_hosts_of_all_ranks_are_written_as_mpirun_reads_them():
    """It fills the hosts of its list in turn, and begins again at the end of the list."""
    for ranks, words in {"abab": "a,b", "aabb": "a:2,b:2", "aabaa": "a:2,b", "aaa": "a"}.items():
        assert placement(list(ranks)) == words


def test_the_hosts_of_mpiruns_command_line_are_read_only_if_they_are_plain(tmp_path):
    """A program's name must not pass for a host that is not there."""
    (tmp_path / "file").write_text("# ours\na:2\n\nb\nc\n")
    for line, hosts in {
        "mpirun -hosts a,b -np 2 python x.py": "ab",
        "mpirun -hosts a:2,b,c -n 3 python x.py --resume": "ab",
        "mpirun -f file -np 9 python x.py": "abc",
        "mpirun -np 3 -f file python x.py": "ab",
        "mpirun -np 2 -hosts a,b nice -n 5 python x.py": "",
        "mpirun -np 2 -hosts a,b python -u x.py": "",
        "mpirun -hosts a,b -ppn 2 -np 2 python x.py": "",
        "mpirun -np 2 python x.py": "",
        "mpirun -hosts a,b -np 2 python other.py": "",
    }.items():
        words = line.replace(",", " ").replace(":", " ").split()  # mpirun does so to its own words
        assert planned_hosts(words, "x.py", tmp_path) == list(hosts)
