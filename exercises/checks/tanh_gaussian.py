"""Checks exercise 1.5 against the distribution function of tanh(u), in float64."""

import numpy as np
import scipy.stats

from . import (
    Wrong,
    exercise,
    expect_close,
    expect_gradients,
    expect_shape,
    listed,
    numerical_gradients,
)

RETURNS = "logp"


def expected_logp(u, mu, log_std):
    """P(tanh(u) < y) = Phi((atanh(y) - mu) / std); its derivative in y is the density."""
    # dy / du of y = tanh(u) is 1 / cosh(u)^2, and cosh(u) = exp(|u|) (1 + exp(-2|u|)) / 2
    log_cosh = np.abs(u) + np.log1p(np.exp(-2 * np.abs(u))) - np.log(2)
    return (scipy.stats.norm(mu, np.exp(log_std)).logpdf(u) + 2 * log_cosh).sum(1)


def draw(rng, n_rows, n):
    u, mu = rng.standard_normal((2, n_rows, n))
    log_std = rng.uniform(-1.5, 0.5, (n_rows, n))
    return [x.astype(np.float32) for x in (u, mu, log_std)]


@exercise("1.5: the log-probability of a squashed Gaussian")
def check(framework, tanh_gaussian_logp):
    rng = np.random.default_rng(0)

    def measure(u, mu, log_std):
        return framework.run(tanh_gaussian_logp, u, mu, log_std, returns=RETURNS, batch=3)

    def compare(u, mu, log_std, **tolerance):
        def given(i):
            return f"u = {listed(u[i])}, mu = {listed(mu[i])}, log_std = {listed(log_std[i])}"

        expected = expected_logp(*(x.astype(np.float64) for x in (u, mu, log_std)))
        expect_close(RETURNS, measure(u, mu, log_std), expected, given, **tolerance)

    for n_rows, n in (5, 3), (1, 3), (4, 1), (3, 3), (1, 1):
        found = measure(*draw(rng, n_rows, n))
        expect_shape(RETURNS, found, [n_rows], f"u, mu and log_std of shape [{n_rows}, {n}]")
    yield "one log-probability per row, float32"

    for mean, std in (0.0, 0.5), (0.8, 0.3), (-0.4, 1.0):
        y = np.linspace(-1, 1, 20002)[1:-1]
        u = np.arctanh(y).astype(np.float32)[:, None]
        mu, log_std = np.full_like(u, mean), np.full_like(u, np.log(std))
        density = np.exp(measure(u, mu, log_std).astype(np.float64))
        total = np.trapezoid(density, y)
        if not abs(total - 1) < 0.01:
            wanted = "the density of a = tanh(u), integrated over a from -1 to 1, should be 1"
            raise Wrong(f"{wanted}, got {total:.4g}\nfor mu = {mean:g}, std = {std:g}")
        # The probability of a short interval of actions, from the distribution function
        edges = np.arctanh(np.linspace(-0.9, 0.9, 181))
        share = np.diff(scipy.stats.norm(mean, std).cdf(edges)) / 0.01
        found = np.interp((np.linspace(-0.9, 0.9, 181)[1:] - 0.005), y, density)

        def given(i, mean=mean, std=std):
            return f"a = {-0.895 + 0.01 * i:.3f}, mu = {mean:g}, std = {std:g}"

        expect_close("the density of a = tanh(u)", found, share, given, rtol=0.01, atol=0.005)
    yield "in one dimension: the density integrates to 1, and agrees with the probabilities of a"

    compare(*draw(rng, 40, 3), rtol=1e-3, atol=1e-3)
    yield "several dimensions, each with its own mean and standard deviation"

    for size in (5, 8, 10, 20, 50, 200):
        noise = rng.standard_normal((6, 2)).astype(np.float32)
        log_std = np.full((6, 2), -1, np.float32)
        mu = size * np.array([[1, -1], [-1, 1], [1, 0], [0, -1], [1, 1], [-1, -1]], np.float32)
        u = mu + np.exp(log_std) * noise
        compare(u, mu, log_std, rtol=1e-4, atol=1e-3)
    yield "large |u|, where tanh(u) rounds to 1 or -1"

    for size in (1, 10, 100):
        u, mu, log_std = draw(rng, 4, 2)
        u, mu = u + size, mu + size
        u[::2], mu[::2] = -u[::2], -mu[::2]
        weights = rng.standard_normal(4).astype(np.float32)
        found = framework.gradients(
            lambda u, mu, log_std, w: tanh_gaussian_logp(u, mu, log_std) * w,
            *(u, mu, log_std, weights),
            batch=4,
        )
        expected = numerical_gradients(lambda *x, w=weights: expected_logp(*x) @ w, u, mu, log_std)

        def given(i, j, u=u, mu=mu):
            return f"u = {listed(u[i])}, mu = {listed(mu[i])}"

        names = ("u", "mu", "log_std")
        expect_gradients("logp", names, found, expected, given, rtol=1e-3, atol=1e-3)
    yield "gradients with respect to u, mu and log_std, also for large |u|"
