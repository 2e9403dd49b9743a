"""Short runs as a GPU makes them, on a pretended device, beside the same runs on the CPU.

FlexAttention and compiled functions have stand-ins that compute the same, autocast casts by CUDA's lists, and a copy from or to
the host waits unless its memory there is pinned. A tensor of the host that meets one of the device ends a run. Both runs learn
from the same samples, as in 16 bits another order of a sum may change a draw; the device draws its own ones, too, also compared.
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from conftest import EXAMPLES
from helpers.learning import episode, make_module, rollout
from helpers.models import model_folder, model_of
from helpers.pretended import LAZY, OnDevice, Pretended, on_device
from helpers.pretended_kernels import kernels
from helpers.pretended_run import device_of_runs
from helpers.runs import learned
from helpers.runs import rows as rows_of
from helpers.slots import Apart

from grpo.engines.builtin.engine import TransformersEngine
from grpo.extras.kernels.flex import FLEX
from grpo.models import packing
from grpo.rollout.collate import collate
from grpo.training.module import GRPOModule

FULL, MIXED = "trainer.precision=32-true", "trainer.precision=bf16-mixed"
MASTERS = f"{MIXED} model.dtype=bfloat16"
LORA = "adapter=lora adapter.r=4"
# The largest difference of the change of all weights, as a share of it. A sum in another order moves a number by a few 2^-24 of
# its size, and tokens that partly cancel magnify that: 2e-6 was seen. In bfloat16 each product is rounded by up to 2^-9 = 0.2 %,
# and a backward pass through two layers has some twenty of them in a chain: 1 to 2.5 % were seen.
EXACT, ROUNDED = 2e-5, 0.05
CPU = torch.device("cpu")
# three groups of four answers of 2 to 6 tokens; 20 tokens at once are three microbatches
ROWS = [[episode((11 + g,) * (3 + g), (*range(21, 23 + (3 * i + g) % 5),)) for i in range(4)] for g in range(3)]
REWARDS = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0], [0.5, 1.0, 0.0, 0.0]])


@dataclass(frozen=True)
class Found:
    """The end of a run. changes: of the trained weights, flattened. rows: its metrics, by rollout. waits: of each rollout's
    update. drawn: the tokens that its engine has drawn."""

    changes: torch.Tensor
    rows: list[dict[str, float]]
    waits: list[int]
    drawn: list[tuple[int, ...]]


@dataclass
class Watched:
    """The run that is going on. given: the completions of the run before, of which its engine returns a call's after another."""

    given: list | None = None
    made: list = field(default_factory=list)
    drawn: list = field(default_factory=list)
    before: list = field(default_factory=list)
    waits: list = field(default_factory=list)
    optimizer: torch.optim.Optimizer | None = None


now = Watched()


def weights() -> list[torch.Tensor]:
    """Return copies of what the optimizer changes, in the host's memory."""
    own = [p for group in now.optimizer.param_groups for p in group["params"]]
    return [(p.inner if isinstance(p, OnDevice) else p).detach().float().clone() for p in own]


class Replays:
    """An engine that draws, and returns what that of the run before has drawn."""

    def sample(self, prompts, sampling, seeds, done=None, temperatures=None):
        own = super().sample(prompts, sampling, seeds, None, temperatures)
        now.drawn += [completion.ids for completion in own]
        if now.given is None:
            now.made.append(own)
        else:
            own = now.given.pop(0)
        for i, completion in enumerate(own if done else ()):
            done(i, completion)
        return own


class Replayed(Replays, TransformersEngine): ...


class Beside(Replays, Apart): ...


def trained(settings: str, path: Path, out: Path, given: list | None, patch: pytest.MonkeyPatch) -> tuple[Found, list]:
    """Train. given: completions to learn from. Returns what the run has left, and the completions that it has drawn."""
    global now
    now, step = Watched(given), GRPOModule.training_step
    out.mkdir()

    def training_step(module, *args):
        if now.optimizer is None:
            now.optimizer = module.optimizers().optimizer
            now.before = weights()
        device = Pretended.now
        before = device.count() if device else 0
        metrics = step(module, *args)
        now.waits.append(device.count() - before if device else 0)
        return metrics

    engine = "Beside" if "ahead" in settings else "Replayed"
    of_all = f"""task=gsm8k task.path={EXAMPLES} model=path model.path={path} debug=smoke callbacks=none forecast=false
        preflight=off max_tokens=8 output_dir={out} rollout.num_rollouts=2 eval.every=0 trainer=cpu optim=sgd optim.optimizer.lr=1
        optim.max_tokens_per_microbatch=64 engine=transformers engine._target_=test_gpu_path.{engine}"""
    with patch.context() as patched:
        patched.setattr(GRPOModule, "training_step", training_step)
        learned([*of_all.split(), *settings.format(path=path).split()])
    pairs = zip(weights(), now.before, strict=True)
    changes = torch.cat([(after - before).flatten() for after, before in pairs])
    return Found(changes, rows_of(out), now.waits, now.drawn), now.made


