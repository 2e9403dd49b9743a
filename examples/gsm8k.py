"""GSM8K by hand: the pieces of `python train.py task=gsm8k algo=dr_grpo`, put together without a configuration.

python examples/gsm8k.py MODEL DATA    # folders or hub ids; a folder of data has train.jsonl and test.jsonl
"""

import sys
from functools import partial

import lightning as L
from torch.optim import AdamW
from transformers import get_scheduler

from grpo.apps.try_algorithm import check_algorithm
from grpo.data.prompts import Uniform
from grpo.engines.builtin.engine import TransformersEngine
from grpo.engines.protocol import Sampling
from grpo.evaluation.evaluator import Evaluator
from grpo.extras.tools.renderer import TokenizerRenderer
from grpo.models.pretrained import Pretrained
from grpo.objectives.advantage import group_advantages
from grpo.objectives.algorithm import Algorithm
from grpo.objectives.loss import clip
from grpo.rollout.rollouts import Rollouts
from grpo.rollout.types import Plan
from grpo.runs.loggers import MetricsTable
from grpo.training.callbacks.evaluation import EvaluationCallback
from grpo.training.callbacks.rollout import RolloutCallback
from grpo.training.module import GRPOModule
from grpo.training.optimization import Optimization
from grpo.training.trainer import make_trainer
from tasks.gsm8k import GSM8K

SEED = 0


def main(
    model, data, rollouts=200, prompts=16, max_tokens=512, lr=1e-6, folder="outputs/gsm8k_by_hand", **task
) -> None:
    """Train, and write metrics.csv and the policy. task: further arguments of GSM8K."""
    L.seed_everything(SEED)
    pretrained, task = Pretrained(model), GSM8K(data, **task)
    plan = Plan(prompts, group_size=8, num_rollouts=rollouts, sampling=Sampling(max_tokens))
    algorithm = Algorithm(partial(group_advantages, scale="none"), clip, max_tokens, reduce="constant")  # Dr.GRPO
    check_algorithm(algorithm, plan.prompts, plan.group_size)
    adamw = partial(AdamW, lr=lr, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    optim = Optimization(adamw, partial(get_scheduler, "constant"))

    sampler = Uniform(task.examples("train"), plan.prompts, SEED)
    renderer = TokenizerRenderer(pretrained.tokenizer())
    rollout = RolloutCallback(Rollouts(plan, task, sampler, TransformersEngine(), renderer, algorithm, folder, SEED))
    evaluator = Evaluator(Sampling(max_tokens, temperature=0))
    evaluation = EvaluationCallback(rollout, evaluator, {"test": task.examples("test")})
    module = GRPOModule(pretrained.model(), algorithm, optim, plan.sampling.temperature, plan.num_rollouts, SEED)
    make_trainer([rollout, evaluation], [MetricsTable(f"{folder}/metrics.csv")]).fit(module, rollout.batches)
    module.policy.save_pretrained(f"{folder}/policy")
    print(f"held-out accuracy {evaluation.accuracy:.1%}; {folder}/metrics.csv has the curve")


if __name__ == "__main__":
    main(*sys.argv[1:3])
