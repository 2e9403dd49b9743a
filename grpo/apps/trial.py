"""Tries an environment, an agent or a score of the user's on one made-up episode, before a model is loaded.

Reward functions of a plain question have a trial of their own: `rewards.combined.Rewards.try_foreign`.
"""

import logging
from collections.abc import Mapping
from copy import deepcopy

from grpo.env.messages import Message
from grpo.env.types import Action, Example, Split, State, Step, Task, Trajectory
from grpo.rewards.resolve import OURS, module_of
from grpo.rollout.environment import Environment
from grpo.rollout.rewarding import Scorer
from grpo.system.calls import Calls, awaited
from grpo.system.errors import UserError, error_line

log = logging.getLogger(__name__)

PATIENCE = 5.0  # seconds of one call, after which it is left alone: a run has limits of its own
ROWS = 2  # whose environments must all fail to start for the run to be refused
ANSWER = "I think it is 42."


def try_task(task: Task, splits: Mapping[str, tuple[Task, Split]]) -> None:
    """Play and score a made-up episode of a training row, if its code is the user's. splits: the task and the split of each name.

    Raises UserError, which names the form that the code got, if no environment starts, or if the score fails. Logs a warning if
    an environment fails at the answer: a run goes on without such episodes.
    """
    if "train" not in splits or not is_users(task):
        return
    states = hasattr(task, "state_dict") and hasattr(task, "load_state_dict")
    before = deepcopy(task.state_dict()) if states else {}
    rows = task.examples("train")
    errors = []
    for place in range(min(ROWS, len(rows))):
        error = awaited(play_once(task, rows[place]))
        if error is None:
            break
        errors.append(error)
    else:
        raise UserError(f"an environment of {type(task).__name__} fails at its start: {error_line(errors[0])}")
    if states:
        task.load_state_dict(before)


def is_users(task: Task) -> bool:
    """Return whether the user's code plays the episodes of a task, or scores those with several turns."""
    named = [getattr(task, name, None) for name in ("environment", "make")]
    classes = [type(task).__module__, *(module_of(code) for code in named if callable(code))]
    return any(not module.startswith(OURS) for module in classes) or getattr(task, "looks", 0) > 0


async def play_once(task: Task, example: Example) -> BaseException | None:
    """Play an episode that the answer ends, and score it. Returns the error of an environment that does not start."""
    calls = Calls(1, f"the trial of {type(task).__name__}")
    env = Environment(calls, (0, 0), PATIENCE)
    try:
        state = await env.start(task, example, 0, 0)
        if not isinstance(state, State):
            return state if isinstance(state, Exception) and not isinstance(state, TimeoutError) else None
        step = Step(state, Action(Message("assistant", ANSWER), ids=(1, 2, 3)))
        after = await env.step(step.action)
        reward = after if not isinstance(after, State | None) else await env.outcome()
        if failure := next((one for one in (after, reward) if isinstance(one, Exception)), None):
            if not isinstance(failure, TimeoutError):
                words = "an environment of %s raised %s (tried with a made-up answer: %r, which calls no tool)"
                log.warning(words, type(task).__name__, error_line(failure), ANSWER)
            return None
        goes_on = isinstance(after, State)
        end, last = ("out_of_turns", after) if goes_on else ("answered", None)
        trajectory = Trajectory((step,), end, last, reward=reward)
        _, error = await Scorer(task, PATIENCE, threads=1)(example, [trajectory], [env.env])
        if error is not None:
            raise UserError(f"{error} (tried with a made-up answer; {form_of(task)})") from error
        return None
    finally:
        await env.close()
        calls.close()


def form_of(task: Task) -> str:
    """Return the form in which a task's score gets an episode, in words."""
    if getattr(task, "several_turns", False):
        last = "completions[i][-1]['content'] is the text of the last one"
        return f"completions are lists of messages, because episodes may have several turns: {last}"
    return "trajectory.answer is the text of the last message, trajectory.messages the conversation"
