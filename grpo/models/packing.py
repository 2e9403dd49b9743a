"""Chooses which rows go through the model together, and the layout in which the model's results are
correct."""

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from grpo.models.language import probe_ids
from grpo.models.logprobs import Layout, completion_logprobs
from grpo.models.packed_attention import Kernel
from grpo.models.probe_lengths import LONGEST, beyond_sizes, probe_sizes
from grpo.models.trusted import objection
from grpo.objectives.batch import OF_ROWS, TokenBatch
from grpo.system import distributed
from grpo.system.distributed import computes_in, is_sharded, one_pass
from grpo.system.errors import UserError
from grpo.system.memory import sent

log = logging.getLogger(__name__)

# describes how far a layout and its kernel are from plain passes of a model; "" if they agree
Compare = Callable[[nn.Module, Layout, Kernel | None], str]
ON_GPU: list[Kernel] = []  # the kernel that `trusted` tries before sdpa; a run's KernelsCallback puts it here
FEW = (9, 5)  # tokens of the prompts on which layouts are compared


def in_microbatches(
    batch: TokenBatch, rows: Tensor, layout: Layout, max_tokens: int, model: nn.Module | None = None
) -> list[tuple[Tensor, TokenBatch]]:
    """Return the microbatches of these rows: the indices, [b], on their device, and the rows. rows: their
    indices, [n]. model: where its parameters are shared out, all ranks get the same number, some of them with
    a silent row.

    The host waits for the device here and not between microbatches: it packs one while the device works on
    those before.
    """
    found: list[tuple[Tensor, TokenBatch]] = []
    if len(rows):
        held, places = with_host(batch), rows.cpu()
        pieces = [places[piece] for piece in microbatches(held.rows(places), layout, max_tokens)]
        found = [(sent(piece, batch.ids.device), held.rows(piece)) for piece in pieces]
    if model is not None and is_sharded(model):
        missing = max(distributed.all_gather([len(found)])) - len(found)
        found += [(rows[:0], batch.rows(slice(0, 1)).silenced())] * missing
    return found


def with_host(batch: TokenBatch) -> TokenBatch:
    """Return the batch with a copy of its ids, masks, samples, rows and taught tokens in the host's memory, if it
    is on a device. The host waits once."""
    if batch.ids.device.type == "cpu":
        return batch
    parts = {name: getattr(batch, name) for name in ("ids", "attention_mask", "mask", "sample", "row", "teaching")}
    parts |= {"mask": batch.passed().mask, "teaching": None if batch.teaching is None else batch.teaching > 0}
    there = {name: part[:, None] if name in OF_ROWS else part for name, part in parts.items() if part is not None}
    pieces = torch.cat([*there.values()], dim=1).cpu().split([part.shape[1] for part in there.values()], dim=1)
    host = {name: piece[:, 0] if name in OF_ROWS else piece for name, piece in zip(there, pieces, strict=True)}
    host["mask"] = host["mask"].bool()
    return replace(batch, host=TokenBatch(**host, rollout_logprobs=torch.zeros(host["mask"].shape)))


def microbatches(batch: TokenBatch, layout: Layout, max_tokens: int) -> list[Tensor]:
    """Return the rows' indices, [b] each, in the host's memory, in pieces of at most `max_tokens` seen
    tokens: longest first, equal prompts together.

    A longer row is a piece of its own.
    """
    numbers: dict[object, int] = {}
    rows = []  # number of the prompt, its length, the length of what follows
    for r, (prompt, completion) in enumerate(batch.sequences()):
        number = numbers.setdefault(prompt if layout == "shared_prompt" else r, len(numbers))
        rows.append((number, len(prompt), len(completion)))
    groups = defaultdict(list)
    for r in sorted(range(len(rows)), key=lambda r: -rows[r][2]):
        groups[rows[r][0]].append(r)

    def size(members: Sequence[int]) -> int:
        return tokens_seen([rows[r] for r in members], layout)

    # by tokens, not by so many rows: answers differ tenfold in length, and memory grows with tokens
    pieces: list[list[int]] = [[]]
    for members in sorted(groups.values(), key=size, reverse=True):
        # keep them together in the next piece
        if size(members) <= max_tokens < size([*pieces[-1], *members]):
            pieces.append([])
        for r in members:
            if pieces[-1] and size([*pieces[-1], r]) > max_tokens:
                pieces.append([])
            pieces[-1].append(r)
    return [torch.tensor(piece) for piece in pieces]


def tokens_seen(rows: Sequence[tuple[int, int, int]], layout: Layout) -> int:
    """Return how many tokens go through the model for these rows in this layout.

    rows: number of the prompt, its length, the length of what follows.
    """
    completions = [length for _, _, length in rows]
    if layout == "padded":
        return len(rows) * (max(prompt for _, prompt, _ in rows) + max(completions))
    return sum({number: prompt for number, prompt, _ in rows}.values()) + sum(completions)


