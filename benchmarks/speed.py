"""Steps per second of the scripts, compared with alternatives and with the limit.

    pip install -r benchmarks/requirements.txt
    python benchmarks/speed.py

prints tables in Markdown; README.md next to this file has those of a full run. To run only a part:

    python benchmarks/speed.py --sections off-policy --algos sac

How the work is matched:

- All programs of a row run at the same time but take turns, for several rounds: one steps through a
  window (on-policy, an epoch of 4000 steps with its update; off-policy, 100 steps with 100 updates)
  while the others wait. The first windows (imports, compilation, random steps) do not count. Of the
  others, each program's best counts: interference makes programs slower, never faster. See
  paced.py.
- Each program is one process with one thread, pinned to one core.
- Our scripts run from their own command line, including logging and checkpoints, which the others
  do not write. Test episodes after each epoch are switched off, because the others have none.
- On-policy: separate 64-64 networks for the policy and the value function; one batch of 4000 steps.
  PPO takes all 80 steps on the policy and 80 on the value function (early stopping at target_kl is
  off), as do the others with n_epochs=80 and batch_size=4000. TRPO takes 10 conjugate gradient
  steps and 80 on the value function, like sb3-contrib's. VPG has no counterpart with many steps on
  the value function, so it is measured with one (against PPO with one epoch, which is the same
  work) and, alone, with its 80.
- Off-policy: 256-256 networks, as many updates as steps, a replay buffer of a million transitions,
  a fixed entropy coefficient, a policy delay of 2 in TD3. Every program follows its default
  schedule: ours make 50 updates after every 50 steps, the others one after each step. "sbx 50" is
  SBX with our bursts, which it compiles into one loop.
- The limit on-policy is env.step alone, with the actions that the torch script took; off-policy, it
  adds the matrix products of the updates, forward and backward, computed by torch, NumPy or XLA:
  by the one that is fastest on this machine, which the row names.
"""

import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import tyro

HERE = Path(__file__).resolve().parent
ON_POLICY, OFF_POLICY = ("vpg", "ppo", "trpo"), ("ddpg", "td3", "sac")
FRAMEWORKS = ("torch", "tf1")
PEERS = {"sb3": "stable-baselines3", "sb3-contrib": "sb3-contrib", "sbx": "sbx-rl"}
PACKAGES = "torch tensorflow-cpu tensorflow gymnasium mujoco numpy mpi4py mpich jax".split()
RATIOS = ("torch/sb3 tf1/sb3 torch/sbx tf1/sbx tf1/torch torch/limit tf1/limit").split()


@dataclass
class Args:
    sections: tuple[
        Literal["on-policy", "off-policy", "ranks", "start-up", "memory", "growth"], ...
    ] = ("on-policy", "off-policy", "ranks", "start-up", "memory", "growth")  # which tables
    algos: tuple[Literal["vpg", "ppo", "trpo", "ddpg", "td3", "sac"], ...] = (
        ON_POLICY + OFF_POLICY
    )  # which rows of the first two tables
    batch_sizes: tuple[int, ...] = (100, 256)  # for the off-policy rows
    on_policy_rounds: int = 4  # windows per program, of which the best counts
    off_policy_rounds: int = 10  # the same for off-policy, where windows are short
    on_policy_window: int = 4000  # steps per on-policy window: one epoch
    off_policy_window: int = 100  # steps per off-policy window: whole bursts of 50


class Program:
    """A program in its own processes, which step only when told to.

    A single process is pinned to one core, so that only one of its threads runs at a time.
    """

    def __init__(self, *argv, ranks=1, core=-1, launcher=None, **env):
        path = os.path.join(tempfile.mkdtemp(), "pace")
        server = socket.socket(socket.AF_UNIX)
        server.bind(path)
        server.listen()
        server.settimeout(1)
        launcher = launcher or ([mpirun(), "-np", str(ranks)] if ranks > 1 else [])
        self.ranks, self.argv, self.connections = ranks, [*map(str, argv)], []
        self.errors = tempfile.TemporaryFile()
        self.start = time.perf_counter()
        self.process = subprocess.Popen(
            [*launcher, sys.executable, *self.argv],
            env={**one_thread(), "PACE": path, "PYTHONPATH": str(HERE), **env},
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            start_new_session=True,
            preexec_fn=(lambda: hold_on(core)) if ranks == 1 else None,
        )
        while len(self.connections) < ranks:
            try:
                self.connections.append(Connection(server.accept()[0].detach()))
            except TimeoutError:
                if self.process.poll() is not None:
                    self.fail()

    def go(self, what):
        """Let every rank take this many steps, or step with these actions."""
        self.steps = self.ranks * (what if isinstance(what, int) else len(what))
        for connection in self.connections:
            connection.send(what)

    def report(self):
        """Wait for the window to end; return when it began and ended, over all ranks."""
        try:
            starts, ends, actions, memory, self.waits = zip(*(c.recv() for c in self.connections))
        except EOFError:
            self.fail()
        self.actions, self.memory = actions[0], sum(memory)
        return min(starts), max(ends)

    def fail(self):
        self.errors.seek(0)
        sys.exit(f"{' '.join(self.argv)} ended:\n{self.errors.read().decode()}")

    def stop(self):
        self.process.send_signal(signal.SIGTERM)  # a launcher passes it on to its ranks
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def mpirun():
    return shutil.which("mpirun", path=Path(sys.executable).parent) or "mpirun"


