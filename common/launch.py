"""How a script becomes a program: its command line, --cpu, signals, and how all ranks end together.

None of this happens when a script is imported: a notebook calls main(Args(...)) itself.
"""

import contextlib
import difflib
import itertools
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
import typing
from pathlib import Path

import numpy as np

from common import errors, guard
from common.args import mismatch
from common.errors import SidespinError, print_line, resume_command
from common.mpi import comm, hosts, num_procs, proc_id

# Variables that launchers set for their processes: the number of ranks, and this one's rank
LAUNCHERS = {
    "PMI_SIZE": "PMI_RANK",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_RANK",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
}
PATIENCE = 4  # seconds that a rank waits at its end for the others to end, too


class Interrupted(BaseException):
    """A signal asked the program to end."""

    raised = False


def launch(main, args_class):
    """Run main(args) with the command line's arguments; a failure on one rank ends all ranks."""
    errors.command_line = True
    for number in (signal.SIGINT, signal.SIGTERM):
        # Background jobs of a shell script ignore Ctrl-C: keep it that way.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _interrupt)
    end, error = None, None
    try:
        remove_stale_segments()
        watch = guard.start() if is_job() else None
        check_launcher()
        end = End()
        args = parse_args(args_class, sys.modules[main.__module__].__doc__)
        start_ranks(getattr(args, "cpu", 1))
        errors.launcher = launcher_command(getattr(args, "cpu", 1))
        resume = resume_command() if hasattr(args, "resume") else "repeat the command"
        end.watch(watch, resume)
        main(args)
    except BaseException as caught:
        error = caught
    (end or End(error)).of_all_ranks(error)


def _interrupt(number, frame):
    if not Interrupted.raised:  # only once, even if two signals arrive together
        Interrupted.raised = True
        raise Interrupted(number)


def parse_args(args_class, doc):
    """Read the command line into the dataclass; only rank 0 prints the help."""
    import tyro
    from tyro._errors import on_parse_error  # private, but the version is pinned

    def fail(event):
        raise SidespinError(f"{explain(event, args_class)}; --help explains all flags")

    if {"-h", "--help"} & set(sys.argv) and is_job() and proc_id() > 0:
        raise SystemExit(0)
    title, *_, examples = doc.strip().split("\n\n")
    config = [tyro.conf.FlagCreatePairsOff]
    with on_parse_error(fail):
        return tyro.cli(args_class, description=f"{title}\n\n{examples}", config=config)


def explain(event, args_class):
    """Turn tyro's report of a wrong command line into one sentence."""
    if hasattr(event, "tokens"):
        known = [errors.flag(name) for name in args_class.__dataclass_fields__]
        return f"unrecognized options: {', '.join(suggest(x, known) for x in event.tokens)}"
    if hasattr(event, "missing_arguments"):
        missing = [argument.arg.lowered for argument in event.missing_arguments]
        return f"missing {', '.join(str(x.metavar or x.name_or_flags[0]) for x in missing)}"
    argument = getattr(event, "argument", None)
    name = (*argument.lowered.name_or_flags, str(argument.lowered.metavar))[0] if argument else ""
    if hasattr(event, "choices"):
        return f"{name} must be one of {', '.join(event.choices)}, got {event.value}"
    if hasattr(event, "message"):
        kinds = typing.get_type_hints(args_class, include_extras=True)
        got = re.findall(r"'([^']*)'", event.message)  # the last quoted word is what was typed
        if argument and got:
            expected = mismatch(kinds[argument.field.intern_name], object())
            return f"{name} must be {expected}, got {got[-1]}"
        return f"{name}: {event.message.strip(' .')}".removeprefix(": ")
    return f"{name} needs a value" if name else "cannot understand the command line"


def suggest(word, known):
    """Return an unknown word, with the known word that was probably meant."""
    stem = word.split("=")[0]
    similar = [x for x in known if len(stem) > 2 and x.startswith(stem)]
    similar += difflib.get_close_matches(stem, known, 1)
    return f"{word} (did you mean {similar[0]}?)" if similar else word


