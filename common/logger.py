"""The record of each epoch: a table on the screen, a row in progress.txt, TensorBoard events."""

import errno
import io
import os
import platform
import sys
import time
from pathlib import Path

import numpy as np

from common.errors import SidespinError, plural
from common.mpi import mpi_statistics_scalar, mpi_sum, num_procs, proc_id
from common.run import TIMES, print_out

STATISTICS = ("Average", "Std", "Max", "Min")


class EpochLogger:
    """Collects numbers on every rank and reduces them over all ranks; rank 0 prints and writes.

    The columns are those of Spinning Up. A star asks for average, std, max and min: "EpRet*" gives
    AverageEpRet, StdEpRet, MaxEpRet and MinEpRet, while "EpLen" is the average alone.
    """

    def __init__(self, run, columns):
        self.run, self.args, self.columns = run, run.args, columns.split()
        self.stored = {key.rstrip("*"): [] for key in self.columns}
        self.start_time, self.epoch_start, self.events = time.time(), None, None
        self.bar, self.next_progress, self.last_return = None, 0.0, np.nan
        self.header = "\t".join(["Epoch", "TotalEnvInteracts", *self._names(), *TIMES]) + "\n"
        lines = run.rows() if proc_id() == 0 and run.resumes else []
        if mpi_sum(bool(lines) and lines[0].decode() != self.header):
            table = run.folder / "progress.txt"
            raise SidespinError(f"cannot resume: {table} is damaged or has different columns")
        run.say(f"{run.script.stem} on {self.args.env_id}, {plural(run.ranks, 'rank')}")

    def _names(self):
        for column in self.columns:
            key = column.rstrip("*")
            yield from [key] if key == column else [f"{kind}{key}" for kind in STATISTICS]

    def store(self, **numbers):
        """Keep numbers, or arrays of them, until the end of the epoch."""
        for key, value in numbers.items():
            if key not in self.stored:
                raise SidespinError(f"there is no column for {key}: add it to EpochLogger(...)", 1)
            value = value.detach() if hasattr(value, "detach") else value  # a torch tensor
            self.stored[key].append(np.ravel(value))

    def dump(self, epoch):
        """Print the epoch's row and append it to the run's files; stop if a value is not finite."""
        row = {"Epoch": epoch, "TotalEnvInteracts": (epoch + 1) * self.args.steps_per_epoch}
        numbers, broken = [], []
        for column in self.columns:
            key = column.rstrip("*")
            values, self.stored[key] = np.concatenate([np.empty(0), *self.stored[key]]), []
            mean, std, low, high = mpi_statistics_scalar(values, with_min_and_max=True)
            if not np.isfinite(mean) and mpi_sum(values.size):
                broken.append(f"{key} is {mean}")
            numbers += [mean] if key == column else [mean, std, high, low]
        row |= zip(self._names(), numbers)
        now = time.time()
        if proc_id() == 0:
            with self.run.writing():
                if self.events is None:
                    self._begin(epoch)
                row["Time"] = now - self.start_time
                row["StepsPerSec"] = self.args.steps_per_epoch / (now - self.epoch_start)
                _write(self.run.table, "\t".join(map(str, row.values())) + "\n")
                self.events.write(row, now)
            width = max(map(len, row))
            lines = [f"| {k:>{width}} | {_readable(v):>12} |" for k, v in row.items()]
            rule = "-" * len(lines[0])
            self.hide_progress()
            print_out("\n".join([rule, *lines, rule]))
        self.epoch_start, self.run.epochs_done = now, epoch
        if broken:
            kept = f"everything saved before is still in {self.run.folder}"
            raise SidespinError(f"{', '.join(broken)}; {kept}", 1)
        self.run.epochs_done = epoch + 1

    def _begin(self, epoch):
        """Cut the run's files back to the epochs in the checkpoint; the later ones are repeated."""
        if self.run.resumes and not self.run.restored:
            raise SidespinError("this script cannot resume: it never restores a checkpoint", 1)
        lines = self.run.rows()[: epoch + 1] if epoch else []
        names = self.header.split()
        rows = [dict(zip(names, map(float, line.split(b"\t")))) for line in lines[1:]]
        elapsed = rows[-1]["Time"] if rows else 0.0
        self.start_time -= elapsed
        self.epoch_start = self.epoch_start or self.start_time + elapsed
        self.run.table.truncate(sum(map(len, lines)))
        for path in self.run.folder.glob("events.out.tfevents.*"):
            path.unlink()
        self.events = EventFile(self.run.folder, self.run.config)
        for row in rows:
            self.events.write(row, self.start_time + row["Time"])
        if not lines:
            _write(self.run.table, self.header)

    def progress(self, epoch, step, steps):
        """Redraw the progress line a few times per second, if rank 0 has a terminal."""
        now = time.time()
        if self.epoch_start is None:  # the very first step: set-up time does not count
            self.epoch_start, self.next_progress, self.run.epochs_done = now, now + 0.5, epoch
        last = step + 1 == steps
        if proc_id() > 0 or self.next_progress == np.inf or (now < self.next_progress and not last):
            return
        self.next_progress = now + 0.2
        if self.bar is None:
            terminal = find_terminal()
            if terminal is None:
                self.next_progress = np.inf
                return
            self.bar = self._make_bar(epoch * self.args.steps_per_epoch, terminal)
        returns = self.stored.get("EpRet") or [self.last_return]
        self.last_return = float(np.mean(returns[-1]))
        phase = "testing" if "TestEpRet" in self.stored else "updating"
        now = phase if last else f"return {self.last_return:.4g}"
        self.bar.desc = f"epoch {epoch + 1}/{self.args.epochs}, {now}"
        self.bar.n = epoch * self.args.steps_per_epoch + (step + 1) * num_procs()
        self.bar.ncols = os.get_terminal_size(self.bar.fp.fileno()).columns - 3  # room for ^C
        self.bar.refresh()

    def _make_bar(self, initial, terminal):
        from tqdm import tqdm

        bar = tqdm(
            total=self.args.epochs * self.args.steps_per_epoch,
            initial=initial,
            file=terminal,
            bar_format="{desc} |{bar}| {rate:,.0f} steps/s, {remaining} left",
            smoothing=0,  # show the mean rate: steps are fast, but updates in between are slow
            delay=1,  # do not draw it yet: there is no rate to show
            leave=False,
        )
        bar.delay, bar.start_t = 0, self.epoch_start
        self.run.on_exit.callback(terminal.write, "\r\x1b[K")  # ^C may stand behind the bar
        self.run.on_exit.callback(bar.close)
        return bar

    def hide_progress(self):
        if self.bar is not None:
            self.bar.clear()


