"""Checks exercise 1.1 against scipy's density, in float64."""

import numpy as np
import scipy.stats

from . import exercise, expect_close, expect_gradients, expect_shape, listed, numerical_gradients

RETURNS = "logp"


def expected_logp(a, mu, log_std):
    return scipy.stats.norm(mu, np.exp(log_std)).logpdf(a).sum(1)


def draw(rng, n_rows, n, per_row=False):
    """Draw a, mu and log_std; each action dimension has its own standard deviation."""
    a, mu = rng.standard_normal((2, n_rows, n)) * 2
    log_std = rng.uniform(-1.5, 1.0, (n_rows, n) if per_row else n)
    return [x.astype(np.float32) for x in (a, mu, log_std)]


@exercise("1.1: Gaussian log-likelihood")
def check(framework, gaussian_logp):
    rng = np.random.default_rng(0)

    def measure(a, mu, log_std):
        batch = 1 + log_std.ndim
        return framework.run(gaussian_logp, a, mu, log_std, returns=RETURNS, batch=batch)

    def compare(a, mu, log_std, **tolerance):
        def given(i):
            stds = log_std if log_std.ndim == 1 else log_std[i]
            return f"a = {listed(a[i])}, mu = {listed(mu[i])}, log_std = {listed(stds)}"

        expected = expected_logp(*(x.astype(np.float64) for x in (a, mu, log_std)))
        expect_close(RETURNS, measure(a, mu, log_std), expected, given, **tolerance)

    for n_rows, n in (5, 3), (1, 3), (4, 1), (3, 3), (1, 1):
        found = measure(*draw(rng, n_rows, n))
        expect_shape(RETURNS, found, [n_rows], f"a and mu of shape [{n_rows}, {n}]")
    yield "one log-probability per row, float32"

    zeros = np.zeros((4, 1), np.float32)
    compare(zeros, zeros, np.zeros(1, np.float32))
    a, mu, _ = draw(rng, 6, 1)
    compare(a, mu, np.zeros(1, np.float32))
    yield "the standard normal distribution in one dimension"

    for n_rows, n in (6, 1), (6, 2), (40, 4):
        compare(*draw(rng, n_rows, n))
    yield "any mean, one standard deviation per dimension"

    compare(*draw(rng, 7, 3, per_row=True))
    yield "one standard deviation per row and dimension: log_std of shape [B, n]"

    a, mu, log_std = draw(rng, 5, 2)
    compare(a + 300, mu, log_std)
    tiny = np.array([-20, -15], np.float32)
    compare(np.exp(tiny) * a, 0 * mu, tiny)
    compare(a, mu, np.array([20, 15], np.float32))
    yield "actions far from the mean, tiny and huge standard deviations"

    a, mu, log_std = draw(rng, 5, 3)
    weights = rng.standard_normal(5).astype(np.float32)
    found = framework.gradients(
        lambda a, mu, log_std, w: gaussian_logp(a, mu, log_std) * w,
        *(a, mu, log_std, weights),
        batch=2,
    )
    expected = numerical_gradients(lambda *x: expected_logp(*x) @ weights, a, mu, log_std)
    names = ("a", "mu", "log_std")
    expect_gradients("logp", names, found, expected, lambda *i: "a batch of 5", rtol=1e-3)
    yield "gradients with respect to a, mu and log_std"
