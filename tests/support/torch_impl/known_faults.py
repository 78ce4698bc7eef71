"""Known faults of other sharded-training implementations, and the tests that would see them here.

The numbers are those of a list from runs of Megatron-FSDP's newest code next to ``fully_shard``. ``HAZARDS`` come from
its older versions, pull requests and issues. Tests are named without their files.
"""

from __future__ import annotations

FAULTS: dict[int, tuple[str, list[str]]] = {
    1: (
        "full_tensor() of an uneven shard returns wrong data",
        ["test_boxes_cover_each_element_once_and_full_tensor_is_bitwise_right"],
    ),
    2: (
        "plain dcp.save and dcp.load return wrong values",
        [
            "test_plain_dcp_saves_and_loads_state_dicts_across_rank_counts",
            "test_plain_dcp_load_sees_the_same_tensors",
        ],
    ),
    3: (
        "a parameter without gradient makes the next step fail",
        ["test_parameters_may_be_unused_on_some_or_all_ranks"],
    ),
    4: (
        "a module called twice in a step makes the next step fail",
        [
            "test_a_unit_called_twice_side_by_side_has_the_right_gradients",
            "test_units_may_be_skipped_repeated_and_reordered",
        ],
    ),
    5: ("a forward that raised cannot be tried again", ["test_a_forward_that_raised_can_be_tried_again"]),
    6: (
        "deepcopy of a sharded module ends the process",
        ["test_copies_pickles_and_conversions_are_refused"],
    ),
    7: (
        "freezing after sharding is ignored",
        ["test_frozen_parameters_get_no_gradient_whenever_they_were_frozen"],
    ),
    8: (
        "saving before the first step fails when gradients have another dtype than main weights",
        [
            "test_a_run_with_bfloat16_gradients_is_saved_before_its_first_step",
            "test_saving_before_the_first_step_changes_nothing_and_loads_as_zero_moments",
        ],
    ),
    9: (
        "creating optimizer state decays the weights and counts a step",
        [
            "test_optimizer_state_made_by_torch_moves_no_weight",
            "test_creating_state_changes_no_weight_and_keeps_existing_state",
            "test_loading_into_an_optimizer_that_never_stepped_leaves_weights_as_saved",
        ],
    ),
    10: (
        "main weights are built from rounded ones",
        ["test_main_weights_are_the_given_values_not_a_rounded_copy"],
    ),
    11: (
        "float64 and scalar parameters are refused",
        [
            "test_float64_parameters_train_in_float64",
            "test_stacks_scalars_and_empty_tensors_continue_too",
        ],
    ),
    12: (
        "an optimizer built before sharding trains nothing",
        ["test_an_optimizer_built_before_sharding_is_an_error"],
    ),
    13: (
        "the dtype asked for the reduction is ignored",
        ["test_gradients_are_reduced_in_reduce_dtype_and_kept_in_grad_dtype"],
    ),
    14: (
        "no way to put off the reduction to the last microbatch",
        [
            "test_collectives_per_step_are_exactly_those_of_the_strategy",
            "test_no_sync_is_restored_on_an_error",
        ],
    ),
    15: (
        "some gradients of a group set and others None is an error",
        [
            "test_unreduced_gradients_may_be_copied_replaced_or_dropped",
            "test_parameter_groups_schedules_and_missing_gradients_act_as_in_torch",
        ],
    ),
    16: (
        "only CUDA, only meshes of data-parallel axes, no tensors without columns",
        [
            "test_an_axis_of_a_larger_mesh_reduces_over_its_own_ranks",
            "test_tensors_without_columns_train_and_load",
        ],
    ),
    17: (
        "no ignored parameters; fully_shard returns None",
        ["test_ignored_parameters_stay_plain", "test_ten_steps_equal_those_of_the_unsharded_model"],
    ),
    18: ("attributes of parameters are lost", ["test_attributes_set_on_parameters_survive"]),
    19: (
        "a refresh allocates new compute weights; gradients stay allocated",
        [
            "test_kept_compute_weights_are_refreshed_in_the_same_memory",
            "test_bytes_at_rest_are_exactly_those_of_the_strategy",
        ],
    ),
    20: (
        "gathers of uneven shards that gloo rejects",
        [
            "test_training_equals_the_full_batch_on_one_process",
            "test_programs_do_the_same_as_with_fsdp2_or_differ_by_design",
        ],
    ),
    21: (
        "padding to a common multiple of all rows; slow planning; overflow",
        [
            "test_padding_keeps_its_guarantees",
            "test_a_hundred_thousand_tensors_over_sixteen_thousand_shards_are_planned",
            "test_odd_rows_cost_little_where_their_common_multiple_is_huge",
        ],
    ),
    22: (
        "fused tensors are split at the wrong row where a shard ends inside them",
        [
            "test_halves_of_a_fused_tensor_are_right_wherever_a_shard_ends",
            "test_fused_and_stacked_tensors_equal_numpy_both_ways",
        ],
    ),
    23: (
        "private torch calls all over the code",
        ["test_private_names_of_torch_are_used_where_they_are_declared"],
    ),
    24: ("more host work a step than its predecessor", ["test_a_step_makes_fewer_python_calls_than_fsdp2"]),
    25: (
        "all ranks of a parity test see the same data",
        ["test_every_ranks_data_has_gradients_of_its_own"],
    ),
}

