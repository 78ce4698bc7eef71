"""What programs written for FSDP2 do, run with torch's FSDP2 and with this package: ``python -m`` this, ``[ITEM ...]``.

Each item is a small program on ranks with different data. It notes facts, such as gradients, dtypes or an error's
first line, and is run once with each engine. Printed is what was found::

     4  an unused parameter of a used unit                                                                      SAME
        AdamW with decay; the second step uses one tower of two.
        = gradient of the unused tower is None            stock  True        ours  True

``=`` marks facts that are the same, ``~`` those that differ by design, with the reason below, ``!`` all others, which
make the exit status 1. ``shown.py`` has the rules.
"""
