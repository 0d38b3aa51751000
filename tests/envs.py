"""Environments that Gymnasium does not have; ids are envs:Name-v0 for the scripts."""

import collections
import functools
import os
import sys
import time

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Sequence, Tuple
from gymnasium.wrappers import FrameStackObservation, NormalizeObservation, NormalizeReward

from common.mpi import proc_id


class Odd(gym.Env):
    """Twenty steps an episode, any spaces; says so when an action lies outside of its space."""

    def __init__(
        self, observation_space=None, action_space=None, length=20, reward=1.0, render_mode=None
    ):
        self.observation_space = observation_space or Box(-1, 1, (3,), np.float32)
        self.action_space = action_space or Box(-1, 1, (2,), np.float32)
        self.length, self.reward = length, reward

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, a):
        assert self.action_space.contains(a), f"action {a} is not in {self.action_space}"
        self.t += 1
        return self.observation_space.sample(), self.reward, self.t >= self.length, False, {}


class InPlace(gym.Env):
    """Returns one array, changed in place; its first element counts the steps."""

    observation_space = Box(0, np.inf, (1,), np.float32)
    action_space = Discrete(2)

    def __init__(self, render_mode=None):
        self.state = np.zeros(1, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state[:] = 0
        return self.state, {}

    def step(self, a):
        self.state += 1
        return self.state, 0.0, bool(self.state[0] >= 10), False, {}


class BadUnits(gym.Wrapper):
    """CartPole in units that no network likes: far from 0, of very different size."""

    def __init__(self, render_mode=None):
        super().__init__(gym.make("CartPole-v1"))
        self.observation_space = Box(-np.inf, np.inf, (4,), np.float32)

    def reset(self, **kwargs):
        o, info = super().reset(**kwargs)
        return self.convert(o), info

    def step(self, a):
        o, r, d, truncated, info = super().step(a)
        return self.convert(o), 1000 * r, d, truncated, info

    def convert(self, o):
        return (np.array([300, 1e-3, 1e4, 1e-2]) * o + [500, 0.01, 0, -0.1]).astype(np.float32)


class WideObs(Odd):
    """Declares bounds that float32 cannot hold; what it observes is small."""

    def __init__(self, render_mode=None):
        super().__init__(observation_space=Box(-1e39, 1e39, (3,), np.float64))

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0] * 1e-39, {}

    def step(self, a):
        o, *rest = super().step(a)
        return o * 1e-39, *rest


class Mixed(Odd):
    """Five steps an episode; every other one is terminated, the others run out of time."""

    action_space = Box(np.array([-1, 0.5], np.float32), np.array([3, 0.75], np.float32))
    episodes = 0

    def __init__(self, unit=1.0, render_mode=None):
        super().__init__(action_space=Mixed.action_space, length=5)
        self.unit = unit

    def step(self, a):
        o, _, over, _, _ = super().step(a)
        self.episodes += over
        terminated = over and self.episodes % 2 == 0
        return o, self.unit * float(o[0] + a[0]), terminated, over and not terminated, {}


class NanReward(Odd):
    """Pays NaN from the 150th step on."""

    steps = 0

    def step(self, a):
        self.steps += 1
        o, r, *rest = super().step(a)
        return o, np.nan if self.steps >= 150 else r, *rest


class InfiniteObs(Odd):
    """Observes something infinite in the 150th step."""

    steps = 0

    def step(self, a):
        self.steps += 1
        o, *rest = super().step(a)
        return np.array([0, np.inf, 0], np.float32) if self.steps >= 150 else o, *rest


class Strays(Odd):
    """Draws from a generator that nobody can seed, so that no episode can be replayed."""

    def step(self, a):
        _, *rest = super().step(a)
        return np.random.default_rng().uniform(-1, 1, 3).astype(np.float32), *rest


class Private(Odd):
    """Draws from a generator of its own, which only a seeded reset makes anew; pays in arrays."""

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.RandomState(seed)
        return super().reset(seed=seed)

    def step(self, a):
        o, _, d, truncated, info = super().step(a)
        slip = self.rng.uniform() < 0.03
        return o, np.array([1.0 - slip]), d or slip, truncated, info


class HugeReward(Odd):
    """Pays what only a float64 can hold, in the 150th step."""

    steps = 0

    def step(self, a):
        self.steps += 1
        o, r, *rest = super().step(a)
        return o, 1e300 if self.steps == 150 else r, *rest


class ExitsAlone(Odd):
    """Exits on the last rank after a while, as if all were well."""

    steps = 0

    def step(self, a):
        self.steps += 1
        if self.steps > 150 and proc_id() == 1:
            sys.exit(0)
        return super().step(a)


class MissingOnOne(Odd):
    """Cannot be made on the last of two ranks."""

    def __init__(self, render_mode=None):
        super().__init__()
        if proc_id() == 1:
            raise gym.error.DependencyNotInstalled("this machine lacks the simulator")


class Faulty(Odd):
    """Cannot be made because of a fault in its own code."""

    def __init__(self, render_mode=None):
        super().__init__(length=1 / 0)


