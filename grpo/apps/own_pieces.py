"""Tries the algorithm, and the user's own sampler, selection, player, engine and callbacks on made-up input, before a model is
loaded."""

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

from grpo.apps.try_algorithm import advice, check_algorithm
from grpo.config.explain import with_keys
from grpo.data.prompts import Sampler, Uniform
from grpo.env.messages import Message
from grpo.env.tokens import Completion, Turn
from grpo.env.types import Action, Example, Reward, State, Step, Trajectory
from grpo.objectives.algorithm import Algorithm
from grpo.rollout.draw import Draw, Selection
from grpo.rollout.types import Group, Plan, Sample
from grpo.system.errors import UserError, error_line
from grpo.system.output.users_code import code_name, is_own, of_user

SAMPLER = "draw(rollout, count, first), progress(rollouts), and observe([(example, rewards), ...]) if it is there"
PLAY = ("task", "examples", "group_size", "engine", "renderer", "sampling", "seed", "limits")
NEVER = ("on_validation", "on_test", "on_predict", "on_sanity")  # hooks of loops that a run does not have
ENGINE = {"load_weights": ("model", "version"), "sample": ("prompts", "sampling", "seeds"), "close": ()}


def check_objective(algorithm: Algorithm, plan: Plan, critic: bool) -> None:
    """Raises UserError if the algorithm does not fit the plan, or a function of it fails; logs the advice. critic: it has one."""
    check_algorithm(algorithm, plan.prompts, plan.group_size, plan.ahead, critic)
    for line in advice(algorithm):
        logging.getLogger(__name__).warning("%s", with_keys(line))


def tried_sampler(make: Callable[..., Sampler], examples: Sequence[Example], size: int, seed: int) -> Sampler:
    """Return the sampler. If it, or its weight function, is the user's, another one has drawn twice before."""
    with trying("sampler", make, "examples, size, seed"):
        sampler = make(examples, size, seed)
    code = next(
        (each for each in (sampler, getattr(sampler, "weight", None)) if each is not None and is_own(each)), None
    )
    if code is None:
        return sampler
    with trying("sampler", code, SAMPLER):
        for rollout in range(2):
            drawn = sampler.draw(rollout, size)
            if not isinstance(drawn, Sequence) or not 0 < len(drawn) <= size or not all(map(is_row, drawn)):
                raise TypeError(f"draw must return a list of at most {size} examples, and gave {type(drawn).__name__}")
            if observe := getattr(sampler, "observe", None):
                observe([(example, [Reward(1.0, True), Reward(0.0, False)]) for example in drawn])
            if not isinstance(metrics := sampler.progress(rollout + 1), Mapping):
                raise TypeError(f"progress must return a dict of numbers, and gave {type(metrics).__name__}")
        if hasattr(sampler, "state_dict"):
            sampler.load_state_dict(deepcopy(sampler.state_dict()))
    return make(examples, size, seed)


def is_row(example: Any) -> bool:
    """Return whether something is a row of a dataset."""
    return isinstance(example, Mapping)


def made_groups(
    examples: Sequence[Example], places: Sequence[int], size: int, skip: int = 0, **sampling: Any
) -> list[Group]:
    """Return a group of `size` samples of each example, which are right in turn; see `Draw`."""
    return [[made_sample(example, s + skip) for s in range(size)] for example in examples]


def made_sample(example: Example, s: int) -> Sample:
    """Return a sample of two tokens, which is right if its number is odd."""
    step = Step(State((Message("user", "a question"),)), Action(Message("assistant", f"answer {s}"), ids=(1, 2)))
    turn = Turn((1,), Completion((1, 2), (-1.0, -0.5), "stop"))
    return Sample(example, Trajectory((step,)), (turn,), Reward(float(s % 2), s % 2 == 1))


def tried_selection(
    selection: Selection, plan: Plan, examples: Sequence[Example], algorithm: Algorithm, seed: int
) -> Selection:
    """Return the selection. If it is the user's, a copy has chosen from made-up groups, in two rollouts."""
    if not is_own(selection) or len(examples) < plan.prompts:  # a source has none
        return selection
    twin, sampler = deepcopy(selection), Uniform(examples, plan.prompts, seed)
    with trying(
        "selection", selection, "select(draw), where draw has more(count, size), extend, greedy, scores and prompts"
    ):
        for r in range(2):
            groups = twin.select(Draw(r, plan, seed, algorithm, partial(sampler.draw, r), made_groups))
            if not isinstance(groups, list) or not all(isinstance(s, Sample) for group in groups for s in group):
                raise TypeError(
                    f"select must return a list of groups, lists of samples, and gave {type(groups).__name__}"
                )
        if hasattr(twin, "state_dict"):
            twin.load_state_dict(deepcopy(twin.state_dict()))
    return selection


def check_own(play: Any, engine: Any, callbacks: Sequence[Any], base: type) -> None:
    """Raise UserError for a player, an engine or a callback of the user's that cannot be called as a run calls it. A call needs a
    model, so only the arguments are looked at. base: the class of callbacks."""
    if is_own(play):
        check_call("play", play, "", PLAY)
    for method, names in ENGINE.items() if is_own(engine) else ():
        check_call("engine", engine, method, names)
    for callback in filter(is_own, callbacks):
        for hook in [name for name in dir(base) if name.startswith("on_")]:
            owner = next(c for c in type(callback).__mro__ if hook in vars(c))
            never = hook.startswith(NEVER)
            if owner is base or (never and not is_own(owner)):  # a class of Lightning may have them
                continue
            if never:
                line = f"callbacks ({code_name(callback)}): a run never calls {hook}"
                raise UserError(f"{line}: take on_train_batch_end, where batch.evaluations has what was evaluated")
            wanted = base.__dict__[hook].__code__.co_varnames[1 : base.__dict__[hook].__code__.co_argcount]
            given = len(wanted) - len(base.__dict__[hook].__defaults__ or ())
            check_call("callbacks", callback, hook, wanted[:given])


@contextmanager
def trying(key: str, code: Any, gets: str) -> Iterator[None]:
    """Raise UserError, with the place of the user's code, for what it raises on made-up input. gets: its arguments, in words."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a user's code may raise anything
        raise UserError(
            f"{key}{of_user(code, error)} fails on made-up input: {error_line(error)}; it gets {gets}"
        ) from error


def check_call(key: str, code: Any, method: str, names: Sequence[str]) -> None:
    """Raise UserError unless the user's code can be called, or its method, with as many arguments as there are names."""
    function = getattr(code, method, None) if method else code
    if not callable(function):
        raise UserError(f"{key} ({code_name(code)}) has no method {method}({', '.join(names)})")
    try:
        inspect.signature(function).bind(*names)
    except TypeError as error:
        line = f"{key} ({code_name(code)}): {method or 'it'} must take ({', '.join(names)})"
        raise UserError(f"{line}: {error}") from error
