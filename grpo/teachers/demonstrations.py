"""Demonstrations: answers that the rows of a task have, in place of samples (selection=demonstrations) or beside them
(teacher=rows); and which samples of others are worth imitating (selection=right)."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import takewhile

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo.engines.protocol import Done, Engine, Prompts, Sampling
from grpo.env.conversations import chat_message, messages_of
from grpo.env.messages import Message
from grpo.env.renderer import Renderer
from grpo.env.tokens import Completion, Turn
from grpo.env.types import Example, State, Task
from grpo.objectives.batch import TokenBatch
from grpo.rollout.collate import collate
from grpo.rollout.draw import Draw, Everything, Selection
from grpo.rollout.episodes import play
from grpo.rollout.rollouts import Rollouts
from grpo.rollout.selection import Outer
from grpo.rollout.types import Group, Limits, Sample
from grpo.system.errors import UserError
from grpo.teachers.kinds import Teacher
from grpo.training.batch import RolloutBatch

log = logging.getLogger(__name__)


def demonstration_of(task: Task | None, example: Example) -> tuple[Message, ...]:
    """Return the answer to learn from that an example has: messages of the policy, maybe with those of tools between them. () if
    it has none. Of a conversation these are its last messages, after the question."""
    answer = getattr(task, "demonstration", lambda example: None)(example)
    if answer is None or isinstance(answer, str):
        return (Message("assistant", answer),) if answer and answer.strip() else ()
    talk = [*answer]
    if not all(isinstance(message, Message) for message in talk):
        talk = [*messages_of([chat_message(message) for message in talk])]
    last = [*takewhile(lambda message: message.role in ("assistant", "tool"), reversed(talk))][::-1]
    while last and last[-1].role == "tool":
        last.pop()
    return tuple(last)


def check_demonstrations(task: Task | None, looks: int = 100) -> None:
    """Raise UserError for a task whose first training rows have no demonstration."""
    rows = [] if task is None else task.examples("train")
    if not any(demonstration_of(task, rows[i]) for i in range(min(looks, len(rows)))):
        fix = "task.demonstration=COLUMN names a column of answers, of a dataset; a task of yours has a method `demonstration`"
        raise UserError(f"{type(task).__name__}: the first training rows have no demonstration to learn from: {fix}")


def completion(renderer: Renderer, message: Message) -> Completion:
    """Return a message of a demonstration as a completion. Nobody sampled it: each token has the log-probability 0."""
    ids = renderer.answer_ids(message)
    return Completion(ids, (0.0,) * len(ids), "stop")


def turns_of(state: State, messages: Sequence[Message], renderer: Renderer) -> list[Turn]:
    """Return a demonstration as turns, the first one in this state."""
    turns: list[Turn] = []
    talk = state.messages
    for message in messages:
        if message.role == "assistant":
            prompt = renderer.prompt_ids(talk, state.tools, turns[-1].ids if turns else ())
            turns.append(Turn(tuple(prompt), completion(renderer, message)))
        talk = (*talk, message)
    return turns


@dataclass
class Reciter:
    """An engine whose samples are known: by the seed of each."""

    context: int | None
    known: Mapping[int, Completion]

    def sample(
        self, prompts: Prompts, sampling: Sampling, seeds: Sequence[int], done: Done | None = None
    ) -> list[Completion]:
        return [self.known[seed] for seed in seeds]


@dataclass
class Demonstrations(Outer):
    """The inner selection, whose groups are one demonstration each, played in the task's environment and graded by the task, in
    place of samples. One that is longer than an answer may be is left out, and so is an example without one: with an empty
    group. Mutable: the log says once how many."""

    inner: Selection = field(default_factory=Everything)
    logged: bool = False

    def select(self, draw: Draw) -> list[Group]:
        draw.rollouts, draw.size = replace(draw.rollouts, play=self.play), 1
        return [group for group in self.inner.select(draw) if group]

    def play(
        self,
        task: Task,
        examples: Sequence[Example],
        group_size: int,
        engine: Engine,
        renderer: Renderer,
        sampling: Sampling,
        seed: Callable[[int, int, int], int],
        limits: Limits,
    ) -> list[Group]:
        """Play the demonstrations of examples; see `rollout.episodes.play`."""
        known: dict[int, Completion] = {}
        kept: dict[int, int] = {}  # turns of the demonstrations that fit, by their place
        for p, example in enumerate(examples):
            messages = demonstration_of(task, example)
            said = [completion(renderer, message) for message in messages if message.role == "assistant"]
            if said and all(len(one.ids) <= sampling.max_tokens for one in said):
                kept[p] = len(said)
                end = replace(said[-1], ids=said[-1].ids[-1:], logprobs=(0.0,))  # the environment asks on
                turns = [*said, *[end] * limits.max_turns]
                known |= {seed(p, s, turn): turns[turn] for s in range(group_size) for turn in range(limits.max_turns)}
        if len(kept) < len(examples):
            line = (
                f"{len(examples) - len(kept)} of {len(examples)} examples of a rollout have no demonstration of at most"
            )
            line += f" max_tokens={sampling.max_tokens}, and are left out"
            if not kept:
                raise UserError(f"{line}: raise max_tokens, or name other rows")
            if not self.logged:
                log.warning("%s; later ones are left out in silence", line)
            self.logged = True
        places, reciter = [*kept], Reciter(engine.context, known)
        settings = renderer, sampling, lambda p, s, turn: seed(places[p], s, turn), limits
        played = play(task, [examples[p] for p in places], group_size, reciter, *settings)
        groups = dict(zip(places, played, strict=True))
        return [[first(sample, kept[p]) for sample in groups.get(p, ())] for p in range(len(examples))]


def first(sample: Sample, turns: int) -> Sample:
    """Return a sample with its first turns alone, at temperature 1 whatever the run's is."""
    steps, kept = sample.trajectory.steps[:turns], sample.turns[:turns]
    kept = tuple(replace(turn, completion=replace(turn.completion, temperature=1.0)) for turn in kept)
    return replace(sample, turns=kept, trajectory=replace(sample.trajectory, steps=steps))


