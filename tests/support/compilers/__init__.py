"""Compilers for GPUs and TPUs that are not there: topologies, a compiling process, and a reader of its programs."""
