"""The agent's end of the shim link, programs that load the shim, fat binaries."""
