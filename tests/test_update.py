"""Whole updates: from one checkpoint to the next as NumPy computes it, in float64."""

import importlib.util

import numpy as np
import pytest
import scipy.stats
from helpers import (
    OFF_POLICY_SCRIPTS,
    ON_POLICY,
    ON_POLICY_SCRIPTS,
    ROOT,
    TF1,
    brief,
    progress,
    relative_distance,
    train,
)
from record import checkpoint, flat, kept_model, record, recorded, state_of

from common.errors import SidespinError

LOW, HIGH = np.array([-1, 0.5]), np.array([3, 0.75])  # of the actions of envs:Mixed-v0
CENTER, HALF_RANGE = (HIGH + LOW) / 2, (HIGH - LOW) / 2
TINY = dict(env_id="envs:Mixed-v0", hidden_sizes=(5,), gamma=0.9)
# On-policy, two epochs; the second update starts from the first checkpoint.
ON_POLICY_RUN = dict(epochs=2, steps_per_epoch=60, vf_lr=0.01, train_v_iters=3, keep_models=True)
# Off-policy, one step per epoch: 21 updates, after steps 10 to 30; every model is kept.
OFF_POLICY_RUN = dict(epochs=30, steps_per_epoch=1, update_after=10, update_every=1)
OFF_POLICY_RUN |= dict(start_steps=20, batch_size=16, num_test_episodes=0, polyak=0.9)
OFF_POLICY_RUN |= dict(replay_size=200, keep_models=True)
OWN = {
    "vpg": dict(pi_lr=0.02),
    "ppo": dict(pi_lr=0.02, train_pi_iters=10, clip_ratio=0.05, target_kl=0.02),
    "trpo": dict(delta=1.0, cg_iters=5, backtrack_coeff=0.7),
    "sac": dict(alpha=0.3, autotune=True),
}


def settings(script):
    algo = script.split("_")[0]
    run = ON_POLICY_RUN if script in ON_POLICY_SCRIPTS else OFF_POLICY_RUN
    return {**TINY, **run, **OWN.get(algo, {})}


def mlp(params, x, activation):
    for i in range(0, len(params), 2):
        x = x @ params[i].T + params[i + 1]
        x = activation(x) if i + 2 < len(params) else x
    return x


def relu(x):
    return np.maximum(x, 0)


def gradient(f, nets, names, h=1e-6):
    """Return the gradient of f(nets) in the named networks' parameters, by central differences."""
    grad = []
    for x in (x for name in names for x in nets[name]):
        for i in np.ndindex(x.shape):
            kept = x[i]
            x[i] = kept + h
            up = f(nets)
            x[i] = kept - h
            down = f(nets)
            x[i] = kept
            grad.append((up - down) / (2 * h))
    return np.array(grad)


def move(nets, names, step):
    """Add the pieces of one flat vector to the parameters, in place."""
    for x in (x for name in names for x in nets[name]):
        x += step[: x.size].reshape(x.shape)
        step = step[x.size :]


class Adam:
    """Adam as in the paper, from a checkpoint's moments on."""

    def __init__(self, state, lr):
        self.t, self.lr = state.t, lr
        self.m, self.v = (x if state.t else 0.0 for x in (state.m, state.v))

    def step(self, f, nets, names):
        grad = gradient(f, nets, names)
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * grad
        self.v = 0.999 * self.v + 0.001 * grad**2
        m, v = self.m / (1 - 0.9**self.t), self.v / (1 - 0.999**self.t)
        move(nets, names, -self.lr * m / (np.sqrt(v) + 1e-8))


def units(args, batches):
    """Return mean and std of all observations and of all returns, with --norm."""
    numbers = zip(*((np.float64(batch[0]), np.float64(batch[3])) for batch in batches))
    return [(x.mean(0), x.std(0)) if args.norm else (0, 1) for x in map(np.concatenate, numbers)]


