"""Two processes learn what one learns: train.py on two devices (of a CPU) compared with one."""

import os
import signal
from collections import Counter
from pathlib import Path

import lightning as L
import pytest
import torch
from helpers.ranks import Ranks
from helpers.runs import rows
from helpers.slots import Dice, Halves
from transformers import AutoModelForCausalLM

from grpo.extras.devices.watched import check_devices
from grpo.models.pretrained import Pretrained
from grpo.runs.run import Run
from grpo.system import distributed
from grpo.system.errors import UserError
from grpo.training import checkpoints
from grpo.training.callbacks import checkpoint
from grpo.training.checkpoints import PlainCheckpoints

TURNS = "task._target_=test_distributed.Turns rollout.prompts=3 eval.every=0"
CASES = {
    # the choice draws among the tokens of all ranks
    "token": "algo=clip_cov algo.choice.low=0.0 algo.choice.share=0.2 rollout.prompts=3 rollout.num_rollouts=1",
    # some minibatches leave a rank without rows, whose first row must not count
    "constant": """algo=dr_grpo rollout.prompts=3 rollout.num_rollouts=1 optim.max_tokens_per_microbatch=1
        optim.gradient_checkpointing=true algo.num_minibatches=3""",
    "sum": "algo=rloo algo/kl=loss rollout.num_rollouts=1 preflight=warn",
    # whitened over all ranks, as is the threshold of entropies; of 12 rows some minibatches leave a rank without rows
    "everything": """algo=reinforce_pp_baseline algo/kl=reward algo.top_entropy=0.5 selection=dynamic selection.rounds=2
        selection.by=reward algo.entropy={coef:0.01,target:9.0} algo.num_minibatches=3 rollout.prompts=3
        rollout.group_size=4 rollout.num_rollouts=2""",
    # in some minibatches no row has a right sibling
    "self": """algo=sdpo teacher.success=0.5 algo.teacher.coef=10 algo.num_minibatches=3 rollout.prompts=3
        rollout.num_rollouts=2""",
    "turns": f"{TURNS} rollout.num_rollouts=2 algo/advantage=optimal_token",
    # on several rows of a sample; in the first rollout the policy has no gradient
    "critic": f"""{TURNS} rollout.num_rollouts=3 algo=ppo critic.coef=1 critic.lr=0.1 critic.pretrain=1
        algo.num_minibatches=3 optim.optimizer.lr=0.1""",
    "critic_model": """algo=ppo critic=model critic.lr=0.1 optim.gradient_checkpointing=true rollout.prompts=3
        rollout.num_rollouts=2 optim.max_tokens_per_microbatch=1""",
    # the policy leaves its start in the first of three updates
    "divergence": """algo=gkd teacher=reference algo.policy_coef=1 algo.num_minibatches=3 rollout.prompts=3
        rollout.num_rollouts=2 optim.max_tokens_per_microbatch=1""",
    "adamw": "optim.optimizer._target_=torch.optim.AdamW optim.optimizer.lr=1e-3 rollout.num_rollouts=2",
    "ahead": """rollout.ahead=1 algo.old_policy=rollout engine=transformers engine._target_=helpers.slots.Apart
        rollout.num_rollouts=3""",
    "adapter": "adapter=lora algo/kl=loss algo.kl.sync_every=1 algo.kl.sync_alpha=0.5 rollout.num_rollouts=2",
}


AHEAD = {
    "exact": ("rollout.ahead=2 engine._target_=helpers.slots.Apart", [0, 1, 2, 2]),
    "ready": ("rollout.ahead=2 rollout.order=ready engine._target_=helpers.slots.Streams", None),
}


class SmallPieces(L.Callback):
    """Policies are written in files of 64 KiB."""

    def setup(self, trainer, module, stage) -> None:
        checkpoint.PIECE = 1 << 16


