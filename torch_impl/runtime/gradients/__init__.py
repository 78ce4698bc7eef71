"""Gradients of a group, from the hook of a weight to the reduced shard.

A gradient's path from backward to the optimizer goes down through the following files. It returns
twice: when the unit's backward is done, and when the unit's reduction is done.

1. ``autograd``     a hook on a compute weight signals that the weight's gradient is complete
2. ``unit``         ``_collect_gradient``: the unit joins the backward
   ``unit_backward``  decides between reducing and keeping
3. ``gradient``     ``add_gradient``: the gradient is held, or copied into the group's buffer, which
                    ``GradientBuffer.take`` provides
   back to ``unit`` ``_complete_call`` or ``end_backward``: the unit frees its weights, then
                    ``GroupGradient.reduce`` fills the rest of the buffer with zeros and passes it on
4. ``reduction``    ``start``: one step per mesh axis, after the previous reduction is finished
5. ``comm.streams`` ``start``: runs the steps during the computation
6. ``buffer``       ``ShardLevels.reduce``: from one degree of sharding to the next
7. ``comm.collectives``  ``reduce_scatter``
   back to ``reduction``  ``finish``, before the next reduction or at the end of the backward:
                    divides the sums, and sets ``.grad`` to DTensors over them
"""
