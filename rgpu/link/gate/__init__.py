"""A port before anybody is known: who may stand before it, and for how long. It knows no session and no key."""
