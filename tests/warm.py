"""Start scripts from a process that has imported the large libraries already.

    python warm.py SOCKET torch PID             forks whenever asked to, as long as PID is there
    python -IS warm.py SOCKET ppo_torch.py ...  stands for `python ppo_torch.py ...`

Importing takes 3 to 6 seconds, forking a tenth of one: that is why the tests can afford to start
and kill so many scripts. The second command works wherever a command begins with `python`, under
mpirun, too. It passes on its arguments, environment, folder and open files, forwards signals, and
ends as the script ends; if it is killed, so is the script.
"""

import ctypes
import gc
import json
import os
import select
import signal
import socket
import struct
import sys

LIBRARIES = {
    "torch": "torch torch._dynamo",
    "tf1": "tensorflow.compat.v1",
    "both": """gymnasium gymnasium.envs.mujoco.hopper_v4 mujoco tyro tyro._errors typeguard tqdm
        tensorboard.summary.writer.record_writer tensorboard.compat.proto.event_pb2""",
}


def ask(address, argv):
    """Have a script started, and wait for its end."""
    forwarded = (signal.SIGINT, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)
    numbers = [0, 1, 2, *(int(os.environ[key]) for key in ("PMI_FD",) if key in os.environ)]
    numbers = [n for n in numbers if os.path.exists(f"/proc/self/fd/{n}")]
    request = {"argv": argv, "cwd": os.getcwd(), "env": dict(os.environ), "numbers": numbers}
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(address)
    socket.send_fds(server, [json.dumps(request).encode()], numbers)
    pid = int(server.recv(100))
    for number in forwarded:
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, forwarded)
    status = int(server.recv(100))
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def serve(address, framework, pid):
    """Fork whenever asked to; return in what is to become the script."""
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "0"}
    for name in f"{LIBRARIES[framework]} {LIBRARIES['both']}".split():
        __import__(name)
    gc.collect()
    gc.freeze()  # a fork does not have to free, and thus to copy, all that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind(address)
    server.listen()
    print("ready", flush=True)
    sys.stdout.close()
    session = os.pidfd_open(int(pid))
    while session not in select.select([server, session], [], [])[0]:
        client, _ = server.accept()
        if os.fork() == 0:
            server.close()
            return mind(client)
        client.close()
    os._exit(0)


def mind(client):
    """Start one script and tell its client how it ends; return in what is to become the script."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, files, *_ = socket.recv_fds(client, 1 << 20, 8)
    disk = enter_host(client)
    pid = os.fork()
    if pid == 0:
        client.close()
        set_namespace(disk)
        return become(files, **json.loads(request))
    for file in files:
        os.close(file)
    with open(f"/proc/{pid}/status") as status:  # the client's host has another id for it
        (inside,) = [line.split()[-1] for line in status if line.startswith("NSpid:")]
    client.send(inside.encode())
    ended = os.pidfd_open(pid)
    if ended not in select.select([ended, client], [], [])[0]:
        os.kill(pid, signal.SIGKILL)  # its client is gone
    status = os.waitpid(pid, 0)[1]
    try:
        client.send(str(status).encode())
    finally:
        os._exit(0)


def enter_host(client):
    """Go where the client is, if that is on a host of hosts.py; return the way to its disk."""
    credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    place = f"/proc/{struct.unpack('3i', credentials)[0]}/ns"
    if os.path.samefile(f"{place}/net", "/proc/self/ns/net"):
        return None
    for kind in ("net", "uts", "ipc", "pid"):
        set_namespace(os.open(f"{place}/{kind}", os.O_RDONLY))
    return os.open(f"{place}/mnt", os.O_RDONLY)


def set_namespace(file):
    if file is not None:
        assert ctypes.CDLL(None).setns(file, 0) == 0
        os.close(file)


def become(files, argv, cwd, env, numbers):
    """Take over the client's folder, environment and open files; return the arguments."""
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    os.closerange(0, 3)
    for i, file in enumerate(files):
        os.dup2(file, 200 + i)  # out of the way of the numbers that they are to have
        os.close(file)
    for i, n in enumerate(numbers):
        os.dup2(200 + i, n)
        os.close(200 + i)
    for n, name in enumerate(("stdin", "stdout", "stderr")):
        setattr(sys, name, None)  # as Python does if it is closed
        if n in numbers:
            by_line = n == 2 or os.isatty(n)
            file = open(n, "w" if n else "r", buffering=1 if by_line else -1, closefd=False)
            setattr(sys, name, file)
    inherited = filter(None, env.get("PYTHONPATH", "").split(":"))
    sys.path[:1] = [os.path.dirname(os.path.abspath(argv[0])), *inherited]
    return argv


if __name__ == "__main__":
    if sys.flags.isolated:
        ask(sys.argv[1], sys.argv[2:])
    sys.argv = serve(*sys.argv[1:])
    import runpy

    runpy.run_path(sys.argv[0], run_name="__main__")
