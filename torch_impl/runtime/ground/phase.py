"""The phases of a unit's life, and the events that lead from one phase to another.

    phase        modules show      the compute weights are needed by
    REST         main weights      nobody; some options and strategies keep them anyway
    UNSHARDED    compute weights   the program, which called ``unshard``
    KEPT         both              the program after a forward without resharding, and the backward of that forward
    FORWARD      compute weights   a running forward
    RECOMPUTE    compute weights   a forward that runs again inside a backward, with gradients
    RECOMPUTED   compute weights   the backward of that forward, which comes next
    BACKWARD     compute weights   a running backward

KEPT shows compute weights as attributes of modules, and main weights in ``parameters()``.

No order is required: a unit may run forward several times before its backward, run backward twice,
never run, run forward inside its own backward, or be left unfinished by an exception. ``TABLE``
has the legal transitions of each event.
"""

from __future__ import annotations

import re
from enum import Enum, auto


class Phase(Enum):
    """The purpose of a unit's compute weights."""

    REST = auto()
    UNSHARDED = auto()
    KEPT = auto()
    FORWARD = auto()
    RECOMPUTE = auto()
    RECOMPUTED = auto()
    BACKWARD = auto()


class Event(Enum):
    """The events in a unit's life."""

    UNSHARD = auto()
    RESHARD = auto()
    STATE_DICT = auto()
    FORWARD_BEGINS = auto()
    RECOMPUTE_BEGINS = auto()
    FORWARD_ENDS = auto()
    FORWARD_RAISES = auto()
    JOINS_BACKWARD = auto()
    BACKWARD_BEGINS = auto()
    INPUTS_DONE = auto()
    BACKWARD_ENDS = auto()
    NOT_FOLLOWED = auto()
    PASS_ENDS = auto()
    ABANDON = auto()


# The table lacks transitions that would free weights under a reader, or leave weights that nobody frees. "same" means
# that the phase does not change. Begins are legal in any phase, since no order is required; ends only after something
# has begun. While a forward of the module runs, every other event must leave it its weights.
TABLE = """
    event              from                                         to          when
    UNSHARD            REST, UNSHARDED, KEPT                        UNSHARDED   called by the program
    UNSHARD            REST                                         BACKWARD    a backward of the unit has not ended
    UNSHARD            FORWARD, RECOMPUTE, RECOMPUTED, BACKWARD     same        the weights are already gathered
    RESHARD            REST, UNSHARDED, KEPT, RECOMPUTED, BACKWARD  REST        called by the program
    RESHARD            FORWARD, RECOMPUTE                           same        the forward continues at its own risk
    STATE_DICT         REST, UNSHARDED, KEPT, BACKWARD              REST        state dicts show main weights
    STATE_DICT         FORWARD, RECOMPUTE, RECOMPUTED               same        the compute weights are still needed
    FORWARD_BEGINS     any                                          FORWARD     also in a backward, without gradients
    RECOMPUTE_BEGINS   any                                          RECOMPUTE   in a backward, with gradients
    FORWARD_ENDS       FORWARD, RECOMPUTE                           same        an outer call of the module continues
    FORWARD_ENDS       FORWARD                                      REST        the last open call
    FORWARD_ENDS       FORWARD                                      KEPT        the last open call, without resharding
    FORWARD_ENDS       RECOMPUTE                                    RECOMPUTED  the last open call
    FORWARD_ENDS       FORWARD, RECOMPUTE                           BACKWARD    a backward of the unit has not ended
    FORWARD_RAISES     FORWARD, RECOMPUTE                           FORWARD     an outer call of the module continues
    FORWARD_RAISES     any but REST                                 REST        the last open call
    FORWARD_RAISES     FORWARD, RECOMPUTE, BACKWARD                 BACKWARD    a backward of the unit has not ended
    JOINS_BACKWARD     UNSHARDED, RECOMPUTED, BACKWARD              BACKWARD    the first sign of a backward
    JOINS_BACKWARD     REST, KEPT, FORWARD, RECOMPUTE               same        gradients alone need no weights
    BACKWARD_BEGINS    REST, UNSHARDED, KEPT, RECOMPUTED, BACKWARD  BACKWARD    gradients reach an output
    BACKWARD_BEGINS    FORWARD, RECOMPUTE                           same        a forward runs a backward inside
    INPUTS_DONE        REST, BACKWARD                               REST        the inputs have their gradients
    INPUTS_DONE        FORWARD, RECOMPUTE                           same        a forward reads the weights
    BACKWARD_ENDS      REST, UNSHARDED, RECOMPUTED, BACKWARD        REST        the last backward of the unit
    BACKWARD_ENDS      KEPT                                         same        gradients came, but to no output
    BACKWARD_ENDS      FORWARD, RECOMPUTE                           same        a forward reads the weights
    NOT_FOLLOWED       RECOMPUTED                                   REST        all backwards ended without this unit
    PASS_ENDS          KEPT                                         REST        all backwards ended, without this unit
    ABANDON            REST, UNSHARDED, KEPT, RECOMPUTED, BACKWARD  REST        a backward raised
    ABANDON            FORWARD, RECOMPUTE                           same        a forward reads the weights
"""
# Pairs of the phases before and after.
Transitions = frozenset[tuple[Phase, Phase]]


def transitions_of(row: str) -> tuple[Event, Transitions]:
    """A row of ``TABLE``: its event, and the transitions that it allows."""
    event, before, after, _ = re.split(" {2,}", row.strip())
    left_out = before.removeprefix("any but ")
    phases = (
        [phase for phase in Phase if phase.name != left_out]
        if before.startswith("any")
        else [Phase[name] for name in before.split(", ")]
    )
    return Event[event], frozenset((phase, phase if after == "same" else Phase[after]) for phase in phases)


LEGAL: dict[Event, Transitions] = dict.fromkeys(Event, frozenset())
for _event, _allowed in map(transitions_of, TABLE.strip().splitlines()[1:]):
    LEGAL[_event] |= _allowed


# Phases in which a program may read compute weights without a call of the runtime.
READS_WEIGHTS = frozenset({Phase.UNSHARDED, Phase.KEPT, Phase.FORWARD, Phase.RECOMPUTE})


def refuse_transition(event: Event, before: Phase, after: Phase) -> None:
    """RuntimeError for a transition that is not in the table."""
    raise RuntimeError(
        f"a sharded unit went from {before.name} to {after.name} on {event.name}, which is not a "
        "legal transition: see the table in torch_impl.runtime.ground.phase; this is a bug in "
        "torch_impl, please report the order of calls that led to it"
    )
