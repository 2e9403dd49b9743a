"""A teacher in the host's memory goes to the device once in a rollout and not back, and teaches what one teaches that stays."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers.learning import GROUPS, episode, fresh, rollout
from helpers.models import disturb, model_of
from helpers.pretended import LAZY, OnDevice, Pretended, on_device
from helpers.taught import Given, learned, same, taught

from grpo.extras.forecast.imagined import bytes_of
from grpo.extras.forecast.sizes import OWN
from grpo.extras.teachers.offloaded import kept_of, visiting
from grpo.extras.teachers.several import Several
from grpo.models.head import factor_of
from grpo.rollout.collate import collate
from grpo.system.errors import UserError

# twelve rows of three groups, of 2 to 6 tokens; 20 tokens at once are three microbatches
ROWS = [[episode((11 + g,) * (3 + g), (*range(21, 23 + (3 * i + g) % 5),)) for i in range(4)] for g in range(3)]
REWARDS = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0], [0.5, 1.0, 0.0, 0.0]])
TWICE = {"num_epochs": 2, "num_minibatches": 2, "max_tokens_per_microbatch": 5}


def another(toy, seed: int = 5) -> torch.nn.Module:
    disturb(model := fresh(toy), seed, size=0.1)
    return model


def of_two(toy, offload: bool) -> Several:
    """Return two teachers, one for each group, of which the first is the one of other tests."""
    given = {name: Given(another(toy, seed), offload) for name, seed in (("a", 5), ("b", 6))}
    return Several("kind", given, each=partial(Given))


def of_kinds():
    groups = [
        [replace(sample, example={"kind": kind}) for sample in group] for kind, group in zip("ab", GROUPS, strict=True)
    ]
    return rollout(groups=groups)


@pytest.mark.parametrize("divergence", [{"divergence": "reverse"}, {"divergence": "jsd", "top_k": 5, "cap": 2.0}])
def test_it_teaches_what_one_teaches_that_stays(toy, divergence):
    """Two epochs of two updates each, of several microbatches: one visit, where the other one makes a pass for each."""
    teachers = [Given(another(toy), offload) for offload in (False, True)]
    (expected, metrics), (found, others) = (
        learned(taught(fresh(toy), teacher, **divergence, **TWICE), rollout()) for teacher in teachers
    )
    same(expected, found)
    assert (
        others["teacher/divergence"] == pytest.approx(metrics["teacher/divergence"], abs=1e-6)
        and metrics["loss/grad_norm"]
    )
    assert [teacher.visits for teacher in teachers] == [8, 1]
    assert teachers[1].kept is None  # nothing is left of the rollout


def test_several_teachers_make_a_visit_each(toy):
    several = [of_two(toy, offload) for offload in (False, True)]
    (expected, metrics), (found, others) = (
        learned(taught(fresh(toy), teacher, divergence="forward", **TWICE), of_kinds()) for teacher in several
    )
    same(expected, found)
    for name in ("teacher/a/divergence", "teacher/b/divergence"):
        assert others[name] == pytest.approx(metrics[name], abs=1e-6) and metrics[name] > 0.01
    assert [teacher.visits for teacher in several[1].teachers.values()] == [1, 1]


def test_each_rollout_has_states_of_its_own(toy):
    """The second rollout has other rows, and a prompt of the first one's length."""
    second = [[episode((15, 16, 17), (31, 32)), episode((15, 16, 17), (33,))], GROUPS[1]]
    weights = []
    for offload in (False, True):
        teacher = Given(another(toy), offload)
        module = taught(fresh(toy), teacher, divergence="forward")
        module.training_step(rollout(), 0)
        weights.append(learned(module, rollout(1, groups=second))[0])
    same(*weights)
    assert teacher.visits == 2


def test_it_says_what_it_holds_and_when(toy):
    """With sampled tokens no head stays on the device; 282 x 64 numbers of four bytes do for distributions. Two teachers
    score in turn, so that one of them is there."""
    model = another(toy)
    weights, head = (
        bytes_of([*model.parameters(), *model.buffers()]),
        bytes_of(model.get_output_embeddings().parameters()),
    )
    cases = [("sampled", True, [0, 0, weights, weights]), ("reverse", True, [0, head, weights, weights])]
    for divergence, offload, expected in [*cases, ("reverse", False, [weights, 0, 0, 0])]:
        own = taught(fresh(toy), Given(model, offload), divergence=divergence).parts["teacher"].own
        assert [bytes_of(own(phase)) for phase in OWN] == expected
    own = taught(fresh(toy), of_two(toy, True), divergence="reverse").parts["teacher"].own
    assert [bytes_of(own(phase)) for phase in OWN] == [0, 2 * head, weights, 2 * weights]
    assert head == model.config.vocab_size * model.config.hidden_size * 4


