"""Many runs of one script: every combination of settings and seeds, in parallel, resumable.

    python grid.py ppo_torch --env-id Hopper-v4 Walker2d-v4 --seed 0 1 2 --clip-ratio 0.1 0.2

Every flag of the script takes any number of values; "64 64" in quotes is one value of a flag that
takes several numbers. All are checked against the script's arguments first. A run that was
interrupted goes on and one that is finished is skipped, so the same command again does what is left
to do.

Runs that differ only in their seed share a name, which says what else varies: --clip-ratio 0.1 0.2
gives ppo_torch_cli0-1 and ppo_torch_cli0-2, --clip-ratio[eps] 0.1 0.2 gives ppo_torch_eps0-1 and
ppo_torch_eps0-2. A flag with one value is in the name only if it has a [shorthand].
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import difflib
import importlib
import io
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import typing
from pathlib import Path

import tyro

from common.args import check_args
from common.logger import MAY_DIFFER
from common.mpi import comm, fail, num_procs, print_line, proc_id

EXAMPLES = """examples:
  python grid.py sac_torch --seed 0 1 2 3 4 --epochs 100     one experiment, five seeds
  python grid.py vpg_tf1 --hidden-sizes[h] "64 64" 32        two sizes, named _h64-64 and _h32
  python grid.py sac_torch --autotune true false             flags without a value take these two
  python grid.py ppo_torch --seed 0 1 --cpu 4 --workers 2    two runs at once, four ranks each
  python grid.py td3_torch --gamma 0.9 0.99 --dry-run        only print the commands
  mpirun -hosts a,b -np 3 python grid.py ppo_torch --seed 0 1 2 3 4 5
      on several machines that share a disk, also by Slurm's srun: the first process hands out the
      runs, each of the others does one at a time

Ctrl-C stops all runs; what a run prints is in its folder, in log.txt. `python ppo_torch.py --help`
explains that script's flags. zsh wants quotes around '--hidden-sizes[h]'. From Python:

  from grid import ExperimentGrid
  grid = ExperimentGrid("ppo")
  grid.add("seed", [0, 1, 2])
  grid.add("hidden_sizes", [(64, 64), (32,)], "h")
  grid.run("ppo_torch", num_cpu=2)
