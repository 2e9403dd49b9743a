"""rollout.order=ready: the groups of several rollouts at once, each learned from once; and rollout.ahead beyond 1."""

from collections import Counter

import pandas as pd
import pytest
from helpers.runs import learned
from helpers.runs import rows as all_rows

from grpo.runs.runs import Run
from grpo.system.errors import UserError

HALVES = {"_target_": "helpers.slots.Halves"}  # 40 questions
READY = "rollout.order=ready engine._target_=helpers.slots.Streams"


@pytest.fixture
def run(smoke, tmp_path):
    """A run of 6 rollouts of 2 prompts whose samples are kept, in a folder of tmp_path. Returns its rows without those before
    training, and the samples."""

    def run(*overrides: str, folder: str = "run", task=HALVES) -> tuple[list[dict[str, float]], pd.DataFrame]:
        settings = f"""algo.old_policy=rollout eval.every=0 engine=transformers rollout.num_rollouts=6 rollout.prompts=2
            engine._target_=helpers.slots.Apart callbacks=[samples] output_dir={tmp_path / folder}""".split()
        words = [word for text in overrides for word in text.split()]
        (tmp_path / folder).mkdir(exist_ok=True)
        learned(smoke(*settings, *words), task)
        return all_rows(tmp_path / folder), Run(tmp_path / folder).samples(range(1, 7))

    return run


def test_order_exact_gives_each_rollout_the_weights_of_its_number(run):
    """ahead=3: rollouts 0 to 3 are sampled by the weights before training, rollout 4 by version 1, and 5 by version 2."""
    rows, samples = run("rollout.ahead=3", folder="one")
    assert [row["rollout/staleness"] for row in rows] == [0, 1, 2, 3, 3, 3]
    again, same = run(
        "rollout.ahead=3", "engine._target_=helpers.slots.Streams +engine.piece=100 +engine.pause=0.02", folder="two"
    )
    assert samples.completion.tolist() == same.completion.tolist()  # whatever takes longer
    assert [row["loss/policy"] for row in rows] == [row["loss/policy"] for row in again]


def test_order_ready_learns_from_every_prompt_once(run):
    rows, samples = run("rollout.ahead=2", READY)
    assert Counter(samples.groupby("prompt").size()) == {2: 12}
    for row in rows:
        assert 0 <= row["rollout/staleness"] <= row["rollout/staleness_max"] <= 4
        assert row["rollout/buffered_groups"] + row["rollout/flying_groups"] <= 4
    assert rows[-1]["rollout/buffered_groups"] + rows[-1]["rollout/flying_groups"] == 0
    assert max(row["rollout/staleness_max"] for row in rows) >= 1


def test_what_cannot_be_ahead_is_refused(run):
    with pytest.raises(UserError, match=r"rollout.max_staleness=1 is below rollout.ahead=2.*raise it, or lower"):
        run("rollout.ahead=2 rollout.max_staleness=1")
    with pytest.raises(UserError, match="needs an engine with its own copy"):
        run("rollout.ahead=2 engine._target_=grpo.engines.builtin.engine.TransformersEngine")
