"""What a run is: its name, its folder, what makes two runs the same run, and who may write to it.

<data_dir>/<exp_name>/<exp_name>_s<seed>/ holds

    config.json     the arguments, and the versions of Python and its packages
    script.py       the script as it was when the run began
    progress.txt    tab-separated, one row per epoch
    events.out.*    the same for TensorBoard
    model.pt        the weights (PyTorch), or tf1_save/ (TensorFlow)
    checkpoint/     everything that --resume needs
"""

import contextlib
import dataclasses
import errno
import hashlib
import importlib
import json
import os
import platform
import re
import secrets
import shlex
import shutil
import sys
import time
from pathlib import Path

from common.args import check_args
from common.errors import SidespinError, flag, plural, resume_command, warn
from common.mpi import comm, first_problem, hosts, num_procs, proc_id

try:
    import fcntl
except ImportError as error:
    raise ImportError("Sidespin runs on Linux and macOS; on Windows, use WSL") from error

MODELS = {"torch": "model.pt", "tf1": "tf1_save"}
KEPT_MODELS = {"torch": "model_{}.pt", "tf1": "tf1_save_{}"}  # with --keep-models, by epoch
RUN_FILES = """config.json* script.py progress.txt events.out.tfevents.* model*.pt* tf1_save*
    checkpoint""".split()
# Arguments that may change when a run is resumed
MAY_DIFFER = "epochs cpu threads data_dir exp_name save_freq resume overwrite keep_models".split()
PACKAGES = "numpy torch tensorflow gymnasium mujoco mpi4py".split()
TIMES = ("Time", "StepsPerSec")  # columns that differ even between identical runs


