"""Many reads in flight without the GIL, and how fast the disk is."""
