"""Which elements changed: live bits against the snapshot of what the receivers hold."""
