"""`DeltaEngine` and `DeltaTracker`: named tensors pushed and pulled as versions over any transport."""
