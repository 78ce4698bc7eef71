"""What the other rooms of the runtime stand on: buffers, host memory, autograd graphs, precision."""
