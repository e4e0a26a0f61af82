"""The options of ``torch.compile(model, backend="greedysnake", options={...})``, checked when they are made."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import chain
from pathlib import Path
from textwrap import shorten
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from gs_compile.errors import OptionError
from gs_compile.machine import parse_bytes
from gs_compile.schedules import BASELINE, BY_MICRO_BATCH, Schedule

T = TypeVar("T")
Recompute = Literal["auto", "all", "none"]
Masters = Literal["split", "whole"]
Frozen = Literal["nf4", "nf4_single", "fp4", "fp4_single", "int8", "fp8", "mxfp4"]  # as `runtime.codecs` knows them
Clipping = Literal["delayed", "speculative"]

OF_OPTIMIZERS = ("lr", "max_grad_norm", "state_dtype", "weight_decay")  # settings of optimizers, not options
ROUNDING = 1e-6  # the sum of ratios may exceed 1 by this much: they may be rounded, or come from a solver
DEFAULT_STORAGE = "greedysnake"  # under the user's cache
PATHS = ("storage", "report", "status")  # relative ones are of the directory in which the options are made


def default_storage() -> Path:
    """The directory of data if none is given: under the user's cache. Raises OptionError if the user has no home."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        cache = cache if cache.is_absolute() else Path("~/.cache").expanduser()  # a relative one is to be ignored
    except RuntimeError as error:
        raise OptionError(
            "this user has no home directory, where data goes by default and figures of the machine are kept: set "
            "HOME, or XDG_CACHE_HOME to a directory"
        ) from error
    return cache / DEFAULT_STORAGE


@dataclass(frozen=True, kw_only=True)
class Ratios:
    """The part of each class of data that is stored in host memory, 0 to 1; the rest is on SSD.

    parameter, checkpoint, optimizer: of parameters, the inputs of layers, and optimizer states. None: chosen.
    gradient: of gradient sums between two micro-batches of the horizontal order, or between two backwards of a step.
        None: chosen.
    activation: the part of the layers' micro-batches that save their activations there; the others save the layer's
        input, and their backward computes the rest again. None: chosen, also for the device's own memory and SSD.
    device_parameter, device_checkpoint: what stays on a device with its own memory. None: chosen together with the part
        in host memory; 0 if that is given.
    """

    checkpoint: float | None = None
    parameter: float | None = None
    optimizer: float | None = None
    gradient: float | None = None
    activation: float | None = None
    device_parameter: float | None = None
    device_checkpoint: float | None = None

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = _fraction(f"ratios.{entry.name}", getattr(self, entry.name))
            object.__setattr__(self, entry.name, value)
        for names in (("parameter", "device_parameter"), ("checkpoint", "device_checkpoint", "activation")):
            given = {name: ratio for name in names if (ratio := getattr(self, name))}
            if (total := sum(given.values())) > 1 + ROUNDING:
                words = " and ".join(f"ratios.{name} is {ratio:g}" for name, ratio in given.items())
                raise OptionError(f"{words}: together they are more than there is, so lower one of them")
            for name, ratio in given.items() if total > 1 else ():
                object.__setattr__(self, name, ratio / total)

    @classmethod
    def of(cls, ratios: Ratios | Mapping[str, Any] | None, name: str) -> Ratios:
        """The ratios of a dict; errors call it `name`."""
        return _nested(name, cls, {} if ratios is None else ratios)

    def given(self) -> dict[str, float]:
        """Those that are not None, by name."""
        return {name: ratio for name, ratio in vars(self).items() if ratio is not None}

    def on_device(self) -> dict[str, float]:
        """The parts that live on the device, by class."""
        return {"parameter": self.device_parameter or 0.0, "checkpoint": self.device_checkpoint or 0.0}


