"""ours: GreedySnake in the race, in any schedule, with its data anywhere.

    python -m benchmarks.race.ours --case 110m --settings '{"schedule": "vertical", "home": "ssd", "compiler": "eager"}'

home      ssd: parameters, checkpoints and optimizer states are on SSD; host: all in host memory; mixed: half of each
          parameters: these are in host memory, all else on SSD
          half, quarter, or a number: planned, with that part of the bytes of parameters and states as `host_memory`
memory    that part of these bytes as `host_memory`, where home is ssd, mixed, host or parameters
device_memory  of an accelerator, such as 24GiB; left out, what is free there
compiler  of the layers' code: eager, as the peers run it, or inductor
alpha     the part of every update that waits for the next forward; left out, the planner's (0 where homes are given)
recompute what of the layers runs again in the backward: auto (the planner's), all or none

Beside what every contestant answers: `describe` (where everything lives, and a hash of the step program), `predict
[MACHINE]` (seconds of a step, simulated, by the profile in that file) and `waits` (what the last round's steps waited
for, by their own trace).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

import gs_compile
from benchmarks.common import IN_MEMORY, step
from benchmarks.race.protocol import BETAS, EPSILON, WEIGHT_DECAY, Cannot, Contestant, build_model, main
from gs_compile.errors import OptionError
from gs_compile.model.backend import greedysnake
from gs_compile.options import Options
from gs_compile.planner.measure.profile import Profile

RATIOS = {"ssd": (0.0, 0.0, 0.0), "mixed": (0.5, 0.5, 0.5), "host": (1.0, 1.0, 1.0), "parameters": (1.0, 0.0, 0.0)}
PARTS = {"half": 0.5, "quarter": 0.25}
DEFAULTS = {
    "schedule": "vertical",
    "home": "ssd",
    "compiler": "eager",
    "alpha": None,
    "memory": None,
    "device_memory": None,
    "recompute": "auto",
}


class GreedySnake(Contestant):
    """GreedySnake: layers on the tiers, by any schedule of its step program."""

    name = "greedysnake"
    packages = ("torch", "transformers", "greedysnake")

    def build(self) -> dict[str, Any]:
        settings = {**DEFAULTS, **self.settings}
        self.model = build_model(self.case)
        options = self._options(**settings)
        try:
            Options.of(options)
        except OptionError as error:
            raise Cannot(f"this release does not have it: {error}") from error
        self.model.compile(backend=greedysnake, options=options)
        self.optimizer = gs_compile.AdamW(
            self.model.parameters(),
            lr=self.case.lr,
            betas=BETAS,
            eps=EPSILON,
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=self.case.max_grad_norm,
        )
        given = {key: value for key, value in options.items() if key != "storage"}
        return {**settings, "trained_bytes": self._trained_bytes(), "options": given}

    def step(self, ids: torch.Tensor) -> float:
        return float(step(self.model, self.optimizer, ids))

    def settle(self) -> None:
        self.optimizer.synchronize()
        self.waits = self.optimizer.waits()
        if self.optimizer.engine is not None:  # what others do until the next step is no wait
            self.optimizer.engine.tiers.trace.reset()

    def weights(self) -> dict[str, torch.Tensor]:
        master = self.case.precision == "bf16"
        with gs_compile.materialize(self.model, master=master):
            return {name: value.detach().float().clone() for name, value in self.model.named_parameters()}

    def close(self) -> None:
        if self.optimizer.engine is not None:
            self.optimizer.engine.tiers.close()

    def other(self, command: str, *arguments: str) -> dict[str, Any]:
        engine = self.optimizer.engine
        assert engine is not None, f"{command} before the first step"
        match command:
            case "describe":
                return self._describe(engine.placement.decision.alpha)
            case "predict":
                return self._predict(engine, *arguments)
            case "waits":
                return {"waits": self.waits}
        return super().other(command, *arguments)

    # -----------------------------------------------------------------------------------------------------------------

    def _options(
        self,
        schedule: str,
        home: str,
        alpha: float | None,
        memory: float | None,
        device_memory: str | None,
        **settings: str,
    ) -> dict[str, Any]:
        expert: dict[str, Any] = {"schedule": schedule, "trace": True, **settings}
        options: dict[str, Any] = {
            "micro_batch_size": self.case.micro_batch_size,
            "outputs": "loss",
            "storage": str(self.storage),
            "precision": "bf16" if self.case.precision == "bf16" else "model",
            "expert": expert,
        }
        if home in RATIOS:
            expert["ratios"] = dict(zip(IN_MEMORY, RATIOS[home], strict=True))
            alpha = 0.0 if alpha is None else alpha
        else:
            memory = PARTS.get(home) or float(home)
        if device_memory is not None:
            options["device_memory"] = device_memory
        if memory is not None:
            options["host_memory"] = int(memory * self._trained_bytes() / self.case.ranks)
        if alpha is not None and self.case.max_grad_norm is None:  # clipping settles it
            expert["alpha"] = alpha
        return options

    def _trained_bytes(self) -> int:
        """Of parameters and the optimizer's states: fp32 and two moments, or bf16, masters and two moments."""
        each = 14 if self.case.precision == "bf16" else 12
        return each * sum(parameter.numel() for parameter in self.model.parameters())

    def _describe(self, alpha: float) -> dict[str, Any]:
        inspection = gs_compile.inspect(self.model)
        compiler = {**DEFAULTS, **self.settings}["compiler"]  # of the program's code
        program = hashlib.sha256(f"{compiler}\n{inspection.programs[-1]}".encode()).hexdigest()
        return {"describe": inspection.tiers, "alpha": alpha, "program": program}

    def _predict(self, engine: Any, machine: str | None = None) -> dict[str, Any]:
        """With the layers' code timed now, and a profile of now: a shared machine changes from minute to minute."""
        engine.planning.planner.measure_again(None if machine is None else Profile.load(Path(machine)))
        simulation = engine.planning.predict(*engine.latest)
        return {"predict": simulation.seconds, "busy": dict(simulation.busy), "bubbles": dict(simulation.bubbles)}


if __name__ == "__main__":
    main(GreedySnake)
