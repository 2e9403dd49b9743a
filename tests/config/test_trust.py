"""A run's folder may bring data. Code that only the folder names is asked for."""

from pathlib import Path

import hydra
import pytest
from conftest import compose_config
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from eval import as_in_run
from grpo.apps import cli
from grpo.apps.cli import announced
from grpo.config.composing import CONF, composed, literal
from grpo.config.resuming import add_saved_overrides, save_config
from grpo.config.trust import is_code, is_given, leaves
from grpo.extras.export.export import whole_model
from grpo.runs.manifest import save_manifest
from grpo.system import exits
from grpo.system.errors import UserError
from grpo.system.stopping.stop import Stop

EVIL = "open('ran', 'w')\ndef reward(completions, **_): return [0.0] * len(completions)\n"


def run_with(folder: Path, *overrides: str) -> Path:
    """Return the folder of a run with these arguments."""
    config = composed("train", [*overrides, f"output_dir={literal(folder)}"])
    save_config(config)
    save_manifest(str(folder), {"overrides": list(overrides)})
    (folder / "checkpoints").mkdir()
    return folder


def resume(*words: str) -> None:
    """Compose what the words resume, as train.py does before it builds anything."""
    config = composed("train", [*add_saved_overrides(words), "output_dir=new"])
    announced(config, list(words))


