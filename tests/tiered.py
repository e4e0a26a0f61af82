"""Tiny models trained on the tiers: captured once, then trained anew under any options."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import fakes
import torch
from asked import asked_of_storage
from torch import nn
from torch.nn import functional

import gs_compile
from gs_compile.codegen.compiled import Compilation, compilations_of
from gs_compile.model import engine, first_step
from gs_compile.model.residency import residency_of, restore, stash
from gs_compile.model.tiered_optimizer import TieredOptimizer
from gs_compile.options import Options
from gs_compile.placement.traffic import traffic
from gs_compile.runtime.storage.folder import LOCK
from gs_compile.runtime.storage.store import Store

VOCABULARY, LENGTH = 70, 8
BATCH = 5  # in micro-batches of 2 the last is smaller


class Output(NamedTuple):
    loss: torch.Tensor | None
    logits: torch.Tensor  # BTV


class WideNorm(nn.LayerNorm):
    """In the type of its weights, where all else has another: on a CPU alone torch's own takes two types."""

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return super().forward(x_BTD.to(self.weight.dtype)).to(x_BTD.dtype)


class Block(nn.Module):
    """Two residual halves that mix no tokens: what Dynamo reads of it is short."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.drop(self.mix(self.ln_1(x_BTD)))
        return x_BTD + self.drop(self.down(functional.gelu(self.up(self.ln_2(x_BTD)))))


class GPT2(nn.Module):
    """Called as HuggingFace's, with its names: how HuggingFace's own code is captured, end_to_end/test_models.py tests."""

    def __init__(self, num_layers: int, width: int, vocabulary: int, dropout: float, tied: bool) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, width),
                "wpe": nn.Embedding(LENGTH, width),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList(Block(width, dropout) for _ in range(num_layers)),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.transformer.wte.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Output:
        parts = self.transformer
        x_BTD = parts.drop(parts.wte(input_ids) + parts.wpe.weight[: input_ids.shape[1]])
        for block in parts.h:
            x_BTD = block(x_BTD)
        logits = self.lm_head(parts.ln_f(x_BTD))
        if labels is None:
            return Output(None, logits)
        wanted = functional.pad(labels, (0, 1), value=-100)[:, 1:]
        return Output(functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()), logits)


def gpt2(
    num_layers: int = 2,
    width: int = 32,
    dropout: float = 0.0,
    *,
    seed: int = 0,
    vocab_size: int = VOCABULARY,
    tied: bool = True,
    norms: torch.dtype | None = None,
) -> torch.nn.Module:
    """Every tensor of some quanta, so that ratios and alpha cut it. norms: their dtype, where all else is bfloat16."""
    torch.manual_seed(seed)
    model = GPT2(num_layers, width, vocab_size, dropout, tied).train()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    if norms is not None:
        model.bfloat16()
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.to(norms).__class__ = WideNorm
    return model


def two_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """As people have them: no decay on biases and norms."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def tokens(step: int, batch_size: int = BATCH) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch_size, LENGTH), generator=torch.Generator().manual_seed(step))


def options(storage: Path | Sequence[Path], **changes: Any) -> dict[str, Any]:
    """Options for tests: everything on SSD, layers' code as it is and run again; changes of `expert` by name.

    Where all else is given so is alpha, 0: nothing is solved.
    """
    known = {
        "micro_batch_size",
        "outputs",
        "host_memory",
        "device_memory",
        "precision",
        "durability",
        "resume",
        "frozen",
        "frozen_skip",
        "accumulate",
        "deterministic",
        "progress",
        "report",
        "status",
    }
    ratios = {"parameter": 0.0, "checkpoint": 0.0, "optimizer": 0.0} | changes.pop("ratios", {})
    expert = {key: value for key, value in changes.items() if key not in known}
    is_open = expert.get("recompute") == "auto" or expert.get("separate_device") or None in ratios.values()
    is_late = changes.get("accumulate") or expert.get("clip") == "delayed"
    if not is_open and not is_late:
        expert = {"alpha": 0.0} | expert
    return {
        "micro_batch_size": 2,
        "outputs": "loss",
        "storage": storage,
        "host_memory": "100MiB",
        **{key: value for key, value in changes.items() if key in known},
        "expert": {"compiler": "eager", "recompute": "all", "ratios": ratios, **expert},
    }


@dataclass
class Outcome:
    """What training has come to."""

    losses: list[float]
    norms: list[float]
    values: dict[str, torch.Tensor]  # masters and optimizer states, by name

    def differences(self, other: Outcome) -> list[str]:
        """Where two are not bitwise the same."""
        assert self.values.keys() == other.values.keys()
        found = [name for name in ("losses", "norms") if getattr(self, name) != getattr(other, name)]
        return found + [name for name, value in self.values.items() if not torch.equal(value, other.values[name])]


Make = Callable[[list[dict[str, Any]]], TieredOptimizer]


def adamw(groups: list[dict[str, Any]], **settings: Any) -> TieredOptimizer:
    return gs_compile.AdamW(groups, lr=1e-2, **settings)


