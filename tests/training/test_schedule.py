"""The learning rate of each update is that of transformers' schedules, and a run imports no more than it needs for that."""

import pytest
import torch
from helpers.programs import command
from transformers import get_scheduler

from grpo.training.schedule import schedule

UPDATES = 6


def rates(make, state=None):
    """The learning rates of a run, and the state of its schedule after half of it. state: where the run begins."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    made, found, half = make(optimizer=optimizer, num_training_steps=UPDATES), [], None
    if state:
        made.load_state_dict(state)
    for update in range(3 if state else 0, UPDATES):
        half = made.state_dict() if update == 3 else half
        found += made.get_last_lr()
        optimizer.step()
        made.step()
    return found, half


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("constant_with_warmup", None),
        ("constant_with_warmup", {}),
        ("constant", None),
        ("linear", None),
        ("cosine", None),
        ("cosine_with_restarts", {"num_cycles": 2}),
        ("polynomial", {"lr_end": 0.1, "power": 2}),
        ("inverse_sqrt", {"timescale": 2}),
        ("cosine_with_min_lr", {"min_lr": 0.1}),
        ("warmup_stable_decay", {"num_decay_steps": 2}),
    ],
)
@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_a_schedule_has_the_learning_rates_of_transformers(name, more, warmup):
    given = {"name": name, "num_warmup_steps": warmup, "scheduler_specific_kwargs": more}
    ours, half = rates(lambda **run: schedule(**given, **run))
    theirs, their_half = rates(lambda **run: get_scheduler(**given, **run))
    assert ours == theirs and len(set(ours)) > (name in ("linear", "cosine"))
    for state in (half, their_half):  # a run that began with a schedule of transformers goes on
        assert rates(lambda **run: schedule(**given, **run), state)[0] == theirs[3:]


def test_the_warm_up_is_a_straight_line():
    assert rates(lambda **run: schedule(num_warmup_steps=3, **run))[0] == pytest.approx([0, 0.1, 0.2, 0.3, 0.3, 0.3])


def test_what_transformers_refuses_is_refused():
    with pytest.raises(ValueError, match="wavy is not a valid"):
        rates(lambda **run: schedule(name="wavy", **run))
    with pytest.raises(TypeError, match="power"):
        rates(lambda **run: schedule(name="linear", scheduler_specific_kwargs={"power": 2}, **run))


def test_a_run_without_an_adapter_imports_neither_peft_nor_bitsandbytes(smoke, tmp_path):
    """They take longer than torch."""
    program = tmp_path / "program.py"
    program.write_text(
        "import runpy, sys\nrunpy.run_path('train.py', run_name='__main__')\n"
        "print('imported:', *{'transformers', 'peft', 'bitsandbytes'} & set(sys.modules))"
    )
    done = command(str(program), *smoke(f"hydra.run.dir={tmp_path / 'run'}"))
    assert done.stdout.endswith("imported: transformers\n"), done.stderr + done.stdout
