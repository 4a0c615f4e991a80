"""For the lesson of 15-09: what the doctor needs besides its checks, and the sums over a recorded step."""
