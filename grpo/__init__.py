"""Group Relative Policy Optimization of language models. This page is the map of the house.

A room is a folder. A room imports only from the rooms above it (tests/test_rooms.py):

    system      errors, processes of a run, seeds, calls of other people's code, memory, files; the dictionary of metrics
    env         messages, environments, tasks, rewards as Protocols; tokens of one turn; tools; the chat template
    data        rows of a dataset; which prompts belong to which rollout
    rewards     reward functions and how several become one; grading of mathematics; programs in a sandbox
    objectives  rewards -> advantages -> loss: pure functions of tensors, an axis each, and the algorithm that joins them
    models      the policy, the frozen reference, log-probabilities, packing, optimizers
    engines     who samples: built in, vLLM in this process, vLLM servers
    rollout     episodes played side by side, scored, made into tensors
    evaluation  accuracy, pass@k and their like, each with its interval
    runs        what a run leaves behind, and everything that reads it: tables, comparisons, the report
    training    the update (a LightningModule) and what happens round it (callbacks)
    apps        the command line, sweeps, the server, the demo's model

`tasks/` holds one file for each task, `conf/` every choice, `train.py` and `eval.py` put the objects together.
"""

import logging

from grpo import moved  # noqa: F401 - old names of modules

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it where it is, and its import advertises