"""
HERE = Path(__file__).parent
OWN_FLAGS = "exp_name cpu data_dir workers datestamp dry_run".split()
# What a launcher tells its ranks: a run that read it would take itself for a rank of this job, and
# the mpirun of a run with several ranks would spread them over the job's machines.
LAUNCHER_VARIABLES = "PMI HYDI_ MPI_LOCAL OMPI_COMM_ OMPI_MCA_ PRTE_ MV2_COMM_ SLURM_".split()
PATIENCE = 10  # seconds from asking a run to end until it is killed
LOG_LINES = 10  # shown of a failed run
STATES = ["running", "failed", "stopped", "waiting", "done", "finished before"]


class ExperimentGrid:
    """Values of a script's flags, of which every combination is a run; after Spinning Up's."""

    def __init__(self, name=""):
        self.name, self.keys, self.vals, self.shorthands, self.in_names = name, [], [], [], []

    def add(self, key, vals, shorthand=None, in_name=False):
        """Add a flag by its Python name, with a list of values or one; in_name: show it anyway."""
        key = key.replace("-", "_")
        if key in self.keys:
            fail(f"{flag(key)} is given twice")
        self.keys.append(key)
        self.vals.append(vals if isinstance(vals, list) else [vals])
        self.shorthands.append(shorthand)
        self.in_names.append(in_name)

    def variants(self):
        """Return a dictionary of settings for every combination."""
        return [dict(zip(self.keys, values)) for values in itertools.product(*self.vals)]

    def variant_name(self, variant):
        """Return the experiment's name of a variant: the grid's, and all that varies but the seed.

        A flag that is either true or false is named where it is true.
        """
        name, flags = self.name, zip(self.keys, self.vals, self.shorthands, self.in_names)
        shown = [f for f in flags if f[0] != "seed" and (len(f[1]) > 1 or f[3])]
        starts = [start_of(key) for key, *_ in shown]
        for (key, vals, shorthand, _), start in zip(shown, starts):
            word = valid_str(shorthand or (key if starts.count(start) > 1 else start))
            if not all(isinstance(value, bool) for value in vals):
                name += f"_{word}{valid_str(variant[key])}"
            elif variant[key]:
                name += f"_{word}"
        return name.lstrip("_")

    def print(self):
        """Print the flags with their shorthands and values, and the number of runs."""
        for key, vals, shorthand in zip(self.keys, self.vals, self.shorthands):
            print(f"{flag(key)}{f'[{shorthand}]' if shorthand else ''}:", *vals, sep="  ")
        names = {self.variant_name(variant) for variant in self.variants()}
        print(f"{len(self.variants())} run(s) of {len(names)} experiment(s)")

    def runs(self, script, num_cpu=1, data_dir=None, datestamp=False):
        """Return the runs of a script for all variants, or stop at what is wrong with one."""
        script = find_script(script)
        dataclass = read_args(script)
        for i, (key, vals) in enumerate(zip(self.keys, self.vals)):
            self.vals[i] = convert(script, dataclass, key, vals)
        fixed = {} if data_dir is None else {"data_dir": str(data_dir)}
        if str(num_cpu) != "1":
            cpu = cores() if num_cpu == "auto" else num_cpu
            fixed["cpu"] = convert(script, dataclass, "cpu", [cpu])[0]
        date = time.strftime("%Y-%m-%d_") if datestamp else ""
        runs, named = [], {}
        for variant in self.variants():
            name = date + self.variant_name(variant)
            others = {key: value for key, value in variant.items() if key != "seed"}
            if named.setdefault(name, others) != others:
                varied = [key for key, value in others.items() if named[name][key] != value]
                fail(f"values of {', '.join(map(flag, varied))} would share the name {name}")
            settings = {**variant, **fixed, "exp_name": name}
            runs.append(Run(script, dataclass(**settings, resume=True), settings))
        return runs

    def run(self, script, num_cpu=1, data_dir=None, datestamp=False, workers=None, dry_run=False):
        """Run all variants, some at once; return the runs, which know their folder and state."""
        runs = self.runs(script, num_cpu, data_dir, datestamp)
        if workers is not None and num_procs() > 1:
            fail("--workers does not go with mpirun, whose -np is the number of runs and one more")
        if workers is not None and workers < 1:
            fail(f"--workers must be at least 1, not {workers}")
        problems = [run.look_at_folder() for run in runs] if proc_id() == 0 else []
        problem = next(filter(None, comm.bcast(problems)), None)
        if problem:
            fail(problem)
        if dry_run:
            for run in runs if proc_id() == 0 else []:
                done = f", epoch {run.epochs}/{run.args.epochs}" if run.epochs else ""
                show(f"# {run.name}: {run.state}{done}")
                show(shlex.join(["python", *run.command]))
            return runs
        if num_procs() > 1:
            from mpi4py.futures import MPICommExecutor

            workers, executor = num_procs() - 1, MPICommExecutor(comm)
        else:
            fitting = cores() // max(run.args.cpu * run.args.threads for run in runs)
            workers = workers or max(fitting, 1)
            executor = concurrent.futures.ThreadPoolExecutor(workers)
        with signals_stop_runs(), executor as pool:
            if pool is not None:  # else this is one of the processes that do the runs
                supervise(runs, pool, workers)
        if stop.number:
            if proc_id() == 0:
                print_line("interrupted; the same command goes on")
            sys.exit(128 + stop.number)
        return runs


class Run:
    """One run: its command, its folder, and how far it is."""

    def __init__(self, script, args, settings):
        check_args(args, ranks=args.cpu)
        if args.steps_per_epoch % args.cpu:
            fail(
                f"--steps-per-epoch {args.steps_per_epoch} cannot be divided among {args.cpu} ranks"
            )
        self.args, self.name = args, f"{args.exp_name}_s{args.seed}"
        if len(os.fsencode(self.name)) > 255:
            fail(f"{self.name} is too long for a folder's name: use shorthands, as in --gamma[g]")
        self.folder = Path(args.data_dir) / args.exp_name / self.name
        self.log = self.folder / "log.txt"
        self.command = [os.path.relpath(script), *command_line(type(args), settings), "--resume"]
        self.state, self.code, self.began, self.log_start = "waiting", None, None, 0
        self.epochs, self.ret, self.seconds, self.changed = 0, math.nan, 0.0, 0.0
        identity = {k: v for k, v in dataclasses.asdict(args).items() if k not in MAY_DIFFER}
        identity |= {"script": script.stem, "ranks": args.cpu}
        self.identity = json.loads(json.dumps(identity))  # as it will be read: a tuple is a list

    def look_at_folder(self):
        """See how far the run is; return why it cannot go on with what is there, if so."""
        self.read_progress()
        with contextlib.suppress(OSError):
            self.log_start = self.log.stat().st_size
        for path in (self.folder / "checkpoint").glob("epoch*.json"):
            checkpoint = read_json(path)
            enough = checkpoint.get("epoch", 0) >= self.args.epochs
            if enough and checkpoint.get("run") == self.identity:
                self.state = "finished before"
        then = read_json(self.folder / "config.json") or self.identity
        changed = {key: now for key, now in self.identity.items() if then.get(key) != now}
        changed = [f"{key} {then.get(key)}, not {now}" for key, now in changed.items()]
        problem = f"{self.folder} holds another run, with {'; '.join(changed)}: choose --exp-name"
        return problem if changed else None

    def follow(self, future):
        """Bring the state up to date with the future that stands for the run's process."""
        if future.done() and not future.cancelled() and self.state in ("waiting", "running"):
            self.code = future.exception() or future.result()
            failed = "stopped" if stop.number else "failed"
            self.state = "waiting" if self.code is None else failed if self.code else "done"
            self.read_progress()
        elif future.running():
            self.state, self.began = "running", self.began or time.time()
            self.read_progress()

    def read_progress(self):
        try:
            path = self.folder / "progress.txt"
            header, *rows = (line.split("\t") for line in path.read_text().splitlines())
            row = dict(zip(header, map(float, rows[-1]), strict=True))
            self.epochs, self.seconds = int(row["Epoch"]) + 1, row["Time"]
            self.ret = row.get("AverageTestEpRet", row.get("AverageEpRet", math.nan))
            self.changed = path.stat().st_mtime
        except (OSError, ValueError, IndexError, KeyError):
            pass  # no row yet, or one that is being written

    def seconds_in_all(self):
        return self.seconds / self.epochs * self.args.epochs

    def seconds_left(self):
        since = time.time() - max(self.changed, self.began or 0)
        return max(self.seconds_in_all() - self.seconds - since, 0.0)

    def row(self):
        """Return state, epoch, return, and time left or taken."""
        row = [self.state, f"epoch {self.epochs}/{max(self.epochs, self.args.epochs)}"]
        row.append("" if math.isnan(self.ret) else f"return {self.ret:.4g}")
        if not self.epochs:
            return [*row, ""]
        running = self.state == "running"
        return [*row, f"{clock(self.seconds_left())} left" if running else clock(self.seconds)]

    def failure(self):
        """Return how the run failed, with the last lines of its log."""
        code = self.code
        if isinstance(code, int):
            code = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        try:
            lines = self.log.read_bytes()[self.log_start :].decode(errors="replace").splitlines()
        except OSError:
            lines = []
        return "\n    ".join([f"{self.name} failed ({code}), see {self.log}", *lines[-LOG_LINES:]])