def on_policy_update(algo, args, batches, rows, nets, adam):
    """Move the networks and Adam; return what should be logged. Written down from the papers."""
    o, a, adv, ret, _ = (np.float64(x) for x in batches[-1])
    (o_mean, o_std), (ret_mean, ret_std) = units(args, batches[:-1])
    all_steps = np.arange(len(o))

    def dist(nets, b=all_steps):
        log_std, *layers = nets["pi"]
        return mlp(layers, (o[b] - o_mean) / o_std, np.tanh), log_std

    def log_prob(nets, b=all_steps):
        mu, log_std = dist(nets, b)
        return scipy.stats.norm(mu, np.exp(log_std)).logpdf(a[b]).sum(1)

    logp_old, (mu_old, log_std_old) = log_prob(nets), (x.copy() for x in dist(nets))

    def ratio(nets, b=all_steps):
        return np.exp(log_prob(nets, b) - logp_old[b])

    def loss_pi(nets, b=all_steps):
        if algo == "vpg":
            return -np.mean(log_prob(nets) * adv)
        if algo == "trpo":
            return -np.mean(ratio(nets) * adv)
        # The paper's objective: gain nothing beyond 1 + clip where adv > 0, 1 - clip where adv < 0
        limit = np.where(adv[b] > 0, 1 + args.clip_ratio, 1 - args.clip_ratio)
        return -np.mean(np.minimum(ratio(nets, b) * adv[b], limit * adv[b]))

    def value(nets, b=all_steps):
        net = mlp(nets["v"], (o[b] - o_mean) / o_std, np.tanh)[:, 0]
        return ret_mean + ret_std * net

    def loss_v(nets, b=all_steps):
        return np.mean((value(nets, b) - ret[b]) ** 2)

    def kl(nets, b=all_steps):
        if algo != "trpo":
            return np.mean(logp_old[b] - log_prob(nets, b))
        mu, log_std = dist(nets)
        variance = np.exp(2 * log_std)
        terms = (np.exp(2 * log_std_old) + (mu_old - mu) ** 2) / (2 * variance) - 0.5
        return np.mean(np.sum(log_std - log_std_old + terms, 1))

    stats = {"VVals": value(nets)}
    stats |= {"LossPi": loss_pi(nets), "LossV": loss_v(nets)}
    stats["Entropy"] = scipy.stats.norm(mu_old, np.exp(log_std_old)).entropy().sum(1).mean()
    if algo == "vpg":
        adam["pi"].step(loss_pi, nets, ["pi"])
    elif algo == "ppo":
        n, mean_kl = len(rows[-2]) // args.train_pi_iters, 0.0
        for i, b in enumerate(rows[-2]):
            mean_kl += (kl(nets, b) - mean_kl) / n
            if mean_kl > 1.5 * args.target_kl:
                break
            adam["pi"].step(lambda nets, b=b: loss_pi(nets, b), nets, ["pi"])
        outside = np.abs(ratio(nets) - 1) > args.clip_ratio
        stats |= {"StopIter": i, "ClipFrac": np.mean(outside)}
    else:
        stats["BacktrackIters"] = natural_step(args, nets, loss_pi, kl)
    stats |= {"KL": kl(nets), "DeltaLossPi": stats["LossPi"] - loss_pi(nets)}
    (o_mean, o_std), (ret_mean, ret_std) = units(args, batches)  # V is fitted in the new units
    for b in rows[-1]:
        adam["v"].step(lambda nets, b=b: loss_v(nets, b) / ret_std**2, nets, ["v"])
    stats["DeltaLossV"] = stats["LossV"] - loss_v(nets)
    return stats


