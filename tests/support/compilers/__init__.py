"""Compilers for GPUs and TPUs that are not there: topologies, a process that compiles, and a reader of its programs."""
