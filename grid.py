"""Run all combinations of a script's settings, in parallel.

Before anything starts, all values are checked and each environment is created once. Repeat the
command to resume: finished runs are skipped, interrupted ones continue from their last checkpoint.

Runs that differ only in their seed share a name, so that plot.py draws them as one curve. The name
is --exp-name or the script's name, the environment, and whatever else varies: --clip-ratio 0.1 0.2
gives ppo_torch_Hopper-v4_cli0-1 and ppo_torch_Hopper-v4_cli0-2. A [shorthand] replaces these first
letters of a flag, and puts the flag into the name even if it has only one value. From Python:

    grid = ExperimentGrid("ppo")
    grid.add("hidden_sizes", [(64, 64), (32,)], "h")
    runs = grid.run("ppo_torch", num_cpu=2)  # each has a folder and a state

    python grid.py ppo_torch --seed 0 1 2 --gamma 0.9 0.99
        six runs: two experiments with three seeds each
    python grid.py vpg_tf1 --hidden-sizes[h] "64 64" 32
        two runs, named ..._h64-64 and ..._h32 (in zsh, put
        '--hidden-sizes[h]' in quotes)
    python grid.py sac_torch --autotune true false
        in a grid, on/off flags take true or false
    python grid.py ppo_torch --seed 0 1 --cpu 4 --workers 2
        two runs at once, on four ranks each
    mpirun -hosts a,b -np 3 python grid.py ppo_torch ...
        on machines that share a disk; or srun --mpi=pmi2.
        The first process hands out the runs to the others.
    Ctrl-C stops all runs; repeat the command to resume.
    Each run's output is in its folder, in log.txt.
"""

import collections
import concurrent.futures
import contextlib
import ctypes
import fcntl
import heapq
import importlib.util
import itertools
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import typing
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated, Literal

import tyro
from tyro._errors import on_parse_error  # private, but the version is pinned

import common.env
from common.args import PositiveInt, check_args, cores, mismatch
from common.checkpoint import epochs_saved
from common.errors import SidespinError, flag, plural
from common.launch import Interrupted, launch, suggest
from common.mpi import comm, num_procs, proc_id
from common.run import Run, as_file_name, read_config

HERE = Path(__file__).parent
# Variables that launchers set for their ranks. A run must not see them: it would take itself for a
# rank of the grid's job, and its own mpirun would spread its ranks over all machines of that job.
LAUNCHER_VARIABLES = "PMI HYDI_ MPI_LOCAL OMPI_COMM_ OMPI_MCA_ PRTE_ MV2_COMM_ SLURM_".split()
PR_SET_PDEATHSIG = 1  # of prctl(2)
PATIENCE = 10  # seconds between asking a run to end and killing it
LOCKED = 30  # seconds that a run of a killed grid may take to end, on a host that was cut off
LOG_LINES = 10  # of a failed run's log to show
STATES = ["running", "failed", "stopped", "waiting", "done", "finished before"]
CHECK_ENVS = """
import importlib, sys
sys.path[0], script, bounded, *env_ids = sys.argv[1:]
from common.env import make_env
for env_id in env_ids:
    try:
        make_env(env_id, bounded_actions=bool(bounded)).close()
    except Exception:
        importlib.import_module(script)  # takes seconds, but may register the environment
        make_env(env_id, bounded_actions=bool(bounded)).close()
"""


@dataclass
class Args:
    script: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SCRIPT")]
    """name or path of a script, such as ppo_torch"""
    flags: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="--FLAG VALUE ...", help_behavior_hint=""),
    ]
    """flags of the script, each with any number of values; "64 64" in quotes is one value"""
    num_cpu: Annotated[PositiveInt | Literal["auto"], tyro.conf.arg(name="cpu")] = 1
    """ranks per run; auto: one per core"""
    workers: PositiveInt | None = None  # number of parallel runs; None: as many as fit the cores
    exp_name: str | None = None  # start of all names; None: the script's name
    datestamp: bool = False  # start all names with today's date
    data_dir: str | None = None  # parent folder of all experiments; None: the script's default
    dry_run: bool = False  # print all names and commands, but start nothing


OPTIONS = "-h --help --cpu --workers --exp-name --datestamp --data-dir --dry-run".split()


@dataclass
class Flag:
    values: list
    shorthand: str | None
    in_name: bool  # even with only one value


