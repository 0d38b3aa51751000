"""The run's folder and what goes into it each epoch; the same for both frameworks.

<data_dir>/<exp_name>/<exp_name>_s<seed>/ holds config.json (the arguments and the versions they ran
with), progress.txt (tab-separated, a row an epoch), the same as TensorBoard events, the model, and
the checkpoints.
"""

import dataclasses
import errno
import fcntl
import io
import json
import os
import platform
import re
import shutil
import sys
import time
from pathlib import Path

import numpy as np

from common.checkpoint import write_file
from common.mpi import (
    comm,
    fail,
    is_terminal,
    mpi_statistics_scalar,
    mpi_sum,
    num_procs,
    print_out,
    proc_id,
    run,
    warn,
    writing,
)

RUN_FILES = (
    "config.json* progress.txt events.out.tfevents.* model*.pt* tf1_save* checkpoint".split()
)
# With other values of these a run is still the same run, and can be resumed
MAY_DIFFER = """epochs cpu threads data_dir exp_name save_freq resume overwrite
    keep_models""".split()
PACKAGES = ("numpy", "torch", "tensorflow", "gymnasium", "mujoco", "mpi4py")


class EpochLogger:
    """Collects numbers on every rank, reduces them over all ranks; rank 0 prints and writes."""

    def __init__(self, args, script):
        script = Path(script).stem
        name = args.exp_name or re.sub(r"[^\w.-]+", "-", f"{script}_{args.env_id}")
        self.folder = Path(args.data_dir) / name / f"{name}_s{args.seed}"
        self.args, self.stored, self.row, self.header = args, {}, {}, None
        self.broken, self.then = [], {}
        config = {**dataclasses.asdict(args), "exp_name": name}
        config |= {"script": script, "ranks": num_procs()}
        self.config = json.loads(json.dumps(config))  # as it will be read: a tuple is a list
        self.identity = {k: v for k, v in self.config.items() if k not in MAY_DIFFER}
        problem, self.resumes = comm.bcast(self._open() if proc_id() == 0 else None)
        if problem:
            fail(problem)
        self.say(f"{script} on {args.env_id}, {num_procs()} rank(s)")
        run.epoch, run.resume_argv = None, self._resume_argv()
        self.epoch_start, self.rate = None, None
        self.next_progress = 0.0 if proc_id() == 0 and is_terminal(sys.stdout) else np.inf

    def _open(self):
        """Take hold of the folder; return what is wrong, and whether it holds a run to resume."""
        try:
            old = [p for pattern in RUN_FILES for p in self.folder.glob(pattern)]
            if old and not self.args.overwrite and not self.args.resume:
                return (
                    f"{self.folder} already holds a run: choose --resume, --overwrite, another "
                    "--exp-name or another --seed"
                ), False
            problem = self._differences() if old and self.args.resume else None
            if problem:
                return problem, False
            if len(os.fsencode(self.folder.name)) > 255:
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
            self.folder.mkdir(parents=True, exist_ok=True)
            # The lock goes with the process, however that ends.
            self.table = open(self.folder / "progress.txt", "ab+", buffering=0)
            _lock(self.table)
            if not self.args.resume:
                with writing(self.folder):
                    self._remove(old)
        except BlockingIOError:
            return f"another process is training in {self.folder}", False
        except OSError as error:
            return f"cannot write to {self.folder}: {error.strerror}", False
        return None, bool(old and self.args.resume)

    def _remove(self, old):
        """Make room for a new run, in an order that leaves nothing to be resumed by mistake."""
        for index in self.folder.glob("checkpoint/*.json"):
            index.unlink()
        self.table.truncate(0)
        for path in old:
            if path.name != "progress.txt":
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _differences(self):
        """Return what keeps this command from going on with the run in the folder."""
        try:
            then = self.then = dict(json.loads((self.folder / "config.json").read_bytes()))
        except (OSError, ValueError, TypeError):
            return None  # killed before it was written; checkpoints know whose they are
        differences = [
            f"{key if key in ('script', 'ranks') else '--' + key.replace('_', '-')} "
            f"{now}, then {then.get(key)}"
            for key, now in self.identity.items()
            if then.get(key) != now
        ]
        if differences:
            return f"cannot resume {self.folder} with other settings: now {'; '.join(differences)}"
        versions = {**_versions(), **(then.get("versions") or {})}
        changed = [f"{k} {versions[k]}" for k, v in _versions().items() if versions[k] != v]
        if changed:
            warn(f"the last digits may differ, this run began with {', '.join(changed)}")
        return None

    def _resume_argv(self):
        """Return the command that goes on with this run."""
        launcher = ["mpirun", "-np", str(num_procs())] if num_procs() != self.args.cpu else []
        own = [word for word in sys.argv if word not in ("--resume", "--overwrite")]
        return [*launcher, "python", *own, "--resume"]

    def begin(self, epoch):
        """Start the run's files, or cut them back to so many epochs: the rest is done again."""
        problem, elapsed = comm.bcast(self._begin(epoch) if proc_id() == 0 else None)
        if problem:
            fail(problem)
        if self.args.resume:
            self.say(f"going on with epoch {epoch}" if epoch else "no checkpoint yet, starting")
        self.start_time = time.time() - elapsed

    def _begin(self, epoch):
        """Return what is wrong, and the seconds that the epochs took."""
        lines = self._lines()
        rows = len(lines) - 1  # below the header
        if epoch == 0 and rows > self.then.get("save_freq", 1):
            return f"{self.folder} has epochs but no checkpoint: --overwrite starts anew", 0.0
        lines = lines[: epoch + 1] if epoch else []
        text = [line.decode().rstrip("\n").split("\t") for line in lines]
        self.header = text[0] if text else None
        try:
            rows = [dict(zip(self.header, map(float, row))) for row in text[1:]]
        except ValueError as error:
            return f"{self.folder / 'progress.txt'} is damaged: {error}", 0.0
        elapsed = rows[-1]["Time"] if rows else 0.0
        with writing(self.folder):
            self.table.truncate(sum(map(len, lines)))
            for path in self.folder.glob("events.out.tfevents.*"):
                path.unlink()
            self.events = EventFile(self.folder)
            for row in rows:
                self.events.write(row, time.time() - elapsed + row["Time"])
            config = {**self.config, "python": platform.python_version(), "versions": _versions()}
            write_file(self.folder / "config.json", (json.dumps(config, indent=4) + "\n").encode())
        return None, elapsed

    def _lines(self):
        self.table.seek(0)
        return self.table.read().splitlines(keepends=True)

    def table_without_times(self, epoch):
        """Return the rows of so many epochs, from the disk, less what no two runs share."""
        os.fsync(self.table.fileno())
        lines = [line.split(b"\t") for line in self._lines()[: epoch + 1]]
        kept = [i for i, key in enumerate(lines[0]) if key.strip() not in (b"Time", b"StepsPerSec")]
        whole = len(lines) == epoch + 1 and all(line[-1].endswith(b"\n") for line in lines)
        return b"\n".join(b"\t".join(line[i] for i in kept) for line in lines) if whole else b""

    def say(self, message):
        """Print a line about this run, once."""
        if proc_id() == 0:
            print_out(f"{self.folder}: {message}")

    def store(self, **numbers):
        """Keep numbers or arrays of them until log_tabular sums them up."""
        for key, value in numbers.items():
            self.stored.setdefault(key, []).append(np.ravel(value))

    def log_tabular(self, key, value=None, with_min_and_max=False, average_only=False):
        """Add a value to the epoch's row, or statistics over all ranks of what was stored."""
        if value is not None:
            self.row[key] = value
            return
        values = np.concatenate(self.stored.pop(key, [np.empty(0)]))
        mean, std, low, high = mpi_statistics_scalar(values, with_min_and_max=True)
        if not np.isfinite(mean) and mpi_sum(values.size):
            self.broken.append(f"{key} is {mean}")
        self.row[key if average_only else f"Average{key}"] = mean
        if not average_only:
            self.row[f"Std{key}"] = std
        if with_min_and_max:
            self.row[f"Max{key}"], self.row[f"Min{key}"] = high, low

    def dump_tabular(self):
        """Print the epoch's row, append it to the run's files, stop if a number is not finite."""
        now = time.time()
        self.row["Time"] = now - self.start_time
        self.row["StepsPerSec"] = self.args.steps_per_epoch / (now - self.epoch_start)
        self.rate, self.epoch_start = self.row["StepsPerSec"], now
        if proc_id() == 0:
            with writing(self.folder):
                if self.header is None:
                    self.header = list(self.row)
                    _write(self.table, "\t".join(self.header) + "\n")
                _write(self.table, "\t".join(str(self.row[key]) for key in self.header) + "\n")
                self.events.write(self.row, now)
            width = max(map(len, self.row))
            lines = [f"| {k:>{width}} | {_readable(v):>12} |" for k, v in self.row.items()]
            rule = "-" * len(lines[0])
            clear = "\r\x1b[K" if self.next_progress < np.inf else ""
            print_out(clear + "\n".join([rule, *lines, rule]))
        if self.broken:
            epoch, broken = self.row["Epoch"], ", ".join(self.broken)
            fail(
                f"stopped in epoch {epoch}: {broken}; {self.folder} keeps what was saved before", 1
            )
        self.row = {}

    def progress(self, epoch, step, steps):
        """Redraw the progress line a few times a second, on a terminal only."""
        run.epoch, now = epoch, time.time()
        if self.epoch_start is None:  # the first step of all: setting up does not count
            self.epoch_start, self.next_progress = now, self.next_progress + now + 0.5
        if now < self.next_progress or step == 0:
            return
        self.next_progress = now + 0.2
        rate = step * num_procs() / (now - self.epoch_start)
        steps_left = (self.args.epochs - epoch) * self.args.steps_per_epoch - step * num_procs()
        left = steps_left / (self.rate or rate)  # a whole epoch's rate has the update in it
        share = step / steps
        bar = "#" * int(20 * share)
        line = f"epoch {epoch + 1}/{self.args.epochs} [{bar:<20}] {share:4.0%}  "
        print_out(f"\r\x1b[K{line}{rate:,.0f} steps/s  {_clock(left)} left", end="")


