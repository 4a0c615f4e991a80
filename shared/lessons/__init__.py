"""What serves the lesson of one topic alone, by topic."""
