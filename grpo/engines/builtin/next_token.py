"""From logits to tokens: filters the distribution by the sampling parameters, then draws by one uniform
number per token.

Knows nothing of models or caches. Shapes: n samples, B of them rows of the present batch; V vocabulary.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import repeat

import torch
from torch import Tensor

from grpo.engines.protocol import Sampling
from grpo.env.tokens import Completion
from grpo.models.token_scores import divided
from grpo.system.memory import sent

LOGITS_PER_DRAW = 1 << 25  # logits processed at once; each takes about five more numbers of memory


def filter_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """Set logits to -inf where top-k, top-p (after top-k) or min-p excludes the token. logits: [B, V]. Returns [B, V].

    top-p keeps the smallest set of most likely tokens whose probability reaches top_p. min-p keeps tokens that are at least min_p
    times as likely as the most likely one (arXiv 2407.01082).
    """
    if 0 < sampling.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[:, -1:], -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        probs = ordered.softmax(-1)
        cut = probs.cumsum(-1) - probs >= sampling.top_p
        logits = logits.masked_fill(torch.zeros_like(cut).scatter(-1, order, cut), -torch.inf)
    if sampling.min_p > 0:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < sampling.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return logits


def penalize(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Lower the logits of tokens that occurred before, see `Sampling`. logits: [B, V]; seen: [B, V] bool. Returns [B, V]."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return the token at which the cumulative distribution passes `uniform`. weights: [B, V], in proportion to probabilities;
    uniform: [B] in [0, 1).

    One number per row decides, so a row's draw depends on its own seed only. Sums are in the dtype of `uniform`: float64 if the
    device supports it, since vocabularies are large. Returns [B] int64.
    """
    # with dtype=, cumsum would make two tensors of that size
    cumulative = weights.to(uniform.dtype).cumsum_(-1)
    threshold = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1).clamp(max=weights.shape[-1] - 1)


