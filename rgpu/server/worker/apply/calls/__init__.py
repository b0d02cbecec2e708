"""What each wire call does to the device: a method named like the call, in a class for each kind of object."""
