"""kept: what the user has commits keep, beside the model and its optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gs_compile.errors import OptimizerError
from gs_compile.model.loaded_state import settings_of
from gs_compile.runtime.manifest import check_plain


@dataclass
class Kept:
    """states: objects with `state_dict` and `load_state_dict`, such as schedulers; user: whatever JSON can hold.

    storage: the directories of the run that is to go on, where somebody has named them; step: of its commit there,
        0: none was found.
    """

    states: dict[str, Any] = field(default_factory=dict)
    user: Any = None
    storage: Sequence[Path] = ()
    step: int | None = None

    def snapshot(self, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Copies of both, and of the optimizer's param groups, as they are now, by the names that a manifest has.

        Raises OptimizerError for what no JSON can hold.
        """
        states = {name: each.state_dict() for name, each in self.states.items()}
        found = {"states": states, "user": self.user, "groups": tuple(map(settings_of, groups))}
        try:
            for name, each in found.items():
                check_plain(each, name)
        except ValueError as error:
            raise OptimizerError(f"a commit cannot keep this: {error}") from None
        return deepcopy(found)
