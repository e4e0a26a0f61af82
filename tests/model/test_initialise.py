"""A model built on storage: the values of ordinary construction bit for bit, and next to no memory."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny
from torch import nn
from transformers import AutoModelForCausalLM
from zoo import GPT, VOCAB, configuration

from gs_compile import SGD
from gs_compile.errors import InitialisationError, OptimizerError, StorageError, StorageFullError
from gs_compile.model import storage_init as initialise
from gs_compile.model.residency import is_offloaded
from gs_compile.model.storage_init import init_on_storage


@pytest.fixture
def all_to_files(monkeypatch):
    """Small tensors go to files too, and leave memory at once."""
    monkeypatch.setattr(initialise, "SMALL_NBYTES", 1)
    monkeypatch.setattr(initialise, "CACHE_NBYTES", 0)


def mapped_files(folder):
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same_bits(found, wanted):
    assert (found.dtype, found.shape, found.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
    assert torch.equal(bits(found), bits(wanted))


def assert_same_model(factory, folder):
    """Both ways from the same seed: the same names, values, ties and flags, and the same random state after."""
    torch.manual_seed(3)
    wanted = factory()
    drawn = torch.rand(4)
    torch.manual_seed(3)
    found = init_on_storage(factory, storage=folder)
    assert torch.equal(torch.rand(4), drawn)
    theirs = dict(wanted.named_parameters(remove_duplicate=False))
    ours = dict(found.named_parameters(remove_duplicate=False))
    assert list(ours) == list(theirs)
    for name, parameter in ours.items():
        assert is_offloaded(parameter), name
        assert parameter.requires_grad == theirs[name].requires_grad
        assert isinstance(parameter, nn.Parameter)
        assert parameter.untyped_storage().nbytes() == parameter.element_size()
        assert_same_bits(parameter.detach(), theirs[name])
        tied = [other for other in ours if ours[other] is parameter]
        assert tied == [other for other in theirs if theirs[other] is theirs[name]]
    buffers = dict(wanted.named_buffers())
    for name, buffer in found.named_buffers():
        assert_same_bits(buffer, buffers.pop(name))
        assert buffer.untyped_storage().filename is None
    assert not buffers
    assert not any(
        module.training != other.training for module, other in zip(found.modules(), wanted.modules(), strict=True)
    )
    return found


# What is built ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "opt", "qwen3", "bloom", "gpt_oss", "mamba"])
def test_transformers_models_are_the_same_bit_for_bit(name, tmp_path, all_to_files):
    assert_same_model(lambda: AutoModelForCausalLM.from_config(configuration(name)), tmp_path)


def test_a_model_of_low_precision_is_the_same(tmp_path, all_to_files):
    assert_same_model(lambda: AutoModelForCausalLM.from_config(configuration("llama"), dtype=torch.bfloat16), tmp_path)


def test_models_of_usual_thresholds_are_the_same(tmp_path):
    assert_same_model(lambda: nn.Sequential(GPT(tied=True), nn.Linear(256, 256), nn.LayerNorm(256)), tmp_path)


class Various(nn.Module):
    """Many ways to initial values."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8, padding_idx=2)
        self.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.recurrent = nn.LSTM(4, 4)
        self.halved = nn.Linear(5, 5).to(torch.float16)
        layer = nn.TransformerEncoderLayer(8, 2, 16)
        self.copied = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(7, 9), std=0.02))
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(9, 6), gain=2))
        self.scaled = nn.Parameter(torch.randn(5, 5) * 0.02)
        self.listed = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        self.frozen = nn.Parameter(torch.arange(5), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.transposed = nn.Parameter(torch.randn(3, 4).t())
        self.none = nn.Parameter(torch.ones(0, 3))
        both = torch.randn(2, 6)
        self.first, self.second = nn.Parameter(both[0]), nn.Parameter(both[1])
        mask = torch.ones(6, 6).tril()
        self.register_buffer("mask", mask)
        self.register_buffer("row", mask[3], persistent=False)
        self.plain = torch.linspace(0, 1, 6)
        self.parametrised = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        with torch.no_grad():
            self.scaled[1:3].mul_(self.listed.mean().item()).add_(self.truncated[0, :5])
            self.orthogonal.copy_(self.orthogonal / self.orthogonal.norm())
        self.scaled.data[0] = self.scaled.data.sum(0)
        self.listed.data = self.listed.data.clone() @ self.listed.data
        self.listed.data.numpy()[0] = 7.0
        self.read = self.listed.tolist(), str(self.listed)


def test_whatever_the_initialiser_does_is_the_same(tmp_path, all_to_files):
    found = assert_same_model(Various, tmp_path)
    torch.manual_seed(3)
    wanted = Various()
    assert found.read == wanted.read
    assert torch.equal(found.plain, wanted.plain)
    found.mask[3, 0] = 9
    assert found.row[0] == 9  # they share memory as they did


# Values are handed on --------------------------------------------------------------------------------------------------


def test_files_end_with_the_model_and_with_a_factory_that_fails(tmp_path, all_to_files):
    def fails():
        nn.Linear(8, 8)
        raise KeyError("not built")

    model = init_on_storage(GPT, storage=tmp_path)
    assert mapped_files(tmp_path)
    assert not list(tmp_path.iterdir())  # no name on disk, so nothing stays behind a killed run
    del model
    with pytest.raises(KeyError, match="not built"):
        init_on_storage(fails, storage=tmp_path)
    gc.collect()
    assert not mapped_files(tmp_path)


def test_the_directory_is_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    init_on_storage(lambda: nn.Linear(256, 256))
    assert (tmp_path / "greedysnake").stat().st_mode & 0o777 == 0o700


# What cannot be built --------------------------------------------------------------------------------------------------


def holding(**tensors):
    """A module with these parameters; what is no Parameter becomes a buffer."""
    module = nn.Module()
    for name, tensor in tensors.items():
        (module.register_parameter if isinstance(tensor, nn.Parameter) else module.register_buffer)(name, tensor)
    return module


def shared(with_a_buffer):
    base = torch.ones(9)
    if with_a_buffer:
        return holding(one=base, other=base[:2], weight=nn.Parameter(base[3:5]))
    return holding(one=nn.Parameter(base), weight=nn.Parameter(base[3:]))


def grown():
    weight = nn.Parameter(torch.ones(4))
    weight.data.resize_(100)
    return holding(weight=weight)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: nn.LazyLinear(4), "parameter weight has no shape yet"),
        (lambda: nn.Linear(2, 2, device="meta"), "parameter weight is on meta"),
        (lambda: holding(weight=nn.Parameter(torch.eye(4).to_sparse())), r"weight is a Parameter, torch\.sparse_coo"),
        (lambda: shared(with_a_buffer=False), "one and weight are two tensors in the same memory"),
        (lambda: shared(with_a_buffer=True), "one and weight are two tensors in the same memory"),
        (grown, r"resize_ of a tensor of shape \(4,\) to \(100,\)"),
    ],
)
def test_what_cannot_go_to_storage_is_named(factory, message, tmp_path, all_to_files):
    with pytest.raises(InitialisationError, match=message):
        init_on_storage(factory, storage=tmp_path)


