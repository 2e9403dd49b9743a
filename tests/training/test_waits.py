"""On a pretended device no copy is missing, and the host waits a known number of times, whatever the number of microbatches."""

import math
from functools import partial

import pytest
import torch
from conftest import preset
from helpers.learning import actor_critic, episode, make_module, rollout
from helpers.models import model_of
from helpers.pretended import LAZY, Pretended, on_device

from grpo.engines.builtin import engine as builtin
from grpo.engines.builtin import kv_cache
from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.builtin.kv_cache import KVCache
from grpo.engines.builtin.padded import PaddedCache
from grpo.engines.protocol import Sampling
from grpo.engines.stop_texts import StopTexts
from grpo.models import packed_attention
from grpo.models.head import factor_of
from grpo.rollout.collate import collate
from grpo.training import meter
from grpo.training.module import GRPOModule

# three groups of four answers of 2 to 6 tokens; 20 tokens at once are four microbatches and more
GROUPS = [[episode((11 + g,) * (3 + g), (*range(21, 23 + (3 * i + g) % 5),)) for i in range(4)] for g in range(3)]
REWARDS = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0], [0.5, 1.0, 0.0, 0.0]])


@pytest.fixture
def device():
    with Pretended() as device:
        yield device


def learner(*algorithm: str, size: int = 20, layout: str = "shared_prompt", critic: bool = False) -> GRPOModule:
    """Return a module on the device, which has tried its layout. size: tokens at once."""
    policy = on_device(model_of("llama_tied"))

    def made(policy, _, *rest, **named):
        return GRPOModule(policy, preset(*algorithm), *rest, **named)

    make = actor_critic if critic else partial(make_module, module=made)
    module = make(policy, max_tokens_per_microbatch=size, layout=layout)
    if critic:
        on_device(module.critic)
        optimizers, schedules = module.configure_optimizers()
        module.optimizers, module.lr_schedulers = lambda: optimizers[0], lambda: schedules[0]
    assert module.layout == (layout, None)
    for model in [policy] if module.reference is None else [policy, module.reference.copy]:
        factor_of(model, 128)  # found once in a run
    return module


def learn(module: GRPOModule, device: Pretended) -> int:
    """Learn from a rollout. Returns the number of microbatches of all its rows. The waits of the rollout are left in `device`."""
    batch = rollout(rewards=REWARDS, groups=GROUPS, tokens=collate(GROUPS).to(LAZY))
    pieces = len(module.microbatches(batch.tokens, torch.arange(12)))
    device.clear()
    metrics = module.training_step(batch, 0)
    assert abs(metrics["loss/policy"]) < 10 and metrics["loss/grad_norm"] > 0
    return pieces


# A rollout waits three times: for the length of its first row, for its advantages, for its metrics. An update waits four times:
# for the number of its samples, for the rows with an advantage, for ids and masks to pack, for the norm of its gradient. More
# waits: one for each of several epochs, the columns of minibatches, passes that freeze log-probabilities, whitening, a choice.
@pytest.mark.parametrize(
    ("algorithm", "waits"),
    [
        ("algo=grpo", 7),
        ("algo=dapo algo.num_epochs=2", 12),
        ("algo=gspo algo.num_minibatches=2", 17),
        ("algo/kl=loss algo.entropy.coef=0.01", 8),
        ("algo=kl_cov", 16),
        ("algo=reinforce_pp", 12),
    ],
)
def test_an_update_waits_as_often_with_many_microbatches_as_with_one(device, algorithm, waits):
    assert learn(learner(*algorithm.split(), size=1000), device) == 1
    one = device.count()
    assert learn(learner(*algorithm.split()), device) >= 3
    assert device.count() == one == waits, device.table()


@pytest.mark.parametrize(("layout", "most"), [("packed", 0), ("padded", 2)])
def test_transformers_looks_at_the_mask_of_each_padded_microbatch(device, layout, most):
    pieces = learn(learner("algo=grpo", layout=layout), device)
    assert device.count() - device.count("transformers") == 7, device.table()
    assert device.count("transformers") <= most * pieces


def test_an_update_with_a_critic(device):
    """The recursion of GAE is on the CPU, twice: for advantages and for what the values should be."""
    assert learn(learner(critic=True), device) >= 3
    assert (device.count(), device.count("gae.py")) == (27, 18), device.table()


def with_teacher(size: int, offload: bool, **teaching) -> GRPOModule:
    """Return a module on the device with a teacher of another model, after the first pass of both."""
    from helpers.taught import Given, taught

    policy, model = on_device(model_of("llama_tied")), model_of("llama_tied")
    teacher = Given(model if offload else on_device(model), offload)
    module = taught(policy, teacher, policy_coef=1.0, max_tokens_per_microbatch=size, **teaching)
    for one in (policy, model):
        factor_of(one, 128)
    assert module.layout == ("shared_prompt", None)
    with teacher.model() as there:
        assert teacher.layout(there, module.parts["teacher"].passes) == ("shared_prompt", None)
    return module