def natural_step(args, nets, loss_pi, kl):
    """Take TRPO's step with an explicit Hessian; return how often it was shortened."""
    g = gradient(loss_pi, nets, ["pi"])

    def grad_kl(x):
        move(nets, ["pi"], x)
        grad = gradient(kl, nets, ["pi"], h=1e-4)
        move(nets, ["pi"], -x)
        return grad

    h = 1e-4 * np.eye(len(g))
    hessian = np.array([(grad_kl(x) - grad_kl(-x)) / 2e-4 for x in h])
    hessian += args.damping_coeff * np.eye(len(g))
    x, r, p = np.zeros_like(g), g.copy(), g.copy()  # conjugate gradient
    for _ in range(args.cg_iters):
        alpha = r @ r / (p @ hessian @ p)
        x, r, r_old = x + alpha * p, r - alpha * hessian @ p, r
        p = r + (r @ r) / (r_old @ r_old) * p
    step, loss_old = -np.sqrt(2 * args.delta / (x @ hessian @ x)) * x, loss_pi(nets)
    for j in range(args.backtrack_iters):
        shorter = args.backtrack_coeff**j * step
        move(nets, ["pi"], shorter)
        if args.algo == "npg" or (kl(nets) <= args.delta and loss_pi(nets) <= loss_old):
            return j
        move(nets, ["pi"], -shorter)
    return args.backtrack_iters


def off_policy_update(algo, args, batch, rng, nets, adam):
    """Do the same for an update of DDPG, TD3 or SAC; rng is the generator after the batch."""
    o, a, r, o2, d = (np.float64(x) for x in batch)
    qs = ["q1"] if algo == "ddpg" else ["q1", "q2"]

    def q(params, o, a):
        return mlp(params, np.concatenate([o, a], 1), relu)[:, 0]

    def pi(params, o):
        return CENTER + HALF_RANGE * np.tanh(mlp(params, o, relu))

    def squashed(params, o, noise):
        """Return actions and log-probabilities; the density by scipy and tanh's derivative."""
        mu, log_std = np.split(mlp(params, o, relu), 2, axis=1)
        std = np.exp(np.clip(log_std, -20, 2))
        u = mu + std * noise
        logp = scipy.stats.norm(mu, std).logpdf(u) - np.log(1 - np.tanh(u) ** 2)
        return CENTER + HALF_RANGE * np.tanh(u), logp.sum(1)

    if algo == "ddpg":
        a2, bonus = pi(nets["targ.pi"], o2), 0
    elif algo == "td3":
        noise2 = np.float64(rng.standard_normal(a.shape, np.float32))
        blur = np.clip(args.target_noise * noise2, -args.noise_clip, args.noise_clip) * HALF_RANGE
        a2, bonus = np.clip(pi(nets["targ.pi"], o2) + blur, LOW, HIGH), 0
    else:
        noise, noise2 = np.float64(rng.standard_normal((2, *a.shape), np.float32))
        alpha = np.exp(nets["log_alpha"][0])
        a2, logp2 = squashed(nets["pi"], o2, noise2)
        bonus = -alpha * logp2
    target = np.min([q(nets[f"targ.{name}"], o2, a2) for name in qs], axis=0) + bonus
    backup = np.array([r[i] if d[i] else r[i] + args.gamma * target[i] for i in range(len(r))])

    def loss_q(nets):
        return sum(np.mean((q(nets[name], o, a) - backup) ** 2) for name in qs)

    def loss_pi(nets):
        if algo != "sac":
            return -np.mean(q(nets["q1"], o, pi(nets["pi"], o)))
        a, logp = squashed(nets["pi"], o, noise)
        return np.mean(alpha * logp - np.minimum(*(q(nets[name], o, a) for name in qs)))

    stats = {"LossQ": loss_q(nets)}
    stats |= {f"{name.upper()}Vals": q(nets[name], o, a) for name in qs}
    adam["q"].step(loss_q, nets, qs)
    stats["LossPi"] = loss_pi(nets)  # of the Qs after their step
    if algo == "sac":
        stats |= {"Alpha": alpha, "LogPi": (logp := squashed(nets["pi"], o, noise)[1])}
    adam["pi"].step(loss_pi, nets, ["pi"])
    if algo == "sac":

        def loss_alpha(nets):
            return -nets["log_alpha"][0] * np.mean(logp - len(CENTER))

        adam["alpha"].step(loss_alpha, nets, ["log_alpha"])
    for name in [name for name in nets if name.startswith("targ.")]:
        for x_targ, x in zip(nets[name], nets[name.removeprefix("targ.")]):
            x_targ[...] = args.polyak * x_targ + (1 - args.polyak) * x
    return stats