def one_thread():
    """Return environment variables that limit libraries to one thread."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {**os.environ, **dict.fromkeys(names, "1")}


def hold_on(core):
    if hasattr(os, "sched_setaffinity"):  # on Linux
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[core]})


def script(algo, framework, env_id, ranks=1, core=-1, launcher=None, env=(), **settings):
    """Start one of our scripts as a user would; settings are its flags."""
    defaults = {"env_id": f"paced:Paced{env_id}", "epochs": 1_000_000}
    defaults["data_dir"] = tempfile.mkdtemp()
    if algo in OFF_POLICY:
        defaults |= {"start_steps": 1000 * ranks, "update_after": 1000 * ranks}
        defaults |= {"num_test_episodes": 0, "steps_per_epoch": 1000 * ranks}
    if algo == "ppo":
        defaults["target_kl"] = 1e9
    flags = []
    for key, value in {**defaults, **settings}.items():
        flags += [f"--{key.replace('_', '-')}", *(value if isinstance(value, tuple) else [value])]
    path = HERE.parent / f"{algo}_{framework}.py"
    return Program(path, *flags, ranks=ranks, core=core, launcher=launcher, **dict(env))


def peer(package, algo, env_id, **settings):
    """Start the same with another package; settings are those of peers.py."""
    return Program(HERE / "peers.py", package, algo, f"paced:Paced{env_id}", json.dumps(settings))


def limit(env_id, *work):
    return Program(HERE / "limits.py", env_id, *work)


def installed(*packages):
    return [package for package in packages if known_version(PEERS[package])]


def best_rates(contenders, window, warm_up, rounds):
    """Let contenders take turns; return the best steps per second of each, and stop them.

    A contender is one program, or several that step at the same time. "limit" repeats the actions
    of the first contender.
    """
    contenders = {k: x if isinstance(x, list) else [x] for k, x in contenders.items()}
    first = next(iter(contenders.values()))[0]
    best = dict.fromkeys(contenders, 0.0)
    for i in range(warm_up + rounds):
        for name, programs in contenders.items():
            for program in programs:
                program.go(first.actions if name == "limit" else window // program.ranks)
            starts, ends = zip(*(program.report() for program in programs))
            rate = sum(program.steps for program in programs) / (max(ends) - min(starts))
            best[name] = max(best[name], rate if i >= warm_up else 0.0)
    for programs in contenders.values():
        for program in programs:
            program.stop()
    return best


def compared(best, columns):
    """Return rates and RATIOS as text, with a dash where a program is missing."""
    row = {name: f"{best[name]:,.0f}" if name in best else "-" for name in columns}
    for ratio in RATIOS:
        x, y = ratio.split("/")
        known = x in best and y in best
        row[f"{x} / {y}"] = (
            f"{best[x] / best[y]:{'.0%' if y == 'limit' else '.2f'}}" if known else "-"
        )
    return row


def on_policy(args) -> Iterator[dict]:
    """VPG, PPO and TRPO: steps per second, with an update after 4000 steps"""
    steps, hidden_sizes = args.on_policy_window, (64, 64)
    rows = [("vpg", 1, ["sb3"]), ("vpg", 80, []), ("ppo", 80, ["sb3", "sbx"])]
    rows += [("trpo", 80, ["sb3-contrib"])]
    for algo, iters, packages in rows:
        for env_id in ("Hopper-v4", "HalfCheetah-v4"):
            if algo not in args.algos:
                continue
            settings = {"steps_per_epoch": steps, "hidden_sizes": hidden_sizes}
            contenders = {
                framework: script(algo, framework, env_id, train_v_iters=iters, **settings)
                for framework in FRAMEWORKS
            }
            settings = {"steps": steps, "iters": iters, "hidden_sizes": hidden_sizes}
            for package in installed(*packages):
                column = package.removesuffix("-contrib")
                kind = "ppo" if algo == "vpg" else algo
                contenders[column] = peer(package, kind, env_id, **settings)
            contenders["limit"] = limit(env_id)
            best = best_rates(contenders, steps, 1, args.on_policy_rounds)
            label = f"{algo.upper()}, {env_id}, {iters} value step{'s' * (iters > 1)}"
            yield {"": label, **compared(best, ["torch", "tf1", "sb3", "sbx", "limit"])}


def off_policy(args) -> Iterator[dict]:
    """DDPG, TD3 and SAC on Hopper-v4: steps per second, with one update per step"""
    window, hidden_sizes = args.off_policy_window, (256, 256)
    warm_up = 2 + 1000 // window
    for algo in OFF_POLICY:
        for batch_size in args.batch_sizes:
            if algo not in args.algos:
                continue
            settings = {"batch_size": batch_size, "hidden_sizes": hidden_sizes}
            contenders = {
                framework: script(algo, framework, "Hopper-v4", **settings)
                for framework in FRAMEWORKS
            }
            for package in installed("sb3", "sbx"):
                contenders[package] = peer(package, algo, "Hopper-v4", burst=1, **settings)
            for package in installed("sbx"):
                contenders["sbx 50"] = peer(package, algo, "Hopper-v4", burst=50, **settings)
            contenders["limit"] = limit("Hopper-v4", algo, batch_size, *hidden_sizes)
            best = best_rates(contenders, window, warm_up, args.off_policy_rounds)
            columns = ["torch", "tf1", "sb3", "sbx", "sbx 50", "limit"]
            row = {"": f"{algo.upper()}, batch {batch_size}", **compared(best, columns)}
            yield {**row, "limit by": contenders["limit"].actions}


def ranks(args) -> Iterator[dict]:
    """PPO and SAC on Hopper-v4 with 1, 2 and 4 ranks: steps per second, summed over ranks

    "2 apart" is two independent one-rank runs at the same time, each on its own core: the most that
    two ranks could reach on this machine. In PPO, ranks share an epoch of 4000 steps; in SAC, each
    rank makes as many updates as steps. "skew" is the share of its time that one of two ranks waits
    for the other to reach a reduction; "exchange" is the share that the reductions themselves take.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    for algo in ("ppo", "sac"):
        for framework in FRAMEWORKS:
            settings, window = {}, 2 * args.off_policy_window
            warm_up, rounds = 2 + 4000 // window, args.off_policy_rounds
            if algo == "ppo":
                settings = {"steps_per_epoch": args.on_policy_window}
                window, warm_up, rounds = args.on_policy_window, 1, args.on_policy_rounds
            contenders = {
                f"{n} rank{'s' * (n > 1)}": script(algo, framework, "Hopper-v4", n, **settings)
                for n in (1, 2, 4)
            }
            if cores > 1:
                apart = [script(algo, framework, "Hopper-v4", core=i, **settings) for i in (0, 1)]
                contenders["2 apart"] = apart
            best = best_rates(contenders, window, warm_up, rounds)
            one, *others = best
            row = {name: f"{rate:,.0f}" for name, rate in best.items()}
            row |= {f"{name} / {one}": f"{best[name] / best[one]:.2f}" for name in others}
            timed = script(algo, framework, "Hopper-v4", 2, env={"TIME_WAITS": "1"}, **settings)
            yield {"": f"{algo.upper()}, {framework}", **row, **waits(timed, window, warm_up)}


