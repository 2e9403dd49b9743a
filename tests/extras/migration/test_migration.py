"""The tables of other systems are complete and name keys that exist; grpo.from_trl works; what docs/migration.md counts is so."""

import dataclasses
import re
import shlex
from collections import Counter
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import from_trl  # benchmarks/from_trl.py
import pytest
import yaml
from click.testing import CliRunner
from conftest import EXAMPLES, ROOT
from helpers.documents import anchors
from helpers.parity import COMMANDS, TABLE
from helpers.project import faults, holds
from huggingface_hub.cli import hf
from huggingface_hub.errors import OfflineModeIsEnabled

from grpo.extras.migration.foreign import printed, rows
from grpo.extras.migration.from_trl import hydra_value, main, translated, unread_lines
from grpo.extras.migration.trl_script import read_script
from grpo.system.errors import UserError

TEXT = from_trl.DATA.read_text()
DATA = yaml.safe_load(TEXT)
PAGE = (ROOT / "docs" / "migration.md").read_text()
CASES = yaml.safe_load((EXAMPLES / "from_trl.yaml").read_text())
FLAGS = " ".join(row.theirs for row in rows() if row.header == "flag")  # in backticks
# flags of systems that are not installed here
KNOWN = """
    --model-name --batch-size --samples-per-prompt --max-steps --eval-on-start --eval-every-steps --eval-limit --run-dir
    --save-best-checkpoint --max-turns --learning-rate --max-tokens --train-limit
    --model --lr --training-steps --seq-len --gradient-accumulation-steps --device --save-path --checkpoint-interval --vllm-port
    --gpu-memory-utilization --max-model-len --dtype --atropos-url --trainer-rank --world-size --init-method
    --num-inference-nodes --debug-loading --log-dir --weight-bridge-mode --vllm-restart-interval --vllm-config-path --clip-eps
    --kl-coef --no-reference-logprobs --optimizer --use-wandb --wandb-project --wandb-group --wandb-run-name --benchmark --lora-r
    --lora-alpha --lora-dropout --lora-target-modules --lora-layer-indices --enforce-eager
    --env.group_size --env.max_token_length --env.total_steps --env.steps_per_eval --env.rollout_server_url --env.batch_size
    --env.max_num_workers --env.max_num_workers_per_node --env.max_eval_workers --env.max_batches_offpolicy --env.use_wandb
    --env.wandb_name --env.data_path_to_save_groups --openai.base_url --openai.model_name --openai.api_key --openai.timeout
    --openai.num_max_requests_at_once --openai.num_requests_for_eval --openai.server_type --slurm --slurm.*
    --model-path --tp --port --host num_steps num_epochs group_size
"""
# the fields of GRPOConfig 0.16, and of its script, that TRL 1.16 lacks
OLDER = """
    per_gpu_train_batch_size per_gpu_eval_batch_size no_cuda use_mps_device jit_mode_eval use_ipex fp16_opt_level
    half_precision_backend tpu_num_cores tpu_metrics_debug past_index fsdp_min_num_params tp_size
    fsdp_transformer_layer_cls_to_wrap adafactor group_by_length use_legacy_prediction_loop
    include_inputs_for_metrics fp16_backend evaluation_strategy push_to_hub_model_id warmup_ratio logging_dir
    push_to_hub_organization push_to_hub_token mp_parameters torchdynamo ray_scope dispatch_batches split_batches
    save_safetensors include_tokens_per_second vllm_device vllm_dtype vllm_max_model_len
    vllm_enable_prefix_caching max_prompt_length vllm_guided_decoding_regex overwrite_output_dir torch_dtype
    gradient_checkpointing_use_reentrant
"""


@pytest.mark.parametrize("header", ["flag", "TRL"])
def test_the_keys_of_a_table_exist(header):
    assert faults([row for row in rows() if row.header == header]) == []


def test_the_command_prints_every_row_and_its_links_lead_somewhere(capsys):
    main(["--table"])
    text = capsys.readouterr().out
    assert all(f"| {row.theirs} | {row.here} | {row.remark}".rstrip() in text for row in rows())
    for page, anchor in re.findall(r"\]\(([\w.]+)#?([\w-]*)\)", text):
        file = ROOT / "docs" / page
        assert file.exists() and (not anchor or anchor in anchors(file)), f"{page}#{anchor}"
    assert all(find_spec(program) for program in re.findall(r"`python -m ([\w.]+)", text))
    assert "rollout.n" in printed(["verl"]) and "num_generations" not in printed(["verl"])
    with pytest.raises(
        UserError, match="there is no table of nobody; there are TRL, verl, OpenRLHF, rolo, Atropos, rl-max"
    ):
        main(["--table", "nobody"])


