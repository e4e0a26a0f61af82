"""torch_models: the stacks of torch.nn, between an embedding and a head."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from benchmarks.zoo.case import HEADS, LAYERS, TOKENS, VOCABULARY, WIDTH, Case, Example, language

Stack = Callable[[nn.Module, Tensor], Tensor]


class Language(nn.Module):
    """A stack between an embedding and a head; `call` says how it is called."""

    def __init__(self, stack: nn.Module, call: Stack) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.stack, self.call = stack, call
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden_BTD = self.embedding(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.call(self.stack, hidden_BTD)))


def causal(stack: nn.Module, hidden_BTD: Tensor) -> Tensor:
    """An encoder that looks back alone."""
    mask = nn.Transformer.generate_square_subsequent_mask(hidden_BTD.shape[1])
    return stack(hidden_BTD, mask=mask, is_causal=True)


def both_ways(stack: nn.Module, hidden_BTD: Tensor) -> Tensor:
    """An encoder without a mask."""
    return stack(hidden_BTD)


def with_memory(stack: nn.Module, hidden_BTD: Tensor) -> Tensor:
    """A decoder that reads normalised embeddings beside."""
    return stack(hidden_BTD, functional.normalize(hidden_BTD, dim=-1))


def reversed_source(stack: nn.Module, hidden_BTD: Tensor) -> Tensor:
    """An encoder-decoder whose source is the reversed target."""
    return stack(hidden_BTD.flip(1), hidden_BTD)


def encoder(norm_first: bool) -> nn.Module:
    """torch's encoder, with norms ahead of branches or behind."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, 0.0, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)


def decoder() -> nn.Module:
    """torch's decoder."""
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, 48, 0.0, batch_first=True), LAYERS)


def whole() -> nn.Module:
    """torch's encoder and decoder in one."""
    return nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, 48, 0.0, batch_first=True)


def case(name: str, build: Callable[[], nn.Module], call: Stack, num_blocks: int = LAYERS) -> Case:
    """A language model around a stack."""
    return Case("torch", name, lambda: Example(Language(build(), call), language), num_blocks)


CASES = [
    case("nn.TransformerEncoder", lambda: encoder(norm_first=False), both_ways),
    case("nn.TransformerEncoder, norm_first, causal", lambda: encoder(norm_first=True), causal),
    case("nn.TransformerDecoder", decoder, with_memory),
    case("nn.Transformer", whole, reversed_source, 2 * LAYERS),
    case(
        "nn.Sequential of nn.TransformerEncoderLayer",
        lambda: nn.Sequential(
            *(nn.TransformerEncoderLayer(WIDTH, HEADS, 48, 0.0, batch_first=True) for _ in range(LAYERS))
        ),
        both_ways,
    ),
    case("nn.LSTM of 3 layers", lambda: nn.LSTM(WIDTH, WIDTH, LAYERS, batch_first=True), lambda s, x: s(x)[0]),
]