def waits(program, window, warm_up, rounds=5):
    """Return the shares of a job's time that its ranks wait, by kind of wait."""
    total, waited = 0.0, {"skew": 0.0, "exchange": 0.0}
    for i in range(warm_up + rounds):
        program.go(window // program.ranks)
        start, end = program.report()
        if i >= warm_up:
            total += (end - start) * program.ranks
            for kind in waited:
                waited[kind] += sum(rank[kind] for rank in program.waits)
    program.stop()
    return {kind: f"{seconds / total:.0%}" for kind, seconds in waited.items()}


def start_up(args) -> Iterator[dict]:
    """Seconds until the first output, the better of two runs, and MB of memory after an epoch

    SB3 has no `--help`: its figure is the time to import it, without TensorFlow, which it would
    import if it is installed. The first epoch is on Hopper-v4: 4000 steps in PPO, and in SAC 2000,
    with updates of batch size 100 in the second half.
    """
    for algo, steps in ("ppo", args.on_policy_window), ("sac", 2000):
        for name in (*FRAMEWORKS, *installed("sb3")):
            command = [HERE.parent / f"{algo}_{name}.py", "--help"]
            if name == "sb3":
                command = [
                    "-c",
                    f"from peers import *; from stable_baselines3 import {algo.upper()}",
                ]
            settings = {"hidden_sizes": (64, 64)} if algo == "ppo" else {"batch_size": 100}
            shown, stepping, epoch = [], [], []
            for _ in range(2):
                start = time.perf_counter()
                subprocess.run(
                    [sys.executable, *command], cwd=HERE, stdout=subprocess.DEVNULL, check=True
                )
                shown.append(time.perf_counter() - start)
                if name == "sb3" and algo == "ppo":
                    program = peer(name, algo, "Hopper-v4", steps=steps, iters=80, **settings)
                elif name == "sb3":
                    sizes = {"burst": 1, "hidden_sizes": (256, 256)}
                    program = peer(name, algo, "Hopper-v4", **sizes, **settings)
                else:
                    program = script(algo, name, "Hopper-v4", steps_per_epoch=steps, **settings)
                program.go(steps)
                first, last = program.report()
                stepping.append(first - program.start)
                epoch.append(last - program.start)
                program.stop()
            times = {"--help": min(shown), "first step": min(stepping), "first epoch": min(epoch)}
            row = {key: f"{seconds:.1f}" for key, seconds in times.items()}
            yield {"": f"{algo.upper()}, {name}", **row, "memory": f"{program.memory / 1e6:,.0f}"}


def memory(args) -> Iterator[dict]:
    """MB of a replay buffer with a million Hopper-v4 transitions"""
    for package in ("ours", *installed("sb3")):
        command = [sys.executable, HERE / "replay.py", package]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        resident, arrays = map(int, output.split())
        row = {"resident": f"{resident / 1e6:,.0f}", "the arrays' bytes": f"{arrays / 1e6:,.0f}"}
        yield {"": package, **row}


def growth(args) -> Iterator[dict]:
    """How speed scales with size: steps per second at each size

    The environment has Hopper's spaces and takes no time, which leaves the scripts' own cost. Speed
    should not depend on the fill of the replay buffer or the number of episodes; layers of twice
    the width need four times the work.
    """
    steps = args.on_policy_window
    for framework in FRAMEWORKS:
        fills = (1000, 100_000, 1_000_000)
        contenders = {}
        for n in fills:
            settings = {"start_steps": n, "update_after": n, "steps_per_epoch": 100_000}
            contenders[n] = script("ddpg", framework, "Blank1000-v0", **settings)
            for window in (n - 100) // 10_000 * [10_000] + (n - 100) % 10_000 // 100 * [100]:
                contenders[n].go(window)
                contenders[n].report()
        best = best_rates(contenders, args.off_policy_window, 2, args.off_policy_rounds)
        yield grown(f"DDPG {framework}, transitions in the replay buffer", best)
    for framework in FRAMEWORKS:
        contenders = {
            steps // length: script(
                "ppo", framework, f"Blank{length}-v0", steps_per_epoch=steps, train_v_iters=1
            )
            for length in (1000, 100, 10)
        }
        best = best_rates(contenders, steps, 1, args.on_policy_rounds)
        yield grown(f"PPO {framework}, episodes per epoch", best)
    for framework in FRAMEWORKS:
        contenders = {
            f"{n}-{n}": script(
                "ppo", framework, "Blank1000-v0", steps_per_epoch=steps, hidden_sizes=(n, n)
            )
            for n in (32, 64, 128)
        }
        best = best_rates(contenders, steps, 1, args.on_policy_rounds)
        yield grown(f"PPO {framework}, hidden sizes", best)


