"""The features of both runtimes side by side, with the reason for each missing counterpart. See ``surfaces.py``."""

from __future__ import annotations

from tests.support.surfaces import Row

_FSDP2 = "the method is FSDP2's own, and refused or a hint without influence"
_PURE = "a step is a pure function of its state"

ROWS = (
    # Sharding
    Row(
        "units of a model, each with a strategy",
        ("~fully_shard(block); fully_shard(model)",),
        ("fully_shard(units=)",),
    ),
    Row(
        "policy files",
        ("~ShardingPolicy.load(path).apply(model)",),
        ("~fully_shard(model, policy=path)", "fully_shard(policy=)"),
    ),
    Row(
        "mixed precision",
        ("fully_shard(mp_policy=)", "MixedPrecisionPolicy"),
        ("fully_shard(param_dtype=)", "fully_shard(reduce_dtype=)", "fully_shard(grad_dtype=)"),
    ),
    Row(
        "",
        (
            "MixedPrecisionPolicy.param_dtype",
            "MixedPrecisionPolicy.reduce_dtype",
            "MixedPrecisionPolicy.grad_dtype",
        ),
        ("fully_shard(param_dtype=)",),
    ),
    Row(
        "dtype of main weights: one for all, or each parameter's own",
        ("MixedPrecisionPolicy.main_dtype", "~[precision] main"),
        ("fully_shard(main_dtype=)", "~[precision] main"),
    ),
    Row(
        "casts of inputs and outputs",
        ("MixedPrecisionPolicy.cast_forward_inputs", "MixedPrecisionPolicy.output_dtype"),
        why="functions cast what they are given, as JAX programs do",
    ),
    Row("scaling of gradients", ("fully_shard(grad_divisor=)",), ("make_train_step(grad_divisor=)",)),
    Row("", ("FSDPModule.set_gradient_divide_factor",), ("make_gradients(grad_divisor=)",)),
    Row("", ("FSDPModule.set_reduce_scatter_divide_factor",), ("make_gradients(grad_divisor=)",)),
    Row(
        "parameters left alone or frozen",
        ("fully_shard(ignored_params=)", "~param.requires_grad_(False)"),
        ("fully_shard(frozen=)", "fully_shard(replicated=)"),
    ),
    Row("recomputation", ("~[[unit]] recompute", "~torch.utils.checkpoint"), ("fully_shard(recompute=)",)),
    Row(
        "model axes",
        ("ParallelPolicy", "~parallelize_module"),
        ("fully_shard(parallel=)", "~[[parallel]]"),
    ),
    Row(
        "stacks of layers, scanned",
        (),
        ("fully_shard(stacked=)", "scan_layers", "stack_layers"),
        "torch runs layers one by one",
    ),
    Row("two engines", (), ("fully_shard(engine=)",), "pjit's counterpart in PyTorch is FSDP2 itself"),
    Row("", ("fully_shard(mesh=)",), ("data_parallel_mesh", "data_parallel_mesh(sizes=)")),
    Row("", ("fully_shard(dp_mesh_dims=)", "DataParallelMeshDims"), ("data_parallel_mesh",)),
    Row(
        "weights kept from forward to backward",
        ("fully_shard(reshard_after_forward=)",),
        why="a strategy that keeps them, `optim_grads`, says it",
    ),
    Row("", ("FSDPModule.set_reshard_after_forward",), why="see reshard_after_forward"),
    Row("", ("fully_shard(shard_placement_fn=)",), why="FSDP2's keyword; rows are the only cut"),
    Row(
        "weights gathered as float8",
        ("MixedPrecisionPolicy.gather_dtype", "~[precision] gather"),
        ("fully_shard(gather_dtype=)", "~[precision] gather"),
    ),
    Row(
        "",
        ("MixedPrecisionPolicy.gather", "MixedPrecisionPolicy.is_quantized"),
        ("fully_shard(gather_dtype=)",),
    ),
    Row(
        "main weights in CPU memory",
        ("fully_shard(offload_policy=)", "CPUOffloadPolicy", "~CPUOffloadPolicy()"),
        ("~Offload(main_weights=True, update='host')",),
    ),
    Row("", ("OffloadPolicy", "CPUOffloadPolicy.pin_memory"), ("Offload",)),
    Row(
        "main weights as bfloat16 and int16 remainders",
        ("MixedPrecisionPolicy.store_param_remainders",),
        why="compute weights live inside a step only, so nothing is stored twice",
    ),
    Row(
        "products in float8",
        ("MixedPrecisionPolicy.float8_products",),
        ("float8_dot_general", "~nnx.Linear(dot_general=float8_dot_general)"),
    ),
    Row(
        "",
        (),
        (
            "float8_dot_general(precision=)",
            "float8_dot_general(preferred_element_type=)",
            "float8_dot_general(out_sharding=)",
        ),
        "the signature of jax.lax.dot_general",
    ),
    # Initial values
    Row(
        "initial values where no device holds the model",
        ("~with torch.device('meta')", "~model.to_empty()"),
        ("init_sharded", "init_sharded(mesh=)", "init_sharded(policy=)"),
    ),
    Row(
        "",
        (),
        (
            "plan_sharding",
            "plan_sharding(mesh=)",
            "plan_sharding(policy=)",
            "abstract_state",
            "shard_weights",
        ),
        "a meta-device model is the plan in PyTorch",
    ),
    # Steps
    Row(
        "microbatches",
        ("FSDPModule.set_is_last_backward", "FSDPModule.no_sync"),
        ("make_train_step(microbatches=)",),
    ),
    Row(
        "",
        ("FSDPModule.set_requires_gradient_sync", "FSDPModule.set_requires_all_reduce"),
        ("make_gradients(microbatches=)",),
    ),
    Row("whole weights", ("FSDPModule.unshard", "FSDPModule.reshard", "full_tensor"), ("unshard",)),
    Row("", ("UnshardHandle",), why=_PURE),
    Row(
        "forward only",
        ("~torch.no_grad()",),
        (
            "make_eval_step",
            "EvalStep",
            "make_eval_step(has_aux=)",
            "make_eval_step(equal_parts=)",
            "make_eval_step(mutable=)",
        ),
    ),
    Row(
        "state that a model changes",
        (),
        ("fully_shard(variables=)",),
        why="a module of torch changes its buffers, and each rank has its own",
    ),
    Row(
        "",
        ("~loss.backward()",),
        ("make_gradients", "make_gradients(equal_parts=)", "make_gradients(has_aux=)"),
    ),
    Row("a step", ("~loss.backward(); optimizer.step()",), ("make_train_step", "init_state")),
    Row("", ("~return loss, aux",), ("make_train_step(has_aux=)", "make_train_step(metrics=)")),
    Row("", ("~loss / tokens",), ("make_train_step(equal_parts=)",)),
    Row(
        "",
        (),
        ("make_train_step(donate=)", "make_train_step(wait=)"),
        "PyTorch updates in place, and its streams wait",
    ),
    Row("", (), ("init_state(variables=)", "variable_leaves", "TrainState"), "a module holds its buffers"),
    Row("", (), ("shard_batch", "shard_batch(microbatches=)"), "each rank reads its own rows"),
    Row(
        "", (), ("pad_batch", "pad_batch(microbatches=)", "pad_batch(rows=)"), "ranks may have different rows"
    ),
    Row(
        "",
        (),
        ("apply_linen", "apply_linen(method=)", "apply_linen(rngs=)", "apply_linen(mutable=)"),
        "linen is flax's",
    ),
    Row("", ("register_fsdp_forward_method",), ("call_unit",)),
    Row("", (), ("simulate_devices",), "torchrun starts gloo ranks"),
    Row(
        "",
        ("FSDPModule.zero_grad", "FSDPModule.set_main_gradients", "FSDPModule.reset_iter_state"),
        why=_PURE,
    ),
    # Overlap
    Row(
        "gathers ahead",
        ("FSDPModule.set_modules_to_forward_prefetch", "FSDPModule.set_modules_to_backward_prefetch"),
        ("fully_shard(prefetch=)",),
    ),
    Row("", ("share_comm_ctx",), why="a step is one program"),
    Row(
        "memory pool planned from a step",
        ("FSDPModule.buffer_plan", "FSDPModule.set_buffer_pool"),
        why="XLA plans the memory of a step",
    ),
    Row(
        "",
        (
            "FSDPModule.finalize_backward",
            "FSDPModule.set_all_reduce_hook",
            "FSDPModule.set_allocate_memory_from_process_group_for_comm",
            "FSDPModule.set_custom_all_gather",
            "FSDPModule.set_custom_reduce_scatter",
            "FSDPModule.set_force_sum_reduction_for_comms",
            "FSDPModule.set_keep_unsharded_storage",
            "FSDPModule.set_manual_backward_finalization",
            "FSDPModule.set_post_optim_event",
            "FSDPModule.set_reduce_scatter_max_input_buffers",
            "FSDPModule.set_reduce_scatter_unused_params",
            "FSDPModule.set_reshard_after_backward",
            "FSDPModule.set_separate_reduce_scatter_group",
            "FSDPModule.set_symm_mem_for_comm",
            "FSDPModule.set_unshard_in_backward",
            "FSDPModule",
        ),
        why=_FSDP2,
    ),
    Row(
        "programs that import FSDP2 themselves",
        ("install", "uninstall", "Installation"),
        why="FSDP2 is torch's, and flax has no engine of which this package would take the place",
    ),
    # Optimizers
    Row("AdamW on main weights, the same bits", ("MainWeightAdamW",), ("main_weight_adamw", "AdamWState")),
    Row(
        "",
        (
            "MainWeightAdamW(lr=)",
            "MainWeightAdamW(betas=)",
            "MainWeightAdamW(eps=)",
            "MainWeightAdamW(weight_decay=)",
        ),
        (
            "main_weight_adamw(b1=)",
            "main_weight_adamw(b2=)",
            "main_weight_adamw(eps=)",
            "main_weight_adamw(weight_decay=)",
        ),
    ),
    Row("", ("MainWeightAdamW(maximize=)",), why="optax negates losses, not gradients"),
    Row("", ("MainWeightAdamW(amsgrad=)",), why="both refuse it; torch's keyword names the way out"),
    Row("", (), ("main_weight_adamw(torch_vector_bytes=)",), "the bits are torch's"),
    Row(
        "moments in bfloat16, float16, float8 with a scale a row",
        ("MainWeightAdamW(exp_avg_dtype=)", "MainWeightAdamW(exp_avg_sq_dtype=)"),
        ("main_weight_adamw(mu_dtype=)", "main_weight_adamw(nu_dtype=)"),
    ),
    Row(
        "moments in CPU memory", ("MainWeightAdamW(offload_fraction=)",), ("init_state(offload=)", "Offload")
    ),
    Row("", (), ("abstract_state(offload=)",), "a meta-device model is the plan in PyTorch"),
    Row(
        "Adam's L2 decay, no bias correction",
        ("MainWeightAdamW(adam_w_mode=)", "MainWeightAdamW(bias_correction=)"),
        ("main_weight_adamw(adam_w_mode=)", "main_weight_adamw(bias_correction=)"),
    ),
    Row(
        "",
        ("MainWeightAdamW(capturable=)",),
        why="a step is one compiled program, which has no host to wait for",
    ),
    Row("SGD with momentum, the same bits", ("MainWeightSGD",), ("main_weight_sgd", "SGDState")),
    Row(
        "",
        (
            "MainWeightSGD(lr=)",
            "MainWeightSGD(momentum=)",
            "MainWeightSGD(dampening=)",
            "MainWeightSGD(weight_decay=)",
            "MainWeightSGD(nesterov=)",
            "MainWeightSGD(momentum_dtype=)",
        ),
        (
            "main_weight_sgd(momentum=)",
            "main_weight_sgd(dampening=)",
            "main_weight_sgd(weight_decay=)",
            "main_weight_sgd(nesterov=)",
            "main_weight_sgd(momentum_dtype=)",
        ),
    ),
    Row("", ("MainWeightSGD(maximize=)",), why="optax negates losses, not gradients"),
    Row("Muon on sharded matrices", ("MainWeightMuon",), ("main_weight_muon", "MuonState")),
    Row(
        "",
        (
            "MainWeightMuon(lr=)",
            "MainWeightMuon(exp_avg_dtype=)",
            "MainWeightMuon(exp_avg_sq_dtype=)",
            "MainWeightMuon(adjust_lr_fn=)",
            "MainWeightMuon(eps=)",
            "MainWeightMuon(momentum=)",
            "MainWeightMuon(momentum_dtype=)",
            "MainWeightMuon(nesterov=)",
            "MainWeightMuon(ns_coefficients=)",
            "MainWeightMuon(ns_steps=)",
            "MainWeightMuon(use_muon=)",
            "MainWeightMuon(weight_decay=)",
            "MainWeightMuon(adamw_betas=)",
            "MainWeightMuon(adamw_eps=)",
            "MainWeightMuon(adamw_lr=)",
            "MainWeightMuon(adamw_weight_decay=)",
        ),
        (
            "main_weight_muon(learning_rate=)",
            "main_weight_muon(mu_dtype=)",
            "main_weight_muon(nu_dtype=)",
            "main_weight_muon(adjust_lr_fn=)",
            "main_weight_muon(eps=)",
            "main_weight_muon(momentum=)",
            "main_weight_muon(momentum_dtype=)",
            "main_weight_muon(nesterov=)",
            "main_weight_muon(ns_coefficients=)",
            "main_weight_muon(ns_steps=)",
            "main_weight_muon(use_muon=)",
            "main_weight_muon(weight_decay=)",
            "main_weight_muon(adamw_b1=)",
            "main_weight_muon(adamw_b2=)",
            "main_weight_muon(adamw_eps=)",
            "main_weight_muon(adamw_learning_rate=)",
            "main_weight_muon(adamw_weight_decay=)",
        ),
    ),
    Row(
        "",
        (),
        ("main_weight_muon(outputs=)",),
        "torch's weights have their outputs first, JAX's kernels have them last",
    ),
    Row(
        "",
        ("MainWeightSGD(offload_fraction=)", "MainWeightMuon(offload_fraction=)"),
        ("init_state(offload=)",),
    ),
    # Checkpoints
    Row("checkpoints", ("save_checkpoint", "load_checkpoint"), ("save_checkpoint", "load_checkpoint")),
    Row(
        "written behind the next steps",
        ("save_checkpoint_async", "PendingSave"),
        ("save_checkpoint_async", "PendingSave"),
    ),
    Row("the last n, every k, the best", ("CheckpointManager",), ("CheckpointManager",)),
    Row(
        "",
        (
            "save_checkpoint(process_group=)",
            "save_checkpoint_async(process_group=)",
            "load_checkpoint(process_group=)",
        ),
        (),
        "in JAX the processes of the plan's mesh save and load together",
    ),
    Row("moments in another format", ("load_checkpoint(moments=)",), ("load_checkpoint(moments=)",)),
    Row(
        "saved split, loaded fused",
        ("save_checkpoint(mapping=)", "load_checkpoint(mapping=)"),
        ("save_checkpoint(mapping=)", "load_checkpoint(mapping=)"),
    ),
    Row("", ("save_checkpoint(optimizer=)", "save_checkpoint_async(optimizer=)"), ("~TrainState.opt_state",)),
    Row(
        "",
        ("~CheckpointManager(...)",),
        (
            "save_checkpoint_async(item=)",
            "save_checkpoint_async(objects=)",
            "save_checkpoint_async(timeout=)",
        ),
    ),
    Row("", (), ("LoadedCheckpoint", "load_checkpoint(like=)"), "PyTorch loads into the live model"),
    Row("", ("save_checkpoint(train=)",), ("save_checkpoint(objects=)",)),
    Row(
        "checkpoints of other programs",
        ("~twinshard convert",),
        (
            "load_checkpoint(strict=)",
            "load_checkpoint(initial=)",
            "load_checkpoint(variables=)",
            "load_checkpoint(tree=)",
            "save_checkpoint(item=)",
        ),
    ),
    Row(
        "", (), ("load_checkpoint(timeout=)", "save_checkpoint(timeout=)"), "the process group has a timeout"
    ),
    # Diagnostics
    Row("bytes at rest", ("FSDPModule.memory_report", "MemoryReport"), ("memory_report",)),
    Row(
        "counts and bytes of collectives",
        ("count_collectives", "count_collectives(model=)", "CollectiveCount"),
        ("count_collectives", "count_compiled_collectives"),
    ),
    Row(
        "norms of parameters",
        ("parameter_norms", "parameter_norms(gradients=)"),
        ("parameter_norms", "parameter_norms(by_layer=)"),
    ),
    Row("NaN and infinities by name", ("find_nonfinite",), ("find_nonfinite",)),
    Row(
        "", ("find_nonfinite(weights=)", "find_nonfinite(gradients=)"), ("~find_nonfinite(plan, gradients)",)
    ),
    Row("the first output that is not finite", ("watch_nonfinite_outputs",), ("watch_nonfinite_outputs",)),
    Row("", ("watch_nonfinite_outputs(max_rows=)",), ("NonFiniteOutput",)),
    Row(
        "memory shared by mistake",
        ("memory_overlaps", "memory_overlaps(optimizer=)"),
        why="arrays of JAX share none",
    ),
    Row("layout report", ("layout_report", "LayoutReport"), ("layout_report", "LayoutReport")),
    Row(
        "which device holds which rows, drawn",
        ("visualize", "~visualize(model, name)", "~visualize(parameter)"),
        ("visualize", "~visualize(plan, name)", "~visualize(array)"),
    ),
    Row("", (), ("ShardingPlan", "STRATEGIES"), "the modules are the plan"),
)
