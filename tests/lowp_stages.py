"""Stages of quantised attention: what was asked for, by the tests that prove it.

Rows of the table in docs/design/lowp.md and of STAGES.md. A test belongs to a stage where one of
the stage's entries, FILE::FUNCTION with a pattern of what parameters follow, is its own.
"""

from __future__ import annotations

import re

_OPS, _KERNELS, _CLI = "tests/ops/quantized_attention", "tests/kernels/lowp", "tests/cli/test_sage"
_ATTENTION = (f"{_KERNELS}/test_attention.py", f"{_KERNELS}/test_attention_sm100.py")
_CODES, _GPU = f"{_KERNELS}/test_quantize_kv.py", "tests/gpu/test_quantized_attention.py"
_SEMANTICS, _ACCURACY = f"{_OPS}/test_semantics.py", f"{_OPS}/test_accuracy.py"
_FP4, _FP4_CODES = f"{_KERNELS}/test_attention_fp4.py", f"{_KERNELS}/test_quantize_kv_fp4.py"
_COMPAT = "tests/compat/test_sageattention.py"


def _formats(pattern: str) -> tuple[str, ...]:
    """Cases of formats whose name has a pattern, of kernels on the simulator and on a GPU."""
    found = [f"{file}::test_formats {pattern}" for file in (*_ATTENTION, _CODES)]
    return (*found, f"{_GPU}::test_attention_is_torch_s {pattern}")


