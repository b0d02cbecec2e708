"""Which functions calls reach: named ones, and through pointers those whose address is taken with that prototype."""
