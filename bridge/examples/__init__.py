"""Small examples with a planted mistake, which ``--example DIR`` of a command writes: ``files/<command>`` is copied."""