class Stop:
    """Which signal has asked the runs to end, and until when they may take their time."""

    number, deadline = None, None

    def __call__(self, number, frame=None):
        self.deadline = time.time() + (PATIENCE if self.number is None else 0)
        self.number = number


stop = Stop()


@contextlib.contextmanager
def signals_stop_runs():
    """Let signals end the runs first, the second one at once."""
    stop.number = None
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    # What is ignored stays so: nohup means it
    old = {n: signal.getsignal(n) for n in numbers if signal.getsignal(n) != signal.SIG_IGN}
    for number in old:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def launch(command, log):
    """Do a run, in a thread or on another machine; return its exit code, None if not started."""
    if stop.number:
        return None
    log.parent.mkdir(parents=True, exist_ok=True)
    foreign = tuple(LAUNCHER_VARIABLES)
    env = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    command = [sys.executable, *command]
    with open(log, "ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env
        )
    asked = False
    while process.poll() is None:
        time.sleep(0.1)
        if stop.number and not asked:
            process.terminate()
            asked = True
        if stop.number and time.time() > stop.deadline:
            process.kill()
    return process.returncode


def supervise(runs, pool, workers):
    """Hand all runs to the pool, show what becomes of them until all have ended."""
    screen = Screen(runs, workers)
    futures = {}
    try:
        for run in runs:
            if run.state == "waiting":
                futures[run] = pool.submit(launch, run.command, run.log)
        while True:
            pending = [future for future in futures.values() if not future.done()]
            for run, future in futures.items():
                run.follow(future)
            screen.show()
            if not pending:
                break
            if stop.number:
                for future in pending:
                    future.cancel()
            concurrent.futures.wait(pending, 0.5, concurrent.futures.FIRST_COMPLETED)
    except BaseException:
        stop(signal.SIGTERM)  # or leaving the pool would wait for all runs to end by themselves
        raise
    screen.end()