@dataclass(frozen=True, kw_only=True)
class Expert:
    """Options that few users should touch.

    schedule: the order of the step. "vertical" runs a layer for all micro-batches before the next. Others exist for
        comparison: "horizontal" runs a micro-batch through all layers and back before the next; "lifetime" does the
        same, and leaves inactive data where it is as far as there is room; "single" runs the whole batch as one
        micro-batch, whatever `micro_batch_size` is.
    compiler: what compiles the layers' code: "inductor", "eager" (runs it as traced), or "auto": inductor if a C++
        compiler (Triton on a GPU) is available.
    snake: every other layer takes the micro-batches in the opposite order.
    alpha: the part of every update that is delayed to the next forward, 0 to 1. None: chosen; 1 with clip="delayed".
    recompute: what a layer saves for its backward. "all": its input alone, so the backward runs the whole forward
        again. "none": everything that the backward reads. "auto": what makes a step faster, where there is room for it.
    ratios: what part of each class of data is stored in host memory: a `Ratios`, or a dict of its fields. None: chosen.
    clip: with `max_grad_norm`, when updates run. "delayed": all wait for the norm, and run in the next forward.
        "speculative": they run in parallel with the backward, and again in the next forward if gradients must be scaled
        or are not finite. None: chosen; without a plan "speculative" if alpha is below 1, else "delayed".
    separate_device: on a CPU, copy to and from a simulated device with its own memory; for tests.
    masters: where the fp32 masters of parameters in bf16 are stored. "split": the parameter is the upper half, and the
        state has the lower one. "whole": the state has all of it. Both give bitwise the same values. None: split;
        whole where that is faster, or split ones do not fit; on several ranks split.
    threads: the number of threads of the optimizer on the CPU. None: half of the process's threads; with a GPU, all
        cores but two.
    piece_tokens: the head and its loss run on this many tokens at a time, so that the logits of a micro-batch never
        exist. 0: on all. None: all; if these need more memory than a layer, as many as do not.
    layer_tokens: everything in a layer except attention runs on this many tokens at a time, for sequences whose layer
        would need too much memory; such a layer saves only its input. 0: on all. None: chosen on a device with its own
        memory, else all.
    trace: record every operation of every step, for `optimizer.save_trace` and `optimizer.waits`.
    """

    schedule: Schedule = "vertical"
    compiler: Literal["auto", "inductor", "eager"] = "auto"
    snake: bool = True
    alpha: float | None = None
    recompute: Recompute = "auto"
    ratios: Ratios = field(default_factory=Ratios)
    clip: Clipping | None = None
    separate_device: bool = False
    masters: Masters | None = None
    threads: int | None = None
    piece_tokens: int | None = None
    layer_tokens: int | None = None
    trace: bool = False

    def __post_init__(self) -> None:
        _check_words(self, "expert.")
        object.__setattr__(self, "alpha", _fraction("expert.alpha", self.alpha))
        object.__setattr__(self, "ratios", Ratios.of(self.ratios, "expert.ratios"))
        if self.threads is not None:
            _whole("expert.threads", self.threads, "a whole number, 1 or more, or None")
        for name in ("piece_tokens", "layer_tokens"):
            if (size := getattr(self, name)) not in (None, 0):
                _whole(f"expert.{name}", size, "a whole number, or None")


