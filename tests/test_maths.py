"""The maths of the scripts against computations that share nothing with them."""

import importlib

import numpy as np
import pytest
import scipy.stats
from gymnasium.spaces import Box, Discrete
from helpers import OFF_POLICY, ON_POLICY, ON_POLICY_SCRIPTS, TF1

from common.errors import SidespinError
from common.weights import orthogonal

GAMMA, LAM = 0.9, 0.7
UNIT_BOX = Box(-1, 1, (1,), np.float32)


@pytest.fixture(params=ON_POLICY_SCRIPTS)
def module(request):
    return importlib.import_module(request.param)


def evaluate(module, function, *arrays):
    """Call function on the arrays as the script's framework would; return NumPy arrays."""
    if module.__name__ in TF1:
        tf = module.tf
        with tf.Graph().as_default(), tf.Session() as sess:
            out = function(*(tf.constant(x) for x in arrays))
            sess.run(tf.global_variables_initializer())
            return sess.run(out)
    import torch

    out = function(*(torch.as_tensor(x) for x in arrays))
    return [x.detach().numpy() for x in out] if isinstance(out, tuple) else out.detach().numpy()


def brute_force(r, v, last_v, vf_lam):
    """Advantages and returns of one path by the definitions: sums over all later steps.

    A lambda-return is a mean of n-step returns, with weights (1 - lam) lam^(n - 1); the longest one
    gets what is left. With lam = 1 it is the reward-to-go.
    """
    n = len(r)
    v = [*v, last_v]
    delta = [r[t] + GAMMA * v[t + 1] - v[t] for t in range(n)]
    adv = [sum((GAMMA * LAM) ** k * delta[t + k] for k in range(n - t)) for t in range(n)]
    ret = []
    for t in range(n):
        n_step = [
            sum(GAMMA**k * r[t + k] for k in range(m)) + GAMMA**m * v[t + m]
            for m in range(1, n - t + 1)
        ]
        weights = [(1 - vf_lam) * vf_lam**k for k in range(n - t - 1)] + [vf_lam ** (n - t - 1)]
        ret.append(np.dot(weights, n_step))
    return adv, ret


