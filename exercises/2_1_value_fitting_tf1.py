"""Exercise 2.1: what an untrained value function costs TRPO, in TensorFlow 1 style.

Ten runs of 200,000 steps on Hopper-v4: five seeds that train V with 80 iterations per epoch, the
default, and five that never train it. The PyTorch twin made them; in TF1 the command is

    python grid.py trpo_tf1 --env-id Hopper-v4 --train-v-iters 0 80 --seed 0 1 2 3 4 --epochs 50

Look at the curves in docs/figures/trpo_value_fitting.svg; exercises/data/trpo_value_fitting.csv has
the numbers, one row per epoch. Or run the command yourself: it takes five minutes on two cores.
Then replace each None below, and run this file to check your answers:

    python exercises/2_1_value_fitting_tf1.py
"""

from checks.value_fitting import check

ANSWERS = {
    # ---- your code: from here
    # 1. Without training, returns grow tenfold and more. Which column stays where it began?
    "stays": None,
    # 2. An untrained V is about 0. Before they are normalised, the advantages of a path are then
    #    discounted sums of its rewards: adv_t = sum over k of x^k r_{t+k}. What is x, with the
    #    script's defaults for gamma and lam?
    "x": None,
    # 3. Rewards beyond a horizon of 1 / (1 - x) steps hardly count. How many steps is that?
    "horizon": None,
    # 4. Does training V change only the "variance" of the policy gradient, or "both" its variance
    #    and its expectation?
    "changes": None,
    # 5. Which value of --lam would turn that answer into the other one? Leave aside paths that are
    #    cut short.
    "lam": None,
    # 6. One run that trains V ends like those that do not. Which seed is it? Its LossV is as low as
    #    that of the others: which column shows what its V is unable to do?
    "odd_seed": None,
    "odd_column": None,
    # ---- to here
}

if __name__ == "__main__":
    check("tf1", ANSWERS)
