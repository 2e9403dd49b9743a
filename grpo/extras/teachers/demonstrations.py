"""Demonstrations: answers that the rows of a task have, in place of samples (selection=demonstrations) or beside them
(teacher=rows); and which samples of others are worth imitating (selection=right)."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import takewhile
from math import floor

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo.engines.protocol import Sampling
from grpo.env.messages import Message
from grpo.env.rendering import Renderer
from grpo.env.tokens import Completion, Turn
from grpo.env.types import Example, State, Task
from grpo.extras.teachers.kinds import Teacher
from grpo.extras.tools.conversations import chat_message, messages_of
from grpo.objectives.batch import TokenBatch
from grpo.objectives.loss import Reduce, token_weights
from grpo.rollout.collate import collate
from grpo.rollout.draw import Draw, Everything, Outer, Selection
from grpo.rollout.episodes import play
from grpo.rollout.rollouts import Rollouts
from grpo.rollout.types import Group, Limits, Sample
from grpo.system.errors import UserError
from grpo.system.ranges import Share, enforced
from grpo.system.seeds import EVALUATION, derive_seed
from grpo.training.batch import RolloutBatch
from grpo.training.callbacks.evaluation import EvaluationCallback
from grpo.training.module import GRPOModule
from grpo.training.trainer import callbacks_of

log = logging.getLogger(__name__)


def demonstration_of(task: Task | None, example: Example) -> list[Message]:
    """Return the answer to learn from that an example has: messages of the policy, maybe with those of tools between them. [] if
    it has none. A conversation gives its last messages, after the question."""
    talk = getattr(task, "demonstration", lambda example: None)(example) or ()
    if not isinstance(talk, str | list | tuple):
        raise UserError(f"a demonstration is {talk!r}: it must be a text, or a list of messages")
    if isinstance(talk, str):
        return [Message("assistant", talk)] if talk.strip() else []
    if talk and not isinstance(talk[0], Message):
        talk = messages_of([chat_message(message) for message in talk])
    return [*takewhile(lambda message: message.role in ("assistant", "tool"), reversed(talk))][::-1]


def check_demonstrations(task: Task | None, looks: int = 100) -> None:
    """Raise UserError for a task whose first training rows have no demonstration."""
    rows = [] if task is None else task.examples("train")
    if not any(demonstration_of(task, rows[i]) for i in range(min(looks, len(rows)))):
        fix = "task.demonstration=COLUMN names a column of answers, of a dataset; a task of yours has a method `demonstration`"
        raise UserError(f"{type(task).__name__}: the first training rows have no demonstration to learn from: {fix}")


def completion(renderer: Renderer, message: Message) -> Completion:
    """Return a message of a demonstration as a completion. Nobody sampled it: each token has the log-probability 0."""
    ids = renderer.answer_ids(message)
    return Completion(ids, (0.0,) * len(ids), "stop", temperature=1.0)


def given_turns(state: State, messages: Sequence[Message], renderer: Renderer) -> tuple[Turn, ...]:
    """Return a demonstration as turns, the first one in this state."""
    turns: tuple[Turn, ...] = ()
    for i, message in enumerate(messages):
        if message.role == "assistant":
            talk = (*state.messages, *messages[:i])
            prompt = tuple(renderer.prompt_ids(talk, state.tools, turns[-1].ids if turns else ()))
            turns += (Turn(prompt, completion(renderer, message)),)
    return turns


@dataclass
class Reciter:
    """An engine whose samples are known: by the seed of each."""

    context: int | None
    known: Mapping[int, Completion]

    def sample(self, prompts, sampling: Sampling, seeds: Sequence[int], done=None) -> list[Completion]:
        return [self.known[seed] for seed in seeds]


@enforced("selection")
@dataclass
class Demonstrations(Outer):
    """The inner selection, whose groups are one demonstration each, played in the task's environment and graded by the task, in
    place of samples. One that is longer than an answer may be is left out, and so is an example without one. Mutable: the log
    says once how many.

    sampled: the share of rollouts that the policy samples all the same, evenly spaced (lambda of GKD, arXiv 2306.13649).
    """

    inner: Selection = field(default_factory=Everything)
    sampled: Share = 0.0
    logged: bool = False

    def select(self, draw: Draw) -> list[Group]:
        before, after = (floor(r * self.sampled + 1e-9) for r in (draw.r, draw.r + 1))
        if after > before:
            return self.inner.select(draw)
        if draw.play is None:
            line = "selection=demonstrations shows the answers of a task's rows, and a source gives samples of others"
            raise UserError(f"{line}: leave source= out, or take selection=all (algo=sft_distill imitates a source)")
        draw.play, draw.size = partial(draw.play, play=self.play), 1
        return [group for group in self.inner.select(draw) if group]

    def play(
        self, task: Task, examples: Sequence[Example], size: int, engine, renderer, sampling, seed, limits: Limits
    ) -> list[Group]:
        """Play the demonstrations of examples; see `rollout.episodes.play`. An example that is left out has an empty group."""
        known: dict[int, Completion] = {}
        kept: dict[int, list[Completion]] = {}  # by the place of the example
        for p, example in enumerate(examples):
            if said := self.said(task, example, renderer, sampling.max_tokens):
                kept[p], end = said, replace(said[-1], ids=said[-1].ids[-1:], logprobs=(0.0,))  # if it is asked on
                turns = enumerate([*said, *[end] * limits.max_turns])
                known |= {seed(p, s, turn): one for turn, one in turns for s in range(size)}
        line = left_out(len(kept), len(examples), sampling.max_tokens)
        if not kept:
            raise UserError(f"{line}: raise it, or take other rows")
        if len(kept) < len(examples) and not self.logged:
            log.warning("%s, and are left out", line)
            self.logged = True
        places, settings = [*kept], (Reciter(engine.context, known), renderer, sampling)
        played = play(task, [examples[p] for p in kept], size, *settings, lambda p, *of: seed(places[p], *of), limits)
        groups = {p: [first(one, kept[p]) for one in group] for p, group in zip(kept, played, strict=True)}
        return [groups.get(p, []) for p in range(len(examples))]

    def said(self, task: Task | None, example: Example, renderer: Renderer, most: int) -> list[Completion]:
        """Return the messages of an example's demonstration; [] if there is none, or a message has more than `most` tokens."""
        messages = demonstration_of(task, example)
        said = [completion(renderer, message) for message in messages if message.role == "assistant"]
        return said if all(len(one.ids) <= most for one in said) else []

    def held_out(self, module: GRPOModule, rollouts: Rollouts, at: int, reduce: Reduce) -> dict[str, float]:
        """Return the loss on the demonstrations of the rows that are evaluated after `at` rollouts, if an evaluation is due."""
        for evaluation in callbacks_of(module.trainer.callbacks, EvaluationCallback):
            evaluator = evaluation.evaluator
            if evaluator.due(at, rollouts.plan.num_rollouts):
                examples = evaluator.chosen(evaluation.examples[evaluator.split])
                if evaluation.rollout.ahead:  # which would use the task at the same time
                    evaluation.rollout.ahead.settle()
                loss = self.loss(module, rollouts, examples, reduce)
                return {} if loss is None else {"imitation/held_out": loss}
        return {}

    def loss(
        self, module: GRPOModule, rollouts: Rollouts, examples: Sequence[Example], reduce: Reduce = "token"
    ) -> float | None:
        """Return the cross-entropy with the demonstrations of these examples; None if there are none. Every rank makes all
        passes, since those of a sharded policy are made together."""
        task, plan, renderer = rollouts.task, rollouts.plan, rollouts.renderer
        sampling, most = plan.sampling, plan.sampling.max_tokens
        examples = [example for example in examples if self.said(task, example, renderer, most)]
        if not examples:
            return None
        seeds = partial(derive_seed, rollouts.seed, EVALUATION)
        groups = self.play(task, examples, 1, rollouts.engine, renderer, sampling, seeds, plan.limits)
        tokens = collate(groups).to(module.device)
        logprobs, _ = module.logprobs_of(module.policy, tokens, torch.arange(len(tokens)))
        return -float((token_weights(tokens.mask, reduce, most, tokens.sample) * logprobs).sum())


