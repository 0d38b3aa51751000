"""Run a script with every combination of settings and seeds, in parallel.

All values are checked before anything starts, and every environment is made once. Repeat the command
to resume: finished runs are skipped, interrupted ones continue from their last checkpoint.

Runs that differ only in their seed share a name, so that plot.py draws them as one curve. The name
consists of --exp-name or the script's name, the environment, and every flag with several values:
--clip-ratio 0.1 0.2 gives ppo_torch_Hopper-v4_cli0-1 and ppo_torch_Hopper-v4_cli0-2. A [shorthand]
replaces the letters, and puts a flag with a single value into the name as well. From Python:

    grid = ExperimentGrid("ppo")
    grid.add("seed", [0, 1, 2])
    grid.add("hidden_sizes", [(64, 64), (32,)], "h")
    runs = grid.run("ppo_torch", num_cpu=2)  # each has a folder and a state

examples:
  python grid.py ppo_torch --seed 0 1 2 --clip-ratio 0.1 0.2
      six runs: two experiments of three seeds each
  python grid.py vpg_tf1 --hidden-sizes[h] "64 64" 32
      two experiments, named ..._h64-64 and ..._h32
  python grid.py sac_torch --autotune true false
      flags without a value take true and false here
  python grid.py ppo_torch --seed 0 1 --cpu 4 --workers 2
      two runs at once, each on four ranks
  mpirun -hosts a,b -np 3 python grid.py ppo_torch --seed 0 1
      on machines that share a disk, also with srun: the
      first process distributes the runs to the others
Ctrl-C stops all runs; repeat the command to resume them.
What a run prints is in log.txt in its folder. In zsh, write
'--hidden-sizes[h]' in quotes.
"""

import collections
import concurrent.futures
import contextlib
import difflib
import heapq
import importlib.util
import itertools
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro._errors import on_parse_error  # private, but the version is pinned

import common.env
from common.args import PositiveInt, check_args, mismatch
from common.checkpoint import epochs_saved
from common.errors import SidespinError, flag
from common.launch import Interrupted, launch
from common.mpi import comm, num_procs, proc_id
from common.run import Run, read_config

HERE = Path(__file__).parent
# What launchers tell their ranks. A run must not see it: it would take itself for a rank of the
# grid's job, and its own mpirun would spread its ranks over all machines of that job.
LAUNCHER_VARIABLES = "PMI HYDI_ MPI_LOCAL OMPI_COMM_ OMPI_MCA_ PRTE_ MV2_COMM_ SLURM_".split()
CHECK_ENVS = """
import importlib, sys
sys.path[0], script, bounded, *env_ids = sys.argv[1:]
from common.env import make_env
from common.errors import SidespinError
try:
    for env_id in env_ids:
        try:
            make_env(env_id, bounded_actions=bool(bounded)).close()
        except SidespinError:
            importlib.import_module(script)  # which may register it
            make_env(env_id, bounded_actions=bool(bounded)).close()
except SidespinError as error:
    print(error, file=sys.stderr)
    sys.exit(3)
"""
PATIENCE = 10  # seconds from asking a run to end until it is killed
LOG_LINES = 10  # shown of a failed run
STATES = ["running", "failed", "stopped", "waiting", "done", "finished before"]
Cpu = Annotated[PositiveInt | Literal["auto"], tyro.conf.arg(name="cpu")]


@dataclass
class Options:
    script: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SCRIPT")]  # ppo_torch, ...
    flags: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="--FLAG[SHORTHAND] VALUE ...")
    ] = ()  # any flags of the script, each with any number of values; "64 64" in quotes is one value
    exp_name: str | None = None  # how all names begin; None: with the script's name
    datestamp: bool = False  # put today's date in front of all names
    num_cpu: Cpu = 1  # ranks per run; auto: as many as there are cores
    workers: PositiveInt | None = None  # runs at once; None: as many as there are cores for
    data_dir: str | None = None  # where the experiments' folders go; None: as the script says
    dry_run: bool = False  # print all names and commands, but start nothing


OPTIONS = "--exp-name --datestamp --cpu --workers --data-dir --dry-run --help".split()


@dataclass
class Flag:
    values: list
    shorthand: str | None = None
    in_name: bool = False  # even if it has a single value