ROWS = "task=jsonl task.path=rows.jsonl".split()


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A working folder with files of its own, another run in it, and a folder elsewhere, all with the same code."""
    for folder in ("project", "project/lib", "project/run", "elsewhere", "project/.venv/site-packages"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "code.py").write_text(EVIL)
    (tmp_path / "project" / "rows.jsonl").write_text('{"prompt": "1?"}\n')
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.syspath_prepend(str(tmp_path / "project"))
    return tmp_path / "project"


def test_code_of_a_folder_is_asked_for(project):
    """Nothing of it runs. The command goes on if it names the code itself, or says trust=true."""
    words = [*ROWS, "task.rewards=run/code.py:reward", "task.weights=[0.5]"]
    run = run_with(project / "run", *words)
    with pytest.raises(UserError, match=r"names code to run .*: task.rewards=run/code.py:reward; .*add trust=true"):
        resume(f"ckpt_path={run}")
    resume(f"ckpt_path={run}", "task.rewards=run/code.py:reward")
    assert not [*project.parent.rglob("ran")]


def test_what_the_folder_of_a_run_says_is_not_what_the_command_names(project, monkeypatch, capsys):
    """train.py reads the arguments of the run from its folder, as if they had been typed before its own."""
    run = run_with(project / "run", *ROWS, "task.rewards=run/code.py:reward", "task.weights=[0.5]")
    silent = "hydra/job_logging=none hydra/hydra_logging=none hydra.output_subdir=null hydra.run.dir=new".split()
    monkeypatch.setattr("sys.argv", ["train.py", f"ckpt_path={run}", *silent])
    monkeypatch.setattr(exits, "watch", lambda: None)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
    def main(config):
        announced(config)

    with Stop().during(), pytest.raises(SystemExit) as ended:
        cli.run(main, "train")
    assert ended.value.code == 1 and "names code to run that this command line does not" in capsys.readouterr().err


@pytest.mark.parametrize(
    "asked",
    [
        {"task": {"rewards": ["correct", "{elsewhere}/code.py:reward"]}},
        {"task": {"rewards": "{elsewhere}/code.pyc:reward"}},
        {"task": {"rewards": ["run/code.py:reward"]}},
        {"task": {"rewards": "run/../run/code.py:reward"}},
        {"task": {"rewards": ".venv/site-packages/code.py:reward"}},
        {"task": {"rewards": "os.system"}},
        {"task": {"rewards": "sys.exit"}},
        {"task": {"command": "python agent.py"}},
        {"task": {"tools": ["mcp:python server.py"]}},
        {"task": {"rewards": [{"_target_": "tasks.code.passes", "sandbox": "ssh host python"}]}},
        {"task": {"taskset": "{elsewhere}/code.py:Tasks"}},
        {"task": {"rewards": [{"_target_": "tasks.code.passes", "unconfined": True}]}},
        {"algo": {"level": "{elsewhere}/code.py:reward"}},
        {"optim": {"optimizer": {"_target_": "os.system"}}},
        {"callbacks": {"mine": {"_target_": "grpo.system.files.write_text", "path": "ran"}}},
        {"callbacks": {"mine": {"_target_": "nowhere.at_all"}}},
        {"callbacks": {"mine": {"_target_": "plain"}}},
        {"model": {"trust_remote_code": True}},
    ],
)
def test_what_is_asked_for(asked, project):
    (project / "run" / "manifest.json").write_text("{}")
    [(key, value)] = [
        (key, value) for key, value in leaves(asked) if value not in ("correct", "ran", "tasks.code.passes")
    ]
    value = value.format(elsewhere=project.parent / "elsewhere") if isinstance(value, str) else value
    assert is_code(key, value, project / "run") and is_code(key, value, project / "other")
    assert is_given(key, value, [f"+{key}={value}"]) and not is_given(key, value, ["seed=1", f"other{key}=1"])


@pytest.mark.parametrize(
    "value",
    "code.py:reward lib/code.py:reward lib.code.reward correct grpo.extras.grading.functions.format tasks.countdown.solved "
    "Qwen/Qwen2.5-0.5B rows.jsonl test.jsonl torch.optim.Adam callbacks.mine 0.5 ${oc.env:HOME}".split(),
)
def test_what_is_not_asked_for(value, project):
    """Code of the project at hand, whatever conf/ names, and data."""
    Path("test.jsonl").touch()  # Python has a module of that name
    assert not is_code("task.rewards", value, project / "run")


def test_a_run_of_ones_own_is_resumed_without_a_question(project):
    own = [*ROWS, "task.rewards=[code.py:reward, lib.code.reward, longer]", "task.weights=[1, 1, 1]", "algo=dapo"]
    own += ["+callbacks.mine={_target_: helpers.slots.Crash, rollout: 3}", "optim.optimizer._target_=torch.optim.Adam"]
    resume(f"ckpt_path={run_with(project / 'run', *own)}")


def test_no_file_of_conf_is_asked_for(tmp_path):
    for file in CONF.rglob("*.yaml"):
        found = [*leaves(OmegaConf.to_container(OmegaConf.load(file)))]
        assert not [key for key, value in found if is_code(key, value, tmp_path) and "${" not in str(value)], file


def test_the_arguments_of_a_folder_change_nothing_of_hydra(tmp_path):
    """Its callbacks, loggers and search path could run code."""
    words = [
        "hydra.callbacks.x={_target_: os.system}",
        "+hydra/job_logging=x",
        "callbacks@hydra.callbacks=default",
        "-m",
    ]
    (tmp_path / "checkpoints").mkdir()
    save_manifest(str(tmp_path), {"overrides": [*words, "--config-dir=/evil", 3, "seed=5"]})
    assert add_saved_overrides([f"ckpt_path={tmp_path}"]) == ["seed=5", f"ckpt_path={tmp_path}"]


def test_an_evaluation_and_an_export_ask_too(tmp_path):
    best = tmp_path / "checkpoints" / "best"
    best.mkdir(parents=True)
    (best / "config.json").touch()
    trained = compose_config("model.trust_remote_code=true", "task.rewards=[os.system]", "output_dir=.")
    OmegaConf.save(trained, tmp_path / "config.yaml", resolve=True)
    with pytest.raises(UserError, match=r"task.rewards.0=os.system, model.trust_remote_code=True; read it"):
        as_in_run(compose_config(f"run={tmp_path}", "output_dir=.", name="eval"), ())
    for words in (["trust=true"], ["task=gsm8k", "model.trust_remote_code=true"]):
        as_in_run(compose_config(f"run={tmp_path}", *words, "output_dir=.", name="eval"), words)
    with pytest.raises(UserError, match=r"model.trust_remote_code=True; .* or add --trust"):
        whole_model(best, tmp_path, None)


def test_every_value_is_looked_at():
    assert [*leaves({"a": [{"b": 1}, ["c"]], "d": {}})] == [("a.0.b", 1), ("a.1.0", "c")]