STAGES: dict[str, tuple[str, ...]] = {
    "lowp-layout": (
        f"{_CLI}.py::test_a_dump_of_another_order_is_refused",
        f"{_CLI}.py::test_buffers_of_other_programs",
        f"{_KERNELS}/test_relayout.py::test_the_kernel_is_torch_s",
        f"{_KERNELS}/test_relayout.py::test_sizes_and_dtypes",
        f"{_KERNELS}/test_relayout.py::test_the_function",
    ),
    "lowp-values": (
        f"{_OPS}/test_quantizers.py::test_values_are_always_transposed_and_permuted",
        f"{_CODES}::test_ragged_rows",
        f"{_CODES}::test_formats",
        f"{_GPU}::test_codes_are_torch_s",
    ),
    "lowp-official": (
        f"{_OPS}/test_official.py::test_codes_and_scales_are_the_official_ones",
        f"{_OPS}/test_official.py::test_the_official_code_gives_the_same",
    ),
    "lowp-scales": (
        f"{_OPS}/test_quantizers.py::test_rows_have_the_codes_of_the_reference",
        f"{_ACCURACY}::test_smoothing_of_keys_is_what_rescues_biased_ones",
        f"{_ACCURACY}::test_long_rows_are_as_accurate_as_sageattention",
        *_formats("per (warp|block|row|64|head)"),
    ),
    "lowp-groups": (
        f"{_ACCURACY}::test_outputs_are_those_of_the_oracle_on_the_same_codes",
        *(f"{file}::test_ragged_causal_attention" for file in _ATTENTION),
        f"{_GPU}::test_a_head_has_the_same_bits_alone_and_in_a_batch",
    ),
    "lowp-smooth-v": (
        f"{_CLI}.py::test_what_does_not_fit_is_reported_once",
        *_formats("smoothed|without their mean|values and sums"),
    ),
    "lowp-sums": (
        f"{_ACCURACY}::test_one_level_of_accumulation_loses_on_hopper",
        f"{_ACCURACY}::test_values_with_an_offset_keep_their_accuracy",
        f"{_ATTENTION[0]}::test_sums_are_those_of_hopper_s_accumulator",
        f"{_GPU}::test_one_accumulator_loses_what_two_levels_keep",
        *_formats("level|sums"),
    ),
    "lowp-knobs": (
        f"{_CLI}.py::test_the_environment_overrides_calls_and_says_so_once",
        f"{_CLI}.py::test_a_process_takes_its_knobs_from_the_environment",
        f"{_CLI}.py::test_a_dump_is_read_back_without_a_difference",
        f"{_CLI}.py::test_stages_follow_from_each_other",
        f"{_CLI}.py::test_cases_are_within_their_bounds",
        f"{_CLI}.py::test_a_sample_has_the_stages_of_a_block_of_queries",
        f"{_CLI}.py::test_a_sample_of_a_warp_and_what_it_needs",
        f"{_CLI}.py::test_tiles_are_reported_up_to_a_limit",
        f"{_CLI}.py::test_packed_sequences_have_no_stages_and_say_so_once",
        f"{_CLI}.py::test_one_head_after_the_other_has_the_same_bits",
        f"{_CLI}.py::test_scales_are_reported_by_device",
        f"{_CLI}.py::test_toggles_change_who_computes_and_no_bit",
        f"{_GPU}::test_toggles_of_the_environment",
    ),
    "lowp-sizes": (
        f"{_SEMANTICS}::test_any_head_dimension",
        f"{_SEMANTICS}::test_any_length",
        *(f"{file}::test_sizes_and_kinds" for file in _ATTENTION),
        f"{_GPU}::test_more_than_2_31_elements",
    ),
    "lowp-lse": (
        f"{_SEMANTICS}::test_halves_of_the_keys_merge_by_their_lse",
        f"{_SEMANTICS}::test_the_lse_of_smoothed_keys_is_corrected_in_float32",
    ),
    "lowp-nhd": (
        f"{_SEMANTICS}::test_layouts_are_views",
        f"{_GPU}::test_layouts_have_the_same_bits",
    ),
    "lowp-fp16": _formats("fp16 values|halves"),
    "lowp-masks": (
        f"{_SEMANTICS}::test_packed_sequences_are_those_of_calls_alone",
        f"{_SEMANTICS}::test_float_masks_are_in_the_units_of_scores",
        *(f"{file}::test_packed_sequences" for file in (*_ATTENTION, _CODES, _GPU, _COMPAT)),
        f"{_KERNELS}/test_mask_tiles.py::test_hidden_tiles_are_not_read",
        f"{_KERNELS}/test_mask_tiles.py::test_every_schedule",
        *_formats("mask|added"),
    ),
    "lowp-int4": (f"{_OPS}/test_quantizers.py::test_int4_has_seven_levels_of_a_sign",),
    "lowp-queries": (
        *(f"{file}::test_every_schedule" for file in _ATTENTION),
        f"{_GPU}::test_attention_is_torch_s",
    ),
    "lowp-graphs": (
        f"{_SEMANTICS}::test_a_call_compiles_into_one_graph",
        f"{_SEMANTICS}::test_the_operator_keeps_torch_s_rules",
        f"{_GPU}::test_graph_replay_reads_new_inputs",
        f"{_GPU}::test_a_side_stream",
        f"{_GPU}::test_runs_agree_on_streams_of_their_own",
    ),
    "lowp-fp4": (
        f"{_ACCURACY}::test_fp4_meets_its_bars_and_smoothing_of_queries_helps",
        f"{_OPS}/test_quantizers.py::test_fp4_has_the_codes_of_the_reference",
        f"{_OPS}/test_quantizers.py::test_every_tie_of_fp4_goes_to_the_even_code",
        f"{_OPS}/test_quantizers.py::test_scales_of_fp4_lie_as_the_tensor_core_reads_them",
        f"{_FP4}::test_ragged_causal_attention",
        f"{_FP4}::test_every_schedule",
        f"{_FP4}::test_sizes_and_kinds",
        f"{_FP4}::test_packed_sequences",
        f"{_FP4_CODES}::test_ragged_rows",
        f"{_FP4_CODES}::test_every_schedule",
        f"{_FP4_CODES}::test_formats",
        f"{_FP4_CODES}::test_packed_sequences",
        f"{_FP4_CODES}::test_numbers_of_all_magnitudes",
    ),
    "lowp-sm89": (
        f"{_COMPAT}::test_functions_are_attention",
        f"{_COMPAT}::test_functions_have_a_kernel_on_hopper",
        f"{_COMPAT}::test_functions_have_a_kernel_on_blackwell",
        f"{_ATTENTION[0]}::test_tiles_of_64_keys",
        *(f"{file}::test_every_schedule tiles of 64" for file in _ATTENTION),
        *_formats("tiles of 64"),
    ),
    "lowp-fp8": (
        f"{_ACCURACY}::test_fp8_attention_with_scales_per_head",
        f"{_OPS}/test_quantizers.py::test_the_biased_encoding_of_zeros_is_its_middle",
        *_formats("FP8 scores, per head"),
    ),
    "lowp-object": (
        "tests/gpu/test_precompiled.py::test_a_stored_object_needs_no_compiler quantised",
    ),
    "lowp-bench": ("tests/cli/test_bench_lowp.py::test_rows_of_the_table",),
    "lowp-defects": (
        f"{_SEMANTICS}::test_channels_of_zeros_are_zeros",
        f"{_SEMANTICS}::test_rows_without_keys_are_zero",
        f"{_SEMANTICS}::test_no_argument_is_changed",
        f"{_SEMANTICS}::test_causal_rows_are_those_of_shorter_calls",
        f"{_SEMANTICS}::test_sequences_are_smoothed_by_means_of_their_own",
        f"{_SEMANTICS}::test_checks_survive_python_without_asserts",
        f"{_SEMANTICS}::test_one_level_on_hopper_s_geometry_is_no_error",
    ),
}


def stages_of(test: str) -> list[str]:
    """Stages of a test, by its id in pytest."""
    function, _, parameters = test.partition("[")
    found = []
    for stage, entries in STAGES.items():
        for entry in entries:
            of_function, _, pattern = entry.partition(" ")
            if of_function == function and re.search(pattern, parameters):
                found.append(stage)
                break
    return found
