"""The effect of each wire call on the device: a method named like the call, in a class for each kind of object."""
