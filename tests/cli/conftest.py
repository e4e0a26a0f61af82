"""A durable run in two directories."""

from __future__ import annotations

import pytest
from stored_run import save, stored_folders, stored_run

from gs_compile.runtime.storage.folder import LOCK, Folder


@pytest.fixture
def folders(tmp_path):
    return stored_folders(tmp_path, "one", "other")


@pytest.fixture
def commit(folders):
    commit = stored_run(*folders)
    for folder in reversed(folders):
        save(folder, commit)
    return commit


@pytest.fixture
def used(folders, commit):
    """The run is in use by a process of another number."""
    folder = Folder.take(folders[1])
    (folders[1] / LOCK).write_text("pid 1, started just now")
    yield
    folder.release()