def test_every_flag_has_a_line():
    assert not [flag for flag in [*KNOWN.split(), "deepspeed --num_gpus"] if f"`{flag}`" not in FLAGS]


def test_every_flag_of_the_server_of_trl_has_a_line():
    theirs = pytest.importorskip("trl.scripts.vllm_serve").ScriptArguments
    assert not [field.name for field in dataclasses.fields(theirs) if f"`--{field.name}`" not in FLAGS]


def test_every_setting_of_trl_has_one_row_with_an_answer():
    pytest.importorskip("trl")
    assert from_trl.faults(DATA) == [] and from_trl.mended(TEXT) == TEXT


def test_every_field_of_an_older_trl_has_a_row():
    others = [name for row in DATA["others"] for name in row["trl"].split()]
    assert not {*OLDER.split()} - {*others} and len(others) == len({*others})
    new = {name for row in DATA["fields"] for name in row["trl"].split()}
    assert {row["now"] for row in DATA["others"] if "now" in row} <= new
    words, _ = translated(DATA, {"adafactor": True})
    assert "optim=adafactor" in words and not [word for word in words if "betas" in word]


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
        ("per_device_train_batch_size: 0", "a value that TRL does not take: integer division or modulo by zero"),
        ("num_generations: 1", "num_generations=1 must be at least 2"),
        (
            "per_device_train_batch_size: 4",
            r"num_generations=8 does not divide the 4 samples of a batch, and TRL refuses it \(4 rows x num_processes=1 x 1 "
            r"steps\): give num_processes=N after the file if there are several; or set num_generations to one of 2, 4$",
        ),
        (  # 12 samples are no two prompts of 8
            "{per_device_train_batch_size: 2, num_processes: 3, gradient_accumulation_steps: 2}",
            r"does not divide the 12 .* \(2 rows x num_processes=3 x 2 steps\).* 2, 3, 4, 6, 12$",
        ),
        ("generation_batch_size: 12", r"generation_batch_size=12 is no multiple of the 8 rows of a step"),
        (
            "{steps_per_generation: 3, gradient_accumulation_steps: 2}",
            "an update takes 16 samples, so parts of batches of 24",
        ),
        (
            "{eval_strategy: steps, per_device_eval_batch_size: 4}",
            r"8 samples for each prompt do not divide the 4 rows",
        ),
        ("- a list", "is no file with the fields of `trl grpo`"),
    ],
)
def test_a_wrong_configuration_is_one_line(tmp_path, text, line):
    more = MODEL if text[0] not in "-{" else ""
    (tmp_path / "grpo.yaml").write_text(more + text)
    with pytest.raises(UserError, match=line) as error:
        main([str(tmp_path / "grpo.yaml")])
    assert "\n" not in str(error.value)


SCRIPT = """
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward as exact
import mine.rewards as ours

MODEL = "org/model"
common = {"max_completion_length": 100, "num_generations": 4}

def short(completions, **columns):
    return [-len(text) for text in completions]

for rate in (1e-6, 1e-5):
    config = GRPOConfig("runs/short", learning_rate=rate, per_device_train_batch_size=4, seed=7, **common)
trainer = GRPOTrainer(
    AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16, revision="v2"),
    [short, exact, ours.polite, "org/judge", made(3)],
    config,
    train_dataset=load_dataset("org/rows", "main", split="train"),
    callbacks=[Stop()],
    peft_config=LoraConfig(r=4, bias="lora_only", **other),
)
raise SystemExit("nothing of this is run")
"""


def test_a_script_is_read_without_running_it(tmp_path, capsys):
    (tmp_path / "script.py").write_text(SCRIPT)
    main([str(tmp_path / "script.py"), "num_processes=2", "temperature=0.9", "seed=9"])
    *lines, command = capsys.readouterr().out.splitlines()
    assert lines[:5] == [
        "# line 11: copy short into rewards.py, with what it needs: to import it from script.py would run that script",
        "# line 15: learning_rate=rate is not read: optim.optimizer.lr",
        "# line 18: reward_funcs=made(3) is not read: task.rewards: functions by name, as `FILE.py:NAME`",
        "# line 21: callbacks=[Stop()] is not read: callbacks: those of Lightning, as nodes with a `_target_`",
        "# line 22: **other is not read: **",
    ]
    assert [line.split(":")[0] for line in lines[5:]] == ["# per_device_train_batch_size"]
    words = """
        hydra.run.dir=runs/short rollout.group_size=4 rollout.prompts=2 algo.num_minibatches=1 seed=9 max_tokens=100
        trainer.devices=2 model=path model.path=org/model model.dtype=bfloat16 model.revision=v2 rollout.sampling.temperature=0.9
        task.path=org/rows task.config=main task.splits.train=train optim.optimizer.lr=1e-06
        task.rewards=[rewards.py:short,trl.rewards.accuracy_reward,mine.rewards.polite,org/judge]
        adapter=lora adapter.r=4 adapter.lora_alpha=8 ++adapter.bias=lora_only
    """
    assert {*words.split()} <= {*shlex.split(command)}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("x = 1", "has no call of GRPOTrainer or GRPOConfig: name the script that has it"),
        ("GRPOTrainer()\nGRPOTrainer()", "calls GRPOTrainer in lines 1, 2: leave the one in it that you want"),
        ("GRPOTrainer(", "script.py cannot be read as a Python script: '(' was never closed"),
        ("GRPOConfig(lr=1)", "lr is no field of `trl grpo` in TRL 1.16"),
    ],
)
def test_a_wrong_script_is_one_line(tmp_path, text, line):
    (tmp_path / "script.py").write_text(text)
    with pytest.raises(UserError, match=re.escape(line)) as error:
        main([str(tmp_path / "script.py")])
    assert "\n" not in str(error.value)


