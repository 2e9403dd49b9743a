"""Old names, from pickles in checkpoints and from saved configurations, give today's classes."""

from importlib import import_module

import pytest
from hydra.utils import get_object

from grpo.moved import today

NAMES = """
    callbacks.ahead.Played engine.Sampling messages.Message rl.Action rl.Reward rl.State rl.Step rl.Trajectory
    rollout.Limits rollout.Plan rollout.Sample tokens.Completion tokens.Scores tokens.Turn
    advantage.group_advantages algorithm.Algorithm callbacks.checkpoint.Checkpoint data.PromptLimit engines.vllm.VLLMEngine
    entropy.EntropyBonus evaluation.Evaluator kl.KL loggers.MetricsTable loss.clip module.Optimization policy.Pretrained
    renderer.TokenizerRenderer tiny.tiny_folder trainer.make_trainer trackers.TensorBoard jobs.Job sweep.Sweep
"""


@pytest.mark.parametrize("name", [f"grpo.{name}" for name in NAMES.split()])
def test_an_old_name_is_found(name):
    """Import, as pickle does it, and `today` give the same object."""
    module, _, attribute = name.rpartition(".")
    found = getattr(import_module(module), attribute)
    new = today(name)
    assert get_object(new) is found and new != name
    assert found.__name__ == {"Played": "Rollout"}.get(attribute, attribute)


def test_a_name_that_never_was_is_none():
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = import_module("grpo.rollout").Nothing
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = import_module("grpo.tokens").Nothing
    assert today("torch.optim.AdamW") == "torch.optim.AdamW"
