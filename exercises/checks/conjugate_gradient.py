"""Checks exercise 1.6 against explicit matrices and numpy.linalg.solve, in float64."""

import numpy as np

from . import Wrong, exercise, expect_close, expect_shape, listed

SHAPES = [(2,), (3, 2), (2, 2)]  # of a small Gaussian policy: log_std, and two layers


def quadratic(framework, params, c, v):
    """Return 1/2 theta^T (diag(c) + v v^T) theta, for parameters and constants in pieces."""
    terms = [0.5 * framework.sum(c_ * p * p, None) for c_, p in zip(c, params)]
    slope = sum(framework.sum(v_ * p, None) for v_, p in zip(v, params))
    return sum(terms) + 0.5 * slope**2


def policy_kl(framework, params, params_old, o, n_rows):
    """Return the mean KL(old || new) of two Gaussian policies; mean from a network."""
    (log_std, w1, w2), (log_std_old, w1_old, w2_old) = params, params_old
    mu, mu_old = framework.tanh(o @ w1) @ w2, framework.tanh(o @ w1_old) @ w2_old
    ratio = framework.exp(2 * (log_std_old - log_std))
    z = (mu_old - mu) / framework.exp(log_std)
    kl = framework.sum(log_std - log_std_old + 0.5 * (ratio + z**2 - 1), 1)
    return framework.sum(kl, 0) / n_rows


def explicit_fisher(params, o, h=1e-5):
    """Return the Fisher matrix of that policy from its definition, for the flat parameters."""
    log_std, w1, w2 = (x.astype(np.float64) for x in params)
    flat = np.concatenate([w1.ravel(), w2.ravel()])

    def mean(flat):
        w1, w2 = flat[:6].reshape(SHAPES[1]), flat[6:].reshape(SHAPES[2])
        return np.tanh(o @ w1) @ w2

    steps = h * np.eye(len(flat))
    jacobian = np.stack([(mean(flat + s) - mean(flat - s)) / (2 * h) for s in steps], 2)
    fisher = np.zeros((len(flat) + 2, len(flat) + 2))
    fisher[:2, :2] = 2 * np.eye(2)
    fisher[2:, 2:] = np.einsum("bnp,n,bnq->pq", jacobian, np.exp(-2 * log_std), jacobian) / len(o)
    return fisher


def krylov_solution(h, g, k):
    """Return the best x that k products with h can reach: it minimises 1/2 x^T h x - g^T x."""
    basis = np.stack([np.linalg.matrix_power(h, i) @ g for i in range(k)], 1)
    basis, _ = np.linalg.qr(basis)
    return basis @ np.linalg.solve(basis.T @ h @ basis, basis.T @ g)


def call(framework, solve, make_kl, arrays, g, iters, damping):
    """Call the answer on parameters with these values; return x, and check that they kept them."""
    if framework.name == "torch":
        torch = framework.torch
        params = [torch.tensor(x, requires_grad=True) for x in arrays]
        x = solve(make_kl(params), params, torch.tensor(g), iters, damping)
        (x,) = framework.check_type(x, "x")
        if any(p.grad is not None for p in params):
            raise Wrong("your code leaves gradients in the .grad of the parameters")
        after, x = [p.detach().numpy() for p in params], x.detach().numpy()
    else:
        tf = framework.tf
        with tf.Graph().as_default(), tf.Session() as sess:
            params = [tf.Variable(x) for x in arrays]
            g_ph = tf.placeholder(tf.float32, g.shape)
            x = solve(make_kl(params), params, g_ph, iters, damping)
            (x,) = framework.check_type(x, "x")
            sess.run(tf.global_variables_initializer())
            x, after = sess.run(x, {g_ph: g}), sess.run(params)
    if not all(np.array_equal(x, y) for x, y in zip(after, arrays)):
        raise Wrong("your code changes the parameters")
    return x


@exercise("1.6: conjugate gradient with Hessian-vector products")
def check(framework, solve):
    rng = np.random.default_rng(0)

    def pieces(shapes, low=0.5, high=2.0):
        return [rng.uniform(low, high, shape).astype(np.float32) for shape in shapes]

    def flat(xs):
        return np.concatenate([x.ravel() for x in xs]).astype(np.float64)

    def on_quadratic(shapes, iters, damping, coupled=True, zero=False):
        c, v, theta = pieces(shapes), pieces(shapes, -1.0, 1.0), pieces(shapes, -1.0, 1.0)
        v = v if coupled else [0 * x for x in v]
        h = np.diag(flat(c)) + np.outer(flat(v), flat(v)) + damping * np.eye(len(flat(c)))
        g = (rng.standard_normal(len(h)) * (not zero)).astype(np.float32)

        def make_kl(params):
            constants = ([framework.constant(x) for x in xs] for xs in (c, v))
            return quadratic(framework, params, *constants)

        x = call(framework, solve, make_kl, theta, g, iters, damping)
        given = f"parameters of shape {', '.join(str(list(s)) for s in shapes)}, "
        given += f"iters = {iters}, damping = {damping}"
        if len(h) <= 3:
            given += f"\nH + damping I = {listed(h)}, g = {listed(g)}"
        expect_shape("x", x, [len(h)], given)
        right = krylov_solution(h, g.astype(np.float64), iters) if iters < len(h) else None
        right = np.linalg.solve(h, g.astype(np.float64)) if right is None else right
        expect_close("x", x, right, lambda i: given, rtol=1e-3, atol=1e-3)

    on_quadratic([(3,)], 3, 0.0, coupled=False)
    on_quadratic([(1,)], 1, 0.0)
    yield "H is diagonal: as many iterations as parameters solve the system"

    on_quadratic([(3,)], 3, 0.0)
    on_quadratic([(2, 3), (4,), (1, 1)], 11, 0.0)
    yield "any H, parameters of several shapes"

    on_quadratic([(3,)], 3, 0.7)
    on_quadratic([(2, 3), (4,)], 10, 0.1)
    yield "damping"

    for iters in (1, 2, 3, 5):
        on_quadratic([(2, 3), (4,)], iters, 0.1)
    yield "fewer iterations: the best approximation for that many products with H"

    params = [np.array([-0.7, 0.2], np.float32), *pieces(SHAPES[1:], -1.0, 1.0)]
    o = rng.standard_normal((30, 3)).astype(np.float32)
    h = explicit_fisher(params, o) + 0.1 * np.eye(12)
    g = rng.standard_normal(12).astype(np.float32)

    def make_kl(new):
        old = [framework.constant(x) for x in params]
        return policy_kl(framework, new, old, framework.constant(o), len(o))

    for iters in (2, 4, 14):
        x = call(framework, solve, make_kl, params, g, iters, 0.1)
        right = krylov_solution(h, g, iters) if iters < 12 else np.linalg.solve(h, g)
        wanted = f"the KL of a Gaussian policy, iters = {iters}, damping = 0.1"
        expect_close("x", x, right, lambda i, wanted=wanted: wanted, rtol=0.01, atol=0.01)
    yield "the KL of a Gaussian policy: H is its Fisher matrix"

    on_quadratic([(2,), (1,)], 12, 0.1)
    on_quadratic([(3,)], 10, 0.1, zero=True)
    yield "nothing breaks when the system is solved early, or when g is 0"