def test_a_variable_that_may_have_two_values_is_not_read_unless_it_is_given(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("def made(rate):\n    return GRPOConfig(learning_rate=rate, seed=3)\nrate = 0.5")
    found = read_script(script)
    assert found.fields == {"seed": 3}
    assert unread_lines(DATA, found, ()) == ["line 2: learning_rate=rate is not read: optim.optimizer.lr"]
    assert unread_lines(DATA, found, {"learning_rate"}) == []


def test_what_a_field_of_trl_becomes():
    assert [hydra_value(text) for text in ("true", "NULL", "truth")] == ["'true'", "'NULL'", "truth"]
    updates = {"per_device_train_batch_size": 8, "steps_per_generation": 1, "gradient_accumulation_steps": 2}
    rows = {"eval_strategy": "steps", "per_device_eval_batch_size": 4, "num_processes": 2}  # 8 rows, and 8 samples
    for fields in (updates, rows):
        translated(DATA, fields)  # TRL takes these sizes
    words, _ = translated(DATA, {"per_gpu_train_batch_size": 16})
    assert words == translated(DATA, {"per_device_train_batch_size": 16})[0] != translated(DATA, {})[0]


def test_rows_that_a_script_makes_go_into_a_file(tmp_path):
    script = tmp_path / "script.py"
    script.write_text('rows = load_dataset("org/rows")\nGRPOTrainer("org/model", train_dataset=rows["train"].map(f))')
    found = read_script(script)
    assert found.fields == {"model_name_or_path": "org/model", "dataset_name": "rows.jsonl"}
    assert found.notes == [
        """line 2: write the rows of train_dataset=rows['train'].map(f) to rows.jsonl, as datasets do by .to_json("rows.jsonl")"""
    ]
    script.write_text(
        'rows = load_dataset("json", data_files="a.json")\nGRPOTrainer("org/model", train_dataset=rows["train"])'
    )
    assert read_script(script).fields == {"model_name_or_path": "org/model", "dataset_name": "a.json"}
    model = 'M.from_pretrained(dtype="auto", pretrained_model_name_or_path="m")'
    for given in ('"org/rows", data_files="a.json"', '"org/rows", split="train[:100]"'):
        script.write_text(f"GRPOTrainer({model}, train_dataset=load_dataset({given}))")
        fields = read_script(script).fields
        assert fields.pop("dataset_name") == "rows.jsonl"
        assert fields == {"model_name_or_path": "m", "model_init_kwargs": {"dtype": "auto"}}


@pytest.mark.parametrize("text", [printed(), (ROOT / "docs" / "logging.md").read_text()], ids=["tables", "logging"])
def test_the_commands_that_publish_a_policy_work_up_to_the_network(tmp_path, text):
    """hf takes the arguments and the folder, which is a link, and then wants to reach the hub, which it may not here."""
    lines = re.findall(r"hf upload [^`#\n]+", text)
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


def test_what_the_features_name_exists():
    lines = {names: text for names, text in TABLE["features"].items() if " | " in text}
    lost = []
    for names, text in lines.items():
        for word in re.findall(r"`([^`]+)`", text.partition(" | ")[2]):
            keys = [word] if re.fullmatch(r"[a-z_]+(\.[a-zA-Z_]+)+", word) else []
            if re.fullmatch(r"[a-z_./]+=[\w./]+( [a-z_./]+=[\w./]+)*", word):
                keys = word.split()
            lost += [f"{names}: {key}" for key in keys if not exists(key)]
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
    assert Counter(row[0] for row in ways) == {"R": 27, "T": 39, "A": 46, "M": 21, "X": 8}
    for kind, names in kinds.items():
        assert f"| {len(names)} {kind} |" in PAGE, f"{len(names)} rows {kind}"
    assert f"{len(ways)} features" in PAGE and f"| not here: {'; '.join(TABLE['open'].values())} |" in PAGE
