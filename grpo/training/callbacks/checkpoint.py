"""Checkpoint: writes checkpoints to resume from, and the policy as a folder that Hugging Face libraries load."""

import logging
import math
import shlex
import shutil
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.pytorch.utilities import rank_zero_only
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from grpo.engines.weights import checkpoint
from grpo.evaluation.statistics import Estimate
from grpo.runs.model_card import write_card
from grpo.system import distributed
from grpo.system.distributed import full, is_sharded
from grpo.system.errors import StopError, UserError, error_line
from grpo.system.files import surviving, write_json
from grpo.system.loading import not_finite
from grpo.system.metrics import require_metric, written
from grpo.system.output.words import plural
from grpo.system.pieces import in_pieces
from grpo.system.ranges import Count, Whole
from grpo.training.batch import RolloutBatch
from grpo.training.callbacks.ending import saves
from grpo.training.callbacks.evaluation import EvaluationCallback
from grpo.training.callbacks.rollout import RolloutCallback
from grpo.training.checkpoints import by_rollouts, link, new_folder
from grpo.training.trainer import callbacks_of

log = logging.getLogger(__name__)

MONITOR = "callbacks.checkpoint.monitor"
PIECE = 4 << 30  # bytes of a sharded policy that the first rank's CPU holds at once


class UnsavedError(UserError):
    """The run has learned, and its last policy could not be written."""

    exit_code = 74  # EX_IOERR of sysexits.h
    saves = False


class Checkpoint(L.pytorch.callbacks.Checkpoint):  # Lightning calls it after all others, so that it has their states
    """Writes checkpoints, every `every` rollouts, at the end, when a reward fails, and when the run is asked to stop.
