"""Count the bytes that the head reads and writes for each token and vocabulary entry, and measure its CPU seconds.

    python benchmarks/head.py [OTHER_TREE] [--vocabulary 49152] [--width 576] [--tokens 512] [--repeats 7] [--seconds]

Bytes are counted, not measured: every operation reads its operands and writes its results, of those that have a column for each
entry; caches do not exist. `compiled` is what inductor, torch's compiler, counts for the kernels that it generates, and the
products beside them; on a CPU it fuses the same operations as for a GPU. OTHER_TREE: a folder with another version of this
project, whose head takes turns with this one. Seconds are medians, on one thread, in float32.
"""

import argparse
import logging
import sys
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from statistics import median
from types import ModuleType

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parents[1]))
from shapes import llama, model_of

from grpo.models import head as ours
from grpo.models import token_scores


class Wide(TorchDispatchMode):
    """Counts the bytes of tensors with a column for each entry that operations read and write."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.read, self.written = vocabulary, 0, 0

    def bytes_of(self, values) -> int:
        tensors = [each for each in tree_leaves(values) if isinstance(each, Tensor) and each.ndim == 2]
        return sum(t.numel() * t.element_size() for t in tensors if t.stride(0) == self.vocabulary or self.turned(t))

    def turned(self, tensor: Tensor) -> bool:
        """Whether it is the transpose of such a tensor."""
        return tensor.stride() == (1, self.vocabulary)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        returns = function._schema.returns
        view = len(returns) > 0 and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if not view and not function.name().startswith(("aten::empty", "aten::detach")):
            self.read, self.written = self.read + self.bytes_of((args, kwargs)), self.written + self.bytes_of(result)
        return result


def counted(head: ModuleType, model: torch.nn.Module, hidden: Tensor, targets: Tensor) -> list[float]:
    """Return the bytes of a forward and of a backward pass, for each token and entry."""
    found, vocabulary = [], model.config.vocab_size
    with Wide(vocabulary) as forward:
        logprobs, _ = head.token_values(model, hidden, targets, 1.0, False)
    with Wide(vocabulary) as backward:
        logprobs.sum().backward()
    for wide in (forward, backward):
        found.append((wide.read + wide.written) / len(targets) / vocabulary)
    model.zero_grad()
    return found


def compiled(dtype: torch.dtype, vocabulary: int) -> list[float]:
    """Return the bytes of the compiled formulas, forward and backward, for each token and entry, as inductor counts them."""
    from torch._inductor import config, metrics

    config.force_disable_caches = True  # what is not compiled is not counted
    torch._logging.set_logs(inductor_metrics=True)
    logging.getLogger("torch._inductor").handlers.clear()
    logits, targets, numbers, found = torch.randn(64, vocabulary).to(dtype), torch.arange(64), torch.randn(64), []
    for function, given in (
        (token_scores.scores_of_rows, (targets, 1.0)),
        (token_scores.gradient_of_rows, (numbers, numbers, 1.0)),
    ):
        metrics.reset()
        torch.compile(function, fullgraph=True)(logits, *given)
        found.append(metrics.num_bytes_accessed / logits.numel())
    return found


def seconds(head: ModuleType, model: torch.nn.Module, hidden: Tensor, targets: Tensor) -> tuple[float, float]:
    """Return the CPU seconds of a forward and of a backward pass."""
    begun = time.process_time()
    logprobs, _ = head.token_values(model, hidden, targets, 1.0, False)
    between = time.process_time()
    logprobs.sum().backward()
    model.zero_grad()
    return between - begun, time.process_time() - between


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", nargs="?", type=Path)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", action="store_true", help="no counts")
    given = parser.parse_args()
    torch.set_num_threads(1)
    heads = {"this tree": ours}
    if given.other:
        spec = spec_from_file_location("other_head", given.other / "grpo" / "models" / "head.py")
        heads = {"other tree": module_from_spec(spec), **heads}
        spec.loader.exec_module(heads["other tree"])
    if not given.seconds:
        for dtype in (torch.bfloat16, torch.float32):
            for pieces in (1, 2):
                model, hidden, targets = made(4099, 64, 256, dtype)
                for name, head in heads.items():
                    head.LOGITS_AT_ONCE["cpu"] = 256 * 4099 // pieces
                    forward, backward = counted(head, model, hidden, targets)
                    print(f"{name}, {dtype}, {pieces} chunks: {forward:.0f} + {backward:.0f} bytes")
            forward, backward = compiled(dtype, 8192)
            print(f"compiled, {dtype}: {forward:.0f} + {backward:.0f} bytes beside the products")
    model, hidden, targets = made(given.vocabulary, given.width, given.tokens, torch.float32)
    taken = {name: [] for name in heads}
    for name, head in list(heads.items()) * (given.repeats + 1):
        head.LOGITS_AT_ONCE["cpu"] = 1 << 23
        taken[name].append(seconds(head, model, hidden, targets))
    for name, both in taken.items():
        forward, backward = (median(column) for column in zip(*both[1:], strict=True))
        print(f"{name}: {forward:.3f} + {backward:.3f} CPU s for {given.tokens} tokens x {given.vocabulary} entries")


def made(vocabulary: int, width: int, tokens: int, dtype: torch.dtype) -> tuple[torch.nn.Module, Tensor, Tensor]:
    """Return a model of one layer with its own head, states and targets."""
    config = llama("tiny")
    config.vocab_size, config.hidden_size, config.num_hidden_layers, config.tie_word_embeddings = (
        vocabulary,
        width,
        1,
        False,
    )
    hidden = torch.randn(tokens, width, dtype=dtype).requires_grad_()
    return model_of(config, dtype), hidden, torch.randint(vocabulary, (tokens,))


if __name__ == "__main__":
    main()