class Raises(Odd):
    """Fails on the last rank after a while."""

    def step(self, a):
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps > 150 and proc_id() == 1:
            raise RuntimeError("the simulator of rank 1 blew up")
        return super().step(a)


class Holds(Odd):
    """Stops in the third epoch of 50 steps for as long as the file HOLD is there."""

    steps = 0

    def step(self, a):
        self.steps += 1
        while self.steps == 110 and os.path.exists(os.environ.get("HOLD", "")):
            time.sleep(0.05)
        return super().step(a)


class CountsSteps(gym.Wrapper):
    """Pays less the longer it has been in use, over all episodes."""

    total = 0

    def __init__(self, env):
        super().__init__(env)
        self.recent = collections.deque(maxlen=3)
        self.rng = np.random.default_rng(5)

    def step(self, a):
        self.total += 1
        o, r, d, truncated, info = self.env.step(a)
        self.recent.append(r)
        r = float(np.mean(self.recent) / self.total + self.rng.uniform())
        return o, r, d, truncated, info


class AddsUp(gym.Wrapper):
    """Adds up its observations, over all episodes; holds nothing but one array."""

    def __init__(self, env):
        super().__init__(env)
        self.array = np.zeros(3)

    def step(self, a):
        o, r, d, truncated, info = self.env.step(a)
        self.array += o
        return o + 0.001 * self.array, r, d, truncated, info


def pendulum(*wrappers, render_mode=None):
    env = gym.make("Pendulum-v1", render_mode=render_mode)
    for wrapper in wrappers:
        env = wrapper(env)
    return env


WRAPPED = {
    "Normalized": [NormalizeObservation, NormalizeReward],
    "Stacked": [lambda env: FrameStackObservation(env, 3)],
    "Counting": [CountsSteps],
    "Array": [AddsUp],
}

SPACES = {
    "DictObs": dict(observation_space=Dict(x=Box(-1, 1, (2, 2)), n=Discrete(3))),
    "TupleObs": dict(observation_space=Tuple((Discrete(4), Box(0, 1, (1,))))),
    "DiscreteObs": dict(observation_space=Discrete(5)),
    "ImageObs": dict(observation_space=Box(0, 255, (6, 5, 3), np.uint8)),
    "ScalarObs": dict(observation_space=Box(-1, 1, ())),
    "Float64Obs": dict(observation_space=Box(-1, 1, (3,), np.float64)),
    "DiscreteStart": dict(action_space=Discrete(3, start=5)),
    "SmallDiscrete": dict(action_space=Discrete(3, dtype=np.int32)),
    "MatrixAction": dict(action_space=Box(-1, 1, (2, 3))),
    "Float64Action": dict(action_space=Box(-0.1, 0.1, (2,), np.float64)),
    "AsymmetricAction": dict(
        action_space=Box(np.array([-1, 0.5], np.float32), np.array([3, 0.75], np.float32))
    ),
    "DictAsymmetric": dict(
        observation_space=Dict(x=Box(-1, 1, (2, 2)), n=Discrete(3)),
        action_space=Box(np.array([-1, 0.5], np.float32), np.array([3, 0.75], np.float32)),
    ),
    "UnboundedAction": dict(action_space=Box(-np.inf, np.inf, (2,))),
    "SequenceObs": dict(observation_space=Sequence(Box(-1, 1, (2,)))),
    "MultiDiscreteAction": dict(action_space=MultiDiscrete([2, 3])),
    "IntegerAction": dict(action_space=Box(0, 9, (2,), np.int64)),
    "Endless": dict(length=10**9),
    "HalfPrecisionReward": dict(reward=np.float16(1001)),
    "ArrayReward": dict(reward=np.array([1001], np.float32)),
}

for name, kwargs in SPACES.items():
    gym.register(f"{name}-v0", entry_point=Odd, kwargs=kwargs)
for name, wrappers in WRAPPED.items():
    gym.register(f"{name}-v0", entry_point=functools.partial(pendulum, *wrappers))
gym.register("InPlace-v0", entry_point=InPlace)
gym.register("BadUnits-v0", entry_point=BadUnits)
gym.register("WideObs-v0", entry_point=WideObs)
gym.register("Mixed-v0", entry_point=Mixed)
gym.register("TinyRewards-v0", entry_point=Mixed, kwargs={"unit": 1e-6})
gym.register("NanReward-v0", entry_point=NanReward)
gym.register("InfiniteObs-v0", entry_point=InfiniteObs)
gym.register("Strays-v0", entry_point=Strays)
gym.register("ExitsAlone-v0", entry_point=ExitsAlone)
gym.register("Private-v0", entry_point=Private)
gym.register("HugeReward-v0", entry_point=HugeReward)
gym.register("MissingOnOne-v0", entry_point=MissingOnOne)
gym.register("Raises-v0", entry_point=Raises)
gym.register("Faulty-v0", entry_point=Faulty)
gym.register("Holds-v0", entry_point=Holds)
