"""Each line of docs/limits.md has a test that meets it, with the words that it is refused with.

The table names, for how each line begins, who tests it: a function of a test module, and words that it expects. Lines
that no other module tests are tested here.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from learner import distance
from setups import SetUp, ids, tiny
from tiered import options
from torch import nn

import gs_compile
from gs_compile.errors import OptimizerError, ReleasedParameterError
from gs_compile.model.residency import stash

ROOT, HERE = Path(__file__).resolve().parent.parent, "test_limits.py"
Case = tuple[str, str, str]  # file, function or "" for a table of the file's, words

LIMITS: dict[str, list[Case]] = {
    "Several backwards before `optimizer.step()`": [
        ("model/test_optim.py", "test_a_run_that_began_with_one_backward_a_step_has_one_in_each", "comes to 2 calls"),
        ("end_to_end/test_loops.py", "test_a_penalty_that_comes_later_is_refused", "a computation outside of the"),
        (HERE, "test_gradients_from_outside_before_the_first_call", "has not been called yet"),
        (HERE, "test_on_several_ranks", "that several ranks share from a computation outside"),
    ],
    "Gradients for other outputs than the loss": [
        ("end_to_end/test_autograd.py", "test_a_schedule_that_cuts_blocks_hands_nothing_else_on", "leave the option"),
    ],
    "Calls that wait for their backward": [
        ("end_to_end/test_loops.py", "test_calls_that_do_not_fit_are_refused_with_what_they_need", "this step needs"),
    ],
    "Parameters of incompatible dtypes in one layer": [
        ("end_to_end/test_mixed_dtypes.py", "test_what_does_not_go_together_is_refused", "do not go together"),
        ("faults/test_setups.py", "complex_parameters", "view_as_real"),
    ],
    '`state_dtype="8bit"` with `gs_compile.Muon`': [
        ("end_to_end/test_muon_runs.py", "test_settings_out_of_range_are_refused", "torch.float32 or torch.bfloat16"),
        ("end_to_end/test_muon_runs.py", "test_states_before_the_first_call", "momentum_buffer"),
    ],
    "The parameters of one model in two optimizers": [
        ("faults/test_setups.py", "two_optimizers_that_share_a_model", "belong to 2 gs_compile optimizers"),
        ("model/test_optim.py", "test_an_optimizer_of_two_compiled_models", "trains another compiled model"),
    ],
    "Optimizers of this package made for lazy modules": [
        ("model/test_optim.py", "test_a_parameter_without_a_shape_is_refused", "its module is lazy"),
    ],
    "Parameters outside of the compiled model": [
        ("model/test_parameters_in_memory.py", "test_a_head_of_low_precision_is_refused", "convert it to float32"),
        (
            "model/test_parameters_in_memory.py",
            "test_late_gradients_that_the_first_step_did_not_have",
            "came behind the model's backward",
        ),
    ],
    "Clipping needs room in `host_memory`": [
        ("end_to_end/test_choice.py", "test_too_little_memory_for_clipping_says_what_would_fit_without", "the largest"),
    ],
    "Steps that read other parameters": [
        ("end_to_end/test_what_calls_read.py", "test_a_call_that_reads_other_parameters", "call the model the same way")
    ],
    'The option `resume="auto"` alone': [
        ("hf/test_images_ahead.py", "test_a_resumed_run_encodes_with_the_values_of_its_commit", "gs_compile.resume"),
    ],
    "On several ranks a trained parameter that gets no gradient": [
        (
            "ranks/test_exact.py",
            "test_what_gets_its_first_gradient_in_a_later_step_is_trained_on_ranks",
            "nor has weight decay moved it",
        ),
        (
            "ranks/test_exact.py",
            "test_ranks_that_differ_in_first_gradients_are_told",
            "late first gradients",
        ),
        (
            "ranks/test_exact.py",
            "test_no_first_gradient_behind_an_evaluation_is_refused_on_ranks",
            "gets no gradient in this first step",
        ),
    ],
    "Gradients of gradients": [("end_to_end/test_autograd.py", "test_a_gradient_of_gradients_is_refused", "asked for")],
    "Hooks on the gradient of an output": [
        (
            "end_to_end/test_chosen_outputs.py",
            "test_gradients_of_outputs_are_seen_where_they_come_from_outside",
            "has a hook on its gradient",
        ),
    ],
    "If the highest hidden state": [("end_to_end/test_chosen_outputs.py", "hidden_state", "[2].square()")],
    "An evaluation between a forward and its backward": [
        (
            "end_to_end/test_tiers_memory.py",
            "test_an_evaluation_between_forward_and_backward_has_memory_of_its_own",
            "between a forward and its backward",
        ),
    ],
    "Gradients that are not finite": [
        (
            "model/test_optim_clipping.py",
            "test_without_a_norm_to_wait_for_the_warning_says_what_was_updated",
            "were updated before it showed",
        ),
        ("model/test_optim_clipping.py", "test_a_loss_that_is_not_finite_is_named", "step 2 was skipped"),
    ],
    "Continuing in the same process": [
        ("faults/test_first_step.py", "test_a_model_on_storage_survives_a_first_step_that_fails", "ended the run"),
        ("durable/test_after_a_fault.py", "", "at step 2 in"),
    ],
    "`backward(inputs=...)` that leaves out": [
        ("faults/test_odd_setups.py", "a_backward_of_some_parameters", "leaves out parameters"),
        ("faults/test_odd_setups.py", "a_last_batch_without_rows", "the batch has no rows"),
    ],
    "Changing `requires_grad`": [
        ("end_to_end/test_freezing.py", "test_a_durable_run_settles_it_at_the_first_call", "in a durable run"),
        ("end_to_end/test_freezing.py", "test_what_is_trained_changes_between_steps", "change it between"),
        (HERE, "test_on_several_ranks", "settles what is trained on several ranks"),
    ],
    "Inputs that require a gradient": [
        ("end_to_end/test_what_calls_read.py", "test_an_input_without_rows_that_requires_a_gradient", "detach it")
    ],
    "Resuming from the files of a killed run": [
        ("durable/test_resume_refusals.py", "test_what_is_of_something_else_is_refused", "it is of 2 ranks"),
        ("faults/test_processes.py", "test_what_a_killed_run_has_left_is_removed", "a run was killed and left"),
    ],
    "Two threads cannot train one model": [
        ("faults/test_turns.py", "test_a_thread_that_comes_into_a_step_is_refused", "is between the forward"),
    ],
    "Two processes cannot use one directory": [
        ("faults/test_processes.py", "test_what_a_killed_run_has_left_is_removed", "storage="),
        ("faults/test_processes.py", "test_each_model_of_a_process_has_its_folder", "FOLDER}.2"),
    ],
    "A model spread over several devices": [("test_errors.py", "", "on several devices")],
    "Models without blocks that run one after the other": [
        ("capture/test_split_refusals.py", "test_blocks_side_by_side", "do not run one after the other"),
        ("capture/test_split_refusals.py", "test_no_repeated_block", "no repeated block"),
        ("capture/test_split_refusals.py", "test_skip_connections", "must pass exactly one tensor"),
    ],
    "Of several [stacks]": [("end_to_end/test_stacks.py", "test_a_stack_trains_as_plain_pytorch", "")],
    "What an encoder gives to all layers": [
        ("passes/test_joints.py", "test_device_memory_does_not_grow_with_the_depth_of_either_stack", "")
    ],
    "A parameter that several layers read": [
        ("end_to_end/test_blocks.py", "test_a_shared_block", ""),
        ("end_to_end/test_blocks.py", "test_a_wide_block_is_a_class_of_its_own", "of 2 kinds"),
    ],
    "A forward that Dynamo cannot capture": [
        ("model/test_first_call.py", "test_a_break_in_a_hook_of_a_block_is_named", "breaks it at"),
        (
            "model/test_first_call.py",
            "test_a_forward_that_is_given_up_before_the_backend_is_asked_is_warned_of_once",
            "gave the model's forward up",
        ),
        ("model/test_first_call.py", "test_a_model_that_is_itself_a_sequential_is_compiled_by_torch_compile", "itself"),
    ],
    "The loss of CTC": [("capture/test_speech.py", "test_targets_in_one_row_are_refused", "all samples in one row")],
    "Layers that are left out at random": [
        ("capture/test_speech.py", "test_a_break_at_layers_that_are_left_out_at_random_says_what_to_set", "layerdrop")
    ],
    "Checks in the model": [
        (
            "capture/test_checks.py",
            "test_the_words_of_a_check_and_the_share_of_the_batch_are_in_its_error",
            "whole batch alone",
        ),
    ],
    "Tensors whose size depends on values": [
        ("end_to_end/test_experts.py", "", "gave the model's forward up at"),
        ("end_to_end/test_experts.py", "", "has a size that values decide"),
        ("end_to_end/test_experts.py", "", "computes with what is counted"),
        ("end_to_end/test_experts.py", "", "takes a part of the samples"),
        ("end_to_end/test_experts.py", "test_words_that_are_chosen_in_one_micro_batch", "leaves its block"),
        ("end_to_end/test_experts.py", "test_dropout_in_experts_drops_the_same_again", "how many random numbers"),
        (HERE, "test_the_form_of_experts_that_errors_name", ""),
    ],
    "Layers whose result depends on the whole batch": [
        ("capture/test_split_refusals.py", "test_a_sum_over_the_batch_that_is_read_ahead_of_the_head", "a sum"),
        ("capture/test_loss_refusals.py", "", "normalises by the statistics of the batch"),
        ("capture/test_samples.py", "", '"the best tokens of all": ('),
        ("capture/test_samples.py", "", '"a mask of the number": ('),
        ("capture/test_split_refusals.py", "test_a_region_compiled_by_itself_that_changes_what_it_is_given", "changes"),
        ("capture/test_split_refusals.py", "test_batch_norm_changes_its_statistics", "changes its input or buffer"),
    ],
    "A function in the forward that is wrapped in `torch.compiler.disable`": [
        ("end_to_end/test_compiled_in_part.py", "test_a_disabled_function_in_the_forward", "torch.compiler.disable"),
    ],
    "Models of images and texts": [
        (
            "end_to_end/test_compiled_in_part.py",
            "test_a_model_that_reads_sizes_of_images_is_refused",
            "is not one graph",
        ),
        ("end_to_end/test_compiled_in_part.py", "test_its_language_model_learns_what_it_learns_in_plain_pytorch", ""),
    ],
    "Batches along another dimension than 0": [("capture/test_loss_refusals.py", "", "pairs the samples of the batch")],
    "Inputs with as many rows as the batch in the first call": [
        ("capture/test_batch_dims.py", "test_an_input_that_had_as_many_rows_as_the_batch_once", "but as many in the")
    ],
    "Embeddings with `sparse=True`": [
        ("faults/test_setups.py", "sparse_gradients", "leave sparse=True out"),
        ("capture/test_loss_refusals.py", "", "leave scale_grad_by_freq=True out"),
    ],
    "Losses that do not separate": [
        ("capture/test_loss_refusals.py", "", "pairs the samples of the batch"),
        ("end_to_end/test_tail.py", "test_what_a_block_makes_of_all_samples_is_refused", "reduced over the batch"),
    ],
    "Losses that are divided by a count": [("capture/test_loss_refusals.py", "", '"labels that are drawn": (')],
    "A tensor without a batch dimension": [
        ("capture/test_loss_refusals.py", "", "deals the entries of a tensor without samples out"),
        ("end_to_end/test_dealing.py", "test_images_go_to_their_places_or_are_refused", "places .* for 32 entries"),
        ("end_to_end/test_dealing.py", "test_rows_that_are_repeated_are_refused", "write x"),
    ],
    "torch 2.11": [
        ("capture/test_capture.py", "test_releases_that_cannot_name_a_dimension", "L['ids'],L['labels']"),
    ],
    "The second length of sequences": [
        ("end_to_end/test_batches.py", "test_where_lengths_cannot_be_symbolic", "pad_to_multiple_of"),
    ],
    "Bitwise equal results on CUDA": [("end_to_end/test_on_cuda.py", "", "use_deterministic_algorithms(True)")],
    "Warnings that a forward gives": [("capture/test_checks.py", "test_a_forward_that_warns", "FutureWarning")],
    "CUDA graphs are never used": [("capture/test_inductor.py", "test_mode_reaches_inductor", "cudagraphs")],
}


def lines(text: str) -> list[str]:
    """The items of the lists of a page, without bold type."""
    items = re.findall(r"^\* (.*(?:\n  .*)*)", text.replace("**", ""), re.MULTILINE)
    return [re.sub(r"\s+", " ", item).strip() for item in items]


@cache
def functions(path: str) -> dict[str, str]:
    """The source of each function of a test module, its decorators included; of the module itself by ""."""
    source = (ROOT / "tests" / path).read_text()
    found = {"": source}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            found[node.name] = "\n".join(source.splitlines()[first - 1 : node.end_lineno])
    return found


def untested(items: list[str], limits: dict[str, list[Case]]) -> list[str]:
    """What is wrong with a table for these lines."""
    wrong = [f"no row: {item}" for item in items if sum(item.startswith(each) for each in limits) != 1]
    wrong += [f"no such line: {each}" for each in limits if not any(item.startswith(each) for item in items)]
    for path, name, words in (case for cases in limits.values() for case in cases):
        source = functions(path).get(name)
        if source is None or words not in source:
            wrong.append(f"{path}, {name or 'its tables'}: not the words {words!r}")
    return wrong


def test_each_line_of_the_page_has_a_test():
    assert untested(lines((ROOT / "docs/limits.md").read_text()), LIMITS) == []


def test_a_line_without_a_test_is_found():
    path = "test_limits.py"
    case: Case = (path, "test_a_line_without_a_test_is_found", "case")
    assert lines("* One\n  line.\n* Another.\n\nText\n") == ["One line.", "Another."]
    assert untested(["One line."], {"One": [case]}) == []
    assert untested(["One line."], {}) == ["no row: One line."]
    assert untested([], {"One": [case]}) == ["no such line: One"]
    assert len(untested(["One line."], {"One": [(path, "lines", "no such words"), (path, "nobody", "")]})) == 2


# What no other module tests -------------------------------------------------------------------------------------------


@pytest.fixture
def setup(tmp_path):
    found = SetUp(tmp_path)
    yield found
    if found.optimizer is not None and found.optimizer.engine is not None:
        found.optimizer.engine.tiers.close()


def test_gradients_from_outside_before_the_first_call():
    weight = nn.Parameter(torch.ones(3))
    stash(weight)
    with pytest.raises(ReleasedParameterError, match=r"has not been called yet.*: call the model first"):
        weight.square().sum().backward()


def test_on_several_ranks(setup, monkeypatch):
    """What they refuse, they refuse before they ask each other anything."""
    setup.call().backward()
    setup.optimizer.step()
    monkeypatch.setattr(setup.optimizer.engine, "ranks", SimpleNamespace(fail=lambda *_: None))
    with pytest.raises(ReleasedParameterError, match="that several ranks share from a computation outside"):
        setup.model.head.square().sum().backward()
    for block in setup.model.blocks:
        block.weight.requires_grad_(False)
    with pytest.raises(OptimizerError, match=r"settles what is trained on several ranks\. Save the model"):
        setup.model(ids())


class Experts(nn.Module):
    """Each is given the tokens that it is chosen for, by their indices, or in their order by expert."""

    def __init__(self, grouped: bool) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3), nn.Parameter(torch.randn(3, 8, 8) / 9)
        self.grouped = grouped

    def forward(self, x_BTD):
        x, chosen = x_BTD.flatten(0, 1), self.gate(x_BTD).softmax(-1).flatten(0, 1).max(-1)
        y = torch.zeros_like(x)
        if self.grouped:
            order = chosen.indices.argsort(stable=True)
            ends = torch.histc(chosen.indices.float(), 3, 0, 2).cumsum(0).int()
            y[order] = nn.functional.grouped_mm(x[order].bfloat16(), self.experts.bfloat16(), offs=ends).float()
        else:
            for number, expert in enumerate(self.experts):
                (token,) = torch.where(chosen.indices == number)
                y[token] += (x[token].bfloat16() @ expert.bfloat16()).float()
        return x_BTD + (y * chosen.values[:, None]).view_as(x_BTD)


def routed(grouped: bool) -> nn.Module:
    torch.manual_seed(0)
    model = tiny()
    model.blocks = nn.ModuleList(Experts(grouped) for _ in range(2))
    return model


def test_the_form_of_experts_that_errors_name(tmp_path):
    """It learns what tokens by index do in plain PyTorch."""
    model, plain = routed(grouped=True), routed(grouped=False)
    optimizer, theirs = gs_compile.SGD(model.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
    model.compile(backend="greedysnake", options=options(tmp_path, micro_batch_size=5))
    losses = {}
    for each, update in ((model, optimizer), (plain, theirs)):
        losses[each] = each(ids())
        losses[each].backward()
        update.step()
    assert float(losses[model].detach()) == pytest.approx(float(losses[plain].detach()), rel=1e-5)
    assert distance(dict(model.state_dict()), dict(plain.state_dict())) < 1e-3  # products in bfloat16
    optimizer.engine.tiers.close()
