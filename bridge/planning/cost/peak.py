"""The most bytes that a device holds in a step, as a sum of named terms at the worst moment.

The walk goes through a step's last microbatch segment by segment (see ``activations``), forward and back. At each
segment it adds up the terms below; the moment of the largest sum is the peak. A unit is gathered while one of its
segments runs, and so are the enclosing units. With prefetch 1, the units of the next segment are gathered, too, and
the gradients of the last unit are being reduced; with 0, nothing exists before or after its use. S_a, R_a, m, c, r, g
are defined in ``at_rest`` and ``traffic`` (in PyTorch gradients have G_a elements)::

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
                         its buffer r S_0 in the place of weights that
                         are freed, else above half of them;
                         prefetch: and the buffer of the unit
                         before it
    activations          saved of segments before i, or their inputs    recompute
    segment              forward or backward of segment i

The update follows backward: main weights, moments, all gradients, and kept compute weights. The update is the peak
if activations are small.

JAX runs two programs, gradients and update, whose memory XLA assigns in advance. JAX differs as follows (``peak_jax``):

* A program's outputs, the reduced gradients g S_o, have memory from its start. If a reduction is left for the end of
  the step (g < all axes), a microbatch's gradients exist in addition, and with K > 1 the sums of the earlier ones. In a
  stack of layers, an output that is written at the end lends its memory to a layer's array before.
* A segment's own unreduced gradients take the place of what it saved, so they do not add to its backward. When the
  last of a unit's segments is done, there is a moment with the gradients by parameter and again in one array.
* Backward gathers a unit's weights only for the unit's own segments, and not for a table of vectors, whose values no
  gradient needs. With K = 1, whole compute weights end with the last backward that reads them.
* The gradient of the output projection is made when the root is reduced: until then the cotangent of the logits waits,
  and so do the logits if the root's weights are whole. In this case the loss has a second array of the logits' size.
* With K > 1, sums are made unit by unit next to the old ones, in a separate moment.
* The update is a separate program. It makes the new main weights unit by unit and holds no compute weights.
* Weights that are gathered as float8 are payload and scales during the step, even if p = o: (1 + 1/32) S_p. During
  their use, the parameters in the compute dtype exist next to the gathered bytes; while they wait, only the bytes do.
* Scanned layers (``stacks``) hold the gradients of all layers from before the loop, and the activations and whole
  weights of all layers until its end. The running layer has slices of these, and ``no_shard`` a copy of all weights.
  Constants of forward, such as a mask and the number that replaces masked scores, are arrays next to a loop, and so
  are the constants of backward if weights are whole.
* A recomputed layer's forward holds three arrays of its largest size: scores, exponentials and quotients are each made
  from the one before, and XLA reserves three places for such a chain.

``docs/measured/memory.md`` compares planned peaks with measured ones.

The plan for prefetch is what the runtimes permit: two units' weights and two units' gradients at once. XLA's scheduler
may use less. On accelerators, ``jax_impl`` recomputes in backward the saved values that elementwise operations make
from other saved values; the sum counts all saved values, and is an upper bound there.

The sum leaves out the allocator's fragmentation, the framework's and the communication library's own buffers, and
constants such as rotary tables. A measurement includes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bridge.planning.cost import peak_jax, peak_torch
from bridge.planning.cost.at_rest import AtRest
from bridge.planning.cost.peak_steps import Step, StepUnit

TERMS = (
    "main_weights", "moments", "compute_weights", "gathered_weights", "gradients", "gradient_buffers",
    "activations", "segment",
)  # fmt: skip
ACTIVATIONS = ("activations", "segment")
"""The terms for activations."""


@dataclass(frozen=True)
class Peak:
    """``moment``: the moment of the peak, in words. ``terms``: bytes by name, see above.

    ``complete``: everything is known; otherwise the sum is a lower bound.
    """

    moment: str
    terms: Mapping[str, int]
    complete: bool

    @property
    def total(self) -> int:
        return sum(self.terms.values())


def step_peak(
    steps: Sequence[Step],
    units: Sequence[StepUnit],
    rest: AtRest,
    runtime: str,
    microbatches: int,
    prefetch: int,
    staged: int,
    *,
    complete: bool,
) -> Peak:
    """The worst moment of ``microbatches`` times ``steps``, the steps of ``units``, with the root last.

    staged: bytes of moments that the update has on the device in addition to the moments at rest, see
    ``moments.staged``. complete: whether everything in memory is known.
    """
    if runtime == "jax":
        groups = [group for unit in units for group in unit.groups if peak_jax.holds_apart(group)]
        kept = sum(group.gather_bytes(group.strategy.parameters) for group in groups)
        moments = peak_jax.moments(steps, units, microbatches, prefetch, kept, staged)
    else:
        kept = rest.compute_weights.allocated
        moments = peak_torch.moments(steps, units, microbatches, prefetch, staged)
    always = {
        "main_weights": rest.main_weights.allocated,
        "moments": rest.moments.allocated,
        "compute_weights": kept,
    }
    moment, terms = max(moments, key=lambda candidate: sum({**always, **candidate[1]}.values()))
    named = {name: {**always, **terms}.get(name, 0) for name in TERMS}
    return Peak(moment, named, complete)
