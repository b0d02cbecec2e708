"""A gate before a port: which unproven connections it holds, and for how long. It handles no session and no key."""