class Run:
    """One run; `with Run(args, __file__) as run:` locks its folder for the length of the block."""

    def __init__(self, args, script, ranks=None):
        self.args, self.script = args, Path(script)
        self.ranks = num_procs() if ranks is None else ranks
        self.name = args.exp_name or as_file_name(f"{self.script.stem}_{args.env_id}")
        self.folder = Path(args.data_dir) / self.name / f"{self.name}_s{args.seed}"
        config = {**dataclasses.asdict(args), "exp_name": self.name}
        config |= {"script": self.script.stem, "ranks": self.ranks}
        self.config = json.loads(json.dumps(config, default=str))  # as read back: tuples are lists
        # With --decay, the learning rates depend on the number of epochs.
        may_differ = set(MAY_DIFFER) - ({"epochs"} if self.config.get("decay") is True else set())
        self.identity = {k: v for k, v in self.config.items() if k not in may_differ}
        self.table, self.resumes, self.epochs_done = None, False, None  # None: no step yet
        self.restored = False  # set by Checkpoint.restore()
        self.on_exit = contextlib.ExitStack()  # closed however the run ends

    def __enter__(self):
        problem = None
        try:
            check_args(self.args, self.ranks)
            if self.args.cpu > 1 and num_procs() == 1:
                problem = f"{flag('cpu')} {self.args.cpu} needs the command line or mpirun"
        except SidespinError as error:
            problem = str(error)
        problem = first_problem(problem)
        if not problem:
            self.mark = self.folder / comm().bcast(f"mark.{secrets.token_hex(8)}")
            problem, self.resumes = comm().bcast(self._open() if proc_id() == 0 else None)
        if not problem and num_procs() > 1:
            problem = first_problem(self._not_shared())
            if proc_id() == 0:
                self.mark.unlink(missing_ok=True)
                if problem and self.is_new:
                    self._remove_empty()
        if problem:
            self._close()
            raise SidespinError(problem)
        return self

    def __exit__(self, kind, error, trace):
        self.on_exit.close()
        self._close()
        if proc_id() == 0:
            if error and self.is_new and self.epochs_done is None:
                self._remove_empty()
            elif not error and self.epochs_done:
                self.say(f"done after {plural(self.epochs_done, 'epoch')}{self._what_next()}")
        if error and self.epochs_done is not None:
            error.where = f"after {plural(self.epochs_done, 'epoch')}"
            error.resume = resume_command()
            if not isinstance(error, SidespinError):
                error.add_note(f"stopped {error.where}; to resume: {error.resume}")

    def _open(self):
        """Lock the folder; return what is wrong, or None, and whether it holds a run to resume."""
        try:
            old = [p for pattern in RUN_FILES for p in self.folder.glob(pattern)]
            if old and not self.args.overwrite and not self.args.resume:
                choices = f"{flag('resume')}, {flag('overwrite')} or another {flag('exp_name')}"
                problem = f"{self.folder} already holds a run: use {choices} or {flag('seed')}"
                return problem, False
            problem = self.difference() if old and self.args.resume else None
            if problem:
                return problem, False
            if len(os.fsencode(self.folder.name)) > 255:
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
            self.is_new = not old
            folders = (self.folder, *self.folder.parents[:2])
            self.made = [folder for folder in folders if not folder.exists()]
            self.folder.mkdir(parents=True, exist_ok=True)
            self.table = open(self.folder / "progress.txt", "ab+", buffering=0)
            _lock(self.table)
            if num_procs() > 1:
                self.mark.touch()
            if not self.args.resume:
                self._remove(old)
            if not old or not self.args.resume:
                self.write_config()
                if self.script.exists():
                    write_file(self.folder / "script.py", self.script.read_bytes())
            else:
                self._warn_of_changes()
        except BlockingIOError:
            return f"another process is training in {self.folder}", False
        except OSError as error:
            return f"cannot write to {self.folder}: {error.strerror}", False
        return None, bool(old and self.args.resume)

    def _not_shared(self):
        """Return what is wrong if this rank does not see the mark of rank 0, or None."""
        first, own = hosts()[0], hosts()[proc_id()]
        deadline = time.time() + 5  # a disk on the network may take a while
        while not self.mark.exists():
            if time.time() > deadline:
                where = f"{own} does not see {self.folder.absolute()} of {first}"
                return f"{where}: choose a {flag('data_dir')} that all hosts share"
            time.sleep(0.1)

    def _close(self):
        if self.table is not None:
            self.table.close()  # also releases the lock

    def _remove(self, old):
        """Delete the old run, checkpoints first: if killed, this leaves nothing to resume."""
        for index in self.folder.glob("checkpoint/*.json"):
            index.unlink()
        self.table.truncate(0)
        for path in old:
            if path.name != "progress.txt":
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _remove_empty(self):
        """Delete a run that failed before its first step."""
        with contextlib.suppress(OSError):
            for name in ("config.json", "script.py", "progress.txt"):
                (self.folder / name).unlink(missing_ok=True)
            for folder in self.made:
                folder.rmdir()

    def difference(self):
        """Return why this run cannot resume the one in the folder, or None."""
        then = read_config(self.folder)
        if not then:
            return None  # killed before it was written; checkpoints know their run
        own = ("script", "ranks")
        why = {"epochs": f", which {flag('decay')} fixes"}
        differences = [
            f"{key if key in own else flag(key)} {now} (was {then.get(key)}{why.get(key, '')})"
            for key, now in self.identity.items()
            if then.get(key) != now
        ]
        if differences:
            return f"cannot resume {self.folder} with different settings: {', '.join(differences)}"
        return None

    def _warn_of_changes(self):
        then = read_config(self.folder).get("versions") or {}
        if "mujoco" in then:  # it is imported with the environment, after this
            with contextlib.suppress(ImportError):
                importlib.import_module("mujoco")
        changed = [f"{k} {then[k]}" for k, v in _versions().items() if then.get(k, v) != v]
        if changed:
            changed = ", ".join(changed)
            warn(f"results may differ from an unbroken run: this one began with {changed}")
        copy = self.folder / "script.py"
        if copy.exists() and self.script.exists() and copy.read_bytes() != self.script.read_bytes():
            warn(f"{self.script.name} has changed since this run began, see {copy}")

    def write_config(self):
        """Write config.json, on rank 0."""
        if proc_id() == 0:
            config = {**self.config, "python": platform.python_version(), "versions": _versions()}
            with self.writing():
                text = json.dumps(config, indent=4) + "\n"
                write_file(self.folder / "config.json", text.encode())

    def _what_next(self):
        tools = [name for name in ("play.py", "plot.py") if self.script.with_name(name).exists()]
        return "".join(f"\n    python {tool} {shlex.quote(str(self.folder))}" for tool in tools)

    def say(self, message):
        """Print a line about this run, on rank 0."""
        if proc_id() == 0:
            print_out(f"{self.folder}: {message}")

    @contextlib.contextmanager
    def writing(self):
        """Turn an OSError in the block into one sentence."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise SidespinError(f"cannot write to {self.folder}: {reason}", 1) from error

    def rows(self):
        """Return the lines of progress.txt as bytes, the header first."""
        self.table.seek(0)
        return self.table.read().splitlines(keepends=True)

    def table_checksum(self, epochs):
        """Return a checksum of the first rows as stored on disk, without the columns of TIMES."""
        os.fsync(self.table.fileno())
        lines = [line.split(b"\t") for line in self.rows()[: epochs + 1]]
        whole = len(lines) == epochs + 1 and all(line[-1].endswith(b"\n") for line in lines)
        if not whole or not all(_is_number(x) for line in lines[1:] for x in line):
            return "damaged"
        kept = [i for i, key in enumerate(lines[0]) if key.decode().strip() not in TIMES]
        return checksum(b"\n".join(b"\t".join(line[i] for i in kept) for line in lines))


def find_runs(folder):
    """Return the folders of all runs inside a folder."""
    return sorted(path.parent for path in Path(folder).rglob("config.json"))


def read_config(folder):
    """Return config.json as a dictionary; an empty one if it is missing or damaged."""
    try:
        return dict(json.loads((Path(folder) / "config.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


def model_path(folder, epoch=None):
    """Return a run's model path and framework; with epoch, of the model kept from that epoch."""
    framework = next((k for k in MODELS if list(Path(folder).glob(f"{MODELS[k]}*"))), "torch")
    name = MODELS[framework] if epoch is None else KEPT_MODELS[framework].format(epoch)
    return Path(folder) / name, framework


def as_file_name(text):
    return re.sub(r"[^\w.-]+", "-", text)


def checksum(data):
    return hashlib.sha256(data).hexdigest()


def write_file(path, data):
    """Write a file under a temporary name, sync it to disk and rename it into place."""
    new = path.with_name(f"{path.name}.new")
    try:
        with open(new, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # sync the rename, too
    os.close(folder)


def print_out(text, end="\n"):
    """Print to stdout; raise an error if that fails."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:  # as in `| head`
        raise
    except OSError as error:
        raise SidespinError(f"cannot write to stdout: {error.strerror}", 1) from error


def _is_number(x):
    try:
        return float(x) is not None
    except ValueError:
        return False


def _lock(file):
    """Lock an open file or raise BlockingIOError; skip this on disks without locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise


def _versions():
    """Return the versions of the PACKAGES that this process has imported."""
    imported = {name: sys.modules.get(name) for name in PACKAGES}
    return {name: module.__version__ for name, module in imported.items() if module}