@dataclass
class Right(Outer):
    """The right samples of the inner selection's groups that no limit cut short: what is worth imitating of a teacher's samples
    (source=file), or of the policy's own (rejection sampling, arXiv 2308.01825)."""

    inner: Selection = field(default_factory=Everything)

    def select(self, draw: Draw) -> list[Group]:
        right = [
            [s for s in group if s.reward.correct and not s.trajectory.truncated] for group in self.inner.select(draw)
        ]
        if not any(right):
            fix = "raise rollout.prompts, or set selection=all"
            raise UserError(f"selection=right: rollout {draw.r + 1} has no sample that is right and complete: {fix}")
        return [group for group in right if group]


class Rows(Teacher):
    """No model, but the demonstration of each prompt of a rollout, in a row beside the samples (teacher=rows)."""

    def extended(self, tokens: TokenBatch, batch: RolloutBatch, rollouts: Rollouts) -> tuple[TokenBatch, Tensor | None]:
        size, most = batch.scores.rewards.shape[1], rollouts.plan.sampling.max_tokens
        shown: dict[int, Sample] = {}  # by the group's first sample
        for g in (tokens.sample // size).unique().tolist():
            sample = next((one for one in batch.groups[g] if one.turns), None)
            messages = sample and demonstration_of(rollouts.task, sample.example)
            if messages:
                turns = turns_of(sample.trajectory.steps[0].state, messages, rollouts.renderer)
                if all(len(turn.completion.ids) <= most for turn in turns):
                    shown[g * size] = replace(sample, turns=tuple(turns))
        if not shown:
            return tokens, None
        rows = collate([[sample] for sample in shown.values()], [*shown]).to(tokens.ids.device)
        nothing = {"mask": torch.zeros_like(rows.mask), "turn": torch.full_like(rows.turn, -1)}
        nothing |= {"given": torch.full_like(rows.given, torch.nan), "fresh": torch.zeros_like(rows.fresh)}
        both = below(tokens, replace(rows, **nothing))
        given = torch.zeros_like(both.mask)
        given[len(tokens) :, : rows.completion_width] = rows.mask
        return both, given


def below(upper: TokenBatch, lower: TokenBatch) -> TokenBatch:
    """Return the rows of both, as wide as the widest prompt and the widest completion."""
    prompt_width = max(upper.prompt_width, lower.prompt_width)
    width, filled = max(upper.completion_width, lower.completion_width), {"turn": -1, "given": torch.nan}

    def padded(batch: TokenBatch, name: str) -> Tensor:
        value = getattr(batch, name)
        value = torch.zeros_like(batch.rollout_logprobs) if value is None else value
        left = prompt_width - batch.prompt_width if name in ("ids", "attention_mask") else 0
        right = width - batch.completion_width
        return value if value.dim() == 1 else pad(value, (left, right), value=filled.get(name, 0))

    names = [f.name for f in fields(upper) if isinstance(getattr(upper, f.name), Tensor)]
    names += ["temperature"] if upper.temperature is None else []
    return replace(upper, **{name: torch.cat([padded(upper, name), padded(lower, name)]) for name in names})
