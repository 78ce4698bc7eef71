"""The sharded modules: units, their groups of parameters, and the gradients of their backwards.

Ranks agree on collectives as long as they call the same units in the same order, and equally often in training mode. A
unit's gradients are reduced when the gradients of all its inputs that take part in the backward are complete. They are
reduced at the end of the backward if no input takes part, if the unit was called more than once, or if its outputs are
hidden in objects. They are not reduced when the unit's own last gradient arrives, since ranks may use different
parameters of a unit. All groups (one dtype of a unit; with float8 weights, its matrices or its vectors) with trainable
parameters reduce if the backward reached an output of the unit, whether they got a gradient on this rank or not.
Gradients of parameters that are used outside their unit must come on all ranks.

Meanwhile the next unit's weights are gathered and the previous unit's gradients reduced: see ``schedule``.
"""
