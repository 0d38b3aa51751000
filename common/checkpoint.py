"""Checkpoints: all that the rest of a run depends on, so that --resume goes on bit for bit.

The folder checkpoint/ of a run holds its last two checkpoints. After N epochs, on rank R:

    epoch<N>.json               the parts with their checksums; being there makes it a checkpoint
    epoch<N>.rank<R>.npz        networks, optimizers, generators and the episode under way
    replay.rank<R>.<i>-<j>.npz  the transitions from the i-th to before the j-th ever stored

Every file is written beside its place, synced to the disk and renamed into it, on all ranks before
the one rename of the .json: a kill at any instant leaves the checkpoint before that one whole.

A checkpoint writes only the transitions that are new. A transition keeps its number for ever and
lies in the replay buffer at that number modulo the buffer's size; the buffer is the last numbers.
So when the buffer wraps, nothing that is on the disk changes: a file just falls out of the range,
and is deleted when it has done so for both checkpoints.
"""

import contextlib
import hashlib
import io
import json
import os

import numpy as np

from common.mpi import comm, fail, num_procs, proc_id, warn, writing


class Checkpoint:
    """Writes and reads one rank's part of a run's checkpoints."""

    def __init__(self, logger, state, rng, env, buf=None):
        self.logger, self.state, self.rng, self.env, self.buf = logger, state, rng, env, buf
        self.folder = logger.folder / "checkpoint"
        self.epoch, self.stored, self.replay = 0, 0, []  # of the last checkpoint

    def restore(self, o, ep_ret, ep_len):
        """Return the epochs done and the episode under way: the one given, or the checkpoint's."""
        names = [p.stem for p in self.folder.glob("epoch*.json")] if self.logger.resumes else []
        found = [int(name[5:]) for name in names if name[5:].isdecimal()]
        damages = []
        for epoch in sorted(comm.bcast(found), reverse=True):
            part, damage = self._load(epoch)
            damage = next(filter(None, comm.allgather(damage)), None)
            if not damage:
                break
            damages.append(damage)
        else:
            if damages:
                fail(f"cannot resume: {'; '.join(damages)}; --overwrite starts anew")
            self.logger.begin(0)
            return 0, o, ep_ret, ep_len

        if damages:
            warn(f"{'; '.join(damages)}; using the checkpoint after {epoch} epochs")
        if epoch >= self.logger.args.epochs:
            self.logger.say(f"finished, {epoch} epochs are done; a larger --epochs would go on")
            return epoch, o, ep_ret, ep_len
        self.epoch = epoch
        self.rng.bit_generator.state = part["rng"]
        episode = self.env.replay(part["episode"])
        strayed = [rank for rank, e in enumerate(comm.allgather(episode)) if e is None]
        if strayed:
            ranks = f" on rank {', '.join(map(str, strayed))}" if num_procs() > 1 else ""
            warn(f"the environment does not replay exactly: a new episode begins{ranks}")
        self.logger.begin(epoch)
        return epoch, *(episode or (self.env.reset()[0], 0.0, 0))

    def save(self, epoch):
        """Make the state after so many epochs the current checkpoint, and keep the one before."""
        with writing(self.folder):
            previous, rank = (self.epoch, list(self.replay)), proc_id()
            if self.epoch == 0:  # later on, that it is gone is an error
                self.folder.mkdir(exist_ok=True)
            if self.buf is not None:
                self._save_new_transitions(epoch)
            episode, arrays = self.env.episode()
            arrays = {f"episode/{key}": x for key, x in arrays.items()}
            arrays |= {f"state/{key}": x for key, x in self.state.get_state().items()}
            part = {"rng": self.rng.bit_generator.state, "episode": episode}
            part |= {"stored": self.stored, "replay": self.replay}
            arrays["part"] = np.array(json.dumps(part))
            digest = self._write(f"epoch{epoch}.rank{rank}.npz", arrays)
            digests = comm.gather(digest)  # also waits for all ranks to have written their parts
            if rank == 0:
                index = {"epoch": epoch, "run": self.logger.identity, "parts": digests}
                index["table"] = _digest(self.logger.table_without_times(epoch))
                index["checksum"] = _digest(json.dumps(index).encode())
                write_file(self.folder / f"epoch{epoch}.json", json.dumps(index).encode())
            comm.barrier()
            self.epoch = epoch
            # Whatever neither checkpoint needs: older ones, and what a kill has left behind
            needed = {name for name, _ in self.replay + previous[1]}
            needed |= {f"epoch{e}.rank{rank}.npz" for e in (epoch, previous[0])}
            needed |= {f"epoch{e}.json" for e in (epoch, previous[0])}
            for path in self.folder.iterdir():
                if path.name not in needed and (f".rank{rank}." in path.name or _is_index(path)):
                    path.unlink(missing_ok=True)

    def _save_new_transitions(self, epoch):
        steps = self.logger.args.steps_per_epoch // num_procs()  # each stores one transition
        start, self.stored = self.stored, epoch * steps
        start = max(start, self.stored - self.buf.max_size)
        if self.buf.ptr != self.stored % self.buf.max_size:
            raise ValueError("checkpoints count on one transition stored in every step")
        slots = np.arange(start, self.stored) % self.buf.max_size
        name = f"replay.rank{proc_id()}.{start}-{self.stored}.npz"
        digest = self._write(name, {key: x[slots] for key, x in _arrays(self.buf).items()})
        oldest = self.stored - self.buf.max_size
        self.replay = [(n, d) for n, d in self.replay if _transitions(n)[1] > oldest]
        self.replay.append((name, digest))

    def _load(self, epoch):
        """Read this rank's part of a checkpoint, return it or else what is wrong with it."""
        path = self.folder / f"epoch{epoch}.json"
        try:
            index = json.loads(path.read_bytes())
            checksum = index.pop("checksum")
            if _digest(json.dumps(index).encode()) != checksum or index["epoch"] != epoch:
                return None, f"{path} is damaged"
            if index["run"] != self.logger.identity:
                return None, f"{path} belongs to another run"
            path = self.folder.parent / "progress.txt"
            if proc_id() == 0:
                self._check(self.logger.table_without_times(epoch), index["table"])
            path = self.folder / f"epoch{epoch}.rank{proc_id()}.npz"
            arrays = self._read(path, index["parts"][proc_id()])
            part = json.loads(arrays.pop("part").item())
            for name, digest in part["replay"]:
                path = self.folder / name
                start, end = _transitions(name)
                first = max(start, part["stored"] - self.buf.max_size)
                transitions = self._read(path, digest)
                for key, x in _arrays(self.buf).items():
                    x[np.arange(first, end) % self.buf.max_size] = transitions[key][first - start :]
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            missing = isinstance(error, FileNotFoundError)
            return None, f"{path} is {'missing' if missing else 'damaged'}"
        try:
            self.state.set_state(_below("state/", arrays))
        except (KeyError, ValueError, RuntimeError):
            return None, f"{path} is of other networks than this script's"
        part["episode"] |= _below("episode/", arrays)
        if self.buf is not None:
            self.stored, self.replay = part["stored"], [tuple(entry) for entry in part["replay"]]
            self.buf.ptr = self.stored % self.buf.max_size
            self.buf.size = min(self.stored, self.buf.max_size)
        return part, None

    def _check(self, data, digest):
        if _digest(data) != digest:
            raise ValueError("wrong checksum")

    def _write(self, name, arrays):
        data = io.BytesIO()
        np.savez(data, **arrays)
        write_file(self.folder / name, data.getbuffer())
        return _digest(data.getbuffer())

    def _read(self, path, digest):
        data = path.read_bytes()
        self._check(data, digest)
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return dict(arrays)


def write_file(path, data):
    """Write a file beside its place, sync it to the disk, and rename it into place."""
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
    os.fsync(folder)  # the rename itself
    os.close(folder)


def _digest(data):
    return hashlib.sha256(data).hexdigest()


def _transitions(name):
    """Return the range of a file replay.rank<R>.<i>-<j>.npz."""
    start, end = name.split(".")[2].split("-")
    return int(start), int(end)


def _arrays(buf):
    return {key: x for key, x in vars(buf).items() if isinstance(x, np.ndarray)}


def _below(prefix, arrays):
    return {k.removeprefix(prefix): x for k, x in arrays.items() if k.startswith(prefix)}


def _is_index(path):
    return proc_id() == 0 and ".json" in path.name
