"""Tools for finding out what is wrong: layouts, norms, values that are not finite, collectives, memory."""