class ExperimentGrid:
    """Values for a script's flags; every combination of them is a run. After Spinning Up's."""

    def __init__(self, name=None):
        self.name, self.flags = name, {}

    def add(self, key, vals, shorthand=None, in_name=False):
        """Add a flag by its Python name, with one value or a list of values."""
        key = key.replace("-", "_")
        if key in self.flags:
            raise SidespinError(f"{flag(key)} is given twice")
        self.flags[key] = Flag(vals if isinstance(vals, list) else [vals], shorthand, in_name)

    def variants(self):
        """Return the settings of every combination as a dictionary."""
        values = itertools.product(*(f.values for f in self.flags.values()))
        return [dict(zip(self.flags, combination)) for combination in values]

    def variant_name(self, variant):
        """Return the name of a variant's experiment; flags that are true or false show if true."""
        env_id = as_file_name(variant.get("env_id", ""))
        parts = [self.name, None if env_id in (self.name or "") else env_id]
        varied = {k: f for k, f in self.flags.items() if len(f.values) > 1 or f.in_name}
        varied = {k: f for k, f in varied.items() if k not in ("seed", "env_id")}
        starts = [re.sub(r"\W|_", "", key[:3]) for key in varied]
        for (key, f), start in zip(varied.items(), starts):
            word = valid_str(f.shorthand or (key if starts.count(start) > 1 else start))
            if not all(isinstance(value, bool) for value in f.values):
                parts.append(word + valid_str(variant[key]))
            elif variant[key]:
                parts.append(word)
        return "_".join(filter(None, parts))

    def print(self):
        """Print all flags with their values, and the number of runs."""
        for key, f in self.flags.items():
            print(f"{flag(key)}{f'[{f.shorthand}]' if f.shorthand else ''}:", *f.values, sep="  ")
        names = {self.variant_name(variant) for variant in self.variants()}
        print(f"{len(self.variants())} run(s) of {len(names)} experiment(s)")

    def runs(self, script, num_cpu=1, data_dir=None, datestamp=False):
        """Return a script's runs for all variants; raise an error if one of them cannot be."""
        path = find_script(script)
        args_class = import_script(path).Args
        self.name = as_file_name(path.stem) if self.name is None else self.name
        for key, f in self.flags.items():
            f.values = read_values(path.stem, args_class, key, f.values)
        fixed = {} if data_dir is None else {"data_dir": str(data_dir)}
        if num_cpu != 1:
            fixed["cpu"] = cores() if num_cpu == "auto" else num_cpu
        date = time.strftime("%Y-%m-%d_") if datestamp else ""
        runs, named = [], {}
        for variant in self.variants():
            name = date + self.variant_name({"env_id": args_class.env_id, **variant})
            others = {key: value for key, value in variant.items() if key != "seed"}
            # In lower case: macOS takes x_Ant-v4 and x_ant-v4 for one folder
            if named.setdefault(name.lower(), others) != others:
                varied = [flag(k) for k, value in others.items() if named[name.lower()][k] != value]
                raise SidespinError(f"values of {', '.join(varied)} would share the name {name}")
            runs.append(GridRun(path, args_class, {**variant, **fixed, "exp_name": name}))
        return runs

    def run(self, script, num_cpu=1, data_dir=None, datestamp=False, workers=None, dry_run=False):
        """Run all variants, several at once; return the runs, each with its folder and state."""
        runs = self.runs(script, num_cpu, data_dir, datestamp)
        if workers is not None and workers < 1:
            raise SidespinError(f"{flag('workers')} must be at least 1, got {workers}")
        if workers is not None and num_procs() > 1:
            raise SidespinError(f"under mpirun, -np takes the place of {flag('workers')}")
        problem = None
        if proc_id() == 0:
            problem = next(filter(None, [run.look_at_folder() for run in runs]), None)
            problem = problem or check_envs(run for run in runs if run.state == "waiting")
        problem = comm().bcast(problem)
        if problem:
            raise SidespinError(problem)
        if dry_run:
            for run in runs if proc_id() == 0 else []:
                done = f", epoch {run.epochs}/{run.args.epochs}" if run.epochs else ""
                show(f"# {run.folder.name}: {run.state}{done}")
                show(shlex.join(["python", *run.command]))
            return runs
        if num_procs() > 1:
            from mpi4py.futures import MPICommExecutor

            workers, executor = num_procs() - 1, MPICommExecutor(comm())
        else:
            fitting = cores() // max(run.args.cpu * run.args.threads for run in runs)
            workers = workers or max(fitting, 1)
            executor = concurrent.futures.ThreadPoolExecutor(workers)
        with stop.on_signals(), executor as pool:
            if pool is not None:  # else this is an MPI process that runs have been sent to
                supervise(runs, pool, workers)
        if stop.signal:
            signal.raise_signal(stop.signal)  # again, now for the handler that was there before
        return runs


