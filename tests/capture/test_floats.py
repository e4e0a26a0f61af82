"""Python floats that change from call to call: one capture serves all, and what has to be a number is guarded."""

import copy
from collections import defaultdict

import pytest
import torch
import zoo
from torch import nn
from torch._dynamo import config as dynamo_config
from torch.nn import functional
from zoo import GPT, VOCAB, WIDTH, assert_same_gradients, batch, compile_model, train

import gs_compile
from gs_compile.capture.frame_settings import set_from_the_start
from gs_compile.codegen.compiled import compilations_of
from gs_compile.errors import GraphBreakError, ReleasedParameterError, UncapturedWarning


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), 1.0

    def forward(self, x):
        return x + self.linear(x).tanh() * self.scale


class Annealed(GPT):
    """Its `beta` is used in every way in which a tensor may take a number's place."""

    beta = 1.0

    def __init__(self):
        super().__init__(Scaled, num_layers=2)

    def forward(self, ids, labels):
        logits, loss = super().forward(ids, labels)
        beta, narrow = self.beta, logits.bfloat16()
        logits = logits / beta - beta + (beta * narrow + beta).float() + (logits.double() * (2 / beta)).float()
        return loss * (1 - beta) + beta * functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def learned(model, value):
    model.zero_grad()
    model.beta = value
    for block in model.blocks:
        block.scale = value / 3
    return train(model, *batch(4))


def test_one_capture_computes_what_one_for_each_number_would():
    expected = []
    for value in (values := (1.0, 0.7, 1 / 3)):
        torch._dynamo.reset()
        expected.append(learned(compile_model(Annealed(), 2), value))
    torch._dynamo.reset()
    model = compile_model(Annealed(), 2)
    for value, (loss, gradients) in zip(values, expected, strict=True):
        found, of_parameters = learned(model, value)
        assert torch.equal(found, loss)
        assert all(torch.equal(of_parameters[name], each) for name, each in gradients.items())
    assert len(compilations_of[next(model.parameters())]) == 2  # of the first number, and of all others


class Dropped(nn.Module):
    """A probability has to be a number."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.ModuleList(Scaled() for _ in range(2))

    def forward(self, ids, p):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(functional.dropout(x, p)).flatten(0, 1), ids.flatten())


class Reversed(torch.autograd.Function):
    """Reverses a gradient, as adversarial training of domains does."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.factor * gradient, None


class Adversarial(Dropped):
    def forward(self, ids, factor):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        x = Reversed.apply(x, factor)
        return functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo itself makes one
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_a_number_that_a_backward_reads_is_guarded(kind):
    """Fault: a second one was refused as a size that depends on values. As a tensor it is captured once."""
    torch._dynamo.reset()
    model = Adversarial()
    plain = copy.deepcopy(model)
    compile_model(model, 2)
    for factor in (0.1, 0.2, 0.4):
        for each in (model, plain):
            each.zero_grad()
            each(batch(4)[0], kind(factor)).backward()
        assert_same_gradients(zoo.gradients(model), zoo.gradients(plain))
    assert len(compilations_of[model.head.weight]) == (3 if kind is float else 1)


class Tally:
    def __init__(self):
        self.calls = 0


class Counted(Scaled):
    """In an attribute, and in what others hold."""

    def __init__(self):
        super().__init__()
        self.calls, self.seen, self.both = 0, {"all, so far": 0, "no": 0.5}, [Tally(), 0]
        self.kinds = defaultdict(int, some=0)

    def forward(self, x):
        self.calls += 1
        self.seen["all, so far"] += 1
        self.both[0].calls += 1
        self.both[1] += 2
        self.kinds["some"] += 1
        return super().forward(x) * (1.0 if self.seen["all, so far"] < 100 else 2.0)


class Counting(Dropped):
    """How often it was called decides what it computes."""

    def __init__(self):
        super().__init__()
        self.calls, self.kind = 0, 1
        self.blocks = nn.ModuleList(Counted() for _ in range(2))

    def forward(self, ids):
        self.calls += 1
        self.kind = 1
        return super().forward(ids, 0.0) * (2 if self.calls % 3 == 0 else 1 / self.calls)


def test_a_number_that_a_forward_counts_is_a_symbol():
    """Fault: each step was traced anew, and the ninth, beyond Dynamo's limit, ran without this backend."""
    torch._dynamo.reset()
    set_from_the_start()
    model = Counting()
    plain = copy.deepcopy(model)
    compile_model(model, 2)
    for number in range(5):
        torch.testing.assert_close(model(batch(4)[0]), plain(batch(4)[0]))
        for each in (model, model.blocks[0]):
            assert type(each.calls) is int  # what is another type's would be captured anew
            assert each.calls == number + 1
        of_block = model.blocks[0]
        counts = of_block.seen["all, so far"], of_block.both[0].calls, of_block.both[1] // 2, of_block.kinds["some"]
        assert counts == (number + 1,) * 4
        assert set(map(type, counts)) == {int}
    assert len(compilations_of[model.head.weight]) == 2


class Scheduled(Dropped):
    epoch = 0

    def forward(self, ids):
        return super().forward(ids, 0.0) * (2 if self.epoch > 4 else 1 / (1 + self.epoch))


