"""Is the maths of a script right? Computed again in NumPy and float64, from the papers' equations.

check() trains with the script for a moment (see watch.py). Each oracle then takes what went into
one stage of the algorithm, as observed, computes what should have come out, and compares. So a
mistake in one stage does not spoil the verdict on the next, and how the script is written does not
matter. Gradients are finite differences; those to compare with are read from Adam's first moment.

Several ranks together are one rank with a larger batch: that is what their averages are for.

An oracle yields pairs: what is wrong, and how.
"""

import contextlib
import io
import json
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from watch import HIGH, LOW, NotThisScript, load, watch

from common.errors import plural
from common.mpi import comm, first_problem, num_procs, proc_id

ON_POLICY, OFF_POLICY = ("vpg", "ppo", "trpo"), ("ddpg", "td3", "sac")
CENTER, HALF_RANGE = (np.float64(HIGH) + LOW) / 2, (np.float64(HIGH) - LOW) / 2
TINY = dict(seed=11, hidden_sizes=(6,), gamma=0.9)
OFF_POLICY_RUN = dict(env_id="ProbeBox-v0", epochs=1, update_every=1, batch_size=12)
OFF_POLICY_RUN |= dict(num_test_episodes=2, polyak=0.9, replay_size=50)
ON_POLICY_RUN = dict(epochs=3, lam=0.7, vf_lr=0.02)
NETWORKS = {"ddpg": "pi q1", "td3": "pi q1 q2", "sac": "pi q1 q2"}
NETWORKS |= dict.fromkeys(ON_POLICY, "pi v")
OWN = {
    "ddpg": dict(pi_lr=0.02, q_lr=0.03, act_noise=0.05),
    "td3": dict(pi_lr=0.02, q_lr=0.03, act_noise=0.05, noise_clip=0.15, policy_delay=3),
    "sac": dict(lr=0.02, alpha=0.3, autotune=True),
    "vpg": dict(pi_lr=0.05),
    "ppo": dict(pi_lr=0.02, clip_ratio=0.1, target_kl=0.02),
    "trpo": dict(delta=1.0, damping_coeff=0.01, cg_iters=60, backtrack_coeff=0.7),
}


def runs(algo):
    """Return the settings of the runs to watch."""
    run, n = {**TINY, **OWN[algo]}, num_procs()
    if algo in OFF_POLICY:
        steps = dict(start_steps=20 * n, update_after=35 * n, steps_per_epoch=60 * n)
        return [{**run, **OFF_POLICY_RUN, **steps}]
    run["steps_per_epoch"] = 100 * n
    # One step of an optimizer shows its gradient; several show what depends on the first.
    box = {**run, **ON_POLICY_RUN, "env_id": "ProbeBox-v0", "train_v_iters": 1, "vf_lam": 0.8}
    discrete = {**run, **ON_POLICY_RUN, "env_id": "ProbeDiscrete-v0", "train_v_iters": 3}
    if algo == "ppo":
        box["train_pi_iters"], discrete["train_pi_iters"] = 10, 1
    if algo == "trpo":
        box["backtrack_iters"] = 3  # too few in some epochs
    return [box, discrete]


def check(path, algo):
    """Return what is wrong, one sentence each, on every rank; nothing if the maths is right."""
    oracle, found = off_policy if algo in OFF_POLICY else on_policy, {}
    for settings in runs(algo):
        problem, seen = None, None
        try:
            seen = watch(load(path), algo in ON_POLICY, **settings)
        except NotThisScript:
            raise
        except Exception as error:
            trace = traceback.extract_tb(error.__traceback__)
            lines = [x.lineno for x in trace if Path(x.filename) == Path(path).resolve()]
            where = f" in line {lines[-1]}" if lines else ""
            problem = f"it stops{where} with {type(error).__name__}: {' '.join(str(error).split())}"
        problem = first_problem(problem)
        if problem:
            return [problem]
        missing = [net for net in NETWORKS[algo].split() if net not in seen.now.nets]
        if missing:
            raise NotThisScript(f"{path} saves no network by the name of {missing[0]}")
        for what, how in oracle(algo, together(seen)):
            found.setdefault(what, f"{what} {how}")  # the first time says enough
        if found:
            break
    return sorted(found.values(), key=lambda sentence: " in the log " in sentence)  # effects last


