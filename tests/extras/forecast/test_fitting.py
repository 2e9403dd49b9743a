"""A run's choices so that an update fits its device, in GB worked by hand: tokens at once, recomputed layers, vLLM's part."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import compose_config
from hydra.utils import instantiate

from grpo.extras.forecast.cards import GB, VLLMOnPaper, trainer_on
from grpo.extras.forecast.forecast import forecast
from grpo.extras.forecast.limits import limit_of, to_fill
from grpo.extras.forecast.parts import Part
from grpo.extras.forecast.sizes import Sizes
from grpo.models.pretrained import Pretrained
from grpo.system import memory
from grpo.training.optimization import Optimization

PROMPT = 100  # tokens


class Counted(Sizes):
    """An update holds 4 GB, and for each 1024 tokens at once 2 GB, or half of one with recomputed layers."""

    def of_trainer(self, trainer):
        size = self.choice["max_tokens_per_microbatch"] / 1024
        again = self.choice["gradient_checkpointing"]
        passes = Part("activations", round(size * (0.5 if again else 2) * GB), phase="update")
        return [Part("weights", 4 * GB), passes, Part("engine", None, phase="rollout")]


@pytest.fixture
def counted(toy):
    """Return the sizes and the settings of a run; each argument is a word of its command line."""

    def made(*words: str, engine=None) -> tuple[Counted, Optimization]:
        config = compose_config("model=path", f"model.path={toy}", "output_dir=.", *words)
        plan = instantiate(config.rollout)
        return Counted(print, Pretrained(str(toy)), plan, engine, lambda: PROMPT), instantiate(config.optim)

    return made


def here(device: str = "cuda"):
    """Return a trainer on a device of this machine."""
    strategy = SimpleNamespace(root_device=torch.device(device, 0) if device == "cuda" else torch.device(device))
    return SimpleNamespace(strategy=strategy, precision="32-true", num_devices=1, world_size=1)


def pretend(monkeypatch, total: float, free: float, held: float = 0) -> None:
    """Let the GPU have so many GB, of which so many are free, and this process hold so many."""
    monkeypatch.setattr(memory, "total", lambda device: round(total * GB))
    monkeypatch.setattr(memory, "free", lambda device: round(free * GB))
    monkeypatch.setattr(memory, "held", lambda device: round(held * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: round(held * GB))


@pytest.mark.parametrize(
    ("words", "usable", "size", "again"),
    [
        ("", 20, 8192, False),  # 4 + 16
        ("", 19.9, 4096, False),  # 4 + 8
        ("", 12, 4096, False),
        ("", 11.9, 2048, False),  # 4 + 4
        ("", 7.9, 4096, True),  # 8192 tokens and recomputed layers are 8
        ("", 5.9, 2048, True),  # 4 + 1
        ("", 3, 2048, True),  # nothing fits, and this is the least
        ("optim.max_tokens_per_microbatch=4096", 11.9, 4096, True),  # the user's own size stays
        ("optim.max_tokens_per_microbatch=4096", 12, 4096, False),
        ("optim.gradient_checkpointing=true", 7.9, 4096, True),
        ("optim.gradient_checkpointing=false", 7, 2048, False),
        ("optim.gradient_checkpointing=false optim.max_tokens_per_microbatch=4096", 1, 4096, False),
        ("max_tokens=4000", 5.9, 4096, True),  # a row of 4100 tokens is never cut: 2048 at once would be no less
    ],
)
def test_fewer_tokens_at_once_come_before_recomputed_layers(counted, monkeypatch, words, usable, size, again):
    pretend(monkeypatch, 30, (usable + 1e-6) / 0.97)
    sizes, optim = counted("optim.gradient_checkpointing=null", *words.split())
    optim, _ = sizes.fitted(optim, here())
    assert (optim.max_tokens_per_microbatch, optim.gradient_checkpointing) == (size, again)


def test_the_choice_has_one_line_with_the_reason(counted, monkeypatch, caplog):
    caplog.set_level("INFO")
    pretend(monkeypatch, 30, (10 + 1e-6) / 0.97)
    sizes, optim = counted("optim.gradient_checkpointing=null")
    _, parts = sizes.fitted(optim, here())
    assert [part.size for part in parts[:2]] == [4 * GB, 4 * GB]
    assert caplog.messages == [
        "optim.max_tokens_per_microbatch=2048 optim.gradient_checkpointing=false: an update takes 8.00 GB of 10.00 GB; "
        "not 20.00 GB with 8192 tokens at once, 12.00 GB with 4096 tokens at once"
    ]


def test_a_cpu_has_2048_tokens_at_once_and_a_gpu_8192_whatever_machine_asks(counted, monkeypatch):
    for there in (False, True):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda there=there: there)
        sizes, optim = counted()
        assert optim.max_tokens_per_microbatch is None
        assert sizes.fitted(optim, here("cpu"))[0].max_tokens_per_microbatch == 2048
        assert sizes.fitted(optim, trainer_on("80GB"))[0].max_tokens_per_microbatch == 8192
        assert [optim.tokens_at_once(device) for device in ("cpu", "cuda", "mps")] == [2048, 8192, 8192]
        assert replace(optim, max_tokens_per_microbatch=64).tokens_at_once("cuda") == 64


# -- what is free, and a slack


def test_a_gpu_is_what_is_free_and_what_this_process_holds_less_a_slack(monkeypatch):
    pretend(monkeypatch, 24, free=18, held=4)  # a display has 2
    assert limit_of(here()) == pytest.approx(0.97 * 22 * GB)
    assert to_fill(None, here()) == pytest.approx((0.97 * 22 - 4) * GB)
    assert to_fill(SimpleNamespace(sleeps=True), here()) == limit_of(here())  # it gives back what it holds
    assert limit_of(here("cpu")) == 22 * GB and to_fill(None, here("cpu")) == 18 * GB


@pytest.mark.parametrize(
    ("free", "size", "share", "sleeps"),
    [
        (24.0, 4096, 23.28 - 12, False),  # vLLM gets what an update of 12 leaves
        (22.5, 4096, 21.825 - 12, False),
        (12.5, 4096, 12.125 - 4, True),  # an update leaves too little
        (12.3, 2048, 11.931 - 8, False),  # 12 do not fit, and 8 leave enough
    ],
)
def test_a_display_of_the_machine_takes_from_vllm_and_from_the_update(counted, monkeypatch, free, size, share, sleeps):
    """The update's 4096 tokens hold 12 GB, and a rollout 4. The model is small: vLLM wants 2 GB and its cache."""
    pretend(monkeypatch, 24, free)
    engine = VLLMOnPaper()
    words = (
        "rollout.prompts=40000 rollout.group_size=64 optim.gradient_checkpointing=null optim.max_tokens_per_microbatch="
    )
    sizes, optim = counted(*f"{words}{'null' if free < 12.4 else 4096}".split(), engine=engine)
    optim, parts = sizes.fitted(optim, here())
    parts = forecast(sizes, here(), parts, shown=False)
    [taken] = [part for part in parts if part.name == "engine"]
    assert optim.max_tokens_per_microbatch == size and optim.gradient_checkpointing is False
    assert (taken.size / GB, taken.phase) == (pytest.approx(share, abs=0.001), "rollout" if sleeps else "")
    for phase in ("update", "rollout"):
        assert sum(part.size for part in parts if part.phase in ("", phase)) <= 0.97 * free * GB + 1


