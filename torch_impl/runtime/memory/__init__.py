"""Memory of whole weights, and of gradients, that units of equal size share one after the other.

The pool records when buffers are in use. When a step's record repeats, the pool plans slots. From the next change of
the main weights on, compute weights are stored in their slots. A program may deviate from the plan at any time:

* A slot that is in use is not taken. Weights that are gathered ahead wait *aside*, in separate
  memory. When their unit runs, the weights in the slot are moved aside instead, unless a forward is reading them.
* Weights move to other memory only with changed values, or if a forward is reading their slot. Both
  invalidate the graphs that saved the old weights.

Autograd keeps views of compute weights. Between forward and backward these views have no memory, or show another unit's
weights. Whatever the plan, no backward computes with such views: when weights are freed or lose their slot, their
version counters advance, and the old versions return with the contents. Until then autograd refuses the saved views.
Every known entry into a unit, forward or backward, restores the unit's contents before it computes.
"""
