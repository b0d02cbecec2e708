"""Work that streams of the ``cpu`` device execute: launches, copies, words. Its order is decided elsewhere."""
