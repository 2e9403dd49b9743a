"""The policy as its own teacher: it reads a context that the student does not see, and scores the student's tokens."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from grpo.env.pictures import MARK
from grpo.env.types import Example, State, Trajectory
from grpo.extras.teachers.kinds import Start
from grpo.models.policy import Reference
from grpo.models.pretrained import context_of
from grpo.objectives.batch import TokenBatch
from grpo.rollout.rollouts import Rollouts
from grpo.rollout.types import Group
from grpo.system.errors import UserError
from grpo.system.ranges import Share, enforced
from grpo.training.batch import RolloutBatch


@enforced("teacher")
@dataclass(eq=False)
class Itself(Start):
    """teacher=self (OPSD, arXiv 2601.18734; SDFT, arXiv 2601.19897; SDPO, arXiv 2601.20802). Mutable: it has the weights.

    weights: live: the policy as it is; start: as it was before training; ema: its mean theta', which begins as the policy, and
    theta' <- (1 - alpha) theta' + alpha theta after each update. The mean of an adapter is that of each matrix by itself, so that
    B A of the means is not the mean of B A.
    context: solution: `column` of the row, or the task's right answer; feedback: `column` of what a reward function logs with
    log_extra; sibling: what the first other sample of the group with a reward of `success` or more wrote after the same state;
    None: the teacher reads what the student does. prompt: replaces the last user message; {question} is that message. A row
    without context, or too long with it for the model, is out of the teacher's part of the loss.
    """

    weights: Literal["live", "start", "ema"] = "live"
    alpha: Share = 0.05
    context: Literal["solution", "feedback", "sibling"] | None = "solution"
    column: str | None = None
    success: float = 1.0
    prompt: str = "{question}\n\nA right answer:\n{context}\n\nNow answer in your own words."

    has_model = True

    def __post_init__(self) -> None:
        if missing := [name for name in ("{question}", "{context}") if name not in self.prompt]:
            raise UserError(f"teacher.prompt={self.prompt!r} lacks {missing[0]}: write it where that text belongs")
        if self.context == "feedback" and self.column is None:
            line = "name a column that a reward function writes with log_extra (docs/rewards.md)"
            raise UserError(f"teacher.context=feedback, and teacher.column is null: {line}")

    # -- the weights

    def attach(self, policy: nn.Module) -> None:
        self.policy = policy
        self.start = None if self.weights == "live" else Reference(policy, moves=self.weights == "ema")

    def own(self, phase: str = "") -> list[Tensor]:
        return super().own(phase) if self.start else []

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        with super().model() if self.start else nullcontext(self.policy) as model:
            yield model

    def moved(self) -> None:
        if self.weights == "ema":
            self.start.move(self.alpha)

    def state_dict(self) -> dict[str, Any]:
        return self.start.weights if self.weights == "ema" else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.weights == "ema" and state.keys() != self.start.weights.keys():
            line = "ckpt_path has no mean of this policy for teacher.weights=ema"
            raise UserError(f"{line}: give the teacher= and adapter= of that run")
        if self.weights == "ema":
            self.start.load(dict(state))

    # -- the context

    def reading(self, tokens: TokenBatch, batch: RolloutBatch, rollouts: Rollouts) -> tuple[TokenBatch, Tensor | None]:
        if self.context is None:
            return tokens, None
        examples, task = batch.scores.examples, rollouts.task
        if self.context == "solution" and all(self.solution(example, task) is None for example in examples):
            columns = ", ".join(examples[0])
            raise UserError(f"teacher.context=solution: no row has one; set teacher.column to one of {columns}")
        size, most = batch.scores.rewards.shape[1], context_of(self.policy.config) or float("inf")
        cut = getattr(rollouts.renderer, "keep", None)  # the length of a prompt that may lack its beginning
        prompts, read = [], []
        rows = zip(tokens.sample.tolist(), tokens.turn.tolist(), tokens.sequences(), strict=True)
        for s, turns, (prompt, rest) in rows:
            turn = next((k for k in turns if k >= 0), None)
            ids = () if turn is None else self.longer(batch.groups[s // size], s % size, turn, rollouts)
            read.append(0 < len(ids) <= most - len(rest) and len(ids) != cut)
            prompts.append(ids if read[-1] else prompt)
        return with_prompts(tokens, prompts), torch.tensor(read, device=tokens.ids.device)

    def longer(self, group: Group, s: int, turn: int, rollouts: Rollouts) -> tuple[int, ...]:
        """Return the prompt of a turn of sample s with the context, as tokens; empty without context."""
        steps = group[s].trajectory.steps
        state = steps[turn].state if turn < len(steps) else State(())  # samples of others may be tokens alone
        asked = [i for i, message in enumerate(state.messages) if message.role == "user"]
        if state.prompt is not None or not asked or not (context := self.text(group, s, state, rollouts.task)):
            return ()
        messages, last = [*state.messages], asked[-1]
        marked = bool(messages[last].pictures)  # an <image> of the context would be the place of a picture
        texts = {"question": messages[last].content, "context": context.replace(MARK, "") if marked else context}
        text = re.sub(r"\{(question|context)\}", lambda found: texts[found[1]], self.prompt)
        messages[last] = replace(messages[last], content=text)
        return tuple(rollouts.renderer.prompt_ids(messages, state.tools))

    def text(self, group: Group, s: int, state: State, task: object) -> str | None:
        """Return the context of sample s in a state; None if there is none."""
        if self.context == "sibling":
            right = (other for i, other in enumerate(group) if i != s and other.reward.value >= self.success)
            return next(filter(None, (written_after(state, other.trajectory) for other in right)), None)
        extra = group[s].reward.extra or {}
        found = self.solution(group[s].example, task) if self.context == "solution" else extra.get(self.column)
        return None if found is None else str(found)

    def solution(self, example: Example, task: object) -> Any:
        """Return the right answer of a row; None if it has none."""
        return getattr(task, "gold", lambda row: None)(example) if self.column is None else example.get(self.column)


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
