"""Reward functions in the form the field has settled on, several of them as one reward. Text in, numbers out.

    def brevity(prompts, completions, **columns):
        return [1 - len(text) / 1000 for text in completions]

A function gets the samples of one prompt, so it may compare siblings: lists of equal length, among them every column of the
example, once for each sample. It gives a number for each, None where it does not apply, or a `Reward` to say more (whether
it is right, named parts). It may be a coroutine.
"""

import asyncio
import inspect
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grpo.env.messages import Message
from grpo.env.types import Example, Reward, Trajectory
from grpo.rewards.resolve import Function, locate, reward_name
from grpo.system.calls import awaited
from grpo.system.errors import RewardError, UserError, told

log = logging.getLogger(__name__)


class Rewards:
    """Functions and their weights. The reward is the weighted sum over those that apply.

    functions: callables, or texts for `locate`. weights: one for each, null for 1 each; 0 only logs.
    solved: where no function says whether an answer is right, it counts as right from this reward on.
    """

    def __init__(
        self, functions: str | Sequence[str | Function], weights: Sequence[float] | None = None, solved: float = 1.0
    ) -> None:
        listed = [functions] if isinstance(functions, str) or callable(functions) else list(functions)
        if not listed:
            raise UserError("task.rewards is empty: name at least one reward function")
        self.functions = [locate(one) if isinstance(one, str) else one for one in listed]
        self.names = [reward_name(function) for function in self.functions]
        self.wanted = [_wanted(function) for function in self.functions]
        self.weights = [1.0] * len(listed) if weights is None else [float(weight) for weight in weights]
        self.solved = solved
        if len(self.weights) != len(listed):
            sizes = f"({len(self.weights)}) must match number of reward functions ({len(listed)})"
            fix = f"task.weights={self.weights} for {', '.join(self.names)}; task.weights=null is 1 for each"
            raise UserError(f"number of reward weights {sizes}: {fix}")
        if twice := [name for name in self.names if self.names.count(name) > 1]:
            raise UserError(f"two reward functions are called {twice[0]!r}: their parts could not be told apart")
        self.warned = False

    def check(self, columns: Iterable[str], where: str) -> None:
        """Refuse rows that lack a column which a function cannot do without. where: whose columns they are."""
        given = {*columns}
        for name, function in zip(self.names, self.functions, strict=True):
            for parameter in _parameters(function):
                needed = parameter.default is parameter.empty and parameter.kind in _NAMED
                if needed and parameter.name not in given | _ALWAYS:
                    lacks = f"{parameter.name!r}, which is no column of {where} ({', '.join(sorted(given))})"
                    raise UserError(f"the reward function {name!r} needs {lacks} and has no default value")

    def score(self, example: Example, trajectories: Sequence[Trajectory]) -> list[Reward]:
        """A reward for each of the trajectories, which are samples of one example.

        Parts: the value that each function gave, by the function's name, before weights; where it gave a `Reward`, the parts of
        that. Two parts of one name raise RewardError. The reward is NaN if any function gives a NaN `Reward`, or if none of the
        functions with a weight applies; the log warns of the latter once.
        """
        given = self._called(as_lists(example, trajectories))
        rewards = [self._combined([values[i] for values in given]) for i in range(len(trajectories))]
        if not self.warned and any(not reward.known and reward.outcome is None for reward in rewards):
            self.warned = True
            words = "no reward function (%s) applies to a sample: it has no advantage and teaches nothing. Columns: %s"
            log.warning(words, ", ".join(self.names), ", ".join(example))
        return rewards

    def _called(self, arguments: Mapping[str, list]) -> list[list[float | Reward | None]]:
        """The values of every function; coroutines among them run at the same time."""
        given: list[Any] = []
        for function, names in zip(self.functions, self.wanted, strict=True):
            try:
                given.append(function(**{name: arguments[name] for name in names or arguments if name in arguments}))
            except (Exception, SystemExit) as error:
                given.append(error)
        if any(map(inspect.isawaitable, given)):
            given = awaited(_side_by_side(given))
        count = len(arguments["completions"])
        return [_checked(name, values, count) for name, values in zip(self.names, given, strict=True)]

    def _combined(self, values: Sequence[float | Reward | None]) -> Reward:
        """The weighted sum of what one sample was given."""
        total, parts, graded, applies = 0.0, {}, None, False
        for name, weight, value in zip(self.names, self.weights, values, strict=True):
            if value is None:
                continue
            applies = applies or weight != 0  # what is only logged is no reward
            more = value.parts if isinstance(value, Reward) else {name: value}
            if both := parts.keys() & more.keys():
                raise RewardError(f"two reward functions give a part {min(both)!r}: rename one, only one can be logged")
            parts |= more
            if isinstance(value, Reward):
                if graded is None or graded.correct or not value.known:  # right is right by all that grade
                    graded = value
                value = value.value
            total += weight * value if weight else 0.0
        if not applies:
            return Reward(math.nan, False, parts)
        if graded is None:
            return Reward(total, total >= self.solved, parts)
        return Reward(total, graded.correct, parts, graded.outcome)


