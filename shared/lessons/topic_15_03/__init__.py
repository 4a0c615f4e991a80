"""For the lesson of 15-03: what became of each key of a checkpoint."""
