"""durable: a Trainer resumes from the last commit if its own checkpoint is older, or if there is none.

[1] Each commit has the Trainer's state, and that of its schedule.
[2] To resume from a commit, Trainer gets a checkpoint that only has its state; everything else comes from the commit.
[3] If Trainer's own checkpoint is not older, the run resumes from that. The commit stays until the run makes one.
"""

from __future__ import annotations

import json
import logging
import tempfile
import weakref
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from gs_compile.errors import OptimizerError, ResumeError
from gs_compile.model.resume import last_of, resume
from gs_compile.model.tiered_optimizer import TieredOptimizer
from gs_compile.options import Options
from gs_compile.runtime.random_state import set_random_state
from gs_compile.runtime.storage.folder import folder_in
from gs_compile.runtime.storage.last_commit import left_over
from gs_compile.runtime.storage.stored import Manifest

log = logging.getLogger(__name__)

_Trainer: Any = object  # transformers' Trainer or a subclass: the other base of classes with the mixin
_NAME = "trainer"  # of the state in commits
_NUM_ENTRIES = 1000  # the latest ones of the log, which grows without end, are written with each commit


class DurableTrainer(_Trainer):  # type: ignore[misc]
    """The part of `TrainerMixin` that has durable steps."""

    _options: Options | None = None  # of the model, if steps are durable
    _stand_in: tuple[str, Manifest] | None = None  # the checkpoint that Trainer gets to resume from a commit
    _begins_anew: bool = False
    _is_under_way: bool = False  # a training call has begun, whose forward commits the step before
    _last_begun: int | None = None  # the number of steps before that call

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Trainer's `train`; it resumes from the last commit, if that has more steps than `resume_from_checkpoint`.

        Raises LeftoverError for a commit that must not be resumed, ResumeError for one that is not a Trainer's.
        """
        self._stand_in, self._begins_anew = None, False
        with tempfile.TemporaryDirectory() as folder:
            if self._options is not None and self._engine is None:
                resume_from_checkpoint = self._later(resume_from_checkpoint, Path(folder), self._options)
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def _later(self, given: Any, folder: Path, options: Options) -> Any:
        """The checkpoint from which Trainer resumes: its own, or one in `folder` that stands for the commit."""
        from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME
        from transformers.trainer_utils import get_last_checkpoint

        commit = last_of(options)
        if commit is None:
            return given
        words = f"run {commit.run} at step {commit.step} ({commit.written}) in {folder_in(options.storage[0])}"
        if not given and options.resume is None:
            by = "trainer.train(resume_from_checkpoint=True)"
            raise left_over(words, by, folder_in(options.storage[0]))
        if _NAME not in commit.states:
            delete = f"greedysnake store gc --all {options.storage[0]}"
            raise ResumeError(f"{words} has no state of a Trainer: choose another storage=, or delete it: {delete}")
        state = commit.states[_NAME]["state"]
        own = (get_last_checkpoint(self.args.output_dir) if given is True else given) or None
        # Trainer writes its state last: without all of it a checkpoint is incomplete, also with `save_only_model`.
        step = _step_of(Path(own, TRAINER_STATE_NAME)) if own and Path(own, OPTIMIZER_NAME).is_file() else None
        if step is not None:
            if step >= state["global_step"]:
                log.info("training resumes from %s: it is not older than the commit, %s", own, words)
                self._begins_anew = True
                return own
            log.warning("training resumes from %s: %s has only %d steps", words, own, step)
        else:
            log.warning("training resumes from %s: %s", words, f"{own} is incomplete" if own else "no checkpoint")
        (folder / TRAINER_STATE_NAME).write_text(json.dumps(state))
        self._stand_in = str(folder), commit
        return str(folder)

    def _commit_of(self, checkpoint: str | None) -> Manifest | None:
        """The commit that a checkpoint stands for; None: it is one of Trainer's."""
        name, commit = self._stand_in or (None, None)
        return commit if checkpoint == name else None

    def _keep_states(self, optimizer: TieredOptimizer) -> None:
        """Commits hold the Trainer's state from now on."""
        if self._options is not None:
            optimizer.kept.states[_NAME] = _States(self)
            optimizer.kept.begins_anew = self._begins_anew

    @property
    def _tiered_optimizer(self) -> TieredOptimizer:
        found = unwrapped(self.optimizer)
        assert isinstance(found, TieredOptimizer)
        return found

    @property
    def _engine(self) -> Any:
        return None if self.optimizer is None else self._tiered_optimizer.engine

    # Trainer's own methods -------------------------------------------------------------------------------------------

    def _init_training_state(self, max_steps: int, *args: Any) -> tuple[int, int]:
        """Trainer's; a run that had ended has no epoch left."""
        epoch, num_batches = super()._init_training_state(max_steps, *args)
        is_over = self._stand_in is not None and self.state.global_step >= max_steps
        return (max(epoch, self.state.num_train_epochs), 0) if is_over else (epoch, num_batches)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._commit_of(resume_from_checkpoint) is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if (commit := self._commit_of(checkpoint)) is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        optimizer = self._tiered_optimizer
        states = {name: optimizer.kept.states.get(name) for name in commit.states}
        given = {name: getattr(self._options, name) for name in ("storage", "group", "mesh")}
        resume(self.model, optimizer, **given, **states)
        former = commit.states[_NAME]
        optimizer.kept.has_random_state = not former["is_under_way"]
        for _ in range(former["scheduler_steps"]):
            self.lr_scheduler.step()
        if self.state.global_step >= self.state.max_steps:  # nothing will be trained: this call brings the values
            self.prediction_step(self.model, next(iter(self.get_train_dataloader())), prediction_loss_only=True)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load the random state of a commit that was made between two calls; others hold that of a call's beginning."""
        if (commit := self._commit_of(checkpoint)) is None:
            super()._load_rng_state(checkpoint)
        elif not commit.states[_NAME]["is_under_way"]:
            set_random_state(commit.random)

    def _finalize_training(self, *args: Any) -> Any:
        """Trainer's; before it, the last step is made durable."""
        if self._engine is not None and self._engine.durable is not None:
            self._engine.commit()
        return super()._finalize_training(*args)