def muon(groups: list[dict[str, Any]], **settings: Any) -> TieredOptimizer:
    """Its groups are those of people who have it split the parameters itself."""
    return gs_compile.Muon([{"params": group["params"]} for group in groups], lr=0.02, adamw_lr=1e-2, **settings)


def sgd(groups: list[dict[str, Any]]) -> TieredOptimizer:
    """Its one update is the gradient itself."""
    return gs_compile.SGD([{"params": group["params"]} for group in groups], lr=1.0)


def loss_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Of one tensor twice: two of the same values are captured anew."""
    ids = ids.to(next(model.parameters()).device)
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    """One step as users write it."""
    loss = loss_of(model, ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def used_between_steps(
    model: Any, given: Mapping[str, Any]
) -> tuple[list[float], dict[str, torch.Tensor], torch.Tensor]:
    """A HuggingFace model's losses in training, evaluation and training from halved values; its values; what it writes."""
    torch._dynamo.reset()
    optimizer = adamw(two_groups(model))
    model.compile(backend="greedysnake", options=given)
    losses = [step(model, optimizer, tokens(number)) for number in range(2)]
    model.eval()
    with torch.no_grad():
        losses.append(float(loss_of(model, tokens(7))))
    with gs_compile.streaming(model):
        words = tokens(9)[:2, :4].to(next(model.parameters()).device)
        written = model.generate(words, max_new_tokens=3, do_sample=False, pad_token_id=0)
    values = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    model.train()
    model.load_state_dict({name: value * 0.5 for name, value in values.items()})
    losses.append(step(model, optimizer, tokens(3)))
    assert optimizer.engine is not None
    optimizer.engine.tiers.close()
    return losses, values, written.cpu()


def outcome(model: torch.nn.Module, optimizer: TieredOptimizer, losses: list[float], norms: list[float]) -> Outcome:
    optimizer.synchronize()
    values = {}
    for name, parameter in model.named_parameters():
        values[name] = residency_of(parameter).value(parameter, master=True).clone()
        state = optimizer.stored_state(parameter) or {}
        values |= {f"{name}.{key}": value.clone() for key, value in state.items()}
    return Outcome(losses, norms, values)


Traffic = dict[tuple[str, str], int]  # bytes by lane and kind


@dataclass
class Moved:
    """The bytes of one step: as its lanes traced them, as its program says, and those that storage was asked for."""

    traced: Traffic
    planned: Traffic
    asked: Traffic


def moved(model: torch.nn.Module, optimizer: TieredOptimizer, ids: torch.Tensor) -> Moved:
    """A step, and what it moves; transfers of the step before come to their end first."""
    engine = optimizer.engine
    assert engine is not None
    engine.tiers.synchronize()
    engine.tiers.trace.reset()
    with asked_of_storage() as found:
        loss_of(model, ids).backward()
        engine.tiers.synchronize()  # what is under way belongs to this step
        optimizer.step()
        optimizer.zero_grad()
    asked: Counter[tuple[str, str]] = Counter()
    for (verb, label), nbytes in found.items():  # an extent's label begins with its kind
        kind = {"sw": "w", "ss": "s", "dw": "dw", "cw": "seal", "cs": "seal"}.get(label[:2], label[0])
        asked[f"ssd_{verb}", kind] += nbytes
    return Moved(
        traced={
            (lane, kind): n
            for lane, total in optimizer.last_step.lanes.items()
            for kind, n in total.nbytes_by_kind.items()
        },
        planned=traffic(engine.snapshots[-1], engine.placement),
        asked=dict(asked),
    )


