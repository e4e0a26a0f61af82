"""What a checkpoint was encoded to is read by the next run, and never where it is of something else or cut short."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from packed_checkpoints import GPTQ, saved
from transformers import AutoConfig, AutoModelForCausalLM
from zoo import small

import gs_compile
from gs_compile.errors import OptionError
from gs_compile.hf import encoded
from gs_compile.hf.encoded import FOLDER, INDEX, UNFINISHED, EncodedFolder
from gs_compile.hf.weights import _kept
from gs_compile.runtime.codecs import FourBits, Int8

MATRICES = 14  # of two layers


@pytest.fixture
def encodings(monkeypatch):
    """The shapes of what is encoded."""
    found = []
    for codec in (FourBits, Int8):

        def counted(own, values, quantized=codec.quantized):
            found.append(tuple(values.shape))
            return quantized(own, values)

        monkeypatch.setattr(codec, "quantized", counted)
    return found


@pytest.fixture
def source(tmp_path):
    small("llama").bfloat16().save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def read(source, **given):
    storage = source.parent / "storage"
    model = gs_compile.from_pretrained(
        AutoModelForCausalLM, source, storage=storage, **{"frozen": "nf4", "dtype": "bfloat16", **given}
    )
    return {name: each.detach().clone() for name, each in model.named_parameters()}, model


def folders(source):
    return sorted((source.parent / "storage" / FOLDER).iterdir())


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_a_second_run_encodes_nothing(source, encodings):
    first, _ = read(source)
    assert len(encodings) == MATRICES
    second, model = read(source)
    assert len(encodings) == MATRICES
    assert same(first, second)
    with pytest.warns(RuntimeWarning, match="quantized to nf4"), torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.zero_()
    third, _ = read(source)
    assert same(first, third)  # what a model is changed to is its own
    assert len(folders(source)) == 1
    assert folders(source)[0].stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("given", [{"frozen": "int8"}, {"dtype": "float32"}, {"frozen_skip": ["down_proj"]}], ids=str)
def test_of_something_else_it_is_not_taken(source, given, encodings):
    read(source)
    read(source, **given)
    skipped = 2 * ("frozen_skip" in given)
    assert len(encodings) == 2 * MATRICES - skipped
    read(source, **given)
    assert len(encodings) == 2 * MATRICES - skipped


def test_of_a_source_that_has_changed_it_is_not_taken(source, encodings):
    read(source)
    other = small("llama").bfloat16()
    other.model.layers[0].mlp.up_proj.weight.data.neg_()
    other.save_pretrained(source)
    found, _ = read(source)
    assert len(encodings) == 2 * MATRICES
    shutil.rmtree(source.parent / "storage" / FOLDER)
    assert same(found, read(source)[0])


def test_what_is_cut_short_is_not_taken(source, encodings):
    first, _ = read(source)
    (folder,) = folders(source)
    path = max(folder.glob("*.weight"))
    os.truncate(path, path.stat().st_size - 1)
    assert same(first, read(source)[0])
    assert len(encodings) == 2 * MATRICES
    (folder,) = folders(source)
    (folder / INDEX).unlink()
    assert same(first, read(source)[0])
    assert len(encodings) == 3 * MATRICES
    assert same(first, read(source)[0])
    assert len(encodings) == 3 * MATRICES


def test_of_a_run_that_fails_nothing_stays(source, encodings, monkeypatch):
    """Of one that is killed the next one removes it."""
    quantized = FourBits.quantized

    def fails(own, values):
        if len(encodings) == 5:
            raise OSError("no more")
        return quantized(own, values)

    with monkeypatch.context() as patched:
        patched.setattr(FourBits, "quantized", fails)
        with pytest.raises(RuntimeError):
            read(source)
    assert folders(source) == []
    killed = source.parent / "storage" / FOLDER / f"{UNFINISHED}killed"
    killed.mkdir()
    encodings.clear()
    read(source)
    assert len(encodings) == MATRICES
    assert killed not in folders(source)
    assert len(folders(source)) == 1


def test_a_packed_checkpoint_is_not_decoded_either(tmp_path, encodings, monkeypatch):
    saved(GPTQ, tmp_path / "saved")
    first, _ = read(tmp_path / "saved")
    number = len(encodings)
    monkeypatch.setattr(gs_compile.hf.packed.Packed, "decode", lambda *_: pytest.fail("it is decoded"))
    second, _ = read(tmp_path / "saved")
    assert same(first, second)
    assert len(encodings) == number


def test_with_a_config_that_is_given_nothing_is_kept(source, encodings):
    for _ in range(2):
        read(source, config=AutoConfig.from_pretrained(source))
    assert len(encodings) == 2 * MATRICES
    assert not (source.parent / "storage" / FOLDER).exists()


def test_nothing_is_kept_where_that_is_asked_for(source, encodings):
    first, _ = read(source, keep_encoded=False)
    second, _ = read(source, keep_encoded=False)
    assert len(encodings) == 2 * MATRICES
    assert same(first, second)
    assert not (source.parent / "storage" / FOLDER).exists()


def test_it_is_kept_in_the_directory_that_is_given(source, encodings, monkeypatch):
    monkeypatch.setenv("OTHER", str(source.parent / "other"))
    for given in ("$OTHER/drive", source.parent / "other" / "drive"):
        read(source, keep_encoded=given)
    assert len(encodings) == MATRICES
    assert not (source.parent / "storage" / FOLDER).exists()
    assert len(list((source.parent / "other" / "drive" / FOLDER).iterdir())) == 1


@pytest.mark.parametrize("number", [1, 6, MATRICES + 1], ids=["the first", "a later one", "the index"])
def test_a_full_drive_keeps_nothing_and_the_run_goes_on(source, encodings, monkeypatch, caplog, number):
    synced, fsync = [], os.fsync

    def is_full(fd):
        synced.append(fd)
        if len(synced) >= number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(fd)

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "gs_compile.hf.encoded"):
        patched.setattr(encoded.os, "fsync", is_full)
        first, _ = read(source)
    (said,) = [each.getMessage() for each in caplog.records]
    assert "not kept for the next run" in said
    assert "No space left on device" in said
    assert len(synced) == number
    assert folders(source) == []
    assert same(first, read(source)[0])
    assert len(encodings) == 2 * MATRICES


def test_a_directory_by_a_variable_that_is_not_set_is_refused(tmp_path):
    """As one of `storage` is. It was made under the name of the variable."""
    with pytest.raises(OptionError, match=r"keep_encoded cannot be .*: no environment variable of that name is set"):
        _kept("$NO_SUCH_VARIABLE/kept", tmp_path, None)


def test_a_directory_that_refuses_it_is_a_warning(source, encodings, caplog):
    (source.parent / "file").write_text("no directory")
    with caplog.at_level(logging.WARNING, "gs_compile.hf.encoded"):
        read(source, keep_encoded=source.parent / "file")
    assert "Not a directory" in caplog.text
    assert len(encodings) == MATRICES


def test_a_wait_for_the_lock_that_is_interrupted_leaves_no_file_open(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(encoded.fcntl, "flock", interrupt)
    before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(KeyboardInterrupt), EncodedFolder(tmp_path, {"of": "nothing"}):
        pass
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def test_of_several_that_make_one_the_first_is_kept(tmp_path):
    """Each with a lock of its own, as processes have."""
    matrix, makers, errors = torch.arange(256, dtype=torch.uint8), 8, []
    barrier = threading.Barrier(makers)

    def make():
        try:
            barrier.wait()
            with EncodedFolder(tmp_path, {"source": "one"}) as kept:
                found = kept.find("matrix")
                assert torch.equal(kept.put("matrix", matrix) if found is None else found, matrix)
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    for _ in range(10):
        threads = [threading.Thread(target=make) for _ in range(makers)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert errors == []
        (folder,) = (tmp_path / FOLDER).iterdir()
        assert torch.equal(EncodedFolder(tmp_path, {"source": "one"}).find("matrix"), matrix)
        (folder / INDEX).unlink()  # somebody cuts it