# -- on a device


@pytest.fixture
def device():
    with Pretended() as device:
        yield device


def test_weights_go_there_and_are_dropped(device):
    """Tied weights go once, and are pinned in the first visit only. A buffer that a pass has replaced stays replaced, in the
    host's memory."""
    model = model_of("llama_tied").requires_grad_(False)
    with visiting(model, LAZY):
        pass
    assert all(x.is_pinned() for x in [*model.parameters(), *model.buffers()])
    device.clear()
    before = {name: (p, p.data_ptr()) for name, p in model.named_parameters(remove_duplicate=False)}
    rotary = model.model.rotary_emb
    factor = rotary.inv_freq
    size = bytes_of([*model.parameters(), *model.buffers()])
    with visiting(model, LAZY) as there:
        assert there is model and all(isinstance(p.data, OnDevice) for p in model.parameters())
        assert model.lm_head.weight is model.model.embed_tokens.weight
        rotary.inv_freq = rotary.inv_freq * 2
    assert (device.carried["device"], device.carried["host"]) == (size, factor.numel() * 4)
    assert {name: (p, p.data_ptr()) for name, p in model.named_parameters(remove_duplicate=False)} == before
    assert torch.equal(rotary.inv_freq, factor * 2) and not isinstance(rotary.inv_freq, OnDevice)
    assert device.count() == 1, device.table()  # for the buffer
    with pytest.raises(ZeroDivisionError), visiting(model, LAZY):
        raise ZeroDivisionError
    assert not any(isinstance(p.data, OnDevice) for p in model.parameters())


def carried(device: Pretended, offload: bool, size: int) -> tuple[int, int, int]:
    """Return the bytes that an update copies to the device and to the host, and its microbatches."""
    policy, model = on_device(model_of("llama_tied")), model_of("llama_tied")
    teacher = Given(model if offload else on_device(model), offload)
    module = taught(policy, teacher, divergence="reverse", max_tokens_per_microbatch=size)
    factor_of(policy, 128), factor_of(model, 128), module.layout  # found once in a run
    with teacher.model() as model:
        teacher.layout(model, module.parts["teacher"].passes)
    batch = rollout(rewards=REWARDS, groups=ROWS, tokens=collate(ROWS).to(LAZY))
    pieces = len(module.microbatches(batch.tokens, torch.arange(12)))
    device.clear()
    module.training_step(batch, 0)
    return device.carried["device"], device.carried["host"], pieces


@pytest.mark.slow
def test_one_trip_there_and_none_back_whatever_the_microbatches(device):
    """The weights go there once; the states of 45 tokens, 128 numbers of four bytes each, to the host and back."""
    model = model_of("llama_tied")
    weights = bytes_of([*model.parameters(), *model.buffers()])
    states = sum(len(sample.turns[0].completion.ids) for group in ROWS for sample in group) * 128 * 4
    for size, least in ((1000, 1), (20, 3)):
        (to, back, pieces), (to_stay, back_stay, _) = (carried(device, offload, size) for offload in (True, False))
        assert pieces == least
        assert math.isclose(to - to_stay, weights + states, rel_tol=0.01)
        assert states <= back - back_stay < 1.2 * states < weights / 40  # and ids and masks of the rows


def test_states_that_have_not_arrived_are_not_read(device, monkeypatch):
    model = on_device(model_of("llama_tied"))
    read = replace(collate(GROUPS), row=torch.arange(4)).to(LAZY)
    predicted = kept_of(model, read, "packed", None, 20, LAZY).at(read)
    assert predicted.states.shape == (10, 128) and isinstance(predicted.states, OnDevice)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    with pytest.raises(RuntimeError, match="what a queued copy has not brought to the host yet"):
        kept_of(model, read, "packed", None, 20, LAZY).at(read)


def test_a_row_that_is_too_long_for_it(toy):
    teacher = Given(another(toy), True)
    teacher.limit = 4
    with pytest.raises(UserError, match="a row has 5 tokens, and the teacher reads 4"):
        taught(fresh(toy), teacher, divergence="reverse").training_step(rollout(), 0)
    assert teacher.visits == 0
