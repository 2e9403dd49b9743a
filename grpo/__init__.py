"""Group Relative Policy Optimization of language models. This page is the map of the house.

A room is a folder. A room imports only from the rooms above it (tests/test_rooms.py). A folder in a room is a room of its own:
its door is the first lines of its __init__.py.

    system      errors, processes of a run, seeds, calls of other people's code, memory, files; the dictionary of metrics
    env         messages, environments, tasks, rewards as Protocols; tokens of one turn; tools; the chat template
    data        rows of a dataset; which prompts belong to which rollout
    rewards     reward functions and how several become one; math/ grades answers, code/ runs programs in a sandbox
    objectives  rewards -> advantages -> loss: pure functions of tensors, an axis each, and the algorithm that joins them
    models      the policy, the frozen reference, log-probabilities, packing, optimizers
    engines     who samples: builtin/, vllm/ in this process, vllm_server/
    rollout     episodes played side by side, scored, made into tensors
    evaluation  accuracy, pass@k and their like, each with its interval
    runs        what a run leaves behind, and what reads it: tables, comparisons, plots; the bounds of healthy metrics (health.py)
    report      a run or a sweep as one page
    training    the update (a LightningModule), checkpoints, devices; callbacks/ have what happens round it; health.py warns
    teachers    who else the policy learns from: a text, another model, itself
    preflight   before the first update: the memory forecast, the checks (data.py: has any group a signal?), the plan
    config      composes, checks and explains configurations; resumed runs; help
    apps        what all command lines share, the Python API, sweep/, the models of the demo and of the README
    serve       what speaks HTTP: the server of a policy, dialects/ (chat.py is OpenAI's), sessions of programs, sources/

A file of this folder is a program: `python -m grpo.launch`. `python -m grpo.serve` and `python -m grpo.report` are rooms.

The core makes the algorithm. The core, in the order in which to read it:

    train.py                       configuration -> objects -> fit
    env/types.py                   states, actions, trajectories, rewards; Env and Task as Protocols
    env/tokens.py                  what an engine sampled, and how turns become rows
    rollout/types.py               a sample in both views, a group; the plan and the limits of a run
    data/prompts.py                which prompts belong to rollout r
    engines/protocol.py            what an engine is
    rollout/rewarding.py           the rewards of a group; NaN is an unknown reward
    rollout/episodes.py            one episode is one coroutine; many of them share an engine
    rollout/rollouts.py            rollout r, and its seeds
    rollout/collate.py             samples -> TokenBatch and Scores
    objectives/batch.py            the tensors that the loss sees
    objectives/shaping.py          the reward that the advantage sees: overlong answers, the KL
    objectives/advantage.py        rewards -> advantages
    objectives/loss.py             ratios, surrogates (`clip`: the loss of each token, and which ones it clipped), token weights
    objectives/kl.py               settings and estimators of the KL
    objectives/entropy.py          the bonus and its controller
    objectives/algorithm.py        equation 1: the axes joined into a loss
    models/policy.py               the policy, and the frozen reference
    models/logprobs.py             log-probabilities of sampled tokens
    training/batch.py              the batch that Lightning hands from hook to hook
    training/callbacks/rollout.py  before an update: weights to the engine, a rollout from it; the state of both for a resumed run
    training/module.py             the update
    training/callbacks/evaluation.py  held-out examples, metrics to the loggers

Beside the core: data/samplers.py (prompts that come more often), rollout/draw.py and selection.py (which samples count),
objectives/surrogates.py, baselines.py, turns.py, choices.py and importance.py (more losses and advantages, which tokens count,
corrections), rollout/engine_queue.py and system/calls.py (threads, time-outs), rollout/ahead/ (rollouts beside the update),
system/metrics.py (every number that is logged), training/critic.py (PPO's values), training/callbacks/checkpoint.py (when a
checkpoint is written, and the best policy), training/sharding.py (several devices, each with a part of the policy).

A new advantage, surrogate or correction is one function, whose parameter names choose its inputs (objectives/arguments.py), and a
YAML file in conf/algo/.

`tasks/` holds one file for each task (libraries/: those of other packages), `conf/` every choice, `train.py` and `eval.py` put
the objects together.
"""

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo.apps.api import evaluate, load_run, train  # noqa: F401

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it where it is, and its import advertises


def __getattr__(name: str) -> Any:
    """Return train, evaluate or load_run, which are imported when they are first used."""
    if name in ("train", "evaluate", "load_run"):
        from grpo.apps import api

        return getattr(api, name)
    raise AttributeError(f"module 'grpo' has no attribute {name!r}")
