"""docs/from_others.md has every flag of four other systems; the keys that it and docs/from_trl.md name exist."""

import dataclasses
import re
from collections import Counter

import pytest
from helpers.project import faults, table

TABLE = table("from_others.md", "flag")
FLAGS = Counter(flag for flags, *_ in TABLE for flag in re.findall(r"`([^`]+)`", flags))
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


def test_every_flag_has_a_line():
    assert set(KNOWN.split()) <= FLAGS.keys()


def test_every_flag_of_the_server_of_trl_has_a_line():
    theirs = pytest.importorskip("trl.scripts.vllm_serve").ScriptArguments
    assert {f"--{field.name}" for field in dataclasses.fields(theirs)} <= FLAGS.keys()


@pytest.mark.parametrize(("page", "header"), [("from_others.md", "flag"), ("from_trl.md", "TRL")])
def test_the_keys_of_a_table_exist(page, header):
    assert faults(page, header) == []
