"""The end of a run whose commit is still under way: that names nothing that the end removes."""

from __future__ import annotations

import threading
from dataclasses import replace

from test_directories import holds_values, left

from gs_compile.errors import StorageError
from gs_compile.runtime.storage import system
from gs_compile.runtime.storage.store import Store


def test_the_end_of_a_run_removes_nothing_that_a_commit_is_about_to_name(tmp_path, monkeypatch):
    """A second SIGINT ends the wait for the thread that commits: that goes on in the middle of the removal here."""
    left(tmp_path, "one")
    store = Store([tmp_path / "one"], durable=True, resume=())
    new = {part.value: store.allocate(f"{part.value}.0", part.nbytes) for part in store.former.parts}
    made = replace(store.former, step=4, parts=tuple(each.stored(name) for name, each in new.items()))
    is_begun, is_removed, errors, unlink = threading.Event(), threading.Event(), [], system.unlink

    def make():
        is_begun.set()
        assert is_removed.wait(60)
        return made

    def commit():
        try:
            store.commit([*new.values()], make)
        except StorageError as error:
            errors.append(str(error))

    def remove(name, folder_fd):
        unlink(name, folder_fd)
        is_removed.set()
        committing.join(0.2)

    committing = threading.Thread(target=commit)
    committing.start()
    assert is_begun.wait(60)
    with monkeypatch.context() as patched:
        patched.setattr(system, "unlink", remove)
        store.close()
    committing.join()
    assert "the commit of step 4 came after the end of its run" in errors[0]
    with Store([tmp_path / "one"], durable=True, resume=()) as again:
        assert again.former.step == 3
        assert holds_values(again)
