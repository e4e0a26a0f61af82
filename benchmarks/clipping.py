"""What speculative clipping brings beside delayed clipping, and which share of steps it does again.

shares      the examples' Llama learns with max_grad_norm=1.0: Python's own library from random values, 300 steps; after
            that the examples' text, 200 steps; and adapters of LoRA alone that text after the same start. The runtime
            says which steps it rolled back; norms say what another bound would have done. All data is in memory.
times       steps of a GPT-2 with delayed updates, with speculative ones that hold (an infinite bound) and with
            speculative ones that are all rolled back (a tiny bound), in turns in one run: where the drive binds, where
            the computation does, and between. Medians, and the median of the rounds' ratios.
simulated   the same three steps of large models on machines that ship, each with the plan that is best for it, for
            batches from the one that saturates delayed updates down to an eighth of it.

A step pays for what the one before it rolled back: in its forward these updates are made again. So at a share of steps
that are rolled back, a mean step takes the mean of the two.

    python -m benchmarks.clipping shares --output benchmarks/results/clipping.json
    python -m benchmarks.clipping times --storage /path/on/an/nvme/drive --output benchmarks/results/clipping.json
    python -m benchmarks.clipping simulated --output benchmarks/results/clipping.json
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch.optim.lr_scheduler import LambdaLR

import gs_compile
from benchmarks import common
from benchmarks.common import IN_MEMORY, conditions, in_turns, medians, parser_of, ratio_of_rounds, save
from benchmarks.tiers import Run
from examples import finetune_trainer, train_gpt2
from gs_compile.errors import MemoryBudgetError
from gs_compile.planner.plan import plan
from gs_compile.planner.request import Request
from gs_compile.planner.simulate.simulator import predict
from gs_compile.planner.step_plan import StepPlan

RATE, LORA_RATE = 2e-3, 1e-2  # of learning, as the example has them
STEPS, BOUNDS = 200, (0.5, 1.0, 2.0, 5.0)
SEQUENCE, BATCH, MICRO_BATCH = 128, 16, 4  # as the examples have them
WORTH = 1.05  # times as fast: less is not worth a way of its own
KINDS: dict[str, tuple[str, float]] = {  # how the updates of a run are made, and its bound
    "delayed": ("delayed", math.inf),
    "holds": ("speculative", math.inf),
    "redone": ("speculative", 1e-6),
}
SETTINGS: dict[str, dict[str, Any]] = {  # of `times`
    "drive": {"layers": 24, "hidden": 768, "sequence": 16, "micro_batches": 1, "ratio": 0.0},
    "between": {"layers": 12, "hidden": 768, "sequence": 64, "micro_batches": 2, "ratio": 0.0},
    "computation, in memory": {"layers": 8, "hidden": 512, "sequence": 256, "micro_batches": 4, "ratio": 1.0},
}
OTHERS = {"vocabulary": 1024, "micro_batch_size": 1, "precision": "model", "compiler": "eager"}  # of all of these
CASES = ("gpt-65b@a100", "gpt-30b@a5000", "gpt-65b@h200")
PARTS = (1, 2, 4, 8)  # of the batch that saturates delayed updates


class Step(NamedTuple):
    loss: float
    norm: float
    rolled_back: bool


# Shares ---------------------------------------------------------------------------------------------------------------


def trained(model: torch.nn.Module, text: torch.Tensor, rate: float, steps: int = STEPS) -> list[Step]:
    """What a model learns of a text, all data in memory; the rate falls to zero, as with `Trainer`."""
    torch._dynamo.reset()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = gs_compile.AdamW(parameters, lr=rate, max_grad_norm=1.0)
    rates = LambdaLR(optimizer, lambda step: 1 - step / steps)
    expert = {"compiler": "eager", "ratios": IN_MEMORY, "clip": "speculative", "alpha": 0.0, "recompute": "all"}
    options = {"micro_batch_size": MICRO_BATCH, "outputs": "loss", "expert": expert}
    model.compile(backend="greedysnake", options=options)
    model.train()
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        loss = common.step(model, optimizer, common.sample(text, BATCH, SEQUENCE, generator))
        rates.step()
        assert optimizer.last_step is not None
        info = optimizer.last_step
        found.append(Step(float(loss), info.grad_norm, info.rolled_back))
    optimizer.synchronize()
    return found


def fine_tunes(warm_steps: int) -> Iterator[tuple[str, list[Step]]]:
    """From random values on other text, and after that warm start: all parameters, and adapters alone."""
    build, prose = finetune_trainer.build, train_gpt2.text_as_bytes()
    torch.manual_seed(0)
    warm = build()
    yield "from random values, Python's library", trained(warm, common.library(asyncio, json, os), RATE, warm_steps)
    values = {name: value.clone() for name, value in warm.state_dict().items()}
    model = build()
    model.load_state_dict(values)
    yield "fine-tuned, help text", trained(model, prose, RATE / 10)
    model = build()
    model.load_state_dict(values)
    torch.manual_seed(0)
    yield "LoRA, help text", trained(finetune_trainer.with_adapters(model), prose, LORA_RATE)


def share_rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name, steps in fine_tunes(arguments.warm_steps):
        yield share_row(name, steps)


def share_row(name: str, steps: Sequence[Step]) -> dict[str, Any]:
    norms = [step.norm for step in steps]
    return {
        "fine_tune": name,
        "losses": [statistics.mean(step.loss for step in part) for part in (steps[:10], steps[-10:])],
        "rolled_back": statistics.mean(step.rolled_back for step in steps),
        "rolled_back_of_last_half": statistics.mean(step.rolled_back for step in steps[len(steps) // 2 :]),
        "share_above": {str(bound): statistics.mean(norm > bound for norm in norms) for bound in BOUNDS},
        "median_norm": statistics.median(norms),
        "norms": [round(norm, 4) for norm in norms],
    }


# Times ----------------------------------------------------------------------------------------------------------------


def run_of(setting: Mapping[str, Any], kind: str, alpha: float, storage: str) -> Run:
    """A GPT-2 whose updates are made in one way."""
    clip, bound = KINDS[kind]
    sizes = {name: setting[name] for name in ("layers", "hidden", "sequence")}
    late = {"alpha": alpha if clip == "speculative" else None}
    arguments = argparse.Namespace(**sizes, **OTHERS, **late)
    return Run(arguments, setting["micro_batches"], storage, ratio=setting["ratio"], clip=clip, max_grad_norm=bound)


def timed(run: Run, kind: str, steps: int) -> float:
    """Seconds of a step."""
    seconds = run.timed(steps)
    assert run.optimizer.last_step is not None
    assert run.optimizer.last_step.rolled_back == (kind == "redone")
    return seconds


def time_row(name: str, alpha: float, storage: str, rounds: int, steps: int) -> dict[str, Any]:
    """The three kinds of step in one setting; rounds alternate, and so does who is first."""
    torch._dynamo.reset()
    setting = SETTINGS[name]
    runs = {kind: run_of(setting, kind, alpha, f"{storage}/{kind}") for kind in KINDS}
    for run in runs.values():
        run.timed(2)
    seconds = in_turns(rounds, {kind: partial(timed, run, kind, steps) for kind, run in runs.items()})
    for run in runs.values():
        run.close()
    middle = medians(seconds)
    by_rounds = {kind: ratio_of_rounds(seconds["delayed"], seconds[kind]) for kind in ("holds", "redone")}
    return {
        "name": name,
        **setting,
        "alpha": alpha,
        "rounds": seconds,
        "seconds": middle,
        "faster": {kind: middle["delayed"] / middle[kind] for kind in by_rounds},
        "faster_by_rounds": by_rounds,
        "break_even_share": break_even(**middle),
    }


def break_even(delayed: float, holds: float, redone: float) -> float | None:
    """The share of redone steps up to which a mean step is worth it; None: not even without any."""
    worth = delayed / WORTH
    if holds > worth:
        return None
    return 1.0 if redone <= worth else (worth - holds) / (redone - holds)


def time_rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name in arguments.settings:
        for alpha in arguments.alphas:
            with tempfile.TemporaryDirectory(dir=arguments.storage) as storage:
                yield time_row(name, alpha, storage, arguments.rounds, arguments.steps)
            gc.collect()


# Simulated ------------------------------------------------------------------------------------------------------------


def redone_seconds(made: StepPlan) -> float:
    """Of a step among others that are all rolled back, placed as a plan with speculative updates has it."""
    placement, problem = made.placement, made.problem.steps
    program = problem.builder.program(placement)
    budgets = {"host_nbytes": problem.budgets.host_nbytes, "device_nbytes": problem.values_nbytes}
    return predict(program, placement, problem.workload, problem.profile, **budgets).seconds


def simulated_rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for case in arguments.cases:
        model, machine = case.split("@")
        request = Request(machine=machine, sequence=arguments.sequence, recompute=arguments.recompute, clip=True)
        usual = plan(model, request, clipping="delayed")
        request = replace(request, micro_batch_size=usual.workload.micro_batch_size)
        for number in sorted({-(-usual.num_micro_batches // part) for part in PARTS}, reverse=True):
            try:
                delayed, speculative = (
                    plan(model, request, clipping=clipping, num_micro_batches=number)
                    for clipping in ("delayed", "speculative")
                )
            except MemoryBudgetError:
                continue
            seconds = {kind: found.seconds for kind, found in (("delayed", delayed), ("holds", speculative))}
            seconds["redone"] = redone_seconds(speculative)
            yield {
                "model": model,
                "machine": machine,
                "samples": number * usual.workload.micro_batch_size,
                "alpha": speculative.alpha,
                "seconds": seconds,
                "faster": {kind: seconds["delayed"] / seconds[kind] for kind in ("holds", "redone")},
                "break_even_share": break_even(**seconds),
            }


def say(row: Mapping[str, Any]) -> None:
    print({key: value for key, value in row.items() if key not in ("norms", "rounds")}, flush=True)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=("shares", "times", "simulated"))
    parser.add_argument("--warm-steps", type=int, default=300)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--cases", nargs="+", default=CASES, help="of `simulated`: model@machine")
    parser.add_argument("--sequence", type=int, default=2048, help="of `simulated`")
    parser.add_argument("--recompute", default="all", choices=("all", "auto"), help="of `simulated`")
    parser.add_argument("--storage", type=Path)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    rows = {"shares": share_rows, "times": time_rows, "simulated": simulated_rows}[arguments.what](arguments)
    found = []
    for row in rows:
        found.append(row)
        say(row)
        if arguments.output:
            write(arguments, found)


def write(arguments: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> None:
    """The rows so far, in the place of those of an earlier run; what else was measured stays."""
    known = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    save({**known, arguments.what: {**conditions(), "rows": rows}}, arguments.output)


if __name__ == "__main__":
    main()
