"""Ends a job on all of its hosts when one of its ranks, its launcher or a host is gone.

A rank that waits in MPI for one that is gone waits forever. So launch.py starts a guard on each
host, a process of its own that never waits in MPI. It watches

- the ranks of its host: each says "done" before it ends, or "over" once it has said why it fails;
- the launcher's processes on its host;
- the guards of the other hosts, by TCP connections that the kernel probes.

If one of these is gone without a word, one guard says so in one sentence, and all guards kill what
is left of the job on their hosts.
"""

import contextlib
import ctypes
import itertools
import json
import os
import re
import secrets
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

PROBE, PROBES = 3, 6  # seconds between probes, and how many may fail: a host is lost after 21 s
GRACE = 4  # seconds that the launcher has to end what is left by itself
LATE = 60  # seconds until the guard next to mpirun says that other ranks have not started yet
PIDFD_GETFD = 438  # the number of this system call, which Python does not offer


def start():
    """Start a guard, on the first rank of each host; before MPI, whose start may wait forever."""
    env = os.environ
    first = env.get("MPI_LOCALRANKID", env.get("SLURM_LOCALID", "0")) == "0"
    if first and env.get("PMI_SIZE") != "1" and hasattr(os, "pidfd_open"):  # only Linux has it
        about = dict(script=sys.argv[0], proxy=launcher_pid(), name=secrets.token_hex(8))
        about |= dict(host=env.get("PMI_HOSTNAME") or socket.gethostname())
        words = [sys.executable, "-IS", __file__, json.dumps(about)]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return subprocess.Popen(words, start_new_session=True, **pipes)


def connect(guard, comm, hosts, resume):
    """Introduce the guards to each other, and each rank to its own; return the connection."""
    rank, proxy, door = comm.Get_rank(), launcher_pid(), None
    # The guard next to mpirun prints where mpirun does; if there is none, that of rank 0 speaks.
    beside = comm.allgather(is_mpirun(parent_of(proxy)))
    speaker = beside.index(True) if any(beside) else 0
    places = list(zip(hosts, comm.allgather(proxy)))  # a host may have several proxies
    first = places.index(places[rank])
    if guard and first == rank:
        name, port = guard.stdout.readline().split()
        door = hosts[rank], address(proxy), int(port), name
    doors = comm.allgather(door)
    if guard:
        job = dict(ranks=places.count(places[rank]), resume=resume)
        job |= dict(others=list(filter(None, doors[:rank])), speaks=first == speaker)
        with guard.stdin, guard.stdout:
            guard.stdin.write((json.dumps(job) + "\n") * (first == rank))
    if doors[first]:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(f"\0{doors[first][-1]}")
        segments = re.findall(r"/dev/shm/mpich_shm_\w+", Path("/proc/self/maps").read_text())
        connection.sendall(json.dumps([rank, *set(segments)]).encode() + b"\n")
        return connection


def launcher_pid():
    """Return the id of MPICH's proxy, which started the ranks of this host, or None."""
    with contextlib.suppress(KeyError, ValueError, OSError):
        with socket.socket(fileno=os.dup(int(os.environ["PMI_FD"]))) as proxy:
            pid = peer_pid(proxy)
        return pid if name_of(pid) == "hydra_pmi_proxy" else None


def launcher_host(proxy):
    """Return the name by which all hosts know the one that mpirun runs on, or None."""
    with contextlib.suppress(ValueError):
        words = words_of(proxy)
        return words[words.index("--control-port") + 1].rpartition(":")[0]


def address(proxy):
    """Return an address of this host that the others can reach."""
    name = launcher_host(proxy) or socket.gethostname()
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as route:
        route.connect((name, 9))  # sends nothing, but finds the way to mpirun's host
        own = route.getsockname()[0]
        return name if own.startswith("127.") else own  # 127.*: this is mpirun's host
    return name


def peer_pid(connection):
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]


def words_of(pid):
    """Return the command line of a process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return []


def name_of(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def is_mpirun(pid):
    return name_of(pid).startswith("mpi")


def parent_of(pid):
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children_of(pid):
    with contextlib.suppress(OSError):
        return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def is_alive(pidfd):
    return not select.select([pidfd], [], [], 0)[0]


def open_process(pid):
    """Return a file descriptor that becomes readable when the process ends; None if it has."""
    with contextlib.suppress(OSError):
        return os.pidfd_open(pid)


def kill(pidfds):
    for pidfd in filter(None, pidfds):
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def stderr_of(pidfd, pid):
    """Return a file descriptor to print where a process prints its errors."""
    with contextlib.suppress(OSError):
        number = ctypes.CDLL(None).syscall(PIDFD_GETFD, pidfd, 2, 0)
        # Not everybody may share another process's file. Then open it anew, to append.
        return number if number >= 0 else os.open(f"/proc/{pid}/fd/2", os.O_WRONLY | os.O_APPEND)
    return 2


def hosts_not_there(mpirun, script):
    """Return the hosts whose proxies have ended, by mpirun's command line and its children."""
    children = [words_of(pid) for pid in children_of(mpirun)]
    there = {words[words.index("--proxy-id") + 1] for words in children if "--proxy-id" in words}
    with contextlib.suppress(OSError):  # it may have ended, too
        planned = planned_hosts(words_of(mpirun), script, Path(f"/proc/{mpirun}/cwd"))
        return [host for i, host in enumerate(planned) if str(i) not in there]
    return []


