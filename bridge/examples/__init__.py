"""Small examples with a planted mistake, which ``--example DIR`` of a command writes.

    files/<command>/     what is copied; README.md there says what to run next, and is printed
    write.py             the one way in which all of them are written
    checkpoints.py       the checkpoints of `convert`, which are made and not shipped

The files of `parity` are read as modules only from the folder that the user named.
"""
