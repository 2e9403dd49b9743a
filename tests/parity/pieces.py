"""The parts that a program of one's own may call: TRL's examples of rewards, rl-max's rewards, the objective."""

import torch

from grpo.extras.grading.functions import Normalised, correct, longer, think_answer, think_levels, unique_letters
from grpo.models.logprobs import completion_logprobs
from grpo.models.pretrained import Pretrained
from grpo.objectives.advantage import group_advantages
from grpo.objectives.batch import TokenBatch
from grpo.objectives.loss import clip

assert longer(completions=["orange", "red and blue"]) == [6, 12]
assert unique_letters(completions=["aab", "abc"]) == [2, 3]
assert think_answer(completions=["<think>I add.</think><answer>4</answer>", "<answer>4</answer>"]) == [1, 0]
assert [reward.value for reward in correct(["so \\boxed{2}", "\\boxed{3}"], gold=["2", "4"])] == [1, 0]
print("TRL's examples")

levels = ["4", "<think>I add.", "<think></think><think></think>", "<think></think>4", "<think>I add.</think>4"]
assert think_levels(completions=levels) == [0, 0.25, 0.5, 0.75, 1]
assert longer(completions=["a" * 250], per=500) == [0.5]
print("five levels")

assert Normalised("longer", low=0, high=10)(completions=["a" * 5, "a" * 20, ""]) == [0.5, 1, 0]
assert Normalised("longer", low=3, high=3)(completions=["aaaa"]) == [0]
print("clamped and scaled")

advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0]]), eps=1e-6)
assert torch.allclose(advantages, torch.tensor([[1.0, -1.0, -1.0, 1.0]]) * 0.75**0.5, atol=1e-4)  # the std is sqrt(1/3)
loss, _ = clip(torch.tensor([1.5, 0.5, 1.5]), torch.tensor([1.0, 1.0, -1.0]), low=0.2, high=0.28)
assert torch.allclose(loss, torch.tensor([-1.28, -0.5, 1.5]))
ids, mask = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[True, True]])
batch = TokenBatch(ids, torch.ones_like(ids), mask, torch.zeros(1, 2), torch.tensor([0]))
model = Pretrained("toy").model()
logprobs, _ = completion_logprobs(model, batch, temperature=0.5)
alone = (model(ids).logits[0, 1:3] / 0.5).log_softmax(-1)
assert torch.allclose(logprobs[0], torch.stack([alone[0, 7], alone[1, 8]]), atol=1e-5)
print("log-probabilities, advantages, loss")