class GridRun(Run):
    """One run of a grid: its command, and how far it is."""

    def __init__(self, script, args_class, settings):
        args = args_class(**settings, resume=True)
        check_args(args, ranks=args.cpu)
        super().__init__(args, script, ranks=args.cpu)
        if len(os.fsencode(self.folder.name)) > 255:
            shorter = "use shorthands, as in --gamma[g]"
            raise SidespinError(f"{self.folder.name} is too long for a folder's name: {shorter}")
        self.log, self.log_start = self.folder / "log.txt", 0
        self.command = [os.path.relpath(script), *command_line(args_class, settings), "--resume"]
        self.state, self.code = "waiting", None
        self.times, self.ret = [], math.nan  # seconds at the end of each epoch, and the last return
        self.saved = 0  # epochs that a checkpoint had when the grid began
        self.began = self.changed = None  # when the run began, and when it last wrote a row

    @property
    def epochs(self):
        return len(self.times)

    def look_at_folder(self):
        """See how far the run is; return why it cannot continue what is there, or None."""
        self.read_progress()
        self.saved = max(epochs_saved(self.folder), default=0)
        if read_config(self.folder) and self.saved >= self.args.epochs:
            self.state = "finished before"
        with contextlib.suppress(OSError):
            self.log_start = self.log.stat().st_size
        difference = self.difference()
        return f"{difference}; choose another {flag('exp_name')}" if difference else None

    def follow(self, future):
        """Bring the state up to date with the future that stands for the run's process."""
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
        try:
            lines = (self.folder / "progress.txt").read_text().splitlines()
            header, *rows = [line.split("\t") for line in lines]
            times = [float(row[header.index("Time")]) for row in rows]
            last = dict(zip(header, map(float, rows[-1]), strict=True))
        except (OSError, ValueError, IndexError):  # no row yet, or one that is being written
            return False
        before, self.times = self.times, times
        self.ret = last.get("AverageTestEpRet", last.get("AverageEpRet", math.nan))
        return times != before

    def seconds_per_epoch(self):
        """Look at the later half of the epochs: off-policy, the first ones have no updates."""
        half = self.epochs // 2
        return (self.times[-1] - [0.0, *self.times][half]) / (self.epochs - half)

    def start_up(self):
        """Return the seconds from the start of the process to its last row, without the epochs."""
        epochs = self.epochs - self.saved
        return self.changed - self.began - epochs * self.seconds_per_epoch()

    def seconds_left(self, pace):
        """Estimate when the run will end, from its own rows or else from the pace of the others."""
        seconds, start_up = pace
        seconds = self.seconds_per_epoch() if self.epochs else seconds
        if self.changed:
            left = (self.args.epochs - self.epochs) * seconds - (time.time() - self.changed)
        else:
            waited = time.time() - self.began if self.began else 0.0
            left = start_up + (self.args.epochs - self.saved) * seconds - waited
        return max(left, 0.0)

    def row(self, pace):
        """Return state, epoch, return, and the time left or taken."""
        row = [self.state, f"epoch {self.epochs}/{max(self.epochs, self.args.epochs)}"]
        row.append("" if math.isnan(self.ret) else f"return {self.ret:.4g}")
        if self.state == "running" and pace:
            return [*row, f"{clock(self.seconds_left(pace))} left"]
        return [*row, clock(self.times[-1]) if self.times else ""]

    def failure(self):
        """Return how the run failed, with the last lines of its log."""
        code = self.code
        if isinstance(code, int):
            code = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        try:
            lines = self.log.read_bytes()[self.log_start :].decode(errors="replace").splitlines()
        except OSError:
            lines = []
        report = f"error: {self.folder.name} failed ({code}), see {self.log}"
        return "\n    ".join([report, *lines[-LOG_LINES:]])


