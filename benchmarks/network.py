"""What the network between ranks costs: measured between hosts on this machine, and planned.

    python benchmarks/network.py            needs root, iproute2 and openssh-server
    python benchmarks/network.py --plan     only the plan: how many hosts pay

The hosts are network namespaces (tests/hosts.py), so "no wire" is TCP in the kernel; `tc` limits
the other links to the bandwidth of a wire. On hosts of your own, time an Allreduce:

    mpirun -hosts nodea,nodeb -np 2 python benchmarks/network.py --allreduce
"""

import contextlib
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Floats in an Allreduce: KL of PPO; gradients of PPO's policy and V, of SAC's two Qs and policy
KL, PPO_PI, PPO_V, SAC_Q, SAC_PI = 2, 5126, 4993, 139_778, 70_406  # on Hopper-v4
# Seconds per update of PyTorch on one rank (README.md), and the floats of its reductions
PPO = 4000 / 6869, 80 * [KL, PPO_PI, PPO_V]
SAC = 1 / 330, [SAC_Q, SAC_PI]
LINKS = {"1 Gbit/s": (50e-6, 1e9), "10 Gbit/s": (25e-6, 1e10), "100 Gbit/s": (10e-6, 1e11)}
HOSTS = (2, 4, 8, 16, 32, 64)


def allreduce_seconds(hosts, floats, latency, bits_per_second):
    """Return how long an Allreduce takes, as MPICH does it, with one rank per host."""
    seconds = 32 * floats / bits_per_second
    if floats <= 512:  # all of it, in log2(hosts) rounds
        return math.log2(hosts) * (latency + seconds)
    # Its parts, in twice as many rounds
    return 2 * math.log2(hosts) * latency + 2 * (1 - 1 / hosts) * seconds


def plan():
    """How many times faster than one host: PPO with an epoch of 4000 steps, SAC per step

    PPO's ranks share the 4000 steps; each rank of SAC makes one update per step of its own.
    """
    for hosts in HOSTS:
        row = {"hosts": str(hosts)}
        for link, (latency, bandwidth) in LINKS.items():
            seconds, reductions = PPO
            cost = sum(allreduce_seconds(hosts, n, latency, bandwidth) for n in reductions)
            row[f"PPO, {link}"] = f"{seconds / (seconds / hosts + cost):.1f}"
        for link, (latency, bandwidth) in LINKS.items():
            seconds, reductions = SAC
            cost = sum(allreduce_seconds(hosts, n, latency, bandwidth) for n in reductions)
            row[f"SAC, {link}"] = f"{hosts * seconds / (seconds + cost):.1f}"
        yield row


def measure():
    """Two ranks on one host and on two: microseconds per Allreduce, and steps per second

    The columns are Allreduces of 2, 5,126 and 139,778 floats (the KL and the policy's gradient of
    PPO, the Qs' gradients of SAC) and the scripts in PyTorch on Hopper-v4; see speed.py.
    """
    from hosts import Switch
    from speed import best_rates, mpirun, script

    with contextlib.ExitStack() as stack:
        jobs, all_hosts = {}, []
        for link in ("no wire", "10 Gbit/s", "1 Gbit/s"):
            hosts = stack.enter_context(Switch("nodea", "nodeb"))
            all_hosts += hosts
            for host in hosts if link in LINKS else []:
                rate = f"rate {LINKS[link][1]:.0f} burst {LINKS[link][1] / 2e7:.0f}kb latency 50ms"
                host.run(*f"tc qdisc add dev eth0 root tbf {rate}".split(), check=True)
            for names in ("nodea", "nodea,nodeb") if link == "no wire" else ("nodea,nodeb",):
                label = f"two hosts, {link}" if "," in names else "one host"
                jobs[label] = hosts[0].words(mpirun(), "-hosts", names, "-np", "2")
        rows = {label: {"": label} for label in jobs}
        for label, launcher in jobs.items():
            # At real-time priority: neither rank ever waits for a core
            words = [*launcher, "chrt", "--fifo", "1", sys.executable, __file__, "--allreduce"]
            times = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
            rows[label] |= dict(zip(("2 floats", "5,126", "139,778"), times, strict=True))
        for algo, window, warm_up, rounds in ("ppo", 4000, 1, 3), ("sac", 200, 12, 6):
            settings = {"steps_per_epoch": 4000} if algo == "ppo" else {}
            contenders = {
                label: script(algo, "torch", "Hopper-v4", 2, launcher=launcher, **settings)
                for label, launcher in jobs.items()
            }
            for label, rate in best_rates(contenders, window, warm_up, rounds).items():
                rows[label][f"{algo.upper()}, steps per second"] = f"{rate:,.0f}"
            for host in all_hosts:
                host.clear()
    yield from rows.values()


def allreduce():
    """Print the microseconds of an Allreduce, for several sizes: the best tenth of many."""
    import numpy as np
    from mpi4py import MPI

    best = []
    for n in (KL, PPO_PI, SAC_Q):
        x, out, times = np.ones(n, np.float32), np.empty(n, np.float32), []
        for _ in range(300):
            MPI.COMM_WORLD.Barrier()
            start = time.perf_counter()
            MPI.COMM_WORLD.Allreduce(x, out)
            times.append(time.perf_counter() - start)
        best.append(f"{1e6 * np.quantile(times, 0.1):.0f}")
    if MPI.COMM_WORLD.Get_rank() == 0:
        print(*best)


def show(table):
    title, *text = table.__doc__.splitlines()
    print(f"### {title}\n" + "\n".join(line.strip() for line in text))
    rows = list(table())
    print(f"| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}")
    for row in rows:
        print(f"| {' | '.join(row.values())} |")
    print()


if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]
    if "--allreduce" in sys.argv:
        allreduce()
    else:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            tempfile.tempdir = folder
            if "--plan" not in sys.argv:
                show(measure)
            show(plan)
