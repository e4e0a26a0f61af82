"""trainer: a transformers.Trainer, or a subclass such as TRL's, whose steps run layer-major.

In Trainer, a step has several forwards and backwards. Here its batches are gathered, and with the last one of a step
the model gets all of them at once; the backend cuts them into micro-batches again.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils import serialization

from gs_compile.errors import OPTIMIZERS, LaneError, MemoryBudgetError, OptionError
from gs_compile.hf import strands
from gs_compile.hf.durable import DurableTrainer, unwrapped
from gs_compile.hf.fitting import fit
from gs_compile.hf.gather import Padding, gathered, padding_of
from gs_compile.hf.images import encode_for
from gs_compile.hf.parts import mapped
from gs_compile.hf.together import AskedModel, Mode, ReadsMore, answered, stored_reference
from gs_compile.hf.weights import streamed
from gs_compile.model.materialize import on_first_rank
from gs_compile.model.optim import SGD, Adam, AdamW, Lion
from gs_compile.model.outputs import loss_alone
from gs_compile.model.replaced import replaced
from gs_compile.model.residency import is_offloaded
from gs_compile.model.settings import refuse_other_rules
from gs_compile.model.tiered_optimizer import TieredOptimizer
from gs_compile.runtime.random_state import random_state, set_random_state

log = logging.getLogger(__name__)

_Trainer: Any = object  # of transformers: the other base of whoever has the class
_EQUIVALENT = {torch.optim.AdamW: AdamW, torch.optim.Adam: Adam, torch.optim.SGD: SGD}
# TrainingArguments.optim of bitsandbytes and torchao, which need not be installed. Paging is what the tiers do.
_LIONS = dict.fromkeys(("lion_32bit", "paged_lion_32bit", "lion_8bit", "paged_lion_8bit"), Lion)
_ADAMWS = ("paged_adamw_32bit", "paged_adamw_8bit", "adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit")
_OF_OTHERS: dict[str, type[TieredOptimizer]] = _LIONS | dict.fromkeys(_ADAMWS, AdamW)
_SETTINGS = ("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "maximize")
_PARAMETERS = ("params", "model", "optimizer_dict")  # entries that Trainer removes from an optimizer's settings


def attach(trainer: Any, *, reference: Mapping[str, Any] | None = None, **options: Any) -> None:
    """Make a Trainer train its model layer by layer; `options` are those of the backend (`gs_compile.Options`).

    reference: options for the Trainer's `ref_model`, if it has one, which then also runs layer by layer and is stored;
        other options are those of the model. None: it stays in memory, or where `from_pretrained` has put it.

    Call it before `train()`. The model is compiled in place, micro-batches have `per_device_train_batch_size` samples,
    and the optimizer is the one of this package that corresponds to the arguments. Evaluation, saving, loading and
    callbacks are Trainer's own.

    Raises OptionError for arguments that are not supported: an optimizer without an equivalent, DeepSpeed, FSDP,
    several devices in one process. The Trainer's class is then unchanged.
    """
    kind = type(trainer)
    if not issubclass(kind, TrainerMixin):
        trainer.__class__ = _in_front(TrainerMixin, kind)
    try:
        trainer.run_layer_major(reference=reference, **options)
    except BaseException:
        trainer.__class__ = kind
        raise


class TrainerMixin(DurableTrainer):
    """A mixin for a user's own Trainer: ``class Mine(TrainerMixin, Trainer)``; then call `run_layer_major`."""

    optimizer: Any
    optimizer_cls_and_kwargs: Any
    _asked: dict[str, Any]  # of `run_layer_major`
    _asked_optimizer: Any  # the `optimizer_cls_and_kwargs` that the user gave
    _batches: list[Any]
    _has_own_loss: bool  # by a `compute_loss` that is not Trainer's, a `compute_loss_func`, or a label smoother
    _train_batch_size: int  # Trainer's, which `auto_find_batch_size` changes
    _batch_size: int  # for which the model is compiled

    def run_layer_major(self, *, reference: Mapping[str, Any] | None = None, **options: Any) -> None:
        """As `attach`."""
        from transformers import DataCollatorWithFlattening, Trainer

        args = self.args
        _check(self, options)
        self._asked, self._asked_optimizer = {"reference": reference, **options}, self.optimizer_cls_and_kwargs
        if self.optimizer is not None and not isinstance(self.optimizer, TieredOptimizer):
            raise OptionError(
                f"this Trainer was given a {type(self.optimizer).__name__}, whose states stay in memory: leave the "
                f"optimizer to the arguments, or give one of {OPTIMIZERS}"
            )
        equivalent = self.get_optimizer_cls_and_kwargs() if self.optimizer is None else None
        packs = isinstance(self.data_collator, DataCollatorWithFlattening) or getattr(self, "padding_free", False)
        size = 1 if packs else args.per_device_train_batch_size  # a batch is one row
        known = {} if self.label_smoother is None else {"outputs": "all"}  # its loss reads logits
        chosen, asked = fit(self.accelerator, self.model, size, known | options)  # refuses what is wrong first
        if self.optimizer is None:  # what was not given stays None: a create_optimizer may look at it
            self.optimizer_cls_and_kwargs = self.optimizer_cls_and_kwargs and equivalent
        else:
            self.optimizer.max_grad_norm = _bound(args) or self.optimizer.max_grad_norm
        if args.use_liger_kernel:
            log.info("use_liger_kernel is left out: layers are compiled, and head and loss run in pieces")
        args.gradient_checkpointing = args.activation_checkpointing = args.use_liger_kernel = False
        self._options = asked if asked.durability else None
        chosen["resume"] = None  # `train` resumes
        overrides = type(self).compute_loss is not Trainer.compute_loss
        self._has_own_loss = overrides or self.compute_loss_func is not None or self.label_smoother is not None
        encode_for(self.accelerator, self.model)
        self._compiled = [AskedModel(self.model, chosen)]
        self._compiled[0].has_loss_alone = "outputs" not in options and chosen["outputs"] == "loss"
        self._batches, self._batch_size = [], self._train_batch_size
        second = getattr(self, "ref_model", None)
        if reference is not None or (second is not None and any(map(is_offloaded, second.parameters()))):
            apart = {"storage": [each / "reference" for each in asked.storage]} if asked.durability else {}
            given = apart | dict(reference or {})  # it may be called first, and must not take the durable run's folder
            first = {**chosen, "durability": "off"}  # a model that is never trained has no steps
            self._reference_optimizer, compiled = stored_reference(second, first, given, self.accelerator.autocast)
            self._compiled.append(compiled)
        if not isinstance(self, _Gathering):
            self.__class__ = _gathers(type(self))

    # Trainer's own methods -------------------------------------------------------------------------------------------

    def _hp_search_setup(self, trial: Any) -> None:
        """Trainer's; then the model that `train` has just made by `model_init` runs layer-major, too."""
        super()._hp_search_setup(trial)
        if self.model_init is not None:
            self.optimizer_cls_and_kwargs = self._asked_optimizer
            self.run_layer_major(**self._asked)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The batches of the next step; those of a step that was interrupted are dropped."""
        self._batches = []
        return super().get_batch_samples(*args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's; with fp16 the optimizer divides by the loss scale. Torch's own is replaced by its equivalent."""
        found = super().create_optimizer(*args, **kwargs)
        if not isinstance(unwrapped(found), TieredOptimizer):  # Accelerate has wrapped one that was made before
            self.optimizer = found = self._in_place_of(found)
        self._keep_states(self._tiered_optimizer)
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.serve(self._tiered_optimizer)
        return found

    def _clip_grad_norm(self, model: Any) -> float:
        return self._get_grad_norm(model)  # the optimizer clips

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float:
        """The norm of all gradients, before clipping."""
        self._tiered_optimizer.count_late()
        return self._tiered_optimizer.grad_norm

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Trainer's; values are read as they are written. With several ranks the first writes, and all read."""
        with on_first_rank(self.model), streamed(self.model) as values:
            super()._save(output_dir, state_dict or values)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with on_first_rank(self.model):
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Trainer's; states stay in their file until they go to the tiers."""
        with serialization.config.patch({"load.mmap": True}):  # type: ignore[attr-defined]
            super()._load_optimizer_and_scheduler(checkpoint)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Trainer's, with the numbers of the last step (`gs_compile.metrics`), as ``gs/ssd_read_bytes``."""
        step = self._tiered_optimizer.last_step if isinstance(self.optimizer, torch.optim.Optimizer) else None
        if step is not None and "loss" in logs:
            logs |= {f"gs/{name}": value for name, value in step.metrics().items()}
        super().log(logs, *args, **kwargs)

    # -----------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _smaller_if_too_large(self) -> Iterator[None]:
        """With `auto_find_batch_size`, micro-batches follow the batch size, and Accelerate learns of a batch that does
        not fit: after a RuntimeError with words that it knows, it tries a smaller one.
        """
        if not self.args.auto_find_batch_size:
            yield
            return
        if self._batch_size != self._train_batch_size:
            self._batch_size = self._train_batch_size
            torch.compiler.reset()  # Dynamo compiles a model only a few times
            for compiled in self._compiled:
                compiled.compile_within(self._batch_size)
        try:
            yield
        except (MemoryBudgetError, RuntimeError) as error:
            engine = self._tiered_optimizer.engine
            if engine is not None and engine.closed:
                raise LaneError(
                    "a step has failed when some parameters were updated, so a smaller batch cannot be tried: choose a "
                    "smaller per_device_train_batch_size"
                ) from error
            if isinstance(error, RuntimeError) or self._batch_size == 1:
                raise
            log.warning("a batch of %d does not fit: %s", self._batch_size, error)
            raise RuntimeError("the batch is out of memory.") from error

    @property
    def _padding(self) -> Padding:
        found = padding_of(self.model, getattr(self, "processing_class", None))
        return found._replace(labels=frozenset(self.label_names))

    def get_optimizer_cls_and_kwargs(self, *_: Any, **__: Any) -> tuple[type[TieredOptimizer], dict[str, Any]]:
        """This package's optimizer for the arguments, and its settings."""
        args, name = self.args, str(getattr(self.args.optim, "value", self.args.optim))
        kind: Any = _OF_OTHERS.get(name) if self.optimizer_cls_and_kwargs is None else None
        if kind is not None:
            settings: dict[str, Any] = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2)}
            settings |= {"eps": args.adam_epsilon} if kind is AdamW else {}
            settings |= {"state_dtype": "8bit"} if name.endswith("_8bit") else {}
        else:
            theirs = super().get_optimizer_cls_and_kwargs
            kind, settings = self.optimizer_cls_and_kwargs or theirs(args, self.model)
        found = _EQUIVALENT.get(kind, kind)
        if not (isinstance(found, type) and issubclass(found, TieredOptimizer)):
            raise OptionError(
                f"optim={name!r} has no equivalent here: choose adamw_torch, adamw_torch_fused, adamw_8bit, sgd, "
                "paged_adamw_32bit, lion_32bit or lion_8bit, or make one of gs_compile, such as Muon, and give the "
                "Trainer optimizers=(optimizer, None)"
            )
        refuse_other_rules(name, settings)
        if found is not kind:  # without settings of how torch computes
            settings = {key: value for key, value in settings.items() if key in _SETTINGS + _PARAMETERS}
        return found, {**settings, "max_grad_norm": _bound(args) or settings.get("max_grad_norm")}

    def _in_place_of(self, optimizer: Any) -> TieredOptimizer:
        """This package's equivalent of an optimizer that the user's own `create_optimizer` has made."""
        kind: type[TieredOptimizer] | None = _EQUIVALENT.get(type(optimizer))
        if kind is None:
            raise OptionError(
                f"the create_optimizer of this Trainer has made a {type(optimizer).__name__}, which has no equivalent "
                f"here: let it return one of {OPTIMIZERS}, or AdamW, Adam or SGD of torch"
            )
        for group in optimizer.param_groups:
            refuse_other_rules(kind.__name__, group)
        kept = ("params", *_SETTINGS)
        groups = [{key: group[key] for key in kept if key in group} for group in optimizer.param_groups]
        found: TieredOptimizer = kind(groups, max_grad_norm=_bound(self.args))  # type: ignore[call-arg]
        return found