HAZARDS: dict[str, list[str]] = {
    "modules half sharded after a failure": ["test_wrong_arguments_are_named_and_change_nothing"],
    "the caller's set of ignored parameters changes": [
        "test_the_callers_set_of_ignored_parameters_stays_as_it_was"
    ],
    "a tie across units": ["test_a_tie_across_units_is_refused"],
    "a tied parameter counted or reduced twice": ["test_a_tie_inside_a_unit_is_one_parameter"],
    "hooks unbalanced when no input needs a gradient": ["test_ranks_may_use_different_inputs_of_a_unit"],
    "a phase order is asserted": ["test_evaluation_and_forwards_in_advance_do_not_disturb_microbatches"],
    "deleted models stay alive": ["test_a_deleted_model_frees_its_memory_without_the_garbage_collector"],
    "a call after the optimizer's step that users forget": [
        "test_the_next_forward_sees_the_weights_whoever_updated_them"
    ],
    "accumulated gradients overwritten or reduced twice": [
        "test_unreduced_sums_are_added_to_in_place",
        "test_recomputed_segments_inside_a_unit_are_reduced_once",
    ],
    "sums in place of means": ["test_the_gradient_is_exactly_the_mean_over_ranks"],
    "experts weighted by the wrong number of ranks": ["test_a_gradient_divisor_replaces_the_number_of_ranks"],
    "a second copy of the main weights in the optimizer": [
        "test_bytes_at_rest_are_exactly_those_of_the_strategy"
    ],
    "autograd's saved weights lose their memory or their version": [
        "test_backward_through_weights_that_were_replaced_is_an_error"
    ],
    "recompute that misses its gather": [
        "test_activation_checkpointing_of_both_kinds_gives_the_same_gradients",
        "test_gradient_checkpointing_of_a_llama_changes_nothing",
    ],
    "ranks that start from different models": ["test_ranks_that_differ_all_get_the_first_difference"],
    "collectives to collect metadata of a checkpoint": [
        "test_a_save_finds_its_rows_without_communicating_tensors"
    ],
    "compute weights stale after a load": [
        "test_a_rank_that_holds_no_row_of_a_unit_joins_the_refresh_after_a_load"
    ],
    "parameter groups not restored by a load": [
        "test_hyperparameters_of_each_group_are_restored_by_the_parameters_it_holds"
    ],
    "a silent load of a part": [
        "test_another_model_is_refused_with_the_names_that_differ_and_nothing_changes"
    ],
}
