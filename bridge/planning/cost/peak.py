"""The most bytes that a device holds in a step, as a sum of named terms at the worst moment.

The walk goes through a step's last microbatch segment by segment (see ``activations``), forward and back. At each
segment it adds up the terms below; the moment of the largest sum is the peak. A unit is gathered while one of its
segments runs, and so are the units around it. With prefetch 1, so are the units of the segment that comes next, and the
gradients of the last unit are being reduced; with 0 nothing is there ahead of its use or after it. S_a, R_a, m, c, r, g
are those of ``at_rest`` and ``traffic`` (in PyTorch gradients have G_a elements)::

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

After backward comes the update: main weights, moments, all gradients, and kept compute weights. The update is the peak
where activations are small.

JAX runs two programs, gradients and update, whose memory XLA assigns ahead. It differs in these points (``peak_jax``):

* A program's outputs, the reduced gradients g S_o, have memory from its start. Where a reduction is left for the end of
  the step (g < all axes), a microbatch's gradients lie besides them, and with K > 1 the sums of the earlier ones. In a
  stack of layers an output that is written at the end lends its memory to a layer's array before.
* A segment's own unreduced gradients take the place of what it has saved, so they do not add to its backward. When the
  last of a unit's segments is done, there is a moment with the gradients by parameter and again in one array.
* Backward gathers a unit's weights for its own segments only, and not for a table of vectors, whose values no gradient
  needs. With K = 1 whole compute weights end with the last backward that reads them.
* The gradient of the output projection is made when the root is reduced: until then the cotangent of the logits waits,
  and the logits, too, where the root's weights are whole. There the loss also has a second array of the logits' size.
* With K > 1 sums are made unit by unit beside the old ones, in a moment of their own.
* The update is a program of its own. It makes the new main weights unit by unit and holds no compute weights.
* Weights that are gathered as float8 are payload and scales during the step, p = o included: (1 + 1/32) S_p. While they
  are used, the parameters in the compute dtype lie beside what was gathered; what waits for its use is bytes alone.
* Scanned layers (``stacks``) hold the gradients of all layers from before the loop, and the activations and whole
  weights of all layers until its end. The layer that runs has slices of these, and ``no_shard`` a copy of all weights.
  Constants of forward, such as a mask and the number that stands for what is not seen, are arrays beside a loop, and so
  are those of backward where weights are whole.
* A recomputed layer's forward holds three arrays of its largest size: of scores, exponentials and quotients each is
  made of the one before, and XLA finds three places for such a chain.

Without prefetch the peak was within -5 and +8 % of XLA's for the decoder and within -8 and +7 % for ``CausalLM`` as
Llama, at lengths of 64 to 8192, with 1 and 4 microbatches, with and without recomputation, scanned and not, under three
strategies (``tests/bench/bench_plan_peak.py``). For recomputed layers of Gemma 2, whose scores are capped, the peak was
up to 17 % above XLA's. Of PyTorch's measured peaks the planned ones of Hugging Face's Llama were within 3 %, but 8 %
below at 64 tokens, where gloo's own buffers weigh most. Those of the decoder were within 3 % at 64 and 512 tokens, and
8 to 21 % below at 2048, where PyTorch's products allocate arrays of scores that a trace does not show.

What prefetch adds is what the runtimes permit: two units' weights and two units' gradients at once. XLA's scheduler may
use less of that. On accelerators ``jax_impl`` makes anew in backward what elementwise operations make of the rest of
what a unit saves; the sum counts all of it, and is an upper bound there.

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
    """The worst moment of ``microbatches`` times ``steps``, those of ``units``, which have the root last.

    staged: bytes of moments that the update has on the device besides those at rest, see ``moments.staged``. complete:
    whether everything that is in memory is known.
    """
    kept = rest.compute_weights.allocated
    if runtime == "jax":
        groups = [group for unit in units for group in unit.groups if peak_jax.holds_apart(group)]
        kept = sum(group.gather_bytes(group.strategy.parameters) for group in groups)
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
    moment, terms = max(moments, key=lambda candidate: sum({**always, **candidate[1]}.values()))
    named = {name: {**always, **terms}.get(name, 0) for name in TERMS}
    return Peak(moment, named, complete)