class ExperimentGrid:
    """Values for a script's flags; every combination is a run. Modelled on Spinning Up's."""

    def __init__(self, name=None):
        self.name, self.flags = name, {}

    def add(self, key, vals, shorthand=None, in_name=False):
        """Add a flag by its Python name, with one value or a list of values."""
        key = key.replace("-", "_")
        if key in self.flags:
            raise SidespinError(f"{flag(key)} is given twice")
        self.flags[key] = Flag(vals if isinstance(vals, list) else [vals], shorthand, in_name)

    def variants(self):
        """Return a dictionary of settings for every combination."""
        values = itertools.product(*(f.values for f in self.flags.values()))
        return [dict(zip(self.flags, combination)) for combination in values]

    def variant_name(self, variant, script=""):
        """Return the name of a variant's experiment; on/off flags appear only if true."""
        name = as_file_name(script) if self.name is None else self.name
        env_id = as_file_name(variant.get("env_id", ""))
        parts = [name, "" if env_id in name else env_id]
        named = {k: f for k, f in self.flags.items() if len(f.values) > 1 or f.in_name}
        named = {k: f for k, f in named.items() if k not in ("seed", "env_id")}
        starts = [re.sub(r"\W|_", "", key[:3]) for key in named]
        for (key, f), start in zip(named.items(), starts):
            word = valid_str(f.shorthand or (key if starts.count(start) > 1 else start))
            if not all(isinstance(value, bool) for value in f.values):
                parts.append(word + valid_str(variant[key]))
            elif variant[key]:
                parts.append(word)
        return "_".join(filter(None, parts))

    def runs(self, script, num_cpu=1, data_dir=None, datestamp=False):
        """Return a script's runs for all variants; raise an error if one is invalid."""
        script = find_script(script)
        args_class = import_script(script).Args
        for key, f in self.flags.items():
            f.values = read_values(script.stem, args_class, key, f.values)
        fixed = {} if data_dir is None else {"data_dir": str(data_dir)}
        if num_cpu != 1:
            fixed["cpu"] = cores() if num_cpu == "auto" else num_cpu
        date = time.strftime("%Y-%m-%d_") if datestamp else ""
        runs, seen = [], {}
        for variant in self.variants():
            name = date + self.variant_name({"env_id": args_class.env_id, **variant}, script.stem)
            others = {key: value for key, value in variant.items() if key != "seed"}
            first = seen.setdefault(name.lower(), others)  # some file systems ignore case
            if first != others:
                varied = ", ".join(flag(key) for key in others if first[key] != others[key])
                raise SidespinError(f"different values of {varied} would share the name {name}")
            runs.append(GridRun(script, args_class, {**variant, **fixed, "exp_name": name}))
        return runs

    def run(self, script, num_cpu=1, data_dir=None, datestamp=False, workers=None, dry_run=False):
        """Run all variants, several at once; return the runs, each with its folder and state."""
        if workers is not None and workers < 1:
            raise SidespinError(f"{flag('workers')} must be at least 1, got {workers}")
        if workers is not None and num_procs() > 1:
            raise SidespinError(f"under mpirun, -np takes the place of {flag('workers')}")
        runs = self.runs(script, num_cpu, data_dir, datestamp)
        problem = None
        if proc_id() == 0:
            problem = next(filter(None, [run.look_at_folder() for run in runs]), None)
            problem = problem or check_envs([run for run in runs if run.state == "waiting"])
        problem = comm().bcast(problem)
        if problem:
            raise SidespinError(problem)
        if dry_run:
            for run in runs if proc_id() == 0 else []:
                show(f"# {run}\n{shlex.join(['python', *run.command])}")
            return runs
        if num_procs() > 1:
            from mpi4py.futures import MPICommExecutor

            workers, executor = num_procs() - 1, MPICommExecutor(comm())
        else:
            fitting = cores() // max(run.args.cpu * run.args.threads for run in runs)
            workers = workers or max(fitting, 1)
            executor = concurrent.futures.ThreadPoolExecutor(workers)
        with stop.on_signals(), executor as pool:
            if pool is not None:  # else this is a worker whose work is done
                supervise(runs, pool, workers)
        if stop.signal:
            signal.raise_signal(stop.signal)  # again, for the original handler
        return runs