def test_what_an_engine_holds_already_is_counted_once(counted, monkeypatch, caplog):
    """vLLM with a share of its own has taken 8 of 24 GB when the forecast is made: 0.97 x 24 - 8 are left for an update of 12."""
    caplog.set_level("INFO")
    pretend(monkeypatch, 24, free=16, held=8)
    engine = VLLMOnPaper(share=8 / 24)
    sizes, optim = counted("optim.gradient_checkpointing=null", engine=engine)
    optim, parts = sizes.fitted(optim, here())
    assert optim.max_tokens_per_microbatch == 4096 and "of 15.28 GB" in caplog.text
    forecast(sizes, here(), parts)
    [line] = [line for line in caplog.messages if line.startswith("memory: ")]
    assert line.startswith(
        "memory: 20.00 GB in an update, 12.00 GB in a rollout, of 23.28 GB on cuda:0: so far 0.00 MB"
    )
    assert "may not fit" not in caplog.text


def test_several_ranks_choose_the_same_whatever_is_free_on_each(counted, monkeypatch):
    """Each chooses alone, before it knows the others. If one of them recomputed layers, they would wait for each other."""
    from grpo.extras.devices.strategy import Strategy
    from grpo.training.trainer import make_trainer

    asked, chosen = [], []
    monkeypatch.setattr("grpo.training.trainer.takes_gpu", lambda accelerator: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(Strategy, "of_lightning", lambda self, needs, total, *_: asked.append(total) or 1 / 0)
    trainer = here()
    trainer.world_size = 2
    for free in (24, 22.5, 11):
        pretend(monkeypatch, 24, free)
        with pytest.raises(ZeroDivisionError):
            make_trainer([], [], devices=2, strategy=Strategy())
        sizes, optim = counted("optim.gradient_checkpointing=null")
        chosen.append(sizes.fitted(optim, trainer)[0])
    assert asked == [round(0.97 * 24 * GB)] * 3
    assert [each.max_tokens_per_microbatch for each in chosen] == [8192] * 3


def test_ddp_is_weighed_with_the_fewest_tokens_that_the_settings_leave_open(counted, monkeypatch):
    """Fewer tokens cost less than sharing out the weights. Layers are not recomputed for it. The module is made once."""
    made = []

    def parts(self, precision, ranks, sharded=False, device="cpu"):
        made.append(self.outlined(self.pretrained, device).optim)
        return [Part("weights", GB)]

    monkeypatch.setattr(Counted, "parts", parts)
    for words, size, device in (("null", 2048, "cuda"), ("4096", 4096, "cuda"), ("null", 2048, "cpu")):
        sizes, optim = counted("optim.gradient_checkpointing=null", f"optim.max_tokens_per_microbatch={words}")
        monkeypatch.setattr("grpo.extras.forecast.sizes.imagined", lambda *_, optim=optim: SimpleNamespace(optim=optim))
        assert sizes.needed("bf16-mixed", 2, device) == GB
        assert made[0].max_tokens_per_microbatch == size and not made[0].gradient_checkpointing
        assert [made.pop()] and not made


def test_an_update_without_a_kernel_is_counted_again(counted, monkeypatch):
    """With 8192 tokens it held 4 + 16 GB, and without the kernel 18: 22 of 0.97 x 24 = 23.28, or of 0.97 x 22 = 21.34."""
    failed = []

    class Later(Counted):
        def of_trainer(self, trainer):
            weights, passes, engine = super().of_trainer(trainer)
            return [weights, replace(passes, size=passes.size + len(failed) * 2 * GB), engine]

    run, _ = counted()
    settings = {"max_tokens_per_microbatch": 8192, "gradient_checkpointing": False}
    sizes = Later(
        *(getattr(run, name) for name in ("make_module", "pretrained", "plan", "engine", "longest")), settings
    )
    words = "2.00 GB more, 22.00 GB of "
    for free, line in ((24, "23.28 GB, which fits"), (22, "21.34 GB, 0.66 GB too much: lower optim.max_tokens_per_")):
        pretend(monkeypatch, 24, free=free)
        failed.clear()
        parts = [Part("so far", 0), *sizes.of_trainer(here())]
        again = sizes.again(here(), parts)
        failed.append("FlexAttention")
        assert again().startswith(words + line)