def together(seen):
    """Join what all ranks saw: the networks of rank 0, the batches of all."""
    ranks = comm().allgather((seen.steps, seen.tests, seen.updates, seen.episodes))
    steps, tests, updates, episodes = zip(*ranks)
    joined = SimpleNamespace(args=seen.args, steps=steps, tests=tests, episodes=episodes)
    joined.updates, joined.draws = [], seen.draws
    for parts in zip(*updates):
        update = SimpleNamespace(**vars(parts[0]))
        update.batch = [np.concatenate(xs) for xs in zip(*(part.batch for part in parts))]
        update.rngs = [part.rng for part in parts]
        update.logged = {k: np.mean([part.logged[k] for part in parts]) for k in update.logged}
        update.apart = any(
            relative_distance(flat(part.after.nets[net]), flat(update.after.nets[net])) > 1e-5
            for part in parts
            for net in part.after.nets
        )
        joined.updates.append(update)
    return joined


# Comparing


def flat(xs):
    """Join arrays into one flat vector of float64."""
    return np.concatenate([np.empty(0), *(np.ravel(x) for x in xs)])


def relative_distance(x, y):
    return np.linalg.norm(x - y) / (np.linalg.norm(y) + 1e-12)


def differs(found, expected, tolerance=1e-3):
    """Say how a vector differs from what it should be, or return None."""
    size, true_size = np.linalg.norm(found), np.linalg.norm(expected)
    if not np.isfinite(size):
        return "is not finite"
    if relative_distance(found, expected) < tolerance:
        return None
    if true_size < 1e-9:
        return "should be zero, but is not"
    if size < 1e-6 * true_size:
        return "is zero"
    cosine = found @ expected / (size * true_size)
    length = size / true_size
    if cosine > 1 - 1e-5 and abs(length - 1) > 0.02:
        return f"has the right direction, but {length:.3g} times the right length"
    if cosine < -1 + 1e-5:
        how_long = "" if abs(length - 1) < 1e-3 else f", and {length:.3g} times the right length"
        return f"has the opposite direction{how_long}"
    if cosine > 0.99:
        return f"is off by {100 * relative_distance(found, expected):.2g}%"
    return f"points elsewhere: the cosine with what it should be is {cosine:.2f}"


# Networks, gradients and Adam


def mlp(params, x, activation):
    for i in range(0, len(params), 2):
        x = x @ params[i].T + params[i + 1]
        x = activation(x) if i + 2 < len(params) else x
    return x


def relu(x):
    return np.maximum(x, 0)


def gradient(f, params, h=1e-6):
    """Return df/dparams by central differences, [number of parameters, *shape of f()]."""
    rows = []
    for x in params:
        for i in np.ndindex(x.shape):
            kept, ends = x[i], []
            for x[i] in (kept + h, kept - h):
                ends.append(f())
            x[i] = kept
            rows.append((ends[0] - ends[1]) / (2 * h))
    return np.array(rows)


def move(params, step):
    """Add the pieces of one flat vector to the parameters, in place."""
    for x in params:
        x += step[: x.size].reshape(x.shape)
        step = step[x.size :]


def copy_of(nets):
    return {name: [x.copy() for x in xs] for name, xs in nets.items()}


def adam_steps(update, net):
    return update.after.t[net] - update.before.t[net]


def observed_gradient(update, net):
    """Return the gradient that Adam got in its only step of an update: m = 0.9 m + 0.1 grad."""
    return 10 * (flat(update.after.m[net]) - 0.9 * flat(update.before.m[net]))


def observed_step(update, net):
    return flat(update.after.nets[net]) - flat(update.before.nets[net])


def adam_step(t, m, v, lr):
    """Return how far Adam moves the parameters, given its moments after the step."""
    return -lr * m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)