def check_last_update(script, kept):
    """Compare a run's last update with NumPy: what it logged, its gradients and its parameters."""
    algo, args = script.split("_")[0], kept.args
    before, after = (checkpoint(kept.folder, args.epochs - 1 + i) for i in range(2))
    nets = {name: [np.array(x, np.float64) for x in xs] for name, xs in before.nets.items()}
    rates = {"pi": "pi_lr", "v": "vf_lr", "q": "q_lr"}
    lr = {k: args.lr if algo == "sac" else getattr(args, rates[k]) for k in before.adam}
    adam = {name: Adam(state, lr[name]) for name, state in before.adam.items()}
    if script in ON_POLICY_SCRIPTS:
        stats = on_policy_update(algo, args, kept.batches, kept.rows, nets, adam)
        (o_mean, o_std), (ret_mean, ret_std) = units(args, kept.batches)
        found, owners = after.units, ["pi", "v"]
        expected = {f"{net}.obs.mean": o_mean for net in owners} | {"v.returns.mean": ret_mean}
        expected |= {f"{net}.obs.std": o_std for net in owners} | {"v.returns.std": ret_std}
        for name, x in expected.items():
            np.testing.assert_allclose(found[name], x + 0 * found[name], rtol=1e-5, err_msg=name)
    else:
        stats = off_policy_update(algo, args, kept.batches[-1], kept.rngs[-1], nets, adam)
    for key, expected in stats.items():
        found = kept.logged[key][-np.size(expected) :]
        np.testing.assert_allclose(found, np.ravel(expected), rtol=2e-5, atol=1e-6, err_msg=key)
    for name, expected in adam.items():  # the moments are sums of gradients and of their squares
        found = after.adam[name]
        assert found.t == expected.t
        assert relative_distance([found.m], [expected.m]) < 2e-5, name
        assert relative_distance([found.v], [expected.v]) < 2e-5, name
    for name, expected in nets.items():
        old, new, expected = flat(before.nets[name]), flat(after.nets[name]), flat(expected)
        assert relative_distance([new - old], [expected - old]) < 1e-4, name


@pytest.mark.parametrize("script", ON_POLICY_SCRIPTS + OFF_POLICY_SCRIPTS)
def test_an_update_is_what_numpy_computes(script):
    kept = recorded(script, **settings(script))
    if script in OFF_POLICY_SCRIPTS:
        d = kept.batches[-1][4]
        assert 0 < d.sum() < len(d), "both kinds of backup"
    check_last_update(script, kept)


@pytest.mark.parametrize("script", ON_POLICY_SCRIPTS)
def test_a_normalised_update_on_minibatches_is_what_numpy_computes(script):
    kept = recorded(script, **settings(script), norm=True, batch_size=25)
    for i, rows in enumerate(kept.rows):
        of_policy = "ppo" in script and i % 2 == 0
        assert rows.shape == (2 * (10 if of_policy else 3), 25), "two full minibatches per pass"
        for one_pass in rows.reshape(-1, 50):
            assert len(set(one_pass)) == 50, "no step twice in a pass"
        assert len(set(map(tuple, rows))) == len(rows)
    check_last_update(script, kept)