def test_a_number_that_a_script_counts_in_a_module_is_a_symbol_once_it_has_changed(tmp_path):
    """Fault: each epoch was traced anew, and a run ended at its ninth, beyond Dynamo's limit."""
    torch._dynamo.reset()
    set_from_the_start()
    model, plain = Scheduled(), Scheduled()
    plain.load_state_dict(model.state_dict())
    optimizers = [make(each.parameters(), lr=0.1) for each, make in ((model, gs_compile.SGD), (plain, torch.optim.SGD))]
    compile_model(model, 2, storage=str(tmp_path), host_memory="64MiB")
    for epoch in range(8):
        model.epoch = plain.epoch = epoch
        losses = [each(batch(4)[0]) for each in (model, plain)]
        torch.testing.assert_close(*losses)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(compilations_of[model.head.weight]) == 3  # of the first, of those up to the fourth, and of the rest
    optimizers[0].engine.tiers.close()


class Noting(Dropped):
    def __init__(self):
        super().__init__()
        self.noted = {}

    def forward(self, ids):
        self.noted["twice"] = 2 * ids
        return super().forward(ids, 0.0)


def test_an_entry_is_stored_in_a_dict_that_the_forward_has_not_read():
    """Fault: an internal error of Dynamo, as of open_clip's loss, which keeps its labels."""
    torch._dynamo.reset()
    set_from_the_start()
    compile_model(model := Noting(), 2)
    ids = batch(4)[0]
    model(ids).backward()
    assert torch.equal(model.noted["twice"], 2 * ids)


def test_what_is_captured_for_each_number_says_so_beyond_dynamos_limit(tmp_path):
    """Also where the model then trains as plain PyTorch does; up to the limit nothing is said."""
    words = r"2 times, which is its limit.* did not hold any more: .*0\.2"
    for make in (gs_compile.SGD, torch.optim.SGD):
        torch._dynamo.reset()
        model = Dropped()
        optimizer = make(model.parameters(), lr=0.1)
        compile_model(model, 2, storage=str(tmp_path), host_memory="64MiB")
        with dynamo_config.patch(recompile_limit=2, fail_on_recompile_limit_hit=False):
            for p in (0.1, 0.2):
                model(batch(4)[0], p).backward()
                optimizer.step()
                optimizer.zero_grad()
            if make is gs_compile.SGD:
                with pytest.raises(ReleasedParameterError, match=words):
                    model(batch(4)[0], 0.3).backward()
                continue
            model(batch(4)[0], 0.3).backward()
            with pytest.warns(UncapturedWarning, match=words):
                optimizer.step()
            optimizer.step()


class Told(GPT):
    """Returns and keeps numbers of what it computes, as metrics beside its loss."""

    def forward(self, ids, labels):
        logits, loss = super().forward(ids, labels)
        self.latest = loss.item()
        right = (logits.argmax(-1) == labels).sum()
        self.converted = float(right), int(loss), float(right.item()), float(loss.item()), int(right)
        return {"numbers": [right.item(), {"mean": logits.mean().item()}], "loss": loss + 0.0}


@pytest.mark.parametrize("outputs", ["all", "loss"])
def test_numbers_that_a_forward_only_returns_or_stores_are_read_after_the_graph(outputs):
    """A loop logs them. Fault: the forward was refused, for its `item`."""
    model, plain = compile_model(Told(), 2, outputs=outputs), Told()
    for size in (5, 4):
        found, expected = (each(*batch(size)) for each in (model, plain))
        for result in (found, expected):
            result["loss"].backward()
        right, others = found["numbers"]
        assert (right, type(right)) == (expected["numbers"][0], int)
        assert others == pytest.approx(expected["numbers"][1], abs=1e-6)
        assert model.latest == pytest.approx(plain.latest, abs=1e-6)
        assert model.converted == pytest.approx(plain.converted, abs=1e-6)
        assert list(map(type, model.converted)) == [float, int, float, float, int]
        assert model.latest == pytest.approx(found["loss"].item(), abs=1e-6)
    assert_same_gradients(zoo.gradients(model), zoo.gradients(plain))
    assert len(compilations_of[next(model.parameters())]) == 1


COMPUTED = {
    "as a factor": lambda x, number: x * number,
    "in a condition": lambda x, number: 2 * x if number else x,
    "compared": lambda x, number: 2 * x if number > 0 else x,
    "compared with a constant": lambda x, number: 2 * x if number == 7 else x,
    "found in a list": lambda x, number: 2 * x if number in (0, 1) else x,
    "as a size": lambda x, number: torch.cat([x] * number),
    "as an index": lambda x, number: x[number:],
    "counted": lambda x, number: sum((x for _ in range(number)), x),
    "converted": lambda x, number: x * int(number),
    "converted to another type": lambda x, number: x * float(number),
    "compared on the right": lambda x, number: 2 * x if x.dim() < number else x,
    "divided": lambda x, number: x + 1 / number,
}


class Reads(GPT):
    def forward(self, ids, use):
        return super().forward(use(ids, (ids > 3).sum().item()), None)[0]


@pytest.mark.parametrize("use", COMPUTED)
def test_what_computes_with_a_number_of_a_tensor_is_refused(use):
    model = compile_model(Reads(), 2)
    with pytest.raises(GraphBreakError, match="is not one graph: Dynamo breaks it at"):
        model(batch(4)[0], COMPUTED[use])
