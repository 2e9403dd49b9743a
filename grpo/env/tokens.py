"""Token ids, log-probabilities, masks and scores. Knows nothing of text, tasks or models.

Shapes: N prompts, G samples of each, S = N x G; B rows, P prompt width, C completion width. Prompts are padded on the left
and completions on the right, so that column P is the first token after every prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self, get_args

Finish = Literal["stop", "length"]  # the policy ended it, or a limit of tokens did


@dataclass(frozen=True)
class Completion:
    """A sampled completion: ids (EOS among them where it came), the engine's log-probability of each, why it ended.

    versions: the version of the weights that sampled each token, for engines whose weights change during a rollout; else None.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    versions: tuple[int, ...] | None = None
    temperature: float | None = None  # at which it was sampled; None: the run's

    def __post_init__(self) -> None:
        if self.finish not in get_args(Finish):
            raise ValueError(f"a completion's finish is one of {', '.join(get_args(Finish))}, not {self.finish!r}")
        if len(self.ids) != len(self.logprobs):
            raise ValueError(f"{len(self.ids)} token ids but {len(self.logprobs)} log-probabilities")
        if self.versions is not None and len(self.ids) != len(self.versions):
            raise ValueError(f"{len(self.ids)} token ids but {len(self.versions)} versions")


class CompletionLike(Protocol):
    """A completion of any engine's class, which `completion_of` converts."""

    @property
    def ids(self) -> Sequence[int]:
        """The sampled token ids."""

    @property
    def logprobs(self) -> Sequence[float]:
        """The engine's log-probability of each token."""

    @property
    def finish(self) -> Finish:
        """The reason why the completion ended."""


def completion_of(done: CompletionLike) -> Completion:
    """Converts a completion of any class to a `Completion`."""
    versions, temperature = getattr(done, "versions", None), getattr(done, "temperature", None)
    return Completion(tuple(done.ids), tuple(done.logprobs), done.finish, versions and tuple(versions), temperature)


@dataclass(frozen=True)
class Turn:
    """One call of the engine: the prompt as it was sent, and what came back. advantages: of its tokens, if a source gave them."""

    prompt_ids: tuple[int, ...]
    completion: Completion
    advantages: tuple[float, ...] | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids of the prompt and of the completion."""
        return self.prompt_ids + self.completion.ids


@dataclass(frozen=True)
class Row:
    """One sequence for the model: a prompt, and the tokens after it. turns: the turn that sampled each token, -1 for none."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    turns: tuple[int, ...]
    logprobs: tuple[float, ...]  # the engine's; 0 where it sampled nothing

    @property
    def sampled(self) -> tuple[bool, ...]:
        """Which tokens the policy sampled."""
        return tuple(turn >= 0 for turn in self.turns)

    def extended(self, turn: Turn, number: int) -> Self | None:
        """The same with turn `number`, if its prompt goes on from here, to the very token; else None."""
        length = len(self.prompt_ids) + len(self.ids)
        if turn.prompt_ids[:length] != self.prompt_ids + self.ids:
            return None
        between, completion = turn.prompt_ids[length:], turn.completion
        return replace(
            self,
            ids=self.ids + between + completion.ids,
            turns=self.turns + (-1,) * len(between) + (number,) * len(completion.ids),
            logprobs=self.logprobs + (0.0,) * len(between) + completion.logprobs,
        )


def rows_of_turns(turns: Sequence[Turn]) -> list[Row]:
    """Return the fewest rows that hold each sampled token exactly once, after its own context. turns: of one
    episode, oldest first. A turn joins the latest row with all of which its prompt begins."""
    rows: list[Row] = []
    for number, turn in enumerate(turns):
        for i in reversed(range(len(rows))):
            if longer := rows[i].extended(turn, number):
                rows[i] = longer
                break
        else:
            done = turn.completion
            rows.append(Row(turn.prompt_ids, done.ids, (number,) * len(done.ids), done.logprobs))
    return rows
