"""A unit's life: flat buffers, gather, reduce, and the schedule that overlaps them.

Note: the five tensors of a group. A unit's parameters of one dtype and trainability form a group
(with a float8 ``gather_dtype`` two, of those that are quantized and the others). For each group a
rank has up to five flat tensors, of which the parameters and gradients that a program sees are
views:

1. The *main weights* are what the optimizer updates and what ``parameters()`` shows at rest: this
   rank's rows, cut as finely as the optimizer state, in float32 or in another dtype by
   ``MixedPrecisionPolicy.main_dtype``; of frozen parameters in the dtype in which they were given.
   With ``CPUOffloadPolicy`` they, and the gradient, lie in the host's
   memory: see ``host_memory``.
2. The *resident shard* exists only where main weights are cut more finely than parameters (HFSDP).
   It holds the rows that this rank keeps of the parameters, in the dtype of forward and backward or
   as float8 payload and scales.
3. The *compute weights* are whole, in the dtype of forward and backward. They are gathered from the
   main weights or the resident shard before a forward or backward, and freed after it where the
   strategy shards parameters. Under no_shard in the main dtype, the compute weights are the main
   weights themselves.
4. The *collected gradient* is whole: what this rank's backward has computed for the compute
   weights, in the dtype of the reduction, or in that of the gradient where several microbatches are
   collected before one reduction.
5. The *gradient* is what the optimizer reads as ``.grad`` of the main weights: the collected
   gradients of all ranks, summed, divided and cut as the main weights are. Between microbatches
   ``.grad`` may hold sums that still wait for a reduction, and then are marked as partial.

Parameters whose class says itself what is gathered have neither flat main weights nor flat compute
weights, and a group of their own; see ``extension``. Their gradients are as those of any other.
"""