class Screen:
    """A table that is redrawn in place on a terminal; elsewhere a line when a state changes."""

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
                show(f"{run.name}: {', '.join(filter(None, run.row()))}")

    def table(self, columns, lines):
        room = max(lines - 2, 1)  # the line below and the cursor's
        chosen = set(sorted(self.runs, key=lambda run: STATES.index(run.state))[:room])
        rows = [(run.name, *run.row()) for run in self.runs if run in chosen]
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
        known = [run.seconds_in_all() for run in self.runs if run.epochs]
        if known and counts["running"]:
            mean = sum(known) / len(known)
            running = [run for run in self.runs if run.state == "running"]
            left = sum(run.seconds_left() if run.epochs else mean for run in running)
            left += counts["waiting"] * mean
            text += f", about {clock(left / min(self.workers, len(self.runs)))} left"
        return f"{len(self.runs)} run(s): {text}"

    def end(self):
        if not self.is_terminal:
            show(self.summary())
        for run in self.runs:
            if run.state == "failed":
                print(f"grid.py: error: {run.failure()}", file=sys.stderr, flush=True)


def show(text):
    with contextlib.suppress(BrokenPipeError):  # that nobody is listening stops no run
        print(text, flush=True)


def flag(key):
    return f"--{key.replace('_', '-')}"


def start_of(key):
    """Return the default shorthand of a flag: letters and digits among its first three."""
    return "".join(c for c in key[:3] if c.isalnum())


def valid_str(value):
    """Return a value as part of a file's name, as Spinning Up does: (0.1, "A b") is 0-1-a-b."""
    if isinstance(value, tuple | list):
        return "-".join(map(valid_str, value))
    return re.sub(r"[^a-z0-9_-]", "-", str(value).lower())


def clock(seconds):
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def cores():
    return len(os.sched_getaffinity(0))


def read_json(path):
    """Return the dictionary in a file; of a missing or damaged one, an empty one."""
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


def similar(word, words):
    matches = [known for known in words if known.startswith(word)]
    matches += difflib.get_close_matches(word, words, 1)
    return f": did you mean {matches[0]}?" if matches else ""


def find_script(script):
    """Return the path of a script by its name or path, here or beside this file."""
    name = f"{str(script).removesuffix('.py')}.py"
    for path in (Path(name), HERE / name):
        if path.is_file():
            return path
    scripts = [path.stem for path in HERE.glob("*_*.py")]
    fail(f"there is no script {script}{similar(str(script), scripts)}")


