"""Combines reward functions, in the form that TRL uses, into one reward. Text in, numbers out.

    def brevity(prompts, completions, **columns):
        return [1 - len(text) / 1000 for text in completions]

A function gets the samples of one prompt, so it may compare siblings. Its arguments are lists of equal length, among them every
column of the example, repeated for each sample. It returns for each sample a number, None if it does not apply, or a `Reward`
with more information (whether the answer is right, named parts). It may be a coroutine. docs/rewards.md has all arguments.
"""

import asyncio
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set, Sized
from dataclasses import replace
from itertools import islice
from types import MappingProxyType, SimpleNamespace
from typing import Any

from grpo.env.messages import Message
from grpo.env.scoring import LARGEST
from grpo.env.types import Action, Env, Example, Reward, State, Step, Trajectory
from grpo.rewards.resolve import ALWAYS, OURS, TRL_GIVES, Function, Functions, lacks, locate, module_of, reward_name
from grpo.system.calls import Calls, awaited
from grpo.system.errors import RewardError, UserError, error_line, plural
from grpo.system.exits import seen
from grpo.system.global_state import put_back
from grpo.system.progress import Progress, progress, scheduled

log = logging.getLogger(__name__)

PATIENCE = 5.0  # seconds for made-up answers

Weight = float | Mapping[str, Any]  # a number, or one that changes: {schedule: linear, from: 0.5, to: 0}
Weights = Mapping[str, Weight] | Sequence[Weight] | None


def weights_of(names: Sequence[str], weights: Weights, usual: Mapping[str, float]) -> list[Callable[[Progress], float]]:
    """Return each function's weight, by the progress. Raises UserError for a name or a number of weights that does not fit."""
    if weights is None or isinstance(weights, Mapping):
        by_name = dict(weights or {})
        if unknown := [name for name in by_name if name not in names]:
            raise UserError(f"task.weights names {unknown[0]!r}, but the rewards are {', '.join(names)}")
        by_name = dict(usual) | by_name
        weights = [by_name.get(name, 1.0) for name in names]
    if len(weights) != len(names):
        numbers = f"number of reward weights ({len(weights)}) must match number of reward functions ({len(names)})"
        fix = f"task.weights={list(weights)} for {', '.join(names)}; or by name, {{{names[0]}: 1}}"
        raise UserError(f"{numbers}: {fix}")
    return [scheduled(weight, f"task.weights.{name}") for name, weight in zip(names, weights, strict=True)]