def contradiction(
    ratios: Ratios,
    recompute: Recompute,
    schedule: Schedule,
    accumulate: bool,
    alpha: float | None = None,
    clipping: Clipping | None = None,
    *,
    prefix: str = "",
) -> str | None:
    """A sentence that says which of these contradict each other; None: none do.

    alpha, clipping: once it is known whether gradients are clipped.
    prefix: what the user writes before the name of an option.
    """
    clip, late = f"{prefix}clip" if prefix else "clipping", "updates everything after its last backward"
    if accumulate and clipping == "speculative":
        return f'{clip} is "speculative", but a step that accumulates {late}: leave one of the two out'
    if accumulate and alpha not in (None, 1.0):
        return (
            f"{prefix}alpha is {alpha:g}, but a step that accumulates {late}, so alpha is 1: leave one of the two out"
        )
    if clipping == "delayed" and alpha not in (None, 1.0):
        return (
            f'{prefix}alpha is {alpha:g}, but with {clip}="delayed" all updates wait for the norm of all gradients, '
            f'so alpha is 1: leave one of the two out, or choose {clip}="speculative"'
        )
    if accumulate and schedule != "vertical":
        return f'{prefix}schedule is "{schedule}": a step that accumulates has the "vertical" order alone'
    if ratios.gradient is not None and schedule not in BY_MICRO_BATCH and not accumulate:
        return (
            f"{prefix}ratios.gradient is {ratios.gradient:g}, but gradient sums leave the device between two "
            f"micro-batches in the {BASELINE} order, and between two backwards of a step, alone: leave it out, or "
            f'choose {prefix}schedule="{BASELINE}", or accumulate=True'
        )
    left_over = {"all": ("activation",), "none": ("checkpoint", "device_checkpoint", "activation")}
    for name in left_over.get(recompute, ()):
        if ratio := getattr(ratios, name):
            return (
                f'{prefix}recompute is "{recompute}", but {prefix}ratios.{name} is {ratio:g}: leave one of the two out'
            )
    return None


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the backend.

    micro_batch_size: samples that run through a layer at a time; the last micro-batch of a batch may be smaller.
    outputs: "all": everything that the model returns, for the whole batch. "loss": in training only the loss, and what
        the forward stores in attributes (no logits, no caches); in evaluation everything, except inside
        `with gs_compile.loss_alone():`.
    storage: a directory for data on SSD, or several, one for each drive. None: ~/.cache/greedysnake.
    host_memory: the most host memory that a run maps: bytes, "6GiB", or "50%" of what this process may use. None: 80%
        of what is free at the start.
    device_memory: the most device memory that a step uses, likewise; "50%" is of the device's memory, or on a CPU of
        what this process may use. None: what the machine has.
    machine: the profile that the plan is made for: a `Profile`, the name of one that ships, or a file. None: this one,
        measured once for each storage.
    precision: "model": compute in the model's own dtype; parameters of 16 bits have fp32 masters. "bf16": compute in
        bf16 with fp32 masters, whatever the model's dtype; inputs and buffers stay as they are.
    frozen: the format in which matrices of layers are stored and moved that are frozen at the first call: "nf4",
        "nf4_single", "fp4", "fp4_single", "int8", "fp8" or "mxfp4". None: not quantized.
    frozen_skip: names of modules whose matrices are not quantized, such as ("gate", "down_proj").
    group: the ProcessGroup of the ranks that train one model together. None: all ranks.
    mesh: instead of a group, a DeviceMesh with the dimension "shard", and "replicate" if several groups hold the model.
    accumulate: True: a step has several backwards, or one of several forwards, and all updates wait for
        `optimizer.step()`; alpha is then 1. False: the first step shows whether it has.
    deterministic: True: bitwise the same values in every run, also on a device. While the model runs, torch uses only
        deterministic algorithms, and raises RuntimeError by name for an operation that has none.
    durability: which steps can be resumed after the process ends: "off": none; "step": each; a number N: every N-th.
    resume: "auto": resume from the last durable step of this model in `storage`, if there is one; needs
        `durability`. None: a new run, which refuses a directory that has one.
    progress: a bar on the terminal inside a step that takes more than two seconds. True: also without a terminal, as a
        line every ten seconds. None: if standard error is a terminal.
    report: a file for a page about the run, written during the run and when it ends.
    status: a directory for the status file that `greedysnake watch` reads; it stays there. None: in the run's folder in
        `storage`, as long as the run lasts.
    expert: an `Expert`, or a dict of its fields.
    mode: torch.compile's `mode`, passed on to inductor.

    Raises OptionError for an option that is unknown, out of range, or contradicts another one.
    """

    micro_batch_size: int = 1
    outputs: Literal["all", "loss"] = "all"
    storage: tuple[Path, ...] = None  # type: ignore[assignment]  # as given; the tuple is made of it
    host_memory: int | str | None = None
    device_memory: int | str | None = None
    machine: Any = None
    precision: Literal["model", "bf16"] = "model"
    frozen: Frozen | None = None
    frozen_skip: tuple[str, ...] = ()
    group: Any = None
    mesh: Any = None
    accumulate: bool = False
    deterministic: bool = False
    durability: int = 0  # as given, "off" and "step" too; a number of steps is made of it
    resume: Literal["auto"] | None = None
    progress: bool | None = None
    report: Path | None = None
    status: Path | None = None
    expert: Expert = field(default_factory=Expert)
    mode: str | None = None
    as_given: dict[str, Any] = field(init=False, repr=False, compare=False)  # what `PATHS` are made of

    def __post_init__(self) -> None:
        object.__setattr__(self, "as_given", {name: getattr(self, name) for name in PATHS})
        _whole("micro_batch_size", self.micro_batch_size, "a whole number of samples, 1 or more")
        _check_words(self)
        object.__setattr__(self, "frozen_skip", _names("frozen_skip", self.frozen_skip))
        object.__setattr__(self, "storage", _directories(default_storage() if self.storage is None else self.storage))
        for name in ("host_memory", "device_memory"):
            object.__setattr__(self, name, _budget(name, getattr(self, name)))
        object.__setattr__(self, "durability", interval(self.durability))
        if self.resume and not self.durability:
            raise OptionError(
                'resume is "auto" and durability is "off": give durability="step" or a number of steps, too'
            )
        for name in ("report", "status"):
            object.__setattr__(self, name, _path(name, getattr(self, name)))
        object.__setattr__(self, "expert", expert := _nested("expert", Expert, self.expert))
        settings = expert.ratios, expert.recompute, expert.schedule, self.accumulate
        if wrong := contradiction(*settings, prefix="expert."):
            raise OptionError(wrong)
        _group_or_mesh(self.group, self.mesh)

    @classmethod
    def of(cls, options: Mapping[str, Any] | Options | None, mode: str | None = None) -> Options:
        """The options that torch.compile passes to a backend; raises `OptionError` for an unknown one."""
        if isinstance(options, Options):
            return replace(options, mode=mode) if mode else options
        if not isinstance(options, Mapping | None):
            raise OptionError(f'options must be a dict, such as {{"storage": "/mnt/nvme0/me"}}; got {options!r}')
        given = dict(options or {})
        if mode is not None:
            given["mode"] = mode
        return from_mapping(cls, given, "")

    @property
    def by_name(self) -> dict[str, Any]:
        """Every option by the name that users give it, such as expert.alpha; paths as they were given."""
        own = {name: value for name, value in vars(self).items() if name not in ("expert", "as_given")}
        return own | self.as_given | {f"expert.{name}": value for name, value in vars(self.expert).items()}


def from_mapping(cls: type[T], given: Mapping[str, Any], prefix: str) -> T:
    """A dataclass with the given fields; raises OptionError for an unknown one, and names the most similar field."""
    own = _names_of(cls, prefix)
    known = _names_beside(cls) | own
    for key in given:
        if key not in own:
            close = difflib.get_close_matches(str(key).rpartition(".")[2], known, n=1)  # the last of a dotted name
            meant = known[close[0]] if close else ""
            if cls is Options and key in OF_OPTIMIZERS:
                hint = f"the optimizer has it: gs_compile.AdamW(model.parameters(), {key}=...)"
            elif meant:
                hint = f"did you mean {meant if meant in own.values() else _as_written(meant)}?"
            else:
                hint = shorten(f"known: {', '.join(own.values())}", 500)
            raise OptionError(f"unknown option {prefix}{key}; {hint}")
    return cls(**given)


def _names_beside(cls: type) -> dict[str, str]:
    """Options that users may look for in `cls`, but that are in another class."""
    if cls is Options:
        return _names_of(Expert, "expert.")
    return _names_of(Ratios, "expert.ratios.") | _names_of(Options, "") if cls is Expert else {}


def _names_of(cls: type, prefix: str) -> dict[str, str]:
    return {entry.name: prefix + entry.name for entry in fields(cls) if entry.init}


def _as_written(name: str) -> str:
    """An option as a user writes it: ``{"expert": {"alpha": ...}}`` for ``expert.alpha``."""
    written = "..."
    for part in reversed(name.split(".")):
        written = f'{{"{part}": {written}}}'
    return written


def _nested(name: str, cls: type[T], value: Any) -> T:
    if isinstance(value, cls):
        return value
    if isinstance(value, Mapping):
        return from_mapping(cls, value, f"{name}.")
    raise OptionError(f"{name} must be a dict or gs_compile.{cls.__name__}; got {value!r}")


def _group_or_mesh(group: Any, mesh: Any) -> None:
    """Raise OptionError unless one of the two says which ranks train together, or neither is given."""
    if group is None and mesh is None:
        return
    from torch.distributed import ProcessGroup  # not needed by one rank
    from torch.distributed.device_mesh import DeviceMesh

    if group is not None and mesh is not None:
        raise OptionError("group and mesh both say which ranks train together: leave one of the two out")
    if group is not None and not isinstance(group, ProcessGroup):
        raise OptionError(f"group must be a torch.distributed.ProcessGroup that this rank is in; got {group!r}")
    if mesh is None:
        return
    names = mesh.mesh_dim_names if isinstance(mesh, DeviceMesh) else None
    if names is None or "shard" not in names or not {*names} <= {"replicate", "shard"}:
        raise OptionError(
            'mesh must be a DeviceMesh with the dimensions "replicate" and "shard", or "shard" alone, such as '
            f'init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard")); got {mesh!r}'
        )
    if mesh.size(names.index("shard")) == 1 < mesh.size():
        raise OptionError(
            f'mesh has one rank in its dimension "shard", and {mesh.size()} that replicate: a model is shared by two '
            'ranks or more, so give "shard" at least two, or train with torch.optim in DistributedDataParallel'
        )


def _directories(storage: Any) -> tuple[Path, ...]:
    given = [storage] if isinstance(storage, str | Path) else storage
    if not isinstance(given, Sequence) or not given or not all(map(_is_path, given)):
        raise OptionError(f"storage must be a directory or a list of directories; got {storage!r}")
    paths = tuple(absolute("storage", each) for each in given)
    if len(set(paths)) < len(paths):
        raise OptionError(f"storage names a directory twice; got {storage!r}")
    return paths


def _path(name: str, value: Any) -> Path | None:
    if value is None:
        return None
    if not _is_path(value):
        raise OptionError(f"{name} must be a path, or None; got {value!r}")
    return absolute(name, value)


def _is_path(value: Any) -> bool:
    return isinstance(value, str | Path) and bool(str(value)) and "\0" not in str(value)


def absolute(name: str, value: str | Path) -> Path:
    """An absolute path, "~" and environment variables replaced."""
    path = os.path.expandvars(value)
    if re.match(r"\w+:/", str(path)):  # two slashes are one in a Path
        raise OptionError(f"{name} cannot be {path}: it is an address, and not a path on this machine")
    if re.search(r"\$(\w+|\{\w+\})", str(path)):
        raise OptionError(f"{name} cannot be {path}: no environment variable of that name is set")
    try:
        found = Path(path).expanduser().absolute()
        found = found.resolve() if ".." in found.parts else found  # links stay as they are named
    except (RuntimeError, OSError) as error:  # no home, nobody of that name, or the directory we are in is gone
        raise OptionError(f"{name} cannot be {path}: {error}; name another directory") from None
    if not str(found).isprintable():
        raise OptionError(f"{name} cannot be {str(found)!r}: it has letters that cannot be printed; name another")
    return found


def _names(name: str, value: Any) -> tuple[str, ...]:
    valid = isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(each, str) for each in value)
    if not valid:
        raise OptionError(f"{name} must be a list of names of modules; got {value!r}")
    return tuple(value)


def _budget(name: str, value: int | str | None) -> int | str | None:
    """Bytes, or a percentage, which is checked: what it is a percentage of is not known yet."""
    if value is None:
        return None
    nbytes = parse_bytes(value, whole=2**60, name=name)
    return value.strip() if isinstance(value, str) and "%" in value else nbytes


def interval(durability: Any) -> int:
    """The number of steps between two durable ones; 0: no step is."""
    words = {"off": 0, "step": 1, False: 0}  # the last is how YAML reads the first
    found = words.get(durability) if isinstance(durability, str | bool) else durability
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise OptionError(f'durability must be "off", "step" or a whole number of steps; got {durability!r}')
    return found


def _fraction(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise OptionError(f"{name} must be a number from 0 to 1, or None; got {value!r}")
    return float(value)


def _whole(name: str, value: object, form: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise OptionError(f"{name} must be {form}; got {value!r}")


def _check_words(options: Options | Expert, prefix: str = "") -> None:
    """Raise OptionError for a field of a few possible values that has none of these."""
    for name, words in words_of(type(options)).items():  # type: ignore[arg-type]  # a class has a hash
        value = getattr(options, name)
        if not any(value is word or (value == word and type(value) is type(word)) for word in words):
            raise OptionError(f"{prefix}{name} must be one of {', '.join(map(repr, words))}; got {value!r}")


@cache
def words_of(cls: type, **late: type) -> dict[str, tuple[Any, ...]]:
    """The possible values of each field of a class that has only a few: of a `Literal` or a `bool`.

    late: types that the class's module does not import.
    """
    found = {name: _words(kind) for name, kind in get_type_hints(cls, localns=late).items()}
    return {name: words for name, words in found.items() if words}


def _words(kind: Any) -> tuple[Any, ...]:
    """The values of a type, one by one; () if they are not only a few."""
    if get_origin(kind) in (Union, UnionType):
        parts = [_words(part) for part in get_args(kind)]
        return tuple(chain.from_iterable(parts)) if all(parts) else ()
    return get_args(kind) if get_origin(kind) is Literal else {bool: (True, False), NoneType: (None,)}.get(kind, ())
