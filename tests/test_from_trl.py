"""grpo.from_trl knows every setting of `trl grpo`, and its tables are those of docs/from_trl.md."""

import re
import shlex
from pathlib import Path
from textwrap import dedent

import from_trl  # benchmarks/from_trl.py
import pytest
import yaml
from click.testing import CliRunner
from conftest import ROOT
from huggingface_hub.cli import hf
from huggingface_hub.errors import OfflineModeIsEnabled

from grpo.apps.from_trl import main
from grpo.system.errors import UserError

TEXT = from_trl.DATA.read_text()
DATA = yaml.safe_load(TEXT)


def test_every_setting_has_one_row_with_an_answer():
    pytest.importorskip("trl")
    page = from_trl.PAGE.read_text()
    assert from_trl.faults(DATA) == [] and from_trl.mended(TEXT) == TEXT and from_trl.page(DATA, page) == page


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
PASSES = "rollout.epochs=3.0"
UNTESTED = "eval.every=0 eval.on_start=false task.splits.test=null task.held_out.test=0"
# the fields in the file; those after it; the words beside ALWAYS; the lines with #
COMMANDS = {
    "defaults": ("", "", f"{UNTESTED} {PASSES} rollout.prompts=1 algo.num_minibatches=1", ""),
    # 8 rows x 4 steps of accumulation x 2 devices are 64 samples, 8 prompts; 100 steps, 1 for each of 2 epochs, are 50 rollouts
    "sizes": (
        """
        gradient_accumulation_steps: 4
        max_steps: 100
        num_iterations: 2
        warmup_steps: 0.1
        eval_strategy: steps
        eval_steps: 25
        """,
        "num_processes=2 save_steps=30",
        """rollout.prompts=8 algo.num_minibatches=1 rollout.num_rollouts=50 algo.num_epochs=2 optim.warmup_ratio=0.1 eval.every=13
        trainer.devices=2 callbacks.checkpoint.every=15""",
        "gradient_accumulation_steps: optim.max_tokens_per_microbatch: tokens, not rows, go through the model at once;",
    ),
    # 32 samples in 4 steps of 8: 4 prompts, 4 updates
    "engine": (
        """
        generation_batch_size: 32
        use_vllm: true
        vllm_gpu_memory_utilization: 0.5
        vllm_importance_sampling_mode: token_mask
        use_peft: true
        lora_target_modules: [q_proj, v_proj]
        load_in_4bit: true
        report_to: [wandb]
        run_name: my run
        """,
        "",
        f"""{UNTESTED} {PASSES} rollout.prompts=4 algo.num_minibatches=4 engine=vllm engine.args.gpu_memory_utilization=0.5
        algo/correction=icepop algo.correction.high=3.0 adapter=lora adapter.r=16 adapter.lora_alpha=32
        adapter.target_modules=[q_proj,v_proj] model.quantization=4bit logger=[wandb] logger.wandb.project=huggingface
        logger.wandb.name='my_run'""",
        "",
    ),
    "objective": (
        """
        beta: 0.04
        epsilon_high: 0.28
        loss_type: dr_grpo
        scale_rewards: false
        sync_ref_model: true
        use_adaptive_entropy: true
        chat_template_kwargs: {enable_thinking: false}
        optim: adamw_8bit
        max_prompt_length: 300
        top_k: -1
        push_to_hub: true
        """,
        "bf16=false",
        f"""{UNTESTED} {PASSES} rollout.prompts=1 algo.num_minibatches=1 algo/kl=loss_with_ratio algo.kl.coef=0.04
        algo.surrogate.low=0.2 algo.surrogate.high=0.28 algo.reduce=constant algo.advantage.scale=none algo.kl.sync_every=512
        algo.kl.sync_alpha=0.6 algo.entropy.coef=0.0 algo.entropy.target=0.2 algo.entropy.step=0.005 algo.entropy.most=1.0
        renderer.template_args={{enable_thinking:false}} optim=adamw_8bit prompt_limit.max_tokens=300
        prompt_limit.too_long=truncate rollout.sampling.top_k=0 trainer.precision=32-true""",
        "push_to_hub: none: `python -m grpo.export",
    ),
    "a server": (
        """
        loss_type: cispo
        epsilon_high: 5.0
        save_strategy: "no"
        use_vllm: true
        vllm_mode: server
        vllm_server_port: 9000
        max_tool_calling_iterations: 3
        """,
        "",
        f"""{UNTESTED} {PASSES} rollout.prompts=1 algo.num_minibatches=1 algo/surrogate=cispo algo.surrogate.bound=5.0
        algo.reduce=token max_turns=4 engine=vllm_server engine.urls=[http://0.0.0.0:9000] engine.wait=240.0
        ~callbacks.checkpoint""",
        "",
    ),
}


@pytest.mark.parametrize(("file", "after", "words", "remark"), COMMANDS.values(), ids=COMMANDS)
def test_a_configuration_of_trl_becomes_a_command(tmp_path, capsys, file, after, words, remark):
    (tmp_path / "grpo.yaml").write_text(MODEL + dedent(file))
    main([str(tmp_path / "grpo.yaml"), *after.split()])  # composes the command and checks its values
    *lines, command = capsys.readouterr().out.splitlines()
    python, program, *given = shlex.split(command)
    assert [python, program] == ["python", "train.py"]
    assert sorted(word.replace("my run", "my_run") for word in given) == sorted([*ALWAYS.split(), *words.split()])
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


@pytest.mark.parametrize("file", ["from_trl.md", "logging.md"])
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
