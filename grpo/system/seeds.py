"""Seeds as paths: one seed for every draw of a run, whatever the order of the draws."""

import numpy as np

TRAIN, EVALUATION, SHUFFLE = range(3)  # second in the path of a seed: what the noise is for


def derive_seed(*path: int) -> int:
    """A 63-bit seed that depends on every number of the path, as (run, TRAIN, rollout, prompt, sample, turn)."""
    return int(np.random.SeedSequence(path).generate_state(1, np.uint64)[0] >> 1)
