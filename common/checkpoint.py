"""Checkpoints: everything the rest of a run depends on, so that --resume continues bit for bit.

The folder checkpoint/ of a run holds its last two checkpoints. After N epochs, on rank R:

    epoch<N>.json               the parts and their checksums; its presence makes it a checkpoint
    epoch<N>.rank<R>.npz        networks, optimizers, generators and the current episode
    replay.rank<R>.<i>-<j>.npz  transitions i to j - 1, counted from the first ever stored

Every file is written under a temporary name, synced to disk and renamed. The .json comes last, once
all ranks have written their parts, so a kill at any instant leaves the previous checkpoint intact.

A checkpoint writes only the new transitions. A transition keeps its number forever and sits in the
replay buffer at that number modulo the buffer's size. So when the buffer wraps, no file changes:
old files just fall out of range, and are deleted once no checkpoint needs them. Arrays without one
row per transition are saved whole each time, as are those that the buffer names in saved_whole.
"""

import io
import json

import numpy as np

from common.env import Replayable, get_state, set_state
from common.errors import SidespinError, flag, plural, warn
from common.mpi import comm, first_problem, num_procs, proc_id
from common.run import checksum, read_config, write_file


class Checkpoint:
    """Writes and reads one rank's part of a run's checkpoints.

    state has get_state() and set_state(), like State in torch_utils and tf1_utils. The environment
    may be wrapped further: numbers and arrays that a wrapper holds are saved, too.
    """

    def __init__(self, run, state, rng, env, buf=None, test_env=None):
        self.run, self.state, self.rng, self.env, self.buf = run, state, rng, env, buf
        self.test_env = test_env
        self.folder = run.folder / "checkpoint"
        self.epoch, self.stored, self.replay = 0, 0, []  # of the last checkpoint
        self.newest = None  # the last file of transitions by this process, and its checksum
        self.inner = env
        while not isinstance(self.inner, Replayable):
            if not hasattr(self.inner, "env"):
                raise SidespinError("checkpoints need an environment created by make_env()")
            self.inner = self.inner.env

    def restore(self, o, ep_ret, ep_len):
        """Return the epochs done and the current episode: the checkpoint's, else the one given."""
        self.run.restored = True
        found = epochs_saved(self.run.folder) if self.run.resumes else []
        damages = []
        for epoch in sorted(comm().bcast(found), reverse=True):
            part, damage = self._load(epoch)
            damage = first_problem(damage)
            if not damage:
                break
            damages.append(damage)
        else:
            self._start_anew(damages)
            return 0, o, ep_ret, ep_len

        if damages:
            warn(f"{'; '.join(damages)}; using the checkpoint after {plural(epoch, 'epoch')}")
        if epoch >= self.run.args.epochs:
            more = f"to extend the run, choose a larger {flag('epochs')}"
            if "epochs" in self.run.identity:
                more = f"{flag('decay')} fixes {flag('epochs')}, so the run cannot be extended"
            self.run.say(f"already finished after {plural(epoch, 'epoch')}; {more}")
            return epoch, o, ep_ret, ep_len
        self.epoch = epoch
        self.rng.bit_generator.state = part["rng"]
        replays = self.inner.replay(part["episode"])
        set_state(self.env, part["wrappers"])
        if self.test_env is not None:
            set_state(self.test_env, part["test_env"])
        strayed = [rank for rank, there in enumerate(comm().allgather(replays)) if not there]
        if strayed:
            ranks = f" on rank {', '.join(map(str, strayed))}" if num_procs() > 1 else ""
            warn(f"the environment does not replay exactly: a new episode begins{ranks}")
        self.run.write_config()
        self.run.say(f"resuming after {plural(epoch, 'epoch')}")
        return epoch, *(part["now"] if replays else (self.env.reset()[0], 0.0, 0))

    def _start_anew(self, damages):
        anew = f"use {flag('overwrite')} to start over"
        if damages:
            raise SidespinError(f"cannot resume: {'; '.join(damages)}; {anew}")
        if self.run.resumes:
            rows = len(self.run.rows()) - 1 if proc_id() == 0 else 0
            if comm().bcast(rows) > read_config(self.run.folder).get("save_freq", 1):
                raise SidespinError(f"{self.run.folder} has epochs but no checkpoint: {anew}")
        self.run.write_config()  # again: the environment may have imported MuJoCo
        if self.run.args.resume:
            self.run.say("no checkpoint yet, starting")

    def save(self, epoch, o, ep_ret, ep_len):
        """Make the state after this many epochs the current checkpoint; keep the previous one."""
        with self.run.writing():
            rank = proc_id()
            if self.epoch == 0:  # after that, a missing folder is an error
                self.folder.mkdir(exist_ok=True)
            self._delete_old()
            part = {"rng": self.rng.bit_generator.state, "episode": self.inner.episode()}
            part |= {"now": [o, float(ep_ret), ep_len], "state": self.state.get_state()}
            part |= {"wrappers": get_state(self.env, until=self.inner)}
            if self.test_env is not None:  # its generators are seeded before every episode
                bare = self.test_env.unwrapped
                part["test_env"] = get_state(self.test_env, until=bare)
            if self.buf is not None:
                self._save_new_transitions(epoch)
                part["whole"] = self._arrays(whole=True)
            part |= {"stored": self.stored, "replay": self.replay}
            digest = self._write(f"epoch{epoch}.rank{rank}.npz", _npz(pack(part)))
            digests = comm().gather(digest)  # also waits until all ranks have written their parts
            if rank == 0:
                index = {"epoch": epoch, "run": self.run.identity, "parts": digests}
                index["table"] = self.run.table_checksum(epoch)
                index["checksum"] = checksum(json.dumps(index).encode())
                write_file(self.folder / f"epoch{epoch}.json", json.dumps(index).encode())
            comm().barrier()
            self.epoch = epoch

    def _delete_old(self):
        """Delete what the last checkpoint does not need: older files, and leftovers of a kill.

        This comes before a new checkpoint is written: after the last one, a kill finds nothing
        left to do.
        """
        rank = proc_id()
        needed = {f"epoch{self.epoch}.json", f"epoch{self.epoch}.rank{rank}.npz"}
        needed |= {name for name, _ in self.replay}
        for path in self.folder.iterdir():
            mine = f".rank{rank}." in path.name or (rank == 0 and ".json" in path.name)
            if mine and path.name not in needed:
                path.unlink(missing_ok=True)

    def _save_new_transitions(self, epoch):
        steps = self.run.args.steps_per_epoch // num_procs()  # each step stores one transition
        start, self.stored = self.stored, epoch * steps
        oldest = self.stored - self.buf.max_size
        if self.buf.ptr != self.stored % self.buf.max_size:
            raise SidespinError("checkpoints rely on exactly one stored transition per step", 1)
        if self.newest and _transitions(self.newest[0])[0] >= oldest:  # it is still in the buffer
            name, digest = self.newest
            if checksum(self._replay_file(name)) != digest:
                changed = "the replay buffer has changed transitions of an earlier checkpoint"
                raise SidespinError(f"{changed}: name the array in buf.saved_whole", 1)
        name = f"replay.rank{proc_id()}.{max(start, oldest)}-{self.stored}.npz"
        self.newest = [name, self._write(name, self._replay_file(name))]
        self.replay = [[n, d] for n, d in self.replay if _transitions(n)[1] > oldest]
        self.replay.append(self.newest)

    def _replay_file(self, name):
        """Return the content of a file replay.rank<R>.<i>-<j>.npz."""
        slots = np.arange(*_transitions(name)) % self.buf.max_size
        return _npz({key: x[slots] for key, x in self._arrays().items()})

    def _arrays(self, whole=False):
        """Return the buffer's arrays with one row per transition, or those to save whole."""
        arrays = {k: x for k, x in vars(self.buf).items() if isinstance(x, np.ndarray)}
        named, rows = getattr(self.buf, "saved_whole", ()), (self.buf.max_size,)
        return {k: x for k, x in arrays.items() if whole == (k in named or x.shape[:1] != rows)}

    def _load(self, epoch):
        """Read this rank's part of a checkpoint; return it and what is wrong, one of them None."""
        path = self.folder / f"epoch{epoch}.json"
        try:
            index = json.loads(path.read_bytes())
            digest = index.pop("checksum")
            if checksum(json.dumps(index).encode()) != digest or index["epoch"] != epoch:
                return None, f"{path} is damaged"
            if index["run"] != self.run.identity:
                return None, f"{path} belongs to another run"
            path = self.run.folder / "progress.txt"
            if proc_id() == 0 and self.run.table_checksum(epoch) != index["table"]:
                return None, f"{path} is damaged"
            path = self.folder / f"epoch{epoch}.rank{proc_id()}.npz"
            part = unpack(self._read(path, index["parts"][proc_id()]))
            for name, digest in part["replay"]:
                path = self.folder / name
                start, end = _transitions(name)
                first = max(start, part["stored"] - self.buf.max_size)
                transitions = self._read(path, digest)
                for key, x in self._arrays().items():
                    x[np.arange(first, end) % self.buf.max_size] = transitions[key][first - start :]
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            missing = isinstance(error, FileNotFoundError)
            return None, f"{path} is {'missing' if missing else 'damaged'}"
        try:
            self.state.set_state(part["state"])
            for key, x in part.get("whole", {}).items():
                getattr(self.buf, key)[...] = x
        except (LookupError, ValueError, RuntimeError, TypeError, AttributeError):
            return None, f"{path} does not match this script's networks or optimizers"
        if self.buf is not None:
            self.stored, self.replay = part["stored"], part["replay"]
            self.buf.ptr = self.stored % self.buf.max_size
            self.buf.size = min(self.stored, self.buf.max_size)
        return part, None

    def _write(self, name, data):
        write_file(self.folder / name, data)
        return checksum(data)

    def _read(self, path, digest):
        data = path.read_bytes()
        if checksum(data) != digest:
            raise ValueError("wrong checksum")
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return dict(arrays)


