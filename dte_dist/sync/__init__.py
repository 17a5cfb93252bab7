"""One sync and what stays between syncs: `sync.protocol` is where reading starts."""
