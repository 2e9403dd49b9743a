"""A name of another system gets the key here, and Hydra's own words about flags and values are not a user's."""

import sys

import pytest

from grpo.apps.cli import parsed, remove_unused
from grpo.config.explain import nearest, no_key
from grpo.config.overview import help_text
from grpo.extras.migration.foreign import ARGUMENTS, tables, told
from grpo.system.errors import UserError

KEYS = ["algo", "algo.kl", "algo.kl.coef", "optim", "optim.optimizer", "optim.optimizer.lr", "optim.optimizer.betas", "rollout",
        "rollout.group_size", "rollout.sampling", "rollout.sampling.temperature", "seed"]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("num_generations", "TRL's num_generations is rollout.group_size here"),
        ("learning_rate", "TRL's learning_rate is optim.optimizer.lr here"),
        ("max_completion_length", "TRL's max_completion_length is max_tokens here"),
        ("epsilon_high", "TRL's epsilon_high is algo.surrogate.high here"),
        ("trainer.max_steps", "TRL's max_steps is rollout.num_rollouts here"),
        ("neftune_noise_alpha", "TRL's neftune_noise_alpha has no counterpart: noise in the forward pass"),
        ("disable_dropout", "TRL's disable_dropout needs no setting"),
        ("--kl-coef", "Atropos' --kl-coef is algo.kl.coef here"),
        ("--env.group_size", "Atropos' --env.group_size is rollout.group_size here"),
        ("--env.max_num", "Atropos' --env.* has no counterpart"),
        ("actor_rollout_ref.rollout.n", "verl's rollout.n is rollout.group_size here"),
        ("kl_loss_coef", "verl's actor.kl_loss_coef is algo.kl.coef here (with algo/kl=loss)"),
        ("actor.kl_loss_coef", "verl's actor.kl_loss_coef is algo.kl.coef here (with algo/kl=loss)"),
        ("actor.use_kl_loss", "verl's actor.use_kl_loss is algo/kl=loss here"),
        ("batch_size", "Atropos' --batch-size is optim.max_tokens_per_microbatch here"),
        ("batch_size", "rolo's --batch-size is rollout.prompts here"),
    ],
)
def test_a_name_of_another_system_is_found_in_the_tables(name, line):
    assert line in told(name)


def test_what_no_table_has_is_unknown_and_arguments_of_python_are_their_own_table():
    assert told("colour") is None and len(tables()) > 400
    assert told("reward_funcs", ARGUMENTS).startswith("TRL's reward_funcs is rewards here")


def test_a_key_of_ours_wins_over_a_foreign_name_and_that_over_a_similar_one():
    assert no_key("temperature", KEYS).startswith(
        "there is no key 'temperature'; did you mean rollout.sampling.temperature?"
    )
    assert no_key("beta", KEYS).startswith("there is no key 'beta'; TRL's beta is algo/kl=loss and algo.kl.coef here")
    assert no_key("beta_s", KEYS).startswith("there is no key 'beta_s'; did you mean optim.optimizer.betas?")
    assert no_key("rollout.foo", KEYS).startswith("there is no key 'rollout.foo'; rollout has group_size, sampling (+")


def test_the_keys_beside_a_mistyped_one_come_first():
    assert nearest("optim.optimizer.beta", [*KEYS, "optim.beta"]) == "optim.optimizer.betas"
    assert nearest("rolout.group_size", KEYS) == "rollout.group_size"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--kl-coef", "0.1"], "there is no flag --kl-coef; Atropos' --kl-coef is algo.kl.coef here"),
        (["seed=1", "-m", "seed=2"], "seed=2 comes after a flag: give flags, as -m, before all settings"),
        (["--colour=red"], "there is no flag --colour; settings are KEY=VALUE, and --help all lists them"),
        (
            ["--config", "x"],
            "ambiguous option: --config could match --config-path, --config-name, --config-dir; settings are",
        ),
    ],
)
def test_a_flag_that_hydra_lacks_is_one_line(words, line, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    with pytest.raises(UserError) as refusal:
        parsed()
    assert str(refusal.value).startswith(line)


def test_help_of_a_group_or_a_key_shows_it_alone():
    text = help_text("train", ["algo/kl", "rollout.sampling.top_k", "algo=dr_grpo"])
    options, kl, top_k = (
        text.partition("The keys of this command line:")[::2][0],
        *text.split("The keys of this command line:")[1:],
    )
    assert (
        options.startswith("The groups and their options; * is the one in use:\n\nalgo/kl ") and "  * none " in options
    )
    assert "estimator: k3" in kl and "temperature" not in text and "surrogate" not in text
    assert "    top_k: 0 " in top_k and "(integer >= 0)" in top_k
    with pytest.raises(UserError, match=r"no key 'rollout\.smpling'; did you mean rollout\.sampling\?"):
        help_text("train", ["rollout.smpling"])


def test_the_folder_of_a_run_that_never_began_is_removed_and_no_other(tmp_path):
    for name in ("unused", "logged", "begun"):
        (tmp_path / name / ".hydra").mkdir(parents=True)
        (tmp_path / name / "train.log").touch()
    (tmp_path / "logged" / "train.log").write_text("a warning")
    (tmp_path / "begun" / "config.yaml").touch()
    (tmp_path / "empty").mkdir()
    for name in ("unused", "logged", "begun", "nowhere"):
        remove_unused(tmp_path / name)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["begun", "empty", "logged"]


def test_a_group_may_follow_help(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "task=gsm8k", "--help", "rollout"])
    assert parsed().overrides == ["task=gsm8k", "rollout"]
