"""The most bytes that a device holds in a step, as a sum of named terms at the worst moment.

The walk goes through a step's last microbatch segment by segment (see ``activations``), forward and back. At each
segment it adds up the terms below; the moment of the largest sum is the peak. A unit is gathered while one of its
segments runs, and so are the units around it. With prefetch 1, so are the units of the segment that comes next, and the
gradients of the last unit are being reduced; with 0 nothing is there ahead of its use or after it. S_a, R_a, m, c, r, g
are those of ``at_rest`` and ``traffic``::

    term                 while segment i runs
    main weights         m S_o                                          always
    moments              those of ``at_rest``                           always
    compute weights      those of ``at_rest``: kept between steps       always (JAX: p = 0 whole c S_0, 0 < p < o c S_p)
    gathered weights     c S_0 of each unit that runs; prefetch: and    p > 0
                         of each that runs next
    gradients            of units that backward has finished, g S_o;
                         of others those of earlier microbatches:
                         g S_(g) if K > 1
    gradient buffers     gradients that are not reduced yet:
                         raw c P of the unit's parameters so far,
                         from half of them on in its buffer, r S_0;
                         prefetch: and the buffer of the unit
                         before it
    activations          saved of segments before i, or their inputs    recompute
    segment              forward or backward of segment i

After backward comes the update: main weights, moments, all gradients, and kept compute weights. The update is the peak
where activations are small.

JAX differs in these points:

* Gradients are of level g until the last microbatch. With K > 1 a microbatch's gradients lie beside the sums of the
  earlier ones. Where a reduction is left for the end of the step (g < all axes), units then hold their reduced
  gradients, g S_o, beside the unreduced ones: a moment of its own.
* Unreduced gradients have no buffer before they are reduced. Those that are reduced at the end of the step only, g = 0,
  are not in a buffer of the unit before.
* With K = 1 backward frees whole compute weights unit by unit.
* The update is a program of its own. It makes the new main weights unit by unit and holds no compute weights.
* Scanned layers (``stacks``) hold the gradients of all layers from the loop's start, and the activations and whole
  weights of all layers until its end. A layer also holds a slice of its whole weights, and ``no_shard`` a copy of all.

Without prefetch the peak of the decoder was within 8 % of XLA's, and up to 12 % above XLA's for scanned layers with
recomputation (``twinshard plan --compile``). What prefetch adds is what the runtimes permit: two units' weights and two
units' gradients at once. XLA's scheduler may use less of that. On accelerators ``jax_impl`` makes anew in backward what
elementwise operations make of the rest of what a unit saves; the sum counts all of it, and is an upper bound there.

The sum leaves out the allocator's fragmentation, the framework's and the communication library's own buffers, and
constants such as rotary tables. A measurement includes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bridge.planning import peak_jax, peak_torch
from bridge.planning.at_rest import AtRest, keeps_weights
from bridge.planning.model import Model
from bridge.planning.peak_steps import StepUnit, steps_of

TERMS = (
    "main_weights",
    "moments",
    "compute_weights",
    "gathered_weights",
    "gradients",
    "gradient_buffers",
    "activations",
    "segment",
)
ACTIVATIONS = ("activations", "segment")
"""The terms that are of activations."""


@dataclass(frozen=True)
class Peak:
    """``moment``: when it is, in words. ``terms``: bytes by name, see above.

    ``complete``: everything is known; else the sum is a lower bound.
    """

    moment: str
    terms: Mapping[str, int]
    complete: bool

    @property
    def total(self) -> int:
        return sum(self.terms.values())


def step_peak(
    model: Model,
    units: Sequence[StepUnit],
    rest: AtRest,
    runtime: str,
    batch: int,
    length: int,
    microbatches: int,
    prefetch: int,
    staged: int = 0,
) -> Peak:
    """The worst moment of a step of ``microbatches`` of ``batch`` sequences; ``units`` with the root last.

    staged: bytes of moments that the update has on the device beside those at rest, see ``Optimizer.staged``.
    """
    steps = list(steps_of(model, units, batch, length))
    kept = rest.compute_weights.allocated
    if runtime == "jax":
        groups = [group for unit in units for group in unit.groups if keeps_weights(group)]
        kept = sum(group.size(group.strategy.parameters) * group.compute_bytes for group in groups)
    always = {
        "main_weights": rest.main_weights.allocated,
        "moments": rest.moments.allocated,
        "compute_weights": kept,
    }
    moments = (
        peak_jax.moments(steps, units, microbatches, prefetch, kept, staged)
        if runtime == "jax"
        else peak_torch.moments(steps, units, microbatches, prefetch, staged)
    )
    moment, terms = max(moments, key=lambda one: sum({**always, **one[1]}.values()))
    named = {name: {**always, **terms}.get(name, 0) for name in TERMS}
    return Peak(moment, named, bool(model.activations))
