"""Tiny models of many families, one call of each, and the straightforward ways to their gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.variables import builder as dynamo_builder
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

from gs_compile.model.backend import greedysnake

VOCAB, TOKENS, WIDTH, LAYERS, BATCH = 70, 12, 32, 3, 5
# Whether `dynamic_sources` may name one dimension of a source, as since torch 2.13; else all of it becomes symbolic.
NAMES_DIMENSIONS = hasattr(dynamo_builder, "_parse_source_entry")

# Models with names of their own for the usual sizes; the others share those of llama.
OLD_NAMES = {
    "gpt2": {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "n_positions": 64},
    "gptj": {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
    "gpt_neo": {
        "hidden_size": WIDTH,
        "num_layers": 4,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 4,
        "max_position_embeddings": 64,
    },
    "bloom": {"hidden_size": WIDTH, "n_layer": LAYERS, "n_head": 4},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": WIDTH},
    "mamba": {"state_size": 4},
}
GROUPED = {"llama", "qwen2", "qwen3", "mistral", "mixtral", "olmo2", "phi3", "gemma2", "gemma3_text", "gpt_oss"}
OTHERS = {"gpt_neox", "falcon", "bert"}
HUGGINGFACE = sorted({*OLD_NAMES, *GROUPED, *OTHERS})
WARNINGS = [  # the `pytestmark` of who captures all of them
    # bloom instantiates an autograd.Function; mamba calls a cached function: Dynamo warns of both, for plain torch too
    pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning"),
    # gemma2 and gpt_oss give back caches of two kinds
    pytest.mark.filterwarnings("ignore:the model's (half-)?blocks are of . kinds:gs_compile.errors.UniformityWarning"),
]


def configuration(name: str, **changes):
    common = {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
    }
    if name in ("gpt2", "gptj", "gpt_neo", "bloom"):
        common = {}
    sizes = {**common, **OLD_NAMES.get(name, {})}
    if name in GROUPED:
        sizes["num_key_value_heads"] = 2
    if name in ("gemma2", "gemma3_text", "qwen3", "gpt_oss"):
        sizes["head_dim"] = 8
    if name in ("gemma2", "gemma3_text", "gpt_oss", "mistral"):
        sizes["sliding_window"] = 4
    if name in ("mixtral", "gpt_oss"):
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if name == "falcon":
        sizes["num_kv_heads"] = 1
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    return AutoConfig.for_model(name, vocab_size=VOCAB, **tokens, **{**sizes, **changes})


def huggingface(name: str, *, dropout: float | None = 0.0, **changes) -> PreTrainedModel:
    """A model in training mode; `dropout` replaces every rate of its configuration, None keeps them."""
    config = configuration(name, **changes)
    rates = [key for key, value in vars(config).items() if "drop" in key and isinstance(value, float)]
    for key in rates if dropout is not None else ():
        setattr(config, key, dropout)
    torch.manual_seed(0)
    kind = AutoModelForMaskedLM if name == "bert" else AutoModelForCausalLM
    return kind.from_config(config).train()


def small(name: str, **changes) -> PreTrainedModel:
    """The same with two layers, for tests of what is around a model: most of their time is Dynamo's, layer by layer."""
    return huggingface(name, num_hidden_layers=2, **changes)


class Block(nn.Module):
    """Causal attention and a feed-forward net, `hidden` wide."""

    def __init__(self, hidden: int = 2 * WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm(x_BTD)).unflatten(-1, (4, -1)).transpose(1, 2).chunk(3, -1)
        x_BTD = x_BTD + functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        return x_BTD + self.dropout(self.down(functional.gelu(self.up(x_BTD))))