def epochs_saved(folder):
    """Return the numbers of epochs after which a run has a checkpoint, going by file names."""
    names = [path.stem for path in (folder / "checkpoint").glob("epoch*.json")]
    return [int(name[5:]) for name in names if name[5:].isdecimal()]


def pack(tree):
    """Turn nested dictionaries and lists into named arrays; the rest becomes JSON."""
    arrays = {}

    def visit(x):
        if isinstance(x, dict):
            return {key: visit(value) for key, value in x.items()}
        if isinstance(x, list | tuple):
            return [visit(value) for value in x]
        if isinstance(x, np.ndarray | np.generic):
            arrays[f"array{len(arrays)}"] = x
            return {"$array": len(arrays) - 1}
        return x

    structure = visit(tree)
    return {**arrays, "structure": np.array(json.dumps(structure))}


def unpack(arrays):
    """Undo pack()."""

    def visit(x):
        if isinstance(x, dict):
            if set(x) == {"$array"}:
                return arrays[f"array{x['$array']}"][()]  # [()] turns a 0-d array into a number
            return {key: visit(value) for key, value in x.items()}
        return [visit(value) for value in x] if isinstance(x, list) else x

    return visit(json.loads(arrays["structure"].item()))


def _transitions(name):
    """Return i and j from the file name replay.rank<R>.<i>-<j>.npz."""
    start, end = name.split(".")[2].split("-")
    return int(start), int(end)


def _npz(arrays):
    data = io.BytesIO()
    np.savez(data, **arrays)
    return data.getbuffer()
