"""DDPG, TD3 and SAC against a NumPy computation of their own, their twins and their counters."""

import importlib
import importlib.util

import numpy as np
import pytest
import scipy.stats
from helpers import OFF_POLICY, OFF_POLICY_SCRIPTS, ROOT, progress, relative_distance, start, train
from record import record

GAMMA, LR, ALPHA = 0.9, 1e-3, 0.3
TINY = dict(
    env_id="envs:Mixed-v0", hidden_sizes=(5,), batch_size=16, gamma=GAMMA, epochs=1, replay_size=200
)
TINY |= dict(steps_per_epoch=60, start_steps=30, update_after=60, num_test_episodes=1)
LOW, HIGH = np.array([-1, 0.5]), np.array([3, 0.75])  # of the actions of envs:Mixed-v0
CENTER, HALF_RANGE = (HIGH + LOW) / 2, (HIGH - LOW) / 2


def run(script, data_dir, module=None, **kwargs):
    """Train on the tiny task and record."""
    module = module or importlib.import_module(script)
    extra = {"alpha": ALPHA} if "sac" in script else {}
    args = module.Args(data_dir=str(data_dir), exp_name=script, **{**TINY, **extra, **kwargs})
    return record(script, args, module=module)


def nets(params):
    """Group arrays by network, in float64: {"pi": [w0, b0, w1, b1], "q1": ..., "targ.q1": ...}."""
    grouped = {}
    for name, x in params.items():  # torch: targ.q1.net.0.weight, TF1: q1_targ/w0
        if "center" in name or "half_range" in name or "alpha" in name:
            continue
        if "/" in name:
            net = name.split("/")[0]
            net = f"targ.{net.removesuffix('_targ')}" if net.endswith("_targ") else net
        else:
            net = name.split(".net")[0]
        grouped.setdefault(net, []).append(np.float64(x))
    return grouped


def mlp(params, x):
    for i in range(0, len(params), 2):
        x = x @ params[i].T + params[i + 1]
        x = np.maximum(x, 0) if i + 2 < len(params) else x
    return x


def q_numpy(params, o, a):
    return mlp(params, np.concatenate([o, a], 1))[:, 0]


def pi_numpy(params, o):
    return CENTER + HALF_RANGE * np.tanh(mlp(params, o))


def sac_numpy(params, o, noise):
    """Squash a Gaussian; the density by scipy and the derivative of tanh."""
    mu, log_std = np.split(mlp(params, o), 2, axis=1)
    std = np.exp(np.clip(log_std, -20, 2))
    u = mu + std * noise
    logp = scipy.stats.norm(mu, std).logpdf(u) - np.log(1 - np.tanh(u) ** 2)
    return CENTER + HALF_RANGE * np.tanh(u), logp.sum(1)


def losses(algo, batch, rng):
    """Return loss_q(nets) and loss_pi(nets) of a batch, written down from the papers."""
    o, a, r, o2, d = (np.float64(x) for x in batch)
    if algo == "sac":
        noise, noise2 = np.float64(rng.standard_normal((2, *a.shape), np.float32))
    elif algo == "td3":
        noise2 = np.float64(rng.standard_normal(a.shape, np.float32))

    def loss_q(net):
        if algo == "ddpg":
            target = q_numpy(net["targ.q1"], o2, pi_numpy(net["targ.pi"], o2))
            qs = ["q1"]
        elif algo == "td3":
            smooth = np.clip(0.2 * noise2, -0.5, 0.5) * HALF_RANGE
            a2 = np.clip(pi_numpy(net["targ.pi"], o2) + smooth, LOW, HIGH)
            qs = ["q1", "q2"]
            target = np.min([q_numpy(net[f"targ.{q}"], o2, a2) for q in qs], axis=0)
        else:
            a2, logp2 = sac_numpy(net["pi"], o2, noise2)
            qs = ["q1", "q2"]
            target = np.min([q_numpy(net[f"targ.{q}"], o2, a2) for q in qs], axis=0)
            target = target - ALPHA * logp2
        backup = np.array([r[i] if d[i] else r[i] + GAMMA * target[i] for i in range(len(r))])
        return sum(np.mean((q_numpy(net[q], o, a) - backup) ** 2) for q in qs)

    def loss_pi(net):
        if algo != "sac":
            return -np.mean(q_numpy(net["q1"], o, pi_numpy(net["pi"], o)))
        a, logp = sac_numpy(net["pi"], o, noise)
        return np.mean(ALPHA * logp - np.minimum(*(q_numpy(net[q], o, a) for q in ("q1", "q2"))))

    return loss_q, loss_pi


