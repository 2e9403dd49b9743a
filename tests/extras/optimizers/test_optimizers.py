"""Every option of conf/optim: its steps against numbers worked by hand or the plain library, and resumed runs bit for bit."""

import re
from functools import partial

import pytest
import torch
from conftest import compose_config
from helpers.learning import IS_8BIT_HERE, NEEDED, OPTIONS
from helpers.runs import learned, rows, state, told
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from torch import nn, tensor
from torch.optim import SGD, AdamW, Optimizer

from grpo.config.explain import explain
from grpo.models.master_weights import with_masters
from grpo.system.errors import UserError
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


def test_muon_learns_hidden_matrices_and_adamw_the_rest():
    """The same steps as torch's two optimizers, each on its own parameters; Muon keeps one number for each of a matrix."""
    ours, theirs = weights(), weights()
    optimizer = maker("muon")(ours.items())
    learn(ours, optimizer)
    rest = [theirs[EMBEDDING], theirs[VECTOR]]
    learn(
        theirs,
        torch.optim.Muon([theirs[MATRIX]], LR, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        AdamW(rest, LR, (0.9, 0.99), weight_decay=0.0),
    )
    assert_same_steps(ours, theirs, 1e-6)
    of = {name: sorted(optimizer.state[p]) for name, p in ours.items()}
    assert of == {MATRIX: ["momentum_buffer"], EMBEDDING: (both := ["exp_avg", "exp_avg_sq", "step"]), VECTOR: both}
    adapter = {"q.lora_A.weight": nn.Parameter(torch.ones(2, 8)), "q.lora_B.weight": nn.Parameter(torch.ones(8, 2))}
    assert [group["uses"] for group in maker("muon")(adapter.items()).param_groups] == ["Muon"]


def test_after_a_state_is_loaded_muon_and_adamw_follow_the_new_rates():
    ours = weights()
    optimizer = maker("muon")(ours.items())
    learn(ours, optimizer, steps=1)
    optimizer.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = {name: p.detach().clone() for name, p in ours.items()}
    learn(ours, optimizer, steps=1)
    assert all(torch.equal(p, before[name]) for name, p in ours.items())


@pytest.mark.parametrize("option", ["sgd", "adamw", "muon"])
def test_groups_by_name_have_a_learning_rate_of_their_own(option):
    """The first pattern that fits counts; the schedule multiplies each rate; a saved state comes back, also with masters."""
    groups = "optim.groups={*norm*:{lr:0.002,weight_decay:0.5},*layers.*:{lr:0.0},*:{lr:0.02}}"
    words = [f"optim={option}", f"optim.optimizer.lr={LR}", "optim.schedule.num_warmup_steps=4", "output_dir=.", groups]
    optim = instantiate(compose_config(*words).optim)
    runs = []
    for resumed in (False, True):
        ours = weights(torch.bfloat16)
        optimizer = with_masters(ours, optim.make)
        schedule = optim.built(optimizer, 8)
        if resumed:
            optimizer.load_state_dict(runs[0][1])
            schedule.load_state_dict(runs[0][2])
        learn(ours, optimizer, steps=1)
        schedule.step()
        learn(ours, optimizer, steps=1)
        rates = {group["param_names"][0]: group["lr"] for group in optimizer.param_groups}
        start = weights(torch.bfloat16)
        moved = {name: not torch.equal(p, start[name]) for name, p in ours.items()}
        assert moved == {EMBEDDING: True, MATRIX: False, VECTOR: moved[VECTOR]}
        runs.append(({k: p.detach().clone() for k, p in ours.items()}, optimizer.state_dict(), schedule.state_dict()))
        at = 2 if resumed else 1  # of 4 steps of warm-up
        assert rates == pytest.approx({VECTOR: 0.002 * at / 4, MATRIX: 0.0, EMBEDDING: 0.02 * at / 4})
        assert [g["weight_decay"] for g in optimizer.param_groups if g["param_names"] == [VECTOR]] == [0.5]


def test_wrong_groups_are_one_line():
    def refused(groups: str, *words: str) -> str:
        with pytest.raises((UserError, InstantiationException)) as refusal:
            optim = instantiate(compose_config("output_dir=.", f"optim.groups={groups}", *words).optim)
            optim.make(list(weights().items()))
        return explain(refusal.value, "train")

    assert "optim.groups: '*bias*' fits no parameter that learns" in (line := refused("{*bias*:{lr:1}}"))
    assert "layers.0.down_proj.weight" in line and "(3 in all)" in line
    assert "or an earlier pattern has them all" in refused("{*norm*:{lr:1},norm.weight:{lr:2}}")
    assert "'*norm*' has 'lrr', and the optimizer takes" in refused("{*norm*:{lrr:1}}")
    assert "optim.groups.*norm*.lr=-1 must be a number of at least 0" in refused("{*norm*:{lr:-1}}")
    assert "'*norm*' has 'betas'" in refused("{*norm*:{betas:[0.1,0.2]}}", "optim=sgd")


class Signs(Optimizer):
    """An optimizer of one's own, as docs/optimizers.md has it."""

    def __init__(self, parameters, lr, weight_decay=0.0):
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * p.grad.sign())


class Raises(Signs):
    def step(self, closure=None):
        return self.param_groups[0]["params"][0].grad.view(7)


def no_lr(parameters, lr):
    return SGD(parameters, lr=lr)


def nothing(parameters, lr, weight_decay):
    return [parameters, lr]


def test_an_optimizer_of_ones_own_learns_and_a_wrong_one_is_one_line_before_a_model_is_loaded():
    def own(name: str):
        words = ["optim=sgd", f"optim.optimizer._target_={__name__}.{name}", f"optim.optimizer.lr={LR}", "output_dir=."]
        return instantiate(compose_config(*words, "optim.groups={*norm*:{lr:0.0}}").optim)

    ours = weights()
    learn(ours, own("Signs").make(ours.items()), steps=1)
    assert torch.equal(ours[VECTOR], weights()[VECTOR])
    torch.testing.assert_close((ours[MATRIX] - weights()[MATRIX]).abs(), torch.full(SHAPES[MATRIX], LR))
    for name, words in {
        "no_lr": "no_lr() got an unexpected keyword argument 'weight_decay'",
        "nothing": "it gave list, and must return a torch.optim.Optimizer",
        "Raises": "raised in line",
    }.items():
        with pytest.raises(InstantiationException) as refusal:
            own(name)
        line = explain(refusal.value, "train")
        assert re.match(rf"optim\.optimizer \({name}, .*test_optimizers\.py:\d+", line), line
        assert words in line and "\n" not in line


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


@NEEDED["adamw_8bit"]
def test_a_loaded_state_in_8_bits_brings_the_masters():
    ours, theirs = weights(torch.bfloat16), weights(torch.bfloat16)
    optimizer, resumed = (with_masters(each, maker("adamw_8bit")) for each in (ours, theirs))
    learn(ours, optimizer, steps=1)
    resumed.load_state_dict(optimizer.state_dict())
    assert_same_steps(ours, theirs)
    torch.testing.assert_close(resumed.state_dict()["masters"], optimizer.state_dict()["masters"], atol=0.0, rtol=0.0)


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