def mutant(script, old, new, folder):
    """Import a changed copy of a script."""
    source = (ROOT / f"{script}.py").read_text()
    assert old in source
    path = folder / f"{script}.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(f"mutant_{script}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("script", "vector", "column"),
    [
        ("vpg_torch", "np.log(2 * np.pi)).sum(1)", "np.log(2 * np.pi)).sum(1, keepdim=True)"),
        ("vpg_tf1", "np.log(2 * np.pi), 1)", "np.log(2 * np.pi), 1, keepdims=True)"),
        ("td3_torch", ".squeeze(1)", ""),
        ("sac_torch", ".squeeze(1)", ""),
        ("sac_torch", "logp.sum(1)", "logp.sum(1, keepdim=True)"),
        ("ddpg_tf1", "tf.squeeze(q, 1)", "q"),
        ("sac_tf1", "tf.reduce_sum(logp, 1)", "tf.reduce_sum(logp, 1, keepdims=True)"),
    ],
)
def test_a_column_instead_of_a_vector_is_noticed(script, vector, column, tmp_path):
    module = mutant(script, vector, column, tmp_path)
    short = {**settings(script), "keep_models": False}
    short["epochs"] = 2 if script in ON_POLICY_SCRIPTS else 12
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        kept = record(script, tmp_path, module=module, plain=script in TF1, **short)
        check_last_update(script, kept)


@pytest.mark.parametrize("script", TF1)
def test_xla_computes_what_the_plain_graph_computes(script):
    kept = recorded(script, **settings(script))
    epochs = 1 if script in ON_POLICY_SCRIPTS else 12
    plain = recorded(script, plain=True, **{**settings(script), "epochs": epochs})
    for key, x in plain.logged.items():
        np.testing.assert_allclose(kept.logged[key][: len(x)], x, rtol=1e-5, atol=1e-6)
    x, y = (kept_model(run.folder, epochs - 1) for run in (kept, plain))
    for net in x:
        assert relative_distance(x[net], y[net]) < 1e-5