class KilledInSave(L.Callback):
    """Kills the process of rank 1 after it has written its part of the second checkpoint, before the others know."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if batch.rollout == 1 and trainer.global_rank == 1:
            checkpoints.write_file = lambda file, tensors: (
                file.write_bytes(b"half") and os.kill(os.getpid(), signal.SIGKILL)
            )


class Twelve(Halves):
    """Questions by number, whatever the settings of the task."""

    def __init__(self, **_) -> None:
        super().__init__()


class Turns(Dice):
    """Episodes of one to three turns, most of which are several rows."""

    def __init__(self, **_) -> None:
        super().__init__()


@pytest.fixture(scope="module")
def ranks():
    ranks = Ranks(3)
    yield ranks
    ranks.close()


@pytest.fixture
def learned(ranks, smoke):
    def weights(folder: Path, devices: int, overrides: list[str], ranks: Ranks = ranks) -> dict[str, torch.Tensor]:
        """The weights at the end of a run. At learning rate 1 the change is the gradient."""
        common = [one for one in smoke() if not one.startswith(("output_dir", "optim", "callbacks"))]
        common += f"""task._target_=helpers.slots.Varied trainer=cpu trainer.devices={devices} trainer.timeout=280
            callbacks=[checkpoint] optim.optimizer._target_=torch.optim.SGD ~optim.optimizer.betas optim.optimizer.lr=1
            optim.optimizer.fused=false optim.max_grad_norm=null output_dir={folder}""".split()
        ranks.train(devices, [*common, *overrides])
        return last(folder)["state_dict"]

    return weights


def last(folder: Path) -> dict:
    return PlainCheckpoints().load_checkpoint(folder / "checkpoints" / "last.ckpt")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_learn_what_one_learns(learned, tmp_path, name):
    settings = CASES[name].split()
    one = learned(tmp_path / "1", 1, settings)
    alone = rows(tmp_path / "1")
    assert alone[1]["loss/grad_norm"] > 0.01
    for strategy in ("ddp", "fsdp2")[: 1 if name == "ahead" else 2]:  # that engine cannot copy a sharded policy
        folder = tmp_path / strategy
        two = learned(folder, 2, [*settings, f"strategy={strategy}"])
        for parameter, expected in one.items():
            atol = 1e-4 if name == "adamw" else 1e-6  # AdamW divides by the gradient's size, which may be about 0
            torch.testing.assert_close(two[parameter], expected, atol=atol, rtol=1e-5, msg=f"{strategy} {parameter}")
        checked = Run(folder).manifest["preflight"]
        assert {check["result"] for check in checked.values() if "devices" in check["compared"]} <= {"PASS"}
        assert ("the devices' gradients add up" in checked) == (name == "sum")
        for expected, shared in zip(alone, rows(folder), strict=True):
            assert expected.keys() == shared.keys()
            for metric, value in expected.items():
                assert shared[metric] == pytest.approx(value, abs=1e-4), f"{strategy} {metric}"


@pytest.mark.slow
@pytest.mark.parametrize("order", AHEAD)
def test_two_ranks_share_rollouts_ahead(learned, tmp_path, order):
    """Each plays its share, and both learn from the same groups: every prompt once, and the weights stay equal."""
    settings, ages = AHEAD[order]
    common = """engine=transformers algo.old_policy=rollout rollout.num_rollouts=4 rollout.prompts=3 eval.every=0
        callbacks=[checkpoint,samples] task._target_=test_distributed.Twelve strategy=ddp"""
    learned(tmp_path, 2, [*common.split(), *settings.split()])
    run = Run(tmp_path)
    samples = run.samples()
    assert Counter(samples.groupby("example").size()) == {2: 12}
    told = rows(tmp_path)
    assert ages is None or [row["rollout/staleness"] for row in told] == ages
    assert all(row["rollout/staleness_max"] <= 4 for row in told) and len(told) == 4


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["model.dtype=bfloat16", "optim.offload=true"])
def test_two_ranks_bring_the_masters_gradients_together(learned, tmp_path, policy):
    """Both see the same numbers row by row, so only the order of additions in float32 differs."""
    settings = [policy, "optim.max_tokens_per_microbatch=1", "rollout.prompts=3", "rollout.num_rollouts=1"]
    found = []
    for devices in (1, 2):
        learned(tmp_path / str(devices), devices, [*settings, "strategy=ddp"])
        found.append(last(tmp_path / str(devices))["optimizer_states"][0]["masters"])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-5)
    assert rows(tmp_path / "1")[1]["loss/grad_norm"] > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_shards_of_a_16_bit_model_learn_what_one_rank_learns(learned, toy, tmp_path, dtype):
    """Passes are in 16 bits, the optimizer's numbers are float32: they move in the same direction, equally far."""
    start = torch.cat([p.detach().flatten() for p in Pretrained(str(toy)).model().to(dtype).parameters()]).float()
    moved = []
    for devices in (1, 2):
        settings = [f"model.dtype={str(dtype)[6:]}", "strategy=fsdp2", "rollout.num_rollouts=1", "rollout.prompts=3"]
        weights = learned(tmp_path / str(devices), devices, settings)
        assert {weight.dtype for weight in weights.values()} == {dtype}
        masters = last(tmp_path / str(devices))["optimizer_states"][0]["masters"]
        moved.append(torch.cat([master.flatten() for master in masters]) - start)
    assert torch.cosine_similarity(*moved, dim=0) > 0.99
    assert moved[0].norm() == pytest.approx(moved[1].norm().item(), rel=0.02)


