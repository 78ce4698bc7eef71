"""Why two modules differ: known causes, tried one by one."""