def numeric_gradient(f, net, names, h=1e-6):
    """Central differences of f with respect to all parameters of the named networks."""
    grad = []
    for x in (x for name in names for x in net[name]):
        for i in np.ndindex(x.shape):
            kept = x[i]
            x[i] = kept + h
            up = f(net)
            x[i] = kept - h
            down = f(net)
            x[i] = kept
            grad.append((up - down) / (2 * h))
    return np.array(grad)


def adam_first_step(grad):
    return -LR * grad / (np.abs(grad) + 1e-8)


def check_first_update(script, kept):
    """Check losses, gradients and parameters of the only update of a run."""
    algo = script.split("_")[0]
    qs = ["q1"] if algo == "ddpg" else ["q1", "q2"]
    before, after = nets(kept.params[0]), nets(kept.params[-1])
    before |= {f"targ.{k}": [x.copy() for x in v] for k, v in before.items() if "targ" not in k}
    loss_q, loss_pi = losses(algo, kept.batches[0], kept.rngs[0])
    stored = {k: v for numbers in kept.stored for k, v in numbers.items()}

    g_q = numeric_gradient(loss_q, before, qs)
    np.testing.assert_allclose(stored["LossQ"], loss_q(before), rtol=1e-5)
    assert relative_distance([kept.grads[0]], [g_q]) < 1e-4

    # The policy's loss is that of the Qs after their step.
    flat = np.concatenate([x.ravel() for q in qs for x in before[q]])
    flat_after = np.concatenate([x.ravel() for q in qs for x in after[q]])
    moved = np.abs(g_q) > 1e-4  # where Adam's first step, a sign, does not hang on rounding
    step = adam_first_step(np.float64(kept.grads[0]))
    np.testing.assert_allclose((flat_after - flat)[moved], step[moved], rtol=1e-3)
    middle = before | {q: after[q] for q in qs}
    g_pi = numeric_gradient(loss_pi, middle, ["pi"])
    np.testing.assert_allclose(stored["LossPi"], loss_pi(middle), rtol=1e-5, atol=1e-6)
    assert relative_distance([kept.grads[1]], [g_pi]) < 1e-4
    assert len(kept.grads) == 2

    # Each step moved its own network alone, and the targets followed by polyak.
    flat, flat_after = (np.concatenate([x.ravel() for x in n["pi"]]) for n in (before, after))
    moved = np.abs(g_pi) > 1e-5
    step = adam_first_step(np.float64(kept.grads[1]))
    np.testing.assert_allclose((flat_after - flat)[moved], step[moved], rtol=1e-3)
    for net in [name for name in after if name.startswith("targ.")]:
        for t, old, new in zip(after[net], before[net], after[net.removeprefix("targ.")]):
            np.testing.assert_allclose(t, 0.995 * old + 0.005 * new, rtol=1e-5, atol=1e-8)


def one_update(script, data_dir, module=None):
    """Take sixty steps and then one update of everything."""
    kwargs = dict(policy_delay=1) if "td3" in script else {}
    return run(script, data_dir, module, update_every=1, **kwargs)


@pytest.mark.parametrize("script", OFF_POLICY_SCRIPTS)
def test_first_update_against_numpy(script, tmp_path):
    kept = one_update(script, tmp_path)
    d = kept.batches[0][4]
    assert 0 < d.sum() < len(d)
    assert kept.buffer.d[:60].sum() == 6, "of twelve ends six are terminations, six time limits"
    check_first_update(script, kept)
    if script.endswith("torch"):  # each step left the gradients of the other network alone
        for net, expected in ("q", kept.grads[0]), ("pi", kept.grads[1]):
            named = kept.model.named_parameters()
            grads = [p.grad.numpy().ravel() for name, p in named if name.startswith(net)]
            np.testing.assert_array_equal(np.concatenate(grads), expected)


