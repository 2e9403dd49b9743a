"""A resumed run has its own configuration, with the command line on top."""

import pytest
from conftest import EXAMPLES
from hydra.errors import HydraException
from hydra.utils import get_class, get_method
from omegaconf import OmegaConf

from grpo.config.composing import composed
from grpo.config.resuming import (
    add_saved_overrides,
    changed,
    changes,
    check_data,
    check_resumed,
    chosen_changes,
    continued,
    joined,
    policy_folder,
    save_config,
    saved_config,
)
from grpo.data.rows import fingerprint_of_all
from grpo.extras.datasets.dataset import Dataset
from grpo.runs.manifest import data_facts, save_manifest
from grpo.runs.run import Run
from grpo.system.errors import UserError

THEN = [
    *f"task=gsm8k task.path={EXAMPLES} model=path model.path=x algo=dr_grpo optim.optimizer.lr=3e-4".split(),
    "+callbacks.curriculum={_target_: helpers.slots.Crash, rollout: 9}",
]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of a run that was started with THEN, when the default of max_tokens was 99."""
    folder = tmp_path / "run"
    config = composed("train", [*THEN, f"output_dir={folder}"])
    config.eval.every, config.renderer.date = 7, "2026-01-31"
    save_config(config)
    save_manifest(str(folder), {"overrides": THEN})
    (folder / "checkpoints").mkdir()
    return folder


def resumed(folder, *overrides: str):
    """Return the configuration of a command line that resumes the run."""
    given = add_saved_overrides([f"ckpt_path={folder}/checkpoints/last.ckpt", *overrides])
    return continued(composed("train", [*given, f"output_dir={folder}/new"]), given)


def test_what_nobody_gave_is_as_in_the_run(run):
    """A default that has changed since, eval.every, and all arguments of the run's command line."""
    config = resumed(run)
    assert (config.eval.every, config.optim.optimizer.lr, config.task.path) == (7, 3e-4, str(EXAMPLES))
    assert config.callbacks.curriculum.rollout == 9 and config.renderer.date == "2026-01-31"
    assert config.output_dir == f"{run}/new" and config.callbacks.checkpoint.folder == f"{run}/new/checkpoints"
    assert config.ckpt_path == f"{run}/checkpoints/last.ckpt" and changes(config, run) == []


def test_what_belongs_to_a_command_is_that_of_the_new_one(run):
    """The defaults too, since they are not settings of the run."""
    saved = OmegaConf.load(run / "config.yaml")
    saved.max_time, saved.resume.changes = "01:00:00", "allow"
    OmegaConf.save(saved, run / "config.yaml")
    config = resumed(run)
    assert config.max_time is None and config.resume.changes != "allow"


def test_names_of_an_earlier_version_are_those_of_now(run):
    file = run / "config.yaml"
    earlier = "source:\n  _target_: grpo.apps.sources.atropos.Atropos\ntokenizer:\n  _target_: grpo.apps.api.given\n"
    file.write_text(file.read_text().replace("\nsource: null\n", f"\n{earlier}"))
    config = saved_config(run)
    assert get_class(config.source._target_).__name__ == "Atropos"
    assert get_method(config.tokenizer._target_).__name__ == "given"
    key = "  quantizer:\n    _target_: grpo.extras.quantized.quantized.quantize\n    _partial_: true\n"
    text = file.read_text()
    assert key in text
    file.write_text(text.replace(key, "").replace("\n  quantization: null", "\n  quantization: 4bit"))
    assert get_method(saved_config(run).model.quantizer._target_).__name__ == "quantize"
    library = "warm_start:\n  worked_answers: tasks.reasoning_gym.worked_answers\ntask:\n  _target_: tasks.gym.Gym\n"
    file.write_text(library)
    config = saved_config(run)
    assert config.task._target_ == "tasks.libraries.gym.Gym"
    assert get_method(config.warm_start.worked_answers).__name__ == "worked_answers"


