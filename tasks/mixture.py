"""Several tasks in one run, each with its share of the prompts and with metrics of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from grpo.data.rows import Made
from grpo.env.intake import build
from grpo.env.scoring import score_group
from grpo.env.types import Claim, Env, Example, Reward, Split, Task, Trajectory
from grpo.system.errors import UserError
from grpo.system.ranges import Positive, enforced
from grpo.system.seeds import set_states, states_of


def shares(sizes: Mapping[str, int], weights: Mapping[str, float]) -> dict[str, int]:
    """Return the rows of each source in one pass: in proportion to the weights, and enough to show all rows of every source."""
    scale = max(sizes[source] / weights[source] for source in sizes)
    return {source: round(scale * weights[source]) for source in sizes}


def interleaved(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return pairs (source, number), with the numbers of each source spread evenly."""
    places = [((i + 0.5) / count, source, i) for source, count in counts.items() for i in range(count)]
    return [(source, i) for _, source, i in sorted(places)]


class Mixture:
    """sources: tasks by name, each as in its own file in conf/task. weights: shares of the prompts in training, in any unit.

    An example is {"source": name, "example": the source's own}. Parts of rewards, also reward and correct, begin with the name of
    their source, so that metrics are logged by source. Held-out examples are all those of every source, in turn.
    """

    @enforced("task")
    def __init__(self, sources: Mapping[str, Mapping[str, Any]], weights: Mapping[str, Positive] | None = None) -> None:
        self.tasks: dict[str, Task] = {name: source["task"] for name, source in sources.items()}
        weights = weights or dict.fromkeys(self.tasks, 1)
        self.weights = {name: float(weight) for name, weight in weights.items()}
        if self.weights.keys() != self.tasks.keys():
            named = f"{len(self.weights)} sources ({', '.join(self.weights)}) and task.sources {len(self.tasks)}"
            raise UserError(f"task.weights has {named} ({', '.join(self.tasks)}): they must be the same")
        if not self.tasks:
            raise UserError("task.sources is empty: name at least one task")

    def examples(self, split: Split) -> Sequence[Example]:
        rows = {name: task.examples(split) for name, task in self.tasks.items()}
        sizes = {name: len(examples) for name, examples in rows.items()}
        if split == "train":  # a source that is too short for its share starts again
            order = [(name, i % sizes[name]) for name, i in interleaved(shares(sizes, self.weights))]
        else:  # in turn, so that the first rows include every source
            places = ((name, i) for name in rows for i in range(sizes[name]))
            order = sorted(places, key=lambda place: place[1])

        def row(place: int) -> Example:
            name, i = order[place]
            return {"source": name, "example": rows[name][i]}

        return Made(len(order), row, "".join(getattr(examples, "digest", "") for examples in rows.values()))

    def gold(self, example: Example) -> Any:
        """Return the right answer, if the source knows it."""
        gold = getattr(self.tasks[example["source"]], "gold", None)
        return gold and gold(example["example"])

    def demonstration(self, example: Example) -> Any:
        """Return the answer to learn from, if the source has one."""
        demonstration = getattr(self.tasks[example["source"]], "demonstration", None)
        return demonstration and demonstration(example["example"])

    def build(self, example: Example, seed: int = 0, group_seed: int = 0) -> Env:
        return build(self.tasks[example["source"]], example["example"], seed, group_seed)

    def score_group(
        self, example: Example, trajectories: Sequence[Trajectory], envs: Sequence[Env] = ()
    ) -> list[Reward]:
        source = example["source"]
        rewards = []
        for reward in score_group(self.tasks[source], example["example"], trajectories, envs):
            totals = {"correct": float(reward.correct), "reward": reward.value} if reward.known else {}
            parts = {f"{source}/{name}": value for name, value in {**reward.parts, **totals}.items()}
            rewards.append(replace(reward, parts=parts))
        return rewards

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the sources that have one."""
        return {name: state for name, state in states_of(self.tasks).items() if state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        set_states(self.tasks, state)

    def claims(self, example: Example, trajectory: Trajectory) -> Claim | None:
        ask = getattr(self.tasks[example["source"]], "claims", None)
        return ask(example["example"], trajectory) if ask else None
