"""A Slurm cluster of three nodes on this machine, from Debian's packages slurm-wlm and munge.

All of it lives in one folder and on loopback: the configuration, munge's key and socket, state and
logs. It needs no service manager, no user and no file outside the folder. The daemons are children
of this process and end with it, however it ends.
"""

import contextlib
import ctypes
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = "munged slurmctld slurmd sbatch srun salloc scontrol".split()
NODES = ["node1", "node2", "node3"]
# cred_expire: what a requeued job waits before it starts again; two minutes, if nobody says so.
# config_overrides: believe the number of cores below. The partition "high" preempts jobs in "low".
CONFIG = """
ClusterName=sidespin
FirstJobId={first_job}
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/spool_%n
StateSaveLocation={folder}/state
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
KillWait=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node[1-3] NodeHostname=localhost Port=[{ports[1]}-{ports[3]}] CPUs=4
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=10
PartitionName=high Nodes=ALL PriorityTier=2
"""


def missing():
    """Return the programs that this machine lacks."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    return [name for name in PROGRAMS if not shutil.which(name, path=path)]


class Cluster:
    """`with Cluster(folder) as cluster:` starts it and ends it, and all of its jobs."""

    def __init__(self, folder):
        self.folder, self.daemons = Path(folder), []
        self.environ = {**os.environ, "SLURM_CONF": f"{folder}/slurm.conf"}
        self.environ["PATH"] += ":/usr/sbin"

    def __enter__(self):
        try:
            return self.start()
        except BaseException:
            self.__exit__()
            raise

    def start(self):
        (self.folder / "state").mkdir(parents=True)
        # MPICH names shared memory after the job: two clusters must not have the same numbers
        own = dict(first_job=1 + os.getpid() % 10_000 * 1000, ports=free_ports(4))
        config = CONFIG.format(folder=self.folder, user=getpass.getuser(), **own)
        (self.folder / "slurm.conf").write_text(config)
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "munge.key").chmod(0o400)
        files = "key-file=munge.key socket=munge.socket pid-file=munge.pid log-file=munge.log"
        files = [f"--{x.replace('=', f'={self.folder}/')}" for x in files.split()]
        self.daemon("munged", "--foreground", "--force", "--num-threads=2", *files)
        wait_until((self.folder / "munge.socket").exists)
        self.daemon("slurmctld", "-D", "-c")
        for node in NODES:
            self.daemon("slurmd", "-D", "-N", node)
        wait_until(lambda: self.output("sinfo -hN -o %T").split() == ["idle"] * 2 * len(NODES))
        return self

    def __exit__(self, *error):
        with contextlib.suppress(subprocess.TimeoutExpired, AssertionError):
            self.output("scancel --full --signal=KILL --state=running; scancel --state=pending")
            wait_until(lambda: not self.output("squeue -h"), 20)
        for process in reversed(self.daemons):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def daemon(self, *command):
        libc = ctypes.CDLL(None)
        options = dict(stdin=subprocess.DEVNULL, env=self.environ, start_new_session=True)
        with open(self.folder / f"{command[0]}.out", "ab") as out:
            options |= dict(stdout=out, stderr=out, cwd=self.folder)
            options |= dict(preexec_fn=lambda: libc.prctl(1, signal.SIGKILL))
            self.daemons.append(subprocess.Popen(command, **options))

    def run(self, command, timeout=120, **how):
        """Run a line of bash to its end."""
        return subprocess.run(["bash", "-c", command], **self.how(how), timeout=timeout)

    def popen(self, command, **how):
        """Start a line of bash."""
        return subprocess.Popen(["bash", "-c", command], **self.how(how))

    def how(self, how):
        streams = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        env = {**self.environ, **how.pop("env", {})}
        return {"env": env, "stdin": subprocess.DEVNULL, **streams, **how}

    def output(self, command):
        return self.run(command, timeout=30).stdout

    def job(self, number):
        """Return what Slurm knows of a job, as a dictionary."""
        shown = self.output(f"scontrol show job {number}").split()
        return dict(word.split("=", 1) for word in shown if "=" in word)


def free_ports(n):
    """Return ports in a row that nobody listens on, others than another process would choose."""
    for first in range(20_000 + os.getpid() % 10_000 * n, 65_000, n):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + n):
                stack.enter_context(socket.socket()).bind(("", port))
            return range(first, first + n)
    raise AssertionError("no free ports")


def wait_until(true, seconds=180):
    deadline = time.time() + seconds
    while not true():
        assert time.time() < deadline
        time.sleep(0.1)
