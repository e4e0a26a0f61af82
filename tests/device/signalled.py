"""A run on the card whose backward takes minutes, as a script: `python signalled.py STORAGE`. It says when it is in it.

Prints how the backward ended, and whether handlers have raised again in what cleans up after it. With `durable` as a
second argument every step is durable, and two are behind it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import card
import figures
import torch
from carded import Card, to
from tiered import adamw, gpt2, loss_of, options, step, tokens, two_groups

from gs_compile.runtime import stream


def say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


DURABLE = {"durability": "step", "resume": "auto"}


def main(storage: str, kind: str = "") -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup has all children ignore
    os.environ.pop(figures.ENVIRONMENT, None)
    figures.give()
    card.native()
    torch.set_num_threads(1)
    with card.installed():
        stream.DEVICES = {**stream.DEVICES, "card": Card}
        model = to(gpt2())
        optimizer = adamw(two_groups(model))
        model.compile(backend="greedysnake", options=options(storage, alpha=0.0, **(DURABLE if kind else {})))
        for number in range(2 if kind else 1):
            step(model, optimizer, tokens(number))
        if kind:
            optimizer.commit()
        loss = loss_of(model, tokens(number + 1))
        card.delays(copy=0.5, operator=0.02)
        try:
            threading.Timer(0.3, lambda: say("in the backward")).start()
            loss.backward()
        except BaseException as error:
            card.delays()
            begin = time.monotonic()
            for _ in range(100):  # where a handler that is still to come would raise once more
                time.sleep(0.001)
            say(f"ended: {type(error).__name__} {error.args}, {time.monotonic() - begin > 0.1}")
            raise


if __name__ == "__main__":
    main(*sys.argv[1:])
