"""Importing a module changes nothing in the process, and main() is a function one can call."""

import json
import re
import subprocess
import sys
import threading

import pytest
from helpers import ROOT, SCRIPTS, TF1, TORCH, assert_same, brief, progress, start, train, trained

from common.errors import SidespinError

COMMON = sorted(path.stem for path in (ROOT / "common").glob("[a-z]*.py"))
# Modules by what they may import: the frameworks' own tools come with the framework's scripts.
GROUPS = {
    "neither": [f"common.{name}" for name in COMMON if not name.endswith("_utils")],
    "torch": ["common.torch_utils", *TORCH],
    "tensorflow": ["common.tf1_utils", *TF1],
}
LOOK = """
import atexit, faulthandler, gc, io, json, locale, logging, os, random, signal, sys, threading
import warnings
import gymnasium, numpy as np
{framework}

def settings():
    facts = dict(
        signals=[str(signal.getsignal(n)) for n in signal.valid_signals()],
        blocked=sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        wakeup=signal.set_wakeup_fd(-1),
        hooks=[str(x) for x in (sys.excepthook, sys.unraisablehook, threading.excepthook)],
        displayhook=str(sys.displayhook),
        streams=[id(x) for x in (sys.stdin, sys.stdout, sys.stderr)],
        trace=[str(sys.gettrace()), str(sys.getprofile())],
        filters=str(warnings.filters),
        showwarning=str(warnings.showwarning),
        loggers={{k: v.level for k, v in logging.root.manager.loggerDict.items()
                 if isinstance(v, logging.Logger) and k in known}},
        root=[logging.root.level, str(logging.root.handlers), logging.raiseExceptions],
        gymnasium=gymnasium.logger.min_level,
        numpy=[np.geterr(), np.get_printoptions(), str(np.random.get_state()[1][:9])],
        random=str(random.getstate())[:200],
        environment=dict(os.environ),
        folder=os.getcwd(),
        umask=os.umask(os.umask(0)),
        nice=os.nice(0),
        affinity=sorted(os.sched_getaffinity(0)),
        recursion=sys.getrecursionlimit(),
        switch=sys.getswitchinterval(),
        gc=[gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()],
        locale=locale.setlocale(locale.LC_ALL),
        threads=sorted(t.name for t in threading.enumerate()),
        tasks=len(os.listdir("/proc/self/task")),
        children=open("/proc/self/task/%d/children" % os.getpid()).read(),
        files=sorted(set(os.listdir("/proc/self/fd"))),
        path=sys.path[:],
        argv=sys.argv[:],
        atexit=atexit._ncallbacks(),
        faulthandler=faulthandler.is_enabled(),
    )
    if "torch" in sys.modules:
        import torch
        facts["torch"] = [torch.get_num_threads(), torch.get_num_interop_threads(),
            str(torch.get_default_dtype()), torch.is_grad_enabled(), torch.get_flush_denormal()
            if hasattr(torch, "get_flush_denormal") else 0, torch.initial_seed(),
            torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
            torch.is_inference_mode_enabled(), torch.is_anomaly_enabled(),
            torch.backends.mkldnn.enabled, torch.backends.cudnn.benchmark]
    if "tensorflow" in sys.modules:
        import tensorflow as tf
        facts["tensorflow"] = [tf.executing_eagerly(), tf.__internal__.tf2.enabled(),
            tf.compat.v1.resource_variables_enabled(), tf.compat.v1.control_flow_v2_enabled(),
            tf.config.threading.get_intra_op_parallelism_threads(),
            tf.config.threading.get_inter_op_parallelism_threads(),
            tf.get_logger().level, tf.config.optimizer.get_jit(), tf.keras.backend.floatx()
            if "keras" in sys.modules else "",
            len(tf.compat.v1.get_default_graph().get_operations())]
    return facts

known = set(logging.root.manager.loggerDict)
settings()  # looking wakes up some of TensorFlow's threads
before = settings()
import importlib
for name in {modules!r}:
    importlib.import_module(name)
after = settings()
with open({out!r}, "w") as file:
    mpi = "mpi4py.MPI" in sys.modules
    imported = sorted({{"torch", "tensorflow"}} & set(sys.modules))
    json.dump([before, after, mpi, imported], file)
"""
FIRST = {  # what a framework does to a process when it is imported is not ours
    "neither": "",
    "torch": "import torch, torch.nn.functional",
    "tensorflow": "os.environ |= {'TF_CPP_MIN_LOG_LEVEL': '2', 'TF_ENABLE_ONEDNN_OPTS': '0'}\n"
    "import tensorflow.compat.v1",
}


@pytest.mark.parametrize("group", GROUPS)
def test_importing_changes_nothing(group, tmp_path):
    out = tmp_path / "facts.json"
    code = LOOK.format(framework=FIRST[group], modules=GROUPS[group], out=str(out))
    run = start("-c", f"import sys; sys.path.insert(0, '.')\n{code}")
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    before, after, mpi, imported = json.loads(out.read_text())
    assert {key for key in before if before[key] != after[key]} == set()
    assert not mpi, "MPI starts at the first call"
    assert imported == ([] if group == "neither" else [group]), "only what is needed, so far"


