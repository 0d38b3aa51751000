"""Checks exercise 1.2: the policy against scipy, NumPy against the network, then PPO with it."""

import contextlib
import io
import re
import sys
import tempfile

import numpy as np
import scipy.stats

from . import Wrong, exercise, expect_close, expect_shape, listed

OBS_DIM, ACT_DIM, HIDDEN = 3, 2, (8, 7)
EPOCHS, ENOUGH = 18, 300


class TorchPolicy:
    """A policy as ppo_torch.py uses it; what goes in and comes out is NumPy."""

    def __init__(self, framework, policy_class, obs_dim, act_dim, hidden_sizes, seed=0):
        self.torch = framework.torch
        self.pi = policy_class(obs_dim, act_dim, hidden_sizes, np.random.default_rng(seed))

    def trained(self):
        return [p.detach().numpy() for p in self.pi.parameters()]

    def numpy_params(self):
        return [x.numpy() for x in self.pi.state_dict().values()]

    def add(self, arrays):
        for p, x in zip(self.pi.parameters(), arrays):
            p.data.add_(self.torch.as_tensor(x))

    def evaluate(self, function, *arrays):
        found = function(self.pi, *map(self.torch.as_tensor, arrays))
        found = found if isinstance(found, tuple | list) else [found]
        return [x.detach().numpy() if hasattr(x, "detach") else x for x in found]

    def gradients(self, function, *arrays):
        found = function(self.pi, *map(self.torch.as_tensor, arrays)).sum()
        grads = self.torch.autograd.grad(found, list(self.pi.parameters()), allow_unused=True)
        return [None if g is None else g.numpy() for g in grads]


class TF1Policy:
    """A policy as ppo_tf1.py uses it; what goes in and comes out is NumPy."""

    def __init__(self, framework, policy_class, obs_dim, act_dim, hidden_sizes, seed=0):
        self.tf, self.graph = framework.tf, framework.tf.Graph()
        with self.graph.as_default():
            self.pi = policy_class(obs_dim, act_dim, hidden_sizes, np.random.default_rng(seed))
            for name in ("params", "state"):
                if not hasattr(self.pi, name):
                    raise Wrong(f"the policy has no list of variables named {name}")
            self.sess = self.tf.Session()
            self.sess.run(self.tf.global_variables_initializer())

    def trained(self):
        return self.sess.run(self.pi.params)

    def numpy_params(self):
        return self.sess.run(self.pi.state)

    def add(self, arrays):
        with self.graph.as_default():
            self.sess.run([p.assign_add(x) for p, x in zip(self.pi.params, arrays)])

    def evaluate(self, function, *arrays):
        with self.graph.as_default():
            tensors = [self.tf.placeholder(x.dtype, [None, *x.shape[1:]]) for x in arrays]
            found = function(self.pi, *tensors)
            found = list(found) if isinstance(found, tuple | list) else [found]
            return self.sess.run(found, dict(zip(tensors, arrays)))

    def gradients(self, function, *arrays):
        with self.graph.as_default():
            grads = self.tf.gradients(
                function(self.pi, *map(self.tf.constant, arrays)), self.pi.params
            )
            return [None if g is None else self.sess.run(g) for g in grads]


def dist(pi, o):
    found = pi.dist(o)
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise Wrong(f"dist(o) should return mu and log_std, got {type(found).__name__}")
    return found


def logp(pi, o, a):
    return pi.logp(pi.dist(o), a)


def entropy(pi, o):
    return pi.entropy(pi.dist(o))


class Returns(io.StringIO):
    """In place of the table that a script prints, show the return of each epoch."""

    def __init__(self):
        super().__init__()
        self.out = sys.stdout

    def write(self, text):
        for value in re.findall(r"AverageEpRet \| +([\d.,]+)", text):
            print(f"{float(value.replace(',', '')):.0f}", end=" ", file=self.out, flush=True)
        return len(text)


def train(framework, policy_class):
    """Put the class into the script, as in an edited copy; return the average return per epoch."""
    script = framework.script("ppo")
    original, script.GaussianPolicy = script.GaussianPolicy, policy_class
    print(f"         PPO on InvertedPendulum-v4, {EPOCHS} epochs; average return of each:")
    print("         ", end="", flush=True)
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(Returns()):
            settings = dict(env_id="InvertedPendulum-v4", epochs=EPOCHS, data_dir=folder)
            table = script.main(script.Args(**settings)) / "progress.txt"
            return np.genfromtxt(table, names=True)["AverageEpRet"]
    finally:
        script.GaussianPolicy = original
        print()


