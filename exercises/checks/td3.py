"""Checks exercise 1.3 against a computation in NumPy, transition by transition, in float64."""

from types import SimpleNamespace

import numpy as np

from . import Wrong, exercise, expect_close, expect_gradients, listed, numerical_gradients

NETS = ("pi", "q1", "q2", "pi_targ", "q1_targ", "q2_targ")
RETURNS = ("backup", "loss_q", "loss_pi")
OBS_DIM, HIDDEN = 3, 5


def make_weights(rng, n):
    """Draw the weights of six small networks, all different."""
    weights = []
    for name in NETS:
        is_pi = name.startswith("pi")
        shapes = [(OBS_DIM, HIDDEN), (HIDDEN, n)] if is_pi else [(OBS_DIM + n, HIDDEN), (HIDDEN,)]
        weights += [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    return weights


def policy(framework, w1, w2, low, high):
    """Return o -> actions within the bounds, as a function on tensors."""

    def pi(o):
        return (low + high) / 2 + (high - low) / 2 * framework.tanh(framework.tanh(o @ w1) @ w2)

    return pi


def q_function(framework, w1, w2):
    """Return (o, a) -> values [B], as a function on tensors."""

    def q(o, a):
        return framework.sum(framework.tanh(framework.concat([o, a]) @ w1) * w2, 1)

    return q


class Numpy:
    """The operations that the networks need, to compute the right answer with."""

    tanh, sum, constant = map(staticmethod, (np.tanh, np.sum, np.asarray))

    @staticmethod
    def concat(xs):
        return np.concatenate(xs, 1)


def make_nets(framework, weights, low, high):
    nets, low, high = [], framework.constant(low), framework.constant(high)
    for name, w1, w2 in zip(NETS, weights[::2], weights[1::2]):
        is_pi = name.startswith("pi")
        nets.append(
            policy(framework, w1, w2, low, high) if is_pi else q_function(framework, w1, w2)
        )
    return nets


def expected(weights, batch, noise2, low, high, args, fixed_backup=None):
    """Return backup, loss_q and loss_pi; fixed_backup is for losses that are differentiated."""
    pi, q1, q2, pi_targ, q1_targ, q2_targ = make_nets(Numpy, weights, low, high)
    o, a, r, o2, d = batch
    backup, errors, values = [], [], []
    for i in range(len(r)):
        a2 = pi_targ(o2[i : i + 1])[0]
        for j in range(len(a2)):
            blur = args.target_noise * noise2[i, j]
            blur = max(-args.noise_clip, min(args.noise_clip, blur)) * (high[j] - low[j]) / 2
            a2[j] = max(low[j], min(high[j], a2[j] + blur))
        target = r[i]
        if not d[i]:
            target += args.gamma * min(q(o2[i : i + 1], a2[None])[0] for q in (q1_targ, q2_targ))
        backup.append(target)
        target = target if fixed_backup is None else fixed_backup[i]
        errors += [(q(o[i : i + 1], a[i : i + 1])[0] - target) ** 2 for q in (q1, q2)]
        values.append(q1(o[i : i + 1], pi(o[i : i + 1]))[0])
    return np.array(backup), np.sum(errors) / len(r), -np.mean(values)


@exercise("1.3: the maths of TD3")
def check(framework, td3_losses):
    rng = np.random.default_rng(0)
    low, high = np.array([-1, -0.5], np.float32), np.array([2, 0.1], np.float32)

    def problem(n_rows, n=2, noise=1.0, done=0.4, **settings):
        """Draw weights and a batch; return what td3_losses needs, as arrays, and the settings."""
        args = SimpleNamespace(gamma=0.9, target_noise=0.2, noise_clip=0.5)
        vars(args).update(settings)
        o, o2 = rng.standard_normal((2, n_rows, OBS_DIM))
        a, r = rng.uniform(low[:n], high[:n], (n_rows, n)), rng.standard_normal(n_rows)
        d = rng.random(n_rows) < done
        noise2 = noise * rng.standard_normal((n_rows, n))
        batch = [np.asarray(x, np.float32) for x in (o, a, r, o2, d, noise2)]
        return batch, make_weights(rng, n), args

    def answer(args, n):
        def losses(o, a, r, o2, d, noise2, *weights):
            nets = make_nets(framework, weights, low[:n], high[:n])
            bounds = framework.constant(low[:n]), framework.constant(high[:n])
            return td3_losses(nets, (o, a, r, o2, d), noise2, *bounds, args)

        return losses

    def compare(*problem_, parts=RETURNS):
        batch, weights, args = problem_
        n = batch[1].shape[1]
        found = framework.run(answer(args, n), *batch, *weights, returns=RETURNS, batch=6)
        doubles = [x.astype(np.float64) for x in batch]
        w64 = [w.astype(np.float64) for w in weights]
        right = expected(w64, doubles[:5], doubles[5], low[:n], high[:n], args)

        def given(*i):
            text = f"gamma = {args.gamma}, target_noise = {args.target_noise}, "
            text += f"noise_clip = {args.noise_clip}, a batch of {len(doubles[2])}"
            if i:
                r, o2, d, noise2 = (x[i] for x in batch[2:])
                nets = make_nets(Numpy, weights, low[:n], high[:n])
                a2 = nets[3](o2[None])
                q1_targ, q2_targ = (q(o2[None], a2)[0] for q in nets[4:])
                text += f",\nr = {listed(r)}, d = {listed(d)}, noise2 = {listed(noise2)}, "
                text += f"low = {listed(low[:n])}, high = {listed(high[:n])},\n"
                text += f"and at a2 = pi_targ(o2) = {listed(a2[0])}: "
                text += f"q1_targ = {listed(q1_targ)}, q2_targ = {listed(q2_targ)}"
            return text

        for name, x, y in zip(RETURNS, found, right):
            if name in parts:
                expect_close(name, x, y, given)

    for n_rows, n in (6, 2), (1, 2), (2, 2), (5, 1), (1, 1):
        compare(*problem(n_rows, n, target_noise=0.0, done=0.0), parts=("backup",))
    compare(*problem(20, target_noise=0.0, done=0.0), parts=("backup",))
    yield "backup: without noise, for transitions that do not end an episode"

    compare(*problem(20, target_noise=0.0), parts=("backup",))
    compare(*problem(4, target_noise=0.0, done=1.0), parts=("backup",))
    yield "backup: where episodes terminate"

    compare(*problem(20, target_noise=0.05, noise=0.5), parts=("backup",))
    yield "backup: with a little noise on the target action"

    compare(*problem(40, noise_clip=0.1), parts=("backup",))
    compare(*problem(40, target_noise=3.0, noise_clip=2.0), parts=("backup",))
    compare(*problem(40), parts=("backup",))
    compare(*problem(40, gamma=1.0), parts=("backup",))
    yield "backup: with much noise, beyond its limit and beyond the bounds of the actions"

    compare(*problem(20), parts=("loss_q",))
    compare(*problem(1), parts=("loss_q",))
    yield "loss_q"

    compare(*problem(20))
    compare(*problem(3, 1))
    yield "loss_pi"

    batch, weights, args = problem(8, target_noise=0.3)
    doubles, w64 = [x.astype(np.float64) for x in batch], [w.astype(np.float64) for w in weights]
    right = expected(w64, doubles[:5], doubles[5], low, high, args)
    for k, name in (1, "loss_q"), (2, "loss_pi"):
        found = framework.gradients(
            lambda *x, k=k: answer(args, 2)(*x)[k], *batch, *weights, batch=6
        )[6:]
        numerical = numerical_gradients(
            lambda *w, k=k: expected(w, doubles[:5], doubles[5], low, high, args, right[0])[k], *w64
        )
        names = [f"the weights of {net}" for net in NETS for _ in range(2)]
        used = {"loss_q": ("q1", "q2"), "loss_pi": ("pi",)}[name]
        for label, x, y in zip(names, found, numerical):
            net = label.split()[-1]
            if net in used:
                expect_gradients(
                    name, [label], [x], [y], lambda *i: "a batch of 8", rtol=2e-3, atol=1e-4
                )
            elif x is not None and np.any(x) and not (name == "loss_pi" and net == "q1"):
                raise Wrong(f"{name} must not train {net}, but has a gradient for {label}")
    yield "gradients: which networks each loss trains, and how"