# Five waits more if distributions are compared: for what the teacher reads, for the tokens that are taught outside the mask, for
# texts, and for the samples of the second term. A teacher of sampled tokens makes its passes before the updates, for which three
# waits come; an offloaded one waits for ids and masks of all rows, and for its states.
@pytest.mark.slow
@pytest.mark.extras("teachers")
@pytest.mark.parametrize(
    ("teaching", "offload", "waits"),
    [
        ({"divergence": "sampled"}, False, 15),
        ({"divergence": "reverse"}, False, 12),
        ({"divergence": "reverse", "top_k": 20}, False, 12),
        ({"divergence": "reverse"}, True, 14),
    ],
    ids=["sampled", "reverse", "top_k", "offloaded"],
)
def test_an_update_with_a_teacher_waits_as_often_with_many_microbatches(device, teaching, offload, waits):
    assert learn(with_teacher(1000, offload, **teaching), device) == 1
    one = device.count()
    assert learn(with_teacher(20, offload, **teaching), device) >= 3
    assert device.count() == one == waits, device.table()


def test_means_of_a_device_are_those_of_its_numbers(device):
    """Two microbatches, with padding; 3 of 4 and 0 of 2 values count."""
    means, values = meter.Means(), torch.tensor([[0.5, -1.0], [2.0, 99.0]])
    mask = torch.tensor([[True, True], [True, False]])
    for v, m in ((values, mask), (values[:1] + 7.0, ~mask[:1])):
        v, m = v.to(LAZY), m.to(LAZY)
        means.add_tokens("a", v, m)
        means.add_tokens("a^2", v.square(), m)
        means.add_extreme("a_min", v, m)
        means.add_extreme("a_max", v, m)
        means.add("b", v[0, 0])
    means.add("b", 4.0, 2)
    device.clear()
    std = math.sqrt((0.25 + 1 + 4) / 3 - 0.25)
    assert means.result() == pytest.approx({"a": 0.5, "a_std": std, "a_min": -1.0, "a_max": 2.0, "b": 12.0 / 4})
    assert device.count() == 1


def test_a_copy_that_is_missing_fails(device, monkeypatch):
    module = learner("algo=grpo")
    monkeypatch.setattr(packed_attention, "sent", lambda tensor, device: tensor)
    with pytest.raises(RuntimeError, match=r"host and of the device meet in aten.embedding"):
        learn(module, device)


def test_a_wait_in_a_microbatch_shows(device, monkeypatch):
    """A mean that reads its numbers at once waits for two numbers each time."""
    module = learner("algo=grpo")
    monkeypatch.setattr(meter, "is_on_device", lambda value: False)
    pieces = learn(module, device)
    assert device.count("meter.py") > 20 * pieces


@pytest.fixture
def engine(device):
    model = on_device(model_of("llama_tied"))
    model.generation_config.eos_token_id = [*range(2, 97, 40)]
    engine = TransformersEngine()
    engine.load_weights(model, 0)
    engine.choose()
    assert engine.cache is KVCache
    device.clear()
    return engine


PROMPTS = [(5, 6, 7)] * 4 + [(20, 21)] * 2


ALL = Sampling(40, top_k=20, top_p=0.9, repetition_penalty=1.2, stop=StopTexts(("no such text",), str))


@pytest.mark.parametrize(
    ("cache", "sampling", "longest"),
    [(KVCache, Sampling(40), 40), (KVCache, ALL, 22), (PaddedCache, ALL, 22)],
    ids=["plain", "filters, a penalty and stop texts", "the same, padded"],
)
def test_the_engine_waits_once_in_sixteen_tokens(engine, device, cache, sampling, longest):
    """It waits for the newest tokens of all rows, then for ids and log-probabilities of those that ended. In a padded step
    transformers waits, too: it looks at the mask."""
    engine.cache = cache
    lengths = [len(completion.ids) for completion in engine.sample(PROMPTS, sampling, range(6))]
    assert max(lengths) == longest and len({*lengths}) > 3
    assert device.count() - device.count("transformers") == 3 * math.ceil(longest / 16), device.table()


def test_an_engine_that_looks_after_every_token_shows(engine, device, monkeypatch):
    monkeypatch.setitem(builtin.STEPS, "lazy", 1)
    engine.sample(PROMPTS, Sampling(16), range(6))
    assert device.count() >= 16


def test_a_copy_that_the_engine_lacks_fails(engine, monkeypatch):
    monkeypatch.setattr(kv_cache, "sent", lambda tensor, device: tensor)
    with pytest.raises(RuntimeError, match="host and of the device meet"):
        engine.sample(PROMPTS, Sampling(4), range(6))
