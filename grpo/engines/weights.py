"""Reads from a Hugging Face model what an engine needs: the tensors of its checkpoint, and the ids that end a
completion.

Knows nothing of vLLM: a trainer that sends weights over a network uses it too.
"""

import zlib
from collections.abc import Iterable, Iterator
from copy import deepcopy
from functools import lru_cache

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.core_model_loading import revert_weight_conversion

from grpo.models.adapted import dequantize, without_adapter
from grpo.models.language import beside_language
from grpo.system.distributed import full, is_sharded
from grpo.system.errors import UserError
from grpo.system.memory import in_pieces

# not all at once: merged adapters and gathered shards are copies, which exist for one bucket at a time
BUCKET = 1 << 28  # bytes of weights handed over at once; a larger tensor goes alone


def eos_token_ids(path: str, default: int | list[int] | None) -> list[int]:
    """Return the ids that end a completion: from generation_config.json (a chat model often has several),
    else `default`."""
    try:
        ids = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # the folder has none
        ids = None
    ids = default if ids is None else ids
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def checkpoint(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors as in the base model's checkpoint; a PEFT adapter is merged into copies, one
    layer at a time.

    Merging in place and undoing it is not exact in floating point: the trainer's weights would drift. The
    tensors of a sharded model are whole, one at a time, so all ranks must take them; they have the number
    type of the model's files.
    """

    base = without_adapter(model)

    def whole(tensor: Tensor) -> Tensor:
        low = is_sharded(model) and tensor.is_floating_point()
        return full(tensor.detach().to(getattr(model, "stored_in", tensor.dtype)) if low else tensor)

    @lru_cache(maxsize=1)
    def merged(owner: str) -> nn.Module:
        """A copy of a layer with all its adapters: those of experts are nested, one for each of their
        parameters."""
        part = base.get_submodule(owner)
        copies = {id(p): nn.Parameter(whole(p), False) for p in part.parameters()} if is_sharded(model) else {}
        layer = dequantize(deepcopy(part, copies))
        for adapter in layer.modules():
            if hasattr(adapter, "lora_A"):
                adapter.merge()
        return layer.get_base_layer()

    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    if base.config.tie_word_embeddings and any(hasattr(end, "base_layer") for end in ends):
        raise UserError("LoRA on a tied embedding or head cannot be merged: take both out of adapter.target_modules")
    once = {name for name, _ in base.named_parameters()}
    again = {name for name, _ in base.named_parameters(remove_duplicate=False)} - once  # such as a tied head
    beside = tuple(f"{name}." for name in beside_language(base))  # they never change
    for name, tensor in base.state_dict().items():
        owner, adapted, leaf = name.partition(".base_layer.")
        if name in again or "lora_" in name or name.startswith(beside):
            continue
        if adapted:
            leaf = leaf.replace("base_layer.", "")
            yield f"{owner}.{leaf}", merged(owner).state_dict()[leaf]
        else:
            layer = base.get_submodule(name.rpartition(".")[0])
            stored = name.endswith(".weight") and hasattr(layer, "dequantized")
            yield name, layer.dequantized() if stored else whole(tensor)


def as_in_files(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of `checkpoint` with the names and shapes of the model's files, as vLLM's loaders
    know them.

    transformers may hold the experts of a mixture in one tensor, where the files have one for each expert.
    """
    base = without_adapter(model)
    for name, tensor in checkpoint(model):
        files = revert_weight_conversion(base, {name: tensor})
        yield from ((key, part.contiguous()) for key, part in files.items())


def checksum(tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Return a number that changes if a name, or a number of a tensor, changes."""
    sums = ((zlib.crc32(name.encode()), t.contiguous().view(torch.uint8).sum(dtype=torch.int64)) for name, t in tensors)
    return sum(name * (1 + int(total)) for name, total in sums) % 2**53  # fits in JSON's numbers


def buckets(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the tensors in order, in lists of at most BUCKET bytes; a larger tensor is a list of its own."""
    return in_pieces(tensors, lambda named: named[1].nbytes, BUCKET)
