"""The registry's records and every decision about them as pure functions: no sockets, no asyncio, no device."""