def trusted(model: nn.Module, layout: Layout, compare: Compare | None = None) -> tuple[Layout, Kernel | None]:
    """Return the layout to use for `model`, and its kernel: `layout`, or padded if the two disagree on a few
    tokens.

    This finds models that need more of attention than a plan supports, and models with a recurrent state.
    compare: describes the disagreement; None: of log-probabilities.
    """
    if far := [f"{size:,}" for size in probe_sizes(model) if size > LONGEST]:
        line = "%s: layers may change after %s tokens; layouts are compared on shorter rows"
        log.info(line, type(model).__name__, " and ".join(far))
    if layout != "padded":
        compare = compare or disagreement
        kernel = next(iter(ON_GPU), None) if next(model.parameters()).is_cuda else None
        of_kernel = kernel.objection(model, layout, compare) if kernel else ""
        if kernel and not of_kernel:
            return layout, kernel
        if not (why := objection(model, partial(compare, model, layout, None))):
            if kernel and not kernel.failed:  # else it has said so
                line = "%s does not fit %s (%s): attention is computed by sdpa, which is slower on a GPU"
                log.warning(line, kernel.name, type(model).__name__, of_kernel)
            return layout, None
        log.warning("optim.layout=%s does not fit %s (%s): layout=padded is used", layout, type(model).__name__, why)
    if compare in (None, disagreement) and (why := objection(model, partial(padding_error, model), by_plan=False)):
        line = f"{type(model).__name__} computes a padded row otherwise than the row alone ({why})"
        raise UserError(f"{line}, so that rows of several lengths cannot be trained: take another model")
    return "padded", None


def padding_error(model: nn.Module) -> str:
    """Describe the error of a few rows' log-probabilities in the padded layout, against the same rows
    alone."""

    def error(lengths: tuple[int, int], bound: float) -> str:
        batch = few_tokens(model, lengths)
        with torch.autocast(batch.ids.device.type, enabled=False):
            padded, _ = one_pass(model, completion_logprobs, batch, 1.0)
            alone = [one_pass(model, completion_logprobs, row_alone(batch, r), 1.0)[0][0] for r in range(len(batch))]
        return error_in(model, padded[batch.mask], torch.cat(alone), bound)

    return beyond_sizes(model, error, FEW, bound=0.01)  # of a recurrent state: 0.1


def disagreement(model: nn.Module, layout: Layout, kernel: Kernel | None) -> str:
    """Describe the error of a few rows' log-probabilities, in the precision of the parameters."""

    def error(lengths: tuple[int, int], bound: float) -> str:
        batch = few_tokens(model, lengths)
        with torch.autocast(batch.ids.device.type, enabled=False):
            exact, _ = one_pass(model, completion_logprobs, batch, 1.0)
            got, _ = one_pass(model, completion_logprobs, batch, 1.0, False, layout, kernel)
        return error_in(model, got[batch.mask], exact[batch.mask], bound)

    return beyond_sizes(model, error, FEW, bound=1e-4)


def error_in(model: nn.Module, got: Tensor, exact: Tensor, bound: float = 1e-4) -> str:
    """Describe by how much log-probabilities differ. Empty if each error is at most the bound in float32, or
    their mean at most 0.1 in 16 bits."""
    gaps = (got - exact).abs()
    # in 16 bits, neighbouring numbers are 0.06 to 0.25 apart if logits are large
    is_exact = computes_in(model) == torch.float32
    gap, bound = (float(gaps.max()), bound) if is_exact else (float(gaps.mean()), 0.1)
    return "" if gap <= bound else f"log-probabilities differ by {gap:.2g}"


def row_alone(batch: TokenBatch, row: int) -> TokenBatch:
    """Return one of the `few_tokens` without padding."""
    ids, mask = batch.ids[row, batch.attention_mask[row].bool()], batch.mask[row, batch.mask[row]]
    return TokenBatch(
        ids[None], torch.ones_like(ids)[None], mask[None], torch.zeros(mask.shape)[None], batch.sample[:1]
    )


def few_tokens(model: nn.Module, lengths: tuple[int, int] = FEW) -> TokenBatch:
    """Return random tokens, a batch of 5 rows: three of one prompt of 9 tokens, two of a prompt of 5; 1 to 7
    tokens follow.

    lengths: of other prompts, the longer one first, with one row each.
    """
    generator, longest = torch.Generator().manual_seed(0), lengths[0]
    vocabulary = model.config.get_text_config().vocab_size
    texts = torch.randint(vocabulary, (2, longest), generator=generator).tolist()
    prompts = [[*seen, *text[longest - n :]] for seen, text, n in zip(probe_ids(model), texts, lengths, strict=True)]
    longest = max(map(len, prompts))
    owner, widths = ([0, 0, 0, 1, 1], [3, 7, 5, 6, 1]) if lengths == FEW else ([0, 1], [7, 5])
    padded = torch.tensor([[0] * (longest - len(prompts[n])) + prompts[n] for n in owner])
    ids = torch.cat([padded, torch.randint(vocabulary, (len(owner), 7), generator=generator)], dim=1)
    real = torch.ones_like(ids)
    real[:, :longest] = torch.arange(longest) >= longest - torch.tensor([len(prompts[n]) for n in owner])[:, None]
    real[:, longest:] = torch.arange(7) < torch.tensor(widths)[:, None]
    batch = TokenBatch(ids, real, real[:, longest:].bool(), torch.zeros(len(owner), 7), torch.arange(len(owner)))
    return batch.to(next(model.parameters()).device)
