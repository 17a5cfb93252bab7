"""The version chain: what a source sends next, what a receiver accepts, how all ranks come to one decision."""
