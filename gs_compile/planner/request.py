"""request: what is asked of a plan. What is given is kept; what is None is chosen.

A named model's plan is requested by the fields of a `Request`, which are also the flags of the command line, a run's
plan by the options of the backend (`Request.of`). Nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from gs_compile.errors import MemoryBudgetError, OptionError, PlanError
from gs_compile.machine import parse_bytes
from gs_compile.options import Clipping, Frozen, Masters, Options, Ratios, Recompute, contradiction, interval, words_of
from gs_compile.schedules import Schedule

if TYPE_CHECKING:
    from gs_compile.passes.baselines.spec import ScheduleSpec
    from gs_compile.planner.measure.profile import Profile

T = TypeVar("T")
Saturation = Literal["relative", "paper"]
Precision = Literal["bf16", "model"]
States = Literal["fp32", "bf16", "8bit"]
OptimizerName = Literal["adamw", "muon"]

ALPHAS = tuple(number / 100 for number in range(51))  # from which the planner chooses
MICRO_BATCH_SIZES = (1, 2, 4, 8, 16, 32)  # tried if none is given
SECONDS_PER_YEAR = 365 * 86400
MOST_YEARS = 1_000_000  # that drives may be asked to last: the solver's numbers allow no more
MOST_MICRO_BATCHES = 1_000_000  # of a step: a plan has numbers for each
CHOSEN = "chosen"  # by the plan, if nothing is given


def setting(default: Any, text: str, **told: Any) -> Any:
    """A field of a `Request`, described once, for readers and for `greedysnake plan --help`.

    told: `least` of a whole number; for the command line `flag`, its name there if not the field's own, `metavar`, and
        `unset`, its default in words.
    """
    return field(default=default, metadata={"text": text, **told})


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked of a plan; raises `PlanError` or `OptionError` if settings contradict each other.

    The options of the backend with the same names are described in `Options` and `Expert`. `clipping` is `Expert.clip`.
    """

    machine: str | Path | Profile | None = setting(
        None, 'A machine such as "a100", or the path of a profile.', metavar="NAME", unset="this one, measured"
    )
    storage: Sequence[Path | str] | Path | str | None = setting(
        None, "A storage directory; repeat for each drive.", metavar="DIR", unset="in the user's cache"
    )
    sequence: int = setting(2048, "Tokens in a sample.", least=1, metavar="T")
    batch_size: int | None = setting(
        None,
        "Samples in a step, of all GPUs, in whole micro-batches.",
        least=1,
        metavar="B",
        unset="as few as keep the machine busy",
    )
    micro_batch_size: int | None = setting(None, "Samples in a micro-batch.", least=1, metavar="S", unset=CHOSEN)
    num_micro_batches: int | None = setting(
        None, "Micro-batches in a step.", flag="--micro-batches", least=1, metavar="N", unset=CHOSEN
    )
    alpha: float | None = setting(
        None, "The part of each update that is delayed to the next forward.", metavar="A", unset=CHOSEN
    )
    ratios: Any = setting(  # as given; a `Ratios` is made of it
        None,
        "The part of a class (parameter, checkpoint, optimizer) in host memory, such as parameter=0.5.",
        flag="--ratio",
        metavar="CLASS=X",
        unset=CHOSEN,
    )
    schedule: Schedule = setting("vertical", "The order of the step.")
    clip: bool = setting(False, "Clip by the norm of all gradients.", flag="--clip")
    clipping: Clipping | None = setting(
        None, "With --clip: updates wait for the norm, or run earlier and may be rolled back.", unset=CHOSEN
    )
    accumulate: bool = setting(
        False, "A step has several backwards, and updates wait for the last one.", flag="--accumulate"
    )
    host_memory: int | str | None = setting(
        None, 'A budget of host memory, such as "64GiB".', metavar="SIZE", unset="the machine's"
    )
    device_memory: int | str | None = setting(None, "A budget of device memory.", metavar="SIZE", unset="the machine's")
    precision: Precision | None = setting(None, "bf16 with fp32 masters, or the model's own dtype.", unset="bf16")
    optimizer: OptimizerName = setting("adamw", "AdamW, or Muon for the matrices of layers and AdamW for the rest.")
    states: States = setting("fp32", "The type in which the optimizer's moments are stored; 8bit not with Muon.")
    wear_years: float | None = setting(
        None, "Years that the drives must last at their rated endurance, training all day.", metavar="Y"
    )
    recompute: Recompute = setting(
        "auto", "What a backward computes again: the whole forward, none of it, or what is faster."
    )
    masters: Masters | None = setting(
        None,
        "fp32 masters of bf16 parameters: the parameter is the upper half, or the state has all of it.",
        unset="the faster",
    )
    durability: Literal["off", "step"] | int = setting(
        "off", 'Which steps can be resumed: "off", "step" (each), or N (every N-th).', metavar="N"
    )
    saturation: Saturation = setting(
        "relative",
        "When a batch is large enough: more brings under a tenth of its growth, or one micro-batch more under 1 %.",
    )
    gpus: int = setting(1, "GPUs in a node; each has its own micro-batches.", least=1, metavar="G")
    nodes: int = setting(1, "Number of nodes, each like the machine.", least=1, metavar="N")
    network: str | float | None = setting(
        None, "The rate at which a node receives from others, such as 25GB/s.", metavar="RATE", unset="none"
    )
    lora: int | None = setting(
        None,
        "Train only PEFT's LoRA adapters of this rank, on all linear layers of blocks, of a model by name or config.",
        least=1,
        metavar="R",
        unset="none",
    )
    frozen: Frozen | None = setting(None, "The format of frozen matrices of layers.", unset="not quantized")
    layer_tokens: int | None = setting(
        None,
        "Tokens that layers, except attention, run on at a time; 0: all.",
        least=0,
        metavar="T",
        unset=CHOSEN,
    )

    def __post_init__(self) -> None:
        for name, words in words_of(Request, Profile=object).items():
            if (value := getattr(self, name)) not in words:
                there = " and ".join(str(word) for word in words if word is not None)
                raise PlanError(f"{name} is {value!r}; there are {there}")
        for each in fields(self):
            value, least = getattr(self, each.name), each.metadata.get("least")
            if None not in (value, least) and (not isinstance(value, Integral) or value < least):
                raise PlanError(f"{each.name} is {value!r}; it must be a whole number, {least} or more")
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
        object.__setattr__(self, "durability", interval(self.durability))
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise PlanError(f"alpha is {self.alpha:g}; it must be a part of each update, from 0 to 1")
        settings = self.ratios, self.recompute, self.schedule, self.accumulate, self.alpha, self.clipping
        if wrong := contradiction(*settings):
            raise PlanError(wrong)
        if self.optimizer == "muon" and self.states == "8bit":
            raise PlanError("optimizer is muon, whose states are fp32 or bf16, not 8bit")
        if self.wear_years is not None and not 0 < self.wear_years <= MOST_YEARS:
            raise PlanError(f"wear_years is {self.wear_years:g}; it must be more than 0, and {MOST_YEARS:,} at most")

    @classmethod
    def of(cls, options: Options, *, clip: bool, accumulate: bool = False) -> Request:
        """The request of a run's options. clip: its optimizer clips gradients; accumulate: its loop is known to
        accumulate.
        """
        expert, accumulate = options.expert, accumulate or options.accumulate
        if accumulate and not options.accumulate:  # whatever is given: an early update would be wrong
            expert = replace(expert, alpha=None, clip=None)
        clipping = expert.clip if clip else None
        settings = expert.ratios, expert.recompute, expert.schedule, accumulate, expert.alpha, clipping
        if wrong := contradiction(*settings, prefix="expert."):
            raise OptionError(wrong)
        every = vars(options) | vars(expert) | {"clip": clip, "clipping": clipping, "accumulate": accumulate}
        return cls(**{each.name: every[each.name] for each in fields(cls) if each.name in every})

    @property
    def spec(self) -> ScheduleSpec:
        from gs_compile.passes.baselines.registry import SCHEDULES  # heavy: not for a command line's help

        return SCHEDULES[self.schedule]

    # How updates run --------------------------------------------------------------------------------------------------

    @property
    def speculative(self) -> bool:
        """Whether updates run before the norm is known: if that is asked for, or if not all updates are to be late."""
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
        """The result of `made` for this request. If that does not fit, and nothing says when updates run, the result
        for the same request with gradients that wait for the norm on SSD, too, like those of several backwards.

        That takes less host memory, but each step writes and reads all gradients. Errors name what the latter needs.
        """
        is_free = self.clipping is None and self.alpha is None and self.schedule == "vertical"
        try:
            return made(self)
        except MemoryBudgetError:
            if not (self.clip and is_free) or self.accumulate:
                raise
        return made(replace(self, accumulate=True))

    @property
    def alphas(self) -> tuple[float, ...]:
        """The alphas that may be chosen. A schedule as others publish it delays updates only if asked to."""
        if self.late:
            return (1.0,)
        if self.alpha is not None:
            return (self.alpha,)
        return ALPHAS[:1] if self.spec.as_published else ALPHAS

    # What is saved ----------------------------------------------------------------------------------------------------

    @property
    def saves_all(self) -> bool:
        """Whether nothing is to be recomputed."""
        return self.recompute == "none"

    @property
    def saves(self) -> bool:
        """Whether activations are to be saved, even if that is slower."""
        return self.saves_all or bool(self.ratios.activation)

    def recomputing(self) -> Request:
        """The request with only layers' inputs saved."""
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
        """The micro-batch sizes to try: the one that is given or follows, or those into which a batch can be cut."""
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
        """The number of micro-batches of `size` samples, if it is given or follows."""
        if self.spec.whole_batch:
            return 1
        batch_size = self.own_batch_size
        number = self.num_micro_batches or (None if batch_size is None else -(-batch_size // size))
        if number is not None and number > MOST_MICRO_BATCHES:
            raise PlanError(
                f"a step has {several(number)} of {size}, and {MOST_MICRO_BATCHES:,} at most: batch_size is in "
                "samples, not tokens; give a smaller one, or a larger micro_batch_size"
            )
        return number

    def budgets(self, profile: Profile, *, host_nbytes: int | None = None, device_nbytes: int | None = None) -> Budgets:
        """What a run may use of a machine. host_nbytes, device_nbytes: what is asked for, if it is known in bytes.

        Raises `PlanError` if the drives must last, but their rating is not known.
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
    """What a run may use. wear_bytes_per_second: None: writes to SSD are not limited."""

    host_nbytes: int
    device_nbytes: int = 0
    ssd_nbytes: int
    wear_bytes_per_second: float | None = None

    def of(self, tier: str) -> int:
        """The bytes of a tier."""
        nbytes: int = getattr(self, f"{tier}_nbytes")
        return max(nbytes, 1)


def several(number: int, one: str = "micro-batch") -> str:
    """``1 micro-batch``, ``2 micro-batches``"""
    ending = "" if number == 1 else "es" if one.endswith(("s", "ch")) else "s"
    return f"{number} {one}{ending}"


SILENT: Mapping[str, Any] = {each.name: each.default for each in fields(Request)}  # a request that asks for nothing
