"""Every option of conf/optim: its steps against numbers worked by hand or the plain library, and resumed runs bit for bit."""

from functools import partial

import pytest
import torch
from conftest import compose_config
from helpers.learning import IS_8BIT_HERE, NEEDED, OPTIONS
from helpers.runs import learned, rows, state, told
from hydra.utils import instantiate
from torch import nn, tensor
from torch.optim import SGD, AdamW, Optimizer

from grpo.models.master_weights import with_masters
from grpo.training.checkpoints import PlainCheckpoints

LR = 1e-2
EMBEDDING, MATRIX, VECTOR = "model.embed_tokens.weight", "layers.0.down_proj.weight", "norm.weight"
SHAPES = {EMBEDDING: (40, 128), MATRIX: (64, 128), VECTOR: (128,)}


def maker(option: str) -> partial:
    return instantiate(compose_config(f"optim={option}", f"optim.optimizer.lr={LR}", "output_dir=.").optim).optimizer


def weights(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()}


def learn(weights: dict[str, nn.Parameter], *optimizers: Optimizer, steps: int = 3) -> None:
    """Take steps on random gradients, the same in every call."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        sum((p * torch.randn(p.shape, generator=generator).to(p.dtype)).sum() for p in weights.values()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def assert_same_steps(ours: dict[str, nn.Parameter], theirs: dict[str, nn.Parameter], tolerance: float = 0.0) -> None:
    for name, start in weights(ours[MATRIX].dtype).items():
        torch.testing.assert_close(ours[name], theirs[name], atol=tolerance, rtol=0.0)
        assert not torch.equal(ours[name], start), name


def test_sgd_by_hand():
    p = nn.Parameter(tensor([1.0, 2.0]))
    optimizer = maker("sgd")([("p", p)])
    (p * tensor([1.0, -10.0])).sum().backward()
    optimizer.step()
    torch.testing.assert_close(p.detach(), tensor([0.99, 2.1]))


def test_adamw_is_torchs():
    ours, theirs = weights(), weights()
    learn(ours, maker("adamw")(ours.items()))
    learn(theirs, AdamW(theirs.values(), LR, (0.9, 0.99), weight_decay=0.0))
    assert_same_steps(ours, theirs, 1e-6)  # fused orders the same operations differently


def test_adafactor_by_hand():
    """The squared gradient factors exactly into means of rows and columns, so every entry of the first step has size lr."""
    p = nn.Parameter(torch.ones(2, 2))
    optimizer = maker("adafactor")([("p", p)])
    (p * tensor([[1.0, -3.0], [2.0, 6.0]])).sum().backward()
    optimizer.step()
    torch.testing.assert_close(p.detach(), tensor([[0.99, 1.01], [0.99, 0.99]]))
    assert sum(value.numel() for value in optimizer.state[p].values() if torch.is_tensor(value)) == 2 + 2 + 1


@NEEDED["adamw_8bit"]
def test_adamw_in_8_bits():
    """The first step is AdamW's; then its moments are rounded. Small parameters keep full precision."""
    ours, theirs = weights(), weights()
    optimizer, plain = maker("adamw_8bit")(ours.items()), AdamW(theirs.values(), LR, (0.9, 0.99), weight_decay=0.0)
    learn(ours, optimizer, steps=1)
    learn(theirs, plain, steps=1)
    assert_same_steps(ours, theirs, 1e-6)
    learn(ours, optimizer, steps=20)
    learn(theirs, plain, steps=20)
    for name, start in weights().items():
        apart, moved = ours[name] - theirs[name], theirs[name] - start
        assert 0 < apart.norm() < (0.03 if name != VECTOR else 1e-5) * moved.norm()
    kinds = {name: optimizer.state[p]["state1"].dtype for name, p in ours.items()}
    assert kinds == {EMBEDDING: torch.uint8, MATRIX: torch.uint8, VECTOR: torch.float32}


@pytest.mark.skipif(IS_8BIT_HERE, reason="bitsandbytes is here")
def test_8_bits_that_are_not_there(smoke):
    assert "AdamW in 8 bits needs bitsandbytes: pip install -e '.[8bit]'" in told(*smoke("optim=adamw_8bit"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offloaded_steps_are_those_that_stayed(dtype):
    ours, theirs = weights(dtype), weights(dtype)
    optimizer = with_masters(ours, maker("adamw"), offload=True)
    learn(ours, optimizer)
    learn(theirs, with_masters(theirs, maker("adamw")))
    assert_same_steps(ours, theirs)
    masters = optimizer.param_groups[0]["params"]
    assert {(master.dtype, master.device.type) for master in masters} == {(torch.float32, "cpu")}
    own = {p.data_ptr() for p in ours.values()}
    assert all(master.data_ptr() not in own for master in masters) and all(p.grad is None for p in ours.values())


def test_offloaded_gradients_add_up():
    p = nn.Parameter(tensor([1.0]))
    optimizer = with_masters({"p": p}, partial(SGD, lr=1.0), offload=True)
    for gradient in (0.5, 0.25):
        (p * gradient).sum().backward()
    optimizer.step()
    assert p.item() == 0.25


CASES = [pytest.param(*option.values, "model.dtype=bfloat16", marks=option.marks) for option in OPTIONS]
CASES += [("adamw", "adapter=lora"), ("adamw", "optim.offload=true")]


@pytest.mark.slow
@pytest.mark.parametrize(("option", "policy"), CASES)
def test_a_resumed_run_is_the_same_bit_for_bit(smoke, tmp_path, option, policy):
    def run(name: str, *more: str) -> dict:
        folder = tmp_path / name
        folder.mkdir()
        settings = ["callbacks=[checkpoint]", "eval.every=0", f"optim={option}", policy, f"output_dir={folder}"]
        learned(smoke("algo.num_epochs=2", *settings, *more))
        return state(folder)

    straight = run("straight", "callbacks.checkpoint.every=1", "callbacks.checkpoint.keep=2")
    middle = tmp_path / "straight" / "checkpoints" / "00001.ckpt"
    first, resumed = PlainCheckpoints().load_checkpoint(middle), run("resumed", f"ckpt_path={middle}")
    assert rows(tmp_path / "straight")[1:] == rows(tmp_path / "resumed")
    names = straight["state_dict"].keys()
    assert all(torch.equal(straight["state_dict"][name], resumed["state_dict"][name]) for name in names)
    assert any(not torch.equal(straight["state_dict"][name], first["state_dict"][name]) for name in names)
    [ours], [theirs] = resumed["optimizer_states"], straight["optimizer_states"]
    assert ("masters" in ours) == (policy != "adapter=lora")
    for name in ("state", "masters"):
        torch.testing.assert_close(ours.get(name, {}), theirs.get(name, {}), atol=0.0, rtol=0.0)
