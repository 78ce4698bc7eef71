"""A second layout planner, written from ``bridge/core/sharding/rules.md`` alone: an oracle without a line of the first.

Nothing here imports ``bridge.core.sharding``; ``test_layout_agreement.py`` holds the two planners together.

Why the rules are right:

*Only admissible sizes can work, and all of them do.* Two boundaries inside one tensor are a multiple of S
apart, and each is a multiple of ``unit`` from the tensor's start, so ``unit`` divides S. A tensor with at
most one boundary inside is two runs of whole units, neither longer than S, and the longer run has at least
``half`` elements. Conversely, if ``unit`` divides S, any multiple of ``unit`` is a legal offset. Else one
boundary after the first ``floor(S / unit)`` units leaves at most S elements, because ``half <= S``. Each term
of ``least`` is admissible. If S is, let j be the first kind with ``half <= S``: align and the units of all
kinds before j divide S, so S is at least term j.

*Rule 3 finds the first legal offset.* A tensor that starts at or after p and before b, and does not end by b,
has b inside. If ``unit`` divides S, the next multiple of ``unit`` is the first legal offset. If not, only one
boundary can be inside: c is the first offset a multiple of ``unit`` before b. A tensor that reaches beyond b
+ S from c does so from every later offset before b. From b on it has the next boundary inside, which ``b + S
mod unit`` precedes by a multiple of ``unit``.

*Rule 5 ends.* A grows by M. Once every unit divides S, each kind costs at most one gap before it (with short
last blocks, each tensor). When no block is short, ``N * S < T + N * M + (sum of the distinct units)`` for
every buffer.

*Tiles.* Starts and cuts in tiles, times align, are multiples of align. A cut lies a multiple of ``lcm(unit,
align)`` elements from the start, so between units, or nowhere if the whole tensor is one unit. Conversely, a
start and a boundary on tiles are a multiple of align and of unit apart, so the tiled plan asks no more than
tensors that start on tiles need.

*What alignment costs.* A tensor with ``half > S`` needs ``lcm(unit, align)`` to divide S, so sizes go up in steps of
``align / gcd(unit, align)`` rows instead of one: one row for widths that are multiples of align, align rows for odd
widths.
"""
