"""The training loop of `manyhands train`, from top to bottom one story.

    manyhands train                                              # digits, every device
    manyhands train --devices cpu*2 --model mlp --epochs 3       # two replicas on the CPU, done in a moment

A step is: rows, learning rate, forward, backward, update, record. An epoch is: steps, evaluation, record, picture,
checkpoint. manyhands has one line in it, where the model is wrapped.
"""

import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands
from manyhands.training import checkpoint, data, models, placement
from manyhands.training.checkpoint import Progress
from manyhands.training.display import Display, Share, StepReport
from manyhands.training.errors import DivergedError, Interrupted, OptionError
from manyhands.training.interrupts import StopRequest
from manyhands.training.metrics import EpochRecord, Metrics, StepRecord
from manyhands.training.options import Options
from manyhands.training.run_folder import RunFolder, replaced
from manyhands.training.schedule import epoch_batches, learning_rate, num_steps

CHECKPOINT_EVERY_S = 300.0  # within an epoch; at the end of each there is one anyway
