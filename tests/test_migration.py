"""docs/migration.md has the tables of from_trl.yaml and parity/commands.yaml, and keys that exist; grpo.from_trl works."""

import dataclasses
import re
import shlex
from collections import Counter
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import from_trl  # benchmarks/from_trl.py
import pytest
import yaml
from click.testing import CliRunner
from conftest import EXAMPLES, ROOT
from helpers.parity import COMMANDS, TABLE
from helpers.project import faults, holds, table
from huggingface_hub.cli import hf
from huggingface_hub.errors import OfflineModeIsEnabled

from grpo.from_trl import main
from grpo.system.errors import UserError

TEXT = from_trl.DATA.read_text()
DATA = yaml.safe_load(TEXT)
PAGE = from_trl.PAGE.read_text()
CASES = yaml.safe_load((EXAMPLES / "from_trl.yaml").read_text())
FLAGS = " ".join(flags for flags, *_ in table(from_trl.PAGE.name, "flag"))  # in backticks
# flags of systems that are not installed here
KNOWN = """
    --model-name --batch-size --samples-per-prompt --max-steps --eval-on-start --eval-every-steps --eval-limit --run-dir
    --save-best-checkpoint --max-turns --learning-rate --max-tokens --train-limit
    --model --lr --training-steps --seq-len --gradient-accumulation-steps --device --save-path --checkpoint-interval --vllm-port
    --gpu-memory-utilization --max-model-len --dtype --atropos-url --trainer-rank --world-size --init-method
    --num-inference-nodes --debug-loading --log-dir --weight-bridge-mode --vllm-restart-interval --vllm-config-path --clip-eps
    --kl-coef --no-reference-logprobs --optimizer --use-wandb --wandb-project --wandb-group --wandb-run-name --benchmark --lora-r
    --lora-alpha --lora-dropout --lora-target-modules --lora-layer-indices --enforce-eager
    --model-path --tp --port --host num_steps num_epochs group_size
"""


@pytest.mark.parametrize("header", ["flag", "TRL"])
def test_the_keys_of_a_table_exist(header):
    assert faults(from_trl.PAGE.name, header) == []


def test_every_flag_has_a_line():
    assert not [flag for flag in KNOWN.split() if f"`{flag}`" not in FLAGS]


def test_every_flag_of_the_server_of_trl_has_a_line():
    theirs = pytest.importorskip("trl.scripts.vllm_serve").ScriptArguments
    assert not [field.name for field in dataclasses.fields(theirs) if f"`--{field.name}`" not in FLAGS]


def test_every_setting_of_trl_has_one_row_with_an_answer():
    pytest.importorskip("trl")
    assert from_trl.faults(DATA) == [] and from_trl.mended(TEXT) == TEXT and from_trl.page(DATA, PAGE) == PAGE


def test_a_new_setting_and_a_lost_one_are_found_and_mended():
    pytest.importorskip("trl")
    text = TEXT.replace("- trl: beta\n", "- trl: alpha epsilon\n").replace("- trl: data_seed\n", "- trl: old\n")
    text = text.replace("lora_r: 16", "lora_r: 8")
    found = from_trl.faults(yaml.safe_load(text))
    assert {"beta has no row", "data_seed has no row", "epsilon has 2 rows", "lora_r is 16 in TRL"} < {*found}
    assert f"alpha is no field of TRL {from_trl.version()}" in found
    mended = yaml.safe_load(from_trl.mended(text))
    assert sorted(row["trl"] for row in mended["fields"] if row["here"] == "?") == ["beta", "data_seed"]
    assert not {"alpha", "old"} & {name for row in mended["fields"] for name in row["trl"].split()}
    assert "beta has no answer" in from_trl.faults(mended)


