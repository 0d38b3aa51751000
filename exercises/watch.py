"""Train with a script in small, and keep what its environment, networks and optimizers saw.

Nothing here knows an algorithm. What to make of it is up to oracles.py.
"""

import contextlib
import copy
import importlib.util
import inspect
import os
import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

from common.errors import SidespinError
from common.logger import EpochLogger
from common.mpi import comm

UNTRAINED = r"(center|half_range|(obs|returns)_(mean|std|batches))$"  # TF1 calls them trainable
LOW, HIGH = np.array([-1, 0.5], np.float32), np.array([3, 0.75], np.float32)


class NotThisScript(SidespinError):
    """The file to check is not what it should be."""


class Probe(gym.Env):
    """Random observations and short episodes: half of them terminate, half run out of time.

    The bounds of its two actions are lopsided and differ, so that a wrong scale shows.
    """

    watch = None  # what looks on at the moment
    observation_space = Box(-2, 2, (3,), np.float32)

    def __init__(self, discrete=False, render_mode=None):
        self.action_space = Discrete(3) if discrete else Box(LOW, HIGH)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left, self.terminates = self.np_random.integers(2, 6), self.np_random.integers(2)
        self.o = self.np_random.uniform(-2, 2, 3).astype(np.float32)
        self.watch.reset(self)
        return self.o, {}

    def step(self, a):
        self.watch.end_of_update()
        o, self.o = self.o, self.np_random.uniform(-2, 2, 3).astype(np.float32)
        self.left -= 1
        over, r = bool(self.left == 0), float(2 * o[0] + np.sum(a) - 1)
        terminated, truncated = over and bool(self.terminates), over and not self.terminates
        self.watch.step(self, o, a, r, self.o, terminated, truncated)
        return self.o, r, terminated, truncated, {}


for name in ("Box", "Discrete"):
    kwargs = {"discrete": name == "Discrete"}
    gym.register(f"Probe{name}-v0", Probe, kwargs=kwargs, disable_env_checker=True)


class Watch:
    """What one rank saw.

    steps     o, a, r, o2, terminated, truncated and the networks at that time, step by step
    tests     the same of test episodes
    updates   each with the networks before and after, the batch, the generator after the batch,
              and what was logged
    episodes  returns and lengths, as logged
    draws     on-policy, many actions for one observation
    """

    def __init__(self):
        self.steps, self.tests, self.updates, self.episodes = [], [], [], []
        self.env = self.state = self.now = self.draws = None
        self.optimizers = []

    def reset(self, env):
        self.env = self.env or env  # the first one is for training

    def step(self, env, o, a, *rest):
        self.now = self.now or self.read()
        row = SimpleNamespace(o=o, a=np.array(a), nets=self.now.nets)
        row.r, row.o2, row.terminated, row.truncated = rest
        (self.steps if env is self.env else self.tests).append(row)

    def start_of_update(self):
        self.end_of_update()
        self.now = self.read()
        self.updates.append(SimpleNamespace(before=self.now, after=None, logged={}, rng=None))

    def log(self, **numbers):
        if "EpRet" in numbers:
            self.episodes.append([float(numbers[key]) for key in ("EpRet", "EpLen")])
        elif self.updates and self.updates[-1].after is None:
            for key, x in numbers.items():
                x = np.asarray(x.detach() if hasattr(x, "detach") else x)
                self.updates[-1].logged[key] = float(x.mean()) if x.size else np.nan

    def end_of_update(self):
        if self.updates and self.updates[-1].after is None:
            self.updates[-1].after = self.now = self.read()

    def read(self):
        """Return networks by name, and Adam's t, m and v of each: lists of arrays, all copied."""
        read = self.read_torch if hasattr(self.state, "parts") else self.read_tf1
        found = SimpleNamespace(nets={}, t={}, m={}, v={})
        for name, p, t, m, v in read():
            part = re.match(r"(targ\.)?(pi|v|q1|q2|log_alpha)(_targ)?([./]|$)", name)
            if part and not re.search(UNTRAINED, name):
                net = ("targ." if part[1] or part[3] else "") + part[2]
                found.t[net] = int(t)
                for key, x in ("nets", p), ("m", m), ("v", v):
                    getattr(found, key).setdefault(net, []).append(np.array(x, np.float64))
        return found

    def read_torch(self):
        modules = [part for part in self.state.parts if hasattr(part, "named_parameters")]
        adam = {}
        for optimizer in self.state.parts:
            for group in getattr(optimizer, "param_groups", []):
                adam |= {id(p): optimizer.state.get(p, {}) for p in group["params"]}
        for prefix, module in zip(("", "targ.", "log_alpha."), modules):
            for name, p in module.named_parameters():
                state = adam.get(id(p), {})
                p = p.detach()
                moments = [state.get(key, 0 * p).numpy() for key in ("exp_avg", "exp_avg_sq")]
                yield prefix + name, p.numpy(), state.get("step", 0), *moments

    def read_tf1(self):
        sess, adam = self.state.sess, {}
        for optimizer in self.optimizers:
            for p, m, v in zip(optimizer.params, optimizer.ms, optimizer.vs):
                adam[p.op.name] = [optimizer.t, m, v]
        names = {p.op.name: p for p in sess.graph.get_collection("trainable_variables")}
        values, moments = sess.run((names, adam))
        for name, p in values.items():
            yield name, p, *moments.get(name, (0, 0 * p, 0 * p))