class Stop:
    """Which signal has asked all runs of this process to end, and until when they have time."""

    signal, deadline = None, None

    def __call__(self, number, frame=None):
        self.deadline = time.time() + (PATIENCE if self.signal is None else 0)
        self.signal = number

    @contextlib.contextmanager
    def on_signals(self):
        """Let signals end the runs before this process; the second signal kills them at once."""
        self.signal = None
        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        if threading.current_thread() is not threading.main_thread():
            numbers = []  # Python has signal handlers in the main thread only
        # What is ignored stays ignored: nohup means it
        old = {n: signal.getsignal(n) for n in numbers if signal.getsignal(n) != signal.SIG_IGN}
        for number in old:
            signal.signal(number, self)
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


stop = Stop()


def do_run(command, log):
    """Do one run, in a thread or on another machine; return its exit code, None if not started."""
    if stop.signal:
        return None
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(),
            start_new_session=True,  # a terminal's Ctrl-C reaches this process alone, which decides
        )
    asked = False
    while process.poll() is None:
        time.sleep(0.1)
        if stop.signal and not asked:
            process.terminate()
            asked = True
        if stop.signal and time.time() > stop.deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode


def supervise(runs, pool, workers):
    """Hand all runs to the pool, and show what becomes of them until all have ended."""
    screen, futures = Screen(runs, workers), {}
    try:
        for run in runs:
            if run.state == "waiting":
                futures[run] = pool.submit(do_run, run.command, run.log)
        while True:
            pending = [future for future in futures.values() if not future.done()]
            for run, future in futures.items():
                run.follow(future)
            screen.show()
            if not pending:
                break
            if stop.signal:
                for future in pending:
                    future.cancel()
            concurrent.futures.wait(pending, 0.5, concurrent.futures.FIRST_COMPLETED)
    except BaseException:
        stop(signal.SIGTERM)  # or leaving the pool would wait for all runs to end by themselves
        raise
    screen.end()


class Screen:
    """A table that is redrawn in place on a terminal; elsewhere one line per change of state."""

    def __init__(self, runs, workers):
        self.runs, self.workers, self.height = runs, workers, 0
        self.is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self.shown = dict.fromkeys(runs, "waiting")

    def show(self):
        if self.is_terminal:
            up = f"\x1b[{self.height}F\x1b[J" if self.height else ""
            lines = self.table(*shutil.get_terminal_size())
            self.height = len(lines)
            show(up + "\n".join(lines))
            return
        for run in self.runs:
            if run.state != self.shown[run]:
                self.shown[run] = run.state
                show(f"{run.folder.name}: {', '.join(filter(None, run.row(self.pace())))}")

    def table(self, columns, lines):
        room = max(lines - 2, 1)  # without the summary and the cursor's line
        chosen = set(sorted(self.runs, key=lambda run: STATES.index(run.state))[:room])
        pace = self.pace()
        rows = [(run.folder.name, *run.row(pace)) for run in self.runs if run in chosen]
        widths = [max(map(len, column)) for column in zip(*rows)]
        # The end of a name tells runs apart
        widths[0] = max(min(widths[0], columns - 1 - sum(widths[1:]) - 2 * len(widths[1:])), 8)
        rows = [(name[-widths[0] :], *rest) for name, *rest in rows]
        table = ["  ".join(x.ljust(width) for x, width in zip(row, widths)) for row in rows]
        hidden = len(self.runs) - len(rows)
        summary = self.summary() + (f" ({hidden} not shown)" if hidden else "")
        return [line[: columns - 1].rstrip() for line in [*table, summary]]

    def summary(self):
        counts = collections.Counter(run.state for run in self.runs)
        text = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
        pace = self.pace()
        if pace and counts["running"]:
            text += f", about {clock(self.seconds_left(pace))} left"
        return f"{len(self.runs)} run(s): {text}"

    def pace(self):
        """Return the mean seconds per epoch and of a start-up, or None before the first row."""
        known = [run for run in self.runs if run.epochs]
        started = [run.start_up() for run in known if run.changed] or [0.0]
        seconds = [run.seconds_per_epoch() for run in known]
        return (statistics.mean(seconds), statistics.mean(started)) if known else None

    def seconds_left(self, pace):
        """Let each worker that becomes free take the next run; return when the last one ends."""
        left = {run: run.seconds_left(pace) for run in self.runs}
        ends = [left[run] for run in self.runs if run.state == "running"]
        ends += [0.0] * (self.workers - len(ends))
        heapq.heapify(ends)
        for run in self.runs:
            if run.state == "waiting":
                heapq.heapreplace(ends, ends[0] + left[run])
        return max(ends)

    def end(self):
        if not self.is_terminal:
            show(self.summary())
        for run in self.runs:
            if run.state == "failed":
                show(f"grid.py: {run.failure()}", sys.stderr)


