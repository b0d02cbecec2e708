"""The routing `libcuda.so.1`: for programs whose devices are of several members of a gang, on several hosts.

It loads one copy of the driver library (rgpu/client/shim) for each member, gives each call to the copy that it
concerns, and orders and copies between members. It knows nothing of agents, journals and messages.
"""