def left_out(kept: int, count: int, most: int) -> str:
    """Return how many of the examples of a rollout have no demonstration that can be learned from. most: tokens of a message."""
    return f"{count - kept} of {count} examples of a rollout have no demonstration of at most max_tokens={most}"


def first(sample: Sample, said: Sequence[Completion]) -> Sample:
    """Return a sample with the turns of a demonstration alone."""
    turns = tuple(replace(turn, completion=one) for turn, one in zip(sample.turns, said, strict=False))
    trajectory = replace(sample.trajectory, steps=sample.trajectory.steps[: len(said)])
    return replace(sample, turns=turns, trajectory=trajectory)


@dataclass
class Right(Outer):
    """The right samples of the inner selection's groups that no limit cut short: what is worth imitating of a teacher's samples
    (source=file), or of the policy's own (rejection sampling, arXiv 2308.01825)."""

    inner: Selection = field(default_factory=Everything)

    def select(self, draw: Draw) -> list[Group]:
        groups = self.inner.select(draw)
        right = [[s for s in group if s.reward.correct and not s.trajectory.truncated] for group in groups]
        if not any(right):
            line = f"selection=right: rollout {draw.r + 1} has no sample that is right and complete"
            raise UserError(f"{line}: raise rollout.prompts, or set selection=all")
        return [group for group in right if group]


