"""What streams of the ``cpu`` device execute: launches, copies, words. It decides no order."""