@pytest.mark.parametrize(
    ("script", "squeezed", "mutated"),
    [
        ("td3_torch", ".squeeze(1)", ""),
        ("sac_torch", ".squeeze(1)", ""),
        ("sac_torch", "logp.sum(1)", "logp.sum(1, keepdim=True)"),
        ("ddpg_tf1", "tf.squeeze(q, 1)", "q"),
        ("sac_tf1", "tf.reduce_sum(logp, 1)", "tf.reduce_sum(logp, 1, keepdims=True)"),
    ],
)
def test_a_column_instead_of_a_vector_is_noticed(script, squeezed, mutated, tmp_path):
    source = (ROOT / f"{script}.py").read_text()
    assert squeezed in source
    path = tmp_path / f"{script}.py"
    path.write_text(source.replace(squeezed, mutated))
    spec = importlib.util.spec_from_file_location(f"mutant_{script}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        check_first_update(script, one_update(script, tmp_path, module))


@pytest.mark.parametrize("algo", OFF_POLICY)
def test_twins_agree(algo, tmp_path):
    torch_run, tf1_run = (
        run(f"{algo}_{framework}", tmp_path, steps_per_epoch=70, update_every=10)
        for framework in ("torch", "tf1")
    )
    for x, y in zip(torch_run.batches[0], tf1_run.batches[0]):
        np.testing.assert_array_equal(x, y)  # what the buffer holds before the first update
    a, b = (nets(kept.params[0]) for kept in (torch_run, tf1_run))
    for net in ("pi", "q1"):
        for x, y in zip(a[net], b[net]):
            np.testing.assert_array_equal(x, y)

    for key, rtol in ("LossQ", 1e-3), ("LossPi", 1e-3):
        x, y = (
            [float(s[key]) for s in kept.stored if key in s][:10] for kept in (torch_run, tf1_run)
        )
        assert len(x) == 10
        np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-6)
        np.testing.assert_allclose(x[0], y[0], rtol=1e-5, atol=1e-6)
    sizes = list(dict.fromkeys(g.size for g in torch_run.grads))
    assert len(sizes) == 2
    for size in sizes:
        g, h = (next(g for g in kept.grads if g.size == size) for kept in (torch_run, tf1_run))
        assert relative_distance([g], [h]) < 1e-5


@pytest.mark.parametrize("script", [s for s in OFF_POLICY_SCRIPTS if "sac" in s])
def test_autotune_moves_alpha_by_its_gradient(script, tmp_path):
    kept = run(script, tmp_path, update_every=1, autotune=True, steps_per_epoch=61)
    alphas = [float(s["Alpha"]) for s in kept.stored if "Alpha" in s]
    logp = next(s["LogPi"] for s in kept.stored if "LogPi" in s)
    # d(loss)/d(log alpha) = -mean(log pi + target entropy), the target being minus two
    gradient = -np.mean(logp - 2)
    np.testing.assert_allclose(alphas[0], ALPHA, rtol=1e-6)
    np.testing.assert_allclose(np.log(alphas[1] / ALPHA), adam_first_step(gradient), rtol=1e-3)


