"""Imported by the server that ranks are forked from: what a first step imports and makes is there in each of them."""

from __future__ import annotations

import signal
import tempfile

import figures
import networkx  # noqa: F401
import torch
import torch.distributed.checkpoint.state_dict
import torch.distributed.tensor
import transformers
import zoo  # noqa: F401
from lowered import lower_once
from tiered import adamw, capture_cheaply, collect_seldom, options, shared

for name in ("GPT2LMHeadModel", "MixtralForCausalLM", "T5ForConditionalGeneration", "Trainer"):
    getattr(transformers, name)  # imported as it is first asked for: each rank would do it
torch.set_num_threads(1)
capture_cheaply()
lower_once()
figures.give()
with tempfile.TemporaryDirectory() as folder:
    for harness in (shared(), shared("bf16"), shared(dropout=0.1)):  # each rank has these captures
        harness.train(adamw, options(folder), num_steps=1)
signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which the run has taken
collect_seldom()
