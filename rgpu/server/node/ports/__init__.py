"""The ports that a node serves itself: data and metrics, with a check that they can be reached. They run no verb."""