def remove_stale_segments():
    """Remove shared memory that killed MPI jobs left behind; a container has little of it.

    MPICH opens a segment by name only while a job starts: an old one that nobody maps is unused.
    Under srun, the name comes from the numbers of job and step, so a requeued job would open its
    own old segments and fail.
    """
    age = 2 if "SLURM_STEP_ID" in os.environ else 600
    with contextlib.suppress(OSError):
        segments = Path("/dev/shm").glob("mpich_shm_*")
        old = [path for path in segments if time.time() - path.stat().st_mtime > age]
        maps = []
        for path in Path("/proc").glob("[0-9]*/maps") if old else []:
            with contextlib.suppress(OSError):  # the process just ended, or is another user's
                maps.append(path.read_text())
        for path in old:
            if not any(str(path) in text for text in maps):
                path.unlink()


def is_job():
    """Tell whether a launcher started this process as one rank of a job."""
    signs = {*LAUNCHERS, "PMIX_RANK"} & set(os.environ)
    if os.environ.get("SLURM_STEP_NUM_TASKS") == "1":  # a one-task step may start ranks of its own
        signs -= {"SLURM_STEP_NUM_TASKS"}
    return bool(signs)


def start_ranks(n):
    """Restart this program under `mpirun -np n`, unless n is 1 or a launcher started it."""
    if n <= 1 or is_job():
        return
    # The mpirun next to the interpreter is the one that matches this environment's mpi4py.
    mpirun = shutil.which("mpirun", path=Path(sys.executable).parent) or shutil.which("mpirun")
    if mpirun is None:
        raise SidespinError("--cpu needs mpirun: install the packages in requirements.txt")
    # Inside a Slurm step, mpirun would wait for a step of its own until this one ends: stay here
    here = "-hosts localhost -launcher fork".split() if "SLURM_STEP_ID" in os.environ else []
    os.execv(mpirun, [mpirun, *here, "-np", str(n), sys.executable, *sys.argv])


def suit_launcher():
    """Prepare MPICH for launchers other than its own, before MPI starts."""
    if "PMIX_RANK" in os.environ and "PMI_FD" not in os.environ:
        code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
        words = [sys.executable, "-c", f"{code} print(MPI.Get_library_version())"]
        library = subprocess.run(words, capture_output=True, text=True).stdout
        if "MPICH" in library and "pmix" not in library:  # it would abort, even on one rank
            for key in [key for key in os.environ if key.startswith("PMIX_")]:
                del os.environ[key]
    if by_srun() and Path(sys.prefix, "lib", "libmpi.so").exists():  # the MPICH of requirements.txt
        # srun cuts off what is longer than 1024 characters: UCX's addresses may be, OFI's are not
        os.environ.setdefault("MPIR_CVAR_CH4_NETMOD", "ofi")


def by_srun():
    """Tell whether srun started this process as a rank, and not as a process of mpirun."""
    return {"SLURM_STEP_ID", "PMI_FD"} <= set(os.environ) and "PMI_HOSTNAME" not in os.environ


def launcher_command(cpu):
    """Return the words that start this many ranks on the same hosts; none if --cpu does."""
    ranks = num_procs() if is_job() else 1
    if ranks == 1:
        return []
    if by_srun():
        return ["srun", "--mpi=pmi2", f"--ntasks={ranks}"]
    named = {guard.launcher_host(guard.launcher_pid()), *hosts()}
    allocated = "SLURM_JOB_ID" in os.environ  # then mpirun asks Slurm for the hosts
    if len(named) > 1 and None not in named and not allocated:
        return ["mpirun", "-hosts", placement(hosts()), "-np", str(ranks)]
    return ["mpirun", "-np", str(ranks)] if ranks != cpu else []


def placement(names):
    """Write the hosts of all ranks as mpirun's -hosts, a list that it repeats until all have one.

    Ranks on other hosts add their gradients in another order, and the last digits would differ.
    """
    n = next(n for n in range(1, len(names) + 1) if all(map(str.__eq__, names, names[n:])))
    counted = [(name, len(list(group))) for name, group in itertools.groupby(names[:n])]
    return ",".join(f"{name}:{count}" if count > 1 else name for name, count in counted)


