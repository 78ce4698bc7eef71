"""Faults that the tests must see: ``python -m tests.support.mutations [--jobs N] [--all] [words]``.

Each mutation replaces one place of a scratch copy of the checkout, and runs the tests beside it until the first fails:
those of the fast tier, or with ``--all`` the slow ones too. ``words`` choose mutations whose line contains one of them.
Prints ``red`` (the tests saw the fault) or ``GREEN`` for each, and ends with 1 where one did not turn red.

``where`` is a file or a room; the text to replace must be in exactly one place of it, so that files may move inside of
a room. The mutations are those that the notes of earlier issues list, and others of their kind.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.support.processes import importing_from

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutation:
    """``tests``: paths below ``tests/``, the likeliest first."""

    fault: str
    where: str
    old: str
    new: str
    tests: str

    def __str__(self) -> str:
        return f"{self.where}: {self.fault}"


M = Mutation
TORCH = [
    M(
        "gradients sent to the host before they are reduced",
        "torch_impl/runtime",
        'return ("send", partial(_copy, home, values)), home',
        'return ("send", _copy(home, values, True) or (lambda async_op: None)), home',
        "torch_impl/runtime/test_host_memory.py",
    ),
    M(
        "gradients collected where they wait, on the host",
        "torch_impl/runtime",
        "flat = None if spec.host is not None else",
        "flat =",
        "torch_impl/runtime/test_host_memory.py",
    ),
    M(
        "L2 as decoupled weight decay",
        "torch_impl/optimizer",
        'torch._fused_adamw_ if group["adam_w_mode"] else torch._fused_adam_',
        "torch._fused_adamw_",
        "torch_impl/optimizer/test_modes.py",
    ),
    M(
        "something is left of the bias correction",
        "torch_impl/optimizer",
        "_FOREVER = 1e30",
        "_FOREVER = 1e4",
        "torch_impl/optimizer/test_modes.py",
    ),
    M(
        "reduce-scatter skipped",
        "torch_impl/runtime",
        "partial(levels.reduce, axis, shard, values)",
        "partial(lambda s, v, async_op: (s.copy_(v[: s.numel()]), None)[1], shard, values)",
        "parity/test_torch_strategies.py",
    ),
    M(
        "all-reduce skipped",
        "torch_impl/runtime",
        "return collectives.all_reduce(values, self.mesh.groups[axis]",
        "return None  # (",
        "parity/test_torch_strategies.py",
    ),
    M(
        "mean over the wrong count",
        "torch_impl/runtime",
        "sums /= ",
        "sums /= 1 + ",
        "parity/test_torch_strategies.py",
    ),
    M(
        "gradients of what tensor parallelism enters are not summed",
        "torch_impl/parallel",
        "return sum_over(grads[0], ctx.group), None",
        "return grads[0], None",
        "torch_impl/parallel/test_decoder.py",
    ),
    M(
        "fused tensors are cut as one",
        "torch_impl/parallel",
        "return FusedShard(cut.dimension, cut.fused) if cut.fused else Shard(cut.dimension)",
        "return Shard(cut.dimension)",
        "torch_impl/parallel/test_decoder.py",
    ),
    M(
        "whole weights used on parts keep a part of their gradient",
        "torch_impl/parallel",
        "param.register_hook(",
        "(lambda hook: None)(",
        "torch_impl/parallel/test_modules.py",
    ),
    M(
        "outer axis not reduced",
        "torch_impl/runtime",
        "transfers.reduced(last=last)",
        "transfers.reduced(last=not last)",
        "torch_impl/runtime/test_two_axes.py",
    ),
    M(
        "missing gradients are what memory held",
        "torch_impl/runtime",
        "torch._foreach_zero_(unwritten)",
        "torch._foreach_add_(unwritten, 7.0)",
        "torch_impl/runtime/test_idle_units.py torch_impl/runtime/test_programs.py",
    ),
    M(
        "a later microbatch replaces the sums",
        "torch_impl/runtime",
        "view.add_(grad, alpha=",
        "view.zero_().add_(grad, alpha=",
        "parity/test_torch_strategies.py",
    ),
    M(
        "a scale of a whole tensor is that of a rank's rows",
        "torch_impl/runtime",
        "groups = [(lane_of(axis), mesh.groups[axis]) for axis in axes if mesh.sizes[axis] > 1]",
        "groups = []",
        "torch_impl/runtime/test_float8.py",
    ),
    M(
        "frozen weights are widened to the dtype of trained ones",
        "bridge/core/sharding/policy/group_dtypes.py",
        "main = trained if trainable else stored",
        "main = trained",
        "torch_impl/runtime/test_main_dtype.py",
    ),
    M(
        "half-precision weights that are unfrozen later train so",
        "torch_impl/runtime/unit/group.py",
        "        if main == trained:\n            return",
        "        return",
        "torch_impl/runtime/test_main_dtype.py",
    ),
    M(
        "weights gathered anew count as the older ones",
        "torch_impl/runtime/weights/extended_weights.py",
        "[version + 2 * self._changed for version in versions]",
        "[version for version in versions]",
        "torch_impl/runtime/test_extension.py",
    ),
    M(
        "memory of freed weights with extensions stays",
        "torch_impl/runtime/weights/extension.py",
        "            storage.resize_(0)",
        "            pass",
        "torch_impl/runtime/test_extension.py",
    ),
    M(
        "gradients are reduced over data-parallel axes before they are reduced",
        "torch_impl/runtime/ground/tensor_parallel.py",
        "placement if axis in self.spmd.data_axes else next(others)",
        "Replicate() if axis in self.spmd.data_axes else next(others)",
        "torch_impl/runtime/test_spmd_mesh.py",
    ),
    M(
        "a hook of the reduction is called in every microbatch",
        "torch_impl/runtime/gradients/reduction.py",
        "if last and self._group_spec.hook.function",
        "if self._group_spec.hook.function",
        "torch_impl/runtime/test_spmd_mesh.py",
    ),
    M(
        "gradients are divided by the ranks of another mesh",
        "torch_impl/planned_groups.py",
        "divisor = plan.mesh.size if",
        "divisor = plans[0].mesh.size if",
        "torch_impl/runtime/test_shard_placement.py",
    ),
    M(
        "each rank decides for itself which parameters were used",
        "torch_impl/runtime/gradients/reduction.py",
        "used = frozenset(index for index, count in enumerate(counts) if count)",
        "used = done.used",
        "torch_impl/runtime/test_shard_placement.py torch_impl/runtime/test_unused_parameters.py",
    ),
    M(
        "parameters that no rank used have gradients",
        "torch_impl/runtime/gradients/reduction.py",
        "used = frozenset(index for index, count in enumerate(counts) if count)",
        "used = frozenset(range(len(counts)))",
        "torch_impl/runtime/test_shard_placement.py torch_impl/runtime/test_unused_parameters.py",
    ),
    M(
        "no module shows plain weights after its forward",
        "torch_impl/runtime/unit/unit.py",
        "keeps = not frees and seen and autograd.current_backward() is None",
        "keeps = False",
        "torch_impl/runtime/test_kept_weights.py",
    ),
    M(
        "plain weights that no backward reached stay shown",
        "torch_impl/runtime/unit/unit.py",
        "            self._rest(Event.PASS_ENDS)",
        "            pass",
        "torch_impl/runtime/test_kept_weights.py",
    ),
    M(
        "gradients of shown weights wait for a backward of the unit",
        "torch_impl/runtime/unit/unit.py",
        "self._enter(Event.BACKWARD_ENDS, Phase.KEPT)\n            self._finish_gradients()",
        "self._enter(Event.BACKWARD_ENDS, Phase.KEPT)",
        "torch_impl/runtime/test_kept_weights.py",
    ),
    M(
        "what is changed while plain weights are shown is not seen",
        "torch_impl/runtime/unit/group.py",
        "        if shown is not Shown.MAIN:\n            for",
        "        if shown is not Shown.MAIN and self._shown is Shown.MAIN:\n            for",
        "torch_impl/runtime/test_kept_weights.py",
    ),
    M(
        "parameters() are whole and have no gradients after a forward that does not reshard",
        "torch_impl/runtime/unit/group.py",
        "        dict.__setitem__(both, attr, main)\n",
        "",
        "torch_impl/runtime/test_late_backward.py",
    ),
    M(
        "weights are freed without a word to autograd",
        "torch_impl/runtime/memory/compute_buffer.py",
        "        self.lose_contents()\n        self._aside = None",
        "        self._aside = None",
        "torch_impl/runtime/test_late_backward.py",
    ),
    M(
        "backwards of tensors inside of torch.func are not seen",
        "torch_impl/runtime/ground/transforms.py",
        "        levels += levels_of(get_unwrapped(tensor))",
        "        pass",
        "torch_impl/runtime/test_transforms.py",
    ),
    M(
        "batched tangents are asked for a graph that they hide",
        "torch_impl/runtime/ground/transforms.py",
        "    return is_legacy_batchedtensor(tensor)",
        "    return False",
        "torch_impl/runtime/test_transforms.py",
    ),
    M(
        "second derivatives read weights that were freed",
        "torch_impl/runtime/ground/autograd.py",
        "self._seen &= watched is not None and watched.watch_results([gradient])",
        "pass",
        "torch_impl/runtime/test_transforms.py",
    ),
    M(
        "functions of jax.tree by another name count a unit's arrays",
        "jax_impl/modules/interception.py",
        "(*_NAMES, *_SHORT) if _is_installed(module) else tuple(entries)",
        "(*_NAMES, *_SHORT)",
        "jax_impl/modules/test_unit_readings.py",
    ),
    M(
        "a bilinear layer is taken for a convolution",
        "bridge/propose/own_modules.py",
        r"\bc_(attn|fc|proj)\b|bilinear",
        r"\bc_(attn|fc|proj)\b",
        "propose/test_own_modules.py",
    ),
    M(
        "replicated weights are not quantized",
        "bridge/core/sharding",
        "dtypes.compute == dtypes.main and dtypes.gather is None",
        "dtypes.compute == dtypes.main",
        "torch_impl/runtime/test_float8.py",
    ),
    M(
        "scales of changed weights are kept",
        "torch_impl/runtime",
        "version != gathered, version == self._kept_version",
        "version != gathered, self._kept_version is not None",
        "torch_impl/runtime/test_float8.py",
    ),
    M(
        "no refresh after a step",
        "torch_impl/runtime",
        "refresh = not in_backward",
        "refresh = False",
        "torch_impl/runtime/test_weights.py parity/test_torch_strategies.py",
    ),
    M(
        "no prefetch",
        "torch_impl/runtime",
        "self.schedule.prefetch(following, refresh)",
        "pass",
        "torch_impl/runtime/test_schedule.py",
    ),
    M(
        "gathers run ahead without prefetch",
        "torch_impl/runtime",
        "return expected if self._ahead else []",
        "return expected",
        "torch_impl/runtime/test_prefetch.py",
    ),
    M(
        "reductions run beside the next backward without prefetch",
        "torch_impl/runtime",
        "if not self._ahead:",
        "if False:",
        "torch_impl/runtime/test_prefetch.py",
    ),
    M(
        "waiting sums not reduced",
        "torch_impl/runtime",
        "unit.reduce_waiting()",
        "pass",
        "torch_impl/runtime/test_idle_units.py",
    ),
    M(
        "nothing dropped after a backward that raised",
        "torch_impl/runtime",
        "unit.drop_raised()",
        "pass",
        "torch_impl/runtime/test_raised_backward.py",
    ),
    M(
        "post-accumulate hooks not run",
        "torch_impl/runtime",
        "            _run_hooks(param)",
        "            pass",
        "torch_impl/test_surface.py torch_impl/test_surface_programs.py torch_impl/runtime",
    ),
    M(
        "no fence between buffers' gathers on the CPU",
        "torch_impl/comm",
        "elif shards and shards[0].is_cpu:",
        "elif False:",
        "torch_impl/runtime/test_buffers.py",
    ),
    M(
        "no wait after an interruption",
        "torch_impl/comm",
        "several.wait()\n        raise",
        "raise",
        "torch_impl/runtime/test_buffers.py",
    ),
    M(
        "torch's open list stays open",
        "torch_impl/comm",
        "distributed_c10d._world.pg_coalesce_state.pop(group, None)",
        "pass",
        "torch_impl/runtime/test_buffers.py",
    ),
    M(
        "async: nothing is copied (torch)",
        "torch_impl/checkpoint",
        "copy = tensor.clone() if tensor.is_cpu else tensor.cpu()",
        "copy = tensor",
        "torch_impl/checkpoint/test_async.py",
    ),
    M(
        "async: the background agrees over the default group",
        "torch_impl/checkpoint",
        "lambda: planned.write(group)",
        "lambda: planned.write(None)",
        "torch_impl/checkpoint/test_async.py",
    ),
    M(
        "async: nothing is copied (jax)",
        "jax_impl/checkpoint",
        "values.copy() if shared else values",
        "values",
        "jax_impl/checkpoint/test_async.py",
    ),
    M(
        "async: saves in the background use the keys of others",
        "jax_impl/comm",
        '"background" if background else "foreground"',
        '"foreground"',
        "jax_impl/checkpoint/test_async.py",
    ),
    M(
        "async: an error is told to nobody",
        "bridge/core/formats/saving",
        "            self._error = error",
        "            pass",
        "formats/saving/test_pending.py",
    ),
    M(
        "async: a failed save is not said by the next one",
        "bridge/core/formats/saving",
        "        _latest.settle()",
        "        pass",
        "formats/saving/test_pending.py",
    ),
    M(
        "manager: the best step goes",
        "bridge/core/formats/saving",
        "stay = {best, saved,",
        "stay = {saved,",
        "formats/saving",
    ),
    M(
        "manager: old steps go before the new one is complete",
        "torch_impl/checkpoint",
        """        self._directory.commit()
        self._extras.committed()""",
        """        self._extras.committed()
        self._directory.commit()""",
        "torch_impl/checkpoint/test_manager.py",
    ),
    M(
        "manager: removes what it did not save",
        "bridge/core/formats/saving",
        "if own in steps[step] and (own / METRICS_FILE).exists():",
        "if own in steps[step]:",
        "formats/saving",
    ),
    M(
        "manifest: headers of archives are not covered",
        "bridge/core/formats/dcp",
        "return ManifestFile(size, None, rest_checksum(path, ranges))",
        "return ManifestFile(size, None)",
        "torch_impl/checkpoint/test_async.py",
    ),
    M(
        "moments swapped",
        "torch_impl/optimizer",
        "[first for first, _ in moments],\n        [second for _, second in moments],",
        "[second for _, second in moments],\n        [first for first, _ in moments],",
        "torch_impl/optimizer/test_main_weight_adamw.py",
    ),
    M(
        "staged moments swapped",
        "torch_impl/optimizer",
        "kernel(weights, grads, values, [",
        "kernel(weights, grads, [v[::-1] for v in values], [",
        "torch_impl/optimizer/test_moment_dtypes.py",
    ),
    M(
        "no weight decay",
        "torch_impl/optimizer",
        'weight_decay=group["weight_decay"],',
        "weight_decay=0.0,",
        "torch_impl/optimizer/test_main_weight_adamw.py",
    ),
    M(
        "offloaded moments not sent back",
        "torch_impl/optimizer",
        "if value is not tensor:",
        "if False:",
        "torch_impl/optimizer/test_moment_dtypes.py torch_impl/optimizer/test_offload.py",
    ),
    M(
        "edits of the bfloat16 weights that keep their remainders",
        "torch_impl/dtensor",
        "if weight._version != self._whole.version:",
        "if False:",
        "torch_impl/optimizer/test_remainders.py",
    ),
    M(
        "bfloat16 weights cut off, not rounded",
        "torch_impl/dtensor",
        "bits.add_(1 << 15).bitwise_right_shift_(16)",
        "bits.bitwise_right_shift_(16)",
        "torch_impl/optimizer/test_remainders.py",
    ),
    M(
        "a NaN split into a number",
        "torch_impl/dtensor",
        "values.masked_fill(values.isnan(), torch.nan)",
        "values.clone()",
        "torch_impl/optimizer/test_remainders.py",
    ),
    M(
        "operators that write to the bfloat16 weights alone",
        "torch_impl/dtensor",
        "if any(remainder_of(tensor) is not None for tensor in _changed(func, args, kwargs)):",
        "if False:",
        "torch_impl/optimizer/test_remainders.py",
    ),
    M(
        "views without their remainders",
        "torch_impl/dtensor",
        "    if remainder is not None:\n        remainder.view_for",
        "    if False:\n        remainder.view_for",
        "torch_impl/optimizer/test_remainders.py",
    ),
    M(
        "a gather that overwrites what is written beside it",
        "torch_impl/dtensor",
        "        remainder.before_write()\n        remainder.settle",
        "        remainder.settle",
        "torch_impl/optimizer/test_remainders.py",
    ),
    M(
        "a gather taken for an edit",
        "torch_impl/runtime",
        "        with written_with_remainders(map(local_of, self.params)):",
        "        if True:",
        "torch_impl/optimizer/test_remainders.py",
    ),
    M(
        "own rows with remainders in another rank's place",
        "torch_impl/runtime",
        "first = 0 if bounds is None else",
        "first = 0 if True else",
        "torch_impl/optimizer/test_remainders.py",
    ),
    M(
        "other optimizers on weights with remainders",
        "torch_impl/optimizer",
        'if not getattr(optimizer, "updates_remainders", False):',
        "if False:",
        "torch_impl/optimizer/test_remainders.py",
    ),
    M(
        "norm without the power",
        "torch_impl/dtensor",
        "values = values**order",
        "values = values",
        "torch_impl/dtensor/test_tensor.py torch_impl/dtensor/test_axes.py",
    ),
    M(
        "a rank's NaN lost",
        "torch_impl/dtensor",
        'return both[0].masked_fill(both[1] > 0, float("nan"))',
        "return both[0]",
        "torch_impl/dtensor/test_tensor.py torch_impl/dtensor/test_axes.py torch_impl/diagnostics",
    ),
    M(
        "mean is a sum",
        "torch_impl/dtensor",
        "value = value / count if count != 1 else value",
        "value = value",
        "torch_impl/dtensor/test_tensor.py torch_impl/dtensor/test_axes.py",
    ),
    M(
        "a slice begins with the first row",
        "torch_impl/dtensor",
        "begin = max(first - r0, 0)",
        "begin = 0",
        "torch_impl/dtensor/test_views.py",
    ),
    M(
        "writes to views count for the view alone",
        "torch_impl/dtensor/views.py",
        "torch._C.DispatchKey.ADInplaceOrView, False",
        "torch._C.DispatchKey.ADInplaceOrView, True",
        "torch_impl/dtensor/test_views.py",
    ),
    M(
        "views in shapes that cut a row",
        "torch_impl/dtensor/views.py",
        "if after and any(bound * before % after for bound in bounds):",
        "if False:",
        "torch_impl/dtensor/test_views.py",
    ),
    M(
        "a rank's rows are transposed as a whole matrix",
        "torch_impl/dtensor/matrices.py",
        "if bounds[shard + 1] == matrix.shape[0] else None",
        "if True else None",
        "torch_impl/optimizer/test_stock_muon.py",
    ),
    M(
        "products of matrices on different ranks",
        "torch_impl/dtensor/matrices.py",
        "if holder is None or any(_holder(matrix) != holder for matrix in matrices):",
        "if holder is None:",
        "torch_impl/optimizer/test_stock_muon.py",
    ),
    M(
        "norms are summed over the mesh of the first",
        "torch_impl/dtensor/reductions.py",
        "            _combine(values, cut)\n            values = values ** (1 / order)",
        "            _combine(values, next(filter(None, cuts)))\n            values = values ** (1 / order)",
        "torch_impl/runtime/test_shard_placement.py torch_impl/optimizer/test_stock_muon.py",
    ),
    M(
        "a whole state dict that lacks weights leaves what memory held",
        "torch_impl/checkpoint/full_state_dict.py",
        "elif param.is_meta and not info.broadcast_from_rank0 and not _has(state, param, info):",
        "elif False:",
        "torch_impl/test_wrong_use.py",
    ),
    M(
        "one rank's error of shard_placement_fn is told to nobody",
        "torch_impl/api.py",
        "    except Exception as error:\n        failure = error",
        "    except (TypeError, ValueError) as error:\n        failure = error",
        "torch_impl/test_wrong_use.py",
    ),
    M(
        "distribute_tensor takes each rank's own tensor",
        "torch_impl/dtensor",
        "values = _of_one_rank(values, mesh, src_data_rank)",
        "pass",
        "torch_impl/checkpoint/test_assign.py",
    ),
    M(
        "a load by assignment replaces the parameters",
        "torch_impl/checkpoint",
        "state.update(load.keys)",
        "pass",
        "torch_impl/checkpoint/test_assign.py",
    ),
    M(
        "a pickle holds bfloat16 weights without their remainders",
        "torch_impl/dtensor",
        "is None else main_values(self)",
        "is None or True else main_values(self)",
        "torch_impl/dtensor/test_pickle.py",
    ),
    M(
        "the divisor is forgotten with the meta device",
        "torch_impl/runtime/unit/group.py",
        "self.params[:] = planned\n        self._connect()",
        "self.params[:] = planned\n        self._divisor = Divisor(float(self.mesh.size))\n        self._connect()",
        "torch_impl/runtime/test_setters.py torch_impl/runtime/test_meta_init.py",
    ),
    M(
        "each rank draws by its own seed",
        "torch_impl/dtensor",
        "state = _of_first_rank(own_state, tensor)",
        "state = own_state",
        "torch_impl/dtensor/test_random.py",
    ),
    M(
        "extrema of ranks without rows count",
        "torch_impl/dtensor/dim_reductions.py",
        '"amax": -math.inf',
        '"amax": 0.0',
        "torch_impl/dtensor/test_views.py",
    ),
    M(
        "not-a-number of another rank is lost in an extremum",
        "torch_impl/dtensor/dim_reductions.py",
        "masked_fill(both[1] > 0, math.nan)",
        "masked_fill(both[1] > 1, math.nan)",
        "torch_impl/dtensor/test_views.py",
    ),
    M(
        "one order for all histories",
        "torch_impl/comm/collective_order.py",
        " or count % _EVERY == 0:",
        ":",
        "torch_impl/comm/test_collective_order.py",
    ),
    M(
        "a rank that came alone stays one turn ahead",
        "torch_impl/comm/agreement.py",
        "                store.add(key, -1)\n",
        "                pass\n",
        "torch_impl/comm/test_collective_order.py",
    ),
    M(
        "what a rank was at is overwritten by its next turn",
        "torch_impl/comm/agreement.py",
        "{turn % 2} {k}",
        "{k}",
        "torch_impl/comm/test_collective_order.py",
    ),
    M(
        "groups reduce where their ranks have gradients",
        "torch_impl/runtime/unit/unit_backward.py",
        "idle=reached and trains",
        "idle=False",
        "torch_impl/runtime/test_uniform.py",
    ),
    M(
        "gradients of inputs reduce",
        "torch_impl/runtime/unit/unit_backward.py",
        "self._reached = self._reached or accumulates",
        "self._reached = True",
        "torch_impl/runtime/test_uniform.py",
    ),
    M(
        "what a raised backward left stays",
        "torch_impl/runtime/ground/autograd.py",
        "                schedule.recover()\n",
        "                pass\n",
        "torch_impl/runtime/test_late_backward.py torch_impl/runtime/test_raised_backward.py",
    ),
    M(
        "sums over model axes in the gradient's dtype",
        "torch_impl/runtime/gradients/gradient.py",
        "reduce = grad.dtype if spec.divides_first else spec.dtypes.reduce",
        "reduce = grad.dtype",
        "torch_impl/parallel/test_reduce_dtype.py",
    ),
    M(
        "contents of saves are not compared",
        "torch_impl/checkpoint/saving.py",
        "if any(len({digests[k] for k in ranks}) > 1 for ranks in alike):",
        "if False:",
        "torch_impl/checkpoint/test_groups.py",
    ),
    M(
        "ranks decide alone whether to gather",
        "torch_impl/runtime/weights/group_weights.py",
        "self._due |= trains and",
        "self._due |= False and",
        "torch_impl/runtime/test_uniform.py",
    ),
    M(
        "backward(inputs=...) passes over sharded parameters",
        "torch_impl/runtime/ground/autograd.py",
        "all_inputs = (*asked, *wholes) if unused else asked",
        "all_inputs = asked",
        "torch_impl/runtime/test_late_backward.py",
    ),
    M(
        "hooks bring gradients to some ranks",
        "torch_impl/runtime/gradients/reduction.py",
        "            self._check_hooked(trained - used, spec.levels.views(level, done.sums))\n",
        "            pass\n",
        "torch_impl/runtime/test_hooks_memory.py",
    ),
]
JAX = [
    M(
        "gradients of inputs of float8 products from unrounded weights",
        "jax_impl/runtime",
        "weight = _rounded(rhs, E4M3)",
        "weight = rhs",
        "jax_impl/runtime/test_float8_products.py",
    ),
    M(
        "gradients rounded as activations are",
        "jax_impl/runtime",
        "to_lhs(_rounded(grad, E5M2))",
        "to_lhs(_rounded(grad, E4M3))",
        "jax_impl/runtime/test_float8_products.py",
    ),
    M(
        "gradients of weights from rounded activations",
        "jax_impl/runtime",
        "lambda w: lax.dot_general(lhs, w, dimensions, precision)",
        "lambda w: lax.dot_general(_rounded(lhs, E4M3), w, dimensions, precision)",
        "jax_impl/runtime/test_float8_products.py",
    ),
    M(
        "float8 gradients whose smallest numbers are cut off",
        "jax_impl/runtime",
        "power = dropped + 1 - float8.bias",
        "power = dropped + 2 - float8.bias",
        "jax_impl/runtime/test_float8_products.py",
    ),
    M(
        "float8 products of sizes that no kernel takes",
        "jax_impl/runtime",
        "return inputs % _MULTIPLE == 0 and outputs % _MULTIPLE == 0",
        "return True",
        "jax_impl/runtime/test_float8_products.py parity/test_float8_products.py",
    ),
    M(
        "decoders that ignore what is to multiply",
        "jax_impl/models",
        "if self.dot_general is None:",
        "if True:",
        "jax_impl/runtime/test_float8_products.py",
    ),
    M(
        "bytes of a gather without its scales",
        "jax_impl/runtime/groups/layout_report.py",
        "padded + scales if wire.float8 else",
        "padded if wire.float8 else",
        "jax_impl/diagnostics/test_layout_report.py",
    ),
    M(
        "reduce-scatter skipped",
        "jax_impl/comm",
        "self._over(axis, self._scatter, reduced)",
        "reduced[: reduced.shape[0] // self.axes.sizes[axis]]",
        "jax_impl/runtime/test_strategy_matrix.py",
    ),
    M(
        "all-reduce skipped",
        "jax_impl/comm",
        "self._over(axis, lax.psum, reduced)",
        "reduced * 1",
        "jax_impl/runtime/test_strategy_matrix.py",
    ),
    M(
        "mean over the wrong count",
        "jax_impl/runtime",
        "cls(microbatches * (plan.data_ranks if flat else 1)",
        "cls((plan.data_ranks if flat else 1)",
        "jax_impl/runtime/test_strategy_matrix.py",
    ),
    M(
        "a sum not divided by its weight",
        "jax_impl/runtime",
        "jnp.where(parts.weight == 0, jnp.ones_like(parts.weight), parts.weight)",
        "jnp.ones_like(parts.weight)",
        "jax_impl/test_losses.py",
    ),
    M(
        "statistics of parts without their weight",
        "jax_impl/runtime",
        "return value if weight is None else value * weight.astype(value.dtype)",
        "return value",
        "jax_impl/test_losses.py",
    ),
    M(
        "a weight may come from the model",
        "jax_impl/modules",
        "{_WEIGHT: (_Comes.MODEL, _NO_WEIGHT)}",
        "{}",
        "jax_impl/test_losses.py",
    ),
    M(
        "moments that are whole everywhere without a word",
        "jax_impl/optimizer",
        "if path not in plan.arrays and path in uncut:",
        "if path in plan.arrays and path in uncut:",
        "jax_impl/optimizer/test_logical.py",
    ),
    M(
        "a mask made of the model's pytree falls on other parameters",
        "jax_impl/optimizer",
        "[values.get(path) for path in model.paths]",
        "[values.get(path) for path in reversed(model.paths)]",
        "jax_impl/optimizer/test_logical.py",
    ),
    M(
        "sums over some parameters count as sums over all",
        "jax_impl/optimizer/terms.py",
        'self.terms.number("reduced", name, parts)',
        'self.terms.number("reduced", name, frozenset(term for term, _ in parts))',
        "jax_impl/optimizer/test_chosen_form.py",
    ),
    M(
        "one branch of a choice stands for all",
        "jax_impl/optimizer/terms.py",
        "if all(value == first for value in values):",
        "if True:",
        "jax_impl/optimizer/test_chosen_form.py",
    ),
    M(
        "loops in an optimizer's program are all the same",
        "jax_impl/optimizer/terms.py",
        "return tuple(self._named(value, v) for value, v in zip(outputs, jaxpr.outvars, strict=True))",
        "return ()",
        "jax_impl/optimizer/test_chosen_form.py",
    ),
    M(
        "what lies in padding does not matter",
        "jax_impl/optimizer/terms.py",
        "if owner.padded and value.padding not in harmless:",
        "if False:",
        "jax_impl/optimizer/test_chosen_form.py",
    ),
    M(
        "masks of flax's two states may differ",
        "jax_impl/optimizer/chosen_form.py",
        "if boxed is not None and not boxed.equals(expected):",
        "if False:",
        "jax_impl/optimizer/test_chosen_form.py",
    ),
    M(
        "a loss may change a unit's parameters",
        "jax_impl/modules/seal.py",
        "        _check_witnesses(operands)\n",
        "        pass\n",
        "jax_impl/modules/test_unit_readings.py",
    ),
    M(
        "a loss may turn the layers of a stack around",
        "jax_impl/modules/seal.py",
        "max(moved, default=0) < free and ",
        "",
        "jax_impl/modules/test_unit_readings.py",
    ),
    M(
        "a unit takes another unit's parameters for its own",
        "jax_impl/modules/unit_parameter.py",
        "if origin.unit is not unit:",
        "if False:",
        "jax_impl/modules/test_unit_readings.py",
    ),
    M(
        "attributes that a unit deletes stay",
        "jax_impl/modules/unit_parameter.py",
        "dict.fromkeys(old.keys() - now.keys(), _MISSING) | {",
        "{",
        "jax_impl/modules/test_unit_readings.py",
    ),
    M(
        "classes of units keep the methods of a trace",
        "jax_impl/modules/interception.py",
        "if not _traces[cls]:",
        "if False:",
        "jax_impl/modules/test_unit_readings.py",
    ),
    M(
        "a condition over one axis counts as one of all devices",
        "jax_impl/modules/device_values.py",
        "axes=value.axes - over if equal",
        "axes=frozenset() if equal",
        "jax_impl/modules/test_device_values.py",
    ),
    M(
        "a decaying sum counts as a sum",
        "jax_impl/runtime/groups/variables.py",
        'if info.rule == "sum" and value.base != path:',
        "if False:",
        "jax_impl/runtime/test_variables.py",
    ),
    M(
        "changes of an evaluation are dropped",
        "jax_impl/evaluate.py",
        "if self._mutable is None and changed:",
        "if False:",
        "jax_impl/runtime/test_variables.py",
    ),
    M(
        "a key's update goes on while the next begins",
        "jax_impl/optimizer/in_turn.py",
        "results = fence(dict(",
        "results = (dict(",
        "jax_impl/optimizer/test_offload.py",
    ),
    M(
        "the second part of an array is the first again",
        "jax_impl/runtime/groups/memory_kinds.py",
        "start + middle, x.shape[axis]",
        "start, x.shape[axis]",
        "jax_impl/optimizer/test_offload.py",
    ),
    M(
        "a share of the moments is never more than asked",
        "bridge/core/sharding/policy/offload_share.py",
        "self._picked + numel / 2 >",
        "self._picked + numel >",
        "jax_impl/optimizer/test_offload.py",
    ),
    M(
        "scales of rows are not counted",
        "bridge/planning",
        "+ rows.max(1).sum() * SCALE_BYTES",
        "",
        "planning/test_optimizers.py",
    ),
    M(
        "the kind of memory is forgotten",
        "jax_impl/runtime",
        "sharding.with_memory_kind(memory_kind) if memory_kind else sharding",
        "sharding",
        "jax_impl/test_host_memory.py",
    ),
    M(
        "frozen parameters become float32",
        "bridge/core/sharding/policy/group_dtypes.py",
        "main = trained if trainable else stored",
        "main = trained",
        "jax_impl/test_frozen_dtypes.py",
    ),
    M(
        "updates are rounded to the dtype of the weights before they are added",
        "jax_impl/optimizer",
        "dtype = jnp.result_type(*leaves)",
        "dtype = group.dtype",
        "jax_impl/test_main_dtype.py",
    ),
    M(
        "replicated parameters are sharded like their unit's others",
        "jax_impl",
        'strategy_named("no_shard") if self.replicated',
        'strategy_named("no_shard") if False',
        "jax_impl/test_replicated.py",
    ),
    M(
        "half-precision weights are updated in half precision",
        "jax_impl/optimizer",
        "wide = weight.astype(update_dtype(weight.dtype))",
        "wide = weight",
        "jax_impl/test_main_dtype.py parity/test_main_dtype.py",
    ),
    M(
        "optimizers that look at shapes run on the shards",
        "jax_impl/optimizer",
        "return able if form is None else",
        "return able if True else",
        "jax_impl/optimizer/test_logical.py jax_impl/optimizer/test_chosen_form.py",
    ),
    M(
        "moments of parameters are whole everywhere",
        "jax_impl/runtime",
        "dimension = None if cut is None else cut + stack",
        "dimension = None",
        "jax_impl/optimizer/test_logical.py",
    ),
    M(
        "norms of other rows than the parameter's",
        "jax_impl/diagnostics",
        "piece = lax.dynamic_slice_in_dim(flat, jnp.asarray(begins)[rank], most, axis=1)",
        "piece = lax.dynamic_slice_in_dim(flat, 0, most, axis=1)",
        "jax_impl/diagnostics/test_norms.py",
    ),
    M(
        "copies of a non-finite value count as several",
        "jax_impl/diagnostics",
        "total = self.counts.setdefault(replica, [0, 0])",
        "total = self.counts.setdefault(0, [0, 0])",
        "jax_impl/diagnostics/test_nonfinite.py",
    ),
    M(
        "outputs in the order in which they were traced",
        "jax_impl/runtime/step/outputs.py",
        "return seen.clean and not (seen.spoiled",
        "return True and not (seen.spoiled",
        "jax_impl/diagnostics/test_outputs.py",
    ),
    M(
        "a watched stack does not know its layers",
        "jax_impl/runtime/step/outputs.py",
        "return jnp.arange(layers, dtype=jnp.int32)",
        "return jnp.zeros(layers, dtype=jnp.int32)",
        "jax_impl/diagnostics/test_outputs.py",
    ),
    M(
        "backward without its unit's name",
        "jax_impl/runtime/unit/order.py",
        'with jax.named_scope("reduce"):\n                    reduced',
        'with jax.named_scope("sum"):\n                    reduced',
        "jax_impl/diagnostics/test_scopes.py",
    ),
    M(
        "a gather beside the next collective",
        "jax_impl/runtime",
        "must still come\n                # after this one.\n                source, after = fence((source, after))",
        "must still come\n                # after this one.\n                pass",
        "jax_impl/diagnostics/test_collectives.py",
    ),
    M(
        "gathered weights kept to backward",
        "jax_impl/runtime",
        "output, varying = fence_some((output, rest.varying), [*depends, *[True] * len(rest.varying)])",
        "varying = rest.varying",
        "jax_impl/diagnostics/test_memory.py jax_impl/diagnostics/test_compiled_collectives.py",
    ),
    M(
        "second forward merged with the first",
        "jax_impl/runtime",
        "cotangent, varying = fence((cotangent, varying))",
        "pass",
        "jax_impl/diagnostics/test_memory.py",
    ),
    M(
        "a gather waits for the output of the unit before",
        "jax_impl/runtime/unit/order.py",
        "name, gate = (GATHER, None) if last.gate is None else (GATHER_AHEAD, last.gate)",
        "name, gate = GATHER, None",
        "jax_impl/runtime/test_order.py",
    ),
    M(
        "weights of all units kept from a recomputation to its backward",
        "jax_impl/runtime/unit/order.py",
        "room = 0 if again else self.limit - 1",
        "room = len(self._held)",
        "jax_impl/runtime/test_kept.py",
    ),
    M(
        "weights of the last forward taken for any backward",
        "jax_impl/runtime/unit/order.py",
        "self._held[-1][0] is use and ",
        "",
        "jax_impl/runtime/test_kept.py",
    ),
    M(
        "all weights come from the host's memory at once",
        "jax_impl/runtime/groups/memory_kinds.py",
        "start = jnp.where(there, 0, 1).astype(jnp.int32)",
        "start = jnp.int32(0)",
        "jax_impl/runtime/test_fetching.py",
    ),
    M(
        "a policy's prefetch not taken",
        "jax_impl/api.py",
        "asked = policy.prefetch",
        "pass",
        "jax_impl/runtime/test_order.py",
    ),
    M(
        "gathers as early as the first one",
        "jax_impl/runtime/unit/order.py",
        "held, after, last.gate = fence((held, after, gate))",
        "held, after = fence((held, after)); last.gate = gate",
        "jax_impl/runtime/test_order.py",
    ),
    M(
        "a reduction waited for by the next unit",
        "jax_impl/runtime/unit/order.py",
        "if len(last.reduced) > 1:",
        "if last.reduced:",
        "jax_impl/runtime/test_order.py",
    ),
    M(
        "a shard of 127 elements",
        "jax_impl/comm/collectives.py",
        "LANES = 128",
        "LANES = 127",
        "jax_impl/comm/test_collectives_in_rows.py",
    ),
    M(
        "what pads the last row of a shard is kept",
        "jax_impl/comm/collectives.py",
        "psum_scatter(rows, axis_name, tiled=True).reshape(-1)[:size]",
        "psum_scatter(rows, axis_name, tiled=True).reshape(-1)[-size:]",
        "jax_impl/comm/test_collectives_in_rows.py",
    ),
    M(
        "a pass gathers its own layer for the next",
        "jax_impl/runtime/program/pipeline.py",
        "self._gather(k + 1, gate)",
        "self._gather(k, gate)",
        "jax_impl/runtime/test_pipeline.py",
    ),
    M(
        "gradients are stacked as those of the layer after",
        "jax_impl/runtime/program/pipeline.py",
        "self._write_stacks(stacks, reduced, k - 1, late=True)",
        "self._write_stacks(stacks, reduced, k, late=True)",
        "jax_impl/runtime/test_pipeline.py",
    ),
    M(
        "a pass ends before its transfers",
        "jax_impl/runtime/program/pipeline.py",
        "results, waiting, gathered, reduced, done = fence(",
        "results, waiting, gathered, reduced, done = (",
        "jax_impl/runtime/test_pipeline.py",
    ),
    M(
        "a gather in a loop waits for no layer",
        "jax_impl/runtime/program/level.py",
        "self._issue(self.gate)",
        "self._issue(jnp.array(True))",
        "jax_impl/runtime/test_pipeline.py",
    ),
    M(
        "the gate of a gather is its first operand",
        "jax_impl/runtime/program/level.py",
        "operands(v for v in gather.invars if not is_gate(v))",
        "operands(gather.invars[1:])",
        "jax_impl/runtime/test_pipeline.py",
    ),
    M(
        "what a loop carries chooses its next weights",
        "jax_impl/runtime/program/level.py",
        "if not wanted.isdisjoint(carried) or any(",
        "if any(",
        "jax_impl/runtime/test_pipeline.py",
    ),
    M(
        "a sum over all layers made anew in backward",
        "jax_impl/runtime/program/residuals.py",
        "_SAVED, _READ = 1.1, 2.5",
        "_SAVED, _READ = 1.1, 1e9",
        "jax_impl/runtime/test_derived.py",
    ),
    M(
        "rows of a matrix alone are cut at its padded end",
        "jax_impl/runtime/groups/flat_group.py",
        "rows[: slot.end // rows.shape[1]]",
        "rows[-(slot.end // rows.shape[1]) :]",
        "jax_impl/runtime/test_rows.py",
    ),
    M(
        "parts of a parameter joined in another order",
        "jax_impl/runtime/groups/cut_group.py",
        "else [stack + axis, own]",
        "else [own, stack + axis]",
        "jax_impl/runtime/test_model_axes.py",
    ),
    M(
        "gradients of cut parameters are those of one rank",
        "jax_impl/runtime/groups/cut_group.py",
        "reduced = self.model.on_each(super().reduce,",
        "size = self.layout.padded_size // self.wire.axes.shards(self.strategy.gradients)\n        "
        "reduced = self.model.on_each(lambda g: (pack(self.layout, g)[:size],),",
        "jax_impl/runtime/test_model_axes.py",
    ),
    M(
        "a part of a parameter is saved as the first",
        "jax_impl/runtime/groups/cut_group.py",
        "+= coordinates[cut.axis] * self._part(path, cut)",
        "+= 0",
        "jax_impl/checkpoint/test_model_axes.py",
    ),
    M(
        "the norm of a whole parameter is counted on each device of a model axis",
        "jax_impl/diagnostics/norms.py",
        "return tuple(name for names in entries for name in names if name is not None)",
        'return tuple(dict.fromkeys([*(n for names in entries for n in names if n is not None), "tp"]))',
        "jax_impl/runtime/test_model_axes.py",
    ),
    M(
        "the norm of a cut parameter is that of a part",
        "jax_impl/diagnostics/norms.py",
        "for names in entries for name in names if name is not None)",
        "for names in entries for name in names if name in stored.wire.axes.names)",
        "jax_impl/runtime/test_model_axes.py",
    ),
    M(
        "a step's results lie as the compiler likes",
        "jax_impl/runtime/step/gradients.py",
        "    if not plan.model_axes.names:\n        return step",
        "    return step",
        "jax_impl/test_model_axes_programs.py",
    ),
    M(
        "heads are cut by features",
        "bridge/core/sharding/policy/parallel_styles.py",
        'return _OF_COLWISE[kind] if style == "colwise"',
        'return (ndim - 1 if kind == "kernel" else _OF_COLWISE[kind]) if style == "colwise"',
        "jax_impl/modules/test_partitioning.py",
    ),
    M(
        "layers of a stack are cut apart",
        "jax_impl/modules/partitioning.py",
        "    return entries[1:]",
        "    return entries",
        "jax_impl/modules/test_partitioning.py",
    ),
    M(
        "each device of a model axis is a part of the batch",
        "jax_impl/runtime/groups/sharding_plan.py",
        "return self.axes.shards(self.axes.ndim)",
        "return int(self.mesh.devices.size)",
        "jax_impl/runtime/test_model_axes.py",
    ),
    M(
        "constants of a unit held by a barrier",
        "jax_impl/runtime/program/residuals.py",
        "inner = inner_program(equation) if any(varies) else None",
        "inner, varies = None, [True]",
        "jax_impl/runtime/test_residuals.py",
    ),
    M(
        "microbatches interleaved",
        "jax_impl/runtime",
        "lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)",
        "lambda x: x.reshape(-1, microbatches, *x.shape[1:]).swapaxes(0, 1), batch)",
        "jax_impl/test_train.py",
    ),
    M(
        "every layer is the first",
        "jax_impl/runtime",
        "yield paths[name], (layer, *offsets)",
        "yield paths[name], (0, *offsets)",
        "jax_impl/checkpoint/test_models.py jax_impl/checkpoint/test_programs.py",
    ),
    M(
        "moments go on with a fresh count",
        "jax_impl/checkpoint",
        "(_NUMBERS in by_path and _NUMBERS not in complete) or",
        "",
        "jax_impl/checkpoint/test_other_optimizers.py",
    ),
    M(
        "moments fit whatever their place",
        "jax_impl/checkpoint",
        "            _common_end(node, other),\n",
        "            0,\n",
        "jax_impl/checkpoint/test_moments.py",
    ),
    M(
        "what a checkpoint lacks of an array is zero",
        "jax_impl/checkpoint",
        "return kept[path, offsets] if source is None",
        "return np.zeros(sizes, np.float32) if source is None",
        "jax_impl/checkpoint/test_other_optimizers.py",
    ),
    M(
        "a step whose save did not finish is loaded",
        "bridge/core/formats/saving",
        "([step for step in trees if _has(step, COMMIT_FILE)] or trees)",
        "trees",
        "jax_impl/checkpoint/test_steps.py",
    ),
    M(
        "padding has values",
        "jax_impl/runtime",
        "values = np.zeros((*self._stack, self.layout.shard_size), dtype)",
        "values = np.ones((*self._stack, self.layout.shard_size), dtype)",
        "jax_impl/runtime/test_sharding_plan.py jax_impl/test_train.py",
    ),
    M(
        "first moment by the second's beta",
        "jax_impl/optimizer",
        " lerp(m, g, number(1 - constants.b1))",
        " lerp(m, g, number(1 - constants.b2))",
        "jax_impl/optimizer/test_main_weight_adamw.py",
    ),
    M(
        "narrow gradients are rounded before they are divided",
        "jax_impl/comm",
        "or self.grad.itemsize < self.reduce.itemsize",
        "",
        "jax_impl/runtime/test_divisors.py",
    ),
    M(
        "float16 sums, not means",
        "jax_impl/comm",
        "values = divide_exactly(values, self._devices(axes))",
        "values = values",
        "jax_impl/runtime/test_divisors.py",
    ),
    M(
        "a unit's own divisor dropped",
        "jax_impl/runtime",
        "self.gradients.get(key, divisor)",
        "divisor",
        "jax_impl/runtime/test_divisors.py",
    ),
    M(
        "filled rows counted",
        "jax_impl/train_state.py",
        "(np.arange(target) < have)",
        "(np.arange(target) <= have)",
        "jax_impl/test_evaluate.py",
    ),
    M(
        "a loader's buffer remembered",
        "jax_impl/train_state.py",
        "leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype)) if isinstance(leaf, np.ndarray) else leaf",
        "leaf",
        "jax_impl/test_evaluate.py",
    ),
    M(
        "every row of a vmap reduced",
        "jax_impl/runtime",
        "if is_mapped((inputs, [index for _, index in axes or ()])) is None:",
        "if True:",
        "jax_impl/modules/test_equinox_models.py",
    ),
    M(
        "the name of a vmap's axis is lost inside of a unit",
        "jax_impl/runtime",
        "axis_name=name, axis_size=size",
        "axis_size=size",
        "jax_impl/modules/test_named_axes.py",
    ),
    M(
        "what is one for all rows has a row of its own for each",
        "jax_impl/runtime",
        "flags[:] = is_mapped((row, leaves))[1]",
        "flags[:] = [True] * len(leaves)",
        "jax_impl/modules/test_named_axes.py",
    ),
    M(
        "a step gives up what the plan remembers",
        "jax_impl/train_state.py",
        "{path: jnp.copy(value) for path, value",
        "{path: value for path, value",
        "jax_impl/test_options.py",
    ),
    M(
        "moments of other weights beside the caller's",
        "jax_impl/checkpoint",
        "parameter_of(n, wanted.parameters) not in kept",
        "True",
        "jax_impl/checkpoint/test_initial.py",
    ),
    M(
        "a loss of padded rows runs",
        "jax_impl/evaluate.py",
        "if self._checked[traced] and rows != real:",
        "if False:",
        "jax_impl/test_evaluate.py",
    ),
    M(
        "a warning points one frame too far in",
        "bridge/core/callers.py",
        "stacklevel=level)",
        "stacklevel=level - 1)",
        "jax_impl/test_warnings.py",
    ),
    M(
        "series inside of blocks are blocks",
        "jax_impl/modules",
        "        if not inside:\n",
        "        if True:\n",
        "jax_impl/modules/test_repeated_blocks.py",
    ),
    M(
        "a layer of a linen stack is called with the whole stack's arrays",
        "jax_impl/modules",
        "arrays = [own_array.reshape(array.shape[1:]) for own_array, array in own]",
        "pass",
        "jax_impl/modules/test_linen_stacks.py",
    ),
    M(
        "a loop over another axis taken for one over axis 0",
        "jax_impl/modules",
        "fits = [own_array.shape for own_array in arrays] == [own_array.shape[1:] for own_array in looped]",
        "fits = True",
        "jax_impl/modules/test_linen_stacks.py",
    ),
    M(
        "a method that is a loop is looped again",
        "jax_impl/modules",
        "return method(bound, *args, **kwargs)",
        "return getattr(bound, name)(*args, **kwargs)",
        "jax_impl/modules/test_linen_stacks.py",
    ),
    M(
        "what a linen unit writes is dropped",
        "jax_impl/modules",
        "module.put_variable(collection, below, value)",
        "pass",
        "jax_impl/modules/test_linen_collections.py",
    ),
    M(
        "modules of equal leading sizes are taken for stacks",
        "jax_impl/modules",
        "shape_seen != (length, *shape)",
        "shape_seen == (0, *shape)",
        "jax_impl/modules/test_nnx_stacks.py",
    ),
    M(
        "variables that a unit only reads set in a loop",
        "jax_impl/modules",
        "if new is not old\n",
        "if True\n",
        "jax_impl/test_evaluate.py",
    ),
    M(
        "evaluation drops the last rows' order",
        "jax_impl/evaluate.py",
        "jax.tree.map(lambda x: x[:real], by_row)",
        "jax.tree.map(lambda x: x[-real:], by_row)",
        "jax_impl/test_evaluate.py",
    ),
    M("no eps", "jax_impl/optimizer", "+ opaque(number(constants.eps))", "", "parity/test_jax_adamw.py"),
    M(
        "a product contracted",
        "jax_impl/optimizer",
        "v = new * g + opaque(old)",
        "v = new * g + old",
        "parity/test_jax_adamw.py",
    ),
]
SHARDING = [
    M(
        "blocks run on from matrix to matrix",
        "bridge/core/sharding",
        "matrix = shape[-2] if len(shape) > 2 else num_rows",
        "matrix = num_rows",
        "sharding/test_blocks.py",
    ),
    M(
        "a row range shifted",
        "bridge/core/sharding",
        "return slot.rows_before(rank * self.shard_sizes[slot.buffer])",
        "return slot.rows_before(rank * self.shard_sizes[slot.buffer] + slot.row_size)",
        "sharding/test_layout.py",
    ),
    M(
        "hfsdp does not cut over the outer axis",
        "bridge/core/sharding",
        '"hfsdp": (1, 1, 2)',
        '"hfsdp": (1, 1, 1)',
        "sharding torch_impl/test_policy.py",
    ),
]
FORMATS = [
    M(
        "typed keys are written as their data",
        "bridge/core/formats/orbax/item_files.py",
        "    if not keys:",
        "    if True:",
        "formats/orbax/test_keys.py",
    ),
    M(
        "typed keys are restored on one device of all",
        "bridge/core/formats/orbax/item_files.py",
        '"shape": [-1]',
        '"shape": [1]',
        "formats/orbax/test_keys.py",
    ),
    M(
        "other dtypes pass for the data of keys",
        "bridge/core/formats/orbax/item_files.py",
        "data = dtype == np.uint32 and len(shape) > 0",
        "data = True",
        "formats/orbax/test_keys.py",
    ),
    M(
        "numbers of Python become arrays",
        "bridge/core/formats/orbax",
        'return SCALAR if leaf_kind == SCALAR else "np.ndarray"',
        'return "np.ndarray"',
        "formats/orbax/test_structure.py",
    ),
    M(
        "noted leaves are left out of the tree",
        "bridge/core/formats/orbax",
        "return implied_kinds(arrays, objects) | told",
        "return implied_kinds(arrays, objects)",
        "formats/orbax/test_structure.py",
    ),
    M(
        "text of the tree becomes an object",
        "bridge/core/formats/tensors/leaves.py",
        "return type(value) is str",
        "return False",
        "formats/orbax/test_structure.py",
    ),
    M(
        "CRC of a .distcp record ignored",
        "bridge/core/formats/dcp",
        "if record.crc is not None and crc != record.crc:",
        "if False:",
        "formats/dcp/test_archive.py formats/dcp/test_reader.py",
    ),
    M(
        "checksum of an Orbax chunk ignored",
        "bridge/core/formats/orbax",
        'if crc.to_bytes(4, "little") != file[stop : stop + 4]:',
        "if False:",
        "formats/orbax/test_reader.py checkpoints/test_verify_flips.py",
    ),
    M(
        "a whole Orbax chunk is not compared",
        "bridge/core/formats/orbax/zarr/raw_chunks.py",
        "return source, lambda elements: self._compare(key, stop, extend(0, raw_bytes(elements)), what)",
        "return source, lambda elements: None",
        "formats/orbax/test_reader.py checkpoints/test_verify_flips.py",
    ),
    M(
        "a part's Orbax chunk is not compared",
        "bridge/core/formats/orbax/zarr/raw_chunks.py",
        "if key not in self._verified:",
        "if False:",
        "formats/orbax/test_reader.py",
    ),
    M(
        "checksum of a shard index ignored",
        "bridge/core/formats/orbax",
        "if google_crc32c.value(file[position : position + 16]) != crc:",
        "if False:",
        "formats/orbax/test_reader.py checkpoints/test_verify_flips.py",
    ),
    M(
        "places not aligned",
        "bridge/core/formats/files",
        "start = self.end + -self.end % alignment",
        "start = self.end",
        "formats/files formats/dcp formats/orbax formats/safetensors",
    ),
    M(
        "a head written twice, directly",
        "bridge/core/formats/files",
        "first, last = -offset % BLOCK, len(view)",
        "first, last = BLOCK, len(view)",
        "formats/files",
    ),
    M(
        "a joined chunk skipped",
        "bridge/core/formats",
        "members.append(box)",
        "pass",
        "checkpoints/test_convert.py",
    ),
    M(
        "the last row of a piece skipped",
        "bridge/core/formats",
        "sizes[axis] = min(step, sizes[axis] - low)",
        "sizes[axis] = max(1, min(step, sizes[axis] - low) - 1)",
        "checkpoints/test_diff_tensors.py checkpoints/test_diff.py checkpoints/test_verify.py",
    ),
    M(
        "another conversion resumed",
        "bridge/core/formats/files",
        "if noted == dict(key):",
        "if noted:",
        "checkpoints/test_convert_killed.py",
    ),
    M(
        "chunks skipped",
        "bridge/checkpoints",
        "    if run:\n        yield run",
        "    if False:\n        yield run",
        "checkpoints/test_convert.py",
    ),
    M(
        "nothing taken over",
        "bridge/checkpoints",
        "if box not in stored)",
        "if True)",
        "checkpoints/test_convert_killed.py",
    ),
]
MAPPING = [
    M(
        "transpose dropped",
        "bridge/core/mapping/families/decoder.toml",
        'mlp/down/kernel : f m"',
        'mlp/down/kernel : m f"',
        "mapping/test_translation.py",
    ),
    M(
        "gate and up swapped",
        "bridge/core/mapping/families/decoder.toml",
        '["layers/{i}/mlp/gate/kernel : m gate", "layers/{i}/mlp/up/kernel : m up"]',
        '["layers/{i}/mlp/up/kernel : m gate", "layers/{i}/mlp/gate/kernel : m up"]',
        "mapping/test_translation.py",
    ),
    M(
        "heads and head size swapped",
        "bridge/core/mapping/families/decoder.toml",
        'attention/key/kernel : m h d"',
        'attention/key/kernel : m d h"',
        "mapping/test_translation.py",
    ),
    M(
        "moments swapped",
        "bridge/core/mapping",
        '{"exp_avg": "mu", "exp_avg_sq": "nu",',
        '{"exp_avg": "nu", "exp_avg_sq": "mu",',
        "mapping/test_translation.py mapping/test_optax.py",
    ),
    M(
        "scales of two parts taken for one",
        "bridge/core/mapping/one_rule/scales.py",
        "common = math.gcd(common, dim.offset)",
        "pass",
        "mapping/test_scales.py",
    ),
    M(
        "a factor changes the payload of scaled moments",
        "bridge/core/mapping/one_rule/instance.py",
        "return view, self._changed(scales, changes)",
        "return self._changed(view, changes), scales",
        "mapping/test_scales.py",
    ),
    M(
        "boxes of a run fill more than they have",
        "bridge/core/mapping/language/relation.py",
        "if math.prod(stop - start for start, stop in ranges.values()) == block.target_box(ranges).numel:",
        "if True:",
        "mapping/test_running.py",
    ),
    M(
        "scales of another model's rows ignored",
        "jax_impl/checkpoint/conversion.py",
        "return decode(values, box, self._stored.read(scales, scale_box(box, runs)), runs)",
        "return values.astype(np.float32)",
        "jax_impl/checkpoint/test_mapping.py",
    ),
    M(
        "an offset forgotten",
        "bridge/core/mapping",
        "offset += step * (_extent(affine, ranges)[0] - low)",
        "offset += step * _extent(affine, ranges)[0]",
        "mapping/test_relation.py",
    ),
    M(
        "second moments scaled like the first",
        "bridge/core/mapping",
        '"exp_avg": -1, "exp_avg_sq": -2',
        '"exp_avg": -1, "exp_avg_sq": -1',
        "mapping/test_operations.py",
    ),
    M("a shift not scaled", "bridge/core/mapping", "d - c / a * b", "d - b", "mapping/test_operations.py"),
    M(
        "two roundings",
        "bridge/core/mapping",
        "bits |= inexact",
        "pass",
        "mapping/test_operations.py checkpoints/test_convert_options.py",
    ),
]
CHECKPOINTS = [
    M(
        "the structure of a tree is noted nowhere",
        "bridge/checkpoints/ground/outputs.py",
        "if leaf_kind is not None and implied.get(path) != leaf_kind:",
        "if False:",
        "formats/orbax/test_structure.py",
    ),
    M(
        "the data of keys is rearranged",
        "bridge/checkpoints/ground/outputs.py",
        "if key_implementation(known.get(name)) is not None:",
        "if False:",
        "formats/orbax/test_keys.py",
    ),
    M(
        "keys of other types are compared as data",
        "bridge/checkpoints/compare/structure.py",
        "if of_a != of_b:",
        "if False:",
        "formats/orbax/test_keys.py",
    ),
    M(
        "lists that are dicts elsewhere are no difference",
        "bridge/checkpoints/compare/structure.py",
        "if type(key_a) is not type(key_b):",
        "if False:",
        "formats/orbax/test_structure.py",
    ),
    M(
        "another structure is within",
        "bridge/checkpoints/compare/diff_report.py",
        "self.unreadable, self.structure)",
        "self.unreadable)",
        "formats/orbax/test_structure.py",
    ),
    M(
        "empty containers of weights are left out",
        "bridge/checkpoints/ground/selection.py",
        " and kinds.get(name) not in EMPTY",
        "",
        "formats/orbax/test_structure.py",
    ),
    M(
        "conversion ignores the manifest",
        "bridge/checkpoints/convert/plan.py",
        "checked(whole) if options.verify else whole",
        "whole",
        "checkpoints/test_convert_checked.py",
    ),
    M(
        "bytes beside the chunks of DCP are not compared",
        "bridge/checkpoints/ground/checked.py",
        'if reader.format == "safetensors" or not isinstance(home, StorePath):',
        'if reader.format == "safetensors":',
        "checkpoints/test_convert_checked.py",
    ),
    M(
        "small tensors of DCP are not compared with their CRC-32",
        "bridge/core/formats/dcp/reader.py",
        "        if crc != record.crc:\n            return None\n        self._verified",
        "        self._verified",
        "formats/files/test_small_tensors_direct.py",
    ),
    M(
        "small arrays of Orbax are not compared with their CRC-32C",
        "bridge/core/formats/orbax/zarr/raw_chunks.py",
        'if crc == int.from_bytes(behind[:4], "little") else None',
        "",
        "formats/files/test_small_tensors_direct.py",
    ),
    M(
        "small tensors are not compared with the manifest",
        "bridge/checkpoints/ground/checked.py",
        "if crc32c == crc and chunk.sizes",
        "if chunk.sizes",
        "formats/files/test_small_tensors_direct.py",
    ),
    M(
        "pieces beyond the end of a file count as read",
        "bridge/core/formats/reading/source_files.py",
        "whole[index] = stop <= end",
        "whole[index] = True",
        "formats/files/test_small_tensors_direct.py",
    ),
    M(
        "the tail of an archive is not compared with those known",
        "bridge/core/formats/dcp/archives.py",
        " and self.tail.like(tail)):",
        "):",
        "formats/dcp/test_archives.py",
    ),
    M(
        "half of the next header is taken for a checksum",
        "bridge/core/formats/dcp/archives.py",
        ">= high + _DESCRIPTOR_CRC + 4:",
        ">= high:",
        "formats/dcp/test_archives.py",
    ),
    M(
        "loans do not lie as the file that they go to",
        "bridge/core/formats/reading/read_memory.py",
        "buffer[offset % _PAGE :][:nbytes]",
        "buffer[:nbytes]",
        "checkpoints/test_copies.py",
    ),
    M(
        "what does not fit into the memory of small pieces is lost",
        "bridge/core/formats/files/data_file.py",
        "                self._memory[:left] = self._memory[_BYTES : _BYTES + left]\n",
        "",
        "formats/files/test_small_tensors_direct.py",
    ),
    M(
        "a transposed record is taken as it lies",
        "bridge/core/formats/dcp/reader.py",
        "plain and row_major(stored.shape, stored.strides)",
        "plain",
        "formats/dcp/test_reader.py",
    ),
    M(
        "a source is verified whatever is asked for",
        "bridge/checkpoints/convert/plan.py",
        "open_checkpoint(source, verify=options.verify, ",
        "open_checkpoint(source, verify=True, ",
        "checkpoints/test_convert_checked.py",
    ),
    M(
        "distance of signed numbers wraps",
        "bridge/checkpoints",
        "return np.maximum(a, b).view(unsigned) - np.minimum(a, b).view(unsigned)",
        "return np.abs(a - b).view(unsigned)",
        "checkpoints/test_diff_ulp.py",
    ),
    M(
        "missing tensors are no difference",
        "bridge/checkpoints",
        "tuple(name for name in sides.plan.tensors if name not in sides.infos)",
        "()",
        "checkpoints/test_diff.py",
    ),
    M(
        "differing objects are within",
        "bridge/checkpoints",
        "*(self.objects, self.unreadable",
        "*(self.unreadable",
        "checkpoints/test_diff.py",
    ),
    M(
        "files not compared with the manifest",
        "bridge/checkpoints",
        "problems += file_problems(home, manifest)",
        "pass",
        "checkpoints/test_verify.py",
    ),
    M(
        "values not compared with the manifest",
        "bridge/checkpoints",
        "if expected is not None and (crc := object_checksum(value)) != expected:",
        "if (crc := 0) and expected is not None:",
        "checkpoints/test_verify.py",
    ),
]
PLANNING = [
    M(
        "an all-reduce sends once",
        "bridge/planning",
        'return 2 * share if self.kind == "all_reduce" else share',
        "return share",
        "planning/test_cost.py",
    ),
    M(
        "one moment",
        "bridge/planning",
        "return self.moments if self.name in _TWO_MOMENTS else self.moments[:1]",
        "return self.moments[:1]",
        "planning/test_cost.py",
    ),
    M(
        "a lower bound answers yes",
        "bridge/planning/answers/comparison.py",
        "if plan.peak.complete and plan.peak.total <= usable",
        "if plan.peak.total <= usable",
        "planning/test_search.py",
    ),
    M(
        "the first way instead of the cheapest",
        "bridge/planning",
        "key=lambda way: (way.sent, way.peak)",
        "key=lambda way: way.peak",
        "planning/test_search.py",
    ),
    M(
        "columns of Adafactor cut as rows",
        "bridge/planning",
        "columns = piece.numel if shape[-2] == 1 else whole",
        "columns = piece.numel // max(1, piece.rows)",
        "planning/test_optimizers.py",
    ),
    M(
        "reduced once a step",
        "bridge/planning",
        "times = microbatches if axis in",
        "times = 1 if axis in",
        "planning/test_cost.py planning/test_plan_torch.py",
    ),
    M(
        "gathers of inner units forgotten",
        "bridge/planning",
        "times = gathers * microbatches if",
        "times = 2 * microbatches if",
        "planning/test_plan_jax.py",
    ),
    M(
        "gradients of the step forgotten",
        "bridge/planning",
        "output=sum(g.size(g.strategy.optimizer) * g.grad_bytes for g in trained),",
        "output=0,",
        "planning/test_plan_peak.py planning/test_cost.py",
    ),
    M(
        "prefetch planned whatever the policy says",
        "bridge/planning",
        "1 if policy.prefetch is None else policy.prefetch",
        "1",
        "planning/test_cost.py",
    ),
]
PARITY = [
    M(
        "a floor of a million times rounding",
        "bridge/parity/recorded/distance.py",
        "FACTOR = 4.0",
        "FACTOR = 4e6",
        "parity/pair/test_run_file.py",
    ),
    M(
        "a module alone has JAX's outputs of the modules inside",
        "bridge/parity/stages/rerun_module.py",
        "if outputs and not any(",
        "if False and not any(",
        "parity/pair/test_run_file.py",
    ),
    M(
        "gradients of parameters left out",
        "bridge/parity/stages/compare.py",
        "rows += (*backward, *gradients)",
        "rows += backward",
        "parity/pair/test_run_file.py",
    ),
    M(
        "capture drops float64",
        "bridge/parity/recorded/trace.py",
        "_keep_run(side.record(batch, run_dtype)",
        "_keep_run(side.record(batch, dtype)",
        "parity/pair/test_captured.py",
    ),
    M(
        "weights that differ are within rounding",
        "bridge/parity/stages/compare.py",
        "max(0.25 * coarse",
        "max(1e9 * coarse",
        "parity/pair/test_run_file.py",
    ),
    M(
        "the self-test plants nothing",
        "bridge/parity/torch/self_test.py",
        "fault.plant(model)",
        "pass",
        "parity/pair/test_run_file.py parity/pair/test_sensitivity.py",
    ),
    M(
        "another order of rows raises no floor",
        "bridge/parity/stages/backward.py",
        "least.get(name, 0.0),",
        "0.0,",
        "parity/pair/test_order.py",
    ),
    M(
        "a model that depends on the order of rows goes unnamed",
        "bridge/parity/stages/compare.py",
        "if apart > least and",
        "if False and",
        "parity/pair/test_order.py",
    ),
    M(
        "a probe's numbers stay where they were",
        "bridge/parity/recorded/recording.py",
        "np.take(numbers, np.asarray(rows), axes[0]) if axes else numbers",
        "numbers",
        "parity/pair/test_order.py",
    ),
    M(
        "features in the inverse order",
        "bridge/parity/partners/weight_map.py",
        "else tuple(map(int, along))",
        "else tuple(map(int, np.argsort(along)))",
        "parity/pair/test_weight_map.py parity/pair/test_align.py",
    ),
    M(
        "the first update is compared as weights",
        "bridge/parity/stages/compare.py",
        "(ends[side, run_dtype][step][name] - before[side]).astype(",
        "ends[side, run_dtype][step][name].astype(",
        "parity/pair/test_edges.py parity/pair/test_captured.py",
    ),
    M(
        "a difference is status 0",
        "bridge/commands/parity.py",
        "typer.Exit(0 if report.same and (report.complete or not strict) else 1)",
        "typer.Exit(0)",
        "parity/pair/test_run_file.py",
    ),
    M(
        "--strict asks for nothing",
        "bridge/commands/parity.py",
        "(report.complete or not strict)",
        "True",
        "parity/pair/test_run_file.py",
    ),
    M(
        "the band of seeds is a tenth as wide",
        "bridge/parity/curves/band.py",
        "scale = math.sqrt(1 / len(a) + 1 / len(b))",
        "scale = 0.1 * math.sqrt(1 / len(a) + 1 / len(b))",
        "parity/curves/test_band.py",
    ),
    M(
        "noise chooses layouts of few elements",
        "bridge/parity/recorded/align.py",
        "and (exact or torch.size >= _FEW)",
        "",
        "parity/pair/test_align.py",
    ),
    M(
        "convolutions do not decide layouts",
        "bridge/parity/partners/runs.py",
        '== {"Conv"} else ()',
        '== {"None"} else ()',
        "parity/pair/test_align.py parity/pair/test_call_pairs.py",
    ),
    M(
        "gradients of one tensor are not summed",
        "bridge/parity/stages/backward.py",
        "np.add.at(values.reshape(-1), places.target, more.reshape(-1)[places.taken])",
        "pass",
        "parity/pair/test_one_tensor.py",
    ),
    M(
        "numbers in two places are taken for the first",
        "bridge/parity/stages/backward.py",
        "known.reshape(-1)[places.ambiguous] = False",
        "pass",
        "parity/pair/test_one_tensor.py",
    ),
    M(
        "any shared number makes a part",
        "bridge/parity/stages/backward.py",
        "if 2 * int(single.sum()) <= flat.size:",
        "if not single.any():",
        "parity/pair/test_one_tensor.py",
    ),
    M(
        "changed buffers without a partner are not said",
        "bridge/parity/stages/compare.py",
        "and not np.array_equal(before[name]",
        "and np.array_equal(before[name]",
        "parity/pair/test_buffers.py",
    ),
    M(
        "dropped buffers are lost without a partner",
        "bridge/parity/partners/weight_map.py",
        "names - known - set(self.dropped)",
        "names - known",
        "parity/pair/test_buffers.py",
    ),
]

MUTATIONS = [*TORCH, *JAX, *SHARDING, *FORMATS, *MAPPING, *CHECKPOINTS, *PLANNING, *PARITY]


def place(mutation: Mutation, root: Path) -> Path:
    """The file to change. ``LookupError`` where the text is not in exactly one place."""
    where = root / mutation.where
    files = [where] if where.is_file() else sorted(where.rglob("*.py"))
    found = [file for file in files for _ in range(file.read_text().count(mutation.old))]
    if len(found) != 1:
        raise LookupError(f"expected the text in one place, found it in {len(found)}")
    return found[0]


def verdict(mutation: Mutation, root: Path, every: bool) -> str:
    """``red`` with the test that failed first, and passes without the fault; or why not."""
    try:
        file = place(mutation, root)
    except LookupError as error:
        return f"ABSENT ({error})"
    tests = [f"tests/{test}" for test in mutation.tests.split()]
    before = file.read_text()
    file.write_text(before.replace(mutation.old, mutation.new))
    try:
        done = pytest(root, tests, every)
    finally:
        file.write_text(before)
    failed = [
        line.split(" - ")[0] for line in done.stdout.splitlines() if re.match(r"(FAILED|ERROR) .*::", line)
    ]
    if done.returncode != 1 or not failed:
        return "GREEN" if done.returncode == 0 else f"BROKEN: {(done.stdout + done.stderr)[-300:]}"
    first = failed[0].partition(" ")[2]
    return f"red: {first}" if pytest(root, [first], every).returncode == 0 else f"RED ANYWAY: {first}"


def pytest(root: Path, tests: list[str], every: bool) -> subprocess.CompletedProcess[str]:
    marks = ["-m", "slow or not slow", "--hypothesis-profile", "all"] if every else []
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *marks, *tests]
    return subprocess.run(command, cwd=root, env=importing_from(root), capture_output=True, text=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--all", action="store_true")
    given = parser.parse_args()
    chosen = [m for m in MUTATIONS if not given.words or any(word in str(m) for word in given.words)]
    copies: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="mutations-") as scratch:
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        for number in range(given.jobs):
            copy = Path(scratch) / str(number)
            copy.mkdir()
            files = subprocess.run(
                ["tar", "c", "--null", "-T", "-"], cwd=ROOT, input=tracked, capture_output=True, check=True
            )
            subprocess.run(["tar", "x"], cwd=copy, input=files.stdout, check=True)
            copies.put(copy)

        def run(mutation: Mutation) -> str:
            copy = copies.get()
            try:
                return verdict(mutation, copy, given.all)
            finally:
                copies.put(copy)

        verdicts = []
        with ThreadPoolExecutor(given.jobs) as pool:
            for mutation, said in zip(chosen, pool.map(run, chosen), strict=True):
                print(f"{said}\n    {mutation}", flush=True)
                verdicts.append(said)
    red = sum(said.startswith("red") for said in verdicts)
    print(f"{red} of {len(verdicts)} red")
    return int(red < len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
