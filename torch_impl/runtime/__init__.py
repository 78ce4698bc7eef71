"""A unit's life: flat buffers, gather, reduce, and the schedule that overlaps them with computation.

Note: the five tensors of a group. A unit's parameters of one dtype and trainability form a group. (With a float8
``gather_dtype`` they form two groups: the quantized parameters, and the others.) For each group a rank has up to five
flat tensors. The parameters and gradients that a program sees are views of them:

1. The *main weights* are the weights that the optimizer updates and that ``parameters()`` returns
   at rest: this rank's rows, cut as finely as the optimizer state, in float32 or in
   ``MixedPrecisionPolicy.main_dtype``; frozen parameters keep the dtype in which they were given. With
   ``CPUOffloadPolicy`` the main weights and the gradient are stored in the host's memory: see ``host_memory``.
2. The *resident shard* exists only if main weights are cut more finely than parameters (HFSDP).
   It contains the rows of the parameters that this rank keeps, in the dtype of forward and backward
   or as float8 payload and scales.
3. The *compute weights* are whole, in the dtype of forward and backward. They are gathered from the
   main weights or the resident shard before a forward or backward, and freed after it if the strategy shards
   parameters. Under no_shard in the main dtype, the compute weights are the main weights themselves.
4. The *collected gradient* is whole: the gradient of the compute weights from this rank's backward,
   in the dtype of the reduction, or in the dtype of the gradient if several microbatches are
   collected before one reduction.
5. The *gradient* is the ``.grad`` of the main weights that the optimizer reads: the collected
   gradients of all ranks, summed, divided and cut like the main weights. Between microbatches
   ``.grad`` may hold sums that still wait for a reduction. Such sums are marked as partial.

Parameters whose class determines what is gathered have neither flat main weights nor flat compute
weights, and form a separate group; see ``extension``. Their gradients are treated like any other.
"""