class Harness:
    """A model that is captured once: each run begins from the same values, whatever its placement.

    Its capture outlives a test only in a module that says KEEPS_CAPTURES.
    """

    are_kept: ClassVar[bool] = False  # captures, in this module
    num_alive: ClassVar[int] = 0  # blocks of memory in use when a collection last looked at all
    _all: ClassVar[weakref.WeakSet[Harness]] = weakref.WeakSet()

    def __init__(self, build: Callable[[], torch.nn.Module], precision: str = "model") -> None:
        self.model = build()
        self.precision = precision
        self.initial = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.given: dict[str, Any] = {}
        # One, and another without gradients or after a first call that was rolled back.
        self.compilations: list[Compilation] = []
        self._all.add(self)

    @classmethod
    def forget_captures(cls) -> None:
        """Each model is captured anew when it is called next, as Dynamo is as if it had captured none."""
        torch._dynamo.reset()
        for harness in cls._all:
            harness.compilations = []
            compilations_of.pop(next(harness.model.parameters()), None)

    @contextmanager
    def fresh(self, make: Make, given: Mapping[str, Any]) -> Iterator[TieredOptimizer]:
        """The model as it was built, with an optimizer and options of its own, for as long as the context lasts."""
        optimizer = make(two_groups(self.model))
        self.given.clear()
        self.given |= {**given, "precision": self.precision}  # a second capture reads them too
        if not self.compilations:
            self.model.compile(backend="greedysnake", options=self.given)
        else:
            for compilation in self.compilations:
                compilation.options = Options.of(self.given)
            dtype = torch.bfloat16 if self.precision == "bf16" else None
            for parameter in self.model.parameters():
                stash(parameter, dtype)
        try:
            yield optimizer
        finally:
            num_before = len(self.compilations)
            self.compilations = compilations_of.get(next(self.model.parameters()), [])
            if self.are_kept and len(self.compilations) > num_before:
                gc.collect()  # what a test asks to be gone must not be frozen
                gc.freeze()  # the collection that each first call makes passes over what is kept
            same = [compilation.options == Options.of(self.given) for compilation in self.compilations]
            if optimizer.engine is not None:
                optimizer.engine.tiers.close()
                optimizer.engine = None
            optimizer.kept.values_have_come()  # of a commit that was found, and not asked for by a call
            for parameter, values in zip(self.model.parameters(), self.initial, strict=True):
                restore(parameter, values.clone())
            assert all(same), "captured once more: these options did not count"
            if len(self.compilations) > 6:  # in training and evaluation; what failed in its first call has more
                self.forget_captures()

    def train(
        self,
        make: Make,
        given: Mapping[str, Any],
        num_steps: int = 6,
        batch_size: int = BATCH,
        *,
        sizes: Sequence[int] = (),
        look: Callable[[int, TieredOptimizer], None] = lambda number, optimizer: None,
    ) -> Outcome:
        """Steps on batches that are always the same, of one size or of `sizes`; after each one has a `look`."""
        torch.manual_seed(1)
        losses: list[float] = []
        norms: list[float] = []
        with self.fresh(make, given) as optimizer:
            for number, size in enumerate(sizes or [batch_size] * num_steps):
                losses.append(step(self.model, optimizer, tokens(number, size)))
                assert optimizer.last_step is not None
                norms.append(optimizer.last_step.grad_norm)
                look(number, optimizer)
            return outcome(self.model, optimizer, losses, norms)


@cache
def shared(precision: str = "model", *, halved: bool = False, **sizes: Any) -> Harness:
    """The one harness of a model in this process; `halved`: for the schedule that cuts blocks, so captures it itself."""
    return Harness(partial(gpt2, **sizes), precision)


def collect_seldom() -> None:
    """Whatever is there stays: collections of garbage pass over it.

    Those that Python makes by itself come seldom: captures make many objects, and looking for circles among them would
    take a fifth of the time of the tests.
    """
    gc.set_threshold(1_000_000, 20, 50)
    gc.collect()
    gc.freeze()
    Harness.num_alive = sys.getallocatedblocks()


def capture_cheaply() -> None:
    """Dynamo does not do after each capture what no test asks for.

    It would collect garbage, which a first call does itself, and time its guards for its log, with the processor's caches
    emptied before. It would word for its log where a forward changes an object, and describe each graph for a log of
    traces as long as that has a handler, and pytest gives one to every log that keeps its records to itself. Nor does the
    first backward start threads, which no fork survives, for devices that fake tensors have a torch built for CUDA
    believe in; what the card of `device` needs is started there. Models of a module that keeps its captures are many: one
    more than Dynamo compiles fails, rather than runs as it is.

    A first call, or the end of an optimizer, does not look through all that a capture has made where no model is left.
    What common operators make of fake tensors is known without their decompositions (`fakes`). A trace of tensors does
    not patch nn.Module with what changes nothing for it: of all its subclasses, and each graph that there is has one,
    Python would forget what it knows.
    """
    import torch._dynamo.guards
    from torch.fx._symbolic_trace import _Patcher

    if torch.backends.cuda.is_built() and not torch.cuda.is_available():
        torch.ones(1, requires_grad=True).backward()
    torch._dynamo.config.run_gc_after_compile = False
    if hasattr(torch._dynamo.config, "side_effect_replay_policy"):  # of later releases
        torch._dynamo.config.side_effect_replay_policy = "silent"
    torch._dynamo.config.recompile_limit, torch._dynamo.config.fail_on_recompile_limit_hit = 32, True
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
    traces = logging.getLogger("torch.__trace")
    traces.handlers, traces.propagate, traces.disabled = [], True, True
    for module in (engine, first_step):
        module.gc = SimpleNamespace(collect=_collect_models)
    fakes.give()
    patch_method: Any = _Patcher.patch_method
    _Patcher.patch_method = lambda self, owner, *given, **how: (
        None if owner is nn.Module else patch_method(self, owner, *given, **how)
    )


def _collect_models() -> None:
    """Those that were left have threads; the alarm of a rank is of the model that makes its first call."""
    if any("alarm" not in name for name in _named_as_ours()):
        gc.collect()


def our_threads() -> list[str]:
    """The names of the threads that this package has started and not ended, but for those of what is garbage.

    A model that an earlier test has let go of runs until it is collected, whenever that is.
    """
    if _named_as_ours():
        gc.collect()
    return _named_as_ours()


def _named_as_ours() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("greedysnake"))


@contextmanager
def another_run(directory: Path) -> Iterator[None]:
    """The directory is in use by a process of another number."""
    with Store([directory]) as store:
        (store.drives[0].folder / LOCK).write_text("pid 1, started just now")
        yield


def files_in(*directories: Path) -> list[str]:
    return sorted(str(path.relative_to(each)) for each in directories for path in each.rglob("*"))
