"""Gradients of a group, from the hook of a weight to the reduced shard.

The way of a gradient, from backward to the optimizer, goes down file by file, and comes back up
twice: when the unit's backward is done, and when its reduction is.

1. ``autograd``     a hook on a compute weight tells that the weight's gradient is complete
2. ``unit``         ``_collect_gradient``: the unit joins the backward, and decides between reducing and keeping
3. ``gradient``     ``GroupGradient.add_gradient``: the gradient is held, or copied into the group's buffer
4. ``pool``         ``PooledGradient.take``: lends the buffer
   back to ``unit`` ``_complete_call`` or ``end_backward``: the unit frees its weights, then
                    ``GroupGradient.reduce`` completes the buffer with zeros and hands it on
5. ``reduction``    ``GroupReduction.start``: a step for each mesh axis, after the reduction before has been finished
6. ``comm.streams`` ``start``: runs the steps during the computation
7. ``buffer``       ``ShardLevels.reduce``: from one degree of sharding to the next
8. ``comm.collectives``  ``reduce_scatter`` back to ``reduction``  ``GroupReduction.finish``, before
   the next reduction or at the end of the backward: divides
                    the sums, and puts DTensors over them (``dtensor.tensor``) into ``.grad``
"""
