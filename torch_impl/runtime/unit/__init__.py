"""The sharded modules: units, their groups of parameters, and what their backwards leave.

Ranks agree on collectives as long as they call the same units in the same order, and equally often
in training mode. Gradients are reduced when those of the unit's inputs are complete that take part
in the backward; or at the end of the backward if none does, or for a unit that was called more than
once or whose outputs are hidden in objects. They are not reduced when the unit's own last gradient
arrives, since ranks may use different parameters of a unit. All groups (one dtype of a unit; with
float8 weights, its matrices or its vectors) with trainable parameters reduce if the backward
reached an output of the unit, whether they got a gradient on this rank or not. Gradients of
parameters that are used outside of their unit must come on all ranks.

Meanwhile the next unit's weights are gathered and the last one's gradients reduced: see
``schedule``.
"""