def _step_of(path: Path) -> int | None:
    """The number of steps in the file of a Trainer's state; None: after a kill it is missing or incomplete."""
    with suppress(OSError, ValueError, LookupError):
        step: int = json.loads(path.read_bytes())["global_step"]
        return step
    return None


def unwrapped(optimizer: Any) -> Any:
    """The optimizer without Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


class _States:
    """The states of a Trainer and of its parts, for commits."""

    def __init__(self, trainer: DurableTrainer) -> None:
        self._trainer = weakref.ref(trainer)

    @property
    def is_gone(self) -> bool:
        """Whether the Trainer is gone: then a read of values does not commit the step."""
        return self._trainer() is None

    def state_dict(self) -> dict[str, Any]:
        """The states at the end of a step, also if a callback reads values before Trainer has counted that step.

        Raises OptimizerError if the Trainer is gone.
        """
        from transformers.trainer_callback import ExportableState, TrainerState

        trainer: Any = self._trainer()
        if trainer is None:
            raise OptimizerError(
                "commits of this run have the state of its Trainer, which is gone: keep the Trainer as long as its "
                f'model is trained or committed, or have commits without it: optimizer.kept.states.pop("{_NAME}")'
            )
        state = {each.name: getattr(trainer.state, each.name) for each in fields(TrainerState)}
        callbacks = [*trainer.callback_handler.callbacks, trainer.control]
        exported = [each for each in callbacks if isinstance(each, ExportableState)]
        state["stateful_callbacks"] = TrainerState(stateful_callbacks=exported).stateful_callbacks
        state["log_history"] = state["log_history"][-_NUM_ENTRIES:]
        is_counted = trainer._is_under_way or trainer._last_begun != state["global_step"]
        state["global_step"] += not is_counted
        return {
            "state": state,
            "is_under_way": trainer._is_under_way,
            "scheduler_steps": int(not is_counted and not trainer._tiered_optimizer.last_step.skipped),
            "scheduler": trainer.lr_scheduler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer: Any = self._trainer()
        trainer.lr_scheduler.load_state_dict(state["scheduler"])