def check_envs(runs):
    """Make each environment once, in a process of its own; return why one cannot be made, or None.

    Only the scripts' usual make_env() is checked, and what takes a minute is left to the runs.
    """
    runs = list(runs)
    env_ids = {run.args.env_id for run in runs}
    if not runs or sys.modules[type(runs[0].args).__module__].make_env is not common.env.make_env:
        return None
    script = runs[0].script.resolve()
    bounded = "yes" if "bounded_actions=True" in script.read_text() else ""
    command = [sys.executable, "-c", CHECK_ENVS, script.parent, script.stem, bounded, *env_ids]
    options = dict(capture_output=True, text=True, errors="replace", timeout=60)
    with contextlib.suppress(subprocess.TimeoutExpired):
        check = subprocess.run(command, env=environment(), stdin=subprocess.DEVNULL, **options)
        return check.stderr.splitlines()[-1] if check.returncode == 3 else None


def environment():
    foreign = tuple(LAUNCHER_VARIABLES)
    return {key: value for key, value in os.environ.items() if not key.startswith(foreign)}


def show(text, file=None):
    with contextlib.suppress(OSError):  # a closed pipe or terminal stops no run
        print(text, file=file or sys.stdout, flush=True)


def as_file_name(text):
    """Return a name as Run writes it into the names of folders."""
    return re.sub(r"[^\w.-]+", "-", text)


def valid_str(value):
    """Return a value as part of a file name, as in Spinning Up: (0.1, "A b") gives 0-1-a-b."""
    if isinstance(value, tuple | list):
        return "-".join(map(valid_str, value))
    return re.sub(r"[^a-z0-9_-]", "-", str(value).lower())


def clock(seconds):
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def cores():
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def suggest(word, known):
    """Return a word that is not known, together with the known one that it may stand for."""
    similar = [x for x in known if x.startswith(word)] + difflib.get_close_matches(word, known, 1)
    return f"{word} (did you mean {similar[0]}?)" if similar else word


def find_script(script):
    """Return the path of a script by its name or path, here or beside this file."""
    name = f"{str(script).removesuffix('.py')}.py"
    for path in (Path(name), HERE / name):
        if path.is_file():
            return path
    scripts = [path.stem for path in HERE.glob("*_*.py")]
    raise SidespinError(f"there is no script {suggest(str(script), scripts)}")


def import_script(path):
    """Return the module of a script, found by its path."""
    if str(path.resolve().parent) not in sys.path:
        sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(str(path.resolve()), path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "Args"):
        raise SidespinError(f"{path.name} does not train: it has no Args")
    return module


def read_values(script, args_class, key, values):
    """Return the values of a flag as the script would read them."""
    kinds = typing.get_type_hints(args_class, include_extras=True)
    if key in ("exp_name", "resume", "overwrite"):
        raise SidespinError(f"{flag(key)} cannot vary: a grid names and resumes its runs itself")
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
        hint = '; several numbers in quotes, like "64 64", are one value' if is_tuple else ""
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
    flags = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            flags.append((name, [value] if equals else []))
        elif flags:
            flags[-1][1].append(word)
        else:
            raise SidespinError(f"{word} has no flag in front of it")
    for name, values in flags:
        key, shorthand = re.fullmatch(r"--([^\[]*)(?:\[(.*)\])?", name).groups()
        grid.add(key, values, shorthand, in_name=shorthand is not None)


def main(options):
    grid = ExperimentGrid(options.exp_name)
    add_flags(grid, options.flags)
    names = "script num_cpu data_dir datestamp workers dry_run".split()
    try:
        runs = grid.run(**{name: getattr(options, name) for name in names})
    except Interrupted as error:
        error.resume = "repeat the command"
        raise
    undone = any(run.state not in ("done", "finished before") for run in runs)
    if proc_id() == 0 and undone and not options.dry_run:
        raise SystemExit(1)


def own_options_first(words):
    """Move grid.py's own options in front of --, behind which a word is never an option."""
    own, others, now = [], [], None
    for word in words:
        if word.startswith("--") or now is None:
            now = own if word.split("=")[0].replace("_", "-") in (*OPTIONS, "-h") else others
        now.append(word)
    return [*own, "--", *others]


if __name__ == "__main__":
    sys.argv[1:] = own_options_first(sys.argv[1:])
    launch(main, Options)