@exercise("1.2: a Gaussian policy for PPO")
def check(framework, policy_class):
    rng = np.random.default_rng(0)
    kind = {"torch": TorchPolicy, "tf1": TF1Policy}[framework.name]

    def make(obs_dim=OBS_DIM, act_dim=ACT_DIM, hidden_sizes=HIDDEN, seed=0):
        return kind(framework, policy_class, obs_dim, act_dim, hidden_sizes, seed)

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    policy = make()
    sizes = [OBS_DIM, *HIDDEN, ACT_DIM]
    count = sum((n + 1) * m for n, m in zip(sizes, sizes[1:])) + ACT_DIM
    found = sum(x.size for x in policy.trained())
    if found != count:
        raise Wrong(
            f"the policy should have {count} numbers to train, got {found}\n"
            f"for {OBS_DIM} observations, hidden layers {list(HIDDEN)}, {ACT_DIM} actions"
        )
    same, other = make(), make(seed=1)
    pairs = [
        (x, y, z) for x, y, z in zip(*(p.trained() for p in (policy, same, other))) if x.ndim > 1
    ]
    if any(not np.array_equal(x, y) or np.array_equal(x, z) for x, y, z in pairs):
        raise Wrong("the same rng should give the same weights, and another one different weights")
    for n_rows in (5, 1):
        mu, log_std = policy.evaluate(dist, draw(n_rows, OBS_DIM))
        expect_shape("mu of dist(o)", mu, [n_rows, ACT_DIM], f"o of shape [{n_rows}, {OBS_DIM}]")
        expect_shape("log_std of dist(o)", log_std, [ACT_DIM], f"{ACT_DIM} actions")
    expect_close("the initial log_std", log_std, np.full(ACT_DIM, -0.5), lambda i: "any o")
    yield "the network, log_std, and what dist(o) returns"

    linear, o = make(hidden_sizes=()), 10 * draw(3, OBS_DIM)
    (mu, _), (mu2, _), (bias, _) = (linear.evaluate(dist, x) for x in (o, 2 * o, 0 * o))
    expect_close("mu", mu2, 2 * mu - bias, lambda *i: "2 o, no hidden layers: mu is linear in o")
    yield "the mean is not squashed"

    # From here on, all parameters have moved, and the dimensions have different log_std
    for _ in range(20):
        policy.add([0.3 * draw(*x.shape) for x in policy.trained()])
        if np.ptp(policy.evaluate(dist, draw(1, OBS_DIM))[1]) > 0.7:
            break
    for n_rows in (6, 1):
        o, a = draw(n_rows, OBS_DIM), 2 * draw(n_rows, ACT_DIM)
        mu, log_std = (x.astype(np.float64) for x in policy.evaluate(dist, o))
        normal = scipy.stats.norm(mu, np.exp(log_std) + 0 * mu)

        def given(i, a=a, mu=mu, log_std=log_std):
            return f"a = {listed(a[i])}, mu = {listed(mu[i])}, log_std = {listed(log_std)}"

        expect_close("logp", policy.evaluate(logp, o, a)[0], normal.logpdf(a).sum(1), given)
        right = normal.entropy().sum(1)
        expect_close("entropy", policy.evaluate(entropy, o)[0], right, given)
    yield "logp and entropy"

    o, a = draw(6, OBS_DIM), 2 * draw(6, ACT_DIM)
    for x, grad in zip(policy.trained(), policy.gradients(logp, o, a)):
        if grad is None or not np.any(grad):
            raise Wrong(f"no gradient of logp reaches the parameter of shape {list(x.shape)}")
    yield "the gradient of logp reaches every parameter"

    params = policy.numpy_params()
    for row in o:
        right = policy.evaluate(dist, row[None])
        found = policy.pi.dist_numpy(params, row)
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise Wrong(f"dist_numpy should return mu and log_std, got {type(found).__name__}")
        for name, x, y in zip(("mu", "log_std"), found, (right[0][0], right[1])):
            expect_close(f"{name} of dist_numpy", x, y, lambda *i, o=row: f"o = {listed(o)}")
        expect_close("act without rng", policy.pi.act(params, row), right[0][0], lambda *i: "one o")
    yield "dist_numpy, and act without rng, agree with the network"

    action = policy.pi.act(params, o[0], rng)
    if not isinstance(action, np.ndarray) or action.dtype != np.float32:
        kind = getattr(action, "dtype", type(action).__name__)
        raise Wrong(f"an action should be an array of float32, got {kind}")
    expect_shape("an action", action, [ACT_DIM], f"{ACT_DIM} actions")
    one, two = (policy.pi.act(params, o[0], np.random.default_rng(7)) for _ in range(2))
    if not np.array_equal(one, two):
        raise Wrong("the same rng should give the same action")
    mu, log_std = right[0][0], right[1]
    actions = np.array([policy.pi.act(params, row, rng) for _ in range(5000)])
    for i in range(ACT_DIM):
        where = f"dimension {i}, over 5000 actions for the same observation"
        mean, std = actions[:, i].mean(), actions[:, i].std()
        wanted = f"mean {mu[i]:.3f} and standard deviation {np.exp(log_std[i]):.3f}"
        if scipy.stats.kstest(actions[:, i], "norm", (mu[i], np.exp(log_std[i]))).pvalue < 1e-6:
            got = f"mean {mean:.3f} and standard deviation {std:.3f}"
            raise Wrong(f"actions should be Gaussian with {wanted}, got {got}\nin {where}")
    correlation = np.corrcoef(actions.T)[0, 1]
    if abs(correlation) > 0.1:
        raise Wrong(
            f"the dimensions of an action should be independent, got correlation "
            f"{correlation:.2f}\nover 5000 actions for the same observation"
        )
    yield "act draws from the Gaussian"

    best = max(train(framework, policy_class)[-4:])
    if not best > ENOUGH:
        raise Wrong(f"PPO should reach an average return of {ENOUGH} by the end, got {best:.0f}")
    yield "PPO learns with your policy"
