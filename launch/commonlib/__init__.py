"""What the demo and the bench share: settings, console, model and trainer, dense broadcast, plots."""