class EventFile:
    """TensorBoard's file format without TensorBoard's writer, which would import TensorFlow."""

    def __init__(self, folder):
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.Event, self.Summary, self.RecordWriter = Event, Summary, RecordWriter
        name = f"events.out.tfevents.{int(time.time())}.{platform.node()}"
        self.file = open(folder / name, "wb", buffering=0)
        self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, row, wall_time):
        step = int(row["TotalEnvInteracts"])
        values = [self.Summary.Value(tag=key, simple_value=float(v)) for key, v in row.items()]
        self._append(self.Event(wall_time=wall_time, step=step, summary=self.Summary(value=values)))

    def _append(self, event):
        record = io.BytesIO()
        self.RecordWriter(record).write(event.SerializeToString())
        _write(self.file, record.getvalue())


def _lock(file):
    """Take hold of an open file or raise BlockingIOError; some network disks know no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise


def _write(file, data):
    """Append to an unbuffered file, in one piece: nothing is left to be written at exit."""
    data = data.encode() if isinstance(data, str) else data
    if file.write(data) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)


def _versions():
    """Return the versions of those packages that this process has imported."""
    imported = {name: sys.modules.get(name) for name in PACKAGES}
    return {name: module.__version__ for name, module in imported.items() if module}


def _readable(value):
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _clock(seconds):
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
