"""Rules for the effects that processes write down, and where these are gathered."""
