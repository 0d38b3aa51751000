"""Exercise 2.2: a silent bug in DDPG, found from the log, in PyTorch.

Run this file once: it writes my_2_2_ddpg_torch.py, a copy of ddpg_torch.py with a bug. The copy
runs without an error or a warning, but does not learn. Run both with the same arguments, compare
their progress.txt, and find out from the numbers what is wrong. Many have written this bug, and a
tensor library cannot tell it from what they meant. A diff of the two files would spoil it.

Then replace each None below, mend the copy, and run this file again to check both:

    python exercises/2_2_silent_shape_torch.py
"""

from checks.silent_shape import check

ANSWERS = {
    # ---- your code: from here
    # 1. In the last epochs of the copy, Q hardly tells one transition from another. Which column of
    #    progress.txt says so?
    "column": None,
    # 2. Which shape does q1_vals - backup have in the copy, with --batch-size 64? A tuple.
    "shape": None,
    # 3. Take a batch of three transitions with r = 0, 3, 9 and d = 0, 0, 1. Let gamma be 0.5, and
    #    let q1_targ(o2, a2) be 12, 2, 5. To which value does the copy's loss_q pull Q(o, a) of the
    #    first transition? The right loss pulls it to 0 + 0.5 * 12 = 6.
    "pulled_to": None,
    # 4. LossQ of the copy does not fall below about 11, however long it trains. On Pendulum, where
    #    d is always 0, it is the variance of which part of a transition: o, a, r, o2 or d?
    "floor": None,
    # ---- to here
}

if __name__ == "__main__":
    check("torch", ANSWERS)
