"""For the lesson of 15-04: random views of images."""
