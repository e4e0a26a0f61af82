"""Tiny models trained on the tiers: captured once, then trained anew under any options."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

import gs_compile
from gs_compile.codegen.compiled import Compilation, compilations_of
from gs_compile.model.optim import TieredOptimizer
from gs_compile.model.residency import residency_of, restore, stash
from gs_compile.options import Options
from gs_compile.placement.traffic import traffic

VOCABULARY, LENGTH = 70, 8
BATCH = 5  # in micro-batches of 2 the last is smaller


class ShortBlock(GPT2Block):
    """What the block computes when nothing but x is given, in few calls."""

    def forward(self, x_BTD: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        if others or named:
            return super().forward(x_BTD, *others, **named)
        qkv = self.attn.c_attn(self.ln_1(x_BTD)).unflatten(-1, (3, self.attn.num_heads, -1)).transpose(1, 3)
        rate = self.attn.attn_dropout.p if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(*qkv.unbind(2), is_causal=True, dropout_p=rate)
        x_BTD = x_BTD + self.attn.resid_dropout(self.attn.c_proj(mixed.transpose(1, 2).flatten(2)))
        return x_BTD + self.mlp(self.ln_2(x_BTD))


class Short(GPT2LMHeadModel):
    """GPT-2 as it is, except that Dynamo reads its training in half the time."""

    def forward(self, input_ids: Any = None, labels: Any = None, **others: Any) -> Any:
        if labels is None or input_ids is None:
            return super().forward(input_ids=input_ids, labels=labels, **others)
        x_BTD = self.transformer.wte(input_ids) + self.transformer.wpe.weight[: input_ids.shape[1]]
        x_BTD = self.transformer.drop(x_BTD)
        for block in self.transformer.h:
            x_BTD = block(x_BTD)
        logits = self.lm_head(self.transformer.ln_f(x_BTD))
        wanted = functional.pad(labels, (0, 1), value=-100)[:, 1:]
        return CausalLMOutput(loss=functional.cross_entropy(logits.float().flatten(0, 1), wanted.flatten()))


def gpt2(num_layers: int = 2, width: int = 32, dropout: float = 0.0, seed: int = 0, **others: Any) -> torch.nn.Module:
    """Tied embeddings; every tensor of some quanta, so that ratios and alpha cut it.

    How HuggingFace's own code is captured is tested in end_to_end/test_models.py and test_training.py.
    """
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=others.pop("vocab_size", VOCABULARY),
        n_positions=LENGTH,
        n_embd=width,
        n_layer=num_layers,
        n_head=others.pop("n_head", 2),
        use_cache=False,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
        **others,
    )
    model = Short(config).train()
    for block in model.transformer.h:
        block.__class__ = ShortBlock
    return model


def llama(num_layers: int, width: int = 32) -> torch.nn.Module:
    """No unit shares parameters with another."""
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 64, "num_hidden_layers": num_layers, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, use_cache=False, **sizes)).train()


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
    """Options for tests: everything on SSD, layers' code as it is; changes of `expert` by name."""
    known = {"micro_batch_size", "outputs", "host_memory", "device_memory", "precision"}
    ratios = {"parameter": 0.0, "checkpoint": 0.0, "optimizer": 0.0} | changes.pop("ratios", {})
    expert = {key: value for key, value in changes.items() if key not in known}
    return {
        "micro_batch_size": 2,
        "outputs": "loss",
        "storage": storage,
        "host_memory": "100MiB",
        **{key: value for key, value in changes.items() if key in known},
        "expert": {"compiler": "eager", "ratios": ratios, **expert},
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


def sgd(groups: list[dict[str, Any]]) -> TieredOptimizer:
    """Its one update is the gradient itself."""
    return gs_compile.SGD([{"params": group["params"]} for group in groups], lr=1.0)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    """One step as users write it."""
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def outcome(model: torch.nn.Module, optimizer: TieredOptimizer, losses: list[float], norms: list[float]) -> Outcome:
    optimizer.synchronize()
    values = {}
    for name, parameter in model.named_parameters():
        values[name] = residency_of(parameter).value(parameter, master=True).clone()
        values |= {f"{name}.{key}": value.clone() for key, value in optimizer.stored_state(parameter).items()}
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
    store = engine.tiers.setting.store
    before = {"ssd_read": store.read_nbytes.copy(), "ssd_write": store.written_nbytes.copy()}
    engine.tiers.trace.reset()
    model(input_ids=ids, labels=ids).loss.backward()
    engine.tiers.synchronize()  # what is under way belongs to this step
    optimizer.step()
    optimizer.zero_grad()
    after = {"ssd_read": store.read_nbytes, "ssd_write": store.written_nbytes}
    return Moved(
        traced={
            (lane, kind): n
            for lane, total in optimizer.last_step.lanes.items()
            for kind, n in total.nbytes_by_kind.items()
        },
        planned=traffic(engine.programs[-1], engine.placement),
        asked={(lane, kind): nbytes for lane in after for kind, nbytes in (after[lane] - before[lane]).items()},
    )


class Rig:
    """A model that is captured once: each run begins from the same values, whatever its placement.

    It outlives a test only where Dynamo is not reset between tests.
    """

    def __init__(self, build: Callable[[], torch.nn.Module], precision: str = "model") -> None:
        self.model = build()
        self.precision = precision
        self.initial = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.given: dict[str, Any] = {}
        self.compilations: list[Compilation] = []  # one, and another after a first call that was rolled back

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
            self.compilations = compilations_of.get(next(self.model.parameters()), [])
            same = [compilation.options == Options.of(self.given) for compilation in self.compilations]
            if optimizer.engine is not None:
                optimizer.engine.tiers.close()
                optimizer.engine = None
            for parameter, values in zip(self.model.parameters(), self.initial, strict=True):
                restore(parameter, values.clone())
            assert all(same), "captured once more: these options did not count"
            if len(self.compilations) > 1:  # Dynamo runs a model as it is once it has captured it eight times
                self.compilations = []
                compilations_of.pop(next(self.model.parameters()))
                torch._dynamo.reset()

    def train(self, make: Make, given: Mapping[str, Any], num_steps: int = 6, batch_size: int = BATCH) -> Outcome:
        """Steps on batches that are always the same."""
        torch.manual_seed(1)
        losses, norms = [], []
        with self.fresh(make, given) as optimizer:
            for number in range(num_steps):
                losses.append(step(self.model, optimizer, tokens(number, batch_size)))
                assert optimizer.last_step is not None
                norms.append(optimizer.last_step.grad_norm)
            return outcome(self.model, optimizer, losses, norms)


@contextmanager
def one_thread() -> Iterator[None]:
    """Computes with one thread: for tiny models more only get in each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def our_threads() -> list[str]:
    """The names of the threads that this package has started and not ended, but for those of what is garbage.

    A model that an earlier test has let go of runs until it is collected, whenever that is.
    """
    if _named_as_ours():
        gc.collect()
    return _named_as_ours()


def _named_as_ours() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("greedysnake"))


def files_in(*directories: Path) -> list[str]:
    return sorted(str(path.relative_to(each)) for each in directories for path in each.rglob("*"))
