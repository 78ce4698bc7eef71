"""The pool that lends memory to whole weights and gradients."""