class NextTokens:
    """Draws and stores the tokens of n samples. Mutable: rows join and leave, and each step draws a token for every row."""

    def __init__(
        self,
        prompts: Sequence[tuple[int, ...]],
        sampling: Sampling,
        seeds: Sequence[int],
        device,
        temperatures: Sequence[float] | None = None,
    ) -> None:
        self.temperatures = None if temperatures is None else sent(torch.tensor(temperatures), device)  # [n]
        self.prompts, self.sampling, self.seeds, self.device = prompts, sampling, seeds, device
        shape = len(prompts), sampling.max_tokens
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self.uniform = torch.empty(shape, dtype=dtype, device=device)
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(shape, device=device)
        self.rows = torch.zeros(0, dtype=torch.int64, device=device)  # [B], the sample of each row
        self.counts = torch.zeros_like(self.rows)  # [B], each row's tokens so far
        self.samples, self.lengths = [], []  # the same two in the host's memory
        self.unseen = 0  # steps since `ended`
        self.seen: Tensor | None = None  # [B, V], tokens that occurred before

    def join(self, new: Sequence[int], vocabulary: int) -> None:
        """Append these samples as rows. vocabulary: V."""
        width, dtype = self.uniform.shape[1], self.uniform.dtype
        # on the host, one a sample: a GPU's generator draws other numbers for the same seed
        generators = [torch.Generator().manual_seed(self.seeds[i]) for i in new]
        noise = torch.stack([torch.rand(width, generator=generator, dtype=dtype) for generator in generators])
        rows = sent(torch.tensor(new), self.device)
        self.uniform[rows] = sent(noise, self.device)
        self.rows = torch.cat([self.rows, rows])
        self.counts = torch.cat([self.counts, self.counts.new_zeros(len(new))])
        self.samples, self.lengths = [*self.samples, *new], [*self.lengths, *(0 for _ in new)]
        if self.sampling.repetition_penalty != 1:
            seen = torch.zeros(len(new), vocabulary, dtype=torch.bool)
            for row, i in zip(seen, new, strict=True):
                row[[token for token in self.prompts[i] if token >= 0]] = True  # below 0: pictures
            seen = sent(seen, self.device)
            self.seen = seen if self.seen is None else torch.cat([self.seen, seen])

    def step(self, logits: Tensor) -> Tensor:
        """Draw a token for every row. logits: [B, V]. Returns [B]."""
        size = max(1, LOGITS_PER_DRAW // logits.shape[-1])
        uniform = self.uniform[self.rows, self.counts].split(size)
        seen = repeat(None) if self.seen is None else self.seen.split(size)
        of_all, own = self.sampling.temperature or 1.0, self.temperatures
        temperature = repeat(of_all) if own is None else own[self.rows].split(size)
        drawn = [self.drawn(*piece) for piece in zip(logits.split(size), uniform, temperature, seen, strict=False)]
        token, logprobs = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        self.tokens[self.rows, self.counts] = token
        self.logprobs[self.rows, self.counts] = logprobs
        if self.seen is not None:
            self.seen.scatter_(1, token[:, None], True)
        self.counts = self.counts + 1
        self.lengths, self.unseen = [length + 1 for length in self.lengths], self.unseen + 1
        return token

    def drawn(
        self, logits: Tensor, uniform: Tensor, temperature: float | Tensor, seen: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return a token for each row, [b], and its log-probability under the model at this temperature, [b]. logits: [b, V].
        temperature: a number, or [b]."""
        sampling = self.sampling
        scaled = divided(logits.float(), temperature)
        # as in `scores_of_rows`: a CPU's log_softmax is less exact; and the draw takes the same weights
        most = scaled.amax(-1, keepdim=True)
        weights = (scaled - most).exp_()
        log_total = weights.sum(-1, keepdim=True).log()
        penalized = scaled if seen is None else penalize(scaled, seen, sampling.repetition_penalty)
        filtered = filter_logits(penalized, sampling)
        shares = weights if filtered is scaled else filtered.softmax(-1)
        token = filtered.argmax(-1) if sampling.temperature == 0 else draw(shares, uniform)
        # without penalty and filters: the trainer knows neither, and the ratio compares with its log-probabilities
        return token, (scaled.gather(-1, token[:, None]) - most - log_total).squeeze(-1)

    def tails(self, width: int) -> list[list[int]]:
        """Return the last tokens of each row, at most `width` of them. Waits for the device."""
        columns = self.counts[:, None] - torch.arange(width, 0, -1, device=self.device)  # [B, width]
        last = self.tokens[self.rows[:, None], columns.clamp(min=0)].tolist()
        return [ids[max(0, width - count) :] for ids, count in zip(last, self.lengths, strict=True)]

    def due(self, every: int) -> bool:
        """Return whether to ask `ended`: after `every` steps, and if a row has as many tokens as it may have."""
        return self.unseen >= every or max(self.lengths) == self.sampling.max_tokens

    def ended(self, stop_ids: Collection[int], unwanted: Collection[int]) -> dict[int, tuple[int, bool]]:
        """Return the rows that have ended, each with its number of tokens until then, and whether the last token ended it (else a
        limit or the caller did). Waits for the device. stop_ids: tokens that end a row. unwanted: samples that end now."""
        stop, ended = self.sampling.stop, {}
        last = self.tails(self.unseen + (stop.width - 1 if stop else 0))
        for row, (ids, length) in enumerate(zip(last, self.lengths, strict=True)):
            for later in reversed(range(min(self.unseen, length))):
                text = ids[: len(ids) - later]
                if text[-1] in stop_ids or (stop and stop.end(text)):
                    ended[row] = length - later, True
                    break
            else:
                if length == self.sampling.max_tokens or self.samples[row] in unwanted:
                    ended[row] = length, False
        self.unseen = 0
        return ended

    def completions(self, ended: Mapping[int, tuple[int, bool]]) -> Iterator[tuple[int, Completion]]:
        """Yield sample number and completion of rows that have `ended`."""
        samples, longest = [self.samples[row] for row in ended], max(length for length, _ in ended.values())
        rows = sent(torch.tensor(samples), self.device)
        texts = (x[rows, :longest].tolist() for x in (self.tokens, self.logprobs))
        for i, (length, stop), ids, logprobs in zip(samples, ended.values(), *texts, strict=True):
            yield i, Completion(tuple(ids[:length]), tuple(logprobs[:length]), "stop" if stop else "length")

    def keep(self, order: Sequence[int]) -> Tensor:
        """Reorder the rows: row i becomes what row order[i] was. Returns the order as a tensor, [B] int64."""
        self.samples, self.lengths = ([of_row[i] for i in order] for of_row in (self.samples, self.lengths))
        places = sent(torch.tensor(order, dtype=torch.int64), self.device)
        self.rows, self.counts = self.rows[places], self.counts[places]
        self.seen = None if self.seen is None else self.seen[places]
        return places
