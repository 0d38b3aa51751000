"""The run's folder and what goes into it each epoch; the same for both frameworks.

<data_dir>/<exp_name>/<exp_name>_s<seed>/ holds config.json (the arguments and the versions they ran
with), progress.txt (tab-separated, a row an epoch), the same as TensorBoard events, and the model.
"""

import dataclasses
import json
import platform
import re
import shutil
import sys
import time
from pathlib import Path

import numpy as np

from common.mpi import comm, fail, mpi_statistics_scalar, mpi_sum, num_procs, proc_id

RUN_FILES = ("config.json", "progress.txt", "events.out.tfevents.*", "model.pt", "tf1_save*")
PACKAGES = ("numpy", "torch", "tensorflow", "gymnasium", "mujoco", "mpi4py")


class EpochLogger:
    """Collects numbers on every rank, reduces them over all ranks; rank 0 prints and writes."""

    def __init__(self, args, script):
        script = Path(script).stem
        name = args.exp_name or re.sub(r"[^\w.-]+", "-", f"{script}_{args.env_id}")
        self.folder = Path(args.data_dir) / name / f"{name}_s{args.seed}"
        self.args, self.stored, self.row, self.header = args, {}, {}, None
        self.broken = []
        problem = self._open(args, script) if proc_id() == 0 else None
        problem = comm.bcast(problem)
        if problem:
            fail(problem)
        self.start_time, self.epoch_start, self.rate = time.time(), None, None
        self.next_progress = 0.0 if proc_id() == 0 and sys.stdout.isatty() else np.inf

    def _open(self, args, script):
        old = [p for pattern in RUN_FILES for p in self.folder.glob(pattern)]
        if old and not args.overwrite:
            return (
                f"{self.folder} already holds a run: choose --overwrite, another --exp-name "
                "or another --seed"
            )
        try:
            for path in old:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            self.folder.mkdir(parents=True, exist_ok=True)
            config = {**dataclasses.asdict(args), "exp_name": self.folder.parent.name}
            config |= {"script": script, "ranks": num_procs(), "python": platform.python_version()}
            config["versions"] = _versions()
            (self.folder / "config.json").write_text(json.dumps(config, indent=4) + "\n")
            self.table = open(self.folder / "progress.txt", "w", buffering=1)
            self.events = EventFile(self.folder)
        except OSError as error:
            return f"cannot write to {self.folder}: {error.strerror}"
        print(f"{script} on {args.env_id}, {num_procs()} rank(s): {self.folder}", flush=True)
        return None

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
            if self.header is None:
                self.header = list(self.row)
                self.table.write("\t".join(self.header) + "\n")
            self.table.write("\t".join(str(self.row[key]) for key in self.header) + "\n")
            self.events.write(self.row["TotalEnvInteracts"], self.row)
            width = max(map(len, self.row))
            lines = [f"| {k:>{width}} | {_readable(v):>12} |" for k, v in self.row.items()]
            rule = "-" * len(lines[0])
            clear = "\r\x1b[K" if self.next_progress < np.inf else ""
            print(clear + "\n".join([rule, *lines, rule]), flush=True)
        if self.broken:
            epoch, broken = self.row["Epoch"], ", ".join(self.broken)
            fail(
                f"stopped in epoch {epoch}: {broken}; {self.folder} keeps what was saved before", 1
            )
        self.row = {}

    def progress(self, epoch, step, steps):
        """Redraw the progress line a few times a second, on a terminal only."""
        now = time.time()
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
        print(
            f"\r\x1b[Kepoch {epoch + 1}/{self.args.epochs} [{bar:<20}] {share:4.0%}  "
            f"{rate:,.0f} steps/s  {_clock(left)} left",
            end="",
            flush=True,
        )


class EventFile:
    """TensorBoard's file format without TensorBoard's writer, which would import TensorFlow."""

    def __init__(self, folder):
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.Event, self.Summary = Event, Summary
        name = f"events.out.tfevents.{int(time.time())}.{platform.node()}"
        self.records = RecordWriter(open(folder / name, "wb"))
        version = Event(wall_time=time.time(), file_version="brain.Event:2")
        self.records.write(version.SerializeToString())

    def write(self, step, row):
        values = [self.Summary.Value(tag=key, simple_value=float(v)) for key, v in row.items()]
        event = self.Event(wall_time=time.time(), step=step, summary=self.Summary(value=values))
        self.records.write(event.SerializeToString())
        self.records.flush()


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
