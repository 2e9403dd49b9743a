"""Values of options that somebody chose, and that a recipe, an adapter or an experiment sets too."""

import pytest
from conftest import compose_config

from grpo.config.composing import composed
from grpo.config.overruled import not_in_effect


def lines(*words: str) -> list[str]:
    return list(not_in_effect(compose_config("output_dir=.", *words), words))


def test_an_own_learning_rate_is_in_effect_whatever_the_recipe_has_for_adamw(tmp_path):
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "mine.yaml").write_text(
        "defaults: [base]\noptimizer: {_target_: torch.optim.RMSprop, lr: 0.03}\n"
    )
    words = [f"hydra.searchpath=[file://{tmp_path}]", "optim=mine", "output_dir=."]
    assert composed("train", [*words, "adapter=lora"]).optim.optimizer.lr == 0.03  # the recipe has 1.5e-3


@pytest.mark.parametrize(
    ("words", "lr"),
    [
        ([], 1.5e-4),
        (["adapter=lora"], 1.5e-3),
        (["optim=adafactor"], 1.5e-4),
        (["model=qwen05b"], 1e-6),
        (["model=qwen05b", "adapter=lora"], 1e-5),
        (["experiment=quiz"], 2e-4),
        (["optim=sgd", "optim.optimizer.lr=0.1"], 0.1),
    ],
)
def test_adamw_and_its_like_take_the_learning_rate_of_the_recipe_without_a_line(words, lr):
    assert compose_config("output_dir=.", *words).optim.optimizer.lr == lr
    assert lines(*words) == []


def test_another_optimizer_that_takes_it_is_named():
    (line,) = lines("optim=sgd")
    assert line.startswith("optim.optimizer.lr=0.00015 was chosen for AdamW, and torch.optim.SGD takes it: set")


def test_a_value_of_an_option_that_an_experiment_replaces_is_named():
    """conf/eval/full.yaml evaluates on every example, the experiment on 200."""
    (line,) = lines("experiment=smollm2_sums", "eval=full") or [""]
    assert "eval=full has eval.limit=null, but a task, a recipe or an experiment sets" in line
    assert lines("experiment=smollm2_sums", "eval=full", "eval.limit=null") == []
    assert lines("algo=dapo", "algo/kl=loss", "adapter=lora") == []


@pytest.mark.parametrize(
    ("setting", "word", "other"),
    [
        ("recipe=one_gpu", "optim.schedule.num_warmup_steps=10", "optim.warmup_ratio=0.03"),
        ("rollout.epochs=0.5", "rollout.num_rollouts=10", "rollout.epochs=0.5"),
    ],
)
def test_a_key_in_place_of_which_another_one_counts_is_named(setting, word, other):
    assert lines(setting, word) == [f"{word} has no effect while {other}"]
    assert lines(setting, f"{other.partition('=')[0]}=null", word) == []


@pytest.mark.parametrize(
    ("word", "other"),
    [
        ("rollout.order=ready", "rollout.ahead=0"),
        ("rollout.stale=drop", "rollout.ahead=0"),
        ("algo.kl.estimator=k2", "algo.kl.coef=0.0"),
        ("algo.kl.sync_alpha=0.1", "algo.kl.sync_every=0"),
        ("algo.entropy.most=0.1", "algo.entropy.target=null"),
        ("algo.teacher.divergence=forward", "algo.teacher.coef=0.0"),
        ("callbacks.checkpoint.history_keep=1", "callbacks.checkpoint.history=0"),
    ],
)
def test_a_key_beside_one_that_is_off_is_named(word, other):
    assert f"{word} has no effect while {other}" in lines(word)
    key, value = other.partition("=")[::2]
    on = "0.5" if value in ("0.0", "null") else "1"
    assert lines(word, f"{key}={on}", *(["algo.kl.coef=0.1"] if "kl.sync" in key else [])) == []


@pytest.mark.parametrize(
    ("word", "other", "used"),
    [
        ("teacher.alpha=0.5", "teacher.weights=live", "teacher.weights=ema"),
        ("teacher.success=0.5", "teacher.context=solution", "teacher.context=sibling"),
        ("teacher.column=answer", "teacher.context=sibling", "teacher.context=solution"),
    ],
)
def test_a_key_that_belongs_to_another_choice_is_named(word, other, used):
    teacher = "teacher=self", "algo.teacher.coef=1"
    assert f"{word} has no effect while {other}" in lines(*teacher, other, word)
    assert not any(word in line for line in lines(*teacher, used, word))
    assert lines("algo=mopd", "teacher.column=subject", "teacher.teachers={a: x}") == []
