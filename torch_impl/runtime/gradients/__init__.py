"""Gradients of a group, from the hook of a weight to the reduced shard.

The way of a gradient, from backward to the optimizer, goes down file by file, and comes back up
twice: when the unit's backward is done, and when its reduction is.

1. ``autograd``     a hook on a compute weight tells that the weight's gradient is complete
2. ``unit``         ``_collect_gradient``: the unit joins the backward
   ``unit_backward``  decides between reducing and keeping
3. ``gradient``     ``add_gradient``: the gradient is held, or copied into the group's buffer, which
                    ``GradientBuffer.take`` lends
   back to ``unit`` ``_complete_call`` or ``end_backward``: the unit frees its weights, then
                    ``GroupGradient.reduce`` completes the buffer with zeros and hands it on
4. ``reduction``    ``start``: a step for each mesh axis, after the reduction before is finished
5. ``comm.streams`` ``start``: runs the steps during the computation
6. ``buffer``       ``ShardLevels.reduce``: from one degree of sharding to the next
7. ``comm.collectives``  ``reduce_scatter``
   back to ``reduction``  ``finish``, before the next reduction or at the end of the backward:
                    divides the sums, and puts DTensors over them into ``.grad``
"""
