"""For the lesson of 15-06: what a call in a graph does besides giving a value."""
