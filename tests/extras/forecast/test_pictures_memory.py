"""The forecast of a run whose policy sees: its pass to the byte, the pixels in the host's memory, and a whole run."""

import csv
import re

import pytest
import torch
from conftest import compose_config
from helpers.foreseen import LINUX, Run
from helpers.looking import LOOKING
from helpers.seeing import KINDS, drawn, made

from grpo.extras.forecast.imagined import Live
from grpo.extras.images.door import sight_of
from grpo.extras.images.sight import PIXELS
from grpo.models.logprobs import completion_logprobs
from grpo.objectives.batch import TokenBatch
from grpo.system import memory
from train import train

SETTINGS = "rollout.prompts=2 rollout.group_size=2 rollout.num_rollouts=10 max_tokens=20 optim.max_tokens_per_microbatch=100000"
SLOW = pytest.mark.slow


@pytest.mark.parametrize("vision", ["frozen", pytest.param("trained", marks=SLOW)])
@pytest.mark.parametrize("kind", [kind if kind == "qwen3_vl" else pytest.param(kind, marks=SLOW) for kind in KINDS])
def test_a_microbatch_with_pictures_takes_what_was_foreseen(kind, vision, tmp_path, toy):
    """Two prompts of three pictures each, with two answers of 20 tokens. Without a gradient the tower keeps nothing."""
    run = Run(made(kind, tmp_path, toy), *SETTINGS.split(), f"model.vision={vision}")
    sight, layout = sight_of(run.pretrained), "padded" if kind == "gemma3" else "shared_prompt"
    held = [[drawn(90, 60, 3 * group + i) for i in range(3)] for group in range(2)]
    place = sight.placeholder
    prompts = [sight.expanded([5, place, 6, place, 7, place, 8], pictures) for pictures in held]
    foreseen = run.forecast(len(prompts[0]))
    policy = run.module(run.pretrained.model()).policy
    ids = torch.tensor([[*prompts[row // 2], *[row // 2] * 20] for row in range(4)])
    mask = torch.ones(4, 20, dtype=torch.bool)
    batch = TokenBatch(ids, torch.ones_like(ids), mask, torch.zeros(4, 20), torch.arange(4))
    for p in policy.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    there = [x for p in policy.parameters() for x in (p, p.grad) if x is not None]
    live = Live([*there, *policy.buffers()], policy.config.get_text_config().vocab_size)
    with live:
        logprobs, entropy = completion_logprobs(policy, batch, 1.0, False, layout)
        (logprobs + entropy).sum().backward()
    assert foreseen["activations"] + foreseen["logits"] == live.most.total()
    of_one = sum(x.nbytes for picture in held[0] for x in sight.pixels(picture.id).values())
    assert foreseen["pixels"] == (10 * 2 - 2) * of_one < PIXELS  # of ten rollouts, without the two that are there


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize("vision", ["frozen", "trained"])
def test_a_run_with_pictures_takes_what_was_foreseen(vision, tmp_path, toy, caplog, monkeypatch):
    """24 prompts with a picture of 400 places each, whose tower reads 1,600 patches. The tolerance is that of runs without."""
    folder = made("qwen3_vl", tmp_path / "model", toy)
    words = f"""task=gsm8k model=path model.path={folder} model.vision={vision} +model.pictures.max_pixels=400000 debug=smoke
        callbacks=none preflight=off rollout.prompts=24 max_tokens=4 optim.max_tokens_per_microbatch=100000 eval.every=0
        forecast=true output_dir={tmp_path}"""
    config = compose_config(*words.split())
    config.task = {**LOOKING, "side": 560, "rows": 30}
    caplog.set_level("INFO")
    monkeypatch.setattr("grpo.extras.forecast.forecast.SPARE", 0)  # the line has the parts on any machine
    memory.give_back()  # what tests before this one have freed would be taken again, and count as held so far
    train(config)
    [line] = [line for line in caplog.messages if " in an update" in line]
    foreseen = {phase: float(size) * 1e9 for size, phase in re.findall(r"([\d.]+) GB in an? (update|rollout)", line)}
    so_far = float(re.search(r"so far ([\d.]+) GB", line)[1]) * 1e9
    with open(tmp_path / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    for phase, expected in foreseen.items():
        most = max(float(row[f"memory/{phase}"]) for row in rows)
        assert expected / 1.3 < most < 1.15 * expected, f"{phase}: {most / 1e9:.2f} GB, {line}"
        assert 0.5 < (most - so_far) / (expected - so_far) < 1, f"{phase}: {most / 1e9:.2f} GB, {line}"
    assert foreseen.keys() == {"update", "rollout"}
