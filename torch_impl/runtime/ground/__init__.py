"""Ground of the other rooms of the runtime: buffers, host memory, autograd graphs, precision."""