def wrong_step(update, net, lr, name):
    """Compare how far a network moved in one step with what Adam makes of its moments."""
    if adam_steps(update, net) == 1:
        after = update.after
        step = adam_step(after.t[net], flat(after.m[net]), flat(after.v[net]), lr)
        how = differs(observed_step(update, net), step, 0.01)
        if how:
            yield f"the step of {name}, compared with Adam's,", how


def wrong_everywhere(joined):
    """Check what all algorithms have in common."""
    if not joined.updates:
        yield "the script", "makes no update"
    if any(update.apart for update in joined.updates):
        yield "after an update, the ranks", "do not hold the same networks"
    for steps, episodes in zip(joined.steps, joined.episodes):
        expected, ret, length = [], 0.0, 0
        for s in steps:
            ret, length = ret + s.r, length + 1
            if s.terminated or s.truncated:
                expected.append([ret, length])
                ret, length = 0.0, 0
        if len(episodes) != len(expected) or not np.allclose(episodes, expected, atol=1e-3):
            yield "EpRet and EpLen in the log", "are not the returns and lengths of the episodes"


# DDPG, TD3, SAC


def off_policy(algo, joined):
    """Yield what is wrong with a run."""
    yield from wrong_everywhere(joined)
    yield from wrong_exploration(algo, joined)
    yield from wrong_replay(joined)
    for update in joined.updates:
        yield from wrong_off_policy_update(algo, joined.args, update)
    moves = [i for i, update in enumerate(joined.updates) if adam_steps(update, "pi")]
    delay = getattr(joined.args, "policy_delay", 1)
    if moves != list(range(moves[0] if moves else 0, len(joined.updates), delay)) or not moves:
        when = "every update" if delay == 1 else f"1 of {delay} updates"
        yield (
            "the policy",
            f"should move in {when}, but moves in {len(moves)} of {len(joined.updates)}",
        )


def deterministic(params, o):
    return CENTER + HALF_RANGE * np.tanh(mlp(params, o, relu))


def gaussian(params, o):
    mu, log_std = np.split(mlp(params, o, relu), 2, axis=-1)
    return mu, np.exp(np.clip(log_std, -20, 2))


def squashed(params, o, noise):
    """Return SAC's actions and their log-densities, by the change of variables."""
    mu, std = gaussian(params, o)
    u = mu + std * noise
    logp = -0.5 * noise**2 - np.log(std) - 0.5 * np.log(2 * np.pi)
    logp = logp - np.log(4) + 2 * np.logaddexp(u, -u)  # 1 - tanh(u)^2 = 4 / (e^u + e^-u)^2
    return CENTER + HALF_RANGE * np.tanh(u), logp.sum(1)


def q_value(params, o, a):
    return mlp(params, np.concatenate([o, a], 1), relu)[:, 0]


def wrong_exploration(algo, joined):
    """Check actions: first uniform, then the policy's with noise; in tests without noise."""
    first = joined.args.start_steps // len(joined.steps)
    random, noise = [], []
    for steps in joined.steps:
        for s in steps:
            if np.any(s.a < LOW) or np.any(s.a > HIGH):
                yield "an action", "lies outside the environment's bounds"
        random += [(s.a - CENTER) / HALF_RANGE for s in steps[:first]]
        for s in steps[first:]:
            unit = (s.a - CENTER) / HALF_RANGE
            if algo == "sac":
                mu, std = gaussian(s.nets["pi"], s.o)
                z = (np.arctanh(unit.clip(-0.999, 0.999)) - mu) / std
            else:
                z = (s.a - deterministic(s.nets["pi"], s.o)) / (joined.args.act_noise * HALF_RANGE)
            noise.append(np.where(np.abs(unit) < 0.999, z, np.nan))  # clipping hides the others
    if not 0.4 < np.std(random) < 0.75 or abs(np.mean(random)) > 0.3:
        yield "the actions of the first steps", "are not uniform between the bounds"
    rms = np.sqrt(np.nanmean(np.square(noise), 0))
    if not np.all((rms > 0.6) & (rms < 1.5)):
        times = " and ".join(f"{x:.2g}" for x in rms)
        yield (
            "the actions after the first steps",
            "should be the current policy's with noise: they are off by "
            f"{times} times the standard deviation of that noise, per dimension",
        )
    for s in (s for tests in joined.tests for s in tests):
        mean = CENTER + HALF_RANGE * np.tanh(gaussian(s.nets["pi"], s.o)[0])
        expected = mean if algo == "sac" else deterministic(s.nets["pi"], s.o)
        if not np.allclose(s.a, expected, atol=1e-3):
            yield "the actions of test episodes", "are not the policy's without noise"