class GridRun(Run):
    """One run of a grid: its command and its progress."""

    def __init__(self, script, args_class, settings):
        args = args_class(**settings, resume=True)
        check_args(args, ranks=args.cpu)
        super().__init__(args, script, ranks=args.cpu)
        if len(os.fsencode(self.folder.name)) > 255:
            shorter = "use shorthands, as in --gamma[g]"
            raise SidespinError(f"{self.folder.name} is too long for a folder name: {shorter}")
        self.log, self.log_start = self.folder / "log.txt", 0
        self.command = [os.path.relpath(script), *command_line(args_class, settings), "--resume"]
        self.state, self.code = "waiting", None
        self.times, self.ret = [], math.nan  # elapsed seconds after each epoch, and the last return
        self.saved = 0  # epochs in the checkpoint before this grid started
        self.began = self.changed = None  # when the process started, and when it last wrote a row
        self.left = None  # estimated seconds left

    def __str__(self):
        """Return name, state, epoch, return, and the time left or taken."""
        parts = [self.state]
        if self.times or self.state != "waiting":
            parts.append(f"epoch {len(self.times)}/{max(len(self.times), self.args.epochs)}")
        if not math.isnan(self.ret):
            parts.append(f"return {self.ret:.4g}")
        if self.state == "running" and self.left is not None:
            parts.append(f"{clock(self.left)} left")
        elif self.state != "running" and self.times:
            parts.append(clock(self.times[-1]))
        return f"{self.folder.name}: {', '.join(parts)}"

    def look_at_folder(self):
        """Read the run's progress; return why it cannot be resumed, or None."""
        self.read_progress()
        self.saved = max(epochs_saved(self.folder), default=0)
        if read_config(self.folder) and self.saved >= self.args.epochs:
            self.state = "finished before"
        with contextlib.suppress(OSError):
            self.log_start = self.log.stat().st_size
        difference = self.difference()
        return f"{difference}; choose another {flag('exp_name')}" if difference else None

    def follow(self, future):
        """Update the state from the future of the run's process."""
        if future.done() and not future.cancelled() and self.state in ("waiting", "running"):
            self.code = future.exception() or future.result()
            failed = "stopped" if stop.signal else "failed"
            self.state = "waiting" if self.code is None else failed if self.code else "done"
        elif future.running():
            self.state, self.began = "running", self.began or time.time()
        if self.began and self.read_progress():
            self.changed = time.time()

    def read_progress(self):
        """Read progress.txt; return whether it has changed."""
        before = self.times
        with contextlib.suppress(OSError, ValueError, IndexError):  # no complete row yet
            lines = (self.folder / "progress.txt").read_text().splitlines()
            header, *rows = [line.split("\t") for line in lines]
            last = dict(zip(header, map(float, rows[-1]), strict=True))
            self.ret = last.get("AverageTestEpRet", last.get("AverageEpRet", math.nan))
            self.times = [float(row[header.index("Time")]) for row in rows]
        return self.times != before

    def seconds_per_epoch(self):
        """Average over the later half of the epochs: off-policy, the first have no updates."""
        half = len(self.times) // 2
        return (self.times[-1] - [0.0, *self.times][half]) / (len(self.times) - half)

    def failure(self):
        """Describe how the run failed, with the last lines of its log."""
        code = self.code
        if isinstance(code, int):
            code = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        lines = []
        with contextlib.suppress(OSError):
            lines = self.log.read_bytes()[self.log_start :].decode(errors="replace").splitlines()
        failed = f"grid.py: error: {self.folder.name} failed ({code}), see {self.log}"
        return "\n    ".join([failed, *lines[-LOG_LINES:]])


def estimate(runs, workers):
    """Estimate the seconds left for each run from the rows so far; return those for the grid."""
    now, known = time.time(), {run: run.seconds_per_epoch() for run in runs if run.times}
    if not known:
        return None
    # The time from the start of a process to its last row is its start-up plus its epochs
    rows = {run: len(run.times) - run.saved for run in known if run.changed}
    start_ups = [run.changed - run.began - n * known[run] for run, n in rows.items()]
    usual, start_up = mean(known.values()), mean(start_ups or [0.0])
    for run in runs:
        done, extra = (len(run.times), 0.0) if run.changed else (run.saved, start_up)
        seconds = extra + (run.args.epochs - done) * known.get(run, usual)
        run.left = max(seconds - (now - (run.changed or run.began or now)), 0.0)
    free = [run.left for run in runs if run.state == "running"]  # when each worker is free again
    free = sorted([0.0] * (workers - len(free)) + free)  # a sorted list is a heap
    for run in runs:
        if run.state == "waiting":
            heapq.heapreplace(free, free[0] + run.left)
    return max(free)


class Stop:
    """The signal that asked all runs to end, and the deadline after which they are killed."""

    signal, deadline = None, None

    def __call__(self, number, frame=None):
        self.deadline = time.time() + (PATIENCE if self.signal is None else 0)
        self.signal = number

    @contextlib.contextmanager
    def on_signals(self):
        """Let a signal end the runs before this process; a second signal kills them at once."""
        self.signal = None
        in_main_thread = threading.current_thread() is threading.main_thread()
        with contextlib.ExitStack() as stack:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if in_main_thread else ():
                if signal.getsignal(number) != signal.SIG_IGN:  # respect nohup
                    stack.callback(signal.signal, number, signal.signal(number, self))
            yield


