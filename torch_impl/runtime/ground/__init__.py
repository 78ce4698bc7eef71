"""The foundation of the runtime's other packages: buffers, host memory, autograd graphs, precision."""
