"""Parameters in 16 bits learn what float32 ones learn: by hand, through the module, and through train.py."""

import gc
import io
import math
from collections import Counter
from functools import partial

import pytest
import torch
from helpers.learning import make_module, rollout
from helpers.runs import learned, rows, state
from peft import LoraConfig
from torch import Tensor, nn, tensor
from torch.optim import SGD, AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from grpo.models.master_weights import with_masters
from grpo.models.policy import Reference, with_adapter
from grpo.models.pretrained import Pretrained

BF16 = torch.bfloat16


def parameter(*values: float, dtype=BF16) -> nn.Parameter:
    return nn.Parameter(tensor(values, dtype=dtype))


def learn(optimizer, loss: Tensor) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def masters(optimizer) -> list[Tensor]:
    return optimizer.param_groups[0]["params"]


def test_ten_steps_of_a_thousandth():
    """Below 1 the numbers of bfloat16 are 1/256 apart: 0.999 is 1 again, and 0.99 = 253.44/256 becomes 253/256."""
    plain, p = parameter(1.0), parameter(1.0)
    alone, optimizer = SGD([plain], lr=1e-3), with_masters({"p": p}, partial(SGD, lr=1e-3))
    for _ in range(10):
        learn(alone, plain.sum())
        learn(optimizer, p.sum())
    assert plain.item() == 1.0
    assert p.item() == 253 / 256 and p.dtype == BF16
    assert masters(optimizer)[0].item() == pytest.approx(0.99, abs=1e-6)


class Seen(TorchDispatchMode):
    """Counts the operations by name."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count[function._schema.name] += 1
        return function(*args, **(kwargs or {}))

    def __enter__(self) -> "Seen":
        self.count: Counter[str] = Counter()
        return super().__enter__()


def test_all_parameters_take_their_masters_in_one_operation():
    """Three steps of 1/512 from 1: bfloat16 rounds 1 - 1/512 to even, which is 1, and 1 - 3/512 to 254/256."""
    matrices = {f"p{i}": nn.Parameter(torch.ones(i, 2, dtype=BF16)) for i in (1, 2, 3)}
    optimizer = with_masters(matrices, partial(SGD, lr=1 / 512))
    for expected in (1.0, 255 / 256, 254 / 256):
        sum(p.sum() for p in matrices.values()).backward()
        with Seen() as seen:
            optimizer.step()
        optimizer.zero_grad()
        assert all((p == expected).all() for p in matrices.values())
        assert seen.count["aten::_foreach_copy_"] == 1 and seen.count["aten::copy_"] == 0


def test_masters_learn_what_a_float32_model_learns_bit_for_bit():
    """Both get the same gradients. One more parameter is already in float32."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(64, generator=generator).to(BF16)
    gradients = torch.randn(20, 64, generator=generator).to(BF16)
    full, p = nn.Parameter(start.float()), nn.Parameter(start.clone())
    beside, twin = parameter(0.5, dtype=torch.float32), parameter(0.5, dtype=torch.float32)
    make = partial(AdamW, lr=1e-3, weight_decay=0.1)
    plain, optimizer = make([full, beside]), with_masters({"p": p, "twin": twin}, make)
    for gradient in gradients:
        learn(plain, (full * gradient).sum() + beside.sum())
        learn(optimizer, (p * gradient).sum() + twin.sum())
        assert torch.equal(p, full.to(BF16))
    assert torch.equal(masters(optimizer)[0], full) and not torch.equal(p.float(), full)
    assert masters(optimizer)[1] is twin and torch.equal(twin, beside)


def test_parameters_in_float32_need_nothing():
    p = parameter(1.0, dtype=torch.float32)
    optimizer = with_masters({"p": p}, partial(SGD, lr=1.0))
    assert masters(optimizer)[0] is p and "masters" not in optimizer.state_dict()


def test_gradients_add_up_in_float32():
    """1 plus four times 2^-9: in bfloat16 each of the four is less than half of the 2^-7 that follows 1."""
    p = parameter(1.0)
    optimizer = with_masters({"p": p}, partial(SGD, lr=1.0))
    for gradient in (1.0, 2**-9, 2**-9, 2**-9, 2**-9):
        (p * gradient).sum().backward()
        assert p.grad is None
    assert masters(optimizer)[0].grad.item() == 1 + 2**-7
    optimizer.zero_grad()
    assert masters(optimizer)[0].grad is None


def test_a_step_writes_into_the_storage_that_is_there():
    """An engine that shares the storage of the parameters needs it, also if it gets the storage later."""
    p = parameter(1.0, 2.0)
    optimizer = with_masters({"p": p}, partial(SGD, lr=0.5))
    engine = torch.zeros(4, dtype=BF16)
    engine[1:3] = p.detach()
    p.data = engine[1:3]
    address = p.data_ptr()
    learn(optimizer, p.sum())
    assert p.data_ptr() == address and engine.tolist() == [0.0, 0.5, 1.5, 0.0]


def test_a_saved_optimizer_goes_on_bit_for_bit():
    gradients = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).to(BF16)
    make = partial(AdamW, lr=1e-3)

    def steps(p, optimizer, gradients) -> None:
        for gradient in gradients:
            learn(optimizer, (p * gradient).sum())

    p, q = parameter(*range(1, 9)), parameter(*[0.0] * 8)
    optimizer, resumed = with_masters({"p": p}, make), with_masters({"q": q}, make)
    steps(p, optimizer, gradients[:3])
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file))
    assert torch.equal(masters(resumed)[0], masters(optimizer)[0]) and torch.equal(q, p)
    assert not torch.equal(masters(resumed)[0], q.float())
    steps(p, optimizer, gradients[3:])
    steps(q, resumed, gradients[3:])
    for name, value in optimizer.state[masters(optimizer)[0]].items():
        assert torch.equal(resumed.state[masters(resumed)[0]][name], value)
    assert torch.equal(masters(resumed)[0], masters(optimizer)[0]) and torch.equal(q, p)


