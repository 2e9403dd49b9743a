"""Every leaf of every option of conf/ meets values of a wrong type or range: refused in one line, or allowed on purpose."""

from typing import Any

import bad_inputs  # benchmarks/bad_inputs.py
import pytest
import torch
from bad_inputs import WRONG, outcome
from conftest import compose_config
from omegaconf import OmegaConf

from grpo.apps.cli import warn_of_bfloat16
from grpo.config.validation import arguments, check_values
from grpo.system.errors import UserError
from grpo.system.ranges import accepts

WEIGHTS = {"task.weights", "task.sources.gsm8k.task.weights", "task.sources.countdown.task.weights"}
UNUSED = {f"task.sources.{name}.max_tokens" for name in ("gsm8k", "countdown")}  # a mixture's own limit counts
PRIVILEGED = [
    f"{place}teacher.{key}" for place in ("", "module.parts.teacher.") for key in ("alpha", "context", "weights")
]
STUDENTS = [f"{place}teacher.{each}student" for place in ("", "module.parts.teacher.") for each in ("", "each.")]
PICTURES = {f"{owner}.pictures" for owner in ("model", *STUDENTS)}  # settings of an image processor
UNUSED |= {"teacher", *PRIVILEGED}  # of algo=sdpo teacher=none
ALLOWED = {  # the leaves that take these values, on purpose
    "nan": UNUSED,
    "inf": UNUSED,
    "-inf": UNUSED,
    "-1": UNUSED
    | {
        "task.weights.format",
        "task.solved",
        "selection.low",
        "selection.high",
        "teacher.success",
        "module.parts.teacher.teacher.success",
    },
    "a list": UNUSED | WEIGHTS | {"judge.criteria", "sampler.weight.thresholds"},
    "a mapping": UNUSED
    | WEIGHTS
    | {
        "algo.advantage.weights",
        "teacher.teachers",
        "module.parts.teacher.teacher.teachers",
        "renderer.template_args",
        "rollout.sampling.guided",
        "eval.sampling.guided",
        "rollout.sampling.vllm",
        "eval.sampling.vllm",
    }
    | {"optim.schedule.scheduler_specific_kwargs", "judge.request"}
    | {"task.weights.format", *PICTURES}
    | {"task.agent", "task.config", "task.arguments", "task.settings"},
}


@pytest.fixture(scope="module")
def found() -> dict[bad_inputs.Leaf, Any]:
    return bad_inputs.found()


@pytest.mark.slow
def test_every_leaf_has_a_type(found):
    assert len(found) > 250
    assert {".".join(path) for (path, _), kind in found.items() if kind is Any} == UNUSED


@pytest.mark.slow
def test_a_wrong_value_is_refused_in_one_line_that_names_the_key(found):
    accepted = {name: set() for name in WRONG}
    for leaf, kind in found.items():
        key = ".".join(leaf[0])
        for name, value in WRONG.items():
            if line := outcome(leaf, value):
                assert line.startswith((f"{key}=", f"{key}.abc=")) and "\n" not in line and len(line) < 300, line
                assert " must be " in line or " is not " in line, line
            else:
                accepted[name].add(key)
            assert accepts(kind, value) == (not line)
    assert {name: accepted[name] for name in ALLOWED} == ALLOWED
    whole = {key for key in accepted["0"] if key not in accepted["2.5"]}
    assert {"rollout.sampling.top_k", "eval.every", "callbacks.checkpoint.every"} <= whole
    assert not whole & {"rollout.num_rollouts", "max_tokens", "trainer.devices"}
    assert {"optim.max_grad_norm", "eval.limit", "adapter"} <= accepted["null"]