def test_a_slot_that_the_code_filled_before_is_filled(run):
    """A run of before, whose checkpoints had a model card, has no key for it, and none for a head in float32."""
    saved = OmegaConf.load(run / "config.yaml")
    card, head = saved.callbacks.checkpoint.pop("card"), saved.model.pop("head")
    OmegaConf.save(saved, run / "config.yaml")
    assert card == saved_config(run).callbacks.checkpoint.card == resumed(run).callbacks.checkpoint.card
    assert head == resumed(run, "model.head_dtype=float32").model.head
    saved.callbacks.checkpoint.card = None  # somebody wants none
    OmegaConf.save(saved, run / "config.yaml")
    assert saved_config(run).callbacks.checkpoint.card is None


def test_a_key_that_the_run_has_added_needs_no_plus(tmp_path):
    """Given one by one, or as a dictionary; a key that the run does not have is a mistake all the same."""
    for i, bound in enumerate(
        (["+callbacks.cheap._target_=a.Cheap", "+callbacks.cheap.most=1"], ["+callbacks.cheap={most: 1}"])
    ):
        folder = tmp_path / str(i)
        save_config(composed("train", [*bound, f"output_dir={folder}"]))
        save_manifest(str(folder), {"overrides": bound})
        (folder / "checkpoints").mkdir()
        assert resumed(folder, "callbacks.cheap.most=2").callbacks.cheap.most == 2
        with pytest.raises(HydraException, match="least"):
            resumed(folder, "callbacks.cheap.least=2")


def test_the_command_line_is_on_top(run):
    config = resumed(run, "max_tokens=32", "rollout.num_rollouts=500", "~callbacks.curriculum", "resume.changes=allow")
    assert config.rollout.num_rollouts == config.callbacks.checkpoint.num_rollouts == 500
    assert config.rollout.sampling.max_tokens == config.algo.max_tokens == 32 and "curriculum" not in config.callbacks
    said = changes(config, run)
    assert "callbacks.curriculum.rollout=None (was 9)" in said and any(
        line.startswith("max_tokens=32 (was ") for line in said
    )


def test_a_key_that_repeats_another_one_is_not_listed_beside_it(run, monkeypatch):
    config = resumed(run, "max_tokens=32", "eval.sampling.max_tokens=16")
    said = changes(config, run)
    repeated = [line for line in said if line.endswith("max_tokens=32 (was 512)")]
    assert sorted(line.partition("=")[0] for line in repeated) == [
        "algo.max_tokens",
        "max_tokens",
        "rollout.sampling.max_tokens",
    ]
    assert sorted(chosen_changes(said, run)) == ["eval.sampling.max_tokens=16 (was 512)", "max_tokens=32 (was 512)"]
    monkeypatch.setattr("grpo.training.checkpoints.usable", lambda given: given)
    with pytest.raises(UserError, match=r"had other settings: .*\bmax_tokens=32 \(was 512\)"):
        check_resumed(config)  # since algo.max_tokens would make it another run


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("task.prompt=zero_shot", "task.prompt=zero_shot (was one_shot)"),
        ("model.path=y", "model.path=y (was x)"),
        ("algo=grpo", "algo.reduce=sequence (was constant)"),
        ("~callbacks.curriculum", "callbacks.curriculum._target_=None (was helpers.slots.Crash)"),
    ],
)
def test_another_run_needs_a_word(run, override, named, monkeypatch):
    monkeypatch.setattr("grpo.training.checkpoints.usable", lambda given: given)
    config = resumed(run, override)
    with pytest.raises(
        UserError, match=r"the run to resume had other settings: .*set resume\.changes=allow"
    ) as refused:
        check_resumed(config)
    assert named in str(refused.value)
    config.resume.changes = "allow"
    check_resumed(config)


def test_callbacks_that_only_show_may_go(run, monkeypatch):
    """Callbacks of the appendices, too."""
    monkeypatch.setattr("grpo.training.checkpoints.usable", lambda given: given)
    check_resumed(resumed(run, "~callbacks.report", "~callbacks.texts", "~callbacks.samples"))