def test_values_of_numpy_are_right_and_named(tmp_path, all_to_files):
    with pytest.warns(UserWarning, match=r"in memory until the model was built.*: weight$"):
        model = init_on_storage(
            lambda: holding(weight=nn.Parameter(torch.from_numpy(np.ones((2, 3))))), storage=tmp_path
        )
    assert torch.equal(model.weight.detach(), torch.ones(2, 3, dtype=torch.float64))


def test_a_model_that_is_only_read_runs_from_storage_with_an_optimizer_that_holds_it(tmp_path):
    torch.manual_seed(3)
    wanted, tokens = tiny(), torch.randint(VOCAB, (4, 8))
    model = init_on_storage(lambda: wanted.__class__(wanted.config), storage=tmp_path).eval().requires_grad_(False)
    model.load_state_dict(wanted.state_dict())
    model.compile(backend="greedysnake", options={"storage": tmp_path, "expert": {"compiler": "eager"}})
    with torch.no_grad(), pytest.raises(OptimizerError, match=r"only read, .* gs_compile.SGD\(model.parameters"):
        model(tokens)
    holder = SGD(model.parameters(), lr=0.0)
    with torch.no_grad():
        assert torch.allclose(model(tokens).logits, wanted.eval()(tokens).logits, atol=1e-6)
    assert holder.num_steps == 0


def test_a_full_disk_is_an_error_before_anything_is_written(tmp_path, monkeypatch, all_to_files):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageFullError, match=r"256 B are needed and [\d.]+ \wiB are free .*: make room") as caught:
        init_on_storage(lambda: nn.Linear(8, 8), storage=tmp_path)
    assert caught.value.errno == errno.ENOSPC


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"Not a directory; storage= has to be .*file/below"):
        init_on_storage(lambda: nn.Linear(2, 2), storage=tmp_path / "file" / "below")


def test_a_directory_that_cannot_be_written_is_named(tmp_path, all_to_files):
    missing = tmp_path / "missing"
    words = "creation of a file of 256 bytes failed: No such file or directory; another program has removed it"
    with pytest.raises(StorageError, match=words), initialise.NewTensorsInFiles(missing):
        nn.Linear(8, 8)