def read_args(script):
    """Return the script's Args."""
    sys.path.insert(0, str(script.resolve().parent))
    module = importlib.import_module(script.stem)
    if not hasattr(module, "Args"):
        fail(f"{script} is not a script that trains: it has no Args")
    return module.Args


def convert(script, dataclass, key, vals):
    """Return the values of a flag as the script would read them, or stop."""
    fields = {field.name: field.type for field in dataclasses.fields(dataclass)}
    if key in ("exp_name", "resume", "overwrite"):
        fail(f"{flag(key)} cannot vary: a grid names its runs and resumes them")
    if key not in fields:
        known = [flag(name) for name in (*fields, *OWN_FLAGS)]
        fail(f"{script.stem} has no flag {flag(key)}{similar(flag(key), known)}")
    kind, values, nowhere = fields[key], [], io.StringIO()
    if not vals and kind is not bool:
        fail(f"{flag(key)} needs a value")
    for value in vals or [True]:
        words = [value]
        if isinstance(value, tuple | list):
            words = value
        elif typing.get_origin(kind) is tuple:
            words = str(value).split()
        try:
            if kind is bool:
                values.append({"true": True, "false": False}[str(value).lower()])
            else:
                with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
                    args = tyro.cli(dataclass, args=[flag(key), *map(str, words)])
                values.append(getattr(args, key))
        except (KeyError, SystemExit):
            name = str(kind).removeprefix("typing.") if typing.get_args(kind) else kind.__name__
            name = "true or false" if kind is bool else name
            fail(f"{flag(key)} takes {name}, not {value!r}")
    if len(set(values)) < len(values):
        hint = '; several numbers in quotes, like "64 64", are one value'
        hint = hint if typing.get_origin(kind) is tuple else ""
        fail(f"{flag(key)} has a value twice: {', '.join(map(str, vals))}{hint}")
    return values


def command_line(dataclass, settings):
    words = []
    for key, value in settings.items():
        if not isinstance(value, bool):
            words += [flag(key), *map(str, value if isinstance(value, tuple) else [value])]
        elif value != getattr(dataclass, key):
            words += [flag(key) if value else flag(f"no_{key}")]
    return words


def parse_flags(grid, words):
    """Add what is like --key[shorthand] value value ... to the grid."""
    flags = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            flags.append((name, [value] if equals else []))
        elif flags:
            flags[-1][1].append(word)
        else:
            fail(f"{word} has no flag in front of it")
    for name, values in flags:
        key, shorthand = re.fullmatch(r"--([^\[]*)(?:\[(.*)\])?", name).groups()
        grid.add(key, values, shorthand, in_name=shorthand is not None)


def main(argv):
    parser = argparse.ArgumentParser(
        usage="%(prog)s script [--flag[shorthand] value [value ...]] ... [options]",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = fail
    add = parser.add_argument
    add("script", help="ppo_torch, sac_tf1, ...")
    add("--exp-name", metavar="NAME", help="how the names of experiments begin (the script's name)")
    add("--datestamp", action="store_true", help="put today's date in front of the names")
    add("--cpu", metavar="N", default=1, help="ranks a run; auto: as many as there are cores (1)")
    add("--workers", metavar="K", type=int, help="runs at once (as many as there are cores for)")
    add("--data-dir", metavar="FOLDER", help="where the folders of the experiments go (runs)")
    add("--dry-run", action="store_true", help="print names and commands, and start nothing")
    args, words = parser.parse_known_args(argv)
    name = Path(args.script).stem if args.exp_name is None else args.exp_name
    grid = ExperimentGrid(name)
    parse_flags(grid, words)
    options = dict(data_dir=args.data_dir, datestamp=args.datestamp, workers=args.workers)
    runs = grid.run(args.script, num_cpu=args.cpu, dry_run=args.dry_run, **options)
    undone = any(run.state not in ("done", "finished before") for run in runs)
    return int(proc_id() == 0 and not args.dry_run and undone)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
