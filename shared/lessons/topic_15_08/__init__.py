"""For the lesson of 15-08: the messages that ranks send."""