def planned_hosts(words, script, folder):
    """Return the hosts that mpirun starts proxies on, in order; none if its options are unusual."""
    line = " ".join(words[: words.index(script)] if script in words else [])
    ranks = re.findall(r" --?np? (\d+) ", line)
    # mpirun has cut its own words at commas and colons: of -hosts a:2,b it leaves -hosts a 2 b
    listed = re.search(r" --?hosts? ([^-]\S*(?: [^-]\S*)*) --?np? ", line)
    file = re.search(r" --?(?:f|hostfile|machinefile) (\S+) ", line)
    if len(ranks) != 1 or re.search(r" --?(ppn|perhost|configfile|launcher\S*) | : ", line):
        return []
    if file:
        lines = [text.partition("#")[0].split() for text in (folder / file[1]).open()]
        names = [word for words in lines if words for word in words[0].split(":")]
    else:
        names = listed[1].split() if listed else []
    slots = []
    for name in names:
        slots += (int(name) - 1) * slots[-1:] if name.isdecimal() and slots else [name]
    return [host for host, _ in itertools.groupby(slots[: int(ranks[0])])]


class Guard:
    """Watches the ranks of one host, their launcher, and the other hosts."""

    def __init__(self, script, proxy, name, host):
        self.script, self.proxy, self.name, self.host = script, proxy, name, host
        self.speaks, self.stderr, self.resume = False, 2, ""
        self.ranks, self.launcher, self.hosts = {}, {}, {}  # the first two by their pidfd
        self.arrived, self.done, self.segments = 0, set(), set()
        self.events = selectors.DefaultSelector()
        self.for_ranks, self.for_hosts = socket.socket(socket.AF_UNIX), socket.socket()
        self.for_ranks.bind(f"\0{name}")
        self.for_hosts.bind(("", 0))
        for door, greet in (self.for_ranks, self.greet_rank), (self.for_hosts, self.greet_host):
            door.listen(1000)
            self.events.register(door, selectors.EVENT_READ, greet)

    def watch(self):
        """Watch the job until it has ended."""
        print(self.name, self.for_hosts.getsockname()[1], flush=True)
        self.watch_launcher()
        job = json.loads(self.wait_for_start())
        self.speaks, self.resume = job["speaks"], f"; to resume: {job['resume']}"
        for other in job["others"]:
            self.call_host(*other)
        while self.ranks or self.arrived < job["ranks"]:
            for event, _ in self.events.select():
                event.data(event.fileobj)
        self.tell_hosts("done")

    def watch_launcher(self):
        """Watch what started MPICH's proxy on this host, mpirun itself or sshd, and the proxy."""
        for pid in [parent_of(self.proxy), self.proxy] if self.proxy else []:
            pidfd, name = open_process(pid), name_of(pid)
            if pidfd is None or pid == 1:  # 1: of a container
                continue
            self.launcher[pidfd] = pid, name
            self.events.register(pidfd, selectors.EVENT_READ, self.lose_launcher)
            if is_mpirun(pid):
                self.speaks, self.stderr = True, stderr_of(pidfd, pid)

    def lose_launcher(self, _):
        # If mpirun ends, so does the proxy, and that may be noticed first.
        name = next(name for pidfd, (_, name) in self.launcher.items() if not is_alive(pidfd))
        name = "the ssh session" if name.startswith("sshd") else name
        self.end(f"{name} on {self.host} has ended")

    def wait_for_start(self):
        """Wait until MPI has started on all hosts; return what the first rank says of the job."""
        begin = time.time()
        while not select.select([sys.stdin], [], [], 1)[0]:
            for pid, _ in self.launcher.values():
                lost = hosts_not_there(pid, self.script) if is_mpirun(pid) else []
                if lost:
                    self.end(
                        f"the ranks on {', '.join(lost)} ended before they began, see above: every "
                        f"host needs the same project folder and packages as {self.host}"
                    )
            if begin and time.time() - begin > LATE:
                self.print("still waiting for the other ranks to start")
                begin = None
        return sys.stdin.readline() or sys.exit()

    def greet_rank(self, door):
        rank, _ = door.accept()
        try:
            number, *segments = json.loads(rank.makefile().readline())
            pidfd = os.pidfd_open(peer_pid(rank))
        except (OSError, ValueError):
            self.end(f"a rank on {self.host} was killed or crashed")
        self.segments.update(segments)
        self.arrived += 1
        self.ranks[pidfd] = number, rank
        self.events.register(pidfd, selectors.EVENT_READ, self.lose_rank)
        self.events.register(rank, selectors.EVENT_READ, self.hear_rank)

    def hear_rank(self, rank):
        words = rank.recv(100)
        if words == b"over":
            self.end("")
        if words == b"done":
            self.done.add(rank)
        self.events.unregister(rank)

    def lose_rank(self, pidfd):
        number, rank = self.ranks.pop(pidfd)
        self.events.unregister(pidfd)
        rank.setblocking(False)  # a process that it has forked may still hold it open
        with contextlib.suppress(BlockingIOError):
            if rank in self.events.get_map():
                self.hear_rank(rank)  # its last word
        if rank not in self.done:
            self.end(f"rank {number} on {self.host} was killed or crashed")

    def call_host(self, host, address, port, name):
        try:
            connection = socket.create_connection((address, port), timeout=PROBE * PROBES)
            connection.sendall(json.dumps([name, self.host]).encode() + b"\n")
            self.watch_host(connection, host)
        except OSError as error:
            self.print(f"warning: {self.host} cannot watch {host}: {error}")

    def greet_host(self, door):
        connection, _ = door.accept()
        connection.settimeout(PROBE)
        with contextlib.suppress(OSError, ValueError):
            name, host = json.loads(connection.makefile().readline())
            if name == self.name:  # not a stranger
                self.watch_host(connection, host)

    def watch_host(self, connection, host):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ("IDLE", PROBE), ("INTVL", PROBE), ("CNT", PROBES):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{option}"), value)
        self.hosts[connection] = host
        self.events.register(connection, selectors.EVENT_READ, self.hear_host)

    def hear_host(self, connection):
        host = self.hosts[connection]
        try:
            words = connection.recv(10_000).decode()
            loss = f"{host} has closed its connection to {self.host}"
        except OSError:
            words, loss = "", f"{host} has not answered for {PROBE * (PROBES + 1)} seconds"
        if words == "done":
            self.events.unregister(connection)
        else:
            self.end(*json.loads(words) if words else [loss])

    def tell_hosts(self, words):
        for connection in self.hosts:
            with contextlib.suppress(OSError):
                connection.sendall(words.encode())

    def print(self, sentence):
        if self.speaks:
            line = f"{Path(self.script).name}: {sentence}\n"
            with contextlib.suppress(OSError):
                os.write(self.stderr, line.encode())

    def end(self, loss, when=None):
        """Say what the job has lost, unless a rank has; kill what is left of it here, and exit."""
        reports = [(when or time.time(), loss)]
        self.tell_hosts(json.dumps([loss, reports[0][0]]))
        if loss:
            # If a rank is killed, the launcher kills others: the first report has the cause. There
            # is only noise that mpirun could add, so the guard next to it kills it before anything
            # else, and the other guards give that one three seconds.
            time.sleep(0.05 if self.speaks else 0.2)
            self.wait(0 if self.speaks else 3, self.launcher)
            for connection in self.hosts:
                connection.setblocking(False)
                with contextlib.suppress(OSError, ValueError):
                    other, when = json.loads(connection.recv(10_000))
                    reports.append((when, other))
            loss = min(reports)[1]
        if loss:
            self.print(f"error: {loss}{self.resume}")
            self.kill()
        self.wait(GRACE, [*self.ranks, *self.launcher])
        self.kill(sshd=True)
        for path in self.segments:
            Path(path).unlink(missing_ok=True)
        sys.exit()

    def wait(self, seconds, pidfds):
        """Wait until the processes have ended, but no longer than this."""
        deadline = time.time() + seconds
        while time.time() < deadline and any(map(is_alive, pidfds)):
            time.sleep(0.05)

    def kill(self, sshd=False):
        """Kill the launcher, mpirun first, and the ranks; sshd only if it serves nothing else."""
        for pidfd, (pid, name) in self.launcher.items():
            children = {child: name_of(child) for child in children_of(pid)}
            if name.startswith(("hydra", "mpi")):
                kill([pidfd, *(open_process(pid) for pid in children if children[pid] == "ssh")])
            elif sshd and name.startswith("sshd") and set(children) <= {self.proxy}:
                kill([pidfd])
        kill(self.ranks)


if __name__ == "__main__":
    Guard(**json.loads(sys.argv[1])).watch()
