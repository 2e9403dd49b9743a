"""The policy as its own teacher: it reads a context that the student does not see, and scores the student's tokens."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from grpo.env.types import State, Trajectory
from grpo.models.policy import Reference
from grpo.models.pretrained import context_of
from grpo.objectives.batch import TokenBatch
from grpo.rollout.rollouts import Rollouts
from grpo.rollout.types import Group
from grpo.system.errors import UserError
from grpo.system.ranges import Share, enforced
from grpo.teachers.average import Average
from grpo.teachers.kinds import Teacher
from grpo.training.batch import RolloutBatch

PROMPT = "{question}\n\nA right answer:\n{context}\n\nNow answer in your own words."


class Itself(Teacher):
    """teacher=self (OPSD, arXiv 2601.18734; SDFT, arXiv 2601.19897; SDPO, arXiv 2601.20802).

    weights: live: the policy as it is; start: as it was before training; ema: its mean, see `Average`, with alpha.
    context: solution: the task's right answer, or `column` of the row; feedback: `column` of what a reward function logs with
    log_extra; sibling: what the first other sample of the group with a reward of `success` or more wrote after the same state;
    None: the teacher reads what the student does. prompt: replaces the last user message; {question} is that message. A row
    without context, or too long with it for the model, is out of the teacher's part of the loss.
    """

    has_model = True

    @enforced("teacher")
    def __init__(
        self,
        weights: Literal["live", "start", "ema"] = "live",
        alpha: Share = 0.05,
        context: Literal["solution", "feedback", "sibling"] | None = "solution",
        column: str | None = None,
        success: float = 1.0,
        prompt: str = PROMPT,
    ) -> None:
        if missing := [name for name in ("{question}", "{context}") if name not in prompt]:
            raise UserError(f"teacher.prompt={prompt!r} lacks {missing[0]}: write {{question}} and {{context}} in it")
        if context == "feedback" and column is None:
            line = "name a column that a reward function writes with log_extra (docs/rewards.md)"
            raise UserError(f"teacher.context=feedback, and teacher.column is null: {line}")
        self.weights, self.alpha, self.context = weights, alpha, context
        self.column, self.success, self.prompt = column, success, prompt

    # -- the weights

    def attach(self, policy: nn.Module) -> None:
        super().attach(policy)
        self.start = Reference(policy) if self.weights == "start" else None
        self.average = Average(policy, self.alpha) if self.weights == "ema" else None

    def own(self) -> list[Tensor]:
        return (self.start or self.average).own() if self.start or self.average else []

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        if self.start:
            with self.start.model() as model:
                yield model
        else:
            yield self.average.model() if self.average else self.policy

    def moved(self) -> None:
        if self.average:
            self.average.move()

    def state_dict(self) -> dict[str, Any]:
        return self.average.state_dict() if self.average else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.average:
            self.average.load_state_dict(state)

    # -- the context

    def reading(self, tokens: TokenBatch, batch: RolloutBatch, rollouts: Rollouts) -> tuple[TokenBatch, Tensor | None]:
        if self.context is None:
            return tokens, None
        size, most = batch.scores.rewards.shape[1], context_of(self.policy.config) or float("inf")
        cut = getattr(rollouts.renderer, "keep", None)  # the length of a prompt that may lack its beginning
        prompts, judged = [], []
        rows = zip(tokens.sample.tolist(), tokens.turn.tolist(), tokens.sequences(), strict=True)
        for s, turns, (prompt, rest) in rows:
            turn = next((k for k in turns if k >= 0), None)
            ids = () if turn is None else self.longer(batch.groups[s // size], s % size, turn, rollouts)
            judged.append(0 < len(ids) <= most - len(rest) and len(ids) != cut)
            prompts.append(ids if judged[-1] else prompt)
        return with_prompts(tokens, prompts), torch.tensor(judged, device=tokens.ids.device)

    def longer(self, group: Group, s: int, turn: int, rollouts: Rollouts) -> tuple[int, ...]:
        """Return the prompt of a turn of sample s with the context, as tokens; empty without context."""
        steps = group[s].trajectory.steps
        state = steps[turn].state if turn < len(steps) else State(())  # of others' samples there may be tokens alone
        users = [i for i, message in enumerate(state.messages) if message.role == "user"]
        if state.prompt is not None or not users or not (context := self.text(group, s, state, rollouts.task)):
            return ()
        messages, last = [*state.messages], users[-1]
        texts = {"question": messages[last].content, "context": context}
        text = re.sub(r"\{(question|context)\}", lambda found: texts[found[1]], self.prompt)
        messages[last] = replace(messages[last], content=text)
        return tuple(rollouts.renderer.prompt_ids(messages, state.tools))

    def text(self, group: Group, s: int, state: State, task: object) -> str | None:
        """Return the context of sample s in a state; None if there is none."""
        if self.context == "sibling":
            right = (other for i, other in enumerate(group) if i != s and other.reward.value >= self.success)
            return next(filter(None, (written_after(state, other.trajectory) for other in right)), None)
        if self.context == "feedback":
            found = (group[s].reward.extra or {}).get(self.column)
        elif self.column is not None:
            if self.column not in (example := group[s].example):
                raise UserError(f"teacher.column={self.column} is not in a row: it has {', '.join(example)}")
            found = example[self.column]
        elif (gold := getattr(task, "gold", None)) is not None:
            found = gold(group[s].example)
        else:
            raise UserError("teacher.context=solution, and the task knows no right answers: name a teacher.column")
        return None if found is None else str(found)


def written_after(state: State, trajectory: Trajectory) -> str | None:
    """Return what an episode adds to the conversation of a state, as text; None if the episode did not come by it."""
    n, talks = len(state.messages), [(*step.state.messages, step.action.message) for step in trajectory.steps]
    later = [talk[n:] for talk in talks if talk[:n] == state.messages and len(talk) > n]
    return "\n".join(message.content for message in later[-1]) if later else None


def with_prompts(tokens: TokenBatch, prompts: Sequence[Sequence[int]]) -> TokenBatch:
    """Return the same completions after other prompts, one for each row."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + [*prompt] for prompt in prompts])  # [B, P']
    seen = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    new, old = {"ids": ids, "attention_mask": seen}, tokens.prompt_width
    both = {name: torch.cat([x.to(tokens.ids), getattr(tokens, name)[:, old:]], dim=1) for name, x in new.items()}
    return replace(tokens, **both, host=None)