stop = Stop()


def do_run(command, log):
    """Do one run, in a thread or on another machine; return its exit code, or None if skipped."""
    wait_for_lock(log.with_name("progress.txt"))
    if stop.signal:
        return None
    log.parent.mkdir(parents=True, exist_ok=True)
    options = dict(stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, env=environment())
    options |= dict(start_new_session=True)  # no Ctrl-C from the terminal
    with open(log, "ab") as output:
        command, end = [sys.executable, *command], end_with(os.getpid())
        process = subprocess.Popen(command, stdout=output, preexec_fn=end, **options)
    asked = False
    while process.poll() is None:
        time.sleep(0.1)
        if stop.signal and not asked:
            process.terminate()
            asked = True
        if stop.signal and time.time() > stop.deadline:
            process.kill()
    return process.returncode


def end_with(parent):
    """Return what lets a new process end when its parent does, even if that is killed; on Linux."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)

    def in_child():
        if prctl and prctl(PR_SET_PDEATHSIG, signal.SIGTERM) == 0 and os.getppid() != parent:
            os._exit(1)  # the parent has just ended

    return in_child


def wait_for_lock(table):
    """Wait for a process of a killed grid to end and give up its run; others may keep theirs."""
    deadline = time.time() + LOCKED
    with contextlib.suppress(OSError), open(table, "rb+") as file:  # NFS locks no read-only files
        while time.time() < deadline and not stop.signal:
            with contextlib.suppress(BlockingIOError):
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # closing it unlocks it
            time.sleep(0.1)


def supervise(runs, pool, workers):
    """Hand all runs to the pool, and show their progress until all have ended."""
    screen = Screen(runs, workers)
    try:
        waiting = [run for run in runs if run.state == "waiting"]
        futures = {run: pool.submit(do_run, run.command, run.log) for run in waiting}
        while True:
            pending = [future for future in futures.values() if not future.done()]
            for run, future in futures.items():
                run.follow(future)
            screen.update(last=not pending)
            if not pending:
                return
            if stop.signal:
                for future in pending:
                    future.cancel()
            concurrent.futures.wait(pending, 0.5, concurrent.futures.FIRST_COMPLETED)
    except BaseException:
        stop(signal.SIGTERM)  # else leaving the pool would wait for all runs to finish
        raise


class Screen:
    """One line per change of state; on a terminal, with the runs in progress below."""

    def __init__(self, runs, workers):
        self.runs, self.workers = runs, workers
        self.is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self.states, self.height = {}, 0

    def update(self, last=False):
        left = estimate(self.runs, self.workers)
        columns, rows = shutil.get_terminal_size()
        if self.height:
            show(f"\x1b[{self.height}F\x1b[J", end="")  # up, and clear to the end of the screen
        for run in self.runs:
            if run.state != self.states.setdefault(run, "waiting"):
                self.states[run] = run.state
                if run.state != "running" or not self.is_terminal:
                    show(run)
                if run.state == "failed":
                    show(run.failure(), sys.stderr)
        counts = collections.Counter(run.state for run in self.runs)
        text = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
        text += f", about {clock(left)} left" if counts["running"] and left is not None else ""
        summary = [f"{plural(len(self.runs), 'run')}: {text}"]
        if self.is_terminal and not last:
            lines = [str(run) for run in self.runs if run.state == "running"][: max(rows - 2, 0)]
            lines = [line[1 - columns :] for line in lines + summary]  # names differ at the end
            self.height = len(lines)
            show("\n".join(lines))
        elif last:
            show(*summary)


def check_envs(runs):
    """Create each environment once, in another process; return why one failed, or None.

    Skips scripts that define their own make_env(), and environments that take over a minute.
    """
    module = sys.modules[type(runs[0].args).__module__] if runs else None
    if getattr(module, "make_env", None) is not common.env.make_env:
        return None
    script, env_ids = runs[0].script.resolve(), dict.fromkeys(run.args.env_id for run in runs)
    bounded = "bounded" if "bounded_actions=True" in script.read_text() else ""
    command = [sys.executable, "-c", CHECK_ENVS, script.parent, script.stem, bounded, *env_ids]
    with contextlib.suppress(subprocess.TimeoutExpired):
        pipes = dict(stdin=subprocess.DEVNULL, capture_output=True)
        check = subprocess.run(command, env=environment(), timeout=60, **pipes)
        error = check.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        kind, _, sentence = error.partition(": ")
        return sentence if kind.endswith("SidespinError") else None


def environment():
    """Return the environment variables, without a launcher's."""
    foreign = tuple(LAUNCHER_VARIABLES)
    return {key: value for key, value in os.environ.items() if not key.startswith(foreign)}