def row(name: str, settings: str, waits: int, bound: float, *extras: str, kind: str = "nightly"):
    marks = [getattr(pytest.mark, kind), *([pytest.mark.extras(*extras)] if extras else [])]
    return pytest.param(settings, waits, bound, id=name, marks=marks)


TEACHER = "algo=gkd algo.policy_coef=1 teacher.model.path={path}"
AHEAD = "algo.old_policy=rollout rollout.ahead"


# waits: of an update, see docs/performance.md. The first one also waits for the trials of a teacher
@pytest.mark.parametrize(
    ("settings", "waits", "bound"),
    [
        row("float32 weights", MIXED, 7, ROUNDED, kind="slow"),
        row("masters, recomputed", f"{MASTERS} optim.gradient_checkpointing=true", 7, ROUNDED, kind="slow"),
        row("ahead", f"{FULL} {AHEAD}=1", 7, EXACT, "ahead", kind="slow"),
        row("an offloaded teacher", f"{FULL} {TEACHER} teacher.offload=true", 14, EXACT, "teachers", kind="slow"),
        row("a teacher", f"{MIXED} {TEACHER}", 12, ROUNDED, "teachers"),
        row("copies ahead", f"{MASTERS} {AHEAD}=2 rollout.num_rollouts=3", 7, ROUNDED, "ahead"),
        row("a float32 head", f"{MASTERS} model.head_dtype=float32", 7, ROUNDED, "float32_head"),
        row("LoRA", f"trainer.precision=16-mixed model.dtype=float16 {LORA}", 7, ROUNDED),
        row("LoRA, a reference", f"{FULL} {LORA} algo/kl=loss optim.gradient_checkpointing=true", 7, EXACT),
        row("a critic", f"{FULL} algo=ppo critic=head", 29, EXACT, "critic"),
    ],
)
def test_a_run_on_a_gpu_is_the_one_on_a_cpu(settings, waits, bound, tmp_path, monkeypatch, caplog):
    path = Path(model_folder("llama", tmp_path / "model"))
    cpu, drawn = trained(settings, path, tmp_path / "cpu", None, monkeypatch)
    caplog.clear()
    with device_of_runs() as device, kernels(), caplog.at_level(logging.WARNING):
        gpu, _ = trained(settings, path, tmp_path / "gpu", drawn, monkeypatch)
    assert (gpu.changes - cpu.changes).norm() < bound * cpu.changes.norm()
    for here, there in zip(cpu.rows, gpu.rows, strict=True):
        assert here["loss/grad_norm"] > 1
        for name in ("loss/policy", "loss/entropy", "loss/grad_norm", "teacher/divergence"):
            assert there.get(name, 0.0) == pytest.approx(here.get(name, 0.0), rel=bound, abs=bound / 4), name
    same = sum(a == b for a, b in zip(cpu.drawn, gpu.drawn, strict=True)) / len(cpu.drawn)
    assert same == 1 if bound == EXACT else same > 0.3
    assert gpu.waits[1:] == [waits] * (len(cpu.rows) - 1), device.table()
    assert min(device.compiled[name] for name in ("flex_attention", "scores_of_rows", "gradient_of_rows")) >= 12
    assert not caplog.messages and not FLEX.failed


@pytest.fixture
def device():
    with Pretended() as device, kernels():
        yield device


def of_an_update(place: torch.device, low: torch.dtype | None) -> tuple[dict[str, float], torch.Tensor]:
    """Return the metrics and the gradient of all weights of an update on a device. low: of autocast."""
    policy = model_of("llama_tied")
    module = make_module(
        policy if place == CPU else on_device(policy), max_tokens_per_microbatch=20, max_grad_norm=None
    )
    batch = rollout(rewards=REWARDS, groups=ROWS, tokens=collate(ROWS).to(place))
    optimizer, grads = module.optimizers(), []
    optimizer.register_step_pre_hook(lambda *_: grads.extend(p.grad.clone() for p in module.policy.parameters()))
    with torch.autocast(place.type, dtype=low, enabled=low is not None, cache_enabled=False):
        assert module.layout == ("shared_prompt", None if place == CPU else FLEX)
        Pretended.now.clear()
        metrics = module.training_step(batch, 0)
    grads = [each.inner if isinstance(each, OnDevice) else each for each in grads]
    return metrics, torch.cat([each.flatten() for each in grads])


@pytest.mark.parametrize(("low", "bound"), [(None, EXACT), (torch.bfloat16, ROUNDED)], ids=["float32", "bfloat16"])
def test_an_update_on_a_gpu_is_the_one_on_a_cpu(device, monkeypatch, low, bound):
    monkeypatch.setattr(packing, "ON_GPU", [FLEX])
    (here, expected), (there, found) = (of_an_update(place, low) for place in (CPU, LAZY))
    assert (found - expected).norm() < bound * expected.norm()
    for name in ("loss/entropy", "loss/grad_norm"):
        assert there[name] == pytest.approx(here[name], rel=bound) and here[name] > 0.1
    assert device.count() == 7, device.table()
    assert device.compiled["gradient_of_rows"] >= 3 and device.compiled["flex_attention"] >= 6 and not FLEX.failed