def refused(*overrides: str, name: str = "train") -> str:
    with pytest.raises(UserError) as refusal:
        check_values(compose_config("output_dir=.", *overrides, name=name))
    return str(refusal.value)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("rollout.num_rollouts=2.5", "rollout.num_rollouts=2.5 must be an integer of at least 1"),
        ("rollout.num_rollouts=inf", "rollout.num_rollouts=inf must be an integer of at least 1"),
        ("optim.max_grad_norm=-1", "optim.max_grad_norm=-1 must be a number above 0, or null"),
        ("optim.max_grad_norm=0", "optim.max_grad_norm=0 must be a number above 0, or null"),
        (
            "task.weights=[nan,0]",
            "task.weights=[nan, 0] must be a mapping, each value a number or a mapping or a list, each item a number or"
            " a mapping, or null",
        ),
        ("callbacks.checkpoint.every=abc", "callbacks.checkpoint.every=abc must be an integer of at least 0"),
        ("optim.optimizer.lr=nan", "optim.optimizer.lr=nan must be a number of at least 0, or null"),
        ("algo.whiten=1", "algo.whiten=1 must be true or false"),
        ("algo.kl.estimator=k4", "algo.kl.estimator=k4 is not one of k1, k2, k3"),
        ("model.path=7", "model.path=7 must be a text; as a text: model.path=\"'7'\""),
        (
            "+trainer.max_epochs=2",
            "trainer.max_epochs has no effect here, or breaks the loop: set rollout.num_rollouts instead",
        ),
        (
            "+trainer.limit_train_batches=0",
            "trainer.limit_train_batches has no effect here, or breaks the loop: set rollout.num_rollouts instead",
        ),
    ],
)
def test_a_value_that_was_accepted_once(override, line):
    assert refused(override) == line


def test_a_number_from_the_environment_is_a_text(monkeypatch):
    monkeypatch.setenv("GRPO_TEST_SEED", "3")
    assert refused("seed=${oc.env:GRPO_TEST_SEED}") == (
        "seed='3' is a text, as all that the environment holds, and must be an integer of at least 0 and at most 4294967295: "
        r""""seed='\${oc.decode:\${oc.env:GRPO_TEST_SEED}}'" in the shell reads it"""
    )
    check_values(compose_config("output_dir=.", "seed='${oc.decode:${oc.env:GRPO_TEST_SEED}}'"))


def test_an_adapter_has_no_dropout():
    line = "adapter.lora_dropout=0.1 must be 0: the policy stays in evaluation mode, in which dropout has no effect"
    assert refused("adapter=lora", "adapter.lora_dropout=0.1") == line


def test_the_other_programs_check_too():
    assert refused("eval.limit=0", name="eval") == "eval.limit=0 must be an integer of at least 1, or null"
    assert refused("port=-1", name="serve") == "port=-1 must be an integer of at least 0 and at most 65535"


MINE = """
from typing import Literal
import no_such_library
Mode = Literal["a", "b"]

class Base:
    def __init__(self, seconds: float, name: "str | None" = None): ...

class Mine(Base):
    def __init__(self, size: int, plain=1, mode: Mode = "a", array: no_such_library.Array = None, **more): ...
"""


def test_a_user_s_class_is_checked_by_its_annotations_without_an_import(tmp_path, monkeypatch):
    (tmp_path / "mine_at_the_border.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    node = {"_target_": "mine_at_the_border.Mine", "size": 2, "seconds": 1, "plain": "x", "array": [], "unknown": None}
    check_values(OmegaConf.create({"task": node}))
    for wrong, line in [
        ({"size": 2.0}, "task.size=2.0 must be an integer"),
        ({"seconds": "1"}, "task.seconds='1' is a text and must be a number: leave out the quotes"),
        ({"name": []}, "task.name=[] must be a text, or null"),
        ({"mode": "c"}, "task.mode=c is not one of a, b"),
    ]:
        with pytest.raises(UserError) as refusal:
            check_values(OmegaConf.create({"task": node | wrong}))
        assert str(refusal.value) == line
    for target in ("no_such_module.Thing", "mine_at_the_border.Nothing", "torch.optim.SGD", "x"):
        assert arguments(target) == {}


@pytest.mark.parametrize(
    ("dtype", "trainer", "named"),
    [
        ("bfloat16", {"accelerator": "cpu"}, "model.dtype=bfloat16"),
        ("float32", {"accelerator": "cpu", "precision": "bf16-mixed"}, "trainer.precision=bf16-mixed"),
        ("float32", {"accelerator": "cpu", "precision": "auto"}, None),
        ("float32", {}, None),
    ],
)
@pytest.mark.parametrize("has", [True, False])
def test_bfloat16_on_a_cpu_without_its_instructions_is_a_warning(dtype, trainer, named, has, monkeypatch, caplog):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has)
    warn_of_bfloat16(dtype, OmegaConf.create(trainer))
    warned = [record.message for record in caplog.records]
    assert len(warned) == bool(named and not has) and all(
        line.startswith(f"{named}: this CPU has no") for line in warned
    )
