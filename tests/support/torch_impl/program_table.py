"""Every call of FSDP2 in seven programs, with its first place in each program and the test that covers the call.

The calls come from torchtitan 0.3.0 (and 0.2.2 where stated), accelerate 1.15.0, TRL 1.16.0, torchtune 0.6.1, verl
0.9.1, Lightning 2.6.6 and axolotl 0.19.0, read by ``program_calls``, which also defines the names.
"""

from __future__ import annotations

from dataclasses import dataclass

# By the name under which Python finds each.
PROGRAMS = {
    "torchtitan": ("torchtitan",),
    "accelerate": ("accelerate",),
    "trl": ("trl",),
    "torchtune": ("torchtune", "recipes"),
    "verl": ("verl",),
    "lightning": ("lightning",),
    "axolotl": ("axolotl",),
}


@dataclass(frozen=True)
class Call:
    """A call that programs make.

    used_at: by program, a file and line.
    shown_by: a test below ``tests/torch_impl`` that it works, or that it is refused with what to do instead.
    told: how ``docs/reference/fsdp2-differences.md`` tells a difference; empty if there is none.
    """

    name: str
    used_at: dict[str, str]
    shown_by: str
    told: str = ""


PROGRAM_CALLS = (
    Call(
        "._get_fsdp_state()",
        {"verl": "utils/fsdp_utils.py:846", "axolotl": "monkeypatch/tiled_mlp/base.py:109"},
        "test_program_calls.py::test_abstract_modules_are_sharded_and_parameters_of_other_classes_become_plain",
        "Torch's private state of sharded modules and parameters, such as ``_get_fsdp_state()``, is not there",
    ),
    Call(
        ".reshard()",
        {
            "torchtitan": "components/loss.py:772",
            "verl": "workers/engine/automodel/transformer_impl.py:451",
            "axolotl": "monkeypatch/tiled_mlp/base.py:124",
        },
        "runtime/test_lifecycle.py::test_unshard_shows_whole_weights_until_reshard_and_state_dicts_stay_sharded",
    ),
    Call(
        ".set_all_reduce_hook()",
        {"torchtitan": "experiments/torchft/manager.py:151"},
        "runtime/test_spmd_mesh.py::test_hooks_reduce_over_groups_that_the_mesh_does_not_know",
        "The tensor that a hook of ``set_all_reduce_hook`` gets has the order and the padding of the layout",
    ),
    Call(
        ".set_force_sum_reduction_for_comms()",
        {"torchtitan": "distributed/fsdp.py:50"},
        "test_surface.py::test_every_method_works_or_says_that_it_does_not",
        "``set_force_sum_reduction_for_comms`` has no influence",
    ),
    Call(
        ".set_gradient_divide_factor()",
        {"torchtitan": "distributed/fsdp.py:41", "verl": "workers/engine/torchtitan/utils.py:167"},
        "runtime/test_setters.py::test_gradients_are_divided_as_fsdp2_divides_them_at_every_moment",
    ),
    Call(
        ".set_modules_to_backward_prefetch()",
        {"torchtitan": "distributed/fsdp.py:356"},
        "runtime/test_setters.py::test_what_is_set_holds_from_the_next_microbatch_on",
    ),
    Call(
        ".set_modules_to_forward_prefetch()",
        {"torchtitan": "distributed/fsdp.py:336", "verl": "utils/fsdp_utils.py:613"},
        "runtime/test_setters.py::test_what_is_set_holds_from_the_next_microbatch_on",
    ),
    Call(
        ".set_requires_gradient_sync()",
        {
            "torchtitan": "components/loss.py:731",
            "accelerate": "accelerator.py:1167",
            "verl": "workers/engine/fsdp/transformer_impl.py:716",
            "lightning": "fabric/strategies/model_parallel.py:340",
        },
        "runtime/test_setters.py::test_what_is_set_holds_from_the_next_microbatch_on",
    ),
    Call(
        ".set_reshard_after_backward()",
        {"torchtitan": "components/loss.py:730", "axolotl": "monkeypatch/tiled_mlp/base.py:117"},
        "runtime/test_setters.py::test_what_is_set_holds_from_the_next_microbatch_on",
    ),
    Call(
        ".set_reshard_after_forward()",
        {"torchtitan": "components/loss.py:729"},
        "runtime/test_setters.py::test_what_is_set_holds_from_the_next_microbatch_on",
    ),
    Call(
        ".set_symm_mem_for_comm()",
        {"torchtitan": "distributed/fsdp.py:51"},
        "test_surface.py::test_every_method_works_or_says_that_it_does_not",
        "the methods of ``Unavailable``",
    ),
    Call(
        ".unshard()",
        {"torchtitan": "components/loss.py:739", "axolotl": "kernels/lora.py:87"},
        "test_program_calls.py::test_units_that_are_unsharded_by_hand_and_never_called_are_trained",
    ),
    Call(
        "DTensor._local_tensor",
        {
            "torchtitan": "components/checkpointer/base.py:79",
            "accelerate": "accelerator.py:1645",
            "trl": "models/activation_offloading.py:70",
            "torchtune": "training/_distributed.py:323",
            "verl": "model_merger/fsdp_model_merger.py:187",
            "axolotl": "loaders/utils.py:256",
        },
        "test_program_calls.py::test_local_parts_are_told_apart_from_those_of_torch",
    ),
    Call(
        "DTensor.async_save",
        {
            "torchtitan": "components/checkpointer/dcp.py:294",
            "torchtune": "training/checkpointing/_checkpointer.py:1330",
            "verl": "trainer/config/config.py:49",
        },
        "checkpoint/test_stock_async.py::test_an_asynchronous_save_holds_what_the_model_was_when_it_was_called",
        "``dcp.async_save`` of weights with remainders",
    ),
    Call(
        "DTensor.clip_grad_norm_",
        {
            "torchtitan": "experiments/forge/example_train.py:330",
            "accelerate": "accelerator.py:2960",
            "torchtune": "recipes/dev/early_exit_finetune_distributed.py:954",
            "verl": "workers/engine/fsdp/transformer_impl.py:806",
            "lightning": "fabric/strategies/fsdp.py:411",
            "axolotl": "monkeypatch/accelerate/parallelism_config.py:263",
        },
        "beside_stock/clip_grad_norm.py::clipped",
        "``clip_grad_norm_`` returns a plain tensor that answers ``full_tensor()``",
    ),
    Call(
        "DTensor.distribute_tensor",
        {
            "torchtitan": "experiments/graph_trainer/simple_fsdp.py:295",
            "accelerate": "utils/fsdp_utils.py:636",
            "torchtune": "models/clip/_position_embeddings.py:177",
            "verl": "third_party/torch/distributed/_state_dict_utils.py:738",
            "axolotl": "monkeypatch/accelerate/fsdp2.py:80",
        },
        "checkpoint/test_assign.py::test_distribute_tensor_takes_the_rows_of_the_first_ranks_tensor",
    ),
    Call(
        "DTensor.from_local",
        {
            "torchtitan": "components/loss.py:559",
            "accelerate": "accelerator.py:2984",
            "verl": "third_party/torch/distributed/_state_dict_utils.py:643",
            "axolotl": "loaders/utils.py:260",
        },
        "checkpoint/test_assign.py::test_from_local_is_the_inverse_of_to_local",
    ),
    Call(
        "DTensor.full_tensor",
        {
            "torchtitan": "distributed/utils.py:665",
            "accelerate": "accelerator.py:2981",
            "trl": "experimental/async_distillation/async_distillation_trainer.py:1035",
            "torchtune": "models/clip/_position_embeddings.py:152",
            "verl": "models/mcore/saver.py:216",
            "axolotl": "integrations/expert_parallel/shard.py:451",
        },
        "dtensor/test_axes.py::test_boxes_cover_each_element_once_per_replica_and_full_tensor_is_bitwise_right",
        "backward through a reduction of sharded parameters, or through their ``full_tensor()``",
    ),
    Call(
        "DTensor.get_total_norm",
        {"torchtitan": "distributed/utils.py:652", "accelerate": "accelerator.py:2979"},
        "dtensor/test_axes.py::test_gradients_of_all_meshes_and_plain_ones_are_clipped_together",
    ),
    Call(
        "DTensor.is_shard",
        {
            "torchtitan": "experiments/graph_trainer/simple_fsdp.py:65",
            "verl": "model_merger/fsdp_model_merger.py:156",
            "axolotl": "utils/optimizers/polora.py:198",
        },
        "test_program_calls.py::test_local_parts_are_told_apart_from_those_of_torch",
        "Its ``is_shard()`` and ``is_replicate()`` are False",
    ),
    Call(
        "DTensor.to_local",
        {
            "torchtitan": "components/loss.py:414",
            "accelerate": "utils/fsdp_utils.py:634",
            "verl": "third_party/torch/distributed/_state_dict_utils.py:339",
            "axolotl": "integrations/kernels/libs/sonicmoe/experts.py:169",
        },
        "dtensor/test_tensor.py::test_gradients_flow_back_through_to_local",
    ),
    Call(
        "fsdp.CPUOffloadPolicy",
        {
            "torchtitan": "distributed/fsdp.py:13",
            "accelerate": "utils/dataclasses.py:2180",
            "torchtune": "training/_distributed.py:17",
            "verl": "utils/fsdp_utils.py:43",
            "axolotl": "monkeypatch/accelerate/fsdp2.py:444",
        },
        "test_installation.py::test_a_program_that_imports_fsdp2_after_install_trains_with_ours",
    ),
    Call(
        "fsdp.DataParallelMeshDims",
        {"torchtitan": "distributed/fsdp.py:13"},
        "runtime/test_spmd_mesh.py::test_parameters_on_all_axes_stay_so_in_forward",
    ),
    Call(
        "fsdp.FSDPMeshInfo",
        {"torchtitan": "distributed/fsdp.py:261"},
        "runtime/test_shard_placement.py::test_parameters_are_sharded_over_the_mesh_of_their_placement",
        "The mesh of a ``ShardPlacementResult`` counts",
    ),
    Call(
        "fsdp.FSDPModule",
        {
            "torchtitan": "components/loss.py:648",
            "accelerate": "utils/fsdp_utils.py:761",
            "trl": "models/utils.py:39",
            "verl": "utils/fsdp_utils.py:43",
            "lightning": "fabric/strategies/model_parallel.py:336",
            "axolotl": "monkeypatch/accelerate/fsdp2.py:444",
        },
        "test_installation.py::test_five_names_are_replaced_and_nothing_else_of_torch",
    ),
    Call(
        "fsdp.FSDPParam",
        {"axolotl": "monkeypatch/fsdp2_qlora.py:23"},
        "test_program_calls.py::test_abstract_modules_are_sharded_and_parameters_of_other_classes_become_plain",
        "a patch of its ``FSDPParam`` has no influence",
    ),
    Call(
        "fsdp.MixedPrecisionPolicy",
        {
            "torchtitan": "distributed/fsdp.py:13",
            "accelerate": "utils/dataclasses.py:2166",
            "trl": "models/utils.py:315",
            "verl": "utils/fsdp_utils.py:43",
            "axolotl": "monkeypatch/accelerate/fsdp2.py:444",
        },
        "test_surface.py::test_torchs_policies_mean_what_ours_mean",
        "Main weights are float32 for trainable bfloat16 and float16 parameters too",
    ),
    Call(
        "fsdp.OffloadPolicy",
        {"accelerate": "utils/dataclasses.py:2180"},
        "test_surface.py::test_functions_and_other_classes_have_torchs_parameters_and_methods",
    ),
    Call(
        "fsdp.ShardPlacementResult",
        {"torchtitan": "distributed/fsdp.py:261"},
        "runtime/test_shard_placement.py::test_parameters_are_sharded_over_the_mesh_of_their_placement",
        "The mesh of a ``ShardPlacementResult`` counts",
    ),
    Call(
        "fsdp.TrainingState",
        {"verl": "workers/engine/automodel/utils.py:200"},
        "test_program_calls.py::test_abstract_modules_are_sharded_and_parameters_of_other_classes_become_plain",
        "Torch's private state of sharded modules and parameters, such as ``_get_fsdp_state()``, is not there",
    ),
    Call(
        "fsdp._get_mesh_info",
        {"torchtitan": "distributed/fsdp.py:265"},
        "runtime/test_shard_placement.py::test_parameters_are_sharded_over_the_mesh_of_their_placement",
        "The mesh of a ``ShardPlacementResult`` counts",
    ),
    Call(
        "fsdp._get_module_fsdp_state",
        {"verl": "workers/engine/automodel/utils.py:201"},
        "test_program_calls.py::test_abstract_modules_are_sharded_and_parameters_of_other_classes_become_plain",
        "Torch's private state of sharded modules and parameters, such as ``_get_fsdp_state()``, is not there",
    ),
    Call(
        "fsdp._get_post_forward_mesh_info",
        {"verl": "utils/fsdp_utils.py:44"},
        "test_program_calls.py::test_abstract_modules_are_sharded_and_parameters_of_other_classes_become_plain",
        "Torch's private state of sharded modules and parameters, such as ``_get_fsdp_state()``, is not there",
    ),
    Call(
        "fsdp.fully_shard",
        {
            "torchtitan": "distributed/fsdp.py:13",
            "accelerate": "utils/fsdp_utils.py:761",
            "trl": "models/utils.py:315",
            "torchtune": "training/_distributed.py:17",
            "verl": "utils/fsdp_utils.py:43",
            "axolotl": "integrations/expert_parallel/plugin.py:366",
        },
        "test_installation.py::test_five_names_are_replaced_and_nothing_else_of_torch",
    ),
    Call(
        "fully_shard(dp_mesh_dims=)",
        {"torchtitan": "distributed/fsdp.py:101"},
        "runtime/test_spmd_mesh.py::test_several_axes_are_one",
        "``dp_mesh_dims`` takes plain parameters as well as DTensors",
    ),
    Call(
        "fully_shard(ignored_params=)",
        {
            "accelerate": "utils/fsdp_utils.py:785",
            "trl": "models/utils.py:337",
            "axolotl": "monkeypatch/accelerate/fsdp2.py:597",
        },
        "beside_stock/ignore_params.py::alone",
    ),
    Call(
        "fully_shard(mesh=)",
        {
            "torchtitan": "distributed/fsdp.py:101",
            "accelerate": "utils/fsdp_utils.py:775",
            "trl": "models/utils.py:328",
            "torchtune": "training/_distributed.py:550",
            "verl": "workers/engine/fsdp/transformer_impl.py:465",
            "axolotl": "integrations/expert_parallel/plugin.py:375",
        },
        "test_known_faults.py::test_an_axis_of_a_larger_mesh_reduces_over_its_own_ranks",
    ),
    Call(
        "fully_shard(mp_policy=)",
        {
            "torchtitan": "distributed/fsdp.py:101",
            "accelerate": "utils/fsdp_utils.py:775",
            "trl": "models/utils.py:328",
            "verl": "workers/engine/fsdp/transformer_impl.py:465",
            "axolotl": "monkeypatch/accelerate/fsdp2.py:504",
        },
        "beside_stock/script.py::script",
    ),
    Call(
        "fully_shard(offload_policy=)",
        {
            "torchtitan": "distributed/fsdp.py:174",
            "accelerate": "utils/fsdp_utils.py:775",
            "trl": "models/utils.py:328",
            "torchtune": "training/_distributed.py:552",
            "verl": "workers/engine/fsdp/transformer_impl.py:465",
            "axolotl": "monkeypatch/accelerate/fsdp2.py:504",
        },
        "beside_stock/offload.py::where",
        "With ``CPUOffloadPolicy`` sums of microbatches",
    ),
    Call(
        "fully_shard(reshard_after_forward=)",
        {
            "torchtitan": "distributed/fsdp.py:101",
            "accelerate": "utils/fsdp_utils.py:775",
            "trl": "models/utils.py:328",
            "torchtune": "training/_distributed.py:550",
            "verl": "workers/engine/fsdp/transformer_impl.py:465",
            "axolotl": "monkeypatch/accelerate/fsdp2.py:504",
        },
        "runtime/test_lifecycle.py::test_weights_kept_after_forward_are_gathered_once",
        "an integer ``reshard_after_forward``",
    ),
    Call(
        "fully_shard(shard_placement_fn=)",
        {"torchtitan": "distributed/fsdp.py:253"},
        "test_surface.py::test_placements_of_parameters_are_hints_without_influence",
        "is a hint without influence",
    ),
    Call(
        "state_dict.StateDictOptions",
        {
            "torchtitan": "experiments/rl/tests/test_bitwise_parity.py:45",
            "accelerate": "accelerator.py:4097",
            "torchtune": "training/_distributed.py:20",
            "verl": "utils/fsdp_utils.py:499",
            "lightning": "fabric/strategies/model_parallel.py:374",
        },
        "beside_stock/state_dict.py::whole_state_dict",
    ),
    Call(
        "state_dict._init_optim_state",
        {"torchtune": "training/_distributed.py:20"},
        "test_known_faults.py::test_optimizer_state_made_by_torch_moves_no_weight",
        "before a first step runs one with a learning rate of 0",
    ),
    Call(
        "state_dict.get_model_state_dict",
        {
            "accelerate": "accelerator.py:4097",
            "verl": "utils/fsdp_utils.py:477",
            "lightning": "fabric/strategies/model_parallel.py:374",
            "torchtitan": "components/checkpoint.py:27 (0.2.2)",
        },
        "beside_stock/state_dict.py::whole_state_dict",
    ),
    Call(
        "state_dict.get_optimizer_state_dict",
        {
            "accelerate": "utils/fsdp_utils.py:324",
            "torchtune": "training/_distributed.py:20",
            "lightning": "fabric/strategies/model_parallel.py:374",
            "torchtitan": "components/optimizer.py:14 (0.2.2)",
        },
        "beside_stock/state_dict.py::checkpoint_in",
    ),
    Call(
        "state_dict.set_model_state_dict",
        {
            "torchtitan": "experiments/rl/tests/test_bitwise_parity.py:45",
            "accelerate": "utils/fsdp_utils.py:90",
            "torchtune": "training/_distributed.py:20",
            "verl": "utils/fsdp_utils.py:499",
            "lightning": "fabric/strategies/model_parallel.py:551",
        },
        "beside_stock/state_dict.py::whole_state_dict",
    ),
    Call(
        "state_dict.set_optimizer_state_dict",
        {
            "accelerate": "utils/fsdp_utils.py:438",
            "torchtune": "training/_distributed.py:20",
            "lightning": "fabric/strategies/model_parallel.py:417",
            "torchtitan": "components/optimizer.py:14 (0.2.2)",
        },
        "beside_stock/state_dict.py::checkpoint_in",
        "``set_optimizer_state_dict(broadcast_from_rank0=True)`` of float8 moments",
    ),
    Call(
        "state_dict.set_state_dict",
        {"torchtune": "training/checkpointing/_checkpoint_client.py:14"},
        "beside_stock/loading.py::asynchronous",
    ),
)