def test_what_a_float32_run_saved_starts_from_the_parameters():
    full, p = parameter(1.0, dtype=torch.float32), parameter(3.0)
    plain, optimizer = AdamW([full], lr=1.0), with_masters({"p": p}, partial(AdamW, lr=0.1))
    learn(plain, full.sum())
    optimizer.load_state_dict(plain.state_dict())
    assert p.item() == masters(optimizer)[0].item() == 3.0 and optimizer.param_groups[0]["lr"] == 1.0


def test_bytes_of_a_parameter():
    """2 for the parameter, 4 for the master, 8 for AdamW's moments; 4 more between the backward pass and the step."""

    def held() -> int:
        gc.collect()
        tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
        tensors += [p.grad for p in tensors if p.is_leaf and p.grad is not None]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    gc.freeze()  # what is there already is not looked at
    p = nn.Parameter(torch.zeros(1 << 22, dtype=BF16))
    optimizer = with_masters({"p": p}, partial(AdamW, lr=0.1))
    learn(optimizer, p.sum())
    assert held() / 2**22 == pytest.approx(14, abs=0.01)
    p.sum().backward()
    assert held() / 2**22 == pytest.approx(18, abs=0.01)


def moved(model: nn.Module, start: nn.Module) -> Tensor:
    pairs = zip(model.parameters(), start.parameters(), strict=True)
    return torch.cat([(p.detach().float() - q.detach().float()).flatten() for p, q in pairs])


def test_ten_updates_at_a_rate_of_a_millionth(toy):
    """The masters follow float32 parameters, while 95 % of the numbers in bfloat16 have not changed yet."""
    start, low = (Pretrained(str(toy), dtype="bfloat16").model() for _ in range(2))
    full = Pretrained(str(toy), dtype="bfloat16").model().float()
    settings = {"optimizer": AdamW, "lr": 1e-6, "max_tokens_per_microbatch": 10, "max_grad_norm": 1.0}
    modules = [make_module(policy, **settings) for policy in (full, low)]
    for module in modules:
        for number in range(10):
            norm = module.training_step(rollout(number), 0)["loss/grad_norm"]
            assert math.isfinite(norm) and norm > 0
    exact = moved(full, start)
    inner = torch.cat([p.detach().flatten() for p in masters(modules[1].optimizers())])
    inner -= torch.cat([p.detach().float().flatten() for p in start.parameters()])
    assert torch.cosine_similarity(inner, exact, dim=0) > 0.95
    assert 0 < (moved(low, start) != 0).float().mean() < 0.05


def test_an_adapter_on_a_base_in_bfloat16_is_in_float32(toy):
    policy = with_adapter(
        Pretrained(str(toy), dtype="bfloat16").model(),
        LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"),
    )
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    module = make_module(policy, lr=1.0)
    assert module.training_step(rollout(), 0)["loss/grad_norm"] > 0
    for name, p in policy.named_parameters():
        assert p.dtype == (torch.float32 if "lora_" in name else BF16), name
        assert p.requires_grad == ("lora_" in name) and (p.requires_grad or torch.equal(p, before[name])), name
    assert any(not torch.equal(p, before[name]) for name, p in policy.named_parameters())
    assert "masters" not in module.optimizers().state_dict()


def test_a_reference_moves_by_small_steps():
    """1000 times a thousandth of the way from 1 to 2; in bfloat16 each would be lost, since 1 + 1/128 follows 1."""
    policy = nn.Linear(1, 1, bias=False, dtype=BF16)
    nn.init.ones_(policy.weight)
    reference = Reference(policy, moves=True)
    nn.init.constant_(policy.weight, 2.0)
    for _ in range(1000):
        reference.move(0.001)
    assert reference.weights["weight"].item() == pytest.approx(2 - 0.999**1000, abs=1e-4)
    with reference.model() as model:
        assert model.weight.dtype == BF16 and model.weight.item() == 209 / 128  # 1.632
    assert policy.weight.item() == 2.0


@pytest.mark.parametrize("precision", ["auto", "bf16-mixed"])
@pytest.mark.slow
def test_a_run_in_bfloat16(smoke, toy, tmp_path, precision):
    overrides = ["model.dtype=bfloat16", "trainer=cpu", f"trainer.precision={precision}", "callbacks=[checkpoint]"]
    learned(smoke(*overrides))
    saved = state(tmp_path)
    start = Pretrained(str(toy), dtype="bfloat16").model()
    policy = Pretrained(str(tmp_path / "checkpoints" / "last"), dtype="auto").model()
    trained = saved["optimizer_states"][0]["masters"]
    for p, q, master in zip(policy.parameters(), start.parameters(), trained, strict=True):
        assert p.dtype == BF16 and master.dtype == torch.float32
        assert torch.equal(p, master.to(BF16)) and not torch.equal(p, q)
    for row in rows(tmp_path)[1:]:
        assert 0 < row["loss/grad_norm"] < math.inf and row["rollout/logprob_gap"] < 0.02
