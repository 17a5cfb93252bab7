"""How ranks come together, wait for each other, and learn that one of them will not come."""
