"""The interface between training and sampling: token ids in, token ids and their log-probabilities out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from grpo.engines.only_vllm import check_only_vllm
from grpo.engines.stop_texts import StopTexts
from grpo.env.tokens import CompletionLike
from grpo.system.ranges import Count, NonNegative, Positive, ShareBelow1, SomeShare, Whole, enforced

if TYPE_CHECKING:  # eval.py compare= must not import torch
    from torch import nn

Prompts = Sequence[Sequence[int]]  # token ids
Done = Callable[[int, CompletionLike], None]  # see `Engine.sample`


@enforced("sampling")
@dataclass(frozen=True)
class Sampling:
    """Parameters of sampling. Temperature 0 is greedy; top_p=1, top_k=0, min_p=0 and repetition_penalty=1 switch that filter off.

    repetition_penalty: for tokens that occur in the prompt or in the completion so far, divides positive logits and multiplies
    negative ones (arXiv 1909.05858).
    stop_ids: tokens that end a completion, in addition to the model's own. stop: texts that do.
    guided: forces the form of every completion, in engines that support it: one of `{"regex": PATTERN}`, `{"json": SCHEMA}`,
    `{"grammar": EBNF}`, `{"choice": [TEXT, ...]}`. vllm: further parameters of vLLM, by its own names (`only_vllm`).
    """

    max_tokens: Count
    temperature: NonNegative = 1.0
    top_p: SomeShare = 1.0
    top_k: Whole = 0
    min_p: ShareBelow1 = 0.0
    repetition_penalty: Positive = 1.0
    stop_ids: Sequence[Whole] = ()
    guided: Mapping[str, Any] | None = None
    stop: StopTexts | tuple[()] = ()
    vllm: Mapping[str, Any] | None = None
    temperatures: Sequence[Positive] = ()  # of the samples of a group in turn, in place of `temperature`

    def __post_init__(self) -> None:
        check_only_vllm(self.guided, self.vllm)


class Engine(Protocol):
    """Samples completions from the policy.

    An engine may have further members, which are looked up by name:

    apart: True if its weights do not share memory with the policy's, so that it may sample while the policy learns.
    shared_bytes: of its weights that are the policy's own; 0 before the first load.
    in_flight: True if it takes new weights from another thread while it samples, and reports which weights drew each token.
    concurrent: True if several threads may call `sample` at once, and each completion has its `versions`.
    unwanted: the server sets it to a set before each call, and adds prompts whose completions nobody needs: they may end early.
    fit(room): called before the first load with what the run leaves of a GPU; the engine chooses how much it takes.
    play_on(stream): called before rollouts beside the update, on a GPU: all its work is on this stream of CUDA from then on.
    sleep(): called before an update; frees the memory that it can spare until the next load or sample.
    sample may take temperatures=, one for each prompt, in place of the sampling's; else prompts of each have a call of their own.
    score(sequences, top): for each token {id: log-probability}, its own and the `top` largest; {} for the first; temperature 1.
    """

    @property
    def version(self) -> int | None:
        """The version of the weights that it holds; None before the first load."""

    @property
    def context(self) -> int | None:
        """The largest number of tokens of a prompt and its completion together; None: no limit. Read after the first load."""

    def load_weights(self, model: "nn.Module", version: int) -> None:
        """Take the weights of `model` (a Hugging Face causal LM, maybe with a PEFT adapter) as version `version`.

        Afterwards nothing computed with older weights, such as a prefix cache, may be used.
        """

    def sample(
        self, prompts: Prompts, sampling: Sampling, seeds: Sequence[int], done: Done | None = None
    ) -> Sequence[CompletionLike]:
        """Return one completion per prompt, in order. To sample a group, repeat its prompt.

        seeds: one per prompt. The same prompt, weights and seed give the same completion, whatever else is in the batch.
        done: called with a prompt's index and completion as soon as the completion is finished, by engines that can.

        The log-probabilities of a completion are log softmax(logits / temperature) over the whole vocabulary, before
        penalties, guides, top-p, top-k and min-p; for greedy sampling the temperature counts as 1. The trainer computes the
        same for the same tokens.
        """

    def close(self) -> None:
        """Free its resources. Call it only at the end of a run: an engine may destroy torch's process group."""
