"""Two processes learn from pictures what one learns."""

from pathlib import Path

import lightning as L
import torch
from helpers.looking import Looking
from helpers.ranks import Ranks
from helpers.runs import rows, state
from helpers.seeing import made

from grpo.env.types import Example, SingleTurn


class Mixed(Looking):
    """Every second question has a picture, whatever the settings of the task: of two ranks one has none in some passes."""

    def __init__(self, **_) -> None:
        super().__init__()

    def build(self, example: Example) -> SingleTurn:
        return Looking(example["number"] % 2).build(example)


class Each(L.Callback):
    """Writes the weights of each rank. folder: of the run."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_end(self, trainer, module) -> None:
        torch.save(module.policy.state_dict(), self.folder / f"{trainer.global_rank}.pt")


def test_two_ranks_learn_to_see_what_one_learns(toy, smoke, tmp_path):
    folder, ranks = made("qwen2_5_vl", tmp_path / "model", toy), Ranks(2)
    common = [one for one in smoke() if not one.startswith(("output_dir", "optim", "callbacks", "model.path"))]
    common += f"""task._target_=test_seeing_ranks.Mixed model.path={folder} model.vision=trained eval.every=0 trainer=cpu
        trainer.timeout=280 callbacks=[checkpoint] optim.optimizer._target_=torch.optim.SGD ~optim.optimizer.betas
        optim.optimizer.lr=1 optim.optimizer.fused=false optim.max_grad_norm=null rollout.prompts=3 rollout.num_rollouts=1
        algo.num_minibatches=3 strategy=ddp""".split()
    found = {}
    try:
        for devices in (1, 2):
            run = tmp_path / str(devices)
            more = f"trainer.devices={devices} output_dir={run} +callbacks.each={{_target_:test_seeing_ranks.Each,folder:{run}}}"
            ranks.train(devices, [*common, *more.split()])
            found[devices] = state(run)["state_dict"]
    finally:
        ranks.close()
    assert rows(tmp_path / "1")[-1]["loss/grad_norm"] > 0.01
    tower = [name for name in found[1] if "visual" in name]
    assert tower
    for name, one in found[1].items():
        torch.testing.assert_close(found[2][name], one, atol=1e-6, rtol=1e-5, msg=name)
    first, second = (torch.load(tmp_path / "2" / f"{rank}.pt") for rank in (0, 1))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