@pytest.mark.slow
def test_checkpoints_go_from_any_ranks_and_strategy_to_others(learned, tmp_path):
    """Saved after two of three rollouts, in both formats; the optimizer has a state (momentum), and so has the reference. The
    critic is not part of the policy's folder."""
    common = """algo=ppo critic=model critic.lr=0.1 algo/kl=loss algo.kl.sync_every=1 algo.kl.sync_alpha=0.5 rollout.prompts=3
        rollout.num_rollouts=3 optim.optimizer.lr=0.1 +optim.optimizer.momentum=0.9 callbacks.checkpoint.every=1
        callbacks.checkpoint.keep=3 +callbacks.small={_target_:test_distributed.SmallPieces}""".split()
    runs = {  # name: (devices, settings, the run whose second checkpoint it resumes)
        "one": (1, [], None),
        "pieces": (2, ["strategy=fsdp2", "strategy.checkpoint=sharded"], None),
        "whole": (3, ["strategy=fsdp2", "strategy.reshard=false"], None),
        "pieces_to_one": (1, [], "pieces"),
        "whole_to_ddp": (2, ["strategy=ddp"], "whole"),
        "one_to_three": (3, ["strategy=fsdp2", "strategy.checkpoint=sharded"], "one"),
    }
    found = {}
    for name, (devices, settings, resumed) in runs.items():
        resume = [f"ckpt_path={tmp_path / resumed / 'checkpoints' / '00002.ckpt'}"] if resumed else []
        found[name] = learned(tmp_path / name, devices, [*common, *settings, *resume])
    for name, weights in found.items():
        for parameter, expected in found["one"].items():
            torch.testing.assert_close(weights[parameter], expected, atol=1e-6, rtol=1e-5, msg=f"{name} {parameter}")
        folder = tmp_path / name / "checkpoints" / "last"
        assert (len(list(folder.glob("*.safetensors"))) > 3) == (runs[name][0] > 1 and name != "whole_to_ddp")
        loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        policy = {name.removeprefix("policy."): weight for name, weight in weights.items() if "critic." not in name}
        assert len(policy) < len(weights) and loaded.keys() >= policy.keys()
        assert all(torch.equal(loaded[name], weight) for name, weight in policy.items())
        assert not any("critic" in name or name == "head.weight" for name in loaded)


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_writes_a_checkpoint_loses_nothing(learned, tmp_path):
    settings = "strategy=fsdp2 strategy.checkpoint=sharded callbacks.checkpoint.every=1 rollout.num_rollouts=3".split()
    whole = learned(tmp_path / "whole", 2, settings)
    victims, folder = Ranks(2), tmp_path / "killed"
    try:
        with pytest.raises(EOFError):
            learned(folder, 2, [*settings, "+callbacks.killed={_target_: test_distributed.KilledInSave}"], victims)
    finally:
        victims.close()
    there = {path.name for path in (folder / "checkpoints").glob("*.ckpt*")}
    assert there - {"00002.ckpt.new"} == {"00001.ckpt", "last.ckpt"}  # the other rank may have removed that one
    resumed = learned(folder, 2, [*settings, f"ckpt_path={folder}", "resume.changes=allow"])
    assert all(torch.equal(weight, resumed[parameter]) for parameter, weight in whole.items())
    assert not list((folder / "checkpoints").glob("*.new"))


def test_ranks_that_resume_apart_are_refused(monkeypatch):
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "all_gather", lambda items: [*items, 0])
    with pytest.raises(
        UserError, match=r"resume after 0 and 3 rollouts: all machines must see the same hydra\.run\.dir"
    ):
        check_devices(2, prompts=4, rollouts=3)
    check_devices(2, prompts=2, rollouts=0)  # one for each
    with pytest.raises(UserError, match=r"rollout\.prompts=1 is fewer than the 2 devices"):
        check_devices(2, prompts=1, rollouts=0)
    with pytest.raises(UserError, match=r"process group of 2 for the 3 devices: set trainer\.devices and"):
        check_devices(3, prompts=4, rollouts=0)


def test_groups_are_shared_out_by_their_tokens(monkeypatch):
    sizes = [5, 1, 9, 2, 0, 4]
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    shares = []
    for rank in range(2):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        shares.append(distributed.balanced(sizes))
    assert shares == [[2, 3], [0, 1, 4, 5]]  # 11 tokens each; an empty group counts as one


def test_shares_follow_each_other(monkeypatch):
    monkeypatch.setattr(distributed, "world_size", lambda: 3)
    for length in range(8):
        shares = []
        for rank in range(3):
            monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
            shares.append(list(distributed.share(length)))
        assert [i for share in shares for i in share] == list(range(length))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