def grown(label, best):
    sizes = [f"{size}: {rate:,.0f}" for size, rate in best.items()]
    first, *_, last = best.values()
    row = dict(zip(("small", "middle", "large"), sizes, strict=True))
    return {"": label, **row, "large / small": f"{last / first:.2f}"}


def machine():
    """Describe what the figures were measured with."""
    cpu = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        cpu = f"{len(names)} x {names[0]}" if names else cpu
    versions = [f"python {platform.python_version()}"]
    for package in (*PACKAGES, *PEERS.values()):
        if known_version(package):
            versions.append(f"{package} {known_version(package)}")
    return f"{cpu}, {platform.system()}; {', '.join(versions)}"


def known_version(package):
    try:
        return version(package)
    except ModuleNotFoundError:  # the base of importlib.metadata's PackageNotFoundError
        return None


def main(args):
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        tempfile.tempdir = folder  # for everything that follows
        print(f"{time.strftime('%Y-%m-%d')}, {machine()}", flush=True)
        for section in args.sections:
            table = globals()[section.replace("-", "_")]
            title, *text = table.__doc__.splitlines()
            print(f"\n### {title}\n", flush=True)
            if text:
                print("\n".join(line.strip() for line in text).strip() + "\n")
            header = None
            for row in table(args):
                if header is None:
                    header = list(row)
                    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
                print(f"| {' | '.join(row.values())} |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