@pytest.mark.parametrize("script", ["vpg_torch", "vpg_tf1"])
def test_a_script_prints_nothing_of_its_libraries_and_has_one_framework(script, tmp_path):
    """Started as a user would, with all that a run imports on the way."""
    settings = brief(script, epochs=1, data_dir=str(tmp_path))
    code = f"""
import sys
sys.path.insert(0, ".")
from {script} import Args, main
main(Args(**{settings}))
print(*{{"torch", "tensorflow"}} & set(sys.modules))
import threading
print([t.name for t in threading.enumerate()])
"""
    run = start("-c", code)
    assert (run.returncode, run.stderr) == (0, "")
    frameworks, threads = run.stdout.splitlines()[-2:]
    assert frameworks == ("torch" if "torch" in script else "tensorflow")
    assert threads == "['MainThread']"


def test_eager_mode_survives_a_tf1_run(tmp_path):
    import tensorflow as tf

    assert tf.executing_eagerly()
    train("vpg_tf1", tmp_path, **brief("vpg_tf1", epochs=1))
    assert tf.executing_eagerly()
    assert float(tf.add(1.0, 2.0)) == 3.0
    assert not tf.compat.v1.get_default_graph().get_operations(), "its graph is its own"


class Stop(Exception):
    pass


def interrupted(script, data_dir, error, step, monkeypatch, **settings):
    """Train until an environment raises an error at some step; return the exception seen."""
    import gymnasium.envs.classic_control.pendulum as pendulum

    original, calls = pendulum.PendulumEnv.step, []

    def failing(self, a):
        calls.append(a)
        if len(calls) == step:
            raise error
        return original(self, a)

    with monkeypatch.context() as patch, pytest.raises(type(error)) as caught:
        patch.setattr(pendulum.PendulumEnv, "step", failing)
        train(script, data_dir, **settings)
    return caught.value


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("ppo_torch", KeyboardInterrupt()),
        ("sac_torch", Stop("the simulator")),
        ("ppo_tf1", KeyboardInterrupt()),
    ],
)
def test_what_is_raised_inside_main_leaves_a_run_that_resumes(script, error, tmp_path, monkeypatch):
    """In the same process: the folder's lock is released, and nothing is in the way."""
    step = 230 if script == "sac_torch" else 130  # which has 100 steps of testing after 100
    caught = interrupted(script, tmp_path, error, step, monkeypatch, xla=True, **brief(script))
    assert caught is error
    note = "stopped after 1 epoch; to resume: main(Args(..., resume=True))"
    assert error.__notes__[-1:] == [note]
    folder = train(script, tmp_path, xla=True, resume=True, **brief(script))
    assert_same(folder, trained(script))


def test_a_notebook_cell_that_failed_before_the_first_step_can_be_run_again(tmp_path, monkeypatch):
    interrupted("ppo_torch", tmp_path / "a", Stop(), 1, monkeypatch, **brief("ppo_torch"))
    assert len(progress(train("ppo_torch", tmp_path / "a", **brief("ppo_torch")))) == 2


@pytest.mark.parametrize("script", SCRIPTS)
def test_ranks_need_a_launcher(script, tmp_path):
    with pytest.raises(SidespinError, match=r"^cpu 2 needs the command line or mpirun$"):
        train(script, tmp_path / "x", cpu=2)
    assert not list(tmp_path.iterdir())


def test_one_hidden_layer_is_a_tuple_of_one(tmp_path):
    sentence = "^hidden_sizes must be a tuple of numbers, each a whole number .*, got 64$"
    with pytest.raises(SidespinError, match=sentence):
        train("ppo_torch", tmp_path / "x", hidden_sizes=64)
    assert not list(tmp_path.iterdir())
    train("ppo_torch", tmp_path, **brief("ppo_torch", hidden_sizes=[8], epochs=1))  # a list is fine


def test_main_in_a_thread(tmp_path):
    """Signals can only be handled in the main thread; main() handles none."""
    results = []
    settings = brief("ppo_torch", epochs=1)
    thread = threading.Thread(
        target=lambda: results.append(train("ppo_torch", tmp_path, **settings))
    )
    thread.start()
    thread.join()
    assert len(progress(results[0])) == 1


def test_two_runs_at_a_time_in_one_process(tmp_path):
    """The second one is told that the first one holds the folder."""
    import ppo_torch

    make_env, refused = ppo_torch.make_env, []

    def make_and_try(*args, **kwargs):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ppo_torch, "make_env", make_env)
            with pytest.raises(SidespinError) as caught:
                train("ppo_torch", tmp_path, overwrite=True, **brief("ppo_torch"))
            refused.append(str(caught.value))
        return make_env(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo_torch, "make_env", make_and_try)
        folder = train("ppo_torch", tmp_path, **brief("ppo_torch"))
    assert refused == [f"another process is training in {folder}"]
    assert len(progress(folder)) == 2


def test_a_script_without_its_packages_names_the_missing_one(tmp_path):
    """Without site-packages, Python's own message says it."""
    run = subprocess.run(
        [sys.executable, "-S", "ppo_torch.py"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 1
    assert re.search("ModuleNotFoundError: No module named 'numpy'", run.stderr)