class Beside(Teacher):
    """No model, but the demonstration of each prompt of a rollout, in a row beside the samples (teacher=rows). The log says once
    how many have none, or one that is longer than an answer may be."""

    logged = False

    def extended(self, tokens: TokenBatch, batch: RolloutBatch, rollouts: Rollouts) -> tuple[TokenBatch, Tensor | None]:
        size, most = batch.scores.rewards.shape[1], rollouts.plan.sampling.max_tokens
        shown: dict[int, Sample] = {}  # by the first sample of the group
        places = [g * size for g in dict.fromkeys((tokens.sample // size).tolist())]
        for place in places:
            for sample in [one for one in batch.groups[place // size] if one.turns][:1]:
                messages = demonstration_of(rollouts.task, sample.example)
                turns = given_turns(sample.trajectory.steps[0].state, messages, rollouts.renderer)
                if turns and all(len(turn.completion.ids) <= most for turn in turns):
                    shown[place] = replace(sample, turns=turns)
        if len(shown) < len(places) and not self.logged:
            log.warning(
                "%s: the policy learns from the samples of these alone", left_out(len(shown), len(places), most)
            )
            self.logged = True
        if not shown:
            return tokens, None
        rows = collate([[sample] for sample in shown.values()], [*shown]).to(tokens.ids.device)
        nothing = {"mask": torch.zeros_like(rows.mask), "turn": torch.full_like(rows.turn, -1)}
        nothing |= {"given": torch.full_like(rows.given, torch.nan), "fresh": torch.zeros_like(rows.fresh)}
        both = stacked(tokens, replace(rows, **nothing))
        given = torch.zeros_like(both.mask)
        given[len(tokens) :, : rows.completion_width] = rows.mask
        return both, given


def stacked(upper: TokenBatch, lower: TokenBatch) -> TokenBatch:
    """Return the rows of both, as wide as the widest prompt and the widest completion. `lower` has all fields of `upper`, or they
    are 0 there."""
    prompt_width = max(upper.prompt_width, lower.prompt_width)
    width, filled = max(upper.completion_width, lower.completion_width), {"turn": -1, "given": torch.nan}

    def padded(batch: TokenBatch, name: str) -> Tensor:
        value = getattr(batch, name)
        if value is None:
            flat = (other := getattr(upper, name)) is not None and other.dim() == 1
            value = torch.zeros_like(batch.sample if flat else batch.rollout_logprobs)
        left = prompt_width - batch.prompt_width if name in ("ids", "attention_mask") else 0
        right = width - batch.completion_width
        return value if value.dim() == 1 else pad(value, (left, right), value=filled.get(name, 0))

    names = [f.name for f in fields(upper) if isinstance(getattr(upper, f.name), Tensor)]
    names += ["temperature"] if upper.temperature is None else []
    return replace(upper, **{name: torch.cat([padded(upper, name), padded(lower, name)]) for name in names})
