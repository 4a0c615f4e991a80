"""For the lesson of 15-07: the simulated GPU and pictures of its memory."""