class Rewards:
    """Reward functions and their weights. The reward is the weighted sum over the functions that apply.

    functions: callables, or texts for `locate`. weights: by function, or one for each; `usual` has those of functions that are
    not named, else 1. With weight 0 a function is only logged. solved: if no function decides whether an answer is right, it is
    right from this reward on.
    """

    def __init__(
        self,
        functions: Functions,
        weights: Weights = None,
        solved: float = 1.0,
        usual: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        listed = [functions] if isinstance(functions, str) or callable(functions) else list(functions)
        if not listed:
            raise UserError("task.rewards is empty: name at least one reward function")
        self.functions = [locate(function) if isinstance(function, str) else function for function in listed]
        self.foreign = [function for function in self.functions if not module_of(function).startswith(OURS)]
        self.names = [reward_name(function) for function in self.functions]
        self.wanted = [_wanted(function) for function in self.functions]
        self.weights, self.solved = weights_of(self.names, weights, usual), solved
        if twice := [name for name in self.names if self.names.count(name) > 1]:
            raise UserError(f"two reward functions are called {twice[0]!r}: their parts could not be distinguished")
        self.warned = False

    def check(self, columns: Iterable[str], where: str) -> None:
        """Refuse rows that lack a column that a function needs. where: the name of their source, for the message."""
        present = {*columns}
        for name, function in zip(self.names, self.functions, strict=True):
            for parameter in _parameters(function):
                needed = parameter.default is parameter.empty and parameter.kind in _NAMED
                if needed and parameter.name not in present | ALWAYS:
                    raise lacks(name, parameter.name, present, where)

    def try_foreign(self, example: Example, messages: Sequence[Message]) -> None:
        """Call the functions that do not come with the project with two made-up answers, in the form that a run gives them.

        messages: that pose the example. Raises UserError, which names the form: a mistake shows before a model is loaded. A
        function that takes longer than PATIENCE is left alone: a run has its own limit of time, and counts what exceeds it.
        """
        step = Step(State(tuple(messages)), Action(Message("assistant", "I think it is 42."), ids=(1, 2, 3)))
        foreign = Rewards(self.foreign, solved=self.solved)
        calls = Calls(1, "the trial of the reward functions")
        outcome = awaited(calls.run("trial", PATIENCE, foreign.score, example, [Trajectory((step,))] * 2))
        calls.close()
        if isinstance(outcome, RewardError):
            form = "texts"
            if in_messages(example):
                last = "completions[i][-1]['content'] is an answer's text"
                form = f"lists of messages, because the prompt of a row is one: {last}"
            raise UserError(f"{outcome} (tried with made-up answers; completions are {form})") from outcome

    def score(
        self,
        example: Example,
        trajectories: Sequence[Trajectory],
        envs: Sequence[Env] = (),
        conversational: bool = False,
    ) -> list[Reward]:
        """Return a reward for each of the trajectories, which are samples of one example. envs, conversational: see `as_lists`.

        Parts: each function's value, by the function's name, before weights; the parts of a `Reward` if it returned one. Two
        parts with the same name raise RewardError. The reward is NaN if any function returns a NaN `Reward`, or if no function
        with a weight applies; the log warns of the latter once.
        """
        now, metrics, columns = progress(), {}, {}

        def log_metric(name: str, value: float) -> None:
            metrics[name] = float(value)

        def log_extra(column: str, values: Sequence[Any]) -> None:
            columns[column] = [value for _, value in zip(trajectories, values, strict=True)]  # raises if some lack

        trainer = SimpleNamespace(global_step=now.rollout, max_steps=now.num_rollouts)
        state = {"progress": now, "trainer_state": trainer, "log_metric": log_metric, "log_extra": log_extra}
        # one group a call, where TRL passes the whole batch: this group is scored while others are still sampled
        lists = as_lists(example, trajectories, conversational)
        if envs:
            lists["environments"] = list(envs)
        by_function = self._called(lists, state)
        rewards = []
        for i in range(len(trajectories)):
            reward = self._combined([values[i] for values in by_function])
            extra = {**(reward.extra or {}), **{name: values[i] for name, values in columns.items()}}
            rewards.append(replace(reward, parts=reward.parts | metrics, extra=extra or None))
        if not self.warned and any(not reward.known and reward.outcome is None for reward in rewards):
            self.warned = True
            words = "no reward function (%s) applies to a sample: it has no advantage and teaches nothing. Columns: %s"
            log.warning(words, ", ".join(self.names), ", ".join(example))
        return rewards

    def _called(self, lists: Mapping[str, list], state: Mapping[str, Any]) -> list[list[float | Reward | None]]:
        """Return the values of every function; coroutines run at the same time.

        state: arguments that are no lists. A function gets those that it names, and one with **columns gets TRL_GIVES too.
        """
        results: list[Any] = []
        count = len(lists["completions"])
        for function, name, wanted in zip(self.functions, self.names, self.wanted, strict=True):
            # copies: a function may change the lists that it gets, and the next function gets the same values
            arguments = {key: [*lists[key]] for key in wanted or lists if key in lists}
            parameters = {parameter.name for parameter in _parameters(function)}
            further = {*(wanted or TRL_GIVES), *parameters} - arguments.keys()
            arguments |= {key: state[key] for key in further & state.keys()}
            with seen(what := f"the reward function {name!r}"), put_back(what):
                try:
                    results.append(function(**arguments))
                except (Exception, SystemExit) as error:
                    results.append(error)
        if any(map(inspect.isawaitable, results)):
            with seen(what := f"one of the reward functions {', '.join(self.names)}"), put_back(what):
                results = awaited(_side_by_side(results))
        return [_checked(name, values, count) for name, values in zip(self.names, results, strict=True)]

    def _combined(self, values: Sequence[float | Reward | None]) -> Reward:
        """Return the weighted sum of one sample's values."""
        total, parts, extra, graded, advantage, applies = 0.0, {}, {}, None, math.nan, False
        weights = [weight(progress()) for weight in self.weights]
        for name, weight, value in zip(self.names, weights, values, strict=True):
            if value is None:
                continue
            applies = applies or weight != 0  # a function with weight 0 is only logged
            more = value.parts if isinstance(value, Reward) else {name: value}
            if both := parts.keys() & more.keys():
                raise RewardError(f"two reward functions give a part {min(both)!r}: rename one, only one can be logged")
            parts |= more
            if isinstance(value, Reward):
                if graded is None or graded.correct or not value.known:  # right only if all graders say so
                    graded = value
                if not math.isnan(value.advantage):
                    if not math.isnan(advantage):
                        raise RewardError(
                            f"{name!r} is the second reward function that gives an advantage: only one can"
                        )
                    advantage = value.advantage
                extra |= value.extra or {}
                value = value.value
            # 0 times NaN is NaN, and a function with weight 0 is only logged
            total += weight * value if weight else 0.0
        if not applies:
            return Reward(math.nan, False, parts, extra=extra)
        if graded is None:
            return Reward(total, total >= self.solved, parts)
        return Reward(total, graded.correct, parts, graded.outcome, advantage, extra)


def _checked(name: str, values: Any, count: int) -> list[float | Reward | None]:
    """Return a function's values as a list of this length. Raises RewardError if they are no such list, or it raised."""
    function = f"the reward function {name!r}"
    if isinstance(values, BaseException):
        raise RewardError(f"{function} raised {error_line(values)}") from values
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Mapping, Set)):
        raise RewardError(f"{function} gave {type(values).__name__}, not a list of {plural(count, 'value')}")
    try:  # a generator may have no end
        values = list(values if isinstance(values, Sized) else islice(values, count + 1))
    except Exception as error:
        raise RewardError(f"{function} raised {error_line(error)}") from error
    if len(values) != count:
        raise RewardError(f"{function} gave {plural(len(values), 'value')} for {plural(count, 'completion')}")
    for sample, value in enumerate(values):
        if isinstance(value, Reward) or value is None:
            continue
        try:
            number = float("none" if isinstance(value, (str, bytes)) else value)
        except (TypeError, ValueError, OverflowError):
            raise RewardError(f"{function} gave {str(value)[:80]!r}, which is no number", sample) from None
        if not abs(number) <= LARGEST:  # NaN too
            allowed = f"a number from {-LARGEST:g} to {LARGEST:g}, or None where it does not apply"
            raise RewardError(f"{function} gave {number}: {allowed}", sample)
        values[sample] = number
    return values