def test_other_data_needs_a_word(run, tmp_path, caplog):
    """A row more, a row that changes, and one of many that the fingerprint, which looks at a thousand, does not see."""

    def rows(count: int, gold: int = 0):
        (tmp_path / "train.jsonl").write_text(
            "".join(f'{{"q": "{i}?", "gold": {gold * (i == 1)}}}\n' for i in range(count))
        )
        return {"train": Dataset(str(tmp_path), ("q",)).split("train")}

    save_manifest(
        str(run), {"overrides": THEN, "data": {"train": data_facts(rows(1200)["train"]), "test": {"rows": 7}}}
    )
    config = resumed(run)
    check_data(config, rows(1200))
    assert fingerprint_of_all(rows(1200, 1)["train"]) == fingerprint_of_all(rows(1200)["train"])
    for changed_rows, said in [(rows(1200, 1), "1200 rows, file="), (rows(1199), "1199 rows, rows=1199 (was 1200)")]:
        with pytest.raises(
            UserError, match=r"the run to resume had other data: .*set resume\.changes=allow"
        ) as refused:
            check_data(config, changed_rows)
        assert said in str(refused.value)
    config.resume.changes = "allow"
    check_data(config, rows(1199))
    assert "resuming with other data: train has 1199 rows" in caplog.text
    for same in ("null", f"{tmp_path}/checkpoints/lone.ckpt"):  # a run of its own, and a checkpoint without a manifest
        config.ckpt_path = None if same == "null" else same
        check_data(config, rows(5))


def test_the_first_configuration_stays_and_changes_are_added(run, monkeypatch):
    first = (run / "config.yaml").read_bytes()
    for value in ("1e-5", "1e-5", "2e-5"):
        config = resumed(run, f"optim.optimizer.lr={value}")
        config.output_dir = str(run)
        save_config(config)
        assert Run(run).config["optim"]["optimizer"]["lr"] == saved_config(run).optim.optimizer.lr == float(value)
    assert (run / "config.yaml").read_bytes() == first
    written = OmegaConf.load(run / "config_changes.yaml")
    lines = [[line for line in entry.changes if line.startswith("optim.optimizer")] for entry in written]
    assert lines == [["optim.optimizer.lr=1e-05 (was 0.0003)"], ["optim.optimizer.lr=2e-05 (was 1e-05)"]]
    assert all(entry.time.startswith("20") for entry in written)


def test_which_arguments_are_added(run):
    auto = [f"hydra.run.dir='{run}'", "resume=auto"]
    assert add_saved_overrides(auto) == auto  # there is no checkpoint
    (run / "checkpoints" / "00001.ckpt").mkdir()
    assert add_saved_overrides(auto) == [*THEN, *auto] == add_saved_overrides([*THEN, *auto])
    assert add_saved_overrides([f"ckpt_path={run}", "algo=grpo"]) == [
        *THEN[:4],
        *THEN[5:],
        f"ckpt_path={run}",
        "algo=grpo",
    ]
    for same in (
        ["ckpt_path=null"],
        ["-m", f"ckpt_path={run}"],
        ["seed=1", "resume=auto"],
        ["ckpt_path=nowhere/x.ckpt"],
        ["ckpt_path=/nowhere.ckpt"],
    ):
        assert add_saved_overrides(same) == same


def test_later_arguments_replace_earlier_ones():
    assert joined(["a=1", "+b=2", "c=[1,2]"], ["a=3", "~b", "d=4"]) == ["+b=2", "c=[1,2]", "a=3", "~b", "d=4"]
    assert joined(["+b=2", "~b"], ["~b"]) == ["+b=2", "~b"] == joined(["+b=2"], ["+b=2", "~b"])
    assert joined(["+b=1", "++c=1"], ["b=2", "c=2"]) == ["+b=2", "++c=2"]  # keys that the earlier one has added
    assert joined(["+b=2"], ["+b=2"]) == ["+b=2"] and joined(["a=1"], ["~a"]) == ["~a"]
    saved, then, now = {"a": 1, "b": {"c": 2, "d": 3}}, {"a": 9, "b": {"c": 2}}, {"a": 9, "b": {"c": 5}, "e": 6}
    assert changed(saved, then, now) == {"a": 1, "b": {"c": 5, "d": 3}, "e": 6}
    assert changed(saved, now, then) == {"a": 1, "b": {"c": 2, "d": 3}}


def test_a_run_stands_for_its_best_policy_else_for_its_last(tmp_path):
    for name in ("last", "best"):
        (folder := tmp_path / "checkpoints" / name).mkdir(parents=True)
        (folder / "config.json").touch()
        assert policy_folder(str(tmp_path)) == folder
