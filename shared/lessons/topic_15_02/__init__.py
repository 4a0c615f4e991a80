"""For the lesson of 15-02: a storage server for data that comes over a network."""