async def _side_by_side(results: Sequence[Any]) -> list[Any]:
    """Return the results, with each coroutine replaced by its own or its exception. Coroutines run at the same time."""

    async def settled(values: Any) -> Any:
        try:
            return await values if inspect.isawaitable(values) else values
        except (SystemExit, KeyboardInterrupt) as error:  # it would end the loop, and the call would seem to hang
            return error

    return await asyncio.gather(*map(settled, results), return_exceptions=True)


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _parameters(function: Function) -> list[inspect.Parameter]:
    """Return the parameters of the function's signature."""
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:  # built in
        return []


def _wanted(function: Function) -> list[str]:
    """Return the arguments that a function names; an empty list means all of them, as with **columns."""
    parameters = _parameters(function)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return []
    return [parameter.name for parameter in parameters]


def as_lists(example: Example, trajectories: Sequence[Trajectory], conversational: bool = False) -> dict[str, list]:
    """Return prompts, completions and the other arguments of reward functions: one list each, with one value per sample.

    In conversations (the example's `prompt` is a list of messages, or `conversational`), prompts are lists of messages, and
    completions the messages after them, with a prefill joined to its continuation. Otherwise both are texts. Further arguments:
    `truncated` (the token limit cut the answer short), `outcomes` (the rewards that environments gave), every column of the
    example, and if any is known `completion_ids` (the sampled tokens) and `lengths` (their numbers).
    """
    conversational = conversational or in_messages(example)
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
            later[0] = replace(later[0], content=prefill.content + later[0].sampled)
        prompts.append([message.as_dict() for message in start])
        completions.append([message.as_dict() for message in later])
    columns = {name: [value] * len(trajectories) for name, value in example.items()}
    lists = {"prompts": prompts, "completions": completions, "truncated": [t.truncated for t in trajectories]}
    lists["outcomes"] = [t.reward for t in trajectories]
    ids = [[token for step in trajectory.steps for token in step.action.ids] for trajectory in trajectories]
    if any(ids):
        lists |= {"completion_ids": ids, "lengths": list(map(len, ids))}
    return columns | lists


def in_messages(example: Example) -> bool:
    """Return whether the row has its prompt as a list of messages."""
    return isinstance(example.get("prompt"), (list, tuple))


def text_of(completion: str | Sequence[Mapping[str, str]]) -> str:
    """Return the text of the policy's last message, for either form of a completion."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
