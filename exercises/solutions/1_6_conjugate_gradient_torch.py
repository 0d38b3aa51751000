"""Solution of exercise 1.6.

create_graph keeps the graph of the gradient, so that it can be differentiated again, once per
product. The damping belongs to the matrix, so it is part of every product.

alpha is the minimum along p. The new direction is the residual plus the right amount of the last
one, rr / rr_old, which makes it conjugate to all directions before. In exact arithmetic, P
iterations solve the system; TRPO makes do with ten. Once the residual is zero, alpha is 0 / 0.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for checks

import torch
from checks.conjugate_gradient import check

from trpo_torch import flat_grad  # flat_grad(f, params, ...): the gradient of f as a flat vector


def solve(kl, params, g, iters, damping):
    """Return x after iters iterations on (H + damping I) x = g: float32, [P].

    kl      a scalar tensor that depends on the parameters; H is its Hessian
    params  a list of tensors with P numbers in all
    g       [P]

    Stop early, or do no harm, when the residual has become zero. Leave the parameters alone.
    """
    grad_kl = flat_grad(kl, params, create_graph=True)

    def hvp(p):
        return flat_grad(grad_kl @ p, params, retain_graph=True) + damping * p

    x, r, p = torch.zeros_like(g), g.clone(), g.clone()
    rr = r @ r
    for _ in range(iters):
        if rr <= 1e-12 * (g @ g):
            break
        hp = hvp(p)
        alpha = rr / (p @ hp)
        x = x + alpha * p
        r = r - alpha * hp
        rr_old, rr = rr, r @ r
        p = r + rr / rr_old * p
    return x


if __name__ == "__main__":
    check("torch", solve)
