"""Lightning's Trainer runs its own loop on the tiers, and learns what it does with torch's optimizer."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tiered import gpt2, options, tokens
from torch.utils.data import DataLoader

import gs_compile
from gs_compile.errors import ReleasedParameterError

lightning = pytest.importorskip("pytorch_lightning")
ModelCheckpoint = lightning.callbacks.ModelCheckpoint
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:pytorch_lightning", "ignore::FutureWarning", "ignore:.*LeafSpec.*:DeprecationWarning"
)


class Module(lightning.LightningModule):
    """As Lightning's users write one; make: its optimizer; given: options of greedysnake, None: plain PyTorch."""

    def __init__(self, make, given=None):
        super().__init__()
        self.model, self.make, self.losses = gpt2(), make, []
        if given is not None:
            self.model.compile(backend="greedysnake", options=given)

    def training_step(self, batch, number):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.detach())
        return loss

    def close(self):
        self.optimizers().optimizer.engine.tiers.close()

    def configure_optimizers(self):
        optimizer = self.make(self.parameters(), lr=1e-3, eps=1e-4)  # a gradient that is rounding alone stays so
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}


def fit(module, folder, *, resume=None, epochs=2, **settings):
    torch._dynamo.reset()
    data = DataLoader([tokens(number, 1)[0] for number in range(16)], batch_size=4)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", default_root_dir=folder, **quiet, **settings)
    trainer.fit(module, data, ckpt_path=resume)
    return trainer


class Logging(Module):
    def training_step(self, batch, number):
        output = self.model(input_ids=batch, labels=batch)
        self.log("loss", output.loss, prog_bar=True)
        self.log_dict({"scale": output.logits.detach().square().mean(), "number": number})
        return output.loss


def test_a_step_that_is_compiled_whole_logs_after_its_graph(tmp_path):
    """Fault: Dynamo failed in the code of `log`, which looks at the signature of the step."""
    plain, mine = Logging(torch.optim.AdamW), Logging(gs_compile.AdamW)
    compiled = torch.compile(mine, backend="greedysnake", options=options(tmp_path, alpha=1.0))
    found, wanted = (fit(each, tmp_path, epochs=1, enable_checkpointing=False) for each in (compiled, plain))
    assert mine.optimizers().optimizer.num_steps == 4
    torch.testing.assert_close(found.callback_metrics, wanted.callback_metrics, rtol=1e-5, atol=0)
    mine.close()


def learned(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(("num_batches", "bound"), [pytest.param(1, None, marks=pytest.mark.slow), (2, 0.5)])
def test_it_learns_what_torchs_optimizer_does(tmp_path, num_batches, bound):
    """With several backwards a step, and with clipping, which Lightning leaves to the optimizer."""
    common = {"accumulate_grad_batches": num_batches, "enable_checkpointing": False}
    plain = Module(torch.optim.AdamW)
    fit(plain, tmp_path, gradient_clip_val=bound, **common)
    mine = Module(partial(gs_compile.AdamW, max_grad_norm=bound), options(tmp_path / "storage", alpha=1.0))
    fit(mine, tmp_path, **common)
    torch.testing.assert_close(mine.losses, plain.losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(learned(mine), learned(plain), rtol=0, atol=2e-6)
    mine.close()


def test_fabric(tmp_path):
    """It hooks all outputs of a model, logits as well as the loss that the model computes of them."""
    fabric = pytest.importorskip("lightning_fabric").Fabric(accelerator="cpu", devices=1)
    losses = []
    for kind, given in ((torch.optim.AdamW, None), (gs_compile.AdamW, options(tmp_path, outputs="all"))):
        torch._dynamo.reset()
        model = gpt2()
        if given is not None:
            model.compile(backend="greedysnake", options=given)
        model, optimizer = fabric.setup(model, kind(model.parameters(), lr=1e-3, eps=1e-4))
        losses.append([])
        for number in range(3):
            loss = model(input_ids=tokens(number), labels=tokens(number)).loss
            fabric.backward(loss)
            optimizer.step(), optimizer.zero_grad()
            losses[-1].append(loss.detach())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
    optimizer.engine.tiers.close()


def test_a_checkpoint_of_lightnings_goes_on(tmp_path):
    whole = Module(gs_compile.AdamW, options(tmp_path / "whole"))
    fit(whole, tmp_path, callbacks=[ModelCheckpoint(tmp_path, save_top_k=-1)])
    rest = Module(gs_compile.AdamW, options(tmp_path / "rest"))
    fit(rest, tmp_path, resume=tmp_path / "epoch=0-step=4.ckpt")
    torch.testing.assert_close(rest.losses, whole.losses[4:], rtol=0, atol=0)
    torch.testing.assert_close(learned(rest), learned(whole), rtol=0, atol=0)
    for each in (whole, rest):
        each.close()


class Unfreezing(lightning.callbacks.BaseFinetuning):
    """The first block is trained from the second epoch on; all parameters are in the optimizer from the beginning."""

    def freeze_before_training(self, module):
        self.freeze(module.model.transformer.h[0])

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.make_trainable(module.model.transformer.h[0])


@pytest.mark.filterwarnings("ignore::gs_compile.errors.UniformityWarning")  # blocks, one of them frozen
def test_its_callback_that_unfreezes_a_block(tmp_path):
    plain, mine = Module(torch.optim.AdamW), Module(gs_compile.AdamW, options(tmp_path / "storage"))
    for module in (plain, mine):
        fit(module, tmp_path, callbacks=[Unfreezing()], enable_checkpointing=False)
    torch.testing.assert_close(mine.losses, plain.losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(learned(mine), learned(plain), rtol=0, atol=2e-6)
    first = gpt2().transformer.h[0].up.weight
    assert not torch.equal(mine.model.transformer.h[0].up.weight.detach(), first)
    mine.close()


def test_its_own_clipping_is_refused(tmp_path):
    """Within a step: Lightning then sends the model to the CPU, gradients too, which must not hide what was wrong."""
    module = Module(gs_compile.AdamW, options(tmp_path / "storage"))
    with pytest.raises(
        ReleasedParameterError,
        match=r"^p\.grad was used \(linalg_vector_norm\).* Use max_grad_norm= of the gs_compile optimizer",
    ):
        fit(module, tmp_path, gradient_clip_val=0.5)
    module.close()