def show(text, file=None, end="\n"):
    with contextlib.suppress(OSError):  # a closed pipe or terminal must not stop the runs
        print(text, file=file or sys.stdout, end=end, flush=True)


def valid_str(value):
    """Return a value as part of a file name, as in Spinning Up: (0.1, "A b") gives 0-1-a-b."""
    if isinstance(value, tuple | list):
        return "-".join(map(valid_str, value))
    return re.sub(r"[^a-z0-9_-]", "-", str(value).lower())


def clock(seconds):
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def find_script(script):
    """Return the path of a script, given its name or path, here or next to this file."""
    name = f"{str(script).removesuffix('.py')}.py"
    for path in (Path(name), HERE / name):
        if path.is_file():
            return path
    scripts = [path.stem for path in HERE.glob("*_*.py")]
    raise SidespinError(f"there is no script {suggest(str(script), scripts)}")


def import_script(path):
    """Import a script by its path; return the module."""
    name, folder = str(path.resolve()), str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(getattr(module, "Args", None), "steps_per_epoch"):
        raise SidespinError(f"{path.name} is not a training script")
    return module


def read_values(script, args_class, key, values):
    """Return the values of a flag as the script would read them."""
    kinds = typing.get_type_hints(args_class, include_extras=True)
    if key in ("exp_name", "resume", "overwrite"):
        raise SidespinError(f"{flag(key)} cannot be set: a grid names and resumes its own runs")
    if key not in kinds:
        raise SidespinError(f"{script} has no {suggest(flag(key), [*map(flag, kinds), *OPTIONS])}")
    is_tuple, is_bool = typing.get_origin(kinds[key]) is tuple, kinds[key] is bool
    if not values and not is_bool:
        raise SidespinError(f"{flag(key)} needs a value")

    def fail(event):
        expected = "true or false" if is_bool else mismatch(kinds[key], object())
        raise SidespinError(f"{flag(key)} must be {expected}, got {value}")

    read = []
    for value in values or [True]:
        words = str(value).split() if is_tuple else [str(value).title() if is_bool else value]
        words = value if isinstance(value, tuple | list) else words
        with on_parse_error(fail):
            words = [f"--{key}", *map(str, words)]
            args = tyro.cli(args_class, args=words, config=[tyro.conf.FlagConversionOff])
        read.append(getattr(args, key))
    if len(set(read)) < len(read):
        hint = '; quote several numbers to make them one value, as in "64 64"' if is_tuple else ""
        raise SidespinError(f"{flag(key)} has a value twice: {', '.join(map(str, values))}{hint}")
    return read


def command_line(args_class, settings):
    words = []
    for key, value in settings.items():
        name = key.replace("_", "-")
        if not isinstance(value, bool):
            words += [f"--{name}", *map(str, value if isinstance(value, tuple) else [value])]
        elif value != getattr(args_class, key):
            words += [f"--{name}" if value else f"--no-{name}"]
    return words


def add_flags(grid, words):
    """Add flags to the grid from words like --key[shorthand] value value ..."""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            key, shorthand = re.fullmatch(r"--([^\[]*)(?:\[(.*)\])?", name).groups()
            values = [value] if equals else []  # the next words are appended
            grid.add(key, values, shorthand, in_name=shorthand is not None)
        elif not grid.flags:
            raise SidespinError(f"there is no flag before {word}")
        else:
            values.append(word)


def own_options_first(words):
    """Move grid.py's own options before --, so that tyro leaves the script's flags alone."""
    own, others, now = [], [], None
    for word in words:
        if word.startswith("-") or now is None:
            now = own if word.split("=")[0].replace("_", "-") in OPTIONS else others
        now.append(word)
    return [*own, "--", *others]


def main(args):
    if args.script.startswith("-"):
        raise SidespinError("name the script before its flags")
    grid = ExperimentGrid(args.exp_name)
    add_flags(grid, args.flags)
    names = "script num_cpu data_dir datestamp workers dry_run".split()
    try:
        runs = grid.run(**{name: getattr(args, name) for name in names})
    except Interrupted as error:
        error.resume = "repeat the command"
        raise
    undone = any(run.state not in ("done", "finished before") for run in runs)
    if proc_id() == 0 and undone and not args.dry_run:
        raise SystemExit(1)


if __name__ == "__main__":
    sys.argv[1:] = own_options_first(sys.argv[1:])
    launch(main, Args)
