"""Every error and warning of this package. Each says what was found, where, and what to do, and ends with its name in
brackets, ``[graph-break]``, under which docs/errors.md explains it. Names follow from the classes and do not change.
"""

from __future__ import annotations

import re

OPTIMIZERS = "gs_compile (AdamW, Adam, SGD, Lion, Muon)"

ABSENT = (  # of a model that another tool has placed
    "the meta device or device_map= has left parameters of this model without values here (hooks may bring them): load "
    "it with gs_compile.from_pretrained(..., storage=...), without device_map, or build it with "
    "gs_compile.init_on_storage(..., storage=...)"
)

GROUPED = (  # of tensors whose size depends on values
    "to send tokens to experts, sort them by expert, which keeps their number, and multiply all experts at once: "
    'torch.nn.functional.grouped_mm (in models of transformers, experts_implementation="grouped_mm")'
)

LOST = (  # of a parameter's shape, how its run has ended, and what is left
    "a parameter of shape {} has no value: {} ended the run that trained it. What that run has learned since {}"
)
SAVED = (
    "the last state dict that you saved is lost: make a new model and optimizer, and load that state dict (the option "
    'durability="step" stores each step)'
)
COMMITTED = (  # of a run, a step, and a directory
    "its last commit is lost: make a new model and optimizer, and resume from that commit, of run {} at step {} in {}, "
    'with the options durability and resume="auto"'
)


class _Named:
    """Its text ends with its name in brackets."""

    @property
    def message(self) -> str:
        """What was found, where, and what to do, without the name: for other messages that quote it."""
        return super().__str__()

    def __str__(self) -> str:
        return f"{self.message} [{name_of(type(self))}]"


def name_of(kind: type) -> str:
    """The name under which an error or a warning is explained: ``graph-break`` for GraphBreakError."""
    words = re.findall("[A-Z][a-z]+", kind.__name__.removesuffix("Error"))
    return "-".join(words).lower()


class GreedySnakeError(_Named, Exception):
    """The root of this package's errors."""


class GreedySnakeWarning(_Named, UserWarning):
    """The root of this package's warnings."""


class OptionError(GreedySnakeError, ValueError):
    """An option is unknown or out of range."""


class VersionError(GreedySnakeError, ImportError):
    """The installed torch is too old, or has moved what the capture rests on."""


class CaptureError(GreedySnakeError, ValueError):
    """The model could not be captured as one graph with a free batch dimension."""


class GraphBreakError(CaptureError):
    """Dynamo split the model's forward, or a layer's backward cannot be traced; names the place and the reason."""

    is_of_a_raise = False  # the break is where the forward itself raises an exception


class NoBatchInputError(CaptureError):
    """No input of the model has a batch dimension."""


class MixedDeviceError(CaptureError):
    """Inputs and parameters are on more than one device."""


class DeviceError(GreedySnakeError, RuntimeError):
    """The model is on a device that cannot train it; says why, and which can."""


class NothingRequiresGradError(CaptureError):
    """A training step was asked for, but no parameter requires a gradient."""


class MutationError(CaptureError):
    """The model changes in place what lives longer than a micro-batch, such as a buffer."""


class UniformityError(CaptureError):
    """The model has no blocks one after the other, or its blocks exchange tensors that cannot be stored as one."""


class UniformityWarning(GreedySnakeWarning):
    """The model's blocks are of several kinds; each is compiled once. Names the difference."""


class UncapturedWarning(GreedySnakeWarning):
    """A call is no step of a model in layers, and runs as plain PyTorch does. Names the reason."""


class LengthWarning(GreedySnakeWarning):
    """Code has to be compiled for each length of the inputs. Names the unit, torch's reason, and what to do."""


class SeparationError(CaptureError):
    """An output of the whole batch cannot be computed from micro-batches; names the operation and its source line."""


class CheckError(GreedySnakeError, AssertionError, ValueError):
    """What the model itself checks of its values does not hold; says its words and its line."""


class OutputGradientError(GreedySnakeError, RuntimeError):
    """A gradient arrived for an output whose gradient is not supported."""


class InspectionError(GreedySnakeError, ValueError):
    """There is nothing to inspect yet, or not what was asked for."""


class ProgramError(GreedySnakeError):
    """A step program is not well-formed; says pass, line and value. Always a fault of this package."""


class StorageError(GreedySnakeError, OSError):
    """The storage failed: a transfer, a lock, no room. Says directory or file, offset, length, errno, unit and kind."""


class StorageFullError(StorageError):
    """The storage has no room for the run, or for a step of a larger batch; found before it. Says what to do."""


class StorageLockedError(StorageError):
    """Another run uses the directory."""


class LeftoverError(StorageError):
    """The folder of a run has something in it that no run makes."""


class ManifestError(StorageError):
    """The manifest of a durable run is damaged, of a newer format, or of no run: says the file and the entry."""


class ResumeError(GreedySnakeError, ValueError):
    """The run that is to go on is of another model, optimizer or number of ranks; names the first difference."""


class CorruptionError(StorageError):
    """Storage has other bytes than were written to it; found before they are used. Says file, offset, unit and kind."""


class MemoryBudgetError(GreedySnakeError, ValueError):
    """A budget is too small: says of what, how much is needed, and what binds."""


class LaneError(GreedySnakeError, RuntimeError):
    """An operation of the step failed on its lane; its cause is the error itself. The step cannot go on."""


class RankError(GreedySnakeError, RuntimeError):
    """Another rank has failed or ended, or the ranks differ: says which, why, and in what operation."""


class ForkError(GreedySnakeError, RuntimeError):
    """A forked child used a model that its parent trains: threads and files are the parent's alone."""

    def __init__(self, message: str) -> None:  # a DataLoader raises a worker's error again by this keyword
        super().__init__(message)


class StepOrderError(GreedySnakeError, RuntimeError):
    """Calls came in an order that a step cannot have: a second backward before `step()`, and the like."""


class OptimizerError(GreedySnakeError, ValueError):
    """The optimizer and the model do not fit together, or a setting is out of range."""


class ReleasedParameterError(GreedySnakeError, RuntimeError):
    """A parameter that lives on the tiers was used as if it were in memory."""


class MasterWarning(GreedySnakeWarning):
    """A state has come without fp32 masters, and the values have been rounded: masters begin at these."""


class SharedMemoryWarning(GreedySnakeWarning):
    """Tensors or arrays share memory with parameters that go to the tiers, and will not have what these learn."""


class NonFiniteWarning(GreedySnakeWarning):
    """A gradient was not finite, and the step was skipped."""


class SlowStorageWarning(GreedySnakeWarning):
    """The storage works, but not as a local drive does: it is in memory, or direct I/O is refused."""


class InitialisationError(GreedySnakeError, ValueError):
    """A model cannot be built on storage; names the parameter or operation that the initialiser does not allow."""


class ProfileError(GreedySnakeError, ValueError):
    """A machine profile has a missing or impossible number, or is of a newer format; names the entry."""


class PlanError(GreedySnakeError, ValueError):
    """No plan exists: settings contradict each other, or the model fits nowhere; says what is short and near."""


class StatusError(GreedySnakeError, ValueError):
    """A directory has the status of no run, or one that cannot be read: torn, of a newer format, or something else."""


class NoFitError(PlanError, MemoryBudgetError):
    """The model, with the settings that are fixed, fits nowhere; says what is short, by how much, and what is near."""
