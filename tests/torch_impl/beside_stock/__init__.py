"""What programs written for FSDP2 do, run with torch's FSDP2 and with this package: ``python -m`` this, ``[ITEM ...]``.

Each program runs on ranks with different data, is compared with one process that has all ranks' data, and notes facts,
such as gradients, dtypes or an error's first line. It is run once with each engine. Printed is what was found::

     8  the first rank alone holds weights                                                                      SAME
        = without to_empty: distance from rank 0's values           stock  0                     ours  0

``=`` marks facts that are the same, ``~`` those that differ by design, with the reason below, ``!`` all others, which
make the exit status 1. ``table.py`` has all programs, ``tests/support/torch_impl/comparison.py`` the rules.

Most restate PyTorch's own FSDP2 scenarios (``test/distributed/_composable/fsdp``): facts and assertions, no code.

Upstream files, without ``test_fully_shard_``, and what is restated of them here:

| upstream | here | restated |
|---|---|---|
| training | training | inputs of the root; registered parameters after forward and backward; one group, several, |
|  |  | nested, tied; activation checkpointing of three kinds; backward of a unit alone; a unit |
|  |  | called twice; partial forward twice, then backward; prefetching by hand; accumulation, |
|  |  | also of some modules, HSDP and offloaded; 1F1B; unused parameters; a group that is kept |
|  |  | for a loss in parts; own forward methods; shared streams; HSDP; tensor parallelism; one |
|  |  | rank |
| state_dict | state_dict | sharded, offloaded, on two axes, under tensor parallelism; whole, on the first rank; |
|  |  | broadcast, also into the meta device; assigned; DCP; ``torch.save`` of each rank; odd |
|  |  | keys |
| clip_grad_norm_ | clip_grad_norm | norms 1, 2 and infinity, with and without foreach, HSDP, tied weights; |
|  |  | infinite gradients |
| frozen | frozen | frozen in one unit and as whole units, several forwards with inputs that need a gradient, |
|  |  | toggled, counts |
| mixed_precision | mixed_precision | computing and reducing dtypes, accumulation in the reduction's, casts of |
|  |  | inputs and outputs, norms apart, dataclasses, forward derivatives |
| init | init | meshes, which parameters and modules, lists, shared ones, shapes at rest, meta device on one and |
|  |  | two axes, equal replicas, hook of the all-reduce, ``shard_placement_fn``, mixed dtypes, order of |
|  |  | the first forwards |
| autograd | autograd | unused outputs and modules, containers of activations, hooks of gradients, an optimizer |
|  |  | in them |
| comm | comm | counts by resharding, HSDP and microbatches; resharding by hand; divide factors; ``unshard`` |
|  |  | ahead, before any forward, of nothing; unused modules of a list |
| ignore_params | ignore_params | beside DistributedDataParallel, alone, whole modules |
| extensions | extensions | payloads in bfloat16 by resharding and on two axes, class of local parts, methods set |
|  |  | on a tensor |
| state | init | classes, sharding twice, containers, copies |
| several files | offload | places, clipping of microbatches, mixed precision, reference models, frozen |
|  |  | parameters |
| checkpoint/ | loading | ``dcp.async_save`` while training goes on |

Refused here, and so stated by the tests (``torch_impl/fsdp2.py`` is the whole list of differences):

| scenario | why |
|---|---|
| an integer ``reshard_after_forward`` | no program that was read uses it; a mesh of two axes does what it is for |
| ``set_unshard_in_backward(False)``, custom collectives, memory of the process | no program that was read uses them |
| group |  |
| conversion of a sharded module to another dtype | main weights belong to the optimizer; convert before |
| ties across units | FSDP2 lets them fall apart in silence |

Where both accept different things, a scenario states both: whole plain tensors in ``load_state_dict``, 0-d and
transposed parameters, trained parameters of several dtypes, uneven ``Shard(1)``, an inner unit's forward before the
root's (all accepted here only); methods that are set on a local tensor (called by FSDP2 only).

Left out:

| upstream | why |
|---|---|
| comm: foreach_all_gather and foreach_reduce_scatter, order of prefetching; state, init: | private classes and names |
| ``fully_shard.state``, ``_get_fsdp_state``, names of parameter groups; training: |  |
| ``_set_unshard_async_op`` |  |
| comm: a composable ``replicate`` over sharded modules | a private function; ignore_params has |
|  | DistributedDataParallel |
| training: ``set_post_optim_event``; moving to a GPU; memory, overlap, | events, streams and memory of a GPU |
| grad_scaler |  |
| compile | ``tests/torch_impl/runtime/test_compile.py`` |
| logging | words that torch logs of itself |
"""
