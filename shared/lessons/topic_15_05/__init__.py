"""For the lesson of 15-05: what prints its tapes, tables and refusals, and what the C++ compiler makes."""
