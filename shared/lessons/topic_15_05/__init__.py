"""For the lesson of 15-05: compilations that must not take long, and what the C++ compiler makes."""