@pytest.mark.parametrize("script", OFF_POLICY_SCRIPTS)
def test_targets_follow_the_closed_form(script, tmp_path):
    kept = run(script, tmp_path, update_every=20, steps_per_epoch=160, polyak=0.9)
    history = [nets(p) for p in [*kept.snapshots, kept.params[-1]]]
    assert len(history) - 1 == 120
    delay = 2 if "td3" in script else 1
    for n in (delay, 100):
        for net in [name for name in history[0] if name.startswith("targ.")]:
            main = net.removeprefix("targ.")
            for i, start_value in enumerate(history[0][main]):
                updates = range(delay, n + 1, delay)
                expected = 0.9 ** len(updates) * start_value
                for k, update in enumerate(reversed(updates)):
                    expected = expected + 0.1 * 0.9**k * history[update][main][i]
                np.testing.assert_allclose(history[n][net][i], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("script", ["td3_torch", "td3_tf1"])
def test_policy_delay_is_counted_across_bursts(script, tmp_path):
    kept = run(script, tmp_path, update_every=4, policy_delay=3, steps_per_epoch=68)
    table, policy_moved = [], []
    for before, after in zip(kept.snapshots, [*kept.snapshots[1:], kept.params[-1]]):
        before, after = nets(before), nets(after)
        assert not np.array_equal(before["q1"][0], after["q1"][0])
        policy_moved.append(not np.array_equal(before["pi"][0], after["pi"][0]))
        table.append(not np.array_equal(before["targ.q1"][0], after["targ.q1"][0]))
    # bursts of four at steps 60, 64 and 68: updates 57 to 68, of which every third moves the policy
    expected = [n % 3 == 0 for n in range(57, 69)]
    assert policy_moved == table == expected


@pytest.mark.parametrize("script", ["ddpg_torch", "sac_tf1"])
def test_counters(script, tmp_path, monkeypatch):
    module = importlib.import_module(script)
    drawn = []
    act = module.act
    monkeypatch.setattr(
        module,
        "act",
        lambda p, o, rng=None, *a: drawn.append(rng is not None) or act(p, o, rng, *a),
    )
    settings = dict(steps_per_epoch=100, epochs=2, start_steps=70, update_after=100)
    kept = run(script, tmp_path, update_every=25, **settings)
    assert sum(drawn) == 200 - 70, "exactly start_steps random actions"
    assert len(kept.batches) == 25 * 5, "bursts at steps 100, 125, 150, 175 and 200"
    assert list(progress(kept.folder)["TotalEnvInteracts"]) == [100, 200]


@pytest.mark.parametrize("script", OFF_POLICY_SCRIPTS)
def test_no_update_yet_is_nan(script, tmp_path):
    folder = train(script, tmp_path, **{**TINY, "update_after": 10**6, "epochs": 2})
    table = progress(folder)
    assert table[["LossQ", "LossPi", "AverageQ1Vals"]].isna().to_numpy().all()
    assert table["AverageTestEpRet"].notna().all()


@pytest.mark.parametrize("script", OFF_POLICY_SCRIPTS)
def test_actions_stay_inside_their_bounds_and_reach_them(script, tmp_path):
    settings = {**TINY, "steps_per_epoch": 800, "start_steps": 400, "replay_size": 800}
    kwargs = dict(alpha=10.0) if "sac" in script else dict(act_noise=1.0)  # far out and often
    kept = run(script, tmp_path, **{**settings, "update_every": 60}, **kwargs)
    for a in (kept.buffer.a[:400], kept.buffer.a[400:]):  # random ones, the policy's own
        assert (a >= LOW).all()
        assert (a <= HIGH).all()
        assert (a.min(0) < LOW + 0.1 * HALF_RANGE).all()
        assert (a.max(0) > HIGH - 0.1 * HALF_RANGE).all()


@pytest.mark.parametrize("algo", OFF_POLICY)
def test_exploration_noise_is_in_half_ranges(algo):
    module = importlib.import_module(f"{algo}_torch")
    rng = np.random.default_rng(0)
    n = 2 if algo != "sac" else 4  # SAC: mean and log of the standard deviation
    bias = np.zeros(n, np.float32)
    bias[2:] = np.log(0.1)
    params = [CENTER, HALF_RANGE, np.zeros((n, 3), np.float32), bias]
    o = np.ones(3, np.float32)
    noise = {} if algo == "sac" else {"act_noise": 0.1}
    a = np.array([module.act(params, o, rng, **noise) for _ in range(4000)])
    np.testing.assert_allclose(module.act(params, o), CENTER)
    np.testing.assert_allclose(a.std(0), 0.1 * HALF_RANGE, rtol=0.05)


@pytest.mark.parametrize("framework", ["torch", "tf1"])
def test_tanh_gaussian_density(framework):
    module = importlib.import_module(f"sac_{framework}")
    mu, std = 0.4, 0.8
    noise = np.linspace(-9, 9, 40001, dtype=np.float32)[:, None]
    a, logp = squash(module, mu, np.log(std), noise)
    y = a[:, 0]  # bounds of one: the action is in units of its half-range
    density = np.exp(logp)
    np.testing.assert_allclose(np.trapezoid(density, y), 1, atol=1e-3)
    # change of variables: P(action < y) = Phi((atanh(y) - mu) / std), differentiated numerically
    grid = np.linspace(-0.99, 0.99, 199)
    h = 1e-5
    cdf = scipy.stats.norm(mu, std).cdf
    expected = (cdf(np.arctanh(grid + h)) - cdf(np.arctanh(grid - h))) / (2 * h)
    np.testing.assert_allclose(np.interp(grid, y, density), expected, rtol=1e-2, atol=1e-4)
    assert logp.shape == (40001,)


def squash(module, mu, log_std, noise):
    """Run the policy for one observation [1, 1] with a given mean; return actions and log-probs."""
    from gymnasium.spaces import Box

    space = Box(-1, 1, (1,), np.float32)
    o = np.zeros((len(noise), 1), np.float32)
    if module.__name__.endswith("torch"):
        import torch

        pi = module.Policy(1, space, (), np.random.default_rng(0))
        pi.net[-1].bias.data = torch.tensor([mu, log_std], dtype=torch.float32)
        a, logp = pi(torch.as_tensor(o), torch.as_tensor(noise))
        return a.detach().numpy(), logp.detach().numpy()
    tf = module.tf
    tf.reset_default_graph()
    pi = module.Policy("pi", 1, space, (), np.random.default_rng(0))
    with tf.Session() as sess:
        sess.run(tf.global_variables_initializer())
        sess.run(pi.net.params[-1].assign([mu, log_std]))
        return sess.run(pi(o, noise))


@pytest.mark.parametrize("framework", ["torch", "tf1"])
@pytest.mark.parametrize("mu", [-20.0, 20.0])
def test_density_is_finite_far_out(framework, mu):
    module = importlib.import_module(f"sac_{framework}")
    noise = np.zeros((2, 1), np.float32)
    a, logp = squash(module, mu, -1.0, noise)
    np.testing.assert_allclose(np.abs(a), 1)
    # log N(0) - log(1 - tanh(20)^2), and 1 - tanh(u)^2 is 4 exp(-2|u|) out there
    expected = 1.0 - 0.5 * np.log(2 * np.pi) - (np.log(4) - 40)  # log_std is minus one
    np.testing.assert_allclose(logp, expected, rtol=1e-5)
    if framework == "torch":
        import torch
        from gymnasium.spaces import Box

        pi = module.Policy(1, Box(-1, 1, (1,), np.float32), (), np.random.default_rng(0))
        pi.net[-1].bias.data = torch.tensor([mu, -1.0])
        pi(torch.zeros(2, 1), torch.zeros(2, 1))[1].sum().backward()
        assert all(torch.isfinite(p.grad).all() for p in pi.parameters())
        assert abs(pi.net[-1].bias.grad[0] - 2 * 2 * np.sign(mu)) < 1e-3
    else:
        tf = module.tf
        tf.reset_default_graph()
        pi = module.Policy("pi", 1, _unit_box(), (), np.random.default_rng(0))
        logp = pi(noise[:1], noise[:1])[1]
        gradient = tf.gradients(logp, pi.net.params)
        with tf.Session() as sess:
            sess.run(tf.global_variables_initializer())
            sess.run(pi.net.params[-1].assign([mu, -1.0]))
            values = sess.run(gradient)
        assert all(np.isfinite(x).all() for x in values)
        assert abs(values[-1][0] - 2 * np.sign(mu)) < 1e-3


def _unit_box():
    from gymnasium.spaces import Box

    return Box(-1, 1, (1,), np.float32)


@pytest.mark.parametrize("script", OFF_POLICY_SCRIPTS)
def test_ring_buffer(script):
    module = importlib.import_module(script)
    buf = module.ReplayBuffer(2, 1, 10)
    rng = np.random.default_rng(0)
    for i in range(13):
        buf.store([i, -i], [2 * i], 3 * i, [i + 1, -i - 1], i % 2)
        o, *_ = buf.sample_batch(50, rng)
        assert set(o[:, 0]) <= set(range(max(0, i - 9), i + 1))
    o, a, r, o2, d = buf.sample_batch(20000, rng)
    i = o[:, 0]
    np.testing.assert_array_equal(a[:, 0], 2 * i)
    np.testing.assert_array_equal(r, 3 * i)
    np.testing.assert_array_equal(o2[:, 0], i + 1)
    np.testing.assert_array_equal(d, i % 2)
    counts = np.bincount(i.astype(int), minlength=13)
    assert (counts[:3] == 0).all(), "the three oldest are gone"
    assert scipy.stats.chisquare(counts[3:]).pvalue > 1e-3
    assert r.shape == d.shape == (20000,)
    assert all(x.dtype == np.float32 for x in (o, a, r, o2, d))


def test_a_large_buffer_takes_no_memory_until_it_fills():
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    module = importlib.import_module("sac_torch")
    buf = module.ReplayBuffer(1000, 10, 1_000_000)  # eight gigabytes, if touched
    buf.store(np.ones(1000), np.ones(10), 1, np.ones(1000), 0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes


@pytest.mark.parametrize("script", OFF_POLICY_SCRIPTS)
def test_two_ranks_hold_one_policy_and_their_own_transitions(script, tmp_path):
    argv = (
        "--env-id envs:Mixed-v0 --hidden-sizes 8 --epochs 1 --steps-per-epoch 400 --batch-size 16"
    )
    argv += " --start-steps 100 --update-after 100 --update-every 10 --num-test-episodes 3"
    out = tmp_path / "out"
    command = [ROOT / "tests" / "record.py", script, out, *argv.split(), "--data-dir", tmp_path]
    done = start(*command, ranks=2)
    assert done.returncode == 0, done.stderr
    with np.load(f"{out}.0.npz") as mine, np.load(f"{out}.1.npz") as other:
        assert set(mine) == set(other)
        assert sum("param" in key for key in mine) > 8
        for key in mine:
            assert np.array_equal(mine[key], other[key]) == ("batch" not in key), key


def test_test_episodes_are_the_same_on_any_number_of_ranks(tmp_path):
    argv = "ddpg_torch.py --env-id Pendulum-v1 --hidden-sizes 8 --epochs 2 --steps-per-epoch 300"
    argv += " --start-steps 600"
    tables = []
    for ranks in (1, 2):
        data_dir = tmp_path / str(ranks)
        argv_ranks = [*argv.split(), "--num-test-episodes", "5", "--data-dir", data_dir]
        done = start(*argv_ranks, ranks=ranks)
        assert done.returncode == 0, done.stderr
        (folder,) = data_dir.glob("*/*")
        tables.append(progress(folder))
    columns = [c for c in tables[0] if "Test" in c]
    np.testing.assert_allclose(tables[0][columns], tables[1][columns], rtol=1e-12)
    assert (tables[0][columns].iloc[0] == tables[0][columns].iloc[1]).all(), "fixed seeds"


def test_test_episodes_have_the_environments_own_length(tmp_path):
    settings = {**TINY, "env_id": "Pendulum-v1"}
    assert list(progress(train("ddpg_torch", tmp_path, **settings))["TestEpLen"]) == [200]
    settings |= dict(max_ep_len=70, exp_name="short")
    assert list(progress(train("ddpg_torch", tmp_path, **settings))["TestEpLen"]) == [70]


def test_an_endless_test_episode_is_cut(tmp_path):
    folder = train("ddpg_torch", tmp_path, **{**TINY, "env_id": "envs:Endless-v0"})
    assert list(progress(folder)["TestEpLen"]) == [60]


LEARNING = dict(
    env_id="Pendulum-v1", hidden_sizes=(32, 32), batch_size=32, update_after=500, start_steps=1000
)


@pytest.mark.parametrize("script", OFF_POLICY_SCRIPTS)
def test_learns_pendulum(script, tmp_path):
    folder = train(script, tmp_path, steps_per_epoch=2000, epochs=5, gamma=0.98, **LEARNING)
    table = progress(folder)
    assert table["AverageTestEpRet"].iloc[0] < -600
    assert table["AverageTestEpRet"].max() > -300
