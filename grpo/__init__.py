"""Group Relative Policy Optimization of language models. This page is the map of the house.

The book is what every run uses. It is in rooms: folders that import only from themselves and from rooms listed before them.

    system      errors, processes of a run, seeds, calls of other people's code, memory, files; the dictionary of metrics
    env         messages, environments, tasks, rewards as Protocols; tokens of one turn; the chat template
    data        rows; which prompts belong to which rollout
    rewards     reward functions, and how several become one
    objectives  rewards -> advantages -> loss: pure functions of tensors, an axis each, and the algorithm that joins them
    models      the policy, the frozen reference, log-probabilities, packing
    engines     who samples: builtin/, and vllm/ in this process
    rollout     episodes played side by side, scored, made into tensors
    evaluation  accuracy, pass@k and their like, each with its interval
    runs        what a run leaves behind, and its tables
    training    the update (a LightningModule), checkpoints; callbacks/ have what happens round it

The appendices are in extras/, a folder each, and the book knows none of them. An appendix imports the book, and the appendices
that its NEEDS names. Its __init__.py says what it adds, and by which door it comes in: an option of conf/, or a command.

    the algorithm  losses/ critic/ teachers/ optimizers/ selection/ ahead/ (rollouts beside the update)
    the rows       datasets/ (files and the hub)
    the rewards    grading/ (answers) workers/ (its processes) programs/ (in a sandbox) judges/ tools/
    the machine    kernels/ scores/ state_layers/ quantized/ float32_head/ images/ devices/ vllm_server/ shared_weights/
    the run        forecast/ health/ terminal/ preflight/ trackers/ report/ curves/ export/ early_stopping/ sources/ (who plays)
    programs       network/ (servers) serve/ (HTTP) sweep/ launch/ migration/ demo/

The command line puts book and appendices together: train.py, eval.py, config/ (composes, checks and explains configurations;
resumed runs; help) and apps/ (what all commands share, the Python API). Commands are `python -m grpo.serve`, grpo.report,
grpo.predict, grpo.plots, grpo.launch, grpo.export, grpo.prefetch, grpo.from_trl and grpo.rewards. moved.tsv has old names.

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

Beside the core: rollout/draw.py (which samples count), rollout/engine_queue.py and system/calls.py (threads, time-outs),
system/metrics.py (every number that is logged), training/callbacks/checkpoint.py (when checkpoints are written, the best policy).

A new advantage, surrogate or correction is one function, whose parameter names choose its inputs (objectives/arguments.py), and a
YAML file in conf/algo/.

`tasks/` holds one file for each task (libraries/: those of other packages), `conf/` every choice, `train.py` and `eval.py` put
the objects together.
"""

import logging
from typing import TYPE_CHECKING, Any

from grpo.config.appendix import of_appendix
from grpo.config.moved import keep_old_names
from grpo.models import FOLLOWERS

if TYPE_CHECKING:
    from grpo.apps.api import evaluate, load_run, train  # noqa: F401

keep_old_names()
FOLLOWERS[:] = [lambda model: of_appendix("state_layers.cache.follow_states", lambda _: None)(model)]  # imports torch
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it where it is, and its import advertises


def __getattr__(name: str) -> Any:
    """Return train, evaluate or load_run, which are imported when they are first used."""
    if name in ("train", "evaluate", "load_run"):
        from grpo.apps import api

        return getattr(api, name)
    raise AttributeError(f"module 'grpo' has no attribute {name!r}")
