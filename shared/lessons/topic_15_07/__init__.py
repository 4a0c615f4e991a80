"""For the lesson of 15-07: the simulated GPU, pictures of its memory, and what compiles kernels for a real one."""