class _Gathering(_Trainer):  # type: ignore[misc]
    """Stands between Trainer and its subclasses: where Trainer would train on a batch, batches are gathered.

    So the `training_step` of a subclass runs for each batch, when the batch comes.
    """

    _batches: list[Any]
    _compiled: list[AskedModel]  # the model, and its reference if it is stored

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any) -> Any:
        """Trainer's; if only the loss is asked for, and the model computes it, nothing else is computed."""
        is_alone = prediction_loss_only and not self._has_own_loss
        with loss_alone() if is_alone else self._compiled[0].wrappable():
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Gather a batch; with the last one of a step, run all of them. The returned losses add up to the step's.

        Each batch is prepared when it comes: some trainers of TRL generate texts there, and count batches.
        """
        model.train()
        with self._smaller_if_too_large():
            self._batches.append(self._prepare_inputs(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._batches = self._batches, []
        known = replaced(vars(self._compiled[0]), is_for_its_loss=True)
        own = replaced(self.__dict__, _is_under_way=True, _prepare_inputs=lambda each: each)
        with self._smaller_if_too_large(), own, known:
            self._last_begun = self.state.global_step
            if self._has_own_loss:
                return self._own_training_step(model, batches, num_items_in_batch)
            batch = gathered(batches, self._padding)
            self.current_gradient_accumulation_steps = 1  # it is the loss of the whole step, not divided again
            return super().training_step(model, batch, num_items_in_batch)  # type: ignore[no-any-return]

    def _own_training_step(self, model: Any, batches: list[Any], num_items_in_batch: Any) -> torch.Tensor:
        """Each batch's loss is computed by itself, in a strand; the model runs once for the calls of all."""
        compute, asked = self.compute_loss, self._compiled[0]

        def loss_of(mode: Mode, *args: Any, **kwargs: Any) -> Any:
            mode.enter(self.model)  # others may be in another one when this one begins
            with self.compute_loss_context_manager():  # it holds for one thread, and a strand is one
                return compute(*args, **kwargs)

        def losses_of(model: Any, batches: list[Any], **kwargs: Any) -> list[torch.Tensor]:
            is_alone = asked.has_loss_alone
            with asked.wrappable():
                mode = Mode.of(self.model)
                own = [mapped(torch.clone, each) if is_alone else copy.copy(each) for each in batches]
                losses = [partial(loss_of, mode, model, batch, **kwargs) for batch in own]
                try:
                    return strands.run(losses, partial(answered, padding=self._padding, has_loss_alone=is_alone))
                finally:
                    mode.enter(self.model)

        def loss_of_all(*args: Any, **kwargs: Any) -> torch.Tensor:
            drawn = random_state() if asked.has_loss_alone else {}
            try:
                return torch.stack(losses_of(*args, **kwargs)).sum()
            except ReadsMore:
                pass
            except (AttributeError, TypeError) as error:  # the model does not return a dataclass
                if "NoneType" not in str(error) or not asked.has_loss_alone:
                    raise
            log.info("compute_loss seems to read other outputs than the loss, which the model returns from now on")
            self._asked["outputs"] = "all"  # also of a model that `_hp_search_setup` makes
            asked.give_all()
            set_random_state(drawn)
            return torch.stack(losses_of(*args, **kwargs)).sum()

        with replaced(self.__dict__, compute_loss=loss_of_all):
            return super().training_step(model, batches, num_items_in_batch)  # type: ignore[no-any-return]


