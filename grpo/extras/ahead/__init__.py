"""Rollouts beside the update: while the policy learns from rollout r, those up to r + ahead are played, or wait.

A version is the number of rollouts that the weights have learned from. Update r is made at version r, so the staleness of a token
is r less the version of the weights that sampled it.

    check.py    refuses what cannot be had; chooses Chain or Pool, and says why
    chain.py    one rollout after another, in order; with order=exact its version is fixed too
    pool.py     the groups of several rollouts at once, handed over as they are finished; order.py says which
    copied.py   the built-in engine with a copy of the weights
    streams.py  the stream of CUDA on which an engine in this process computes
    clock.py    the seconds in which an engine was idle, and samples waited for weights
"""
