"""The seam between training and generation: token ids in, token ids and their log-probabilities out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from grpo.env.tokens import CompletionLike
from grpo.system.errors import UserError

if TYPE_CHECKING:  # eval.py compare= has no need of torch
    from torch import nn

GUIDES = ("regex", "json", "grammar", "choice")


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. temperature 0 is greedy; top_p 1, top_k 0, min_p 0 and repetition_penalty 1 switch that one off.

    stop_ids: tokens that end a completion, beside the model's own. guided: what every completion is forced to be, by engines
    that can: one of {"regex": PATTERN}, {"json": SCHEMA}, {"grammar": EBNF}, {"choice": [TEXT, ...]}.
    repetition_penalty divides the positive logits of tokens that were there before, and multiplies the others (arXiv 1909.05858).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_ids: Sequence[int] = ()
    guided: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, allowed in {
            "max_tokens": isinstance(self.max_tokens, int) and self.max_tokens >= 1,
            "temperature": self.temperature >= 0,
            "top_p": 0 < self.top_p <= 1,
            "top_k": self.top_k >= 0,
            "min_p": 0 <= self.min_p < 1,
            "repetition_penalty": self.repetition_penalty > 0,
        }.items():
            if not allowed:
                raise UserError(
                    f"sampling.{name}={getattr(self, name)} is out of range: a whole max_tokens >= 1, temperature >= 0, "
                    "0 < top_p <= 1, top_k >= 0 (0 is off), 0 <= min_p < 1, repetition_penalty > 0 (1 is off)"
                )
        if not all(isinstance(token, int) and token >= 0 for token in self.stop_ids):
            raise UserError(f"sampling.stop_ids={list(self.stop_ids)} must be token ids, as [13, 198]")
        if self.guided is not None and (len(self.guided) != 1 or not self.guided.keys() <= set(GUIDES)):
            raise UserError(f"sampling.guided={dict(self.guided)} must have exactly one key of {', '.join(GUIDES)}")


class Engine(Protocol):
    """Whatever samples from the policy.

    version: which weights it holds; None before the first load. context: tokens that a prompt and its completion may have
    together, None where there is no limit; asked for after the first load.

    An engine may offer more, which is looked for by name. apart = True: its weights are no memory of the policy's, so it may
    sample while the policy learns. in_flight = True: it takes weights while it samples, from another thread, and says which
    drew each token. sleep(): the policy is about to learn, give back what memory can be spared until the next load or sample.
    """

    @property
    def version(self) -> int | None: ...

    @property
    def context(self) -> int | None: ...

    def load_weights(self, model: "nn.Module", version: int) -> None:
        """Take the weights of `model` (a Hugging Face causal LM, maybe with a PEFT adapter) as version `version`.

        After it nothing that older weights computed, a prefix cache for one, may still be used.
        """

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        done: Callable[[int, CompletionLike], None] | None = None,
    ) -> Sequence[CompletionLike]:
        """One completion for each prompt, in order. Equal prompts are how a group is asked for.

        done: told of a prompt's place and completion as soon as it is finished, while others are not, by engines that can.

        seeds: one a prompt. The same prompt, weights and seed give the same completion, whatever else is in the batch.
        The completion's log-probabilities are those of softmax(logits / temperature) over the whole vocabulary, before
        penalties, guides, top-p, top-k and min-p (and at temperature 1 when greedy): what the trainer computes for the same
        tokens.
        """

    def close(self) -> None:
        """At the end of a run, and only then: an engine may take torch's process group with it."""
