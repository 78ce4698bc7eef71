"""Memory of whole weights, and of gradients, that units of one size use in turn.

The pool records when buffers are in use. When the record of a step comes again, the pool plans
slots. From the next change of the main weights on, compute weights lie in their slots. A program
may depart from the plan at any time:

* A slot that is in use is not taken. Weights that are gathered ahead wait *aside*, in memory of
  their own. When their unit runs, the weights in the slot are moved aside instead, unless a forward
  is reading those.
* Weights move to another place only with changed values, or where a forward is reading their slot.
  Both void the graphs that saved the old ones.

Autograd keeps views of compute weights, which have no memory between forward and backward, or show
another unit's weights. That no backward computes with these does not rest on the plan. When weights
are freed or lose their slot, their versions advance, and come back with the contents. Until then
autograd refuses the saved views. Every known entry into a unit, forward or backward, brings the
unit's contents back before it computes.
"""
