"""The ports of a node, as far as it serves them itself: data, scrapes, and its own look at them. They run no verb."""
