"""What a model checks of values is made as it runs: in the prologue, in a block, behind it, and of what it returns."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import zoo
from captured import captured
from careful import NUM_WORDS, Careful
from learner import distance
from tiered import options
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import TorchInGraphFunctionVariable

import gs_compile
from gs_compile.capture import tracing
from gs_compile.capture.frame_settings import set_from_the_start
from gs_compile.errors import CheckError

WHERE = (
    "of inputs",
    "of a count",
    "by a branch",
    "by a branch that is not taken",
    "by one of two",
    "by the last branch",
    "ahead of blocks",
    "in a block",
    "behind a block",
    "of what is returned",
    "of the loss",
)


EAGER = {"expert": {"compiler": "eager"}}
COUNTED = ("of a count", "of the loss")  # what a batch of one micro-batch computes otherwise


@pytest.mark.parametrize(
    ("where", "micro_batch_size"),
    [
        *((where, 2) for where in WHERE),
        *(pytest.param(where, 4, marks=[pytest.mark.slow] * (where not in COUNTED)) for where in WHERE),
    ],
)
def test_a_check_of_values_is_made_as_the_model_runs(tmp_path, where, micro_batch_size):
    torch.manual_seed(0)
    model = Careful(where)
    plain = copy.deepcopy(model)
    optimizer, theirs = gs_compile.SGD(model.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    model.compile(backend="greedysnake", options=options(tmp_path, micro_batch_size=micro_batch_size))
    ids = torch.randint(0, NUM_WORDS, (4, 7))
    good, bad = torch.ones(4), torch.tensor([1.0, 1.0, 1.0, 1e6])
    for scale in (good, bad, good):
        for each, update in ((model, optimizer), (plain, theirs)):
            if scale is bad:
                with pytest.raises((CheckError, AssertionError, ValueError, RuntimeError)) as refused:
                    each(ids, scale)
                assert each is plain or isinstance(refused.value, CheckError)
                assert each is plain or "careful.py" in str(refused.value)
            else:
                each(ids, scale).backward()
                update.step()
                update.zero_grad()
    assert distance(dict(model.state_dict()), dict(plain.state_dict())) < 1e-6
    optimizer.engine.tiers.close()


def test_the_words_of_a_check_and_the_share_of_the_batch_are_in_its_error():
    model = Careful("ahead of blocks")
    ids, scale = torch.zeros((4, 7), dtype=torch.int64), torch.full((4,), 1e9)
    for size, words in ((2, r"for a micro-batch \(too big\), at .*: assert .*whole batch alone"), (4, "for the batch")):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="greedysnake", options={**EAGER, "micro_batch_size": size})
        with pytest.raises(CheckError, match=words):
            compiled(ids, scale)


def test_dynamo_is_as_it_was_when_the_frame_is_compiled():
    handlers = TorchInGraphFunctionVariable._get_handlers()

    def found():
        kinds = tracing._translators(InstructionTranslatorBase)
        tables = [kind.dispatch_table[opcode] for kind in kinds for opcode in tracing._INSTRUCTIONS]
        calls = [getattr(kind, method) for kind, method, _ in tracing._METHODS]
        return [handlers[torch._check_tensor_all], handlers[torch._check_tensor_all_with], *tables, *calls]

    before = found()
    compiled = torch.compile(Careful("of inputs"), backend="greedysnake", options={**EAGER, "micro_batch_size": 2})
    compiled(torch.zeros((4, 7), dtype=torch.int64), torch.ones(4))
    assert found() == before


class Catches(nn.Module):
    """Does otherwise where a check fails, so that it is no check."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        try:
            if x.max() > 0:
                raise ValueError
        except ValueError:
            x = -x
        for block in self.blocks:
            x = x + block(x).relu()
        return x.square().mean()


def test_a_raise_that_is_caught_is_no_check():
    model, x = Catches(), torch.ones(4, 3, 8)
    set_from_the_start()
    compiled = torch.compile(model, backend="greedysnake", options={**EAGER, "micro_batch_size": 2})
    assert torch.equal(compiled(x), model(x))  # Dynamo gives the forward up


class Pictures(nn.Module):
    """Has the rows of a tensor as a list, as models have one image after the other."""

    def __init__(self, read) -> None:
        super().__init__()
        self.read = read
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        x = self.read(list(x)).view(-1, 3, 8)
        for block in self.blocks:
            x = x + block(x).relu()
        return x.square().mean((1, 2))


@pytest.mark.parametrize(
    ("read", "is_free"),
    [(torch.cat, True), (lambda rows: torch.cat(rows, dim=0), True), (lambda rows: torch.cat(rows[:], 0), False)],
    ids=["joined", "by name", "sliced"],
)
def test_a_list_of_rows_that_are_joined_keeps_the_batch_free(read, is_free):
    case = captured(Pictures(read), torch.randn(4, 3, 8))
    assert bool(case.captured.batch_symbols) == is_free


def test_a_forward_that_warns():
    """As transformers' EncoderDecoderModel does, of labels that are given."""

    class Warns(zoo.Block):
        def forward(self, x_BTD):
            warnings.warn("labels are shifted now", FutureWarning, stacklevel=2)
            return super().forward(x_BTD)

    set_from_the_start()
    zoo.train(zoo.compile_model(zoo.GPT(Warns)), *zoo.batch(marked=False))
    assert warnings.warn not in dynamo_config.ignore_logging_functions  # of other backends it is their matter


class Clamping(nn.Linear):
    def forward(self, x):
        if self.training:
            self.weight.data.clamp_(-1.5, 1.5)
        return x + super().forward(x).tanh()


def test_a_parameter_that_the_forward_clamps_in_place_is_within_the_bounds_or_refused():
    torch.manual_seed(0)
    parts = nn.Linear(3, 8), nn.ModuleList(Clamping(8, 8) for _ in range(2)), nn.Linear(8, 1)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.blocks, self.last = parts

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return self.last(x).square().mean()

    plain, x = Model(), torch.randn(4, 3)
    compiled = copy.deepcopy(plain)
    compiled.compile(backend="greedysnake", options={**EAGER, "micro_batch_size": 2})
    for each in (plain, compiled):
        each(x).backward()
    for (name, p), q in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, msg=name)
    compiled.blocks[1].weight.data[0, 0] = 1.6
    with pytest.raises(CheckError, match=r"clamps a parameter in place.*clamp it between steps"):
        compiled(x)
    compiled.eval()(x).backward()
