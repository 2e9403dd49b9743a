"""Muon, with AdamW for what is no matrix of a hidden layer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch.optim import AdamW, Muon, Optimizer

from grpo.extras.optimizers.adamw_8bit import Named
from grpo.system.ranges import Count, NonNegative, ShareBelow1

# matrices that are no linear map between hidden layers
OUTER = ("*embed*", "*wte.*", "*wpe.*", "*lm_head*", "*.head.*")


def muon(
    parameters: Named | Iterable[dict[str, Any]],
    lr: NonNegative,
    weight_decay: NonNegative = 0.0,
    momentum: ShareBelow1 = 0.95,
    nesterov: bool = True,
    ns_steps: Count = 5,
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw",
    betas: tuple[ShareBelow1, ShareBelow1] = (0.9, 0.99),
    adamw: Sequence[str] = OUTER,
) -> "MuonWithAdamW":
    """Return Muon (torch.optim.Muon) for the matrices of the hidden layers, and AdamW for everything else.

    momentum, nesterov, ns_steps: of Muon. adjust_lr_fn: match_rms_adamw gives a matrix steps as large as AdamW's, so that both
    have one learning rate (arXiv 2502.16982). betas: of AdamW. adamw: patterns of names of matrices that AdamW learns, too.
    """
    groups = list(parameters)
    groups = groups if groups and isinstance(groups[0], dict) else [{"params": groups}]
    of_muon, rest = [], []
    for group in groups:
        halves: tuple[list, list] = [], []
        for name, p in group["params"]:
            halves[p.ndim != 2 or any(fnmatchcase(f".{name}", pattern) for pattern in adamw)].append((name, p))
        for several, half in zip((of_muon, rest), halves, strict=True):
            several += [{**group, "params": half}] if half else []
    kinds: dict[str, tuple[Callable[..., Optimizer], list, dict[str, Any]]] = {
        "Muon": (
            Muon,
            of_muon,
            dict(momentum=momentum, nesterov=nesterov, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn),
        ),
        "AdamW": (AdamW, rest, dict(betas=tuple(betas), fused=True)),
    }
    common = {"lr": lr, "weight_decay": weight_decay}
    return MuonWithAdamW({name: kind(its, **common, **own) for name, (kind, its, own) in kinds.items() if its})


class MuonWithAdamW(Optimizer):
    """Several optimizers as one: its groups and its state are theirs. Muon's state is one number for each of a matrix.

    kinds: by name, which each of its groups has as `uses`.
    """

    def __init__(self, kinds: Mapping[str, Optimizer]) -> None:
        self.kinds = dict(kinds)
        for name, kind in self.kinds.items():
            for group in kind.param_groups:
                group["uses"] = name
        defaults = {key: value for kind in self.kinds.values() for key, value in kind.defaults.items()}
        super().__init__([group for kind in self.kinds.values() for group in kind.param_groups], {})
        self.defaults = defaults

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step of each."""
        loss = closure() if closure else None
        for name, kind in self.kinds.items():  # a loaded state has replaced groups and state
            kind.param_groups = [group for group in self.param_groups if group["uses"] == name]
            kind.state = self.state
            kind.step()
        return loss
