"""A disk that loses power: what a program did to files, and every state that a crash may leave."""
