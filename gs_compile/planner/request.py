"""request: what is asked of a plan. What is given is kept; what is None is chosen.

A plan of a named model and the plan of a run are asked for alike: the first by the fields of a `Request`, which are
also the flags of the command line, the second by the options of the backend (`Request.of`). Nothing heavy is imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from gs_compile.errors import MemoryBudgetError, OptionError, PlanError
from gs_compile.machine import parse_bytes
from gs_compile.options import Clipping, Frozen, Masters, Options, Ratios, Recompute, contradiction
from gs_compile.schedules import Schedule

if TYPE_CHECKING:
    from gs_compile.passes.baselines.spec import ScheduleSpec
    from gs_compile.planner.measure.profile import Profile

T = TypeVar("T")
Saturation = Literal["relative", "paper"]
Precision = Literal["bf16", "model"]
States = Literal["fp32", "bf16", "8bit"]
OptimizerName = Literal["adamw", "muon"]

ALPHAS = tuple(number / 100 for number in range(51))  # that the planner chooses from
MICRO_BATCH_SIZES = (1, 2, 4, 8, 16, 32)  # tried where none is given
SECONDS_PER_YEAR = 365 * 86400
ALLOWED: Mapping[str, tuple[Any, ...]] = {  # what fields of words may say
    "precision": (None, *get_args(Precision)),
    "schedule": get_args(Schedule),
    "saturation": get_args(Saturation),
    "recompute": get_args(Recompute),
    "masters": (None, *get_args(Masters)),
    "states": get_args(States),
    "optimizer": get_args(OptimizerName),
    "clipping": (None, *get_args(Clipping)),
    "frozen": (None, *get_args(Frozen)),
}
OF_EXPERTS = ("alpha", "ratios", "schedule", "recompute", "masters", "layer_tokens")
SIZES = ("sequence", "batch_size", "micro_batch_size", "num_micro_batches", "lora")
NUMBERS = {**dict.fromkeys(SIZES, 1), "layer_tokens": 0}  # and the least that each may be


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked of a plan; raises `PlanError` or `OptionError` where settings contradict each other.

    machine: a name or file of a machine profile; None: this machine, measured once. storage: its SSDs.
    batch_size: samples of a step of all ranks, in whole micro-batches; without it and `num_micro_batches`, as few as
        saturate the machine. sequence: tokens of a sample.
    alpha: the part of each update that is late. ratios: a `Ratios`, or a dict of its fields.
    clip: gradients are clipped by the norm of all. clipping: when updates run then, as `Expert.clip`.
    accumulate: a step has several backwards, as `Options.accumulate`: all updates wait for the last of them.
    host_memory, device_memory, durability, recompute, schedule, masters: as in the backend's options.
    precision: "bf16" with fp32 masters, or "model", the model's own; None: bf16 for what has no weights yet.
    wear_years: how long the drives are to last at their rated endurance, training all day.
    saturation: a batch is large enough where more micro-batches bring less than a tenth of what they are more, or, with
        "paper", where one more brings less than 1 %.
    gpus, nodes, network: ranks of a node, nodes, bytes a second that a node receives.
    optimizer: of a named model: "adamw", or "muon", whose matrices have momentum alone. states: what moments are stored
        in; of Muon's not 8bit.
    lora: the rank of the adapters that alone are trained, PEFT's LoRA on all linear layers of blocks, of a model that
        is named or a config; None: the model as it is. frozen: as in `Options`, of what is not trained.
    layer_tokens: as in `Expert`.
    """

    machine: str | Path | Profile | None = None
    storage: Sequence[Path | str] | Path | str | None = None
    sequence: int = 2048
    batch_size: int | None = None
    micro_batch_size: int | None = None
    num_micro_batches: int | None = None
    alpha: float | None = None
    ratios: Any = field(default_factory=Ratios)  # as given; a `Ratios` is made of it
    schedule: Schedule = "vertical"
    clip: bool = False
    clipping: Clipping | None = None
    accumulate: bool = False
    host_memory: int | str | None = None
    device_memory: int | str | None = None
    precision: Precision | None = None
    optimizer: OptimizerName = "adamw"
    states: States = "fp32"
    wear_years: float | None = None
    recompute: Recompute = "auto"
    masters: Masters | None = None
    durability: Literal["off", "step"] | int = "off"
    saturation: Saturation = "relative"
    gpus: int = 1
    nodes: int = 1
    network: str | float | None = None
    lora: int | None = None
    frozen: Frozen | None = None
    layer_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, words in ALLOWED.items():
            if (value := getattr(self, name)) not in words:
                raise PlanError(f"{name} is {value!r}; there are {' and '.join(filter(None, words))}")
        for name, least in NUMBERS.items():
            value = getattr(self, name)
            if value is not None and (not isinstance(value, Integral) or value < least):
                raise PlanError(f"{name} is {value!r}; it must be a whole number, {least} or more")
        for name in ("alpha", "wear_years"):
            value = getattr(self, name)
            if not isinstance(value, Real | None):
                raise PlanError(f"{name} is {value!r}; it must be a number")
        if self.clipping is not None and not self.clip:
            raise PlanError(
                f"clipping is {self.clipping!r}, but clip is not asked for: give clip, too, or leave it out"
            )
        if not isinstance(self.ratios, Ratios):
            object.__setattr__(self, "ratios", Ratios.of(self.ratios, "ratios"))
        object.__setattr__(self, "durability", Options.of({"durability": self.durability}).durability)
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise PlanError(f"alpha is {self.alpha:g}; it must be a part of each update, from 0 to 1")
        if wrong := contradicts_alpha(self.alpha, self.clipping, self.accumulate, names=("alpha", "clipping")):
            raise PlanError(wrong)
        if wrong := contradiction(self.ratios, self.recompute, self.schedule, self.accumulate):
            raise PlanError(wrong)
        if self.optimizer == "muon" and self.states == "8bit":
            raise PlanError("optimizer is muon, whose states are fp32 or bf16, not 8bit")
        if self.wear_years is not None and not 0 < self.wear_years < math.inf:
            raise PlanError(f"wear_years is {self.wear_years:g}; it must be more than 0, and finite")

    @classmethod
    def of(cls, options: Options, *, clip: bool, accumulate: bool = False) -> Request:
        """What the options of a run ask for; clip: its optimizer clips gradients; accumulate: its loop is known to."""
        expert, accumulate = options.expert, accumulate or options.accumulate
        if accumulate and not options.accumulate:  # whatever is given: an early update would be wrong
            expert = replace(expert, alpha=None, clip=None)
        clipping = expert.clip if clip else None
        if wrong := contradicts_alpha(expert.alpha, clipping, accumulate, names=("expert.alpha", "expert.clip")):
            raise OptionError(wrong)
        return cls(
            machine=options.machine,
            storage=options.storage,
            micro_batch_size=options.micro_batch_size,
            clip=clip,
            clipping=clipping,
            accumulate=accumulate,
            host_memory=options.host_memory,
            device_memory=options.device_memory,
            precision=options.precision,
            frozen=options.frozen,
            durability=options.durability,
            **{name: getattr(expert, name) for name in OF_EXPERTS},
        )

    @property
    def spec(self) -> ScheduleSpec:
        from gs_compile.passes.baselines.registry import SCHEDULES  # heavy: not for a command line's help

        return SCHEDULES[self.schedule]

    # How updates run --------------------------------------------------------------------------------------------------

    @property
    def speculative(self) -> bool:
        """Whether updates run before the norm is known: where that is asked for, or where not all are to be late."""
        return (
            self.clip
            and not self.accumulate
            and (self.clipping == "speculative" or (self.clipping is None and self.alpha not in (None, 1.0)))
        )

    @property
    def late(self) -> bool:
        """Whether all updates wait: for the norm of all gradients, or for the last backward of a step."""
        return (self.clip and not self.speculative) or self.accumulate

    def or_storing_gradients(self, made: Callable[[Request], T]) -> T:
        """What is made of this. Where that does not fit and nobody asks when updates run, it is made of the same with
        gradients that wait for the norm on SSD too, as those of several backwards.

        That takes less host memory, and each step writes and reads all gradients.
        """
        is_free = self.clipping is None and self.alpha is None and self.schedule == "vertical"
        try:
            return made(self)
        except MemoryBudgetError:
            if self.clip and is_free and not self.accumulate:
                with suppress(MemoryBudgetError):
                    return made(replace(self, accumulate=True))
            raise

    @property
    def alphas(self) -> tuple[float, ...]:
        """Those that may be chosen. A schedule as others publish it delays nothing that nobody asks to delay."""
        if self.late:
            return (1.0,)
        if self.alpha is not None:
            return (self.alpha,)
        return ALPHAS[:1] if self.spec.as_published else ALPHAS

    # What is saved ----------------------------------------------------------------------------------------------------

    @property
    def saves_all(self) -> bool:
        """Whether nothing is to be computed again."""
        return self.recompute == "none"

    @property
    def saves(self) -> bool:
        """Whether activations are to be saved, whether that is faster or not."""
        return self.saves_all or bool(self.ratios.activation)

    def recomputing(self) -> Request:
        """The same with nothing saved but layers' inputs."""
        return replace(self, recompute="all", ratios=replace(self.ratios, activation=None))

    # Sizes and budgets ------------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes

    @property
    def own_batch_size(self) -> int | None:
        """One rank's samples of a step."""
        if self.batch_size is not None and self.batch_size % self.ranks:
            raise PlanError(
                f"batch_size is {self.batch_size}: {self.ranks} ranks cannot divide it equally, so give a multiple of "
                f"{self.ranks}"
            )
        return None if self.batch_size is None else self.batch_size // self.ranks

    @property
    def sizes(self) -> Sequence[int]:
        """Of micro-batches, to be tried: the one that is given or follows, or those that a batch can be cut into."""
        batch_size = self.own_batch_size
        if batch_size is None:
            return [self.micro_batch_size] if self.micro_batch_size else MICRO_BATCH_SIZES
        if self.spec.whole_batch:
            return [batch_size]
        if self.micro_batch_size is None and self.num_micro_batches is None:
            return [size for size in MICRO_BATCH_SIZES if batch_size % size == 0]
        size = self.micro_batch_size or -(-batch_size // (self.num_micro_batches or 1))
        number = self.num_micro_batches or -(-batch_size // size)
        if not (number - 1) * size < batch_size <= number * size or size > batch_size:
            raise PlanError(
                f"a batch of {batch_size} cannot be cut into {several(number)} of "
                f"{size}: leave one of batch_size, micro_batch_size and num_micro_batches out"
            )
        return [size]

    def number(self, size: int) -> int | None:
        """Micro-batches of `size` samples, where they are given or follow."""
        if self.spec.whole_batch:
            return 1
        if self.num_micro_batches is not None or (batch_size := self.own_batch_size) is None:
            return self.num_micro_batches
        return -(-batch_size // size)

    def budgets(self, profile: Profile, *, host_nbytes: int | None = None, device_nbytes: int | None = None) -> Budgets:
        """What a run may use of a machine; host_nbytes, device_nbytes: what is asked for, where that is known in bytes.

        Raises `PlanError` where it is not known what drives are rated for.
        """
        years, rated = self.wear_years, profile.ssd_rated_nbytes
        if years is not None and not rated:
            raise PlanError(
                f"{profile.name} does not have the rated endurance of its drives: add ssd_rated_nbytes to its profile"
            )

        def budget(name: str, known: int | None, whole: int) -> int:
            asked = getattr(self, f"{name}_memory")
            if known is not None or asked is None:
                return whole if known is None else known
            return parse_bytes(asked, whole=whole or None, name=f"{name}_memory")

        return Budgets(
            host_nbytes=budget("host", host_nbytes, profile.host_nbytes),
            device_nbytes=budget("device", device_nbytes, profile.device_nbytes),
            ssd_nbytes=profile.ssd_nbytes,
            wear_bytes_per_second=rated / (years * SECONDS_PER_YEAR) if years else None,
        )


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """What a run may use. Without wear_bytes_per_second SSDs are written as fast as they take it."""

    host_nbytes: int
    device_nbytes: int = 0
    ssd_nbytes: int
    wear_bytes_per_second: float | None = None

    def of(self, tier: str) -> int:
        """Bytes of a tier."""
        nbytes: int = getattr(self, f"{tier}_nbytes")
        return max(nbytes, 1)


def several(number: int) -> str:
    """``1 micro-batch``, ``2 micro-batches``"""
    return f"{number} micro-batch{'es' if number > 1 else ''}"


def contradicts_alpha(
    alpha: float | None, clipping: Clipping | None, accumulate: bool, *, names: tuple[str, str]
) -> str | None:
    """In a sentence, why alpha contradicts when updates have to run; `names`: of alpha and clipping, for the user."""
    if accumulate and clipping == "speculative":
        return (
            f'{names[1]} is "speculative", but a step that accumulates updates everything after its last backward: '
            "leave one of the two out"
        )
    if alpha in (None, 1.0):
        return None
    if accumulate:
        return (
            f"{names[0]} is {alpha:g}, but a step that accumulates updates everything after its last backward, so "
            "alpha is 1: leave one of the two out"
        )
    if clipping == "delayed":
        return (
            f'{names[0]} is {alpha:g}, but with {names[1]}="delayed" all updates wait for the norm of all gradients, '
            f'so alpha is 1: leave one of the two out, or choose {names[1]}="speculative"'
        )
    return None


# What a workload says itself, as a request that is silent of it.
ITSELF: Mapping[str, Any] = {
    "masters": None,
    "optimizer": "adamw",
    "states": "fp32",
    "lora": None,
    "frozen": None,
    "layer_tokens": None,
}
FIELDS = tuple(each.name for each in fields(Request))
