"""The slots `sampler`, `play` and `module`: pieces of another program, which inherit nothing of ours, make a run."""

import lightning as L
import pytest
import torch
from conftest import EXAMPLES
from helpers.runs import rows

import grpo
from grpo.models.logprobs import completion_logprobs
from grpo.models.pretrained import Pretrained
from grpo.rollout.episodes import play
from grpo.system.errors import UserError
from tasks.gsm8k import GSM8K


class Backwards:
    """Gives the last examples first, and keeps its place in a checkpoint."""

    def __init__(self, examples, size, seed):
        self.examples, self.size, self.given = list(reversed(examples)), size, 0

    def draw(self, rollout, count, first=0):
        self.given += count
        start = rollout * self.size % len(self.examples) + first
        return self.examples[start : start + count]

    def progress(self, rollouts):
        return {"data/given": float(self.given)}

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


played = []


def noted(task, examples, *rest):
    played.append([example["question"] for example in examples])
    return play(task, examples, *rest)


class Reinforce(L.LightningModule):
    """The policy gradient with the reward alone: loss = -mean over samples of R_i sum_t log pi(token t)."""

    def __init__(self, policy, algorithm, optim, temperature, num_rollouts, seed):
        super().__init__()
        self.policy, self.optim, self.temperature = policy, optim, temperature

    def configure_optimizers(self):
        return torch.optim.SGD(self.policy.parameters(), lr=1e-3)

    def training_step(self, batch, batch_idx):
        logprobs, _ = completion_logprobs(self.policy, batch.tokens, self.temperature, False, "padded")
        rewards = 1.0 + torch.arange(len(batch.tokens))[:, None]
        loss = -(rewards * logprobs * batch.tokens.mask).sum() / len(batch.tokens)
        return {"loss": loss}


def test_pieces_of_another_program_make_a_run(toy, tmp_path):
    played.clear()
    settings = {
        "task": "gsm8k", "task.path": str(EXAMPLES), "debug": "smoke", "output_dir": tmp_path / "run", "max_tokens": 8,
        "callbacks": "checkpoint", "eval": {"limit": 1}, "sampler": Backwards, "play": noted, "module": Reinforce,
    }  # fmt: skip
    plan = {"num_rollouts": 2, "prompts": 2}
    with pytest.raises(UserError, match="preflight=on knows only GRPOModule and its subclasses: set preflight=off"):
        grpo.train(str(toy), rollout=plan, **{**settings, "output_dir": tmp_path / "refused"}, preflight="on")
    played.clear()
    run = grpo.train(str(toy), rollout=plan, **settings, preflight="off")
    questions = [example["question"] for example in GSM8K(path=str(EXAMPLES)).examples("train")]
    test = len(played[0]) * [played[0][0]]
    assert played == [test, questions[:-3:-1], test, questions[-3:-5:-1], test] and len(test) == 1
    assert [row.get("data/given") for row in rows(run.folder)] == [None, 2, 4]
    assert all(row["loss"] > 0 for row in rows(run.folder)[1:])
    before = Pretrained(str(toy)).model().state_dict()
    assert any(not torch.equal(weight, before[name]) for name, weight in run.model.state_dict().items())
    grpo.train(str(toy), rollout=plan | {"num_rollouts": 3}, **settings, preflight="off", ckpt_path=run.folder)
    assert rows(run.folder)[-1]["data/given"] == 6 and played[-2] == questions[:-3:-1]