def wrong_replay(joined):
    """Check that what the replay buffer returns is what happened."""
    happened = {s.o.tobytes(): s for steps in joined.steps for s in steps}
    what = "the replay buffer"
    for update in joined.updates:
        for o, a, r, o2, d in zip(*update.batch):
            s = happened.get(np.float32(o).tobytes())
            if s is None:
                yield what, "returns an observation in which no action was taken"
            elif not np.allclose(a, s.a, atol=1e-5):
                yield what, "returns a different action from the one that the environment got"
            elif not np.allclose(r, s.r, atol=1e-4):
                yield what, "returns a different reward from the one that the environment gave"
            elif not np.allclose(o2, s.o2):
                yield what, "returns a different next observation from the one that followed"
            elif d != s.terminated:
                kind = "that ran out of time" if s.truncated else "after which the episode goes on"
                yield (
                    what,
                    f"returns d = {d:g} for a step {'that terminated' if s.terminated else kind}",
                )


def wrong_off_policy_update(algo, args, update):
    """Check one update: the gradients, the steps, and the targets."""
    o, a, r, o2, d = (np.float64(x) for x in update.batch)
    before, after = update.before.nets, update.after.nets
    qs = [name for name in ("q1", "q2") if name in before]
    shape = (len(r) // len(update.rngs), a.shape[1])
    if algo == "ddpg":
        a2, bonus = deterministic(before["targ.pi"], o2), 0
    elif algo == "td3":
        noise2 = np.concatenate([rng.standard_normal(shape, np.float32) for rng in update.rngs])
        blur = np.clip(args.target_noise * noise2, -args.noise_clip, args.noise_clip)
        a2, bonus = np.clip(deterministic(before["targ.pi"], o2) + HALF_RANGE * blur, LOW, HIGH), 0
    else:
        both = [rng.standard_normal((2, *shape), np.float32) for rng in update.rngs]
        noise, noise2 = np.concatenate(both, 1).astype(np.float64)
        alpha = np.exp(before["log_alpha"][0])
        a2, logp2 = squashed(before["pi"], o2, noise2)
        bonus = -alpha * logp2
    future = np.min([q_value(before[f"targ.{name}"], o2, a2) for name in qs], 0) + bonus
    backup = np.where(d == 1, r, r + args.gamma * future)
    rates = [args.lr] * 2 if algo == "sac" else [args.pi_lr, args.q_lr]
    for name in qs:
        yield from wrong_q(name, update, o, a, r, d, backup)
        yield from wrong_step(update, name, rates[1], name.upper())

    nets = copy_of(after) | {"pi": [x.copy() for x in before["pi"]]}  # the Qs are ahead by now

    def loss_pi():
        if algo != "sac":
            return -np.mean(q_value(nets["q1"], o, deterministic(nets["pi"], o)))
        a, logp = squashed(nets["pi"], o, noise)
        return np.mean(alpha * logp - np.minimum(*(q_value(nets[name], o, a) for name in qs)))

    if adam_steps(update, "pi") == 1:
        how = differs(observed_gradient(update, "pi"), gradient(loss_pi, nets["pi"]))
        if how:
            yield "the gradient of the policy's loss", how
        yield from wrong_step(update, "pi", rates[0], "the policy")
    if algo == "sac":
        expected = -np.mean(squashed(before["pi"], o, noise)[1] - len(LOW), keepdims=True)
        how = differs(observed_gradient(update, "log_alpha"), expected)
        if how:
            yield "the gradient of log alpha's loss", how
        yield from wrong_step(update, "log_alpha", args.lr, "log alpha")
    yield from wrong_targets(args, update, moves=adam_steps(update, "pi") > 0)


def wrong_q(name, update, o, a, r, d, backup):
    """Compare the gradient of a Q's loss; if it is wrong, find the targets that it stands for.

    It is sum_i 2/B (Q_i - y_i) dQ_i/dparams: linear in the targets y_i, with more equations than
    targets.
    """
    if adam_steps(update, name) != 1:
        yield name.upper(), f"makes {adam_steps(update, name)} steps in an update instead of one"
        return
    params = [x.copy() for x in update.before.nets[name]]
    jacobian = gradient(lambda: q_value(params, o, a), params) * 2 / len(r)
    q, observed = q_value(params, o, a), observed_gradient(update, name)
    how = differs(observed, jacobian @ (q - backup))
    if not how:
        return
    targets = q - np.linalg.lstsq(jacobian, observed, rcond=1e-5)[0]
    same = np.array([(o == x).all(1) for x in o])  # a batch may hold a step twice: take the mean
    expected, ended = same @ backup / same.sum(1), d == 1
    off = np.abs(targets - expected)
    i, wrong = np.argmax(off), off > 0.1 * off.max()
    plain = how.startswith(("has the right direction", "has the opposite", "is zero"))
    if plain or relative_distance(jacobian @ (q - targets), observed) > 1e-3:
        yield f"the gradient of {name.upper()}'s loss, the mean of (Q - target)^2,", how
    elif not wrong[~ended].any():
        found = f"of a terminated step should be its reward, {r[i]:.3f}, but is {targets[i]:.3f}"
        yield f"{name.upper()}'s target", found
    else:
        found = f"of a step should be {expected[i]:.3f}, but is {targets[i]:.3f}"
        if ended.any() and not wrong[ended].any():
            found += "; those of terminated steps are right"
        yield f"{name.upper()}'s target", found


def wrong_targets(args, update, moves):
    """Check how far the target networks move towards the networks."""
    before, after = update.before.nets, update.after.nets
    for name in (name for name in before if name.startswith("targ.")):
        net = name.removeprefix("targ.")
        old, way = flat(before[name]), flat(after[net]) - flat(before[name])
        if update.before.t["q1"] == 0 and relative_distance(old, flat(before[net])) > 1e-6:
            yield "the target networks", "do not start as copies of the networks"
        share, moved = (1 - args.polyak) * moves, flat(after[name]) - old
        if np.abs(moved - share * way).max() > 1e-5 + 1e-3 * np.abs(way).max():
            made = moved @ way / (way @ way)
            yield (
                "the target networks",
                f"should go {share:.2g} of the way to the networks in an update, but go {made:.2g}",
            )


# VPG, PPO, TRPO


def on_policy(algo, joined):
    """Yield what is wrong with a run."""
    yield from wrong_everywhere(joined)
    if joined.draws:
        o, a = np.repeat(joined.draws.o[None], len(joined.draws.a), 0), joined.draws.a
        yield from wrong_sample(dist(joined.draws.nets["pi"], o, a.ndim == 1), a)
    previous, n = None, joined.args.steps_per_epoch // len(joined.steps)
    for i, update in enumerate(joined.updates):
        ranks = [steps[i * n : (i + 1) * n] for steps in joined.steps]
        yield from wrong_steps(ranks, update, previous)
        yield from wrong_advantages(joined.args, ranks, update)
        yield from wrong_on_policy_update(algo, joined.args, update)
        previous = update.before.nets


def dist(params, o, discrete):
    """Return the parameters of the policy's distribution, one row per observation."""
    if discrete:
        return mlp(params, o, np.tanh)
    mu = mlp(params[1:], o, np.tanh)
    return np.concatenate([mu, np.broadcast_to(params[0], mu.shape)], 1)


def softmax(logits):
    return np.exp(logits) / np.exp(logits).sum(1, keepdims=True)


def log_prob(d, a):
    if a.ndim == 1:
        return np.log(softmax(d)[range(len(a)), a.astype(int)])
    mu, log_std = np.split(d, 2, 1)
    logp = -0.5 * ((a - mu) / np.exp(log_std)) ** 2 - log_std - 0.5 * np.log(2 * np.pi)
    return logp.sum(1)


def entropy(d, discrete):
    """Return the entropy of each row's distribution."""
    if discrete:
        p = softmax(d)
        return -np.sum(p * np.log(p), 1)
    return np.sum(np.split(d, 2, 1)[1] + 0.5 * np.log(2 * np.pi * np.e), 1)


def exact_kl(old, new, discrete):
    """Return the mean of KL(old || new)."""
    if discrete:
        p, q = softmax(old), softmax(new)
        return np.mean(np.sum(p * np.log(p / q), 1))
    (mu_old, log_std_old), (mu, log_std) = np.split(old, 2, 1), np.split(new, 2, 1)
    second_moment = np.exp(2 * log_std_old) + (mu - mu_old) ** 2
    kl = log_std - log_std_old + second_moment / (2 * np.exp(2 * log_std)) - 0.5
    return np.mean(np.sum(kl, 1))


def state_value(params, o):
    return mlp(params, o, np.tanh)[:, 0]


def wrong_steps(ranks, update, previous):
    """Check that the batch is what happened, and that the current policy drew the actions."""
    steps = [s for steps in ranks for s in steps]
    o, a = np.float64(update.batch[0]), np.float64(update.batch[1])
    if not np.allclose(o, [s.o for s in steps], atol=1e-5):
        yield "the buffer", "does not return the observations in which the actions were taken"
        return
    discrete = a.ndim == 1
    taken = np.array([s.a for s in steps], float)
    if not discrete and np.any((taken < LOW) | (taken > HIGH)):
        yield "an action", "lies outside the environment's bounds"
    elif not np.allclose(taken, a if discrete else a.clip(LOW, HIGH), atol=1e-5):
        yield "the buffer", "returns different actions from those that the environment got"
    if not discrete and np.any((a == LOW) | (a == HIGH)):
        yield (
            "the buffer",
            "returns actions that were clipped to the bounds, but log pi(a|o) has to be that of "
            "the action as it was drawn",
        )
        return
    now = dist(update.before.nets["pi"], o, discrete)
    if previous:
        gap = log_prob(dist(previous["pi"], o, discrete), a) - log_prob(now, a)
        if gap.sum() > 6:
            yield "the actions", "look as if they were drawn from the policy before the last update"
            return
    yield from wrong_sample(now, a)


def wrong_sample(d, a):
    """Compare the mean of log pi(a|o) with minus the entropy; its variance is known, too."""
    discrete = a.ndim == 1
    logp, mean, variance = log_prob(d, a), -entropy(d, discrete), 0.5 * a[0].size
    if discrete:
        p = softmax(d)
        variance = np.sum(p * (np.log(p) - mean[:, None]) ** 2, 1).mean()
    if abs(np.mean(logp - mean)) > 4 * np.sqrt(variance / len(a)):
        found = f"log pi(a|o) is {logp.mean():.2f} on average, but should be {mean.mean():.2f}"
        yield "the actions", f"are not a sample from the policy: {found}"


def wrong_advantages(args, ranks, update):
    """Compare values, returns and GAE-lambda with their definitions: sums over all later steps."""
    _, _, adv, ret, values = (np.float64(x) for x in update.batch)
    true_adv, true_ret, true_values, kinds, left = [], [], [], [], []
    for steps in ranks:
        path = []
        for s in steps:
            path.append(s)
            if not (s.terminated or s.truncated or s is steps[-1]):
                continue
            observations = np.float64([x.o for x in path] + [s.o2])
            v = state_value(update.before.nets["v"], observations)
            v[-1] = 0 if s.terminated else v[-1]
            r, n = [x.r for x in path], len(path)
            delta = [r[t] + args.gamma * v[t + 1] - v[t] for t in range(n)]
            for t in range(n):
                weights = (args.gamma * args.lam) ** np.arange(n - t)
                true_adv.append(weights @ delta[t:])
                weights = (args.gamma * args.vf_lam) ** np.arange(n - t)
                true_ret.append(v[t] + weights @ delta[t:])  # vf_lam = 1: the reward-to-go
            true_values += list(v[:-1])
            kind = "runs out of time" if s.truncated else "is cut by the end of the epoch"
            kinds += ["terminates" if s.terminated else kind] * n
            left += list(range(n))[::-1]
            path = []
    true_adv, true_ret, kinds = np.array(true_adv), np.array(true_ret), np.array(kinds)
    if not np.allclose(values, true_values, atol=1e-3):
        yield "the values of the steps", "are not V of their observations"
    wrong = np.abs(ret - true_ret) > 1e-3
    for kind in dict.fromkeys(kinds[wrong]):
        i = np.argmax(wrong & (kinds == kind))
        where = f"{place(left[i])} a path that {kind}"
        yield "the return", f"of {where} should be {true_ret[i]:.3f}, but is {ret[i]:.3f}"
    expected = (true_adv - true_adv.mean()) / true_adv.std()
    if np.allclose(adv, expected, atol=1e-3):
        return
    parts = np.split(true_adv, len(ranks))
    apart = np.concatenate([(x - x.mean()) / x.std() for x in parts])
    what = "the advantages"
    if np.allclose(adv, apart, atol=1e-3):
        yield what, "are normalised separately on each rank, not over all ranks"
    elif abs(adv.mean()) > 0.01 or abs(adv.std() - 1) > 0.01:
        found = f"should have mean 0 and standard deviation 1, but have {adv.mean():.2f}"
        yield what, f"{found} and {adv.std():.2f}"
    else:
        i = np.argmax(np.abs(adv - expected))
        where = f"{place(left[i])} a path that {kinds[i]}"
        found = f"should be {expected[i]:.2f}, but is {adv[i]:.2f}"
        yield what, f"are not those of GAE-lambda: that of {where} {found}"


def place(left):
    """Name a step by how many follow in its path."""
    return f"the step {left} before the last one of" if left else "the last step of"


def wrong_on_policy_update(algo, args, update):
    """Check the steps of the policy and of V, and what was logged about them."""
    o, a, adv, ret = (np.float64(x) for x in update.batch[:4])
    discrete, nets = a.ndim == 1, copy_of(update.before.nets)
    old = dist(nets["pi"], o, discrete)
    logp_old = log_prob(old, a)

    def logp():
        return log_prob(dist(nets["pi"], o, discrete), a)

    def loss_pi():
        ratio = np.exp(logp() - logp_old)
        if algo == "vpg":
            return -np.mean(logp() * adv)
        if algo == "trpo":
            return -np.mean(ratio * adv)
        # Gain nothing beyond 1 + clip where adv > 0, nor below 1 - clip where adv < 0
        limit = np.where(adv > 0, 1 + args.clip_ratio, 1 - args.clip_ratio)
        return -np.mean(np.minimum(ratio * adv, limit * adv))

    def loss_v():
        return np.mean((state_value(nets["v"], o) - ret) ** 2)

    def kl():
        if algo == "trpo":
            return exact_kl(old, dist(nets["pi"], o, discrete), discrete)
        return np.mean(logp_old - logp())

    log = {"LossPi": loss_pi(), "LossV": loss_v(), "Entropy": entropy(old, discrete).mean()}
    nets = copy_of(update.after.nets)
    log |= {"KL": kl(), "DeltaLossPi": log["LossPi"] - loss_pi()}
    log |= {"DeltaLossV": log["LossV"] - loss_v()}
    if algo == "ppo":
        log["ClipFrac"] = np.mean(np.abs(np.exp(logp() - logp_old) - 1) > args.clip_ratio)

    nets = copy_of(update.before.nets)
    if algo == "trpo":
        if log["KL"] > 1.001 * args.delta:
            found = f"accepts a step with a KL of {log['KL']:.3g}, where delta is {args.delta:g}"
            yield "the line search", found
        if log["DeltaLossPi"] < -1e-5:
            yield "the line search", "accepts a step that makes the loss larger"
        yield from wrong_natural_step(args, update, nets["pi"], loss_pi, kl, old, o, discrete)
    else:

        def far_enough():
            return algo == "ppo" and kl() > 1.5 * args.target_kl

        iters = 1 if algo == "vpg" else args.train_pi_iters
        yield from wrong_steps_of("pi", args.pi_lr, iters, update, nets, loss_pi, far_enough)
    yield from wrong_steps_of("v", args.vf_lr, args.train_v_iters, update, nets, loss_v)
    for key, expected in log.items():
        if abs(update.logged.get(key, expected) - expected) > 1e-4 + 1e-3 * abs(expected):
            yield f"{key} in the log", f"should be {expected:.4g}, but is {update.logged[key]:.4g}"


def wrong_steps_of(net, lr, iters, update, nets, loss, enough=lambda: False):
    """Make as many steps with a copy of the network and compare; then compare their number."""
    name = {"pi": "the policy", "v": "V"}[net]
    steps, expected = adam_steps(update, net), None
    t, m, v = update.before.t[net], flat(update.before.m[net]), flat(update.before.v[net])
    for i in range(steps + 1):
        if expected is None and (i == iters or enough()):
            expected = i
        if i < steps:
            grad = gradient(loss, nets[net])
            t, m, v = t + 1, 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
            move(nets[net], adam_step(t, m, v, lr))
    if steps == 1:
        how = differs(observed_gradient(update, net), grad)
        what = f"the gradient of {name}'s loss"
        yield from wrong_step(update, net, lr, name)
    else:
        made = flat(nets[net]) - flat(update.before.nets[net])
        how = differs(observed_step(update, net), made, 0.01)
        what = f"the way that {name} goes in several gradient steps"
    if how:
        yield what, how
    elif steps != expected:
        more, number = ("more than ", steps) if expected is None else ("", expected)
        should = more + plural(number, "gradient step")
        yield name, f"should make {should} in an update, but makes {steps}"


def wrong_natural_step(args, update, params, loss_pi, kl, old, o, discrete):
    """Compare with TRPO's step, from the exact Hessian and a solver for linear equations.

    At the old policy the Hessian of the KL is the mean of J^T F J: J is the derivative of the
    distribution's parameters, F the Hessian of the KL in these.
    """
    g, loss_old = gradient(loss_pi, params), loss_pi()
    jacobian = gradient(lambda: dist(params, o, discrete), params)  # [P, B, n]
    if discrete:
        p = softmax(old)
        fisher = np.einsum("bi,ij->bij", p, np.eye(p.shape[1])) - np.einsum("bi,bj->bij", p, p)
    else:
        log_std = np.split(old, 2, 1)[1]
        diagonal = np.concatenate([np.exp(-2 * log_std), np.full_like(log_std, 2)], 1)
        fisher = np.einsum("bi,ij->bij", diagonal, np.eye(diagonal.shape[1]))
    hessian = np.einsum("pbi,bij,qbj->pq", jacobian, fisher, jacobian) / len(o)
    hessian += args.damping_coeff * np.eye(len(g))
    x = np.linalg.solve(hessian, g)
    step, before = -np.sqrt(2 * args.delta / (x @ hessian @ x)) * x, flat(params)
    for j in range(args.backtrack_iters):
        move(params, before + args.backtrack_coeff**j * step - flat(params))
        if kl() <= args.delta and loss_pi() <= loss_old:
            break
    else:
        move(params, before - flat(params))
    how = differs(observed_step(update, "pi"), flat(params) - before, 0.02)
    if how:
        yield "the step of the policy", how


if __name__ == "__main__":
    answer = {"problems": [], "mistake": None}
    with contextlib.redirect_stdout(io.StringIO()):  # what the script prints
        try:
            answer["problems"] = check(Path(sys.argv[2]), sys.argv[1])
        except NotThisScript as error:
            answer["mistake"] = str(error)
    if proc_id() == 0:
        print(json.dumps(answer))