class Feed(nn.Module):
    """A feed-forward net alone: what Dynamo reads of it is short."""

    def __init__(self, hidden: int = 2 * WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return x_BTD + self.dropout(self.down(functional.gelu(self.up(x_BTD))))


class GPT(nn.Module):
    """A plain language model that returns (logits, loss), with any blocks that map a hidden state to the next."""

    def __init__(self, block: Callable[[], nn.Module] = Feed, *, num_layers: int = 2, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(num_layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None):
        x_BTD = self.embedding(ids)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits = self.head(self.norm(x_BTD))
        loss = None if labels is None else functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return logits, loss


class Scaled(GPT):
    """By a buffer, ahead of the blocks."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((WIDTH,), 2.0))

    def forward(self, ids):
        x_BTD = self.embedding(ids) * self.scale
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return x_BTD.square().sum(), x_BTD


class Positional(nn.Module):
    """Positional inputs, block names of its own, masked labels given as weights, and a loss that is returned alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Parameter(torch.randn(64, WIDTH) * 0.1)
        self.trunk = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.read_out = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x_BTD = self.trunk(self.words(ids) + self.places[: ids.shape[1]])
        counted = (labels != -100).float()
        losses = functional.cross_entropy(self.read_out(x_BTD).transpose(1, 2), labels.clamp(min=0), reduction="none")
        return (losses * counted).sum() / counted.sum()


def build(name: str) -> nn.Module:
    own = {"plain": partial(GPT, Block, num_layers=LAYERS), "positional": Positional}
    return own[name]() if name in own else huggingface(name)


MODELS = [*HUGGINGFACE, "plain", "positional"]


def batch(
    size: int = BATCH, tokens: int = TOKENS, seed: int = 1, *, marked: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels; the samples count different numbers of labels, the last one none.

    marked: Dynamo is told that their number varies, so a model in memory is traced once.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCAB, (size, tokens), generator=generator)
    labels = ids.clone()
    for sample in range(size):
        labels[sample, : sample * 3 % tokens] = -100
    if size > 1:
        labels[-1] = -100
    for tensor in (ids, labels) if marked else ():
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return ids, labels


def compile_model(
    model: nn.Module, micro_batch_size: int = 1, *, compiler: str = "eager", snake: bool = True, **options
):
    """`model`, which now runs on greedysnake."""
    expert = {"compiler": compiler, "snake": snake}
    model.compile(backend=greedysnake, options={"micro_batch_size": micro_batch_size, "expert": expert, **options})
    return model


def loss_of(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if isinstance(model, PreTrainedModel):
        return model(input_ids=ids, labels=labels).loss
    output = model(ids, labels)
    return output[1] if isinstance(output, tuple) else output


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def train(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of one call and the gradients of its backward."""
    loss = loss_of(model, ids, labels)
    loss.backward()
    return loss.detach(), gradients(model)


def micro_batches(ids: torch.Tensor, labels: torch.Tensor, size: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """(ids, labels, share of the batch's loss) of each micro-batch, for labels shifted by one inside the model."""
    counted = (labels[:, 1:] != -100).sum()
    for own_ids, own_labels in zip(ids.split(size), labels.split(size), strict=True):
        yield own_ids, own_labels, (own_labels[:, 1:] != -100).sum() / counted


def accumulate(
    model: nn.Module, ids: torch.Tensor, labels: torch.Tensor, size: int, before: Callable[[int], None] | None = None
):
    """The gradients of plain gradient accumulation over micro-batches of `size`, summed in fp32.

    `before` is called with the number of each micro-batch.
    """
    total: dict[str, torch.Tensor] = {}
    for number, (own_ids, own_labels, share) in enumerate(micro_batches(ids, labels, size)):
        if not share:
            continue  # no label counts: nothing to add, and the mean over none is not a number
        if before:
            before(number)
        model.zero_grad()
        (loss_of(model, own_ids, own_labels) * share).backward()
        for name, gradient in gradients(model).items():
            total[name] = total.get(name, 0) + gradient.float()
    return total


def errors(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """The relative error of each gradient in the 2-norm; where nothing is wanted, the norm of what was found."""
    assert found.keys() == wanted.keys()
    norms = {name: wanted[name].float().norm().item() for name in wanted}
    return {
        name: (found[name].float() - wanted[name].float()).norm().item() / (norm if norm > 1e-9 else 1.0)
        for name, norm in norms.items()
    }


def assert_same_gradients(
    found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float = 1e-5
) -> None:
    assert wanted, "nothing to compare"
    assert {name: error for name, error in errors(found, wanted).items() if not error <= tolerance} == {}


def both_ways(
    model: nn.Module, use: Callable[[nn.Module], object], micro_batch_size: int = 2, tolerance: float = 1e-5, **options
) -> None:
    """`use(model)`, and the gradients it leaves, on plain PyTorch and on greedysnake."""
    reference = copy.deepcopy(model)
    expected = use(reference)
    value = use(compile_model(model, micro_batch_size, **options))
    if expected is not None:
        torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance)
    assert_same_gradients(gradients(model), gradients(reference), tolerance)


def scaled(model: nn.Module) -> None:
    """A step of the plain model, its loss scaled as for gradient accumulation."""
    (model(*batch(4))[1] / 3).backward()
