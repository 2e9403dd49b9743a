"""The slot `source`: groups of finished samples that others have played."""

from typing import Protocol

from grpo.rollout.rollouts import Rollouts
from grpo.rollout.types import Group


class Source(Protocol):
    """Made with (pretrained, renderer), it takes the place of a sampler and of `play`.

    With `state_dict` and `load_state_dict` it is resumed as it was; `close()` is called at the end of the run.
    """

    def groups(self, r: int, count: int, first: int, rollouts: Rollouts) -> list[Group]:
        """Return groups of rollout r: those after the `first` ones that it has given for r before, [] if none are left.

        count: groups that are wanted; there may be more, or fewer. Their sizes may differ. rollouts: who asks, with the engine
        and the plan. Raises RolloutError, which saves a checkpoint, if there are none to wait for.
        """

    def progress(self, rollouts: int) -> dict[str, float]:
        """Return metrics after this many rollouts, by names of the dictionary of metrics."""
