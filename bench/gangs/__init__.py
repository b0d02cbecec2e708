"""Jobs of several processes: what they cost remotely, and what a moved or lost member costs them."""
