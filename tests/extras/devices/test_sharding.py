"""The choice of what devices share, and the numbers of a sharded model, here on one rank that has all the parts."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD

from grpo.extras.devices.sharding import Sharded, shard, unsharded
from grpo.extras.devices.strategy import Strategy
from grpo.system.distributed import local


@pytest.fixture
def mesh(monkeypatch):
    """The devices of a process group of this process alone."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def model() -> nn.Linear:
    """A model whose only weight is 1."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


def test_a_policy_that_does_not_fit_is_sharded_and_its_checkpoint_has_the_chosen_form():
    kinds = {needs: Strategy().chosen(lambda needs=needs: needs, 20).kind for needs in (19, 20, 21)}
    assert kinds == {19: "ddp", 20: "ddp", 21: "fsdp2"}
    for form in ("whole", "sharded"):
        strategy = Strategy(kind="fsdp2", checkpoint=form)
        sharded, precision = strategy.of_lightning(lambda: 1, 2, 60.0, 2, "bf16-mixed")
        assert (sharded.pieces, sharded.passes, precision) == (form == "sharded", "bf16-mixed", "32-true")


def test_a_16_bit_model_learns_in_32_bits_and_its_checkpoint_has_them(model, mesh):
    """The gradients of two passes are 1 and 2**-9. In bfloat16 their sum would be 1, and the weight would stay 1."""
    shard(model, mesh, torch.bfloat16, torch.bfloat16, reshard=True, offload=False)
    for last, x in ((False, 1.0), (True, 2.0**-9)):
        model.set_requires_gradient_sync(last)  # at the end, so that FSDP2 itself adds them up
        model(torch.full((1, 1), x, dtype=torch.bfloat16)).sum().backward()
    optimizer = SGD(model.parameters(), lr=2.0**-9)
    optimizer.step()
    strategy = Sharded(60.0, 1, True, False, "32-true")
    strategy._lightning_module = SimpleNamespace(policy=model)
    [master] = strategy.optimizer_state(optimizer)["masters"]
    assert local(master).item() == 1 - 2.0**-9 * (1 + 2.0**-9)


def test_a_step_reaches_the_passes_after_a_rollout(model, mesh):
    shard(model, mesh, torch.float32, None, reshard=True, offload=False)
    [weight] = model.parameters()
    with torch.no_grad():
        with unsharded(model):
            assert model(torch.ones(1, 1)).item() == 1
        local(weight).fill_(3)
        assert model(torch.ones(1, 1)).item() == 3