def _checked(name: str, values: Any, count: int) -> list[float | Reward | None]:
    function = f"the reward function {name!r}"
    if isinstance(values, BaseException):
        raise RewardError(f"{function} raised {told(values)}") from values
    try:
        values = list(values)
    except TypeError:
        raise RewardError(f"{function} gave {type(values).__name__}, not a list of {count} values") from None
    if len(values) != count:
        raise RewardError(f"{function} gave {len(values)} values for {count} completions")
    for sample, value in enumerate(values):
        if isinstance(value, Reward) or value is None:
            continue
        try:
            values[sample] = float(value)
        except (TypeError, ValueError):
            raise RewardError(f"{function} gave {value!r}, which is no number", sample) from None
        if not math.isfinite(values[sample]):
            raise RewardError(f"{function} gave {values[sample]}: a number, or None where it does not apply", sample)
    return values


async def _side_by_side(given: Sequence[Any]) -> list[Any]:
    """The same, with the results or exceptions of the coroutines among them, which run at the same time."""

    async def one(values: Any) -> Any:
        return await values if inspect.isawaitable(values) else values

    return await asyncio.gather(*map(one, given), return_exceptions=True)


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_ALWAYS = {"prompts", "completions", "truncated", "lengths"}  # what every task has


def _parameters(function: Function) -> list[inspect.Parameter]:
    """The parameters of its signature."""
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:  # built in
        return []


def _wanted(function: Function) -> list[str]:
    """The arguments that a function names; none of them means all, as for one with **columns."""
    parameters = _parameters(function)
    return [] if any(one.kind is one.VAR_KEYWORD for one in parameters) else [one.name for one in parameters]


def as_lists(example: Example, trajectories: Sequence[Trajectory]) -> dict[str, list]:
    """prompts, completions and the rest as reward functions take them: a list each, a value a sample.

    Conversations (an example whose `prompt` is a list of messages): prompts are lists of messages, completions the messages
    after it, a prefill joined to what continues it. Else both are texts. Further: `truncated` (the limit of tokens cut it
    short), `lengths` (tokens sampled, where they were), and every column of the example.
    """
    conversational = isinstance(example.get("prompt"), (list, tuple)) or any(len(t.steps) > 1 for t in trajectories)
    prompts, completions = [], []
    for trajectory in trajectories:
        start = list(trajectory.steps[0].state.messages)
        if not conversational:
            prompts.append("\n\n".join(message.content for message in start))
            completions.append(trajectory.answer)
            continue
        end = trajectory.steps[-1]
        later = [*end.state.messages[len(start) :], end.action.message]
        if start and start[-1].role == "assistant":
            prefill = start.pop()
            later[0] = Message("assistant", prefill.content + later[0].content)
        prompts.append([message.as_dict() for message in start])
        completions.append([message.as_dict() for message in later])
    rest = {name: [value] * len(trajectories) for name, value in example.items()}
    known = {"prompts": prompts, "completions": completions, "truncated": [t.truncated for t in trajectories]}
    lengths = [sum(step.action.length for step in trajectory.steps) for trajectory in trajectories]
    return rest | known | ({"lengths": lengths} if all(lengths) else {})


def text_of(completion: str | Sequence[Mapping[str, str]]) -> str:
    """The text of the policy's last message, in either form of a completion."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
