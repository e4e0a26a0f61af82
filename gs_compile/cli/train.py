"""train: the command ``greedysnake train``: a run from a file, with changes from the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gs_compile.errors import OptionError
from gs_compile.hf.recipe import Recipe, trainer_of

EXPONENT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")


def train(file: Path, changes: Sequence[str]) -> dict[str, Any] | None:
    """Train and save. Returns where, the number of steps and the last loss; None: another rank returns it.

    changes: such as ``args.max_steps=5``; they override the file.

    Raises OptionError for an invalid file or change, and the errors of `Recipe.of` and `trainer_of`.
    """
    given = _read(file)
    for change in changes:
        _apply(given, change)
    trainer = trainer_of(Recipe.of(given))
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    trainer.save_model()
    if not trainer.is_world_process_zero():
        return None
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "saved": trainer.args.output_dir,
        "steps": trainer.state.global_step,
        "loss": losses[-1] if losses else None,
    }


def _read(file: Path) -> dict[str, Any]:
    try:
        given = _parsed(file.read_text(encoding="utf-8"), file)
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{file} cannot be read: {error}") from error
    if not isinstance(given, dict):
        raise OptionError(f"{file} must have entries such as model: and data:")
    return given


def _apply(given: dict[str, Any], change: str) -> None:
    """Set an entry by its dotted name."""
    name, equals, text = change.partition("=")
    *above, last = name.split(".")
    if not equals or not last:
        raise OptionError(f"{change!r} is no change of the file: write it as args.max_steps=5")
    for each in above:
        if given.get(each) is None:
            given[each] = {}
        given = given[each]
        if not isinstance(given, dict):
            raise OptionError(f"{change}: {each} is {given!r} in the file, and has no entries of its own")
    given[last] = _parsed(text, change)


def _parsed(text: str, where: object = "this") -> Any:
    """Parse YAML; 1e-4 is a number, 2026-11-30 is text, and an entry must not be there twice.

    where: names the text in an OptionError, if it is not valid.
    """
    try:
        import yaml
    except ImportError as error:
        raise OptionError("train needs PyYAML: pip install 'greedysnake[hf]'") from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # it has no types
        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            names = [key.value for key, _ in node.value if key.value != "<<"]
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise OptionError(f"{where} has {twice!r} twice, and only one of the two would count")
            return node

    Loader.yaml_implicit_resolvers = {
        letter: [each for each in known if not each[0].endswith(":timestamp")]
        for letter, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+.0123456789"))
    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise OptionError(f"{where} is no YAML: {error}") from error
