"""For the lesson of 15-10: runs that are logged, killed and measured."""