class EventFile:
    """TensorBoard's file format without TensorBoard's writer, which would import TensorFlow."""

    def __init__(self, folder, config):
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.Event, self.Summary, self.RecordWriter = Event, Summary, RecordWriter
        name = f"events.out.tfevents.{int(time.time())}.{platform.node()}"
        self.file = open(folder / name, "wb", buffering=0)
        self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))
        hparams = {k: v if isinstance(v, int | float) else str(v) for k, v in config.items()}
        self._append(Event(wall_time=time.time(), summary=hparams_pb(hparams)))

    def write(self, row, wall_time):
        step = int(row["TotalEnvInteracts"])
        tags = {f"{_group(key)}/{key}": float(value) for key, value in row.items()}
        values = [self.Summary.Value(tag=tag, simple_value=value) for tag, value in tags.items()]
        self._append(self.Event(wall_time=wall_time, step=step, summary=self.Summary(value=values)))

    def _append(self, event):
        record = io.BytesIO()
        self.RecordWriter(record).write(event.SerializeToString())
        _write(self.file, record.getvalue())


def _group(column):
    """Return the group in which TensorBoard shows a column."""
    if column.endswith(("EpRet", "EpLen")):
        return "episodes"
    if "Loss" in column:
        return "losses"
    if column.endswith("Vals"):
        return "values"
    if column in ("Epoch", "TotalEnvInteracts", "Time", "StepsPerSec"):
        return "time"
    return "policy"


def find_terminal():
    """Return the user's terminal, or None.

    Under mpirun a rank writes to a pipe; on Linux, use the terminal of the mpirun that started it.
    """
    if sys.stdout is not None and sys.stdout.isatty():
        return sys.stdout
    pid = os.getppid()
    for _ in range(3 if num_procs() > 1 else 0):
        try:
            name, _, fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
            if "(mpi" in name:
                path = os.readlink(f"/proc/{pid}/fd/1")
                return open(path, "w") if path.startswith(("/dev/pts/", "/dev/tty")) else None
            pid = int(fields.split()[1])  # its parent
        except OSError:
            return None
    return None


def _write(file, data):
    """Append to an unbuffered file in one call: nothing is left to write at exit."""
    data = data.encode() if isinstance(data, str) else data
    if file.write(data) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)


def _readable(value):
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