MODEL = "model_name_or_path: org/model\ndataset_name: rows.jsonl\nreward_funcs: [accuracy_reward]\n"
ALWAYS = """
    task=jsonl task.path=rows.jsonl task.rewards=[trl.rewards.accuracy_reward] model=path model.path=org/model algo=trl_default
    optim.optimizer.betas=[0.9,0.999] optim.schedule.name=linear optim.optimizer.lr=1e-06 rollout.group_size=8
    seed=42 max_tokens=512
"""


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_configuration_of_trl_becomes_a_command(tmp_path, capsys, case):
    after, remark = case.get("after", ""), case.get("remark", "")
    (tmp_path / "grpo.yaml").write_text(MODEL + case.get("file", ""))
    main([str(tmp_path / "grpo.yaml"), *after.split()])  # composes the command and checks its values
    *lines, command = capsys.readouterr().out.splitlines()
    python, program, *given = shlex.split(command)
    assert [python, program] == ["python", "train.py"]
    assert sorted(word.replace("my run", "my_run") for word in given) == sorted(
        [*ALWAYS.split(), *case["words"].split()]
    )
    assert len(lines) == bool(remark) and all(line.startswith(f"# {remark}") for line in lines)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("epsilom: 0.2", "epsilom is no field of `trl grpo` in TRL 1.16; did you mean epsilon?"),
        ("num_generations: 0", "a value that TRL does not take: integer division or modulo by zero"),
        ("num_generations: 16", r"rollout\.prompts=0 must be"),
        ("- a list", "is no file with the fields of `trl grpo`"),
    ],
)
def test_a_wrong_configuration_is_one_line(tmp_path, text, line):
    (tmp_path / "grpo.yaml").write_text(text if text == "- a list" else MODEL + text)
    with pytest.raises(UserError, match=line) as error:
        main([str(tmp_path / "grpo.yaml")])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("file", ["migration.md", "logging.md"])
def test_the_commands_that_publish_a_policy_work_up_to_the_network(tmp_path, file):
    """hf takes the arguments and the folder, which is a link, and then wants to reach the hub, which it may not here."""
    lines = re.findall(r"hf upload [^`#\n]+", (ROOT / "docs" / file).read_text())
    assert lines
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "README.md").touch()
    for line in lines:
        (link := tmp_path / Path(shlex.split(line)[3]).name).symlink_to("policy")
        given = [str(link) if word.startswith("RUN/") else word for word in shlex.split(line)[1:]]
        done = CliRunner().invoke(hf.app, given)
        assert isinstance(done.exception, OfflineModeIsEnabled) and "repos/create" in str(done.exception), done.output


def exists(word: str) -> bool:
    """Return whether a dotted word is a key, a file, or an object of a module of ours."""
    if word == "metrics.csv" or holds(word) or any((folder / word).exists() for folder in (ROOT, ROOT / "grpo")):
        return True
    module, _, name = word.rpartition(".")
    for room in ("", "grpo."):
        with suppress(ImportError):
            if hasattr(import_module(f"{room}{module}"), name) or import_module(f"{room}{word}"):
                return True
    return False


def test_the_features_are_the_lines_of_the_table_and_what_they_name_exists():
    lines = {rows: text for rows, text in TABLE["features"].items() if " | " in text}
    wanted = {system: [] for system in "TRAM"}
    for rows, text in lines.items():
        wanted[rows[0]].append(f"| {text} |\n")
    found = re.findall(r"^\| feature \| here \|\n\|---\|---\|\n((?:\|.*\n)+)", PAGE, re.M)
    assert found == ["".join(texts) for texts in wanted.values()]
    lost = []
    for rows, text in lines.items():
        for word in re.findall(r"`([^`]+)`", text.partition(" | ")[2]):
            keys = [word] if re.fullmatch(r"[a-z_]+(\.[a-zA-Z_]+)+", word) else []
            if re.fullmatch(r"[a-z_./]+=[\w./]+( [a-z_./]+=[\w./]+)*", word):
                keys = word.split()
            lost += [f"{rows}: {key}" for key in keys if not exists(key)]
    assert not lost


def test_every_feature_is_shown_in_one_way_and_the_page_counts_them():
    tests = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    for file, name in (test.split("::") for test in TABLE["vllm"].values()):
        assert "pytestmark = pytest.mark.vllm" in tests[file] and re.search(rf"def {name}\b", tests[file]), (
            f"{file}::{name}"
        )
    shown = {
        refused: " ".join(" ".join(one.shows) for one in COMMANDS.values() if one.refused == refused)
        for refused in (0, 1)
    }
    kinds = {
        "work": {*shown[False].split()} - TABLE["open"].keys(),
        "are refused by design": {*shown[True].split()},
        "need vLLM": {*" ".join(TABLE["vllm"]).split()},
        "need a GPU": {*TABLE["gpu"]},
        "is open": {*TABLE["open"]},
    }
    ways = Counter(row for rows in kinds.values() for row in rows)
    assert ways == Counter(" ".join(TABLE["features"]).split())
    assert Counter(row[0] for row in ways) == {"R": 27, "T": 39, "A": 46, "M": 21}
    for kind, rows in kinds.items():
        assert f"| {len(rows)} {kind} |" in PAGE, f"{len(rows)} rows {kind}"
    assert f"{len(ways)} features" in PAGE and f"| not here: {'; '.join(TABLE['open'].values())} |" in PAGE