def load(path):
    """Import a script from a file; return its module."""
    if Path(path).suffix != ".py":
        raise NotThisScript(f"{path} is not a Python script")
    spec = importlib.util.spec_from_file_location(f"checked_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def wrapped(owner, name, wrapper):
    """Let wrapper(original, ...) take the place of a function for a while."""
    original, raw = getattr(owner, name), inspect.getattr_static(owner, name)
    kind = (
        staticmethod if isinstance(raw, classmethod | staticmethod) else lambda function: function
    )
    setattr(owner, name, kind(lambda *args, **kwargs: wrapper(original, *args, **kwargs)))
    try:
        yield
    finally:
        setattr(owner, name, raw)


def watch(module, on_policy, **settings):
    """Train in a folder that is deleted afterwards; return what was seen."""
    owner, method = ("GAEBuffer", "get") if on_policy else ("ReplayBuffer", "sample_batch")
    path = os.path.relpath(module.__file__)
    for name in (owner, "State", "Args", "main"):
        if not hasattr(module, name):
            what = f"has no {name}: is it another algorithm's script?"
            raise NotThisScript(f"{path} {what}")
    seen, utils = Watch(), sys.modules[module.State.__module__]
    try:
        seen.args = module.Args(save_freq=10**6, **settings)
    except TypeError as error:  # an argument that it does not have
        what = "another algorithm's script, or an argument has gone"
        raise NotThisScript(f"{path} is {what}: {error}") from error

    def batch(original, buf, *args, **kwargs):
        seen.start_of_update()
        arrays = original(buf, *args, **kwargs)
        seen.updates[-1].batch = [np.array(x) for x in arrays]
        for x in (*args, *kwargs.values()):
            if isinstance(x, np.random.Generator):
                seen.updates[-1].rng = copy.deepcopy(x)  # to draw the same noise again
        return arrays

    def act(original, params, o, rng=None):
        if seen.draws is None:
            a = [original(params, o, rng) for rng in [np.random.default_rng(0)] * 2000]
            seen.draws = SimpleNamespace(o=o, a=np.array(a), nets=seen.read().nets)
        return original(params, o, rng)

    def store(original, logger, **numbers):
        original(logger, **numbers)
        seen.log(**numbers)

    def state(original, self, *parts):
        original(self, *parts)
        seen.state = self

    def adam(original, self, *args, **kwargs):
        original(self, *args, **kwargs)
        seen.optimizers.append(self)

    def plain(original, update):
        return utils.tf.function(update)  # to compile takes longer than to run

    with contextlib.ExitStack() as stack:

        def wrap(*what):
            stack.enter_context(wrapped(*what))

        wrap(getattr(module, owner), method, batch)
        for policy in ("GaussianPolicy", "CategoricalPolicy"):
            if hasattr(getattr(module, policy, None), "act"):
                wrap(getattr(module, policy), "act", act)
        wrap(EpochLogger, "store", store)
        wrap(utils.State, "__init__", state)
        if hasattr(utils, "MpiAdamOptimizer"):
            wrap(utils.MpiAdamOptimizer, "__init__", adam)
            for place in (utils, module):
                if hasattr(place, "compiled"):
                    wrap(place, "compiled", plain)
        Probe.watch = seen
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        seen.args.data_dir = comm().bcast(folder)
        module.main(seen.args)
        seen.end_of_update()
        comm().barrier()  # before rank 0 deletes the folder
    return seen
