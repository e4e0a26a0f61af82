"""A run on the card whose backward takes minutes, as a script: `python signalled.py STORAGE`. It says when it is in it.

Prints how the backward ended, and whether handlers have raised again in what cleans up after it.
"""

from __future__ import annotations

import os
import sys
import threading
import time

import figures

os.environ.pop(figures.ENVIRONMENT, None)
figures.give()

import card
import torch
from carded import Card, to
from tiered import adamw, gpt2, loss_of, options, step, tokens, two_groups

from gs_compile.runtime import stream


def main(storage: str) -> None:
    card.native()
    torch.set_num_threads(1)
    with card.installed():
        stream.DEVICES = {**stream.DEVICES, "card": Card}
        model = to(gpt2())
        optimizer = adamw(two_groups(model))
        model.compile(backend="greedysnake", options=options(storage, alpha=0.0))
        step(model, optimizer, tokens(0))
        loss = loss_of(model, tokens(1))
        card.delays(copy=0.5, operator=0.02)
        threading.Timer(0.3, lambda: print("in the backward", flush=True)).start()
        try:
            loss.backward()
        except BaseException as error:
            card.delays()
            begin = time.monotonic()
            for _ in range(100):  # where a handler that is still to come would raise once more
                time.sleep(0.001)
            print(f"ended: {type(error).__name__} {error.args}, {time.monotonic() - begin > 0.1}", flush=True)
            raise


if __name__ == "__main__":
    main(sys.argv[1])
