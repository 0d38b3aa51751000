"""Solution of exercise 2.1.

1. V itself: AverageVVals and StdVVals stay near 0, and DeltaLossV is exactly 0, while LossV, which
   is then about the mean of R^2, grows with the returns.
2. With V = 0, delta_t = r_t, so adv_t is the sum of (gamma lam)^k r_{t+k}: x = 0.99 * 0.97.
3. 1 / (1 - 0.9603) = 25 steps. A good V extends that to 1 / (1 - gamma) = 100 steps, because it
   knows what the rewards beyond the 25 are worth.
4. Both. With lam < 1, GAE replaces what follows by V, so a wrong V gives a wrong expectation: here,
   rewards that come later count too little. The variance suffers as well: an action is credited
   with all that happens after it. The script subtracts the mean of all advantages, which helps a
   little: that is a baseline, but one that does not depend on the observation.
5. With lam = 1, V cancels from the advantage except for V(o_t), which is a baseline: any V leaves
   the expectation alone, and a good one reduces the variance.
6. Seed 2. Its StdVVals is 0: V gives every observation the same value, about 104. That is the mean
   of R, so LossV is low, at the variance of R, but V cannot tell a good observation from a bad one.
   R is around 100 and the network starts near 0, so all its weights moved in the direction of a
   larger output until the tanh units saturated (98% of those in the second layer are beyond 0.999);
   the gradient of a saturated unit vanishes. Seeds 0 and 3 pass through the same state and get out.
   With --norm, V sees observations and returns in units of their standard deviation: the same seed
   then reaches 710 on average over the last ten epochs, with a StdVVals of 70 at the end.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for checks

from checks.value_fitting import check

ANSWERS = {
    "stays": "AverageVVals",
    "x": 0.99 * 0.97,
    "horizon": 25,
    "changes": "both",
    "lam": 1.0,
    "odd_seed": 2,
    "odd_column": "StdVVals",
}

if __name__ == "__main__":
    check("torch", ANSWERS)