@pytest.mark.parametrize("script", OFF_POLICY_SCRIPTS)
def test_targets_follow_the_closed_form(script):
    kept = recorded(script, **settings(script))
    delay = 2 if "td3" in script else 1
    updates = [n for n in range(10, 31) if n % delay == 0]
    start = kept_model(kept.folder, 8)  # after nine steps, before the first update
    history = [kept_model(kept.folder, n - 1) for n in updates]
    found = checkpoint(kept.folder, 30).nets
    for net in ("q1",) if "sac" in script else ("pi", "q1"):
        expected = 0.9 ** len(updates) * flat(start[net])
        for k, nets in enumerate(reversed(history)):
            expected += 0.1 * 0.9**k * flat(nets[net])
        np.testing.assert_allclose(flat(found[f"targ.{net}"]), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("script", ["sac_torch", "sac_tf1"])
def test_autotune_moves_alpha_by_its_gradient(script):
    kept = recorded(script, **settings(script))
    alphas, logp = kept.logged["Alpha"], kept.logged["LogPi"][:16]
    # d(loss_alpha) / d(log alpha) = -mean(log pi - |A|), and Adam's first step is a sign
    gradient = -np.mean(logp - 2)
    np.testing.assert_allclose(alphas[0], 0.3, rtol=1e-6)
    np.testing.assert_allclose(np.log(alphas[1] / 0.3), -1e-3 * np.sign(gradient), rtol=1e-3)


@pytest.mark.parametrize("script", ["sac_torch", "sac_tf1"])
def test_an_alpha_of_zero_is_no_reward_for_entropy(script, tmp_path, recwarn):
    table = progress(train(script, tmp_path, **brief(script, alpha=0.0)))
    assert (table["Alpha"] == 0).all()
    assert np.isfinite(table["LossQ"]).all()
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


@pytest.mark.parametrize("script", ["td3_torch", "td3_tf1"])
def test_policy_delay_is_counted_across_bursts(script):
    run = {**TINY, "epochs": 1, "steps_per_epoch": 68, "start_steps": 68, "update_after": 60}
    run |= dict(update_every=4, policy_delay=3, batch_size=16, num_test_episodes=0)
    twins = [recorded(twin, plain=twin in TF1, **run) for twin in (script, "td3_torch")]
    # Bursts of four after steps 60, 64 and 68: updates 57 to 68, every third moves the policy
    expected = [n % 3 == 0 for n in range(57, 69)]
    calls = [key for numbers in twins[1].calls for key in numbers if key in ("LossQ", "LossPi")]
    moved = [after == "LossPi" for q, after in zip(calls, [*calls[1:], ""]) if q == "LossQ"]
    assert moved == expected
    x, y = (kept.logged["LossPi"] for kept in twins)
    np.testing.assert_allclose(x, y, rtol=1e-4)
    adam = checkpoint(twins[0].folder, 1).adam
    assert (adam["q"].t, adam["pi"].t) == (12, sum(expected))


@pytest.mark.parametrize("script", ["ppo_torch", "ppo_tf1"])
def test_ppo_stops_early(script):
    kept = recorded(script, **settings(script))
    twin = recorded("ppo_torch", **settings("ppo_torch"))
    stops = kept.logged["StopIter"]
    assert len(stops) == 2
    assert all(0 < stop < kept.args.train_pi_iters - 1 for stop in stops)
    assert all(kept.logged["KL"] > 1.5 * kept.args.target_kl)
    assert checkpoint(kept.folder, 2).adam["pi"].t == sum(stops), "no step after the stop"
    np.testing.assert_array_equal(stops, twin.logged["StopIter"])


@pytest.mark.parametrize("script", ["trpo_torch", "trpo_tf1"])
def test_the_line_search_keeps_the_kl_limit(script):
    kept = recorded(script, **settings(script))
    assert all(kept.logged["KL"] <= kept.args.delta)
    assert all(kept.logged["DeltaLossPi"] >= 0)
    assert all(kept.logged["BacktrackIters"] > 0), "or there was nothing to search for"
    npg = recorded(script, plain=script in TF1, algo="npg", **settings(script))
    assert all(npg.logged["KL"] > kept.args.delta)
    assert all(npg.logged["BacktrackIters"] == 0)


def unmoved(script, **more):
    """Return a run whose only update leaves all networks as they were.

    TRPO has no learning rate. Its full step breaks the limit, and the line search tries no other.
    """
    own = dict(pi_lr=0.0, plain=script in TF1)
    if "trpo" in script:
        own = dict(delta=1.0, cg_iters=5, backtrack_coeff=1.0, backtrack_iters=3)
    return recorded(script, epochs=1, steps_per_epoch=60, train_v_iters=0, **TINY, **own, **more)


def moved(script, net):
    found, start = (checkpoint(unmoved(x).folder, 1).nets[net] for x in (script, "vpg_torch"))
    return not np.array_equal(flat(found), flat(start))


@pytest.mark.parametrize("script", ON_POLICY_SCRIPTS)
def test_no_iterations_leave_the_value_function_alone(script):
    kept = unmoved(script)
    assert not moved(script, "v")
    assert checkpoint(kept.folder, 1).adam["v"].t == 0
    assert abs(kept.logged["DeltaLossV"].item()) < 1e-6 * kept.logged["LossV"].item()


@pytest.mark.parametrize("script", ON_POLICY_SCRIPTS)
def test_no_iterations_in_minibatches(script, tmp_path):
    settings = dict(epochs=1, steps_per_epoch=60, batch_size=20, train_v_iters=0, **TINY)
    table = progress(train(script, tmp_path, xla=True, **settings))
    assert abs(table["DeltaLossV"].item()) < 1e-6 * table["LossV"].item()


@pytest.mark.parametrize("script", ON_POLICY_SCRIPTS)
def test_a_normalised_value_function_learns_from_tiny_rewards_as_from_others(script):
    """Its weights take the same steps: the size of the rewards is in its units alone."""
    norm = {**settings(script), "norm": True, "epochs": 1}
    nets = []
    for env_id in ("envs:Mixed-v0", "envs:TinyRewards-v0"):
        nets.append(checkpoint(recorded(script, **{**norm, "env_id": env_id}).folder, 1).nets["v"])
    assert relative_distance(*nets) < 1e-5
    start = checkpoint(unmoved(script).folder, 1).nets["v"]
    assert relative_distance(nets[0], start) > 0.01


@pytest.mark.parametrize("script", ON_POLICY_SCRIPTS)
def test_weights_start_alike_and_as_torch_would_draw_them(script):
    assert not moved(script, "pi")
    assert not moved(script, "v")
    log_std, *pi = checkpoint(unmoved(script).folder, 1).nets["pi"]
    v = checkpoint(unmoved(script).folder, 1).nets["v"]
    np.testing.assert_array_equal(log_std, np.float32(-0.5))
    for w, b in zip((pi + v)[::2], (pi + v)[1::2], strict=True):
        bound = w.shape[1] ** -0.5
        assert 0.5 * bound < np.abs(w).max() <= bound
        assert np.abs(b).max() <= bound


@pytest.mark.parametrize("script", ON_POLICY_SCRIPTS)
def test_orthogonal_weights(script):
    nets = checkpoint(unmoved(script, ortho=True).folder, 1).nets
    twin = checkpoint(unmoved("vpg_torch", ortho=True).folder, 1).nets
    assert flat(nets["pi"] + nets["v"]).tolist() == flat(twin["pi"] + twin["v"]).tolist()
    for (w1, b1, w2, b2), last_gain in (nets["pi"][1:], 0.01), (nets["v"], 1.0):
        assert not b1.any()
        assert not b2.any()
        for w, gain in (w1, np.sqrt(2)), (w2, last_gain):
            w = w if w.shape[0] < w.shape[1] else w.T
            np.testing.assert_allclose(w @ w.T, gain**2 * np.eye(len(w)), atol=1e-6 * gain**2)


@pytest.mark.parametrize("script", ["trpo_torch", "trpo_tf1"])
def test_a_line_search_that_fails_restores_the_policy(script):
    kept = unmoved(script)
    assert not moved(script, "pi")
    assert kept.logged["BacktrackIters"].item() == kept.args.backtrack_iters
    assert kept.logged["KL"].item() == kept.logged["DeltaLossPi"].item() == 0


@pytest.mark.parametrize("script", ON_POLICY_SCRIPTS)
def test_decay_halves_the_second_of_two_steps_and_fixes_the_number_of_epochs(script, tmp_path):
    once = {**settings(script), "train_v_iters": 1}
    once |= dict(train_pi_iters=1) if "ppo" in script else {}
    nets = ["v"] if "trpo" in script else ["pi", "v"]
    steps = {}
    for decay in (False, True):
        folder = train(script, tmp_path / str(decay), decay=decay, **once)
        before, after = (checkpoint(folder, epoch).nets for epoch in (1, 2))
        steps[decay] = [flat(after[net]) - flat(before[net]) for net in nets]
    for whole, half in zip(steps[False], steps[True], strict=True):
        assert relative_distance([2 * half], [whole]) < 1e-4
    with pytest.raises(SidespinError, match=r"epochs 3 \(was 2, which decay fixes\)"):
        train(script, tmp_path / "True", decay=True, resume=True, **{**once, "epochs": 3})


@pytest.mark.parametrize("algo", ON_POLICY)
def test_decay_is_linear_and_the_same_in_both_frameworks(algo, tmp_path):
    """In the last of five epochs, the rates are a fifth of what they were; after it, 0."""
    one = {**settings(f"{algo}_torch"), "epochs": 5, "vf_lr": 1e-3, "decay": True}
    one |= {} if algo == "trpo" else dict(pi_lr=1e-3)
    folders = [train(f"{algo}_{framework}", tmp_path, **one) for framework in ("torch", "tf1")]
    for epoch, share in (4, 1 / 5), (5, 0):
        parts = state_of(folders[0], epoch)
        groups = [x for part in parts for x in part.get("param_groups", [])]
        np.testing.assert_allclose([x["lr"] for x in groups], share * 1e-3, rtol=1e-12)
        assert len(groups) == (1 if algo == "trpo" else 2)
        assert state_of(folders[1], epoch)["decayed"] == epoch
    torch_nets, tf1_nets = (checkpoint(folder, 5).nets for folder in folders)
    for net, params in torch_nets.items():
        assert relative_distance(tf1_nets[net], params) < 1e-3
