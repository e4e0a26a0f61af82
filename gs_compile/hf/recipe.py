"""recipe: a training run as data, which `greedysnake train` reads from a file, and TRL's SFTTrainer for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gs_compile.errors import GreedySnakeError, OptionError
from gs_compile.hf.trainer import attach
from gs_compile.hf.weights import from_pretrained
from gs_compile.options import Options, from_mapping

BYTES, END = "bytes", "</s>"
COLUMNS = ("messages", "prompt", "input_ids")  # that SFTTrainer takes, besides that of the text
FORMATS = {".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training run.

    model: a folder or an id of the hub; or the fields of a config, `model_type` among them, for a model from scratch.
    tokenizer: a folder or an id of the hub; "bytes": every byte is a token, and END. None: the model's own.
    data, eval_data: a file or several of one format: text, each paragraph a sample; JSON lines, Parquet or CSV with the
        columns that SFTTrainer knows ("text"; "messages"; "prompt" and "completion").
    options: of the backend (`Options`). args: of trl.SFTConfig. lora: of peft.LoraConfig.
    """

    model: str | Mapping[str, Any]
    data: str | list[str]
    eval_data: str | list[str] | None = None
    tokenizer: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    args: Mapping[str, Any] = field(default_factory=dict)
    lora: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Recipe:
        """The run of a dict; raises OptionError for entries that are unknown, missing or useless, and wrong options."""
        given = {name: each for name, each in given.items() if each is not None or name not in ("options", "args")}
        for name in ("model", "data"):
            if not given.get(name):
                raise OptionError(f"{name!r} is missing: name the model and the data")
        found = from_mapping(cls, given, "")
        for name in ("data", "eval_data"):
            files = getattr(found, name) or []
            if not all(isinstance(each, str) for each in (files if isinstance(files, list) else [files])):
                raise OptionError(f"{name} must be a file or a list of files; got {files!r}")
        for name in ("options", "args", "lora"):
            if not isinstance(getattr(found, name), Mapping | None):
                raise OptionError(f"{name} must have entries; got {getattr(found, name)!r}")
        Options.of(found.options)
        if not found.tokenizer and not isinstance(found.model, str):
            raise OptionError(f"a model from scratch has no tokenizer: name one, or give tokenizer: {BYTES}")
        return found


def trainer_of(recipe: Recipe) -> Any:
    """The SFTTrainer of a run, attached. Raises OptionError for entries that its libraries refuse."""
    try:
        import peft
        import transformers
        import trl
    except ImportError as error:
        raise OptionError(f"{error.name} is missing: pip install 'greedysnake[hf]'") from error
    with _named("args"):
        args = from_mapping(trl.SFTConfig, _with_words(recipe.args), "args.")
    with _named("lora"):
        lora = None if recipe.lora is None else from_mapping(peft.LoraConfig, recipe.lora, "lora.")
    data = {"train_dataset": _samples(recipe.data, args.dataset_text_field)}
    if recipe.eval_data:
        data["eval_dataset"] = _samples(recipe.eval_data, args.dataset_text_field)
    transformers.set_seed(args.seed)  # before a model's initial values are drawn
    model, tokenizer = _model(recipe), _tokenizer(recipe)
    if len(tokenizer) > model.config.get_text_config().vocab_size:
        raise OptionError(
            f"the tokenizer has {len(tokenizer)} tokens, more than the model's vocab_size of "
            f"{model.config.get_text_config().vocab_size}: they do not belong together"
        )
    trainer = trl.SFTTrainer(model, args, processing_class=tokenizer, peft_config=lora, **data)
    attach(trainer, **recipe.options)
    return trainer


def _at_home(path: Any) -> Any:
    """A path with "~" expanded; other paths, and ids of the hub, as they are."""
    return str(Path(path).expanduser()) if str(path).startswith("~/") else path


def _with_words(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, with strategies "no" restored, which YAML has read as False."""
    return {name: "no" if each is False and name.endswith("_strategy") else each for name, each in args.items()}


@contextmanager
def _named(section: str) -> Iterator[None]:
    """Name the section of a recipe in errors of libraries."""
    try:
        yield
    except GreedySnakeError:
        raise
    except (OSError, TypeError, ValueError) as error:
        raise OptionError(f"{section}: {error}") from error


def _samples(files: str | list[str], text: str) -> Any:
    """The samples of files. text: the name of the column that has the text."""
    import datasets

    paths = [Path(_at_home(file)) for file in ([files] if isinstance(files, str) else files)]
    for path in paths:
        if not path.is_file():
            raise OptionError(f"data: there is no file {path}")
        if path.suffix not in FORMATS:
            raise OptionError(f"data: the format of {path} is not known; known: {', '.join(FORMATS)}")
    if len(formats := {FORMATS[path.suffix] for path in paths}) > 1:
        raise OptionError(f"data: only files of one format are read together; got {' and '.join(sorted(formats))}")
    (name,) = formats
    more = {"sample_by": "paragraph"} if name == "text" else {}
    try:
        samples = datasets.load_dataset(name, data_files=list(map(str, paths)), split="train", **more)
    except (datasets.exceptions.DatasetsError, OSError, StopIteration, ValueError) as error:
        why = str(error.__cause__ or error) or "nothing is in it"
        raise OptionError(f"data: {', '.join(map(str, paths))} cannot be read: {why}") from error
    if not {text, *COLUMNS} & set(samples.column_names):
        raise OptionError(f"data: has columns {samples.column_names}, none of {', '.join((text, *COLUMNS))}")
    return samples


def _model(recipe: Recipe) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with _named("model"):
        if isinstance(recipe.model, str):
            names = {"storage", "host_memory", "frozen", "frozen_skip"} & recipe.options.keys()
            given = {name: recipe.options[name] for name in names}
            return from_pretrained(AutoModelForCausalLM, _at_home(recipe.model), **given)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**recipe.model))


def _tokenizer(recipe: Recipe) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if recipe.tokenizer != BYTES:
        with _named("tokenizer"):
            return AutoTokenizer.from_pretrained(_at_home(recipe.tokenizer or recipe.model))
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), END]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