@pytest.mark.parametrize("vf_lam", [1.0, 0.6, 0.0])
def test_gae_and_returns_by_definition(module, vf_lam):
    rng = np.random.default_rng(0)
    o = rng.standard_normal((12, 3)).astype(np.float32)
    last_o = rng.standard_normal((3, 3)).astype(np.float32)
    r = rng.standard_normal(12).astype(np.float32)

    def value(o):
        return o.sum(1) * 3 + 5

    buf = module.GAEBuffer(3, Discrete(2), 12, GAMMA, LAM, vf_lam)
    ends = {4: True, 9: False, 12: False}  # terminated, truncated, cut by the end of the epoch
    for t in range(12):
        buf.store(o[t], t % 2, r[t])
        if t + 1 in ends:
            buf.finish_path(last_o[list(ends).index(t + 1)], ends[t + 1])
    _, a, adv, ret, values = buf.get(value)

    last_v = value(last_o)
    pieces = [
        brute_force(r[:4], value(o[:4]), 0.0, vf_lam),
        brute_force(r[4:9], value(o[4:9]), last_v[1], vf_lam),
        brute_force(r[9:], value(o[9:]), last_v[2], vf_lam),
    ]
    expected_adv = np.concatenate([adv for adv, _ in pieces])
    expected_adv = (expected_adv - expected_adv.mean()) / expected_adv.std()
    np.testing.assert_allclose(adv, expected_adv, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(ret, np.concatenate([ret for _, ret in pieces]), rtol=1e-5)
    np.testing.assert_allclose(values, value(o))
    np.testing.assert_array_equal(a, np.arange(12) % 2)
    assert adv.shape == ret.shape == values.shape == (12,)
    assert adv.dtype == ret.dtype == np.float32

    # The same steps with any other bootstrap give something else: the test can fail.
    for wrong in ([True, True, False], [False, False, False], [True, False, True]):
        for t in range(12):
            buf.store(o[t], t % 2, r[t])
            if t + 1 in ends:
                i = list(ends).index(t + 1)
                buf.finish_path(last_o[i], wrong[i])
        _, _, adv, ret, _ = buf.get(value)
        assert np.abs(adv - expected_adv).max() > 0.1


@pytest.mark.parametrize("amd", [False, True])
def test_tanh_and_its_derivatives(amd, monkeypatch):
    import torch

    from common import torch_utils
    from common.torch_utils import Tanh

    monkeypatch.setattr(torch_utils, "AMD", amd)
    x = torch.tensor([-1e30, -100.0, -3.0, -0.5, -1e-4, 0.0, 1e-4, 0.5, 3.0, 100.0, 1e30])
    x.requires_grad_()
    y = Tanh()(x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    tanh = np.tanh(x.detach().double().numpy())
    for found, true in (y, tanh), (first, 1 - tanh**2), (second, -2 * tanh * (1 - tanh**2)):
        np.testing.assert_allclose(found.detach(), true, atol=1e-6)


def test_layers_that_orthogonal_weights_do_not_fit_are_refused():
    from ppo_tf1 import init_orthogonal, tf

    with tf.Graph().as_default(), tf.Session() as sess:
        without_biases = [tf.get_variable(f"w{i}", [3, 3]) for i in range(2)]
        with pytest.raises(SidespinError, match="ortho needs layers with one weight matrix and"):
            init_orthogonal(without_biases, 1.0, np.random.default_rng(0), sess)


def test_orthogonal_matrices_are_equally_likely():
    rng = np.random.default_rng(0)
    corners = [orthogonal((4, 6), 1.0, rng)[0, 0] for _ in range(400)]
    assert abs(np.mean(corners)) < 4 * np.std(corners) / 20, "neither sign is more likely"


@pytest.mark.parametrize("bias", [True, False])
def test_linear_by_onednn_and_its_derivatives(bias, monkeypatch):
    import torch

    from common import torch_utils

    monkeypatch.setattr(torch_utils, "ONEDNN", True)
    product, products = torch_utils._times_transposed, []
    counted = lambda *xs: products.append(xs) or product(*xs)  # noqa: E731
    monkeypatch.setattr(torch_utils, "_times_transposed", counted)
    plain, fast = (kind(256, 256, bias) for kind in (torch.nn.Linear, torch_utils.Linear))
    fast.load_state_dict(plain.state_dict())
    x = torch.randn(128, 256, requires_grad=True)
    # Gradients, second derivatives, no weight gradients, torch.func, and shapes it leaves alone
    results = []
    for net in plain, fast:
        inputs = [x, *net.parameters()]
        loss = net(x).tanh().sum()
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        second = torch.autograd.grad((first[0] ** 2).sum(), inputs[:2])
        net(x).square().sum().backward()
        all_grads, x.grad = [p.grad for p in inputs], None
        net.zero_grad()
        products.clear()
        net(x).square().sum().backward(inputs=[x])
        assert len(products) == (2 if net is fast else 0), "no product for the weights"
        weights = dict(net.named_parameters())
        by_func = torch.func.grad(lambda p, f: torch.func.functional_call(f, p, x).square().sum())
        with torch.no_grad():
            others = [net(x), net(x[None]), net(x[0])]
        results.append([loss, *first, *second, *all_grads, x.grad, *by_func(weights, net).values()])
        results[-1] += others
        x.grad = None
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    assert "_Linear" in type(fast(x).grad_fn).__name__  # or this test would compare nothing


def test_constant_advantages_do_not_divide_by_zero(module):
    buf = module.GAEBuffer(1, Discrete(2), 4, GAMMA, LAM, 1.0)
    for _ in range(4):
        buf.store(np.zeros(1), 0, 0.0)
    buf.finish_path(np.zeros(1), False)
    assert np.all(buf.get(lambda o: np.zeros(len(o)))[2] == 0)


@pytest.mark.parametrize("shape", [(3,), (6, 3)], ids=["as shipped", "std depends on o"])
def test_gaussian(module, shape):
    rng = np.random.default_rng(1)
    mu, a = rng.standard_normal((2, 6, 3)).astype(np.float32)
    log_std = rng.standard_normal(shape).astype(np.float32)
    pi = module.GaussianPolicy
    logp = evaluate(module, lambda mu, s, a: pi.logp(None, (mu, s), a), mu, log_std, a)
    entropy = evaluate(module, lambda mu, s: pi.entropy(None, (mu, s)), mu, log_std)
    normal = scipy.stats.norm(mu, np.exp(log_std))
    np.testing.assert_allclose(logp, normal.logpdf(a).sum(1), rtol=1e-5)
    np.testing.assert_allclose(entropy, normal.entropy().sum(1), rtol=1e-5)
    assert logp.shape == entropy.shape == (6,)


def test_categorical(module):
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((6, 4)).astype(np.float32) * 3
    a = rng.integers(4, size=6)
    pi = module.CategoricalPolicy
    logp = evaluate(module, lambda x, a: pi.logp(None, (x,), a), logits, a)
    entropy = evaluate(module, lambda x: pi.entropy(None, (x,)), logits)
    p = np.exp(logits.astype(float)) / np.exp(logits.astype(float)).sum(1, keepdims=True)
    np.testing.assert_allclose(logp, np.log(p[range(6), a]), rtol=1e-5)
    np.testing.assert_allclose(entropy, scipy.stats.entropy(p, axis=1), rtol=1e-5)
    assert logp.shape == entropy.shape == (6,)


def normalised(framework, batches, o):
    """Update a Normalizer with each batch; return mean, std and what becomes of o after each."""
    if framework == "torch":
        import torch

        from common.torch_utils import Normalizer

        norm, kept = Normalizer(*o.shape), []
        for batch in batches:
            norm.update(torch.as_tensor(batch))
            kept.append([x.numpy().copy() for x in (norm.mean, norm.std, norm(torch.as_tensor(o)))])
        return kept
    import tensorflow.compat.v1 as tf

    from common.tf1_utils import Normalizer, compiled, make_session

    with tf.Graph().as_default():
        norm = Normalizer("obs", *o.shape)
        update = [compiled(lambda x: norm.update(x) or norm.batches)(x) for x in batches]
        with make_session() as sess:
            return [(sess.run(x), sess.run([norm.mean, norm.std, norm(o)]))[1] for x in update]


@pytest.mark.parametrize("framework", ["torch", "tf1"])
def test_running_std_of_returns_far_from_zero(framework):
    """The mean must not be rounded to float32 before it is subtracted."""
    batch = np.float32([1e6 - 2, 1e6 + 2 + 1 / 16])  # their mean is halfway between two floats
    ((_, std, _),) = normalised(framework, [batch], batch[0])
    np.testing.assert_allclose(std, batch.astype(float).std(), rtol=1e-6)


@pytest.mark.parametrize("framework", ["torch", "tf1"])
def test_running_mean_and_std(framework):
    """Some numbers never change, or only later: they must not come out as huge when they do."""
    rng = np.random.default_rng(3)
    batches = rng.standard_normal((3, 8, 6)).astype(np.float32)
    batches[:, :, 1] = 0
    batches[:, :, 2] = 123.4
    batches[:2, :, 3] = 0
    batches[:1, :, 4] = -1000
    batches[:2, :, 5] = np.tile([-1, 1], 4)  # has a std of exactly 1
    o = np.array([1.0, 1.0, 124.4, 1.0, -999.0, 1.0], np.float32)
    for n, (mean, std, out) in enumerate(normalised(framework, batches, o), 1):
        seen = np.concatenate(batches[:n]).astype(float)
        changes = np.ptp(seen, 0) > 0
        np.testing.assert_allclose(mean, seen.mean(0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(std[changes], seen.std(0)[changes], rtol=1e-5)
        np.testing.assert_allclose(out, (o - mean) / std, rtol=1e-6)
        assert np.abs(out[~changes]).max() < 1.001, "in its own units until it changes"
        assert changes.sum() == [2, 3, 4][n - 1]


@pytest.mark.parametrize("script", ["trpo_torch", "trpo_tf1"])
def test_kl_of_old_and_new(script):
    module = importlib.import_module(script)
    rng = np.random.default_rng(3)
    logits, logits_old = rng.standard_normal((2, 5, 4)).astype(np.float32)
    kl = evaluate(
        module,
        lambda old, new: module.CategoricalPolicy.kl(None, (old,), (new,)),
        logits_old,
        logits,
    )
    p, q = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (logits_old, logits))
    np.testing.assert_allclose(kl, (p * np.log(p / q)).sum(1), rtol=1e-4)

    mu, mu_old = rng.standard_normal((2, 5, 1)).astype(np.float32)
    log_std, log_std_old = np.array([0.4], np.float32), np.array([-0.3], np.float32)
    kl = evaluate(
        module,
        lambda *x: module.GaussianPolicy.kl(None, x[:2], x[2:]),
        *(mu_old, log_std_old, mu, log_std),
    )
    old, new = scipy.stats.norm(mu_old, np.exp(log_std_old)), scipy.stats.norm(mu, np.exp(log_std))
    x = np.linspace(-12, 12, 20001)
    integrand = old.pdf(x) * (old.logpdf(x) - new.logpdf(x))
    np.testing.assert_allclose(kl, np.trapezoid(integrand, x), rtol=1e-4)
    assert kl.shape == (5,)


def explicit_hessian(f, x, h=1e-3):
    """Second differences of a function of a vector, in float64."""
    n = len(x)
    steps = np.eye(n) * h
    return np.array(
        [
            [
                (f(x + s + t) - f(x + s - t) - f(x - s + t) + f(x - s - t)) / (4 * h * h)
                for s in steps
            ]
            for t in steps
        ]
    )


def numpy_policy_kl(flat, flat_old, o, shapes):
    """Mean KL(old || new) of two linear Gaussian policies, in NumPy."""
    log_std, w, b = np.split(flat, np.cumsum([np.prod(s) for s in shapes])[:-1])
    log_std_old, w_old, b_old = np.split(flat_old, np.cumsum([np.prod(s) for s in shapes])[:-1])
    mu, mu_old = o @ w.reshape(shapes[1]).T + b, o @ w_old.reshape(shapes[1]).T + b_old
    variance_ratio = np.exp(2 * (log_std_old - log_std))
    kl = 0.5 * (variance_ratio + ((mu - mu_old) / np.exp(log_std)) ** 2 - 1) + log_std - log_std_old
    return kl.sum(1).mean()


@pytest.mark.parametrize("script", ["trpo_torch", "trpo_tf1"])
def test_hessian_vector_product_against_the_explicit_hessian(script):
    module = importlib.import_module(script)
    rng = np.random.default_rng(4)
    o = rng.standard_normal((7, 3)).astype(np.float32)
    x = rng.standard_normal(2 + 6 + 2).astype(np.float32)
    shapes = [(2,), (2, 3), (2,)]

    def policy_and_product(o, x):
        pi = module.GaussianPolicy(3, 2, (), np.random.default_rng(0))
        if script == "trpo_torch":
            params = list(pi.parameters())
            dist_old = [d.detach().clone() for d in pi.dist(o)]
            grad = module.flat_grad(pi.kl(dist_old, pi.dist(o)).mean(), params, create_graph=True)
            return (*params, module.flat_grad(grad @ x, params))
        tf, dist_old = module.tf, [module.tf.stop_gradient(d) for d in pi.dist(o)]
        grad = module.flat_grad(tf.reduce_mean(pi.kl(dist_old, pi.dist(o))), pi.params)
        return (*pi.params, module.flat_grad(module.dot(grad, x), pi.params))

    *params, product = evaluate(module, policy_and_product, o, x)
    flat = np.concatenate([p.ravel() for p in params]).astype(float)
    hessian = explicit_hessian(lambda new: numpy_policy_kl(new, flat, o, shapes), flat)
    np.testing.assert_allclose(product, hessian @ x, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("script", ["trpo_torch", "trpo_tf1"])
def test_conjugate_gradient_solves(script):
    module = importlib.import_module(script)
    rng = np.random.default_rng(5)
    m = rng.standard_normal((10, 10))
    h, b = m @ m.T + 0.1 * np.eye(10), rng.standard_normal(10)

    def solve(b):
        if script == "trpo_torch":
            return module.conjugate_gradient(lambda p: h @ p, b, 30)
        tf = module.tf

        @module.compiled
        def solve_in_a_graph(b):
            return module.conjugate_gradient(lambda p: tf.linalg.matvec(h, p), b, 30)

        return evaluate(module, solve_in_a_graph, b)

    np.testing.assert_allclose(solve(b), np.linalg.solve(h, b), rtol=1e-4)
    assert np.all(solve(np.zeros(10)) == 0)


@pytest.mark.parametrize("algo", ON_POLICY)
def test_sampled_actions_follow_the_policy(algo):
    module = importlib.import_module(f"{algo}_torch")
    rng = np.random.default_rng(6)
    o, zeros = np.zeros(1, np.float32), np.zeros((3, 1), np.float32)
    act, logits = module.CategoricalPolicy.act, np.array([0.0, 1.0, 2.0], np.float32)
    as_it_is = [
        np.zeros(1, np.float32),
        np.ones(1, np.float32),
        0,
    ]  # observations: their mean, std and number of batches
    params = [*as_it_is, zeros, logits]
    counts = np.bincount([act(params, o, rng) for _ in range(20000)])
    p = np.exp(logits.astype(float)) / np.exp(logits.astype(float)).sum()
    assert scipy.stats.chisquare(counts, 20000 * p).pvalue > 1e-3
    assert act(params, o) == 2

    mu, log_std = np.array([1.0, -2.0], np.float32), np.array([0.5, -1.0], np.float32)
    act, params = module.GaussianPolicy.act, [log_std, *as_it_is, zeros[:2], mu]
    a = np.array([act(params, o, rng) for _ in range(20000)])
    z = (a - mu) / np.exp(log_std)
    assert scipy.stats.kstest(z.ravel(), "norm").pvalue > 1e-3
    assert a.dtype == np.float32
    np.testing.assert_array_equal(act(params, o), mu)


@pytest.mark.parametrize("algo", OFF_POLICY)
def test_exploration_noise_is_in_half_ranges(algo):
    act = importlib.import_module(f"{algo}_torch").Policy.act
    rng = np.random.default_rng(0)
    center, half_range = np.array([1.0, 0.625]), np.array([2.0, 0.125])
    n = 2 if algo != "sac" else 4  # SAC: mean and log of the standard deviation
    bias = np.zeros(n, np.float32)
    bias[2:] = np.log(0.1)
    params = [center, half_range, np.zeros((n, 3), np.float32), bias]
    o = np.ones(3, np.float32)
    noise = {} if algo == "sac" else {"act_noise": 0.1}
    a = np.array([act(params, o, rng, **noise) for _ in range(4000)])
    np.testing.assert_allclose(act(params, o), center)
    np.testing.assert_allclose(a.std(0), 0.1 * half_range, rtol=0.05)


def squash(module, mu, log_std, noise):
    """Return SAC's actions and log-probabilities for a mean and std, and logp's gradient in both.

    The policy has one action, between -1 and 1, and no hidden layers.
    """
    o, rng = np.zeros((len(noise), 1), np.float32), np.random.default_rng(0)
    if module.__name__ == "sac_torch":
        import torch

        pi = module.Policy(1, UNIT_BOX, (), rng)
        pi.net[-1].bias.data = torch.tensor([mu, log_std], dtype=torch.float32)
        a, logp = pi(torch.as_tensor(o), torch.as_tensor(noise))
        grads = torch.autograd.grad(logp.sum(), list(pi.parameters()))
        return a.detach().numpy(), logp.detach().numpy(), [g.numpy() for g in grads]
    tf = module.tf
    with tf.Graph().as_default(), tf.Session() as sess:
        pi = module.Policy("pi", 1, UNIT_BOX, (), rng)
        a, logp = pi(o, noise)
        grads = tf.gradients(logp, pi.net.params)
        sess.run(tf.global_variables_initializer())
        sess.run(pi.net.params[-1].assign([mu, log_std]))
        return sess.run((a, logp, grads))


@pytest.mark.parametrize("script", ["sac_torch", "sac_tf1"])
def test_tanh_gaussian_density(script):
    module = importlib.import_module(script)
    mu, std = 0.4, 0.8
    noise = np.linspace(-9, 9, 40001, dtype=np.float32)[:, None]
    a, logp, _ = squash(module, mu, np.log(std), noise)
    y = a[:, 0]  # bounds of one: the action is in units of its half-range
    density = np.exp(logp)
    np.testing.assert_allclose(np.trapezoid(density, y), 1, atol=1e-3)
    # Change of variables: P(action < y) = Phi((atanh(y) - mu) / std), differentiated numerically
    grid = np.linspace(-0.99, 0.99, 199)
    h = 1e-5
    cdf = scipy.stats.norm(mu, std).cdf
    expected = (cdf(np.arctanh(grid + h)) - cdf(np.arctanh(grid - h))) / (2 * h)
    np.testing.assert_allclose(np.interp(grid, y, density), expected, rtol=1e-2, atol=1e-4)
    assert logp.shape == (40001,)


@pytest.mark.parametrize("script", ["sac_torch", "sac_tf1"])
@pytest.mark.parametrize("mu", [-20.0, 20.0])
def test_density_and_its_gradient_are_finite_far_out(script, mu):
    module = importlib.import_module(script)
    a, logp, grads = squash(module, mu, -1.0, np.zeros((2, 1), np.float32))
    np.testing.assert_allclose(np.abs(a), 1)
    # log N(0) - log(1 - tanh(20)^2), and 1 - tanh(u)^2 is 4 exp(-2|u|) out there
    expected = 1.0 - 0.5 * np.log(2 * np.pi) - (np.log(4) - 40)  # log_std is minus one
    np.testing.assert_allclose(logp, expected, rtol=1e-5)
    assert all(np.isfinite(g).all() for g in grads)
    assert abs(grads[-1][0] - 2 * 2 * np.sign(mu)) < 1e-3  # 2 sign(mu) for each of two actions


def test_adam_in_tf1_is_torchs_adam():
    import tensorflow.compat.v1 as tf
    import torch

    from common.tf1_utils import MpiAdamOptimizer, compiled

    start = np.linspace(-2, 3, 6).astype(np.float32).reshape(2, 3)
    p = torch.nn.Parameter(torch.as_tensor(start.copy()))
    optimizer = torch.optim.Adam([p], 0.01)
    for _ in range(200):
        optimizer.zero_grad()
        (torch.sin(p) + 1e-9 * p).sum().backward()
        optimizer.step()

    with tf.Graph().as_default(), tf.Session() as sess:
        q = tf.get_variable("q", initializer=start)
        optimizer = MpiAdamOptimizer([q], 0.01)

        @compiled
        def minimize():
            for _ in tf.range(200):
                optimizer.minimize(tf.reduce_sum(tf.sin(q) + 1e-9 * q))
            return tf.identity(q)

        found = minimize()
        sess.run(tf.global_variables_initializer())
        np.testing.assert_allclose(sess.run(found), p.detach().numpy(), rtol=1e-5)


@pytest.mark.parametrize("settings", [{}, dict(weight_decay=0.1), dict(amsgrad=True)])
def test_adam_with_less_overhead_is_torchs_adam(settings):
    """As users may call it: two groups, a scheduler, parameters that have no gradient yet."""
    import torch

    from common.torch_utils import Adam

    def train(kind):
        first, second, late = (torch.nn.Parameter(torch.linspace(-2, 3, 4)) for _ in range(3))
        groups = [{"params": [first]}, {"params": [second, late], "lr": 0.05, "betas": (0.8, 0.99)}]
        optimizer = kind(groups, lr=0.01, **settings)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)
        for i in range(20):
            optimizer.zero_grad()
            loss = torch.sin(first).sum() + (torch.sin(second) ** 2).sum()
            loss = loss + torch.cos(late).sum() if i >= 10 else loss
            loss.backward()
            optimizer.step()
            scheduler.step()
            if i == 14:  # as a checkpoint does
                optimizer.load_state_dict(optimizer.state_dict())
        return [p.detach().numpy() for p in (first, second, late)]

    for found, expected in zip(train(Adam), train(torch.optim.Adam)):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