def check_launcher():
    """Stop if the launcher belongs to another MPI: each process would think it is the only one."""
    suit_launcher()
    for size, rank in LAUNCHERS.items():
        started = os.environ.get(size, "1")
        if started != "1" and num_procs() == 1:
            if os.environ.get(rank, "0") != "0":
                time.sleep(1)  # rank 0 reports it for all, but some launchers then end it, too
                raise SystemExit(2)
            from mpi4py import MPI

            library = " ".join(MPI.Get_library_version().split("\n")[0].split())
            raise SidespinError(
                f"{started} processes were started, but each thinks it is the only one: the "
                f"launcher does not belong to this Python's MPI, {library}; use the mpirun that "
                "was installed with it, or srun --mpi=pmi2"
            )


class End:
    """Ends the program on all ranks together, with one message and one exit code."""

    def __init__(self, error=None):
        ranks = num_procs() if is_job() and not isinstance(error, ImportError) else 1
        self.comm = comm().Dup() if ranks > 1 else None  # a copy: ranks may be stuck in comm()
        self.codes = np.full(ranks, -1, np.int32)
        self.guard = None

    def watch(self, process, resume):
        """Have all ranks end if one of them, the launcher or a host is gone: see guard.py."""
        if self.comm is not None:
            self.guard = guard.connect(process, self.comm, hosts(), resume)

    def tell_guard(self, word):
        with contextlib.suppress(OSError, AttributeError):  # it is gone, or there is none
            self.guard.sendall(word)

    def of_all_ranks(self, error):
        """Print why the program ends, and end it."""
        code = exit_code(error)
        if self.comm is None:
            say_why(error)
        elif self.meet(code):
            if proc_id() == np.argmax(self.codes != 0):  # the first rank that failed, if any
                say_why(error)
            self.tell_guard(b"done")
        else:
            self.tell_guard(b"over")
            say_why(error or SystemExit(0), alone=True)
            time.sleep(1)  # for the launcher to pass on the output: Abort kills it, too
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hide what MPI would print
            comm().Abort(code or 1)
        try:
            if isinstance(error, Interrupted):  # end now, even if nobody reads what was printed
                raise BrokenPipeError
            sys.stdout.flush()
        except (OSError, AttributeError):  # broken pipe, or stdout closed
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(code)

    def meet(self, code):
        """Exchange exit codes; return whether all ranks have reached their end."""
        request = self.comm.Iallgather(np.array([code], np.int32), self.codes)
        deadline = time.time() + PATIENCE
        while not request.Test():
            if time.time() > deadline:
                return False
            time.sleep(0.01)
        return True


def is_memory_error(error):
    return isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)


def exit_code(error):
    """Return the program's exit code for an exception, or for None."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, Interrupted):
        return 128 + error.args[0]
    if isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE
    return 2 if is_memory_error(error) else getattr(error, "exit_code", 1)


def say_why(error, alone=False):
    """Print why the program ends: in one line, or with a traceback if it is a bug."""
    where = f" {error.where}" if hasattr(error, "where") else ""
    resume = f"; to resume: {error.resume}" if hasattr(error, "resume") else ""
    if isinstance(error, Interrupted):
        print_line(f"interrupted{where}{resume}")
    elif isinstance(error, SidespinError):
        print_line(f"error: {f'stopped{where}: ' if where else ''}{error}{resume}")
    elif isinstance(error, ModuleNotFoundError) and error.name in ("mpi4py", "tyro"):
        lacks = f"{platform.node()} lacks the package {error.name}"
        print_line(f"error: {lacks}: install the packages in requirements.txt")
    elif error is not None and is_memory_error(error):
        print_line(f"error: not enough memory: {error}")
    elif isinstance(error, SystemExit):
        if alone:
            print_line(f"error: rank {proc_id()} exited before the other ranks{resume}")
        elif isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    elif error is not None and not isinstance(error, BrokenPipeError):  # as in `| head`
        if alone:
            print_line(f"error: rank {proc_id()} of {num_procs()} failed, ending the job:")
        traceback.print_exception(error)