def _in_front(mixin: type, kind: type) -> type:
    """A subclass of a Trainer in whose method resolution order `mixin` comes first.

    Its first base is `kind` all the same: objects of a class that begins with ABC or Generic, which have no attributes,
    can only become those of a class that begins so too.
    """

    class InFront(type(kind)):  # type: ignore[misc]  # an abstract class has another metaclass
        def mro(cls) -> list[type]:
            first = mixin.__mro__[:-1]
            return [cls, *first, *(each for each in super().mro()[1:] if each not in first)]

    found: type = InFront(kind.__name__, (kind, mixin), {"__module__": kind.__module__})
    return found


def _gathers(kind: type) -> type:
    """A subclass of a Trainer, with `_Gathering` directly before Trainer itself."""
    from transformers import Trainer

    between = type("Gathering", (_Gathering, Trainer), {})
    return type(kind.__name__, (kind, between), {"__module__": kind.__module__})


def _bound(args: Any) -> float | None:
    """The norm to clip by; None: no clipping."""
    return args.max_grad_norm if args.max_grad_norm and args.max_grad_norm > 0 else None


def _check(trainer: Any, options: Mapping[str, Any]) -> None:
    """Raise OptionError for what is not supported, before anything is compiled; warn of numbers that would be wrong."""
    from transformers import Trainer

    args, kind = trainer.args, type(trainer)
    if hasattr(trainer, "_on_policy_loss_total") and 0 < args.lmbda < 1 and args.gradient_accumulation_steps > 1:
        log.warning(
            "on_policy_loss and off_policy_loss in the log count the loss of a step for its last batch, and zeros for "
            "the others, of which some are of the other kind: all batches of a step have one backward"
        )
    reasons = {
        "deepspeed: leave it out, the backend replaces it": args.deepspeed is not None,
        "fsdp: leave it out, the backend replaces it": bool(args.fsdp),
        "torch_compile=True: leave it out, the model is compiled already": args.torch_compile,
        "activation_offloading=True: leave it out, the inputs of layers are stored anyway": getattr(
            args, "activation_offloading", False
        ),
        f"{kind.__name__} calls parts of its model, and the whole is compiled: use GKDTrainer, or a compute_loss that "
        "calls the model": hasattr(trainer, "_forward_redirection"),
        f"durability with {kind.__name__}, which makes its batches while it trains: a commit does not have them, "
        "so use Trainer's checkpoints (save_steps) instead": options.get("durability", "off") != "off"
        and kind._prepare_inputs is not Trainer._prepare_inputs,
        "use_adaptive_entropy=True with gradient_accumulation_steps above 1: all batches of a step have the last one's "
        "place in it, by which the coefficient is set: raise per_device_train_batch_size instead": getattr(
            args, "use_adaptive_entropy", False
        )
        and args.gradient_accumulation_steps > 1,
        "auto_find_batch_size on several ranks, of which each would choose for itself: choose "
        "per_device_train_batch_size": args.auto_find_batch_size and args.world_size > 1,
        f"{args.n_gpu} devices in one process: start a process for each, with torchrun": args.n_gpu > 1,
    }
    for reason, found in reasons.items():
        if found:
            raise OptionError(reason)
