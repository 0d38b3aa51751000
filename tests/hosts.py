"""Real hosts on one machine: each has its own network, name, processes and ssh server.

A host is a process in namespaces of its own, a switch connects them. They need no names outside, so
any number of test sessions may have theirs at once, and end with the process that made them, even
if that is killed. Files are shared, as on a cluster's common disk, except where hide() is called.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
TOOLS = ["ip", "sshd", "ssh", "ssh-keygen", "unshare", "nsenter"]
SBIN = "/usr/sbin:/sbin"
START = """
hostname {name}
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd ~/.ssh
mount -t tmpfs -o mode=700 tmpfs ~/.ssh
if [ {keys} = True ]; then cp {folder}/ssh/* ~/.ssh; fi
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/shadow /etc/shadow
ip link set lo up
until ip link set eth0 up 2>/dev/null; do sleep 0.01; done
ip address add {address}/24 dev eth0
exec /usr/sbin/sshd -D -f {folder}/sshd_config
"""
SSHD = """
HostKey {folder}/ssh/id_ed25519
PidFile none
UsePAM no
StrictModes no
PermitRootLogin yes
MaxStartups 100
"""
PASSWORD = "sidespin"  # its hash is made by: openssl passwd -6 -salt sidespin sidespin
PASSWORD_HASH = (
    "$6$sidespin$QX.p9a4Iv.lmsDFCDm1AhdtIjo30fy8KcBL5CrBWrMRaWT9H"
    "fF3GtyynqDOYkYH1TJjAxUJLjvYkCWEcvojzP/"
)
SSH = "StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n"


def missing():
    """Return why there can be no hosts here, or None."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "hosts need root"
    path = f"{os.environ['PATH']}:{SBIN}"
    lacking = [tool for tool in TOOLS if not shutil.which(tool, path=path)]
    if lacking:
        return f"hosts need {', '.join(lacking)}: install iproute2 and openssh-server"
    test = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"])
    return "this machine does not allow namespaces" if test.returncode else None


def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def own_namespaces(*command, kinds):
    """Start a command in namespaces of its own; all that it ever starts ends with it."""
    words = ["unshare", *(f"--{kind}" for kind in kinds), "--pid", "--fork", "--kill-child"]
    words += ["--mount-proc"] * ("mount" in kinds)
    return subprocess.Popen([*words, *command], preexec_fn=die_with_parent)


def child_of(process):
    """Return the id of a process's only child, as soon as it has one."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while True:
        children = path.read_text().split()
        if children:
            return int(children[0])
        assert process.poll() is None
        time.sleep(0.005)


class Switch:
    """Hosts on one network: `with Switch("nodea", "nodeb") as (a, b):`.

    Without keys, ~/.ssh is empty, and ssh asks for PASSWORD.
    """

    def __init__(self, *names, keys=True):
        self.names, self.keys, self.hosts = names, keys, []

    def __enter__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="sidespin-hosts-"))
        key = self.folder / "ssh" / "id_ed25519"
        key.parent.mkdir()
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        shutil.copy(f"{key}.pub", key.parent / "authorized_keys")
        (key.parent / "config").write_text(SSH)
        (self.folder / "sshd_config").write_text(SSHD.format(folder=self.folder))
        (self.folder / "shadow").write_text(f"root:{PASSWORD_HASH}:19000:0:99999:7:::\n")
        addresses = {name: f"10.0.0.{i}" for i, name in enumerate(self.names, 1)}
        lines = ["127.0.0.1 localhost", *(f"{a} {name}" for name, a in addresses.items())]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        self.process = own_namespaces("sleep", "infinity", kinds=["net"])
        self.pid = child_of(self.process)
        self.ip("link", "add", "switch", "type", "bridge")
        self.ip("link", "set", "switch", "up")
        for name, address in addresses.items():
            self.hosts.append(Host(self, name, address))
        return self.hosts

    def ip(self, *words):
        subprocess.run(["nsenter", "-t", str(self.pid), "-n", "ip", *words], check=True)

    def __exit__(self, *_):
        for process in (*(host.process for host in self.hosts), self.process):
            process.kill()
            process.wait()
        shutil.rmtree(self.folder)


class Host:
    def __init__(self, switch, name, address):
        self.switch, self.name = switch, name
        script = START.format(name=name, folder=switch.folder, address=address, keys=switch.keys)
        kinds = ["net", "uts", "ipc", "mount"]
        self.process = own_namespaces("sh", "-ec", script, kinds=kinds)
        self.pid = child_of(self.process)
        switch.ip(
            *f"link add {name} type veth peer name eth0 netns {self.pid}".split(),
        )
        switch.ip(*f"link set {name} master switch up".split())
        answers = ["bash", "-c", f"</dev/tcp/{name}/22"]
        while self.run(*answers, stderr=subprocess.DEVNULL).returncode:
            assert self.process.poll() is None
            time.sleep(0.01)

    def words(self, *command):
        return ["nsenter", "-t", str(self.pid), "-a", f"--wd={ROOT}", *map(str, command)]

    def run(self, *command, **how):
        """Run a command on this host, in the project's folder."""
        return subprocess.run(self.words(*command), **how)

    def popen(self, *command, **how):
        """Start a command on this host; `inside` is the id of its process, for signals."""
        process = subprocess.Popen(self.words(*command), **how)
        process.inside = child_of(process)
        return process

    def connect(self, on=True):
        """Plug the network cable in, or pull it."""
        self.switch.ip("link", "set", self.name, "up" if on else "down")

    def processes(self):
        """Return the command lines of all processes on this host, by process id."""
        space, found = os.readlink(f"/proc/{self.pid}/ns/pid"), {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(path / "ns" / "pid") == space:
                    found[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ")
            except OSError:  # it has just ended
                continue
        return found

    def clear(self):
        """Kill all processes on this host but its ssh server."""
        for pid in set(self.processes()) - {self.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @contextlib.contextmanager
    def without(self, folder):
        """Hide a folder from this host: it has an empty one of its own there."""
        self.run("mount", "-t", "tmpfs", "tmpfs", folder, check=True)
        try:
            yield
        finally:
            self.run("umount", "-l", folder, check=True)
